//! RPC-over-RDMA under any octets. Calls are built here by hand from RFC 8166 §4, without the codec under test.

use bulkhead::wire::codec::{Codec, Reader};
use bulkhead::wire::rpcrdma::chunk::{ChunkLists, ReadSegment, Segment, pieces};
use bulkhead::wire::rpcrdma::header::{self, Header, Message, Placement, RdmaError};
use bulkhead::wire::rpcrdma::private_data::{Agreed, PrivateData};
use bulkhead::wire::rpcrdma::responder::{IncomingCall, Limits, Received, Responder};
use bulkhead::wire::rpcrdma::{RemoteKey, Xid};
use proptest::prelude::*;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::HashMap;
use std::num::NonZeroU32;

/// Counts what a thread allocates.
struct Counting;

thread_local! {
    static ALLOCATED: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: every call goes to `System` as it came; the counter beside it allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _ = ALLOCATED.try_with(|allocated| allocated.set(allocated.get() + layout.size()));
        // SAFETY: the caller keeps to what `alloc` asks of it.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: `at` came from `System`, above, with this layout.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Octets that `work` allocates, freed or not.
fn allocated(work: impl FnOnce()) -> usize {
    let before = ALLOCATED.get();
    work();
    ALLOCATED.get() - before
}

fn responder() -> Responder {
    let agreed = Agreed { call_inline_bytes: 262_144, reply_inline_bytes: 262_144, remote_invalidate: true };
    let limits = Limits {
        calls_max: NonZeroU32::new(8).unwrap(),
        long_call_bytes_max: 1 << 20,
        read_chunk_bytes_max: 1 << 20,
        read_bytes_max: 1 << 22,
        read_segments_max: 1000,
    };
    Responder::new(agreed, limits)
}

fn segment() -> impl Strategy<Value = Segment> {
    (any::<u32>(), any::<u32>(), any::<u64>()).prop_map(|(handle, length, offset)| Segment {
        handle: RemoteKey(handle),
        length,
        offset,
    })
}

fn lists() -> impl Strategy<Value = ChunkLists> {
    let read = (any::<u32>(), segment()).prop_map(|(position, target)| ReadSegment { position, target });
    let chunk = || prop::collection::vec(segment(), 0..5);
    (prop::collection::vec(read, 0..5), prop::collection::vec(chunk(), 0..4), prop::option::of(chunk()))
        .prop_map(|(reads, writes, reply)| ChunkLists { reads, writes, reply })
}

fn any_header() -> impl Strategy<Value = Header> {
    let placement = prop_oneof![Just(Placement::Inline), Just(Placement::Chunk)];
    (any::<u32>(), any::<u32>(), placement, lists()).prop_map(|(xid, credit, placement, lists)| Header {
        xid: Xid(xid),
        credit,
        placement,
        lists,
    })
}

/// One field of the arguments.
#[derive(Clone, Debug)]
enum Field {
    Words(Vec<u32>),
    /// In the stream.
    Inline(Vec<u8>),
    /// In a chunk, cut after these shares, its roundup with it or not.
    Reduced {
        octets: Vec<u8>,
        cuts: Vec<prop::sample::Index>,
        has_roundup: bool,
    },
}

/// A call, and how it is sent.
#[derive(Clone, Debug)]
struct Call {
    xid: u32,
    credit: u32,
    fields: Vec<Field>,
    /// Cut after these shares and pulled, instead of sent.
    long: Option<Vec<prop::sample::Index>>,
    writes: Vec<Vec<(u32, u32, u64)>>,
    reply: Option<Vec<(u32, u32, u64)>>,
    /// Turns the read list by so much: segments of one chunk keep their order.
    order: prop::sample::Index,
}

fn call() -> impl Strategy<Value = Call> {
    // Some of more than a page or two.
    let octets = || {
        let len = prop_oneof![5 => 0_usize..60, 1 => 4000_usize..9000];
        (any::<u8>(), len).prop_map(|(seed, len)| (0..len).map(|at| seed ^ (at * 7 + at / 251) as u8).collect())
    };
    let cuts = || prop::collection::vec(any::<prop::sample::Index>(), 0..4);
    let field = prop_oneof![
        prop::collection::vec(any::<u32>(), 0..5).prop_map(Field::Words),
        octets().prop_map(Field::Inline),
        (octets(), cuts(), any::<bool>()).prop_map(|(octets, cuts, has_roundup)| Field::Reduced {
            octets,
            cuts,
            has_roundup
        }),
    ];
    let segment = (any::<u32>(), 0_u32..1 << 20, 0_u64..1 << 60);
    let chunk = prop::collection::vec(segment, 0..4);
    let offer = (prop::collection::vec(chunk.clone(), 0..4), prop::option::of(chunk));
    let ids = (any::<u32>(), any::<u32>());
    (ids, prop::collection::vec(field, 0..8), prop::option::of(cuts()), offer, any::<prop::sample::Index>()).prop_map(
        |((xid, credit), fields, long, (writes, reply), order)| Call {
            xid,
            credit,
            fields,
            long,
            writes,
            reply,
            order,
        },
    )
}

/// What the call looks like to its sender and on the wire.
struct Built {
    message: Vec<u8>,
    /// The stream with everything in it.
    whole: Vec<u8>,
    /// The same, less what is reduced.
    reduced: Vec<u8>,
    /// By handle: where it begins, and what it has.
    memory: HashMap<u32, (u64, Vec<u8>)>,
}

fn put(out: &mut Vec<u8>, word: u32) {
    out.extend_from_slice(&[(word >> 24) as u8, (word >> 16) as u8, (word >> 8) as u8, word as u8]);
}

fn pad(out: &mut Vec<u8>) {
    while !out.len().is_multiple_of(4) {
        out.push(0);
    }
}

/// RFC 8166 §4, written once more: segments as (position, handle, length, offset).
fn build(call: &Call) -> Built {
    let mut whole = Vec::new();
    for word in [call.xid, 0, 2, 0x2000_0000, 1, 1, 0, 0, 0, 0] {
        put(&mut whole, word);
    }
    let mut reduced = whole.clone();
    let mut memory = HashMap::new();
    let mut chunks: Vec<Vec<(u32, u32, u32, u64)>> = Vec::new();
    let mut register = |position: u32, octets: &[u8], cuts: &[prop::sample::Index]| {
        let mut ends: Vec<usize> = cuts.iter().map(|cut| cut.index(octets.len() + 1)).collect();
        ends.sort_unstable();
        ends.push(octets.len());
        let (mut start, mut chunk) = (0, Vec::new());
        for end in ends {
            let handle = 0x1000 + memory.len() as u32;
            let offset = u64::from(handle) << 33 | 5;
            memory.insert(handle, (offset, octets[start..end].to_vec()));
            chunk.push((position, handle, (end - start) as u32, offset));
            start = end;
        }
        chunk
    };
    for field in &call.fields {
        match field {
            Field::Words(words) => {
                for word in words {
                    put(&mut whole, *word);
                    put(&mut reduced, *word);
                }
            }
            Field::Inline(octets) => {
                for stream in [&mut whole, &mut reduced] {
                    put(stream, octets.len() as u32);
                    stream.extend_from_slice(octets);
                    pad(stream);
                }
            }
            Field::Reduced { octets, cuts, has_roundup } => {
                put(&mut whole, octets.len() as u32);
                put(&mut reduced, octets.len() as u32);
                let position = whole.len() as u32;
                whole.extend_from_slice(octets);
                pad(&mut whole);
                let mut in_chunk = octets.clone();
                if *has_roundup {
                    pad(&mut in_chunk);
                }
                chunks.push(register(position, &in_chunk, cuts));
            }
        }
    }
    if let Some(cuts) = &call.long {
        chunks.push(register(0, &reduced, cuts));
    }
    // Chunks in any order, and their segments mixed: only the order within each counts.
    let mut reads = Vec::new();
    let mut turn = call.order.index(chunks.len().max(1));
    while chunks.iter().any(|chunk| !chunk.is_empty()) {
        turn = (turn + 1) % chunks.len();
        if !chunks[turn].is_empty() {
            reads.push(chunks[turn].remove(0));
        }
    }
    let mut message = Vec::new();
    for word in [call.xid, 1, call.credit, u32::from(call.long.is_some())] {
        put(&mut message, word);
    }
    let put_segment = |out: &mut Vec<u8>, (handle, length, offset): (u32, u32, u64)| {
        for word in [handle, length, (offset >> 32) as u32, offset as u32] {
            put(out, word);
        }
    };
    for (position, handle, length, offset) in reads {
        put(&mut message, 1);
        put(&mut message, position);
        put_segment(&mut message, (handle, length, offset));
    }
    put(&mut message, 0);
    for chunk in &call.writes {
        put(&mut message, 1);
        put(&mut message, chunk.len() as u32);
        chunk.iter().for_each(|segment| put_segment(&mut message, *segment));
    }
    put(&mut message, 0);
    put(&mut message, u32::from(call.reply.is_some()));
    if let Some(chunk) = &call.reply {
        put(&mut message, chunk.len() as u32);
        chunk.iter().for_each(|segment| put_segment(&mut message, *segment));
    }
    if call.long.is_none() {
        message.extend_from_slice(&reduced);
    }
    Built { message, whole, reduced, memory }
}

/// Pulls a chunk `window` octets at a time.
fn pull(segments: &[Segment], len: u64, window: u64, memory: &HashMap<u32, (u64, Vec<u8>)>) -> Vec<u8> {
    let mut out = Vec::new();
    while (out.len() as u64) < len {
        let start = out.len() as u64;
        for piece in pieces(segments, start, window.min(len - start)).unwrap() {
            let (base, octets) = &memory[&piece.handle.0];
            let at = (piece.offset - base) as usize;
            out.extend_from_slice(&octets[at..at + piece.length as usize]);
        }
    }
    out
}

/// The stream as it was before anything was taken out of it (RFC 8166 §3.4.5).
fn unreduce(call: &IncomingCall, stream: &[u8], window: u64, memory: &HashMap<u32, (u64, Vec<u8>)>) -> Vec<u8> {
    let mut out = Vec::new();
    let mut at = 0;
    for chunk in &call.reads {
        let inline = chunk.position as usize - out.len();
        out.extend_from_slice(&stream[at..at + inline]);
        at += inline;
        out.extend_from_slice(&pull(&chunk.segments, chunk.len, window, memory));
        pad(&mut out);
    }
    out.extend_from_slice(&stream[at..]);
    out
}

fn plain(chunk: &[(u32, u32, u64)]) -> Vec<Segment> {
    chunk.iter().map(|&(handle, length, offset)| Segment { handle: RemoteKey(handle), length, offset }).collect()
}

/// Octets of the vectors.
fn vectors() -> Vec<Vec<u8>> {
    let file: serde_json::Value = serde_json::from_str(include_str!("vectors/rpcrdma.json")).unwrap();
    let octets = |hex: &str| {
        (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect::<Vec<u8>>()
    };
    let names = ["hex", "call_hex", "reply_hex"];
    let vectors = file["vectors"].as_array().unwrap();
    vectors.iter().flat_map(|vector| names.iter().filter_map(|name| vector[*name].as_str().map(octets))).collect()
}

/// Something done to octets.
#[derive(Clone, Debug)]
enum Mutation {
    Flip(prop::sample::Index, u8),
    Word(prop::sample::Index, u32),
    Cut(prop::sample::Index),
    Insert(prop::sample::Index, Vec<u8>),
    Repeat(prop::sample::Index, prop::sample::Index, usize),
}

fn mutation() -> impl Strategy<Value = Mutation> {
    let at = any::<prop::sample::Index>;
    let telling = prop::sample::select(&[0, 1, 2, 3, 4, 5, 0x1000_0001, 0x7fff_ffff, 0xffff_fffc, u32::MAX][..]);
    prop_oneof![
        1 => (at(), 0_u8..8).prop_map(|(at, bit)| Mutation::Flip(at, bit)),
        4 => (at(), telling).prop_map(|(at, word)| Mutation::Word(at, word)),
        1 => (at(), any::<u32>()).prop_map(|(at, word)| Mutation::Word(at, word)),
        1 => at().prop_map(Mutation::Cut),
        1 => (at(), prop::collection::vec(any::<u8>(), 0..9)).prop_map(|(at, octets)| Mutation::Insert(at, octets)),
        1 => (at(), at(), 0_usize..50).prop_map(|(from, to, times)| Mutation::Repeat(from, to, times)),
    ]
}

fn mutate(octets: &mut Vec<u8>, mutation: &Mutation) {
    if octets.len() < 4 {
        return;
    }
    let word = |at: &prop::sample::Index| at.index(octets.len() / 4) * 4;
    match mutation {
        Mutation::Flip(at, bit) => {
            let at = at.index(octets.len());
            octets[at] ^= 1 << bit;
        }
        Mutation::Word(at, value) => {
            let at = word(at);
            octets[at..at + 4].copy_from_slice(&value.to_be_bytes());
        }
        Mutation::Cut(at) => octets.truncate(at.index(octets.len())),
        Mutation::Insert(at, more) => {
            let at = at.index(octets.len());
            octets.splice(at..at, more.iter().copied());
        }
        Mutation::Repeat(from, to, times) => {
            let (from, to) = (word(from), word(to));
            let part = octets[from.min(to)..from.max(to)].repeat(*times);
            octets.splice(from..from, part);
        }
    }
}

/// Judges octets in every way, and says what was taken for a call.
fn judge(octets: &[u8]) -> Option<IncomingCall> {
    if let Ok(Message::Transport(found)) = Message::decode(octets) {
        let _ = found.check_reply();
        assert_eq!([&found.to_header().encode()[..], found.payload].concat(), octets);
    }
    PrivateData::of_peer(octets);
    match responder().handle_received(octets) {
        Received::Call(call) => Some(call),
        Received::Refuse(refusal) => {
            assert!(matches!(Message::decode(&refusal.octets), Ok(Message::Error { credit: 1, .. })));
            None
        }
        Received::Drop(_) => None,
    }
}

proptest! {
    #[test]
    fn what_was_encoded_is_decoded(header in any_header(), payload in prop::collection::vec(any::<u8>(), 0..50)) {
        let encoded = header.encode();
        prop_assert_eq!(encoded.len(), header.encoded_bytes());
        let message = [&encoded[..], &payload[..]].concat();
        let Ok(Message::Transport(found)) = Message::decode(&message) else { panic!("{message:x?}") };
        prop_assert_eq!(found.payload, &payload[..]);
        prop_assert_eq!(found.to_header(), header);
    }

    #[test]
    fn errors_that_were_encoded_are_decoded(xid in any::<u32>(), vers in any::<u32>(), credit in any::<u32>(), range in prop::option::of(any::<(u32, u32)>())) {
        let error = range.map_or(RdmaError::Chunk, |(low, high)| RdmaError::Version { low, high });
        let message = header::encode_error(Xid(xid), vers, credit, error);
        prop_assert_eq!(Message::decode(&message), Ok(Message::Error { xid: Xid(xid), vers, credit, error }));
    }

    #[test]
    fn a_call_from_another_encoder_is_understood(call in call(), window in prop_oneof![1_u64..80, 1000_u64..10_000]) {
        let built = build(&call);
        let mut responder = responder();
        let received = responder.handle_received(&built.message);
        let Received::Call(found) = received else { panic!("{received:?}") };
        prop_assert_eq!(found.xid, Xid(call.xid));
        let stream = match &found.long {
            Some(long) => pull(&long.segments, long.len, window, &built.memory),
            None => found.inline.clone(),
        };
        prop_assert_eq!(found.long.is_some(), call.long.is_some());
        prop_assert_eq!(&stream, &built.reduced);
        if found.long.is_some() {
            prop_assert_eq!(responder.handle_pulled(found.xid, &stream), Ok(()));
        }
        prop_assert_eq!(unreduce(&found, &stream, window, &built.memory), built.whole);
        prop_assert_eq!(&found.offer.writes, &call.writes.iter().map(|chunk| plain(chunk)).collect::<Vec<_>>());
        prop_assert_eq!(&found.offer.reply, &call.reply.as_deref().map(plain));
        let mut credit = Reader::new(&built.message[8..]);
        prop_assert_eq!(u32::read(&mut credit), Ok(call.credit));
    }

    #[test]
    fn any_octets_are_judged_without_harm(octets in prop::collection::vec(prop_oneof![4 => Just(0_u8), 2 => Just(1), 1 => any::<u8>()], 0..300)) {
        judge(&octets);
        let mut good = vec![0, 0, 0, 9, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0];
        good.extend(octets);
        judge(&good);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// What comes of a message takes memory in proportion to its octets, whatever counts it claims.
    #[test]
    fn mutated_vectors_do_no_harm_and_take_no_more_memory_than_they_have_octets(
        which in any::<prop::sample::Index>(),
        mutations in prop::collection::vec(mutation(), 0..5),
    ) {
        let vectors = vectors();
        let mut octets = which.get(&vectors).clone();
        mutations.iter().for_each(|mutation| mutate(&mut octets, mutation));
        let mut taken = None;
        let allocated = allocated(|| taken = judge(&octets));
        prop_assert!(allocated <= 64 * octets.len() + 4096, "{} octets for a message of {}", allocated, octets.len());
        if let Some(call) = taken {
            let chunks = call.reads.iter().chain(&call.long);
            for chunk in chunks {
                prop_assert_eq!(pieces(&chunk.segments, 0, chunk.len).map(|all| all.iter().map(|piece| u64::from(piece.length)).sum::<u64>()), Some(chunk.len));
                prop_assert!(chunk.len <= 1 << 20);
            }
        }
    }
}
