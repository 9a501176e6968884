//! Calls (RFC 5531 §9).

use super::auth::OpaqueAuth;
use super::reply::{AcceptStatus, AuthStatus, Denial, Reply, Versions};
use super::{MessageType, RPC_VERSION, Xid};
use crate::wire::codec::{Reader, Writer, XdrError};
use thiserror::Error;

/// What is in front of the arguments of a call.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct CallHeader<'a> {
    pub xid: Xid,
    pub program: u32,
    pub version: u32,
    pub procedure: u32,
    pub credential: OpaqueAuth<'a>,
    pub verifier: OpaqueAuth<'a>,
}

/// Why octets are no call that could be dispatched.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
pub enum CallError {
    #[error("no call begins here")]
    NotACall,
    #[error("xid {:#x}: {fault}", xid.0)]
    Faulty { xid: Xid, fault: CallFault },
}

/// What is wrong with a call.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
pub enum CallFault {
    #[error("RPC version {0}, not {RPC_VERSION}")]
    RpcVersion(u32),
    #[error("cut before its credential: {0}")]
    Header(XdrError),
    #[error("credential: {0}")]
    Credential(XdrError),
    #[error("verifier: {0}")]
    Verifier(XdrError),
}

impl CallFault {
    /// What to answer.
    pub const fn reply(self) -> Reply<'static> {
        match self {
            Self::RpcVersion(_) => Reply::Denied(Denial::RpcMismatch(Versions { low: RPC_VERSION, high: RPC_VERSION })),
            Self::Header(_) => Reply::accepted(AcceptStatus::GarbageArgs),
            Self::Credential(_) => Reply::Denied(Denial::AuthError(AuthStatus::BADCRED)),
            Self::Verifier(_) => Reply::Denied(Denial::AuthError(AuthStatus::BADVERF)),
        }
    }
}

impl<'a> CallHeader<'a> {
    /// Reads up to the arguments, which `reader` has next.
    ///
    /// # Errors
    /// [`CallError::NotACall`]: say nothing. [`CallError::Faulty`]: answer [`CallFault::reply`].
    pub fn read(reader: &mut Reader<'a>) -> Result<Self, CallError> {
        let xid = Xid(reader.u32().map_err(|_| CallError::NotACall)?);
        if reader.u32() != Ok(MessageType::Call.word()) {
            return Err(CallError::NotACall);
        }
        Self::read_body(xid, reader).map_err(|fault| CallError::Faulty { xid, fault })
    }

    fn read_body(xid: Xid, reader: &mut Reader<'a>) -> Result<Self, CallFault> {
        let rpc_version = reader.u32().map_err(CallFault::Header)?;
        // What follows has a shape in version 2 alone.
        if rpc_version != RPC_VERSION {
            return Err(CallFault::RpcVersion(rpc_version));
        }
        let mut word = || reader.u32().map_err(CallFault::Header);
        let (program, version, procedure) = (word()?, word()?, word()?);
        let credential = OpaqueAuth::read(reader).map_err(CallFault::Credential)?;
        let verifier = OpaqueAuth::read(reader).map_err(CallFault::Verifier)?;
        Ok(Self { xid, program, version, procedure, credential, verifier })
    }

    /// Writes all but the arguments.
    pub fn write(&self, writer: &mut Writer) {
        writer.u32(self.xid.0);
        writer.u32(MessageType::Call.word());
        for word in [RPC_VERSION, self.program, self.version, self.procedure] {
            writer.u32(word);
        }
        self.credential.write(writer);
        self.verifier.write(writer);
    }

