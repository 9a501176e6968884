//! Results of every procedure, written and read.

use super::request::Key;
use super::{
    ENTRY_BYTES_MAX, GOT_DATA, KEYS_MAX, LIST_BYTES_MAX, LIST_ENTRIES_MAX, PROGRAM, RANGES_MAX, Status, procedure,
};
use crate::programs::rpc::{Data, REPLY_HEADER_BYTES, ReplyFault, ResultReader, success};
use crate::store::key::KEY_BYTES_MAX;
use crate::wire::codec::{Reader, Wanted, Writer, XdrError, roundup_bytes};
use crate::wire::onc_rpc::{Item, Payload, PayloadWriter, Xid};

/// Octets of a [`Stat`] as encoded.
const STAT_BYTES: usize = 56;
/// Octets of a [`Got`] as encoded, without checksum and data.
const GOT_BYTES: usize = 32;
/// Octets of a [`PinnedVersion`] as encoded.
const PINNED_BYTES: usize = 12;
/// Octets of an [`Entry`] as encoded but for its key and that key's roundup.
pub(super) const ENTRY_BYTES: usize = 20;
const _: () = assert!(ENTRY_BYTES_MAX as usize == ENTRY_BYTES + KEY_BYTES_MAX);

/// What STAT says of one key: all zero but the status where that is not OK.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Stat {
    pub status: Status,
    pub flags: u32,
    pub version: u64,
    /// Octets of the value.
    pub len: u64,
    /// Of them in RAM.
    pub ram_bytes: u64,
    /// Of them on disk alone.
    pub disk_bytes: u64,
    /// Of the run from the first octet on that is in RAM.
    pub lead_bytes: u64,
    /// Expected time until the first octet could be sent.
    pub first_octet_us: u32,
    /// Seconds to live, 0 for ever.
    pub ttl_s: u32,
}

impl Stat {
    /// Nothing but a status.
    pub const fn bare(status: Status) -> Self {
        Self {
            status,
            flags: 0,
            version: 0,
            len: 0,
            ram_bytes: 0,
            disk_bytes: 0,
            lead_bytes: 0,
            first_octet_us: 0,
            ttl_s: 0,
        }
    }

    fn read(words: &mut Reader<'_>) -> Result<Self, XdrError> {
        Ok(Self {
            status: read_status(words)?,
            flags: words.u32()?,
            version: words.u64()?,
            len: words.u64()?,
            ram_bytes: words.u64()?,
            disk_bytes: words.u64()?,
            lead_bytes: words.u64()?,
            first_octet_us: words.u32()?,
            ttl_s: words.u32()?,
        })
    }

    fn write(&self, words: &mut Writer) {
        write_status(words, self.status);
        words.u32(self.flags);
        for number in [self.version, self.len, self.ram_bytes, self.disk_bytes, self.lead_bytes] {
            words.u64(number);
        }
        words.u32(self.first_octet_us);
        words.u32(self.ttl_s);
    }
}

/// What GET says of one range. `D` is where the octets are.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Got<D> {
    pub status: Status,
    pub flags: u32,
    pub version: u64,
    /// Octets of the whole value.
    pub len: u64,
    /// Checksum of the range.
    pub crc32c: Option<u32>,
    pub data: D,
}

/// What became of a PUT or PUT_MORE.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct PutResult {
    pub status: Status,
    /// Of what was committed, or zero.
    pub version: u64,
}

impl PutResult {
    /// Nothing was committed.
    pub const fn bare(status: Status) -> Self {
        Self { status, version: 0 }
    }
}

/// What became of one key of a PIN.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct PinnedVersion {
    pub status: Status,
    /// What is pinned, or zero.
    pub version: u64,
}

/// One key of a LIST.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Entry {
    pub key: Vec<u8>,
    pub version: u64,
    /// Octets of the value.
    pub len: u64,
}

impl Entry {
    /// Octets as encoded of the entry for a key of `key_bytes` octets.
    pub const fn encoded_bytes(key_bytes: usize) -> usize {
        ENTRY_BYTES + key_bytes + roundup_bytes(key_bytes as u64) as usize
    }
}

/// What LIST says.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Page {
    pub status: Status,
    /// Cookie of the next page, empty if there is no more.
    pub next: Vec<u8>,
    pub entries: Vec<Entry>,
}

