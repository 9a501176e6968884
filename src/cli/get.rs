//! `bulkhead get`.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use bulkhead::client::ClientError;
use bulkhead::error::Exit;
use indicatif::ProgressBar;

use super::part_file::PartFile;
use super::server::ServerArgs;
use super::{Failure, key_octets, miss, progress};

const EXAMPLES: &str = "\
Examples:
  bulkhead get films/intro -o intro.mp4
  bulkhead get dir.tar | tar x
  bulkhead get k --server memcache://10.0.0.7:11211 > copy

A file appears under its name only when the value is complete. To stdout the value streams, so there a failure \
shows in the exit code alone.";

/// Fetch a value into a file or to stdout
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Key of the value, 1 to 250 octets
    key: OsString,
    /// Where to write the value; `-` is stdout
    #[arg(short, long, value_name = "FILE", default_value = "-")]
    output: PathBuf,
    /// No progress bar
    #[arg(short, long)]
    quiet: bool,
    #[command(flatten)]
    server: ServerArgs,
}

/// Where a value goes.
enum Sink {
    Part(PartFile),
    /// Stdout, a pipe or a device: written as it comes.
    Direct(File),
}

impl Sink {
    fn open(output: &Path) -> io::Result<Self> {
        if output == Path::new("-") {
            // Not std's handle, which looks for line ends in every octet.
            return Ok(Self::Direct(File::from(io::stdout().as_fd().try_clone_to_owned()?)));
        }
        match output.metadata() {
            Ok(there) if there.is_dir() => Err(io::ErrorKind::IsADirectory.into()),
            // A rename would put a plain file in the place of a device.
            Ok(there) if !there.is_file() => OpenOptions::new().write(true).open(output).map(Self::Direct),
            _ => PartFile::create(output).map(Self::Part),
        }
    }

    fn finish(self) -> io::Result<()> {
        match self {
            Self::Part(part) => part.finish(),
            Self::Direct(_) => Ok(()),
        }
    }
}

struct Counted {
    sink: Sink,
    bar: ProgressBar,
}

impl Write for Counted {
    fn write(&mut self, octets: &[u8]) -> io::Result<usize> {
        let count = match &mut self.sink {
            Sink::Part(part) => part.write(octets),
            Sink::Direct(file) => file.write(octets),
        }?;
        self.bar.inc(count as u64);
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

pub fn run(args: Args) -> Result<Exit, Failure> {
    let mut client = args.server.connect()?;
    // Nothing is made before the server has the value, so a miss leaves no trace.
    let fetched = client.get_with(key_octets(&args.key), |info| {
        Ok(Counted { sink: Sink::open(&args.output)?, bar: progress::bar(info.len, args.quiet) })
    });
    let output = if args.output.as_os_str() == "-" { "stdout".into() } else { args.output.display().to_string() };
    let local = |err: &io::Error| Failure::new(Exit::Refused, format!("cannot write {output}: {err}"));
    let fetched = fetched.map_err(|err| match err {
        ClientError::Local { source } => local(&source),
        err => err.into(),
    })?;
    let (_, counted) = fetched.ok_or_else(|| miss(&args.key))?;
    counted.bar.finish_and_clear();
    counted.sink.finish().map_err(|err| local(&err))?;
    Ok(Exit::Done)
}
