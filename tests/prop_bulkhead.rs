//! Program `bulkhead`: octets of another encoder, and random requests and answers with any of their items in chunks.

use bulkhead::programs::bulkhead::{
    Answer, Deletion, Entry, GetRequest, Got, Item, KEYS_MAX, Key, LIST_ENTRIES_MAX, ListRequest, PROGRAM, Page,
    PinnedVersion, Put, PutMore, PutResult, RANGES_MAX, RangeOf, Request, Stat, StatRequest, Status, Touch,
};
use bulkhead::programs::rpc::{ArgumentFault, Arguments, Data, Reduced, accept};
use bulkhead::store::Condition;
use bulkhead::wire::onc_rpc::{AuthSys, OpaqueAuth, Part, Payload, Xid};
use proptest::prelude::*;
use std::collections::HashMap;

const XID: Xid = Xid(0x0102_0304);
/// Octets of a call's header with two authentications of no octets, and of a reply's.
const CALL_HEADER_BYTES: usize = 40;
const REPLY_HEADER_BYTES: usize = 24;

/// Octets of an item: anything that tells items and places apart.
fn octets_of(item: Item) -> Vec<u8> {
    (0..item.len).map(|at| item.token.wrapping_mul(31).wrapping_add(at * 7 + 1) as u8).collect()
}

/// How an item travels.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Way {
    Inline,
    Chunk,
    /// In a chunk that has the roundup too.
    PaddedChunk,
}

/// What a message becomes when item `n` travels by `ways[n]`.
struct Sent {
    stream: Vec<u8>,
    reduced: Vec<Reduced>,
    /// Where each item should be found.
    data: Vec<Data>,
}

fn send(payload: &Payload, ways: &[Way]) -> Sent {
    let mut sent = Sent { stream: Vec::new(), reduced: Vec::new(), data: Vec::new() };
    let mut position = 0;
    for part in payload.parts() {
        match part {
            Part::Bytes(bytes) => {
                sent.stream.extend_from_slice(bytes);
                position += bytes.len() as u64;
            }
            Part::Item(item) => {
                let roundup = item.len.next_multiple_of(4) - item.len;
                let way = ways.get(sent.data.len()).copied().unwrap_or(Way::Inline);
                if way == Way::Inline {
                    let start = sent.stream.len();
                    sent.stream.extend(octets_of(*item));
                    sent.data.push(Data::Inline(start..sent.stream.len()));
                    sent.stream.resize(start + (item.len + roundup) as usize, 0);
                } else {
                    sent.data.push(Data::Chunk { index: sent.reduced.len(), len: item.len });
                    let len = u64::from(item.len + if way == Way::PaddedChunk { roundup } else { 0 });
                    sent.reduced.push(Reduced { position, len });
                }
                position += u64::from(item.len + roundup);
            }
        }
    }
    assert_eq!(position, payload.stream_bytes());
    sent
}

fn parse<'a>(stream: &'a [u8], chunks: &'a [Reduced]) -> Result<Request<'a>, ArgumentFault> {
    Request::parse(accept(&[&PROGRAM], Arguments { stream, chunks }).expect("the program has the procedure"))
}

/// The same request with its item where `data` says.
fn with_data<'a>(request: &Request<'a, Item>, data: &[Data]) -> Request<'a> {
    request.clone().map_data(|_| data[0].clone())
}

fn answer_with_data(answer: &Answer<Item>, data: &[Data]) -> Answer {
    let mut data = data.iter();
    answer.clone().map_data(|_| data.next().unwrap().clone())
}

// ---------------------------------------------------------------------------------------------------- another encoder

fn key(octets: &[u8]) -> Key<'_> {
    Key::new(octets).unwrap()
}