/// The results of a call. Octets of values are [`Item`]s where they are written, [`Data`] where they are read.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Answer<D = Data> {
    Null,
    Stat {
        /// Keys from the first on that are all there.
        leading: u32,
        stats: Vec<Stat>,
    },
    Get(Vec<Got<D>>),
    Put(PutResult),
    PutDrop(Status),
    /// DELETE, TOUCH, UNPIN.
    Statuses(Vec<Status>),
    List(Page),
    Pin(Vec<PinnedVersion>),
}

impl<D> Answer<D> {
    /// The same answer with the octets of each range where `place` says.
    pub fn map_data<E>(self, mut place: impl FnMut(D) -> E) -> Answer<E> {
        match self {
            Self::Null => Answer::Null,
            Self::Stat { leading, stats } => Answer::Stat { leading, stats },
            Self::Get(got) => {
                let place = |Got { status, flags, version, len, crc32c, data }| {
                    let data = place(data);
                    Got { status, flags, version, len, crc32c, data }
                };
                Answer::Get(got.into_iter().map(place).collect())
            }
            Self::Put(result) => Answer::Put(result),
            Self::PutDrop(status) => Answer::PutDrop(status),
            Self::Statuses(statuses) => Answer::Statuses(statuses),
            Self::List(page) => Answer::List(page),
            Self::Pin(pinned) => Answer::Pin(pinned),
        }
    }
}

impl Answer<Item> {
    /// The reply message.
    ///
    /// # Panics
    /// If there is more in it than may be.
    pub fn encode(&self, xid: Xid) -> Payload {
        let mut writer = success(xid);
        self.encode_results(&mut writer);
        writer.finish()
    }

    fn encode_results(&self, writer: &mut PayloadWriter) {
        let words = writer.words();
        match self {
            Self::Null => {}
            Self::Stat { leading, stats } => {
                assert!(stats.len() <= KEYS_MAX, "{} keys", stats.len());
                words.u32(*leading);
                words.array(stats, |words, stat| stat.write(words));
            }
            Self::Get(got) => {
                assert!(got.len() <= RANGES_MAX, "{} ranges", got.len());
                words.count(got.len());
                for got in got {
                    let words = writer.words();
                    write_status(words, got.status);
                    words.u32(got.flags);
                    words.u64(got.version);
                    words.u64(got.len);
                    words.optional(got.crc32c, Writer::u32);
                    writer.item(got.data);
                }
            }
            Self::Put(result) => {
                write_status(words, result.status);
                words.u64(result.version);
            }
            Self::PutDrop(status) => write_status(words, *status),
            Self::Statuses(statuses) => {
                assert!(statuses.len() <= KEYS_MAX, "{} keys", statuses.len());
                words.array(statuses, |words, &status| write_status(words, status));
            }
            Self::List(page) => {
                assert!(page.entries.len() <= LIST_ENTRIES_MAX, "{} entries", page.entries.len());
                assert!(page.next.len() <= KEY_BYTES_MAX);
                write_status(words, page.status);
                words.opaque(&page.next);
                words.array(&page.entries, |words, entry| {
                    words.opaque(&entry.key);
                    words.u64(entry.version);
                    words.u64(entry.len);
                });
            }
            Self::Pin(pinned) => {
                assert!(pinned.len() <= KEYS_MAX, "{} keys", pinned.len());
                words.array(pinned, |words, pinned| {
                    write_status(words, pinned.status);
                    words.u64(pinned.version);
                });
            }
        }
    }
}

/// What the answer to a request will be like: what to make room for, and what to hold it against.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Expectation {
    Null,
    Stat {
        count: usize,
        until_miss: bool,
    },
    Get {
        /// Octets at most, of each range.
        counts: Vec<u32>,
        crc32c: bool,
    },
    Put,
    PutDrop,
    Statuses {
        count: usize,
    },
    List {
        count: u32,
        bytes: u32,
    },
    Pin {
        count: usize,
    },
}

impl Expectation {
    /// Octets at most of each eligible result, in stream order.
    pub fn items(&self) -> &[u32] {
        match self {
            Self::Get { counts, .. } => counts,
            _ => &[],
        }
    }

    /// Octets of the largest reply message with every eligible result left out, from a server whose verifier has no body.
    pub fn reduced_bytes_max(&self) -> u64 {
        let array = |count: usize, item_bytes: usize| 4 + count as u64 * item_bytes as u64;
        let results = match self {
            Self::Null => 0,
            Self::Stat { count, .. } => 4 + array(*count, STAT_BYTES),
            Self::Get { counts, crc32c } => array(counts.len(), GOT_BYTES + if *crc32c { 4 } else { 0 }),
            Self::Put => 12,
            Self::PutDrop => 4,
            Self::Statuses { count } => array(*count, 4),
            Self::List { bytes, .. } => 12 + KEY_BYTES_MAX as u64 + u64::from(*bytes.min(&LIST_BYTES_MAX)),
            Self::Pin { count } => array(*count, PINNED_BYTES),
        };
        REPLY_HEADER_BYTES + results
    }

