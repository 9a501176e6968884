//! Replies (RFC 5531 §9).

use super::auth::OpaqueAuth;
use super::{MessageType, Xid};
use crate::wire::codec::{Reader, Wanted, Writer, XdrError};

/// A range of versions, both ends included.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Versions {
    pub low: u32,
    pub high: u32,
}

impl Versions {
    fn read(reader: &mut Reader<'_>) -> Result<Self, XdrError> {
        Ok(Self { low: reader.u32()?, high: reader.u32()? })
    }

    fn write(self, writer: &mut Writer) {
        writer.u32(self.low);
        writer.u32(self.high);
    }
}

/// What became of a call whose caller was accepted.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum AcceptStatus {
    /// Results follow.
    Success,
    ProgUnavail,
    /// Other versions of the program are spoken.
    ProgMismatch(Versions),
    ProcUnavail,
    /// The arguments could not be decoded.
    GarbageArgs,
    SystemErr,
}

/// Why a caller was not accepted: `auth_stat`. New ones may be assigned, so it is a number.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct AuthStatus(pub u32);

impl AuthStatus {
    /// The credential is not well-formed.
    pub const BADCRED: Self = Self(1);
    /// The caller must begin a new session, or names itself in a way that is not understood.
    pub const REJECTEDCRED: Self = Self(2);
    /// The verifier is not well-formed.
    pub const BADVERF: Self = Self(3);
    pub const REJECTEDVERF: Self = Self(4);
    pub const TOOWEAK: Self = Self(5);
}

/// Why a call was not looked at.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Denial {
    /// Other versions of ONC RPC are spoken.
    RpcMismatch(Versions),
    AuthError(AuthStatus),
}

/// The body of a reply but for the results.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Reply<'a> {
    Accepted { verifier: OpaqueAuth<'a>, status: AcceptStatus },
    Denied(Denial),
}

impl Reply<'static> {
    /// Accepted, with the verifier AUTH_NONE.
    pub const fn accepted(status: AcceptStatus) -> Self {
        Self::Accepted { verifier: OpaqueAuth::NONE, status }
    }
}

/// What is in front of the results.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct ReplyHeader<'a> {
    pub xid: Xid,
    pub reply: Reply<'a>,
}

impl<'a> ReplyHeader<'a> {
    /// Reads up to the results, which `reader` has next if the status is [`AcceptStatus::Success`].
    ///
    /// # Errors
    /// It is no reply, it is cut, or it has a status that there is not.
    pub fn read(reader: &mut Reader<'a>) -> Result<Self, XdrError> {
        let xid = Xid(reader.u32()?);
        reader.value("REPLY", |word| (word == MessageType::Reply.word()).then_some(()))?;
        let accepted = reader.value("a reply status", |word| [true, false].get(word as usize).copied())?;
        let reply = if accepted {
            let verifier = OpaqueAuth::read(reader)?;
            let offset = reader.offset();
            let status = match reader.u32()? {
                0 => AcceptStatus::Success,
                1 => AcceptStatus::ProgUnavail,
                2 => AcceptStatus::ProgMismatch(Versions::read(reader)?),
                3 => AcceptStatus::ProcUnavail,
                4 => AcceptStatus::GarbageArgs,
                5 => AcceptStatus::SystemErr,
                found => return Err(XdrError { offset, wanted: Wanted::Value { what: "an accept status", found } }),
            };
            Reply::Accepted { verifier, status }
        } else {
            let mismatch = reader.value("a reject status", |word| [true, false].get(word as usize).copied())?;
            Reply::Denied(if mismatch {
                Denial::RpcMismatch(Versions::read(reader)?)
            } else {
                Denial::AuthError(AuthStatus(reader.u32()?))
            })
        };
        Ok(Self { xid, reply })
    }