/// One request of each kind, as `tests/vectors/bulkhead.c` has them, with the octets of the item if there is one.
fn known_requests() -> Vec<(&'static str, Request<'static, Item>, &'static [u8])> {
    let keys = || vec![key(b"a"), key(b"chunk/0017"), key(b"four")];
    let item = |len| Item { token: 0, len };
    let range = |key, version, offset, count| RangeOf { key, version, offset, count };
    vec![
        ("stat_args", Request::Stat(StatRequest { until_miss: true, keys: keys() }), b""),
        (
            "get_args",
            Request::Get(GetRequest {
                crc32c: true,
                deadline_us: 2500,
                ranges: vec![range(key(b"a"), 0, 0, u32::MAX), range(key(b"chunk/0017"), 99, (1 << 34) - 1, 1)],
            }),
            b"",
        ),
        (
            "put_args",
            Request::Put(Put {
                key: key(b"chunk/0017"),
                draft: 5,
                len: 9,
                flags: 7,
                ttl_s: 60,
                condition: Condition::Version(99),
                commit: true,
                crc32c: Some(0xe306_9283),
                data: item(9),
            }),
            b"123456789",
        ),
        (
            "put_args_plain",
            Request::Put(Put {
                key: key(b"a"),
                draft: 5,
                len: 1 << 34,
                flags: 0,
                ttl_s: 0,
                condition: Condition::Absent,
                commit: false,
                crc32c: None,
                data: item(2),
            }),
            b"hi",
        ),
        (
            "put_more_args",
            Request::PutMore(PutMore { draft: 5, offset: 1 << 33, commit: false, crc32c: None, data: item(4) }),
            b"more",
        ),
        ("put_drop_args", Request::PutDrop { draft: 5 }, b""),
        (
            "delete_args",
            Request::Delete(vec![Deletion { key: key(b"a"), version: 0 }, Deletion { key: key(b"four"), version: 99 }]),
            b"",
        ),
        (
            "touch_args",
            Request::Touch(vec![Touch { key: key(b"a"), ttl_s: 0 }, Touch { key: key(b"four"), ttl_s: 86_400 }]),
            b"",
        ),
        (
            "list_args",
            Request::List(ListRequest { prefix: b"chunk/", cookie: b"chunk/0016", count: 100, bytes: 1 << 16 }),
            b"",
        ),
        ("keys", Request::Pin(keys()), b""),
        ("keys", Request::Unpin(keys()), b""),
    ]
}

