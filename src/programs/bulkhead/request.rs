//! Arguments of every procedure, read and written.

use super::answer::Expectation;
use super::{KEYS_MAX, PROGRAM, PROGRAM_NUMBER, PUT_DATA, RANGES_MAX, VERSION, procedure};
use crate::programs::rpc::{ArgumentFault, ArgumentReader, Call, Data, Procedure};
use crate::store::Condition;
use crate::store::key::KEY_BYTES_MAX;
use crate::wire::codec::{Reader, Wanted, Writer, XdrError};
use crate::wire::onc_rpc::{CallHeader, Item, OpaqueAuth, Payload, PayloadWriter, Xid};

/// Octets of the shortest key as encoded.
const KEY_BYTES_MIN: usize = 8;

/// A key of 1 to 1,024 octets.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Key<'a>(&'a [u8]);

impl<'a> Key<'a> {
    /// `None` if it is empty or too long.
    pub const fn new(octets: &'a [u8]) -> Option<Self> {
        if octets.is_empty() || octets.len() > KEY_BYTES_MAX { None } else { Some(Self(octets)) }
    }

    pub const fn as_bytes(&self) -> &'a [u8] {
        self.0
    }

    pub(super) fn read(reader: &mut Reader<'a>) -> Result<Self, XdrError> {
        let offset = reader.offset();
        let wanted = Wanted::Value { what: "a key of at least one octet", found: 0 };
        Self::new(reader.opaque(KEY_BYTES_MAX)?).ok_or(XdrError { offset, wanted })
    }

    pub(super) fn write(self, writer: &mut Writer) {
        writer.opaque(self.0);
    }
}

/// Arguments of STAT.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct StatRequest<'a> {
    /// Stop behind the first key that is not there.
    pub until_miss: bool,
    pub keys: Vec<Key<'a>>,
}

/// One range of a GET.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct RangeOf<'a> {
    pub key: Key<'a>,
    /// The version wanted, 0 for any.
    pub version: u64,
    /// First octet.
    pub offset: u64,
    /// Octets at most.
    pub count: u32,
}

/// Arguments of GET.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct GetRequest<'a> {
    /// Checksums are wanted.
    pub crc32c: bool,
    /// Microseconds from when the server had the call, 0 for none.
    pub deadline_us: u32,
    pub ranges: Vec<RangeOf<'a>>,
}

/// Arguments of PUT. `D` is where the octets are.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Put<'a, D> {
    pub key: Key<'a>,
    /// The client's number for the draft.
    pub draft: u64,
    /// Octets of the whole value.
    pub len: u64,
    pub flags: u32,
    /// Seconds to live, 0 for ever.
    pub ttl_s: u32,
    pub condition: Condition,
    /// `data` is the whole value.
    pub commit: bool,
    /// Checksum of `data`.
    pub crc32c: Option<u32>,
    pub data: D,
}

/// Arguments of PUT_MORE.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct PutMore<D> {
    pub draft: u64,
    /// Of the first octet of `data` in the value.
    pub offset: u64,
    /// `data` is the end of the value.
    pub commit: bool,
    /// Checksum of `data`.
    pub crc32c: Option<u32>,
    pub data: D,
}

/// One key of a DELETE.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Deletion<'a> {
    pub key: Key<'a>,
    /// The version to be deleted, 0 for any.
    pub version: u64,
}

/// One key of a TOUCH.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Touch<'a> {
    pub key: Key<'a>,
    /// Seconds to live, 0 for ever.
    pub ttl_s: u32,
}

/// Arguments of LIST.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct ListRequest<'a> {
    pub prefix: &'a [u8],
    /// The last key of the page before, empty for the first page.
    pub cookie: &'a [u8],
    /// Entries at most.
    pub count: u32,
    /// Octets of the entries as encoded, at most.
    pub bytes: u32,
}

