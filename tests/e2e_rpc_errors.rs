//! Every row of the error table of RPC-over-RDMA (RFC 8166 §4.5) and every vector, over living connections: the right answer
//! or silence, and the connection goes on. The door answers no call to NFS, so a call that passes is told that.

use bulkhead::fabric::Access;
use bulkhead::programs::bulkhead::{Request, Status};
use bulkhead::programs::rpc::ReplyFault;
use bulkhead::wire::codec::Reader;
use bulkhead::wire::onc_rpc::{AcceptStatus, Reply, ReplyHeader, Versions, Xid};
use bulkhead::wire::rpcrdma::chunk::{ChunkLists, ReadSegment, Segment};
use bulkhead::wire::rpcrdma::header::{Fixed, Header, Message, Placement, RdmaError};
use bulkhead::wire::rpcrdma::private_data::PrivateData;
use common::Pattern;
use rpc::raw::{Ask, Outcome, Raw};
use rpc::{FABRICS, Served, get, got, put, put_chunk, range, serve, stored};
use serde_json::Value;

mod common;
mod rpc;

fn octets(value: &Value) -> Vec<u8> {
    let hex = value.as_str().unwrap();
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
}

/// What is said to one message, if anything: the answer to a good call behind it tells that there is no more to come.
async fn said(peer: &mut Raw, message: &[u8]) -> Vec<Vec<u8>> {
    peer.send(message);
    assert_eq!(peer.call(&Ask::new(Request::Null)).await.replied().placement, Placement::Inline);
    peer.messages.drain(..).map(|(message, _)| message).collect()
}

fn error(message: &[u8]) -> (Xid, u32, RdmaError) {
    match Message::decode(message) {
        Ok(Message::Error { xid, vers, credit, error }) => {
            assert!(credit > 0, "a grant is never zero");
            (xid, vers, error)
        }
        other => panic!("{other:?}"),
    }
}

fn reply(message: &[u8]) -> Reply<'_> {
    let Ok(Message::Transport(found)) = Message::decode(message) else { panic!("{message:?}") };
    assert!(found.credit > 0);
    ReplyHeader::read(&mut Reader::new(found.payload)).unwrap().reply
}

#[actix::test]
async fn every_vector_is_answered_as_it_says_and_the_connection_goes_on() {
    let file: Value = serde_json::from_str(include_str!("vectors/rpcrdma.json")).unwrap();
    for fabric in FABRICS {
        let served = serve(fabric, "vectors", |_| {}).await;
        let mut peer = served.connect().await;
        let mut judged = 0;
        for vector in file["vectors"].as_array().unwrap() {
            if vector["class"] != "header" {
                continue;
            }
            let (id, message) = (vector["id"].as_str().unwrap(), octets(&vector["hex"]));
            // What has to be pulled would be pulled from memory that is not there.
            if matches!(id, "H18" | "H20") {
                continue;
            }
            judged += 1;
            let expected = vector["expect"]["responder"].as_str();
            let answers = said(&mut peer, &message).await;
            let fixed = Fixed::of(&message);
            match (expected, &answers[..]) {
                (Some("discard"), []) => {}
                (Some("ERR_CHUNK"), [answer]) => {
                    assert_eq!(error(answer), (fixed.unwrap().xid, 1, RdmaError::Chunk), "{id}");
                }
                (Some("ERR_VERS"), [answer]) => {
                    let (fixed, versions) = (fixed.unwrap(), RdmaError::Version { low: 1, high: 1 });
                    assert_eq!(error(answer), (fixed.xid, fixed.vers, versions), "{id}");
                }
                (Some("accept"), [answer]) => {
                    assert_eq!(reply(answer), Reply::accepted(AcceptStatus::ProgUnavail), "{id}");
                }
                // Of the other role: what is no call is not answered, a call (in the other direction) is one here.
                (None, []) => {}
                (None, [answer]) if matches!(id, "M31" | "M32") => {
                    assert!(matches!(Message::decode(answer), Ok(Message::Transport(_))), "{id}");
                }
                (None, [answer]) => assert_eq!(error(answer).2, RdmaError::Chunk, "{id}"),
                (expected, answers) => panic!("{id}: {expected:?}, and {} answers came", answers.len()),
            }
        }
        assert_eq!(judged, 45);
        assert!(peer.ended.is_none());
        drop(peer);
        served.until_quiet().await;
        served.shutdown().await;
    }
}

/// A call of `request`'s, changed octet for octet.
fn changed(peer: &mut Raw, ask: &Ask<'_>, change: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let (mut message, _pending) = peer.prepare(ask);
    change(&mut message);
    message
}

