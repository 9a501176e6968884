//! Calls of program `bulkhead`, and what their answers are to whoever asked. Pure.

use std::io::{self, ErrorKind};
use std::ops::Range;

use super::port::{Argument, Finished, Lent};
use crate::client::{ClientError, ServerUrl};
use crate::fabric::SharedSpan;
use crate::programs::bulkhead::{
    Answer, Deletion, ENTRY_BYTES_MAX, Expectation, GetRequest, Item, KEYS_MAX, Key, LIST_BYTES_MAX, LIST_ENTRIES_MAX,
    ListRequest, Put, PutMore, RANGES_MAX, RangeOf, Request, StatRequest, Status, Touch,
};
use crate::programs::rpc::{Data, ReplyFault};
use crate::wire::onc_rpc::{OpaqueAuth, Xid};
use crate::wire::rpcrdma::requester::{Call, Plan, Reduction, Terms};

/// Octets looked at in one go where a checksum is taken.
const BOUNCE_BYTES: usize = 64 << 10;

/// A range of a value, and where it lands.
#[derive(Clone, Debug)]
pub struct GetRange {
    pub key: Vec<u8>,
    /// The version wanted, 0 for any.
    pub version: u64,
    /// First octet.
    pub offset: u64,
    /// Memory for as many octets as are wanted: fewer than 2^32, from a multiple of 8 octets on.
    pub into: SharedSpan,
}

/// What became of a range. All but the status is zero where there is no value.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct GotRange {
    /// [`Status::BadChecksum`]: the octets that came are not those that were sent.
    pub status: Status,
    pub flags: u32,
    pub version: u64,
    /// Octets of the whole value.
    pub len: u64,
    /// Octets that landed, at the front of the memory.
    pub count: u32,
}

/// A call, and what its answer will be like.
#[derive(Debug)]
pub(super) struct Operation {
    pub(super) call: Call,
    pub(super) lent: Lent,
    pub(super) expectation: Expectation,
}

impl Operation {
    fn new(request: &Request<'_, Item>, lent: Lent) -> Self {
        let expectation = request.expectation();
        let call = Call {
            message: request.encode(Xid(0), OpaqueAuth::NONE),
            arguments: Reduction::Fit,
            results: expectation.items().to_vec(),
            results_reduction: Reduction::Fit,
            reply_bytes_max: expectation.reduced_bytes_max(),
        };
        Self { call, lent, expectation }
    }

    fn bare(request: &Request<'_, Item>) -> Self {
        Self::new(request, Lent::default())
    }

    pub(super) fn null() -> Self {
        Self::bare(&Request::Null)
    }

    pub(super) fn put_drop(draft: u64) -> Self {
        Self::bare(&Request::PutDrop { draft })
    }

    pub(super) fn put(put: Put<'_, Item>, data: Argument) -> Self {
        Self::new(&Request::Put(put), Lent { arguments: vec![data], results: Vec::new() })
    }

    pub(super) fn put_more(more: PutMore<Item>, data: Argument) -> Self {
        Self::new(&Request::PutMore(more), Lent { arguments: vec![data], results: Vec::new() })
    }

    /// A page of the keys that begin with `prefix`, as long as the connection carries.
    pub(super) fn list(prefix: &[u8], cookie: &[u8], count_max: u32, terms: &Terms) -> Result<Self, ClientError> {
        for part in [prefix, cookie] {
            if !part.is_empty() {
                key_of(part)?;
            }
        }
        let count = count_max.clamp(1, LIST_ENTRIES_MAX as u32);
        let mut bytes = LIST_BYTES_MAX;
        loop {
            let list = Self::bare(&Request::List(ListRequest { prefix, cookie, count, bytes }));
            // Segments of a long reply take room in both headers.
            if bytes / 2 < ENTRY_BYTES_MAX || list.fits(terms) {
                return Ok(list);
            }
            bytes /= 2;
        }
    }

    fn get(ranges: &[GetRange], crc32c: bool, deadline_us: u32) -> Result<Self, ClientError> {
        let of = |range: &GetRange| -> Result<_, ClientError> {
            let count = u32::try_from(range.into.len()).map_err(|_| invalid("a range of 2^32 octets or more"))?;
            if !range.into.is_aligned() {
                return Err(invalid("the memory of a range begins at no multiple of 8 octets"));
            }
            Ok(count)
        };
        let counts = ranges.iter().map(of).collect::<Result<Vec<_>, _>>()?;
        let keys = keys_of(ranges.iter().map(|range| &range.key))?;
        let wanted = ranges.iter().zip(keys).zip(counts).map(|((range, key), count)| RangeOf {
            key,
            version: range.version,
            offset: range.offset,
            count,
        });
        let request = Request::Get(GetRequest { crc32c, deadline_us, ranges: wanted.collect() });
        let results = ranges.iter().map(|range| Some(range.into.clone())).collect();
        Ok(Self::new(&request, Lent { arguments: Vec::new(), results }))
    }