    /// Reads a reply message. `chunks` are the octets written to each write chunk that was offered, in order, `None` for
    /// one that was offered empty.
    ///
    /// # Errors
    /// [`ReplyFault`].
    pub fn decode(&self, stream: &[u8], chunks: &[Option<u64>]) -> Result<(Xid, Answer), ReplyFault> {
        let eligible = match self {
            Self::Get { .. } => PROGRAM.procedures[procedure::GET as usize].results,
            _ => &[],
        };
        let (xid, results) = ResultReader::open(stream, chunks, eligible)?;
        Ok((xid, results.read_all(|results| self.read(results))?))
    }

    fn read(&self, results: &mut ResultReader<'_>) -> Result<Answer, ReplyFault> {
        let words = results.words();
        Ok(match self {
            Self::Null => Answer::Null,
            Self::Stat { count, until_miss } => {
                let leading = words.u32()?;
                let stats: Vec<_> = words.array(KEYS_MAX, STAT_BYTES, Stat::read)?;
                let found = stats.iter().take_while(|stat| stat.status == Status::Ok).count();
                let expected = if *until_miss { found.saturating_add(1).min(*count) } else { *count };
                if stats.len() != expected || leading as usize != found {
                    return Err(ReplyFault::Count);
                }
                Answer::Stat { leading, stats }
            }
            Self::Get { counts, crc32c } => {
                if words.count(RANGES_MAX, GOT_BYTES)? != counts.len() {
                    return Err(ReplyFault::Count);
                }
                let mut answer = Vec::with_capacity(counts.len());
                for &max in counts {
                    let words = results.words();
                    let (status, flags) = (read_status(words)?, words.u32()?);
                    let (version, len) = (words.u64()?, words.u64()?);
                    let checksum = words.optional::<_, XdrError>(Reader::u32)?;
                    let data = results.data(&GOT_DATA)?;
                    let bytes_max = if status == Status::Ok { max } else { 0 };
                    if data.len() > bytes_max {
                        return Err(ReplyFault::TooLong { len: data.len(), max: bytes_max });
                    }
                    if checksum.is_some() != (*crc32c && status == Status::Ok) {
                        return Err(ReplyFault::Checksum);
                    }
                    answer.push(Got { status, flags, version, len, crc32c: checksum, data });
                }
                Answer::Get(answer)
            }
            Self::Put => Answer::Put(PutResult { status: read_status(words)?, version: words.u64()? }),
            Self::PutDrop => Answer::PutDrop(read_status(words)?),
            Self::Statuses { count } => {
                let statuses: Vec<_> = words.array(KEYS_MAX, 4, read_status)?;
                if statuses.len() != *count {
                    return Err(ReplyFault::Count);
                }
                Answer::Statuses(statuses)
            }
            Self::List { count, .. } => {
                let (status, next) = (read_status(words)?, words.opaque(KEY_BYTES_MAX)?.to_vec());
                let max = LIST_ENTRIES_MAX.min(*count as usize);
                let entries = words.array(max, Entry::encoded_bytes(1), |words| {
                    let key = Key::read(words)?.as_bytes().to_vec();
                    Ok::<_, XdrError>(Entry { key, version: words.u64()?, len: words.u64()? })
                })?;
                Answer::List(Page { status, next, entries })
            }
            Self::Pin { count } => {
                let pinned = words.array(KEYS_MAX, PINNED_BYTES, |words| {
                    Ok::<_, XdrError>(PinnedVersion { status: read_status(words)?, version: words.u64()? })
                })?;
                if pinned.len() != *count {
                    return Err(ReplyFault::Count);
                }
                Answer::Pin(pinned)
            }
        })
    }
}

fn read_status(words: &mut Reader<'_>) -> Result<Status, XdrError> {
    let offset = words.offset();
    let found = words.u32()?;
    Status::from_number(found).ok_or(XdrError { offset, wanted: Wanted::Value { what: "a status", found } })
}