async fn error_of(peer: &mut Raw, message: &[u8]) -> RdmaError {
    let answers = said(peer, message).await;
    assert_eq!(answers.len(), 1);
    error(&answers[0]).2
}

async fn with_values(fabric: &str, name: &str) -> (Served, Raw) {
    let served = serve(fabric, name, |_| {}).await;
    let mut peer = served.connect().await;
    stored(peer.call(&put_chunk("k", &Pattern(1).octets(0, 100_000))).await);
    (served, peer)
}

#[actix::test]
async fn messages_that_are_none_are_answered_by_this_table() {
    for fabric in FABRICS {
        let (served, mut peer) = with_values(fabric, "table").await;
        let null = Ask::new(Request::Null);
        let word = |at: usize, value: u32| {
            move |message: &mut Vec<u8>| message[at..at + 4].copy_from_slice(&value.to_be_bytes())
        };
        let silent: [Vec<u8>; 6] = [
            changed(&mut peer, &null, |message| message.truncate(0)),
            changed(&mut peer, &null, |message| message.truncate(15)),
            changed(&mut peer, &null, |message| message.truncate(27)),
            changed(&mut peer, &null, word(12, 3)),
            changed(&mut peer, &null, word(12, 4)),
            // A reply, to a call that nobody made.
            changed(&mut peer, &null, word(32, 1)),
        ];
        for (row, message) in silent.iter().enumerate() {
            assert_eq!(said(&mut peer, message).await, Vec::<Vec<u8>>::new(), "row {row}");
        }
        let version = changed(&mut peer, &null, |message| {
            message[7] = 2;
            message.truncate(28);
        });
        assert_eq!(error_of(&mut peer, &version).await, RdmaError::Version { low: 1, high: 1 });
        let chunk_errors: [Vec<u8>; 9] = [
            changed(&mut peer, &null, word(12, 2)),
            changed(&mut peer, &null, word(12, 5)),
            changed(&mut peer, &null, word(12, u32::MAX)),
            changed(&mut peer, &null, word(16, 2)),
            changed(&mut peer, &null, word(20, 1)),
            changed(&mut peer, &null, word(24, u32::MAX)),
            // Neither payload nor chunk; the xid of another; a message type that is none.
            changed(&mut peer, &null, |message| {
                message[15] = 1;
                message.truncate(28);
            }),
            changed(&mut peer, &null, word(28, 7)),
            changed(&mut peer, &null, word(32, 2)),
        ];
        for (row, message) in chunk_errors.iter().enumerate() {
            assert_eq!(error_of(&mut peer, message).await, RdmaError::Chunk, "row {row}");
        }
        // Asked for no credit, it grants one all the same.
        let none = changed(&mut peer, &null, word(8, 0));
        let answers = said(&mut peer, &none).await;
        assert_eq!(reply(&answers[0]), Reply::accepted(AcceptStatus::Success));
        drop(peer);
        served.until_quiet().await;
        served.shutdown().await;
    }
}

#[actix::test]
async fn calls_of_programs_and_arguments_that_are_not_here_are_told_so() {
    for fabric in FABRICS {
        let (served, mut peer) = with_values(fabric, "programs").await;
        let null = Ask::new(Request::Null);
        let mismatch = AcceptStatus::ProgMismatch(Versions { low: 1, high: 1 });
        // Words of the call, behind 28 octets of header: xid, type, RPC version, program, version, procedure.
        let cases = [
            (40, 100_003, AcceptStatus::ProgUnavail),
            (44, 2, mismatch),
            (44, 0, mismatch),
            (48, 11, AcceptStatus::ProcUnavail),
            (48, 1, AcceptStatus::GarbageArgs),
        ];
        for (at, value, status) in cases {
            let message = changed(&mut peer, &null, |message| {
                message[at..at + 4].copy_from_slice(&u32::to_be_bytes(value));
            });
            let answers = said(&mut peer, &message).await;
            assert_eq!(reply(&answers[0]), Reply::accepted(status), "word at {at} is {value}");
        }
        drop(peer);
        served.until_quiet().await;
        served.shutdown().await;
    }
}

/// A call with the stream of `ask`, and these lists.
fn with_lists(peer: &mut Raw, ask: &Ask<'_>, lists: ChunkLists) -> Vec<u8> {
    let (message, _pending) = peer.prepare(&Ask { cuts: None, writes: vec![], reply: None, ..ask.clone() });
    let xid = Fixed::of(&message).unwrap().xid;
    let mut changed = Header { xid, credit: 8, placement: Placement::Inline, lists }.encode();
    changed.extend_from_slice(&message[28..]);
    changed
}