    /// Writes all but the results.
    pub fn write(&self, writer: &mut Writer) {
        writer.u32(self.xid.0);
        writer.u32(MessageType::Reply.word());
        match self.reply {
            Reply::Accepted { verifier, status } => {
                writer.u32(0);
                verifier.write(writer);
                writer.u32(match status {
                    AcceptStatus::Success => 0,
                    AcceptStatus::ProgUnavail => 1,
                    AcceptStatus::ProgMismatch(_) => 2,
                    AcceptStatus::ProcUnavail => 3,
                    AcceptStatus::GarbageArgs => 4,
                    AcceptStatus::SystemErr => 5,
                });
                if let AcceptStatus::ProgMismatch(versions) = status {
                    versions.write(writer);
                }
            }
            Reply::Denied(denial) => {
                writer.u32(1);
                match denial {
                    Denial::RpcMismatch(versions) => {
                        writer.u32(0);
                        versions.write(writer);
                    }
                    Denial::AuthError(status) => {
                        writer.u32(1);
                        writer.u32(status.0);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Words of a reply to xid 9, by hand from RFC 5531 §9, and what they say.
    fn replies() -> Vec<(Vec<u32>, Reply<'static>)> {
        let accepted = |words: &[u32], status| ([&[9, 1, 0, 0, 0], words].concat(), Reply::accepted(status));
        let denied = |words: &[u32], denial| ([&[9, 1, 1], words].concat(), Reply::Denied(denial));
        let verifier = OpaqueAuth { flavor: 6, body: b"seal" };
        vec![
            accepted(&[0], AcceptStatus::Success),
            accepted(&[1], AcceptStatus::ProgUnavail),
            accepted(&[2, 3, 4], AcceptStatus::ProgMismatch(Versions { low: 3, high: 4 })),
            accepted(&[3], AcceptStatus::ProcUnavail),
            accepted(&[4], AcceptStatus::GarbageArgs),
            accepted(&[5], AcceptStatus::SystemErr),
            denied(&[0, 2, 2], Denial::RpcMismatch(Versions { low: 2, high: 2 })),
            denied(&[1, 1], Denial::AuthError(AuthStatus::BADCRED)),
            denied(&[1, 14], Denial::AuthError(AuthStatus(14))),
            (
                vec![9, 1, 0, 6, 4, u32::from_be_bytes(*b"seal"), 0],
                Reply::Accepted { verifier, status: AcceptStatus::Success },
            ),
        ]
    }

    fn octets(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_be_bytes()).collect()
    }

    #[test]
    fn every_reply_is_read_from_its_octets_and_written_as_them() {
        for (words, reply) in replies() {
            let octets = octets(&words);
            let header = ReplyHeader { xid: Xid(9), reply };
            let mut reader = Reader::new(&octets);
            assert_eq!(ReplyHeader::read(&mut reader), Ok(header));
            assert_eq!(reader.left(), 0);
            let mut writer = Writer::new();
            header.write(&mut writer);
            assert_eq!(writer.finish(), octets, "{reply:?}");
        }
    }

    #[test]
    fn a_reply_cut_anywhere_is_an_error() {
        for (words, reply) in replies() {
            let octets = octets(&words);
            for cut in 0..octets.len() {
                assert!(ReplyHeader::read(&mut Reader::new(&octets[..cut])).is_err(), "{reply:?} cut at {cut}");
            }
        }
    }

    #[test]
    fn statuses_that_there_are_not_are_errors() {
        for words in
            [&[9, 0, 0, 0, 0, 0][..], &[9, 2, 0, 0, 0, 0], &[9, 1, 2, 0, 0], &[9, 1, 0, 0, 0, 6], &[9, 1, 1, 2, 0]]
        {
            assert!(ReplyHeader::read(&mut Reader::new(&octets(words))).is_err(), "{words:?}");
        }
    }

    #[test]
    fn results_are_what_the_reader_has_next() {
        let octets = octets(&[9, 1, 0, 0, 0, 0, 77]);
        let mut reader = Reader::new(&octets);
        ReplyHeader::read(&mut reader).unwrap();
        assert_eq!(reader.u32(), Ok(77));
    }
}
