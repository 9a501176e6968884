//! The header of a message (RFC 8166 §4).
//!
//! ```text
//!  0      4      8        12
//!  | xid  | vers | credit | proc |                                       the same in every version
//!                         | 0 RDMA_MSG   | lists | payload stream …      28 octets at least
//!                         | 1 RDMA_NOMSG | lists |                       28 at least
//!                         | 2 RDMA_MSGP  | 3 RDMA_DONE                   reserved, never sent
//!                         | 4 RDMA_ERROR | 1 ERR_VERS | low | high |     28
//!                         | 4 RDMA_ERROR | 2 ERR_CHUNK |                 20
//! ```

use super::Xid;
use super::chunk::{ChunkLists, ReadList, WriteChunk, WriteList};
use crate::wire::codec::{Codec, Reader, Writer, XdrError, codec_struct};
use crate::wire::onc_rpc::MessageType;
use thiserror::Error;

/// The version spoken here.
pub const VERSION: u32 = 1;
/// Octets of the fixed fields.
pub const FIXED_BYTES: usize = Fixed::BYTES_MIN;
/// Octets of the smallest header but RDMA_ERROR's: fewer are dropped without a look (§4.5).
pub const HEADER_BYTES_MIN: usize = FIXED_BYTES + 12;

const RDMA_MSG: u32 = 0;
const RDMA_NOMSG: u32 = 1;
const RDMA_ERROR: u32 = 4;
const ERR_VERS: u32 = 1;
const ERR_CHUNK: u32 = 2;

impl Codec for Xid {
    const BYTES_MIN: usize = u32::BYTES_MIN;

    fn read(reader: &mut Reader<'_>) -> Result<Self, XdrError> {
        reader.u32().map(Self)
    }

    fn write(&self, writer: &mut Writer) {
        writer.u32(self.0);
    }
}

codec_struct! {
    /// The four fields that every version has in the same place (§4.2).
    #[derive(Clone, Copy, Debug, Eq, PartialEq)]
    pub struct Fixed {
        pub xid: Xid,
        pub vers: u32,
        /// Credits that the sender asks for (in a call) or grants (in a reply).
        pub credit: u32,
        pub proc: u32,
    }
}

impl Fixed {
    /// `None` under 16 octets.
    pub fn of(message: &[u8]) -> Option<Self> {
        Self::read(&mut Reader::new(message)).ok()
    }

    /// Whether the message is an RDMA_ERROR, of whatever version: an error that answers a version we do not speak carries
    /// that version (§4.5).
    pub const fn is_error(&self) -> bool {
        self.proc == RDMA_ERROR
    }
}

/// Where the payload stream is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Placement {
    /// RDMA_MSG: behind the header.
    Inline,
    /// RDMA_NOMSG: in the chunk at position zero, or in the reply chunk.
    Chunk,
}

/// What an RDMA_ERROR says.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
pub enum RdmaError {
    #[error("peer speaks RPC-over-RDMA versions {low} to {high}")]
    Version { low: u32, high: u32 },
    #[error("peer cannot make sense of the header or its chunks")]
    Chunk,
}

impl RdmaError {
    /// What answers a version that is not spoken here.
    pub const OUR_VERSIONS: Self = Self::Version { low: VERSION, high: VERSION };
}

/// A message that carries an RPC.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Transport<'a> {
    pub xid: Xid,
    pub credit: u32,
    pub placement: Placement,
    pub reads: ReadList<'a>,
    pub writes: WriteList<'a>,
    pub reply: Option<WriteChunk<'a>>,
    /// What follows the header: the payload stream, or nothing if it is in a chunk.
    pub payload: &'a [u8],
}

/// A message, as a view.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Message<'a> {
    Transport(Transport<'a>),
    /// RDMA_ERROR; `vers` is that of the message it answers.
    Error {
        xid: Xid,
        vers: u32,
        credit: u32,
        error: RdmaError,
    },
}