#[actix::test]
async fn chunks_that_cannot_be_are_errors_and_nothing_of_them_is_touched() {
    for fabric in FABRICS {
        let (served, mut peer) = with_values(fabric, "chunks").await;
        let segment =
            |length: u32, offset: u64| Segment { handle: bulkhead::fabric::RemoteKey(0xdead), length, offset };
        let read = |position: u32, length: u32| ReadSegment { position, target: segment(length, 1 << 40) };
        let reads = |reads: Vec<ReadSegment>| ChunkLists { reads, ..ChunkLists::default() };
        // A PUT whose item is of no octets: 100 octets of stream, its item at the end.
        let empty = put("none", b"");
        let end = peer.prepare(&empty).0.len() as u32 - 28;
        let lists = [
            ("not a multiple of four", reads(vec![read(end + 2, 8)])),
            ("past the stream", reads(vec![read(end + 4, 8)])),
            ("overlapping", reads(vec![read(end - 8, 8), read(end - 4, 8)])),
            ("in the header", reads(vec![read(16, 8)])),
            ("at no eligible item", reads(vec![read(end - 4, 4)])),
            ("larger than the program takes", reads(vec![read(end, u32::MAX)])),
            ("sums past 2^32", reads(vec![read(end, u32::MAX), read(end, u32::MAX)])),
            (
                "wraps",
                ChunkLists {
                    reads: vec![ReadSegment { position: end, target: segment(9, u64::MAX - 8) }],
                    ..ChunkLists::default()
                },
            ),
            (
                "wraps in a write chunk",
                ChunkLists { writes: vec![vec![segment(9, u64::MAX - 8)]], ..ChunkLists::default() },
            ),
            (
                "wraps in the reply chunk",
                ChunkLists { reply: Some(vec![segment(9, u64::MAX - 8)]), ..ChunkLists::default() },
            ),
        ];
        for (what, lists) in lists {
            let message = with_lists(&mut peer, &empty, lists);
            assert_eq!(error_of(&mut peer, &message).await, RdmaError::Chunk, "{what}");
        }
        // A chunk that is neither the item nor the item and its roundup.
        let off = Ask { cuts: Some(vec![9]), ..put("none", &[1; 5]) };
        assert!(matches!(peer.call(&off).await, Outcome::Fault(ReplyFault::Unsuccessful(AcceptStatus::GarbageArgs))));
        let roomy = Ask { cuts: Some(vec![5, 3]), ..put("none", &[1; 5]) };
        stored(peer.call(&roomy).await);
        drop(peer);
        served.until_quiet().await;
        served.shutdown().await;
    }
}

#[actix::test]
async fn more_segments_than_a_call_may_have_are_refused() {
    let served = serve("loopback", "segments", |config| {
        config.rpc.segments_max = 16;
        config.rpc.inline_bytes = 8192;
    })
    .await;
    let mut peer = Raw::connect(&*served.fabric, &served.address, 8192).await;
    let value = Pattern(2).octets(0, 1700);
    stored(
        peer.call(&Ask { cuts: Some(vec![100; 16].into_iter().chain([]).collect()), ..put("k", &value[..1600]) }).await,
    );
    let refused = peer.call(&Ask { cuts: Some(vec![100; 17]), ..put("k", &value) }).await;
    assert!(matches!(refused, Outcome::Error(RdmaError::Chunk)), "{refused:?}");
    assert_eq!(served.handle.metrics().rpc_calls.refused.list(), [("read_segments", 1)]);
    drop(peer);
    served.until_quiet().await;
    served.shutdown().await;
}

#[actix::test]
async fn results_that_do_not_fit_what_is_offered_are_errors_and_nothing_is_written() {
    for fabric in FABRICS {
        let (served, mut peer) = with_values(fabric, "results").await;
        let asks = [
            Ask { writes: vec![vec![40_000, 59_999]], ..get(vec![range("k", 0, 100_000)]) },
            Ask { writes: vec![vec![100_000], vec![9]], ..get(vec![range("k", 0, 100_000), range("k", 0, 10)]) },
            get(vec![range("k", 0, 100_000)]),
            Ask { reply: Some(vec![100_000]), ..get(vec![range("k", 0, 100_000)]) },
        ];
        for (row, ask) in asks.iter().enumerate() {
            let pending = peer.ask(ask);
            let outcome = peer.answer(&pending).await;
            assert!(matches!(outcome, Outcome::Error(RdmaError::Chunk)), "row {row}: {outcome:?}");
            assert!(pending.is_untouched(), "row {row}");
        }
        // What is offered beyond what is there comes back unused.
        let ask =
            Ask { writes: vec![vec![], vec![10, 10], vec![5]], ..get(vec![range("k", 7, 3), range("none", 0, 9)]) };
        let found = got(peer.call(&ask).await);
        assert_eq!(found, [(Status::Ok, Pattern(1).octets(7, 3)), (Status::NotFound, vec![])]);
        drop(peer);
        served.until_quiet().await;
        served.shutdown().await;
    }
}

