//! Results, some of which may be in write chunks.

use super::{Data, Eligible};
use crate::wire::codec::{Reader, XdrError, roundup_bytes};
use crate::wire::onc_rpc::{AcceptStatus, Denial, Reply, ReplyHeader, Xid};
use thiserror::Error;

/// Why a reply is of no use. Nothing in its chunks may be used then.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
pub enum ReplyFault {
    #[error("the server accepted the call and says {0:?}")]
    Unsuccessful(AcceptStatus),
    #[error("the server denied the call: {0:?}")]
    Denied(Denial),
    #[error("results: {0}")]
    Xdr(#[from] XdrError),
    /// RFC 8166 §6.1: an eligible result stayed inline although it had a chunk, or they do not agree.
    #[error("result {index} has {item_bytes} octets, its write chunk {chunk_bytes}")]
    ChunkLength { index: usize, item_bytes: u32, chunk_bytes: u64 },
    /// RFC 8166 §6.1: something was written that is no eligible result.
    #[error("write chunk {index} has {chunk_bytes} octets of no result")]
    Ineligible { index: usize, chunk_bytes: u64 },
    #[error("another number of results than of things asked for")]
    Count,
    #[error("a result of {len} octets, of {max} at most")]
    TooLong { len: u32, max: u32 },
    #[error("a checksum for what has none, or none for what has one")]
    Checksum,
}

/// Reads the results of one procedure.
#[derive(Clone, Debug)]
pub struct ResultReader<'a> {
    reader: Reader<'a>,
    chunks: &'a [Option<u64>],
    eligible: &'static [Eligible],
    next: usize,
}

impl<'a> ResultReader<'a> {
    /// Reads the header of a reply message, up to its results. `chunks` are the octets written to each write chunk that
    /// was offered, `None` for one that was offered empty (RFC 8166 §4.3.2.3).
    ///
    /// # Errors
    /// [`ReplyFault::Unsuccessful`], [`ReplyFault::Denied`], [`ReplyFault::Xdr`].
    pub fn open(
        stream: &'a [u8],
        chunks: &'a [Option<u64>],
        eligible: &'static [Eligible],
    ) -> Result<(Xid, Self), ReplyFault> {
        let mut reader = Reader::new(stream);
        let ReplyHeader { xid, reply } = ReplyHeader::read(&mut reader)?;
        match reply {
            Reply::Accepted { status: AcceptStatus::Success, .. } => {
                Ok((xid, Self { reader, chunks, eligible, next: 0 }))
            }
            Reply::Accepted { status, .. } => Err(ReplyFault::Unsuccessful(status)),
            Reply::Denied(denial) => Err(ReplyFault::Denied(denial)),
        }
    }

