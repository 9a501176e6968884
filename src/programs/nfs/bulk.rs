//! Finds the data of a WRITE in a message that is still coming, so that a byte stream need not hold it.
//!
//! ```text
//! | call header | file | offset | count | stable | n | n octets | roundup |
//!   what is here so far, then what comes             ^ position
//! ```
//!
//! The data is then what a read chunk is on RPC-over-RDMA: the octets before it are the stream, and
//! [`Reduced`](crate::programs::rpc::Reduced) says where it was. So [`Request::parse`](super::Request::parse) holds it against
//! the same bounds, before any of it is taken.

use super::request::WriteHead;
use super::{PROGRAM_NUMBER, VERSION, procedure};
use crate::wire::codec::{Reader, Wanted, XdrError};
use crate::wire::onc_rpc::{CallError, CallFault, CallHeader};

/// What the first octets of a message say of the rest.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Bulk {
    /// More of them are needed.
    NeedMore,
    /// It is no WRITE, or none that could be understood: read it whole.
    None,
    /// Data: `len` octets from `position` of the message on, and their roundup.
    Data { position: usize, len: u32 },
}

impl Bulk {
    /// Looks at the first octets of a message.
    pub fn find(first: &[u8]) -> Self {
        let mut reader = Reader::new(first);
        let cut = |error: &XdrError| match error.wanted {
            Wanted::Octets { .. } => Self::NeedMore,
            _ => Self::None,
        };
        let header = match CallHeader::read(&mut reader) {
            Ok(header) => header,
            Err(CallError::NotACall) if first.len() < 8 => return Self::NeedMore,
            Err(CallError::Faulty {
                fault: CallFault::Header(error) | CallFault::Credential(error) | CallFault::Verifier(error),
                ..
            }) => return cut(&error),
            Err(_) => return Self::None,
        };
        if (header.program, header.version, header.procedure) != (PROGRAM_NUMBER, VERSION, procedure::WRITE) {
            return Self::None;
        }
        match WriteHead::read(&mut reader).and_then(|_| reader.u32()) {
            Ok(len) => Self::Data { position: reader.offset(), len },
            Err(error) => cut(&error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::programs::nfs::{PROGRAM, Request, Write};
    use crate::programs::rpc::{Arguments, Data, Reduced, accept};
    use crate::wire::codec::Writer;
    use crate::wire::onc_rpc::{AuthSys, OpaqueAuth, Xid};

    fn message(procedure: u32, len: u32) -> Vec<u8> {
        let sys = AuthSys { stamp: 1, machine_name: b"host", uid: 0, gid: 0, gids: vec![1, 2] }.body();
        let mut writer = Writer::new();
        let (program, version, verifier) = (PROGRAM_NUMBER, VERSION, OpaqueAuth::NONE);
        let credential = AuthSys::around(&sys);
        CallHeader { xid: Xid(1), program, version, procedure, credential, verifier }.write(&mut writer);
        writer.opaque(b"handle");
        writer.u64(0);
        writer.u32(len);
        writer.u32(2);
        writer.u32(len);
        writer.finish()
    }

    #[test]
    fn the_data_is_found_with_the_word_that_says_how_long_it_is() {
        let head = message(procedure::WRITE, 1000);
        for cut in 0..head.len() {
            assert_eq!(Bulk::find(&head[..cut]), Bulk::NeedMore, "{cut} octets");
        }
        let found = Bulk::Data { position: head.len(), len: 1000 };
        assert_eq!(Bulk::find(&head), found);
        assert_eq!(Bulk::find(&[&head[..], b"data"].concat()), found);
    }

    #[test]
    fn data_still_to_come_is_parsed_as_a_chunk() {
        let head = message(procedure::WRITE, 1000);
        let Bulk::Data { position, len } = Bulk::find(&head) else { panic!("it is a WRITE") };
        let chunks = [Reduced { position: position as u64, len: len.into() }];
        let call = accept(&[&PROGRAM], Arguments { stream: &head[..position], chunks: &chunks }).unwrap();
        let request = Request::parse(call).unwrap();
        assert!(matches!(request, Request::Write(Write { data: Data::Chunk { index: 0, len: 1000 }, .. })));
    }

    #[test]
    fn whatever_is_no_write_is_to_be_read_whole() {
        assert_eq!(Bulk::find(&message(procedure::READ, 9)), Bulk::None);
        let good = message(procedure::WRITE, 9);
        let with = |at: usize, word: u32| {
            let mut octets = good.clone();
            octets[at..at + 4].copy_from_slice(&word.to_be_bytes());
            Bulk::find(&octets)
        };
        // Direction, RPC version, program, version, length of the credential.
        for (at, word) in [(4, 1), (8, 3), (12, 100_005), (16, 2), (28, 401)] {
            assert_eq!(with(at, word), Bulk::None, "word at {at}");
        }
        let handle = good.len() - 12 - 8 - 12;
        assert_eq!(good[handle..handle + 4], 6_u32.to_be_bytes());
        assert_eq!(with(handle, 65), Bulk::None);
        assert_eq!(with(good.len() - 8, 3), Bulk::None, "no such stability");
    }
}