    /// Whether a connection with these thresholds carries it.
    fn fits(&self, terms: &Terms) -> bool {
        Plan::of(&self.call, terms).is_ok()
    }
}

/// Cuts what is asked for into calls: as many at a time as `terms` and the program allow, one at least.
fn cut(
    count: usize,
    count_max: usize,
    terms: &Terms,
    operation: impl Fn(Range<usize>) -> Result<Operation, ClientError>,
) -> Result<Vec<(Range<usize>, Operation)>, ClientError> {
    let mut out = Vec::new();
    let mut start = 0;
    while start < count {
        let whole = (count - start).min(count_max);
        let mut found = operation(start..start + whole)?;
        let mut taken = whole;
        if !found.fits(terms) {
            // The header grows with the number: `fits` holds up to one number, and no further.
            let (mut fit, mut unfit) = (1, whole);
            while unfit - fit > 1 {
                let middle = fit + (unfit - fit) / 2;
                match operation(start..start + middle)?.fits(terms) {
                    true => fit = middle,
                    false => unfit = middle,
                }
            }
            taken = fit;
            found = operation(start..start + fit)?;
        }
        out.push((start..start + taken, found));
        start += taken;
    }
    Ok(out)
}

/// The calls that read `ranges`.
pub(super) fn gets(
    ranges: &[GetRange],
    crc32c: bool,
    deadline_us: u32,
    terms: &Terms,
) -> Result<Vec<(Range<usize>, Operation)>, ClientError> {
    cut(ranges.len(), RANGES_MAX, terms, |of| Operation::get(&ranges[of], crc32c, deadline_us))
}

/// What is asked of many keys at once.
#[derive(Clone, Copy, Debug)]
pub(super) enum OfKeys {
    Stat {
        until_miss: bool,
    },
    /// Whatever version is there.
    Delete,
    Touch {
        ttl_s: u32,
    },
    Pin,
    Unpin,
}

/// The calls that ask `what` of `keys`.
pub(super) fn of_keys<K: AsRef<[u8]>>(
    what: OfKeys,
    keys: &[K],
    terms: &Terms,
) -> Result<Vec<(Range<usize>, Operation)>, ClientError> {
    let keys: Vec<Key<'_>> = keys_of(keys)?;
    cut(keys.len(), KEYS_MAX, terms, |of| {
        let keys = keys[of].to_vec();
        let deletion = |key| Deletion { key, version: 0 };
        Ok(Operation::bare(&match what {
            OfKeys::Stat { until_miss } => Request::Stat(StatRequest { until_miss, keys }),
            OfKeys::Delete => Request::Delete(keys.into_iter().map(deletion).collect()),
            OfKeys::Touch { ttl_s } => Request::Touch(keys.into_iter().map(|key| Touch { key, ttl_s }).collect()),
            OfKeys::Pin => Request::Pin(keys),
            OfKeys::Unpin => Request::Unpin(keys),
        }))
    })
}

/// The call that deletes one version of a key.
pub(super) fn delete_version(key: &[u8], version: u64) -> Result<Operation, ClientError> {
    Ok(Operation::bare(&Request::Delete(vec![Deletion { key: key_of(key)?, version }])))
}

/// A key, if it can be one.
pub(super) fn key_of(key: &[u8]) -> Result<Key<'_>, ClientError> {
    Key::new(key).ok_or(ClientError::RpcKey { len: key.len() })
}

fn keys_of<'a, K: AsRef<[u8]> + 'a + ?Sized>(
    keys: impl IntoIterator<Item = &'a K>,
) -> Result<Vec<Key<'a>>, ClientError> {
    keys.into_iter().map(|key| key_of(key.as_ref())).collect()
}

fn invalid(what: &'static str) -> ClientError {
    ClientError::Local { source: io::Error::new(ErrorKind::InvalidInput, what) }
}

/// What the server says to a call that has a reply.
pub(super) fn read(
    finished: &Finished,
    answered: &super::port::Answer,
    expectation: &Expectation,
    url: &ServerUrl,
) -> Result<Answer, ClientError> {
    let chunks: Vec<Option<u64>> = answered.chunks.iter().map(|(_, octets)| Some(*octets)).collect();
    let wrong = |what: String| ClientError::Protocol { url: url.clone(), what };
    match expectation.decode(&answered.stream, &chunks) {
        Ok((xid, answer)) if xid == finished.xid => Ok(answer),
        Ok(_) => Err(wrong("a reply to something else".to_owned())),
        Err(fault @ (ReplyFault::Unsuccessful(_) | ReplyFault::Denied(_))) => {
            Err(ClientError::Refused { reply: fault.to_string() })
        }
        Err(fault) => Err(wrong(fault.to_string())),
    }
}