    /// Octets as written.
    pub const fn encoded_bytes(&self) -> usize {
        24 + self.credential.encoded_bytes() + self.verifier.encoded_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::onc_rpc::auth::AuthSys;

    /// A NULL call of NFS version 3, by hand.
    const NULL: [u8; 40] = [
        0x12, 0x34, 0x56, 0x78, // xid
        0, 0, 0, 0, // CALL
        0, 0, 0, 2, // rpcvers
        0, 1, 0x86, 0xa3, // program 100003
        0, 0, 0, 3, // version
        0, 0, 0, 0, // procedure
        0, 0, 0, 0, 0, 0, 0, 0, // credential AUTH_NONE
        0, 0, 0, 0, 0, 0, 0, 0, // verifier AUTH_NONE
    ];

    fn null() -> CallHeader<'static> {
        CallHeader {
            xid: Xid(0x1234_5678),
            program: 100_003,
            version: 3,
            procedure: 0,
            credential: OpaqueAuth::NONE,
            verifier: OpaqueAuth::NONE,
        }
    }

    fn written(call: &CallHeader<'_>) -> Vec<u8> {
        let mut writer = Writer::new();
        call.write(&mut writer);
        assert_eq!(writer.len(), call.encoded_bytes());
        writer.finish()
    }

    fn fault_of(octets: &[u8]) -> CallFault {
        match CallHeader::read(&mut Reader::new(octets)) {
            Err(CallError::Faulty { xid, fault }) => {
                assert_eq!(xid, Xid(0x1234_5678));
                fault
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_call_is_read_from_its_octets_and_written_as_them() {
        let mut reader = Reader::new(&NULL);
        assert_eq!(CallHeader::read(&mut reader), Ok(null()));
        assert_eq!(reader.left(), 0);
        assert_eq!(written(&null()), NULL);
    }

    #[test]
    fn arguments_are_what_the_reader_has_next() {
        let body = AuthSys { stamp: 1, machine_name: b"abc", uid: 0, gid: 0, gids: vec![] }.body();
        let call = CallHeader { credential: AuthSys::around(&body), ..null() };
        let mut octets = written(&call);
        octets.extend(*b"args");
        let mut reader = Reader::new(&octets);
        assert_eq!(CallHeader::read(&mut reader), Ok(call));
        assert_eq!(reader.rest(), b"args");
    }

    #[test]
    fn another_rpc_version_is_denied_whatever_follows() {
        for version in [0, 1, 3, u32::MAX] {
            let mut octets = NULL;
            octets[8..12].copy_from_slice(&version.to_be_bytes());
            for cut in [12, 13, 40] {
                let fault = fault_of(&octets[..cut]);
                assert_eq!(fault, CallFault::RpcVersion(version));
                assert_eq!(fault.reply(), Reply::Denied(Denial::RpcMismatch(Versions { low: 2, high: 2 })));
            }
        }
    }

    #[test]
    fn what_is_too_short_for_its_direction_is_not_answered() {
        for cut in 0..8 {
            assert_eq!(CallHeader::read(&mut Reader::new(&NULL[..cut])), Err(CallError::NotACall));
        }
        for direction in [1, 2, u32::MAX] {
            let mut octets = NULL;
            octets[4..8].copy_from_slice(&direction.to_be_bytes());
            assert_eq!(CallHeader::read(&mut Reader::new(&octets)), Err(CallError::NotACall));
        }
    }

    #[test]
    fn a_cut_names_what_was_cut() {
        for cut in 8..NULL.len() {
            let fault = fault_of(&NULL[..cut]);
            let (expected, reply) = match cut {
                8..24 => (matches!(fault, CallFault::Header(_)), Reply::accepted(AcceptStatus::GarbageArgs)),
                24..32 => {
                    (matches!(fault, CallFault::Credential(_)), Reply::Denied(Denial::AuthError(AuthStatus::BADCRED)))
                }
                _ => (matches!(fault, CallFault::Verifier(_)), Reply::Denied(Denial::AuthError(AuthStatus::BADVERF))),
            };
            assert!(expected, "cut at {cut}: {fault}");
            assert_eq!(fault.reply(), reply, "cut at {cut}");
        }
    }

    #[test]
    fn a_credential_of_more_than_400_octets_is_bad_even_if_it_is_there() {
        let mut octets = NULL[..28].to_vec();
        octets.extend(401_u32.to_be_bytes());
        octets.extend([0; 500]);
        assert!(matches!(fault_of(&octets), CallFault::Credential(_)));
    }
}
