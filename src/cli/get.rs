//! `bulkhead get`.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use bulkhead::client::{AnyClient, ClientError, Info};
use bulkhead::config::ByteSize;
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
  bulkhead get model --range 1GiB..1028MiB -o layer --server rpc+iwarp://10.0.0.7:20049

A file appears under its name only when the value is complete. To stdout the value streams, so there a failure \
shows in the exit code alone.";

/// Fetch a value into a file or to stdout
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Key of the value, 1 to 250 octets; over RPC 1 to 1,024
    key: OsString,
    /// Where to write the value; `-` is stdout
    #[arg(short, long, value_name = "FILE", default_value = "-")]
    output: PathBuf,
    /// Only these octets: START..END without END, START.., or ..END; as far as the value has them. Over RPC
    #[arg(long, value_name = "RANGE")]
    range: Option<OctetRange>,
    /// No progress bar
    #[arg(short, long)]
    quiet: bool,
    #[command(flatten)]
    server: ServerArgs,
}

/// `START..END`, where either may be left out.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct OctetRange {
    start: u64,
    end: u64,
}

impl FromStr for OctetRange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let place = |text: &str, without: u64| match text {
            "" => Ok(without),
            text => text.parse::<ByteSize>().map(|size| size.0),
        };
        let (start, end) = text.split_once("..").ok_or_else(|| format!("`{text}` is no START..END"))?;
        let (start, end) = (place(start, 0)?, place(end, u64::MAX)?);
        if start > end { Err(format!("`{text}` ends before it begins")) } else { Ok(Self { start, end }) }
    }
}

impl OctetRange {
    /// Octets of it that a value of `len` octets has.
    fn len_in(self, len: u64) -> u64 {
        self.end.min(len).saturating_sub(self.start)
    }
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
    let key = key_octets(&args.key);
    let range = args.range.unwrap_or(OctetRange { start: 0, end: u64::MAX });
    // Nothing is made before the server has the value, so a miss leaves no trace.
    let open = |info: &Info| {
        Ok(Counted { sink: Sink::open(&args.output)?, bar: progress::bar(range.len_in(info.len), args.quiet) })
    };
    let fetched = match (&mut client, args.range) {
        (client, None) => client.get_with(key, open),
        (AnyClient::Rpc(client), Some(range)) => client.get_range_with(key, range.start..range.end, open),
        (client, Some(_)) => {
            let what = "has values as a whole alone: name an RPC door, --server rpc+iwarp://HOST:PORT";
            return Err(Failure::new(Exit::Usage, format!("{} {what}", client.url())));
        }
    };
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_two_places_of_which_either_may_be_left_out() {
        for (text, start, end) in [
            ("0..0", 0, 0),
            ("1..4097", 1, 4097),
            ("..100", 0, 100),
            ("1MiB..", 1 << 20, u64::MAX),
            ("..", 0, u64::MAX),
            ("2KiB..1MiB", 2 << 10, 1 << 20),
        ] {
            assert_eq!(text.parse(), Ok(OctetRange { start, end }), "{text}");
        }
        for text in ["", "5", "2..1", "-1..2", "a..b", "1...2"] {
            assert!(text.parse::<OctetRange>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_range_has_no_more_octets_than_the_value_has_there() {
        let len_in = |text: &str, len| text.parse::<OctetRange>().unwrap().len_in(len);
        assert_eq!([len_in("..", 7), len_in("2..5", 7), len_in("2..50", 7), len_in("7..", 7)], [7, 3, 5, 0]);
        assert_eq!((len_in("8..9", 7), len_in("3..3", 7)), (0, 0));
    }
}