/// The vector's id, a request that could be answered so, the answer, the octets of its item if there is one.
type KnownAnswer = (&'static str, Request<'static, Item>, Answer<Item>, &'static [u8]);

/// The same for answers.
fn known_answers() -> Vec<KnownAnswer> {
    let requests: HashMap<_, _> = known_requests().into_iter().map(|(id, request, _)| (id, request)).collect();
    let there = Stat {
        status: Status::Ok,
        flags: 7,
        version: 0x1122_3344_5566_7788,
        len: 1 << 20,
        ram_bytes: 65_536,
        disk_bytes: 983_040,
        lead_bytes: 4096,
        first_octet_us: 120,
        ttl_s: 3600,
    };
    let entry = |key: &[u8], version, len| Entry { key: key.to_vec(), version, len };
    let got = |status, flags, version, len, crc32c, bytes| Got {
        status,
        flags,
        version,
        len,
        crc32c,
        data: Item { token: 0, len: bytes },
    };
    let answers = [
        ("stat_res", "stat_args", Answer::Stat { leading: 1, stats: vec![there, Stat::bare(Status::NotFound)] }),
        (
            "get_res",
            "get_args",
            Answer::Get(vec![
                got(Status::Ok, 7, 99, 9, Some(0xe306_9283), 9),
                got(Status::Late, 0, 100, 1 << 30, None, 0),
            ]),
        ),
        ("put_res", "put_args", Answer::Put(PutResult { status: Status::Ok, version: 100 })),
        ("put_drop_res", "put_drop_args", Answer::PutDrop(Status::BadDraft)),
        ("statuses", "delete_args", Answer::Statuses(vec![Status::Ok, Status::Changed])),
        ("statuses", "touch_args", Answer::Statuses(vec![Status::Ok, Status::Changed])),
        (
            "list_res",
            "list_args",
            Answer::List(Page {
                status: Status::Ok,
                next: b"chunk/0018".to_vec(),
                entries: vec![entry(b"chunk/0017", 99, 9), entry(b"chunk/0018", 98, 1 << 34)],
            }),
        ),
        (
            "pin_res",
            "keys",
            Answer::Pin(vec![
                PinnedVersion { status: Status::Ok, version: 99 },
                PinnedVersion { status: Status::Limit, version: 0 },
            ]),
        ),
    ];
    let octets = |id| if id == "get_res" { &b"123456789"[..] } else { b"" };
    let mut known: Vec<_> =
        answers.into_iter().map(|(id, of, answer)| (id, requests[of].clone(), answer, octets(id))).collect();
    // That answer has two keys.
    if let Some((_, request, ..)) = known.last_mut() {
        *request = Request::Pin(vec![key(b"a"), key(b"chunk/0017")]);
    }
    known
}

fn vectors() -> HashMap<String, Vec<u8>> {
    let all: HashMap<String, String> = serde_json::from_str(include_str!("vectors/bulkhead.json")).unwrap();
    let octets =
        |hex: &str| (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect();
    all.into_iter().map(|(id, hex)| (id, octets(&hex))).collect()
}

/// The message with `octets` in the place of its items.
fn joined(payload: &Payload, octets: &[u8]) -> Vec<u8> {
    let mut stream = Vec::new();
    for part in payload.parts() {
        match part {
            Part::Bytes(bytes) => stream.extend_from_slice(bytes),
            Part::Item(item) if item.len > 0 => {
                assert_eq!(item.len as usize, octets.len());
                stream.extend_from_slice(octets);
                stream.resize(stream.len().next_multiple_of(4), 0);
            }
            Part::Item(_) => {}
        }
    }
    stream
}

#[test]
fn messages_are_those_of_the_definition_as_rpcgen_reads_it() {
    let mut vectors = vectors();
    let mut met = Vec::new();
    for (id, request, octets) in known_requests() {
        let call = joined(&request.encode(XID, OpaqueAuth::NONE), octets);
        assert_eq!(call[CALL_HEADER_BYTES..], vectors[id], "{id}");
        let found = parse(&call, &[]).unwrap();
        let data = match &found {
            Request::Put(Put { data, .. }) | Request::PutMore(PutMore { data, .. }) => vec![data.clone()],
            _ => Vec::new(),
        };
        if let [Data::Inline(range)] = &data[..] {
            assert_eq!(&call[range.clone()], octets, "{id}");
        }
        assert_eq!(found, with_data(&request, &data), "{id}");
        met.push(id);
    }
    for (id, request, answer, octets) in known_answers() {
        let reply = joined(&answer.encode(XID), octets);
        assert_eq!(reply[REPLY_HEADER_BYTES..], vectors[id], "{id}");
        let (xid, found) = request.expectation().decode(&reply, &[]).unwrap();
        assert_eq!(xid, XID);
        let data = match &found {
            Answer::Get(got) => got.iter().map(|got| got.data.clone()).collect(),
            _ => Vec::new(),
        };
        assert_eq!(found, answer_with_data(&answer, &data), "{id}");
        met.push(id);
    }
    vectors.retain(|id, _| !met.contains(&id.as_str()));
    assert!(vectors.is_empty(), "not looked at: {:?}", vectors.keys());
}

// --------------------------------------------------------------------------------------------------------- properties

fn keys_of(octets: &[Vec<u8>]) -> Vec<Key<'_>> {
    octets.iter().map(|octets| key(octets)).collect()
}

/// What a random request of any kind is made of.
#[derive(Clone, Debug)]
struct Seed {
    kind: u32,
    keys: Vec<Vec<u8>>,
    numbers: [u64; 4],
    words: [u32; 4],
    flag: bool,
    checksum: Option<u32>,
    condition: Condition,
    data_len: u32,
}

fn octets(len: std::ops::RangeInclusive<usize>) -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(any::<u8>(), len)
}

