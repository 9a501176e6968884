//! `bulkhead put`.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read, Seek};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bulkhead::client::ClientError;
use bulkhead::config::{ByteSize, TimeSpan};
use bulkhead::error::Exit;

use super::server::ServerArgs;
use super::{Failure, key_octets, progress};

const EXAMPLES: &str = "\
Examples:
  bulkhead put films/intro intro.mp4 --ttl 7d
  tar c dir | bulkhead put dir.tar -              spooled first: the length must be known
  cat disk.img | bulkhead put img - --size 4GiB   streamed: exactly this many octets must come

Stdin is spooled to a nameless file in $TMPDIR, else /var/tmp.";

/// Store a file, or what stdin delivers
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Key of the value, 1 to 250 octets; over RPC 1 to 1,024
    key: OsString,
    /// File to store; `-` is stdin
    file: PathBuf,
    /// Length of what stdin or a pipe delivers: it is streamed instead of spooled
    #[arg(long, value_name = "SIZE")]
    size: Option<ByteSize>,
    /// How long the value lives: seconds, or a time with a unit [default: for ever]
    #[arg(long, value_name = "TIME", value_parser = parse_ttl)]
    ttl: Option<Duration>,
    /// A number kept with the value
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    flags: u32,
    /// No progress bar
    #[arg(short, long)]
    quiet: bool,
    #[command(flatten)]
    server: ServerArgs,
}

fn parse_ttl(text: &str) -> Result<Duration, String> {
    let ttl = match text.parse() {
        Ok(seconds) => Duration::from_secs(seconds),
        Err(_) => text.parse::<TimeSpan>()?.0,
    };
    if ttl.is_zero() { Err("a value that lives for no time cannot be stored".to_owned()) } else { Ok(ttl) }
}

fn name(file: &Path) -> std::path::Display<'_> {
    if file == Path::new("-") { Path::new("stdin").display() } else { file.display() }
}

/// Reads exactly as much as was announced. Whether more follows is found out before the last octets are given away, so
/// a value that is too long is never stored cut off.
struct Exactly<R> {
    from: R,
    len: u64,
    remaining: u64,
}

impl<R: Read> Read for Exactly<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let room = into.len().min(usize::try_from(self.remaining).unwrap_or(usize::MAX));
        let count = self.from.read(&mut into[..room])?;
        self.remaining -= count as u64;
        if self.remaining == 0 && room > 0 {
            refuse_more(&mut self.from, self.len)?;
        }
        Ok(count)
    }
}

fn refuse_more(from: &mut impl Read, len: u64) -> io::Result<()> {
    loop {
        match from.read(&mut [0]) {
            Ok(0) => return Ok(()),
            Ok(_) => return Err(io::Error::new(ErrorKind::InvalidData, format!("more than {len} octets came"))),
            Err(err) if err.kind() == ErrorKind::Interrupted => {}
            Err(err) => return Err(err),
        }
    }
}

enum Source {
    /// Length known from the file itself.
    File(File, u64),
    Announced(Exactly<File>),
}

impl Source {
    fn open(file: &Path, size: Option<ByteSize>) -> Result<Self, Failure> {
        let unusable = |err: io::Error| Failure::new(Exit::Usage, format!("cannot read {}: {err}", name(file)));
        let opened = if file == Path::new("-") {
            io::stdin().as_fd().try_clone_to_owned().map(File::from)
        } else {
            File::open(file)
        };
        let mut opened = opened.map_err(unusable)?;
        let metadata = opened.metadata().map_err(unusable)?;
        if metadata.is_dir() {
            return Err(unusable(ErrorKind::IsADirectory.into()));
        }
        if let Some(ByteSize(len)) = size {
            let mut source = Exactly { from: opened, len, remaining: len };
            if len == 0 {
                refuse_more(&mut source.from, 0).map_err(unusable)?;
            }
            return Ok(Self::Announced(source));
        }
        if metadata.is_file() {
            // Stdin may stand somewhere inside its file.
            let position = opened.stream_position().map_err(unusable)?;
            return Ok(Self::File(opened, metadata.len().saturating_sub(position)));
        }
        let spooled = spool(&mut opened);
        let (spool, len) = spooled.map_err(|err| {
            Failure::new(Exit::Refused, format!("cannot spool {} in {}: {err}", name(file), spool_dir().display()))
        })?;
        Ok(Self::File(spool, len))
    }

    fn len(&self) -> u64 {
        match self {
            Self::File(_, len) => *len,
            Self::Announced(exactly) => exactly.len,
        }
    }
}

impl Read for Source {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::File(file, _) => file.read(into),
            Self::Announced(exactly) => exactly.read(into),
        }
    }
}

/// `$TMPDIR`, else /var/tmp: /tmp is often RAM, and what is spooled is large.
fn spool_dir() -> PathBuf {
    std::env::var_os("TMPDIR").filter(|dir| !dir.is_empty()).map_or_else(|| PathBuf::from("/var/tmp"), PathBuf::from)
}

/// Copies `from` into a file without a name, which no crash can leave behind, and gives its length.
fn spool(from: &mut File) -> io::Result<(File, u64)> {
    let dir = spool_dir();
    let nameless = OpenOptions::new().read(true).write(true).custom_flags(libc::O_TMPFILE).mode(0o600).open(&dir);
    let mut spool = match nameless {
        Err(err) if err.raw_os_error() == Some(libc::EOPNOTSUPP) || err.kind() == ErrorKind::IsADirectory => {
            let named = dir.join(format!("bulkhead-spool-{}", std::process::id()));
            let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&named)?;
            std::fs::remove_file(&named)?;
            file
        }
        nameless => nameless?,
    };
    let len = io::copy(from, &mut spool)?;
    spool.rewind()?;
    Ok((spool, len))
}

pub fn run(args: Args) -> Result<Exit, Failure> {
    let source = Source::open(&args.file, args.size)?;
    let len = source.len();
    let mut client = args.server.connect()?;
    let bar = progress::bar(len, args.quiet);
    let mut source = bar.wrap_read(source);
    let stored = client.put(key_octets(&args.key), &mut source, len, args.flags, args.ttl);
    bar.finish_and_clear();
    stored.map_err(|err| match err {
        ClientError::Local { source } => {
            Failure::new(Exit::Refused, format!("nothing stored: cannot read {}: {source}", name(&args.file)))
        }
        err => err.into(),
    })?;
    Ok(Exit::Done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exactly_gives_all_octets_and_refuses_one_more_before_the_last() {
        let mut all = Vec::new();
        Exactly { from: &b"abc"[..], len: 3, remaining: 3 }.read_to_end(&mut all).unwrap();
        assert_eq!(all, b"abc");
        let mut more = Exactly { from: &b"abcd"[..], len: 3, remaining: 3 };
        assert_eq!(more.read(&mut [0; 2]).unwrap(), 2);
        assert_eq!(more.read(&mut [0; 2]).unwrap_err().kind(), ErrorKind::InvalidData);
    }

    #[test]
    fn a_time_to_live_is_seconds_or_has_a_unit_and_is_not_zero() {
        assert_eq!(parse_ttl("90"), Ok(Duration::from_secs(90)));
        assert_eq!(parse_ttl("7d"), Ok(Duration::from_secs(7 * 86_400)));
        for text in ["0", "0s", "-1", "soon", ""] {
            assert!(parse_ttl(text).is_err(), "{text}");
        }
    }
}