/// A call of the program. Octets of values are [`Item`]s where it is written, [`Data`] where it is read.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Request<'a, D = Data> {
    Null,
    Stat(StatRequest<'a>),
    Get(GetRequest<'a>),
    Put(Put<'a, D>),
    PutMore(PutMore<D>),
    PutDrop { draft: u64 },
    Delete(Vec<Deletion<'a>>),
    Touch(Vec<Touch<'a>>),
    List(ListRequest<'a>),
    Pin(Vec<Key<'a>>),
    Unpin(Vec<Key<'a>>),
}

impl<'a, D> Request<'a, D> {
    /// The same request with its octets, if it has any, where `place` says.
    pub fn map_data<E>(self, place: impl FnOnce(D) -> E) -> Request<'a, E> {
        match self {
            Self::Null => Request::Null,
            Self::Stat(stat) => Request::Stat(stat),
            Self::Get(get) => Request::Get(get),
            Self::Put(Put { key, draft, len, flags, ttl_s, condition, commit, crc32c, data }) => {
                let data = place(data);
                Request::Put(Put { key, draft, len, flags, ttl_s, condition, commit, crc32c, data })
            }
            Self::PutMore(PutMore { draft, offset, commit, crc32c, data }) => {
                Request::PutMore(PutMore { draft, offset, commit, crc32c, data: place(data) })
            }
            Self::PutDrop { draft } => Request::PutDrop { draft },
            Self::Delete(deletions) => Request::Delete(deletions),
            Self::Touch(touches) => Request::Touch(touches),
            Self::List(list) => Request::List(list),
            Self::Pin(keys) => Request::Pin(keys),
            Self::Unpin(keys) => Request::Unpin(keys),
        }
    }

    /// The procedure it calls, with what of it may be reduced.
    pub fn procedure(&self) -> &'static Procedure {
        let number = match self {
            Self::Null => procedure::NULL,
            Self::Stat(_) => procedure::STAT,
            Self::Get(_) => procedure::GET,
            Self::Put(_) => procedure::PUT,
            Self::PutMore(_) => procedure::PUT_MORE,
            Self::PutDrop { .. } => procedure::PUT_DROP,
            Self::Delete(_) => procedure::DELETE,
            Self::Touch(_) => procedure::TOUCH,
            Self::List(_) => procedure::LIST,
            Self::Pin(_) => procedure::PIN,
            Self::Unpin(_) => procedure::UNPIN,
        };
        // The table has every number, in order: a test sees to that.
        &PROGRAM.procedures[number as usize]
    }

    /// What it does is there when its connection has ended, and would show if it were done twice: when it comes again, on
    /// another connection, it is answered as the first time and not executed. All others are executed again: they do no
    /// harm, and what a connection held (drafts, pins) has ended with it, so that an old answer would be wrong.
    pub fn has_lasting_effect(&self) -> bool {
        match self {
            Self::Put(Put { commit, .. }) | Self::PutMore(PutMore { commit, .. }) => *commit,
            Self::Delete(_) => true,
            Self::Null | Self::Stat(_) | Self::Get(_) | Self::List(_) | Self::Touch(_) => false,
            Self::PutDrop { .. } | Self::Pin(_) | Self::Unpin(_) => false,
        }
    }

    /// What the answer will be like.
    pub fn expectation(&self) -> Expectation {
        match self {
            Self::Null => Expectation::Null,
            Self::Stat(stat) => Expectation::Stat { count: stat.keys.len(), until_miss: stat.until_miss },
            Self::Get(get) => {
                Expectation::Get { counts: get.ranges.iter().map(|range| range.count).collect(), crc32c: get.crc32c }
            }
            Self::Put(_) | Self::PutMore(_) => Expectation::Put,
            Self::PutDrop { .. } => Expectation::PutDrop,
            Self::Delete(deletions) => Expectation::Statuses { count: deletions.len() },
            Self::Touch(touches) => Expectation::Statuses { count: touches.len() },
            Self::List(list) => Expectation::List { count: list.count, bytes: list.bytes },
            Self::Pin(keys) => Expectation::Pin { count: keys.len() },
            Self::Unpin(keys) => Expectation::Statuses { count: keys.len() },
        }
    }
}

impl Request<'_, Item> {
    /// The call message.
    ///
    /// # Panics
    /// If there are more keys, ranges or octets than the program takes.
    pub fn encode(&self, xid: Xid, credential: OpaqueAuth<'_>) -> Payload {
        let mut writer = PayloadWriter::new();
        let procedure = self.procedure().number;
        let verifier = OpaqueAuth::NONE;
        CallHeader { xid, program: PROGRAM_NUMBER, version: VERSION, procedure, credential, verifier }
            .write(writer.words());
        self.encode_arguments(&mut writer);
        writer.finish()
    }

    fn encode_arguments(&self, writer: &mut PayloadWriter) {
        let words = writer.words();
        match self {
            Self::Null => {}
            Self::Stat(stat) => {
                words.bool(stat.until_miss);
                write_keys(words, &stat.keys);
            }
            Self::Get(get) => {
                assert!(get.ranges.len() <= RANGES_MAX, "{} ranges", get.ranges.len());
                words.bool(get.crc32c);
                words.u32(get.deadline_us);
                words.array(&get.ranges, |words, range| {
                    range.key.write(words);
                    words.u64(range.version);
                    words.u64(range.offset);
                    words.u32(range.count);
                });
            }
            Self::Put(put) => {
                put.key.write(words);
                words.u64(put.draft);
                words.u64(put.len);
                words.u32(put.flags);
                words.u32(put.ttl_s);
                write_condition(words, put.condition);
                words.bool(put.commit);
                words.optional(put.crc32c, Writer::u32);
                write_data(writer, put.data);
            }
            Self::PutMore(more) => {
                words.u64(more.draft);
                words.u64(more.offset);
                words.bool(more.commit);
                words.optional(more.crc32c, Writer::u32);
                write_data(writer, more.data);
            }
            Self::PutDrop { draft } => words.u64(*draft),
            Self::Delete(deletions) => {
                assert!(deletions.len() <= KEYS_MAX, "{} keys", deletions.len());
                words.array(deletions, |words, deletion| {
                    deletion.key.write(words);
                    words.u64(deletion.version);
                });
            }
            Self::Touch(touches) => {
                assert!(touches.len() <= KEYS_MAX, "{} keys", touches.len());
                words.array(touches, |words, touch| {
                    touch.key.write(words);
                    words.u32(touch.ttl_s);
                });
            }
            Self::List(list) => {
                assert!(list.prefix.len() <= KEY_BYTES_MAX && list.cookie.len() <= KEY_BYTES_MAX);
                words.opaque(list.prefix);
                words.opaque(list.cookie);
                words.u32(list.count);
                words.u32(list.bytes);
            }
            Self::Pin(keys) | Self::Unpin(keys) => write_keys(words, keys),
        }
    }
}

impl<'a> Request<'a, Data> {
    /// Reads the arguments of `call`.
    ///
    /// # Errors
    /// [`ArgumentFault`].
    ///
    /// # Panics
    /// If `call` is to another program.
    pub fn parse(call: Call<'a>) -> Result<Self, ArgumentFault> {
        assert_eq!((call.program.number, call.program.version), (PROGRAM_NUMBER, VERSION));
        call.arguments.read_all(|arguments| Self::read(call.procedure.number, arguments))
    }

    fn read(number: u32, arguments: &mut ArgumentReader<'a>) -> Result<Self, ArgumentFault> {
        let words = arguments.words();
        Ok(match number {
            procedure::NULL => Self::Null,
            procedure::STAT => Self::Stat(StatRequest { until_miss: words.bool()?, keys: read_keys(words)? }),
            procedure::GET => Self::Get(GetRequest {
                crc32c: words.bool()?,
                deadline_us: words.u32()?,
                ranges: words.array(RANGES_MAX, KEY_BYTES_MIN + 20, |words| {
                    let key = Key::read(words)?;
                    Ok::<_, XdrError>(RangeOf { key, version: words.u64()?, offset: words.u64()?, count: words.u32()? })
                })?,
            }),
            procedure::PUT => Self::Put(Put {
                key: Key::read(words)?,
                draft: words.u64()?,
                len: words.u64()?,
                flags: words.u32()?,
                ttl_s: words.u32()?,
                condition: read_condition(words)?,
                commit: words.bool()?,
                crc32c: words.optional(Reader::u32)?,
                data: arguments.data(&PUT_DATA)?,
            }),
            procedure::PUT_MORE => Self::PutMore(PutMore {
                draft: words.u64()?,
                offset: words.u64()?,
                commit: words.bool()?,
                crc32c: words.optional(Reader::u32)?,
                data: arguments.data(&PUT_DATA)?,
            }),
            procedure::PUT_DROP => Self::PutDrop { draft: words.u64()? },
            procedure::DELETE => Self::Delete(words.array(KEYS_MAX, KEY_BYTES_MIN + 8, |words| {
                Ok::<_, XdrError>(Deletion { key: Key::read(words)?, version: words.u64()? })
            })?),
            procedure::TOUCH => Self::Touch(words.array(KEYS_MAX, KEY_BYTES_MIN + 4, |words| {
                Ok::<_, XdrError>(Touch { key: Key::read(words)?, ttl_s: words.u32()? })
            })?),
            procedure::LIST => Self::List(ListRequest {
                prefix: words.opaque(KEY_BYTES_MAX)?,
                cookie: words.opaque(KEY_BYTES_MAX)?,
                count: words.u32()?,
                bytes: words.u32()?,
            }),
            procedure::PIN => Self::Pin(read_keys(words)?),
            procedure::UNPIN => Self::Unpin(read_keys(words)?),
            other => unreachable!("procedure {other} is not in the table"),
        })
    }
}

fn read_keys<'a>(words: &mut Reader<'a>) -> Result<Vec<Key<'a>>, XdrError> {
    words.array(KEYS_MAX, KEY_BYTES_MIN, Key::read)
}

fn write_keys(words: &mut Writer, keys: &[Key<'_>]) {
    assert!(keys.len() <= KEYS_MAX, "{} keys", keys.len());
    words.array(keys, |words, key| key.write(words));
}

fn write_data(writer: &mut PayloadWriter, data: Item) {
    assert!(data.len <= PUT_DATA.bytes_max, "{} octets of data", data.len);
    writer.item(data);
}

fn read_condition(words: &mut Reader<'_>) -> Result<Condition, XdrError> {
    let offset = words.offset();
    Ok(match words.u32()? {
        0 => Condition::Any,
        1 => Condition::Absent,
        2 => Condition::Present,
        3 => Condition::Version(words.u64()?),
        found => return Err(XdrError { offset, wanted: Wanted::Value { what: "a condition", found } }),
    })
}

fn write_condition(words: &mut Writer, condition: Condition) {
    match condition {
        Condition::Any => words.u32(0),
        Condition::Absent => words.u32(1),
        Condition::Present => words.u32(2),
        Condition::Version(version) => {
            words.u32(3);
            words.u64(version);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::programs::bulkhead::CALL_BYTES_MAX;
    use crate::programs::rpc::{Arguments, accept};
    use crate::wire::onc_rpc::{AuthSys, Part};

    /// The call message with every item inline, its octets all zero.
    fn unreduced(payload: &Payload) -> Vec<u8> {
        let mut stream = Vec::new();
        for part in payload.parts() {
            match part {
                Part::Bytes(bytes) => stream.extend_from_slice(bytes),
                Part::Item(item) => stream.resize(stream.len() + (item.len as usize).next_multiple_of(4), 0),
            }
        }
        assert_eq!(stream.len() as u64, payload.stream_bytes());
        stream
    }

    fn parse(stream: &[u8]) -> Result<Request<'_>, ArgumentFault> {
        Request::parse(accept(&[&PROGRAM], Arguments { stream, chunks: &[] }).unwrap())
    }

    #[test]
    fn every_procedure_is_in_the_table_at_its_number() {
        for (at, procedure) in PROGRAM.procedures.iter().enumerate() {
            assert_eq!(procedure.number, at as u32);
            let request = parse_any(procedure.number);
            assert_eq!(request.procedure(), procedure);
        }
    }

    /// A request of that procedure, from arguments that are all zero but for the keys.
    fn parse_any(number: u32) -> Request<'static, Item> {
        let key = Key::new(b"k").unwrap();
        let data = Item { token: 0, len: 0 };
        match number {
            procedure::NULL => Request::Null,
            procedure::STAT => Request::Stat(StatRequest { until_miss: false, keys: vec![key] }),
            procedure::GET => Request::Get(GetRequest { crc32c: false, deadline_us: 0, ranges: vec![] }),
            procedure::PUT => Request::Put(Put {
                key,
                draft: 0,
                len: 0,
                flags: 0,
                ttl_s: 0,
                condition: Condition::Any,
                commit: true,
                crc32c: None,
                data,
            }),
            procedure::PUT_MORE => Request::PutMore(PutMore { draft: 0, offset: 0, commit: true, crc32c: None, data }),
            procedure::PUT_DROP => Request::PutDrop { draft: 0 },
            procedure::DELETE => Request::Delete(vec![]),
            procedure::TOUCH => Request::Touch(vec![]),
            procedure::LIST => Request::List(ListRequest { prefix: b"", cookie: b"", count: 0, bytes: 0 }),
            procedure::PIN => Request::Pin(vec![key]),
            _ => Request::Unpin(vec![key]),
        }
    }

    #[test]
    fn commits_and_deletions_are_done_once_and_what_ends_with_a_connection_is_done_again() {
        let lasting: Vec<_> = PROGRAM
            .procedures
            .iter()
            .filter(|procedure| parse_any(procedure.number).has_lasting_effect())
            .map(|procedure| procedure.name)
            .collect();
        assert_eq!(lasting, ["PUT", "PUT_MORE", "DELETE"]);
        let Request::Put(put) = parse_any(procedure::PUT) else { panic!("it is a PUT") };
        assert!(!Request::Put(Put { commit: false, ..put }).has_lasting_effect());
    }

    #[test]
    fn the_longest_call_of_each_procedure_is_within_the_bound() {
        let long = [b'k'; KEY_BYTES_MAX];
        let key = Key::new(&long).unwrap();
        let range = RangeOf { key, version: 0, offset: 0, count: 0 };
        let sys = AuthSys { stamp: 0, machine_name: &[b'm'; 255], uid: 0, gid: 0, gids: vec![0; 16] }.body();
        let requests: [Request<'_, Item>; 6] = [
            Request::Stat(StatRequest { until_miss: true, keys: vec![key; KEYS_MAX] }),
            Request::Get(GetRequest { crc32c: true, deadline_us: 1, ranges: vec![range; RANGES_MAX] }),
            Request::Delete(vec![Deletion { key, version: 1 }; KEYS_MAX]),
            Request::Touch(vec![Touch { key, ttl_s: 1 }; KEYS_MAX]),
            Request::Pin(vec![key; KEYS_MAX]),
            Request::List(ListRequest { prefix: &long, cookie: &long, count: 1, bytes: 1 }),
        ];
        for request in requests {
            let bytes = request.encode(Xid(1), AuthSys::around(&sys)).stream_bytes();
            assert!(bytes <= CALL_BYTES_MAX as u64, "{}: {bytes} octets", request.procedure().name);
        }
    }

    #[test]
    fn more_than_may_be_is_garbage() {
        let too_many = |number: u32, words: &[u32], count: u32| {
            let header = parse_header(number);
            let words: Vec<u8> = words.iter().chain([&count]).flat_map(|word| word.to_be_bytes()).collect();
            let stream = [header, words, vec![0; 64 * 1024]].concat();
            assert!(matches!(parse(&stream), Err(ArgumentFault::Xdr(_))), "procedure {number}");
        };
        let keys = KEYS_MAX as u32 + 1;
        too_many(procedure::STAT, &[0], keys);
        too_many(procedure::GET, &[0, 0], RANGES_MAX as u32 + 1);
        too_many(procedure::DELETE, &[], keys);
        too_many(procedure::TOUCH, &[], keys);
        too_many(procedure::PIN, &[], keys);
        too_many(procedure::UNPIN, &[], keys);
        too_many(procedure::LIST, &[], KEY_BYTES_MAX as u32 + 1);
        too_many(procedure::PUT, &[], KEY_BYTES_MAX as u32 + 1);
    }

    fn parse_header(number: u32) -> Vec<u8> {
        let mut stream = unreduced(&Request::<Item>::Null.encode(Xid(1), OpaqueAuth::NONE));
        stream[20..24].copy_from_slice(&number.to_be_bytes());
        stream
    }

    #[test]
    fn an_empty_key_is_garbage() {
        let stream = [parse_header(procedure::PIN), vec![0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0]].concat();
        assert!(matches!(parse(&stream), Err(ArgumentFault::Xdr(_))));
        assert_eq!(Key::new(b""), None);
        assert_eq!(Key::new(&[0; KEY_BYTES_MAX + 1]), None);
    }

    #[test]
    fn a_condition_that_there_is_not_is_garbage() {
        let Request::Put(put) = parse_any(procedure::PUT) else { panic!("it is a PUT") };
        let mut stream = unreduced(&Request::Put(put).encode(Xid(1), OpaqueAuth::NONE));
        // Behind a header of 40 octets: key 8, draft 8, length 8, flags 4, ttl 4.
        let at = 40 + 32;
        assert_eq!(stream[at..at + 4], [0; 4]);
        assert!(parse(&stream).is_ok());
        stream[at + 3] = 4;
        assert!(matches!(parse(&stream), Err(ArgumentFault::Xdr(_))));
    }
}