/// Why octets are no message. What to do about it is each role's own affair.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
pub enum HeaderError {
    #[error("{0} octets are too few for a header")]
    TooShort(usize),
    #[error("version {}", .0.vers)]
    Version(Fixed),
    /// Reserved, or unknown.
    #[error("procedure {}", .0.proc)]
    Procedure(Fixed),
    /// RDMA_ERROR, but what error cannot be read.
    #[error("an error without a meaning")]
    UnknownError(Fixed),
    #[error("{error}")]
    Lists { fixed: Fixed, error: XdrError },
}

impl<'a> Message<'a> {
    /// Reads a message: its length first, then RDMA_ERROR of any version, the version, the procedure, the lists. Octets
    /// behind an RDMA_ERROR are not looked at.
    ///
    /// # Errors
    /// [`HeaderError`].
    pub fn decode(message: &'a [u8]) -> Result<Self, HeaderError> {
        let mut reader = Reader::new(message);
        let too_short = HeaderError::TooShort(message.len());
        let fixed = Fixed::read(&mut reader).map_err(|_| too_short)?;
        if fixed.is_error() {
            let error = read_error(&mut reader).ok_or(HeaderError::UnknownError(fixed))?;
            return Ok(Self::Error { xid: fixed.xid, vers: fixed.vers, credit: fixed.credit, error });
        }
        if message.len() < HEADER_BYTES_MIN {
            return Err(too_short);
        }
        if fixed.vers != VERSION {
            return Err(HeaderError::Version(fixed));
        }
        let placement = match fixed.proc {
            RDMA_MSG => Placement::Inline,
            RDMA_NOMSG => Placement::Chunk,
            _ => return Err(HeaderError::Procedure(fixed)),
        };
        Transport::read(&fixed, placement, &mut reader)
            .map(Self::Transport)
            .map_err(|error| HeaderError::Lists { fixed, error })
    }
}

fn read_error(reader: &mut Reader<'_>) -> Option<RdmaError> {
    match reader.u32().ok()? {
        ERR_VERS => Some(RdmaError::Version { low: reader.u32().ok()?, high: reader.u32().ok()? }),
        ERR_CHUNK => Some(RdmaError::Chunk),
        _ => None,
    }
}

impl<'a> Transport<'a> {
    fn read(fixed: &Fixed, placement: Placement, reader: &mut Reader<'a>) -> Result<Self, XdrError> {
        Ok(Self {
            xid: fixed.xid,
            credit: fixed.credit,
            placement,
            reads: ReadList::read(reader)?,
            writes: WriteList::read(reader)?,
            reply: reader.optional(WriteChunk::read)?,
            payload: reader.rest(),
        })
    }

    /// Whether it is a call or a reply, and so what its xid and credit mean: the two directions of a connection have their
    /// own (RFC 8167 §4.1). Inline, the RPC message says so, if it reaches that far and makes sense. In a chunk: what is to
    /// be pulled is a call, everything else a reply.
    pub fn message_type(&self) -> Option<MessageType> {
        match self.placement {
            Placement::Inline => MessageType::of(self.payload),
            Placement::Chunk if self.reads.is_empty() => Some(MessageType::Reply),
            Placement::Chunk => Some(MessageType::Call),
        }
    }

    /// The header as a value: encoded, it is octet for octet what came in front of the payload.
    pub fn to_header(&self) -> Header {
        let lists = ChunkLists {
            reads: self.reads.segments().collect(),
            writes: self.writes.chunks().map(|chunk| chunk.to_vec()).collect(),
            reply: self.reply.map(|chunk| chunk.to_vec()),
        };
        Header { xid: self.xid, credit: self.credit, placement: self.placement, lists }
    }