fn seed() -> impl Strategy<Value = Seed> {
    let condition = prop_oneof![
        Just(Condition::Any),
        Just(Condition::Absent),
        Just(Condition::Present),
        any::<u64>().prop_map(Condition::Version),
    ];
    let keys = prop::collection::vec(prop_oneof![octets(1..=9), octets(1020..=1024)], 0..6);
    (0_u32..11, keys, any::<[u64; 4]>(), any::<[u32; 4]>(), any::<bool>(), any::<Option<u32>>(), condition, 0_u32..70)
        .prop_map(|(kind, mut keys, numbers, words, flag, checksum, condition, data_len)| {
            if keys.is_empty() && [3, 8].contains(&kind) {
                keys.push(b"key".to_vec());
            }
            Seed { kind, keys, numbers, words, flag, checksum, condition, data_len }
        })
}

fn request(seed: &Seed) -> Request<'_, Item> {
    let Seed { kind, keys, numbers, words, flag, checksum, condition, data_len } = seed;
    let data = Item { token: words[3], len: *data_len };
    let with_key = |at: usize| (key(&keys[at]), numbers[at % 4]);
    match kind {
        0 => Request::Null,
        1 => Request::Stat(StatRequest { until_miss: *flag, keys: keys_of(keys) }),
        2 => Request::Get(GetRequest {
            crc32c: *flag,
            deadline_us: words[0],
            ranges: (0..keys.len())
                .map(|at| {
                    let (key, version) = with_key(at);
                    RangeOf { key, version, offset: version ^ numbers[1], count: words[at % 4] }
                })
                .collect(),
        }),
        3 => Request::Put(Put {
            key: key(&keys[0]),
            draft: numbers[0],
            len: numbers[1],
            flags: words[0],
            ttl_s: words[1],
            condition: *condition,
            commit: *flag,
            crc32c: *checksum,
            data,
        }),
        4 => {
            Request::PutMore(PutMore { draft: numbers[0], offset: numbers[1], commit: *flag, crc32c: *checksum, data })
        }
        5 => Request::PutDrop { draft: numbers[0] },
        6 => Request::Delete(
            (0..keys.len())
                .map(|at| {
                    let (key, version) = with_key(at);
                    Deletion { key, version }
                })
                .collect(),
        ),
        7 => Request::Touch((0..keys.len()).map(|at| Touch { key: key(&keys[at]), ttl_s: words[at % 4] }).collect()),
        8 => {
            let cookie = if *flag { keys.last().map_or(&b""[..], Vec::as_slice) } else { b"" };
            Request::List(ListRequest { prefix: &keys[0], cookie, count: words[0], bytes: words[1] })
        }
        9 => Request::Pin(keys_of(keys)),
        _ => Request::Unpin(keys_of(keys)),
    }
}

fn status() -> impl Strategy<Value = Status> {
    (0_u32..15).prop_map(|number| Status::from_number(number).unwrap())
}

fn any_way() -> impl Strategy<Value = Way> {
    prop_oneof![Just(Way::Inline), Just(Way::Chunk), Just(Way::PaddedChunk)]
}

