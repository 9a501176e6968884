//! What is answered: constant lines, and writers that append to the caller's buffer.

use std::fmt::Display;
use std::io::Write;

use super::number::append_number;

/// Ends every line and every body.
pub const CRLF: &[u8] = b"\r\n";

/// The body was stored.
pub const STORED: &[u8] = b"STORED\r\n";
/// `add`, `replace`, `append`, `prepend`: the key was present, or absent, as it must not be.
pub const NOT_STORED: &[u8] = b"NOT_STORED\r\n";
/// `cas`: the object has another version.
pub const EXISTS: &[u8] = b"EXISTS\r\n";
/// The key is absent.
pub const NOT_FOUND: &[u8] = b"NOT_FOUND\r\n";
/// `delete` removed the object.
pub const DELETED: &[u8] = b"DELETED\r\n";
/// `touch` set the expiry.
pub const TOUCHED: &[u8] = b"TOUCHED\r\n";
/// `flush_all`, `verbosity`: done.
pub const OK: &[u8] = b"OK\r\n";
/// Ends the answers of a retrieval and of `stats`.
pub const END: &[u8] = b"END\r\n";
/// `stats reset`: done.
pub const RESET: &[u8] = b"RESET\r\n";

/// A word that is no command, or a command with too many arguments.
pub const ERROR: &[u8] = b"ERROR\r\n";
/// `shutdown`, which no peer may ask for.
pub const SHUTDOWN_NOT_ENABLED: &[u8] = b"ERROR: shutdown not enabled\r\n";
/// Sent to a connection that is refused for want of room, before it is closed.
pub const TOO_MANY_CONNECTIONS: &[u8] = b"ERROR Too many open connections\r\n";

/// Arguments are missing, or one is not what it must be.
pub const BAD_LINE: &[u8] = b"CLIENT_ERROR bad command line format\r\n";
/// The two octets after the body are not CR LF.
pub const BAD_DATA_CHUNK: &[u8] = b"CLIENT_ERROR bad data chunk\r\n";
/// `incr`, `decr`: the stored value is no number.
pub const NON_NUMERIC: &[u8] = b"CLIENT_ERROR cannot increment or decrement non-numeric value\r\n";
/// `incr`, `decr`: the argument is no number.
pub const INVALID_DELTA: &[u8] = b"CLIENT_ERROR invalid numeric delta argument\r\n";
/// `touch`, `gat`, `gats`, `flush_all`: the time is no number.
pub const INVALID_EXPTIME: &[u8] = b"CLIENT_ERROR invalid exptime argument\r\n";
/// `delete` with an argument other than `0` and `noreply`. The two blanks are memcached's, and clients compare them.
pub const DELETE_USAGE: &[u8] = b"CLIENT_ERROR bad command line format.  Usage: delete <key> [noreply]\r\n";

/// The value is larger than the store takes; its body is swallowed.
pub const TOO_LARGE: &[u8] = b"SERVER_ERROR object too large for cache\r\n";
/// No space was found for the value; its body is swallowed.
pub const OUT_OF_MEMORY_STORING: &[u8] = b"SERVER_ERROR out of memory storing object\r\n";
/// No space was found for a request other than a storage command.
pub const OUT_OF_MEMORY: &[u8] = b"SERVER_ERROR out of memory\r\n";

/// Appends `VALUE <key> <flags> <len> [<cas>]`: `len` octets of value and [`CRLF`] must follow.
pub fn value_line(out: &mut Vec<u8>, key: &[u8], flags: u32, len: u64, cas: Option<u64>) {
    out.extend_from_slice(b"VALUE ");
    out.extend_from_slice(key);
    out.push(b' ');
    append_number(out, u64::from(flags));
    out.push(b' ');
    append_number(out, len);
    if let Some(cas) = cas {
        out.push(b' ');
        append_number(out, cas);
    }
    out.extend_from_slice(CRLF);
}