    /// Judges the header of a reply by itself, without the call that it answers.
    ///
    /// # Errors
    /// [`ReplyError`]: it is dropped in silence (§4.5).
    pub fn check_reply(&self) -> Result<(), ReplyError> {
        if self.message_type() != Some(MessageType::Reply) {
            return Err(ReplyError::NotAReply);
        }
        if !self.reads.is_empty() {
            return Err(ReplyError::ReadList);
        }
        match self.placement {
            Placement::Inline if payload_xid(self.payload) != Some(self.xid) => return Err(ReplyError::Xid),
            Placement::Chunk if self.reply.is_none() => return Err(ReplyError::NoReplyChunk),
            Placement::Chunk if !self.payload.is_empty() => return Err(ReplyError::Behind(self.payload.len())),
            _ => {}
        }
        let chunks = self.writes.chunks().chain(self.reply);
        match chunks.flat_map(|chunk| chunk.segments()).all(|segment| segment.is_addressable()) {
            true => Ok(()),
            false => Err(ReplyError::Wraps),
        }
    }
}

/// Why a message is no reply.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
pub enum ReplyError {
    #[error("the RPC message is no reply")]
    NotAReply,
    #[error("a reply with a read list")]
    ReadList,
    #[error("the xids of header and RPC message differ")]
    Xid,
    #[error("neither a payload nor a reply chunk")]
    NoReplyChunk,
    #[error("{0} octets behind a header that has no payload")]
    Behind(usize),
    #[error("a segment reaches past the end of memory")]
    Wraps,
}

/// The xid that `stream`, a payload stream, begins with.
pub fn payload_xid(stream: &[u8]) -> Option<Xid> {
    Xid::read(&mut Reader::new(stream)).ok()
}

/// The header of a message that carries an RPC, as a value.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Header {
    pub xid: Xid,
    pub credit: u32,
    pub placement: Placement,
    pub lists: ChunkLists,
}

impl Header {
    pub fn write(&self, writer: &mut Writer) {
        let proc = match self.placement {
            Placement::Inline => RDMA_MSG,
            Placement::Chunk => RDMA_NOMSG,
        };
        Fixed { xid: self.xid, vers: VERSION, credit: self.credit, proc }.write(writer);
        self.lists.write(writer);
    }

    /// The octets to send, in front of the payload.
    pub fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::with_capacity(self.encoded_bytes());
        self.write(&mut writer);
        writer.finish()
    }

    /// Octets as sent: at least [`HEADER_BYTES_MIN`].
    pub fn encoded_bytes(&self) -> usize {
        FIXED_BYTES + self.lists.encoded_bytes()
    }
}

