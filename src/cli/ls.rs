//! `bulkhead ls`.

use std::ffi::OsString;
use std::io::{self, BufWriter, IsTerminal, Write};

use bulkhead::client::AnyClient;
use bulkhead::client::rpc::Entry;
use bulkhead::error::Exit;

use super::server::ServerArgs;
use super::{Failure, key_octets};

const EXAMPLES: &str = "\
Examples:
  bulkhead ls --server rpc+iwarp://127.0.0.1:20049
  bulkhead ls films/ --long
  bulkhead ls tmp/ --null | xargs -0 bulkhead rm

Keys come in the order of their octets, one a line. On a terminal, octets that could move its cursor are shown as `?`. \
Only an RPC door has an order of keys.";

/// List the keys that begin with a prefix, over RPC
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Front of the keys wanted; all keys if there is none
    #[arg(default_value = "")]
    prefix: OsString,
    /// Length in octets and version in front of each key
    #[arg(short, long, conflicts_with = "json")]
    long: bool,
    /// One JSON object a line; octets of a key that are no UTF-8 are replaced
    #[arg(long, conflicts_with = "null")]
    json: bool,
    /// A NUL instead of a newline behind each key
    #[arg(short = '0', long)]
    null: bool,
    #[command(flatten)]
    server: ServerArgs,
}

impl Args {
    fn write(&self, entry: &Entry, is_shown: bool, out: &mut impl Write) -> io::Result<()> {
        let Entry { key, version, len } = entry;
        if self.json {
            let key = String::from_utf8_lossy(key);
            return writeln!(out, "{}", serde_json::json!({ "key": key, "len_bytes": len, "cas": version }));
        }
        if self.long {
            write!(out, "{len:>14} {version:>10} ")?;
        }
        match is_shown {
            true => out.write_all(shown(key).as_bytes()),
            false => out.write_all(key),
        }?;
        out.write_all(if self.null { b"\0" } else { b"\n" })
    }
}

/// A key that cannot move a terminal's cursor.
fn shown(key: &[u8]) -> String {
    String::from_utf8_lossy(key).replace(char::is_control, "?")
}

pub fn run(args: Args) -> Result<Exit, Failure> {
    let url = args.server.url()?;
    let AnyClient::Rpc(mut client) = args.server.connect()? else {
        let what = format!("{url} has no order of keys: name an RPC door, --server rpc+iwarp://HOST:PORT");
        return Err(Failure::new(Exit::Usage, what));
    };
    let stdout = io::stdout();
    let is_shown = stdout.is_terminal();
    let mut out = BufWriter::new(stdout.lock());
    let local = |err: io::Error| Failure::new(Exit::Refused, format!("cannot write to stdout: {err}"));
    for entry in client.list(key_octets(&args.prefix)) {
        args.write(&entry?, is_shown, &mut out).map_err(local)?;
    }
    out.flush().map_err(local)?;
    Ok(Exit::Done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_on_a_terminal_is_text_without_control_characters() {
        assert_eq!(shown("größe/1".as_bytes()), "größe/1");
        assert_eq!(shown(b"a\x1b[2Jb\r\n\xff\x9b"), "a?[2Jb??\u{fffd}\u{fffd}");
        assert_eq!(shown("\u{9b}1m".as_bytes()), "?1m");
    }
}