fn write_status(words: &mut Writer, status: Status) {
    words.u32(status.number());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::onc_rpc::Part;

    /// The reply with every item left out: the stream beside write chunks.
    fn reduced(answer: &Answer<Item>) -> Vec<u8> {
        let payload = answer.encode(Xid(4));
        let bytes = payload.into_parts().into_iter().filter_map(|part| match part {
            Part::Bytes(bytes) => Some(bytes),
            Part::Item(_) => None,
        });
        bytes.collect::<Vec<_>>().concat()
    }

    fn got(status: Status, len: u32) -> Got<Item> {
        Got { status, flags: 0, version: 1, len: 100, crc32c: None, data: Item { token: 0, len } }
    }

    #[test]
    fn a_miss_returns_its_chunk_unused_and_moves_no_other() {
        let answer = Answer::Get(vec![got(Status::Ok, 8), got(Status::NotFound, 0), got(Status::Ok, 3)]);
        let expected = Expectation::Get { counts: vec![8, 8, 8], crc32c: false };
        let (xid, found) = expected.decode(&reduced(&answer), &[Some(8), Some(0), Some(3)]).unwrap();
        let Answer::Get(found) = found else { panic!("{found:?}") };
        assert_eq!(xid, Xid(4));
        let places: Vec<_> = found.into_iter().map(|got| got.data).collect();
        let chunk = |index, len| Data::Chunk { index, len };
        assert_eq!(places, [chunk(0, 8), chunk(1, 0), chunk(2, 3)]);
    }

    #[test]
    fn an_answer_that_is_not_to_the_question_is_refused() {
        let get = |counts: &[u32], crc32c| Expectation::Get { counts: counts.to_vec(), crc32c };
        let one = reduced(&Answer::Get(vec![got(Status::Ok, 8)]));
        assert!(get(&[8], false).decode(&one, &[Some(8)]).is_ok());
        assert_eq!(get(&[8, 8], false).decode(&one, &[Some(8)]), Err(ReplyFault::Count));
        assert_eq!(get(&[7], false).decode(&one, &[Some(8)]), Err(ReplyFault::TooLong { len: 8, max: 7 }));
        assert_eq!(get(&[8], true).decode(&one, &[Some(8)]), Err(ReplyFault::Checksum));
        let late = reduced(&Answer::Get(vec![got(Status::Late, 8)]));
        assert_eq!(get(&[8], false).decode(&late, &[Some(8)]), Err(ReplyFault::TooLong { len: 8, max: 0 }));
        let statuses = reduced(&Answer::Statuses(vec![Status::Ok; 2]));
        assert!(Expectation::Statuses { count: 2 }.decode(&statuses, &[]).is_ok());
        assert_eq!(Expectation::Statuses { count: 3 }.decode(&statuses, &[]), Err(ReplyFault::Count));
        assert_eq!(Expectation::Pin { count: 2 }.decode(&reduced(&Answer::Pin(vec![])), &[]), Err(ReplyFault::Count));
    }

    #[test]
    fn the_leading_run_is_what_the_statuses_say() {
        let there = Stat { status: Status::Ok, ..Stat::bare(Status::Ok) };
        let miss = Stat::bare(Status::NotFound);
        let answer = |leading, stats: &[Stat]| reduced(&Answer::Stat { leading, stats: stats.to_vec() });
        let all = Expectation::Stat { count: 3, until_miss: false };
        assert!(all.decode(&answer(1, &[there, miss, there]), &[]).is_ok());
        assert_eq!(all.decode(&answer(2, &[there, miss, there]), &[]), Err(ReplyFault::Count));
        assert_eq!(all.decode(&answer(1, &[there, miss]), &[]), Err(ReplyFault::Count));
        let until_miss = Expectation::Stat { count: 3, until_miss: true };
        assert!(until_miss.decode(&answer(1, &[there, miss]), &[]).is_ok());
        assert!(until_miss.decode(&answer(3, &[there; 3]), &[]).is_ok());
        assert_eq!(until_miss.decode(&answer(1, &[there, miss, there]), &[]), Err(ReplyFault::Count));
        assert_eq!(until_miss.decode(&answer(2, &[there; 2]), &[]), Err(ReplyFault::Count));
    }

    #[test]
    fn sixty_four_ranges_and_their_chunks_fit_a_reply_of_4096_octets() {
        let expected = Expectation::Get { counts: vec![1 << 16; 64], crc32c: true };
        // RFC 8166 §4: fixed fields, read list, reply chunk, and 64 write chunks of one segment.
        let header = 16 + 4 + 4 + 4 + 64 * 24;
        assert!(header + expected.reduced_bytes_max() <= 4096);
    }
}