/// The octets of an RDMA_ERROR that answers a message with `xid` and `vers`, and grants `credit`.
pub fn encode_error(xid: Xid, vers: u32, credit: u32, error: RdmaError) -> Vec<u8> {
    let mut writer = Writer::new();
    Fixed { xid, vers, credit, proc: RDMA_ERROR }.write(&mut writer);
    match error {
        RdmaError::Version { low, high } => {
            writer.u32(ERR_VERS);
            writer.u32(low);
            writer.u32(high);
        }
        RdmaError::Chunk => writer.u32(ERR_CHUNK),
    }
    writer.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_be_bytes()).collect()
    }

    fn transport(octets: &[u8]) -> Transport<'_> {
        match Message::decode(octets) {
            Ok(Message::Transport(transport)) => transport,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn every_cut_of_an_error_is_refused_and_what_follows_it_is_not_looked_at() {
        for (error, len) in [(RdmaError::OUR_VERSIONS, 28), (RdmaError::Chunk, 20)] {
            for vers in [1, 2] {
                let mut octets = encode_error(Xid(7), vers, 3, error);
                assert_eq!(octets.len(), len);
                octets.extend([9; 5]);
                assert_eq!(Message::decode(&octets), Ok(Message::Error { xid: Xid(7), vers, credit: 3, error }));
                for cut in 0..len {
                    let refused = Message::decode(&octets[..cut]).unwrap_err();
                    match refused {
                        HeaderError::TooShort(found) => assert_eq!((found, cut < 16), (cut, true)),
                        HeaderError::UnknownError(_) => assert!(cut >= 16),
                        other => panic!("{other}"),
                    }
                }
            }
        }
    }

    #[test]
    fn every_cut_of_a_header_with_all_lists_is_refused() {
        let whole = words(&[
            1, 1, 9, 1, // fixed
            1, 0, 5, 8, 0, 64, 0, // read list
            1, 1, 6, 4, 0, 32, 1, 0, 0, // write list: a chunk, and an empty one
            1, 1, 7, 4, 0, 16, // reply chunk
        ]);
        assert_eq!(transport(&whole).to_header().encode(), whole);
        for cut in 0..whole.len() {
            let refused = Message::decode(&whole[..cut]).unwrap_err();
            match refused {
                HeaderError::TooShort(_) => assert!(cut < HEADER_BYTES_MIN),
                HeaderError::Lists { fixed, .. } => assert_eq!((fixed.xid, cut >= HEADER_BYTES_MIN), (Xid(1), true)),
                other => panic!("{other}"),
            }
        }
    }

    #[test]
    fn the_payload_begins_behind_a_reply_chunk_of_any_count() {
        for count in 0..4_u32 {
            let mut octets = words(&[1, 1, 9, 0, 0, 0, 1, count]);
            for segment in 0..count {
                octets.extend(words(&[segment, 4, 0, 0]));
            }
            let header_bytes = octets.len();
            octets.extend(words(&[1, 0, 2]));
            let found = transport(&octets);
            assert_eq!(found.payload, &octets[header_bytes..]);
            assert_eq!(found.reply.map(|chunk| chunk.segment_count()), Some(count as usize));
            assert_eq!(found.to_header().encoded_bytes(), header_bytes);
        }
    }

    #[test]
    fn who_sent_a_message_is_in_the_rpc_message_or_nowhere() {
        let inline = |payload: &[u32]| {
            let octets = words(&[&[1, 1, 9, 0, 0, 0, 0], payload].concat());
            transport(&octets).message_type()
        };
        assert_eq!(inline(&[1, 0]), Some(MessageType::Call));
        assert_eq!(inline(&[1, 1]), Some(MessageType::Reply));
        assert_eq!(inline(&[1, 2]), None);
        assert_eq!(inline(&[1]), None);
        assert_eq!(inline(&[]), None);
    }

    #[test]
    fn a_reply_is_judged_by_its_header_alone() {
        let judge = |message: &[u32]| transport(&words(message)).check_reply();
        assert_eq!(judge(&[1, 1, 9, 0, 0, 0, 0, 1, 1]), Ok(()));
        assert_eq!(judge(&[1, 1, 9, 0, 0, 0, 0, 2, 1]), Err(ReplyError::Xid));
        assert_eq!(judge(&[1, 1, 9, 0, 0, 0, 0, 1, 0]), Err(ReplyError::NotAReply));
        assert_eq!(judge(&[1, 1, 9, 0, 0, 0, 0, 1]), Err(ReplyError::NotAReply));
        assert_eq!(judge(&[1, 1, 9, 0, 1, 8, 5, 4, 0, 0, 0, 0, 0, 1, 1]), Err(ReplyError::ReadList));
        assert_eq!(judge(&[1, 1, 9, 1, 1, 0, 5, 4, 0, 0, 0, 0, 0]), Err(ReplyError::NotAReply));
        assert_eq!(judge(&[1, 1, 9, 1, 0, 0, 0]), Err(ReplyError::NoReplyChunk));
        assert_eq!(judge(&[1, 1, 9, 1, 0, 0, 1, 1, 5, 4, 0, 0]), Ok(()));
        assert_eq!(judge(&[1, 1, 9, 1, 0, 0, 1, 1, 5, 4, 0, 0, 7]), Err(ReplyError::Behind(4)));
        let (high, low) = (u32::MAX, u32::MAX);
        assert_eq!(judge(&[1, 1, 9, 1, 0, 0, 1, 1, 5, 4, high, low]), Err(ReplyError::Wraps));
        assert_eq!(judge(&[1, 1, 9, 0, 0, 1, 1, 5, 4, high, low, 0, 0, 1, 1]), Err(ReplyError::Wraps));
    }
}