/// Bug class of servers whose Receives run out on messages that are dropped.
#[actix::test]
async fn ten_thousand_messages_that_are_none_cost_no_receive() {
    for fabric in FABRICS {
        let (served, mut peer) = with_values(fabric, "drained").await;
        let null = Ask::new(Request::Null);
        let short = changed(&mut peer, &null, |message| message.truncate(27));
        let version = changed(&mut peer, &null, |message| message[7] = 2);
        let done = changed(&mut peer, &null, |message| message[15] = 3);
        for _ in 0..3_334 / 10 {
            for _ in 0..10 {
                for message in [&short, &version, &done] {
                    peer.send(message);
                }
            }
            peer.call(&null).await.replied();
            assert_eq!(peer.messages.drain(..).count(), 10, "ten are answered");
        }
        drop(peer);
        served.until_quiet().await;
        served.shutdown().await;
    }
}

#[actix::test]
async fn a_write_into_memory_that_is_gone_ends_the_connection_and_no_other() {
    for fabric in FABRICS {
        let (served, mut good) = with_values(fabric, "writes").await;
        let mut peer = served.connect().await;
        let region = peer.expose(&[0; 100], Access::READ);
        let target = Segment { handle: region.key(), length: 100, offset: region.remote().address };
        let lists = ChunkLists { writes: vec![vec![target]], ..ChunkLists::default() };
        let message = with_lists(&mut peer, &get(vec![range("k", 0, 100)]), lists);
        peer.send(&message);
        peer.end().await;
        good.call(&Ask::new(Request::Null)).await.replied();
        drop((peer, good));
        served.until_quiet().await;
        served.shutdown().await;
    }
}

/// The peer told more than it receives: the Send of an answer fails, which costs that connection and nothing else.
#[actix::test]
async fn an_answer_that_finds_no_room_at_its_peer_ends_the_connection_and_no_other() {
    for fabric in FABRICS {
        let served = serve(fabric, "room", |config| config.rpc.inline_bytes = 16_384).await;
        let mut good = served.connect().await;
        stored(good.call(&put_chunk("k", &Pattern(1).octets(0, 100_000))).await);
        let told = PrivateData { remote_invalidate: false, send_bytes: 16_384, receive_bytes: 16_384 }.encode();
        let mut peer = Raw::dial_with(&*served.fabric, &served.address, &told, 4096).await.unwrap();
        peer.call(&Ask::new(Request::Null)).await.replied();
        let _pending = peer.ask(&get(vec![range("k", 0, 10_000)]));
        peer.end().await;
        assert_eq!(served.handle.metrics().rpc.ends.get("stalled"), 0);
        good.call(&Ask::new(Request::Null)).await.replied();
        drop((peer, good));
        served.until_quiet().await;
        served.shutdown().await;
    }
}

/// What a program says to a call of which it knows nothing better than that it is a call.
#[actix::test]
async fn a_call_of_another_rpc_version_or_credential_is_denied_and_one_that_is_cut_is_garbage() {
    for fabric in FABRICS {
        let (served, mut peer) = with_values(fabric, "denied").await;
        let null = Ask::new(Request::Null);
        let short = get(vec![range("k", 0, 10)]);
        for (ask, at, value) in [(&null, 36, 3), (&short, 52, 6)] {
            let message = changed(&mut peer, ask, |message| {
                message[at..at + 4].copy_from_slice(&u32::to_be_bytes(value));
            });
            let answers = said(&mut peer, &message).await;
            assert!(matches!(reply(&answers[0]), Reply::Denied(_)), "word at {at} is {value}");
        }
        for cut in [1, 4, 8] {
            let message = changed(&mut peer, &short, |message| message.truncate(message.len() - cut));
            let answers = said(&mut peer, &message).await;
            assert_eq!(reply(&answers[0]), Reply::accepted(AcceptStatus::GarbageArgs), "{cut} octets less");
        }
        drop(peer);
        served.until_quiet().await;
        served.shutdown().await;
    }
}