/// What became of each range of a GET. Octets that came inline are put where they belong.
pub(super) fn ranges(finished: &Finished, answered: &super::port::Answer, answer: Answer) -> Vec<GotRange> {
    let Answer::Get(got) = answer else { return Vec::new() };
    let landings = finished.lent.results.iter().flatten();
    let range = |(got, into): (crate::programs::bulkhead::Got<Data>, &SharedSpan)| {
        let count = got.data.len();
        if let Data::Inline(octets) = &got.data {
            into.copy_in(0, &answered.stream[octets.clone()]);
        }
        let is_right = got.crc32c.is_none_or(|expected| expected == crc32c_of(into, count as usize));
        let status = if is_right { got.status } else { Status::BadChecksum };
        GotRange { status, flags: got.flags, version: got.version, len: got.len, count }
    };
    got.into_iter().zip(landings).map(range).collect()
}

/// CRC32C of the first `len` octets.
pub(super) fn crc32c_of(span: &SharedSpan, len: usize) -> u32 {
    let mut bounce = vec![0; len.min(BOUNCE_BYTES)];
    let (mut crc, mut at) = (0, 0);
    while at < len {
        let octets = &mut bounce[..(len - at).min(BOUNCE_BYTES)];
        span.copy_out(at, octets);
        crc = crc32c::crc32c_append(crc, octets);
        at += octets.len();
    }
    crc
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::rpcrdma::private_data::Agreed;
    use std::num::NonZeroU32;

    fn terms(call_inline_bytes: u32, reply_inline_bytes: u32) -> Terms {
        Terms {
            agreed: Agreed { call_inline_bytes, reply_inline_bytes, remote_invalidate: false },
            segment_bytes_max: NonZeroU32::MAX,
        }
    }

    fn wanted(count: usize, len: usize) -> Vec<GetRange> {
        let whole = SharedSpan::new(count * len).unwrap();
        let range = |at: usize| GetRange {
            key: format!("key-{at:08}").into_bytes(),
            version: 0,
            offset: 0,
            into: whole.slice(at * len..(at + 1) * len),
        };
        (0..count).map(range).collect()
    }

    fn lens(cut: &[(Range<usize>, Operation)]) -> Vec<usize> {
        cut.iter().map(|(of, _)| of.len()).collect()
    }

    #[test]
    fn sixty_four_ranges_are_one_call_from_4096_octets_upwards() {
        let ranges = wanted(64, 65_536);
        assert_eq!(lens(&gets(&ranges, true, 0, &terms(4096, 4096)).unwrap()), [64]);
        assert_eq!(lens(&gets(&ranges, false, 0, &terms(262_144, 262_144)).unwrap()), [64]);
    }

    #[test]
    fn smaller_thresholds_and_the_program_cut_a_batch_and_nothing_is_left_out() {
        for (call, reply) in [(1024, 4096), (4096, 1024), (1024, 1024)] {
            let ranges = wanted(300, 65_536);
            let terms = terms(call, reply);
            let cut = gets(&ranges, false, 0, &terms).unwrap();
            assert!(cut.len() >= 300 / 40, "{:?}", lens(&cut));
            let mut next = 0;
            for (of, operation) in &cut {
                assert_eq!(of.start, next);
                next = of.end;
                assert!(operation.fits(&terms));
            }
            assert_eq!(next, 300);
            assert!(cut[..cut.len() - 1].iter().all(|(of, _)| of.len() == cut[0].0.len()), "{:?}", lens(&cut));
        }
        assert_eq!(lens(&gets(&wanted(300, 8), false, 0, &terms(262_144, 262_144)).unwrap()), [256, 44]);
        let keys: Vec<String> = (0..2500).map(|at| format!("{at}")).collect();
        let stats = of_keys(OfKeys::Stat { until_miss: false }, &keys, &terms(1024, 1024)).unwrap();
        assert_eq!(lens(&stats), [1024, 1024, 452]);
    }

    #[test]
    fn keys_and_memory_that_cannot_be_sent_are_refused_here() {
        let terms = terms(4096, 4096);
        for key in [vec![], vec![b'k'; 1025]] {
            let len = key.len();
            let stat = of_keys(OfKeys::Pin, &[key], &terms);
            assert!(matches!(stat, Err(ClientError::RpcKey { len: found }) if found == len));
        }
        let mut ranges = wanted(1, 64);
        ranges[0].into = ranges[0].into.slice(4..64);
        assert!(matches!(gets(&ranges, false, 0, &terms), Err(ClientError::Local { .. })));
    }

    #[test]
    fn a_checksum_is_that_of_the_octets_alone() {
        let span = SharedSpan::new(200_000).unwrap();
        let octets: Vec<u8> = (0..200_000_u32).map(|at| (at >> 3) as u8).collect();
        span.copy_in(0, &octets);
        for len in [0, 1, 7, 65_535, 65_536, 65_537, 199_999] {
            assert_eq!(crc32c_of(&span, len), crc32c::crc32c(&octets[..len]));
        }
    }
}