    /// For everything that may not be reduced.
    pub const fn words(&mut self) -> &mut Reader<'a> {
        &mut self.reader
    }

    /// An item that may be reduced if the binding lists it: then it takes the next chunk, if there is one.
    ///
    /// # Errors
    /// [`ReplyFault`].
    pub fn data(&mut self, item: &Eligible) -> Result<Data, ReplyFault> {
        let index = self.next;
        let chunk = self.chunks.get(index).filter(|_| self.eligible.contains(item));
        if let Some(chunk) = chunk {
            self.next += 1;
            if let &Some(chunk_bytes) = chunk {
                let item_bytes = self.reader.u32()?;
                if u64::from(item_bytes) != chunk_bytes {
                    return Err(ReplyFault::ChunkLength { index, item_bytes, chunk_bytes });
                }
                if item_bytes > item.bytes_max {
                    return Err(ReplyFault::TooLong { len: item_bytes, max: item.bytes_max });
                }
                return Ok(Data::Chunk { index, len: item_bytes });
            }
        }
        let len = self.reader.opaque(item.bytes_max as usize)?.len();
        let end = self.reader.offset() - roundup_bytes(len as u64) as usize;
        Ok(Data::Inline(end - len..end))
    }

    /// Reads everything with `results`; nothing may be left, no octet, and no chunk that has any.
    ///
    /// # Errors
    /// [`ReplyFault`].
    pub fn read_all<T>(mut self, results: impl FnOnce(&mut Self) -> Result<T, ReplyFault>) -> Result<T, ReplyFault> {
        let value = results(&mut self)?;
        self.reader.finish()?;
        for (index, chunk) in self.chunks.iter().enumerate().skip(self.next) {
            if let &Some(chunk_bytes @ 1..) = chunk {
                return Err(ReplyFault::Ineligible { index, chunk_bytes });
            }
        }
        Ok(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::codec::Writer;

    const RESULT: Eligible = Eligible { name: "result", bytes_max: 9 };

    /// A reply with two items.
    fn read(stream: &[u8], chunks: &[Option<u64>], eligible: &'static [Eligible]) -> Result<(Data, Data), ReplyFault> {
        let (xid, results) = ResultReader::open(stream, chunks, eligible)?;
        assert_eq!(xid, Xid(3));
        results.read_all(|results| Ok((results.data(&RESULT)?, results.data(&RESULT)?)))
    }

    fn reply(items: [(u32, bool); 2]) -> Vec<u8> {
        let mut writer = Writer::new();
        ReplyHeader { xid: Xid(3), reply: Reply::accepted(AcceptStatus::Success) }.write(&mut writer);
        for (len, inline) in items {
            if inline {
                writer.opaque(&vec![1; len as usize]);
            } else {
                writer.u32(len);
            }
        }
        writer.finish()
    }

    const fn chunk(index: usize, len: u32) -> Data {
        Data::Chunk { index, len }
    }

    #[test]
    fn results_take_chunks_in_order_and_what_has_none_is_inline() {
        let items = &[RESULT];
        let (both, first) = (reply([(5, false), (3, false)]), reply([(5, false), (3, true)]));
        assert_eq!(read(&both, &[Some(5), Some(3)], items), Ok((chunk(0, 5), chunk(1, 3))));
        assert_eq!(read(&first, &[Some(5)], items), Ok((chunk(0, 5), Data::Inline(32..35))));
        assert_eq!(read(&first, &[Some(5), None], items), Ok((chunk(0, 5), Data::Inline(32..35))));
        let second = reply([(5, true), (3, false)]);
        assert_eq!(read(&second, &[None, Some(3)], items), Ok((Data::Inline(28..33), chunk(1, 3))));
        let none = reply([(0, false), (3, false)]);
        assert_eq!(read(&none, &[Some(0), Some(3), Some(0)], items), Ok((chunk(0, 0), chunk(1, 3))));
    }

    #[test]
    fn an_eligible_result_inline_beside_its_chunk_ends_the_call() {
        let inline = reply([(5, true), (3, true)]);
        let fault = ReplyFault::ChunkLength { index: 0, item_bytes: 5, chunk_bytes: 0 };
        assert_eq!(read(&inline, &[Some(0), Some(0)], &[RESULT]), Err(fault));
    }

    #[test]
    fn lengths_that_do_not_agree_end_the_call() {
        let both = reply([(5, false), (3, false)]);
        for chunk_bytes in [4, 6, 8, u64::from(u32::MAX) + 6] {
            let fault = ReplyFault::ChunkLength { index: 0, item_bytes: 5, chunk_bytes };
            assert_eq!(read(&both, &[Some(chunk_bytes), Some(3)], &[RESULT]), Err(fault));
        }
    }

    #[test]
    fn a_chunk_written_for_no_eligible_result_ends_the_call() {
        let inline = reply([(5, true), (3, true)]);
        let fault = |index| ReplyFault::Ineligible { index, chunk_bytes: 5 };
        assert_eq!(read(&inline, &[Some(5), Some(0)], &[]), Err(fault(0)));
        assert_eq!(read(&inline, &[None, None, Some(5)], &[RESULT]), Err(fault(2)));
    }

    #[test]
    fn a_result_longer_than_it_may_be_is_refused_inline_and_reduced() {
        let long = reply([(10, false), (3, true)]);
        assert_eq!(read(&long, &[Some(10)], &[RESULT]), Err(ReplyFault::TooLong { len: 10, max: 9 }));
        assert!(matches!(read(&reply([(10, true), (3, true)]), &[], &[RESULT]), Err(ReplyFault::Xdr(_))));
    }

    #[test]
    fn a_reply_without_success_has_no_results() {
        let mut writer = Writer::new();
        let reply = Reply::accepted(AcceptStatus::GarbageArgs);
        ReplyHeader { xid: Xid(3), reply }.write(&mut writer);
        let stream = writer.finish();
        assert_eq!(read(&stream, &[Some(5)], &[RESULT]), Err(ReplyFault::Unsuccessful(AcceptStatus::GarbageArgs)));
    }
}