/// An answer, and what it would be the answer to.
fn answer() -> impl Strategy<Value = (Request<'static, Item>, Answer<Item>)> {
    const KEY: &[u8] = b"key";
    let stat = (status(), any::<[u32; 3]>(), any::<[u64; 5]>()).prop_map(|(status, words, numbers)| Stat {
        status,
        flags: words[0],
        version: numbers[0],
        len: numbers[1],
        ram_bytes: numbers[2],
        disk_bytes: numbers[3],
        lead_bytes: numbers[4],
        first_octet_us: words[1],
        ttl_s: words[2],
    });
    let got = (status(), any::<u32>(), any::<[u64; 2]>(), any::<u32>(), 0_u32..70);
    let entry = (octets(1..=30), any::<[u64; 2]>()).prop_map(|(key, [version, len])| Entry { key, version, len });
    prop_oneof![
        Just((Request::Null, Answer::Null)),
        prop::collection::vec(stat, 0..6).prop_map(|stats| {
            let leading = stats.iter().take_while(|stat| stat.status == Status::Ok).count() as u32;
            let request = StatRequest { until_miss: false, keys: vec![key(KEY); stats.len()] };
            (Request::Stat(request), Answer::Stat { leading, stats })
        }),
        (any::<bool>(), prop::collection::vec(got, 0..6)).prop_map(|(checked, got)| {
            let range = |count| RangeOf { key: key(KEY), version: 0, offset: 0, count };
            let ranges = got.iter().map(|got| range(got.4)).collect();
            let got = got.into_iter().enumerate().map(|(at, (status, flags, [version, len], crc, bytes))| {
                let (bytes, ok) = if status == Status::Ok { (bytes, true) } else { (0, false) };
                let data = Item { token: at as u32, len: bytes };
                Got { status, flags, version, len, crc32c: (checked && ok).then_some(crc), data }
            });
            (Request::Get(GetRequest { crc32c: checked, deadline_us: 0, ranges }), Answer::Get(got.collect()))
        }),
        (status(), any::<u64>()).prop_map(|(status, version)| {
            let data = Item { token: 0, len: 0 };
            let more = PutMore { draft: 0, offset: 0, commit: true, crc32c: None, data };
            (Request::PutMore(more), Answer::Put(PutResult { status, version }))
        }),
        status().prop_map(|status| (Request::PutDrop { draft: 0 }, Answer::PutDrop(status))),
        prop::collection::vec(status(), 0..6)
            .prop_map(|statuses| { (Request::Unpin(vec![key(KEY); statuses.len()]), Answer::Statuses(statuses)) }),
        (status(), octets(0..=9), prop::collection::vec(entry, 0..6)).prop_map(|(status, next, entries)| {
            let list = ListRequest { prefix: b"", cookie: b"", count: 6, bytes: 1000 };
            (Request::List(list), Answer::List(Page { status, next, entries }))
        }),
        prop::collection::vec((status(), any::<u64>()), 0..6).prop_map(|pinned| {
            let pinned: Vec<_> =
                pinned.into_iter().map(|(status, version)| PinnedVersion { status, version }).collect();
            (Request::Pin(vec![key(KEY); pinned.len()]), Answer::Pin(pinned))
        }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn a_request_is_parsed_as_it_was_meant_inline_and_reduced(seed in seed(), way in any_way(), sys in any::<bool>()) {
        let body = AuthSys { stamp: 1, machine_name: b"odd", uid: 2, gid: 3, gids: vec![4] }.body();
        let credential = if sys { AuthSys::around(&body) } else { OpaqueAuth::NONE };
        let request = request(&seed);
        let payload = request.encode(XID, credential);
        let sent = send(&payload, &[way]);
        let found = parse(&sent.stream, &sent.reduced).unwrap();
        prop_assert_eq!(found.procedure(), request.procedure());
        prop_assert_eq!(&found, &with_data(&request, &sent.data));
        if let [Data::Inline(range)] = &sent.data[..] {
            let item = payload.items().next().unwrap();
            prop_assert_eq!(&sent.stream[range.clone()], octets_of(item));
        }
    }

    #[test]
    fn a_request_with_an_octet_more_or_less_is_garbage(seed in seed(), cut in any::<prop::sample::Index>()) {
        let request = request(&seed);
        let sent = send(&request.encode(XID, OpaqueAuth::NONE), &[]);
        let longer = [&sent.stream[..], &[0; 4]].concat();
        prop_assert!(matches!(parse(&longer, &[]), Err(ArgumentFault::Xdr(_))));
        let arguments = sent.stream.len() - CALL_HEADER_BYTES;
        if arguments > 0 {
            let shorter = &sent.stream[..CALL_HEADER_BYTES + cut.index(arguments)];
            prop_assert!(matches!(parse(shorter, &[]), Err(ArgumentFault::Xdr(_))));
        }
    }

    #[test]
    fn a_chunk_anywhere_but_at_the_eligible_item_is_a_chunk_error(
        seed in seed(), position in any::<prop::sample::Index>(), len in 0_u64..70,
    ) {
        let request = request(&seed);
        let payload = request.encode(XID, OpaqueAuth::NONE);
        let sent = send(&payload, &[]);
        let position = (position.index(sent.stream.len() / 4 + 1) * 4) as u64;
        // The place of the data of PUT and PUT_MORE: behind everything else.
        let item = payload.items().next();
        let eligible = item.map(|item| payload.stream_bytes() - u64::from(item.len.next_multiple_of(4)));
        prop_assume!(eligible != Some(position));
        let chunks = [Reduced { position, len }];
        match accept(&[&PROGRAM], Arguments { stream: &sent.stream, chunks: &chunks }) {
            Ok(call) => prop_assert!(Request::parse(call).unwrap_err().is_chunk_error()),
            Err(refusal) => prop_assert_eq!(refusal, bulkhead::programs::rpc::Refusal::ChunkError),
        }
    }

    #[test]
    fn an_answer_is_decoded_as_it_was_meant_inline_and_reduced(
        (request, answer) in answer(), offered in prop::collection::vec(any::<bool>(), 0..8),
    ) {
        let payload = answer.encode(XID);
        // Some results have a chunk, some an empty one, and the rest none; chunks beyond the results stay unused.
        let ways: Vec<_> = offered.iter().map(|&chunk| if chunk { Way::Chunk } else { Way::Inline }).collect();
        let mut sent = send(&payload, &ways);
        let lens: Vec<_> = payload.items().map(|item| u64::from(item.len)).collect();
        let chunks: Vec<_> =
            offered.iter().enumerate().map(|(at, &chunk)| chunk.then(|| lens.get(at).copied().unwrap_or(0))).collect();
        // Empty chunks count in the list.
        for (at, data) in sent.data.iter_mut().enumerate() {
            if let Data::Chunk { index, .. } = data {
                *index = at;
            }
        }
        let expected = request.expectation();
        let (xid, found) = expected.decode(&sent.stream, &chunks).unwrap();
        prop_assert_eq!(xid, XID);
        prop_assert_eq!(found, answer_with_data(&answer, &sent.data));
        prop_assert!(expected.items().len() == lens.len());
        let reduced = payload.parts().iter().map(|part| match part {
            Part::Bytes(bytes) => bytes.len() as u64,
            Part::Item(_) => 0,
        });
        prop_assert!(reduced.sum::<u64>() <= expected.reduced_bytes_max());
        if let Some(index) = chunks.iter().position(Option::is_some) {
            let mut wrong = chunks.clone();
            wrong[index] = wrong[index].map(|bytes| bytes + 1);
            prop_assert!(expected.decode(&sent.stream, &wrong).is_err());
        }
    }

    #[test]
    fn any_words_are_a_request_or_an_error(
        procedure in 0_u32..11, words in prop::collection::vec(prop_oneof![0_u32..6, any::<u32>()], 0..40), position in 0_u64..50,
        len in 0_u64..12,
    ) {
        let mut stream = send(&Request::<Item>::Null.encode(XID, OpaqueAuth::NONE), &[]).stream;
        stream[20..24].copy_from_slice(&procedure.to_be_bytes());
        stream.extend(words.iter().flat_map(|word| word.to_be_bytes()));
        let chunks = [Reduced { position: position * 4, len }];
        for chunks in [&chunks[..0], &chunks[..]] {
            let Ok(call) = accept(&[&PROGRAM], Arguments { stream: &stream, chunks }) else { continue };
            if let Ok(Request::Stat(StatRequest { keys, .. }) | Request::Pin(keys)) = Request::parse(call) {
                prop_assert!(keys.len() <= KEYS_MAX);
            }
        }
    }

    #[test]
    fn any_words_are_an_answer_or_an_error(
        (request, _) in answer(), words in prop::collection::vec(prop_oneof![0_u32..6, any::<u32>()], 0..40),
        chunks in prop::collection::vec(prop::option::of(0_u64..70), 0..4),
    ) {
        let mut stream = send(&Answer::<Item>::Null.encode(XID), &[]).stream;
        stream.extend(words.iter().flat_map(|word| word.to_be_bytes()));
        match request.expectation().decode(&stream, &chunks) {
            Ok((_, Answer::Get(got))) => prop_assert!(got.len() <= RANGES_MAX),
            Ok((_, Answer::List(page))) => prop_assert!(page.entries.len() <= LIST_ENTRIES_MAX),
            _ => {}
        }
    }
}