/// Appends a number alone: the answer of `incr` and `decr`.
pub fn number_line(out: &mut Vec<u8>, number: u64) {
    append_number(out, number);
    out.extend_from_slice(CRLF);
}

/// Appends `STAT <name> <value>`. Monitors split the line at blanks, so name and value are one token each: blanks and
/// control octets within become `_`, and an empty one becomes `-`.
pub fn stat_line(out: &mut Vec<u8>, name: impl Display, value: impl Display) {
    out.extend_from_slice(b"STAT ");
    append_token(out, name);
    out.push(b' ');
    append_token(out, value);
    out.extend_from_slice(CRLF);
}

/// Appends `VERSION <version>`, one token as in [`stat_line`].
pub fn version_line(out: &mut Vec<u8>, version: impl Display) {
    out.extend_from_slice(b"VERSION ");
    append_token(out, version);
    out.extend_from_slice(CRLF);
}

fn append_token(out: &mut Vec<u8>, token: impl Display) {
    let start = out.len();
    // Writing to a Vec fails only if the value's own `Display` does; what it wrote until then is kept.
    let _ = write!(out, "{token}");
    for octet in &mut out[start..] {
        if octet.is_ascii_control() || *octet == b' ' {
            *octet = b'_';
        }
    }
    if out.len() == start {
        out.push(b'-');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(write: impl FnOnce(&mut Vec<u8>)) -> String {
        let mut out = b"|".to_vec();
        write(&mut out);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn a_value_line_carries_the_version_only_when_asked() {
        assert_eq!(written(|out| value_line(out, b"a", u32::MAX, 1, None)), "|VALUE a 4294967295 1\r\n");
        assert_eq!(
            written(|out| value_line(out, b"key", 0, u64::MAX, Some(36))),
            "|VALUE key 0 18446744073709551615 36\r\n"
        );
    }

    #[test]
    fn a_number_line_is_the_number_alone() {
        assert_eq!(written(|out| number_line(out, 0)), "|0\r\n");
        assert_eq!(written(|out| number_line(out, 9223372036854775808)), "|9223372036854775808\r\n");
    }

    #[test]
    fn a_stat_line_is_three_tokens_whatever_the_value() {
        assert_eq!(written(|out| stat_line(out, "pid", 42)), "|STAT pid 42\r\n");
        assert_eq!(written(|out| stat_line(out, "version", "1.0 beta\r\n")), "|STAT version 1.0_beta__\r\n");
        assert_eq!(written(|out| stat_line(out, "empty", "")), "|STAT empty -\r\n");
        assert_eq!(written(|out| stat_line(out, format_args!("pool:{} x", 1), "é")), "|STAT pool:1_x é\r\n");
    }

    #[test]
    fn a_version_has_no_blank() {
        assert_eq!(written(|out| version_line(out, "0.1.0")), "|VERSION 0.1.0\r\n");
        assert_eq!(written(|out| version_line(out, "0.1.0 (debug)")), "|VERSION 0.1.0_(debug)\r\n");
    }

    #[test]
    fn every_constant_is_one_line() {
        let lines = [
            STORED,
            NOT_STORED,
            EXISTS,
            NOT_FOUND,
            DELETED,
            TOUCHED,
            OK,
            END,
            RESET,
            ERROR,
            SHUTDOWN_NOT_ENABLED,
            TOO_MANY_CONNECTIONS,
            BAD_LINE,
            BAD_DATA_CHUNK,
            NON_NUMERIC,
            INVALID_DELTA,
            INVALID_EXPTIME,
            DELETE_USAGE,
            TOO_LARGE,
            OUT_OF_MEMORY_STORING,
            OUT_OF_MEMORY,
        ];
        for line in lines {
            let text = line.strip_suffix(CRLF).unwrap();
            assert!(!text.is_empty() && text.iter().all(|octet| !octet.is_ascii_control()), "{line:?}");
        }
    }
}
