//! Exit codes of the `bulkhead` binary: each failure ends in exactly one of them.

use std::process::ExitCode;

/// What a process tells its caller at the end. The numbers are those of `sysexits.h` where that has one.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[repr(u8)]
pub enum Exit {
    /// Everything asked for was done.
    Done = 0,
    /// A miss, a refusal by the server, a local file that could not be read or written to its end, or trouble that `doctor`
    /// found.
    Refused = 1,
    /// The command line makes no sense (`EX_USAGE`).
    Usage = 64,
    /// The server cannot be reached, a port is busy, a pool is locked or has vanished (`EX_UNAVAILABLE`).
    Unavailable = 69,
    /// A bug of ours (`EX_SOFTWARE`).
    Bug = 70,
    /// The peer does not speak the protocol, or its values are wrong (`EX_PROTOCOL`).
    Protocol = 76,
    /// The configuration is refused, or a pool directory carries no marker (`EX_CONFIG`).
    Config = 78,
}

impl Exit {
    /// The number the parent process sees.
    pub const fn code(self) -> u8 {
        self as u8
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit.code())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_exit_has_its_documented_number() {
        let all = [Exit::Done, Exit::Refused, Exit::Usage, Exit::Unavailable, Exit::Bug, Exit::Protocol, Exit::Config];
        assert_eq!(all.map(Exit::code), [0, 1, 64, 69, 70, 76, 78]);
    }
}
