//! The RPC door of a whole daemon: over loopback and over iWARP on sockets, by a peer that makes its calls by hand.

use bulkhead::fabric::{Access, Cause, MemoryRegion};
use bulkhead::programs::bulkhead::answer::Answer;
use bulkhead::programs::bulkhead::{
    Deletion, GetRequest, Key, ListRequest, Put, RangeOf, Request, StatRequest, Status, Touch,
};
use bulkhead::store::Condition;
use bulkhead::wire::native::descriptor::WindowGeometry;
use bulkhead::wire::onc_rpc::Xid;
use bulkhead::wire::rpcrdma::chunk::{ChunkLists, ReadSegment, Segment};
use bulkhead::wire::rpcrdma::header::{Header, Placement, RdmaError};
use bulkhead::wire::rpcrdma::private_data::PrivateData;
use common::{Daemon, Pattern};
use rpc::raw::{Ask, Outcome, PATIENCE, Raw, octets_of};
use rpc::{FABRICS, cut, draft, get, got, key, more, put, put_chunk, range, serve, stat, stored};
use std::time::{Duration, Instant};

mod common;
mod rpc;

fn value(seed: u64, len: usize) -> Vec<u8> {
    Pattern(seed).octets(0, len)
}

#[actix::test]
async fn null_a_short_put_and_a_get_from_ram() {
    for fabric in FABRICS {
        let served = serve(fabric, "skeleton", |_| {}).await;
        let mut peer = served.connect().await;
        let null = peer.call(&Ask::new(Request::Null)).await.replied();
        assert_eq!((null.answer, null.placement, null.granted), (Answer::Null, Placement::Inline, 64));
        stored(peer.call(&put("k", b"0123456789")).await);
        let ask = Ask { writes: vec![vec![10]], ..get(vec![range("k", 0, 100)]) };
        assert_eq!(got(peer.call(&ask).await), [(Status::Ok, b"0123456789".to_vec())]);
        assert_eq!(got(peer.call(&get(vec![range("k", 3, 4)])).await), [(Status::Ok, b"3456".to_vec())]);
        drop(peer);
        served.until_quiet().await;
        served.shutdown().await;
    }
}

#[actix::test]
async fn every_procedure_is_served() {
    for fabric in FABRICS {
        let served = serve(fabric, "procedures", |_| {}).await;
        let mut peer = served.connect().await;
        for name in ["a/1", "a/2", "b/1"] {
            stored(peer.call(&put_chunk(name, &value(1, 1000))).await);
        }
        let keys: Vec<Key<'_>> = ["a/1", "a/2", "c", "b/1"].map(key).to_vec();
        let ask = |request| Ask::new(request);
        let request = Request::Stat(StatRequest { until_miss: false, keys: keys.clone() });
        let Answer::Stat { leading, stats } = peer.call(&ask(request)).await.replied().answer else { panic!() };
        assert_eq!(
            (leading, stats.len(), stats[0].len, stats[0].flags, stats[2].status),
            (2, 4, 1000, 7, Status::NotFound)
        );
        let request = Request::Touch(vec![Touch { key: key("a/1"), ttl_s: 100 }, Touch { key: key("c"), ttl_s: 1 }]);
        let touched = peer.call(&ask(request)).await.replied().answer;
        assert_eq!(touched, Answer::Statuses(vec![Status::Ok, Status::NotFound]));
        assert!((99..=100).contains(&stat(&mut peer, "a/1").await.ttl_s));
        let list = |cookie| Request::List(ListRequest { prefix: b"a/", cookie, count: 1, bytes: 2000 });
        let Answer::List(page) = peer.call(&ask(list(b""))).await.replied().answer else { panic!() };
        assert_eq!((page.entries[0].key.as_slice(), page.next.as_slice()), (&b"a/1"[..], &b"a/1"[..]));
        let Answer::List(page) = peer.call(&ask(list(b"a/1"))).await.replied().answer else { panic!() };
        assert_eq!((page.entries[0].key.as_slice(), page.next.as_slice()), (&b"a/2"[..], &b""[..]));
        let Answer::Pin(pinned) = peer.call(&ask(Request::Pin(keys.clone()))).await.replied().answer else { panic!() };
        assert_eq!(pinned.iter().map(|pin| pin.status).collect::<Vec<_>>()[2..], [Status::NotFound, Status::Ok]);
        assert_eq!(served.handle.store().gauges().pins, 3);
        let unpinned = peer.call(&ask(Request::Unpin(vec![key("a/1"), key("c")]))).await.replied().answer;
        assert_eq!(unpinned, Answer::Statuses(vec![Status::Ok, Status::NotFound]));
        let deletions = vec![Deletion { key: key("a/1"), version: 0 }, Deletion { key: key("b/1"), version: 1 << 60 }];
        let deleted = peer.call(&ask(Request::Delete(deletions))).await.replied().answer;
        assert_eq!(deleted, Answer::Statuses(vec![Status::Ok, Status::Changed]));
        assert_eq!(stat(&mut peer, "a/1").await.status, Status::NotFound);
        let unknown = peer.call(&ask(Request::PutDrop { draft: 9 })).await.replied().answer;
        assert_eq!(unknown, Answer::PutDrop(Status::BadDraft));
        assert_eq!(served.handle.store().gauges().pins, 2);
        drop(peer);
        served.until_quiet().await;
        let counted: Vec<_> = served.handle.metrics().rpc_calls.procedures.list();
        assert_eq!(
            counted.iter().map(|(name, _)| *name).collect::<Vec<_>>(),
            ["DELETE", "LIST", "PIN", "PUT", "PUT_DROP", "STAT", "TOUCH", "UNPIN"]
        );
        served.shutdown().await;
    }
}

#[actix::test]
async fn ranges_of_hot_half_and_cold_values_come_whole_through_odd_chunks() {
    for fabric in FABRICS {
        let served =
            serve(fabric, "ranges", |config| config.rpc.windows = WindowGeometry::new(64 << 10, 4).unwrap()).await;
        let mut peer = served.connect().await;
        const LEN: u64 = 3_000_001;
        let octets = value(3, LEN as usize);
        let cuts = cut(LEN as u32, &[1, 70_000, 3, 262_144, 65_537]);
        stored(peer.call(&Ask { cuts: Some(cuts), ..put("k", &octets) }).await);
        let lane_sizes = [
            (0, 0_u32),
            (0, 1),
            (1, 1023),
            (LEN - 1, 5),
            (LEN, 5),
            (262_143, 2),
            (65_535, 70_003),
            (77, 2_900_000),
            (0, LEN as u32),
        ];
        for heat in ["hot", "half", "cold"] {
            match heat {
                "half" => served.push_out(&mut peer, "k", LEN - 1).await,
                "cold" => served.push_out(&mut peer, "k", 512 << 10).await,
                _ => {}
            }
            for (offset, count) in lane_sizes {
                let ask =
                    Ask { writes: vec![cut(count, &[5, 60_001, 1, 300_000])], ..get(vec![range("k", offset, count)]) };
                let [(status, found)] = &got(peer.call(&ask).await)[..] else { panic!() };
                let end = (offset + u64::from(count)).min(LEN);
                assert_eq!((*status, found.len() as u64), (Status::Ok, end - offset), "{heat} {offset} {count}");
                Pattern(3).check(offset, found, heat);
            }
        }
        assert!(served.handle.metrics().copied.staging_to_slot.get() > 0, "the disk was read");
        drop(peer);
        served.until_quiet().await;
        served.shutdown().await;
    }
}

#[actix::test]
async fn a_value_is_put_in_ranges_all_at_once_and_read_by_the_memcache_door() {
    for fabric in FABRICS {
        let served = serve(fabric, "streamed", |_| {}).await;
        let mut peer = served.connect().await;
        const PART: usize = 700_003;
        let octets = value(4, 10 * PART);
        let mut pending = Vec::new();
        for (index, part) in octets.chunks(PART).enumerate() {
            let offset = (index * PART) as u64;
            // Odd segments; every other range has its roundup with it.
            let sent = PART + index % 2 * (PART.next_multiple_of(4) - PART);
            let cuts = cut(sent as u32, &[99_999, 1, 300_000]);
            let ask = match index {
                0 => draft("k", 7, octets.len() as u64, part, cuts),
                _ => more(7, offset, part, cuts, index == 9),
            };
            pending.push(peer.ask(&ask));
        }
        for (index, pending) in pending.iter().enumerate() {
            let version = stored(peer.answer(pending).await);
            assert_eq!(version > 0, index == 9, "the last one commits");
        }
        assert!(served.by_memcache("k").await.unwrap() == octets);
        let copied = &served.handle.metrics().copied;
        assert_eq!(copied.pulled_to_arena.get(), octets.len() as u64, "each octet once");
        // Nobody sees a draft, and a connection that goes takes it along.
        stored(peer.call(&draft("l", 8, 2000, &octets[..1000], vec![1000])).await);
        assert_eq!(stat(&mut peer, "l").await.status, Status::NotFound);
        assert_eq!(served.handle.store().gauges().claims, 1);
        drop(peer);
        served.until_quiet().await;
        assert_eq!(served.by_memcache("l").await, None);
        served.shutdown().await;
    }
}

#[actix::test]
async fn a_call_too_long_for_a_message_is_pulled_and_a_reply_too_long_is_pushed() {
    for fabric in FABRICS {
        let served = serve(fabric, "long", |_| {}).await;
        let mut peer = served.connect().await;
        stored(peer.call(&put("the key", &value(5, 10))).await);
        let keys = vec![key("the key"); 1000];
        let request = Request::Stat(StatRequest { until_miss: false, keys });
        let ask = Ask { long: Some(5001), reply: Some(vec![30_000, 1, 40_000]), ..Ask::new(request) };
        let replied = peer.call(&ask).await.replied();
        assert_eq!(replied.placement, Placement::Chunk);
        assert!(matches!(replied.answer, Answer::Stat { leading: 1000, .. }));
        // A value that comes in the long call itself, and goes without a write chunk.
        let octets = value(6, 500_000);
        stored(peer.call(&Ask { long: Some(200_001), ..put("inline", &octets) }).await);
        let ask = Ask { reply: Some(vec![600_000]), ..get(vec![range("inline", 0, u32::MAX), range("none", 0, 1)]) };
        let found = got(peer.call(&ask).await);
        assert!(found[0].0 == Status::Ok && found[0].1 == octets);
        let copied = &served.handle.metrics().copied;
        assert!(copied.pulled_to_call.get() > 500_000 && copied.reply_to_slot.get() > 500_000);
        assert_eq!((copied.input_to_arena.get(), copied.arena_to_reply.get()), (500_010, 500_000));
        // A short answer is inline, though a reply chunk was offered.
        let ask = Ask { reply: Some(vec![100]), ..Ask::new(Request::Null) };
        assert_eq!(peer.call(&ask).await.replied().placement, Placement::Inline);
        drop(peer);
        served.until_quiet().await;
        served.shutdown().await;
    }
}

#[actix::test]
async fn sixty_four_ranges_in_one_call_and_sixty_four_calls_at_once() {
    for fabric in FABRICS {
        let served = serve(fabric, "many", |_| {}).await;
        let mut peer = served.connect().await;
        let octets = value(7, 1 << 20);
        stored(peer.call(&put_chunk("k", &octets)).await);
        let ranges: Vec<RangeOf<'_>> = (0..64).map(|index| range("k", index * 16_001, 16_000)).collect();
        let ask = Ask { writes: vec![vec![16_000]; 64], ..get(ranges) };
        for (index, (status, found)) in got(peer.call(&ask).await).into_iter().enumerate() {
            assert_eq!((status, found.len()), (Status::Ok, 16_000));
            Pattern(7).check(index as u64 * 16_001, &found, "range");
        }
        let asks: Vec<_> = (0..64)
            .map(|index| Ask { writes: vec![vec![60_000]], ..get(vec![range("k", index * 15_000, 60_000)]) })
            .collect();
        let pending: Vec<_> = asks.iter().map(|ask| peer.ask(ask)).collect();
        for (index, pending) in pending.iter().enumerate() {
            Pattern(7).check(index as u64 * 15_000, &got(peer.answer(pending).await)[0].1, "call");
        }
        assert!(served.handle.metrics().rpc_calls.dropped.list().is_empty());
        drop(peer);
        served.until_quiet().await;
        served.shutdown().await;
    }
}

#[actix::test]
async fn thresholds_and_credits_are_those_of_either_side() {
    for (index, (ours, theirs)) in [(1024, 4096), (4096, 1024), (262_144, 262_144)].into_iter().enumerate() {
        for credits in [1, 64] {
            let served = serve("loopback", &format!("thresholds{index}{credits}"), |config| {
                config.rpc.inline_bytes = ours;
                config.rpc.credits_max = credits;
            })
            .await;
            let mut peer = Raw::connect(&*served.fabric, &served.address, theirs).await;
            assert_eq!((peer.server.send_bytes, peer.server.receive_bytes), (ours, ours));
            assert_eq!(peer.call(&Ask::new(Request::Null)).await.replied().granted, credits);
            let octets = value(8, 300_000);
            stored(peer.call(&put_chunk("k", &octets)).await);
            let inline = ours.min(theirs);
            // 28 of header, 24 of reply, 4 + 36 around the octets.
            let room = inline - 28 - 24 - 36;
            let asked = |count| get(vec![range("k", 1, count)]);
            let found = got(peer.call(&asked(room)).await);
            assert!(found[0].1 == octets[1..=room as usize]);
            let refused = peer.call(&asked(room + 1)).await;
            assert!(matches!(refused, Outcome::Error(RdmaError::Chunk)), "{refused:?}");
            // The longest call there can be.
            let rest = peer.prepare(&put("l", b"")).0.len();
            let (message, pending) = peer.prepare(&put("l", &octets[..inline as usize - rest]));
            assert_eq!(message.len(), inline as usize);
            peer.send(&message);
            stored(peer.answer(&pending).await);
            drop(peer);
            served.until_quiet().await;
            served.shutdown().await;
        }
    }
}

/// Whoever tells nothing, or nothing that is understood, receives 1,024 octets and closes nothing by remote invalidation; what
/// else is in the private data of a fabric does not matter.
#[actix::test]
async fn a_peer_that_tells_nothing_of_itself_is_sent_no_more_than_every_peer_receives() {
    let well = PrivateData { remote_invalidate: true, send_bytes: 4096, receive_bytes: 4096 }.encode();
    let other_version = {
        let mut octets = well;
        octets[4] = 2;
        octets
    };
    let behind_others = [&[9, 9, 9][..], &well, &[7; 20]].concat();
    for fabric in FABRICS {
        let served = serve(fabric, "silent", |_| {}).await;
        let octets = value(19, 8000);
        stored(served.connect().await.call(&put_chunk("k", &octets)).await);
        let table = [(&[][..], 1024), (&well[..7], 1024), (&other_version, 1024), (&behind_others, 4096)];
        for (private_data, inline) in table {
            let mut peer = Raw::dial_with(&*served.fabric, &served.address, private_data, inline).await.unwrap();
            let room = inline - 28 - 24 - 36;
            assert_eq!(got(peer.call(&get(vec![range("k", 0, room)])).await)[0].1.len(), room as usize);
            let refused = peer.call(&get(vec![range("k", 0, room + 1)])).await;
            assert!(matches!(refused, Outcome::Error(RdmaError::Chunk)), "{refused:?}");
            let pending = peer.ask(&Ask { writes: vec![vec![3000]], ..get(vec![range("k", 0, 3000)]) });
            peer.until(|peer| !peer.messages.is_empty()).await;
            assert_eq!(peer.messages[0].1.is_some(), inline == 4096, "{private_data:?}");
            assert_eq!(got(peer.answer(&pending).await)[0].1, octets[..3000]);
        }
        served.until_quiet().await;
        served.shutdown().await;
    }
}

/// Copies that forgot where in a page their octets began put them elsewhere.
#[actix::test]
async fn octets_at_every_offset_in_a_page_come_from_there_and_go_there() {
    let served = serve("loopback", "offsets", |_| {}).await;
    let mut peer = served.connect().await;
    for offset in 0..4096_u32 {
        // Every length modulo four, and all parts of a page but its first octets on both sides.
        let len = 4093 + offset % 7;
        let octets = value(offset.into(), len as usize);
        let mut memory = vec![0x55; 3 * 4096];
        memory[offset as usize..][..octets.len()].copy_from_slice(&octets);
        let (from, into) = (peer.expose(&memory, Access::READ), peer.expose(&vec![0xee; 3 * 4096], Access::WRITE));
        let at = |region: &MemoryRegion, offset: u32| Segment {
            handle: region.key(),
            length: len,
            offset: region.remote().address + u64::from(offset),
        };
        // The call as it would be inline, less the item, which is the last of it.
        let (message, pending) = peer.prepare(&put("k", &octets));
        let stream = &message[28..message.len() - len.next_multiple_of(4) as usize];
        let reads = vec![ReadSegment { position: stream.len() as u32, target: at(&from, offset) }];
        let lists = ChunkLists { reads, ..ChunkLists::default() };
        let mut call = Header { xid: pending.xid, credit: 8, placement: Placement::Inline, lists }.encode();
        call.extend_from_slice(stream);
        peer.send(&call);
        stored(peer.answer(&pending).await);
        let back = (offset * 13 + 5) % 4096;
        let (message, pending) = peer.prepare(&get(vec![range("k", 1, len)]));
        let lists = ChunkLists { writes: vec![vec![at(&into, back)]], ..ChunkLists::default() };
        let mut call = Header { xid: pending.xid, credit: 8, placement: Placement::Inline, lists }.encode();
        call.extend_from_slice(&message[28..]);
        peer.send(&call);
        assert!(peer.until(|peer| !peer.messages.is_empty()).await);
        peer.messages.clear();
        let (found, back) = (octets_of(&into), back as usize);
        assert!(found[back..back + octets.len() - 1] == octets[1..], "offset {offset}");
        let mut others = found[..back].iter().chain(&found[back + octets.len() - 1..]);
        assert!(others.all(|octet| *octet == 0xee), "offset {offset}: written elsewhere");
    }
    drop(peer);
    served.until_quiet().await;
    served.shutdown().await;
}

#[actix::test]
async fn a_deadline_leaves_out_what_the_disk_would_have_to_bring() {
    let served = serve("iwarp", "deadline", |_| {}).await;
    let mut peer = served.connect().await;
    stored(peer.call(&put_chunk("cold", &value(9, 3 << 20))).await);
    served.push_out(&mut peer, "cold", 512 << 10).await;
    stored(peer.call(&put_chunk("hot", &value(10, 1000))).await);
    let mut late = 0;
    for _ in 0..20 {
        let ranges = vec![range("hot", 0, 1000), range("cold", 1 << 20, 2 << 20)];
        let request = Request::Get(GetRequest { crc32c: true, deadline_us: 1, ranges });
        let ask = Ask { writes: vec![vec![1000], vec![2 << 20]], ..Ask::new(request) };
        let found = got(peer.call(&ask).await);
        for ((status, octets), (seed, offset, len)) in found.into_iter().zip([(10, 0, 1000), (9, 1 << 20, 2 << 20)]) {
            match status {
                Status::Ok => {
                    assert_eq!(octets.len(), len);
                    Pattern(seed).check(offset, &octets, "in time");
                }
                Status::Late => late += 1,
                other => panic!("{other:?}"),
            }
        }
    }
    assert!(late > 0, "2 MiB from disk take longer than a microsecond");
    let ask = Ask { writes: vec![vec![2 << 20]], ..get(vec![range("cold", 1 << 20, 2 << 20)]) };
    Pattern(9).check(1 << 20, &got(peer.call(&ask).await)[0].1, "without a deadline");
    drop(peer);
    served.until_quiet().await;
    served.shutdown().await;
}

#[actix::test]
async fn the_one_handle_of_a_call_is_invalidated_and_never_one_of_two() {
    for fabric in FABRICS {
        let served = serve(fabric, "invalidate", |_| {}).await;
        let mut peer = Raw::dial(&*served.fabric, &served.address, 4096, true).await.unwrap();
        assert!(peer.server.remote_invalidate);
        stored(peer.call(&put("k", &value(11, 3000))).await);
        for (writes, is_invalidated) in [(vec![vec![3000]], true), (vec![vec![1000, 2000]], false)] {
            let pending = peer.ask(&Ask { writes, ..get(vec![range("k", 0, 3000)]) });
            peer.until(|peer| !peer.messages.is_empty()).await;
            assert_eq!(peer.messages[0].1.is_some(), is_invalidated);
            assert_eq!(got(peer.answer(&pending).await)[0].1, value(11, 3000));
        }
        drop(peer);
        served.until_quiet().await;
        served.shutdown().await;
    }
}

#[actix::test]
async fn peers_that_go_in_the_middle_of_anything_leave_nothing_behind() {
    for fabric in FABRICS {
        let served = serve(fabric, "killed", |_| {}).await;
        let octets = value(12, 3 << 20);
        let mut keeper = served.connect().await;
        stored(keeper.call(&put_chunk("k", &octets)).await);
        for round in 0..8 {
            let mut peer = served.connect().await;
            let asks = [
                Ask { writes: vec![vec![3 << 20]], ..get(vec![range("k", 0, 3 << 20)]) },
                Ask { reply: Some(vec![2 << 20]), ..get(vec![range("k", 0, 1 << 20)]) },
                put_chunk("never", &octets),
                draft("never", 1, 9 << 20, &octets, vec![1 << 20, 1 << 20, 1 << 20]),
                Ask { long: Some(100_000), ..put("never", &octets[..1_000_000]) },
            ];
            let pending: Vec<_> = asks.iter().map(|ask| peer.ask(ask)).collect();
            let pin = peer.call(&Ask::new(Request::Pin(vec![key("k")]))).await.replied().answer;
            assert!(matches!(pin, Answer::Pin(_)));
            for _ in 0..round * 3 {
                peer.turn().await;
            }
            // Its memory goes with it.
            drop(peer);
            drop(pending);
        }
        drop(keeper);
        served.until_quiet().await;
        let metrics = served.handle.metrics();
        assert_eq!(metrics.rpc.total.get(), 9);
        let mut after = served.connect().await;
        let ask = Ask { writes: vec![vec![3 << 20]], ..get(vec![range("k", 0, 3 << 20)]) };
        Pattern(12).check(0, &got(after.call(&ask).await)[0].1, "afterwards");
        drop(after);
        served.until_quiet().await;
        served.shutdown().await;
    }
}

#[actix::test]
async fn a_peer_that_takes_nothing_is_cut_and_others_are_not() {
    for talks in [false, true] {
        let served = serve("iwarp", "", |config| config.timers.stall_timeout = Duration::from_millis(300)).await;
        let mut peer = served.connect().await;
        let octets = value(13, 12 << 20);
        stored(peer.call(&put_chunk("k", &octets)).await);
        let mut deaf = served.connect().await;
        let _pending = deaf.ask(&Ask { writes: vec![vec![12 << 20]], ..get(vec![range("k", 0, 12 << 20)]) });
        let limit = Instant::now() + PATIENCE;
        let mut said = Instant::now();
        while served.handle.metrics().rpc.ends.get("stalled") == 0 {
            assert!(Instant::now() < limit, "talks: {talks}, {:?}", served.handle.metrics().rpc.ends.list());
            if talks && said.elapsed() > Duration::from_millis(50) {
                said = Instant::now();
                let (message, _pending) = deaf.prepare(&Ask::new(Request::Null));
                deaf.try_send(&message);
            }
            peer.call(&Ask::new(Request::Null)).await.replied();
        }
        assert_eq!(peer.call(&Ask::new(Request::Null)).await.replied().answer, Answer::Null);
        drop((deaf, peer));
        served.until_quiet().await;
        served.shutdown().await;
    }
}

#[actix::test]
async fn who_asks_for_nothing_is_let_go_after_the_idle_timeout() {
    let served =
        serve("loopback", "idle", |config| config.timers.idle_timeout = Some(Duration::from_millis(100))).await;
    let mut peer = served.connect().await;
    assert_eq!(peer.end().await, Cause::Peer);
    assert_eq!(served.handle.metrics().rpc.ends.list(), [("idle", 1)]);
    served.until_quiet().await;
    served.shutdown().await;
}

#[actix::test]
async fn a_shutdown_lets_calls_under_way_finish_and_then_disconnects() {
    for fabric in FABRICS {
        let served = serve(fabric, "shutdown", |_| {}).await;
        let (mut busy, mut idle) = (served.connect().await, served.connect().await);
        let octets = value(14, 8 << 20);
        stored(busy.call(&put_chunk("k", &octets)).await);
        let pending = busy.ask(&Ask { writes: vec![vec![8 << 20]], ..get(vec![range("k", 0, 8 << 20)]) });
        let metrics = served.handle.metrics().clone();
        while metrics.rpc_calls.procedures.get("GET") == 0 {
            busy.turn().await;
        }
        let shutdown = actix::spawn(served.handle.shutdown());
        let found = got(busy.answer(&pending).await);
        assert!(found[0].1 == octets);
        busy.end().await;
        idle.end().await;
        shutdown.await.unwrap();
        assert_eq!(metrics.rpc.ends.list(), [("shutdown", 2)]);
    }
}

#[actix::test]
async fn limits_of_the_door_hold() {
    let served = serve("loopback", "limits", |config| config.rpc.connections_max = 1).await;
    let first = served.connect().await;
    let refused = Raw::dial(&*served.fabric, &served.address, 4096, false).await.err();
    assert_eq!(refused.as_deref(), Some(&b"too_many_connections"[..]));
    drop(first);
    let limit = Instant::now() + PATIENCE;
    while Raw::dial(&*served.fabric, &served.address, 4096, false).await.is_err() {
        assert!(Instant::now() < limit, "the place of a peer that left stays taken");
    }
    served.until_quiet().await;
    served.shutdown().await;
}

#[actix::test]
async fn a_put_whose_answer_was_lost_is_answered_again_on_the_next_connection() {
    for fabric in FABRICS {
        let served = serve(fabric, "again", |_| {}).await;
        let ask = |octets: &[u8]| {
            let once = put_chunk("k", octets);
            let Request::Put(put) = once.request else { unreachable!() };
            let request = Request::Put(Put { condition: Condition::Absent, ..put });
            Ask { request, ..put_chunk("k", octets) }
        };
        let octets = value(15, 300_000);
        let mut first = served.connect().await;
        let (message, pending) = first.prepare_as(Xid(77), &ask(&octets));
        first.send(&message);
        let version = stored(first.answer(&pending).await);
        drop(first);
        let mut second = served.connect().await;
        let (message, pending) = second.prepare_as(Xid(77), &ask(&octets));
        second.send(&message);
        assert_eq!(stored(second.answer(&pending).await), version);
        assert_eq!(served.handle.metrics().rpc_calls.replayed.get(), 1);
        drop(second);
        served.until_quiet().await;
        served.shutdown().await;
    }
}

#[actix::test]
async fn memory_that_is_not_there_ends_the_connection_and_the_call_is_refused_when_it_comes_again() {
    for fabric in FABRICS {
        let served = serve(fabric, "gone", |_| {}).await;
        let octets = value(16, 100_000);
        let mut first = served.connect().await;
        let (message, pending) = first.prepare_as(Xid(88), &put_chunk("k", &octets));
        for source in &pending.sources {
            source.invalidate();
        }
        first.send(&message);
        first.end().await;
        let mut second = served.connect().await;
        let (message, pending) = second.prepare_as(Xid(88), &put_chunk("k", &octets));
        second.send(&message);
        let again = second.answer(&pending).await;
        assert!(matches!(again, Outcome::Error(RdmaError::Chunk)), "{again:?}");
        stored(second.call(&put_chunk("k", &octets)).await);
        drop(second);
        served.until_quiet().await;
        served.shutdown().await;
    }
}

/// Copies of each octet, besides what kernel and fabric copy, and messages between actors.
#[actix::test]
async fn octets_are_copied_once_and_messages_are_few() {
    let served = serve("loopback", "counted", |_| {}).await;
    let mut peer = served.connect().await;
    let octets = value(17, 1 << 20);
    stored(peer.call(&put_chunk("k", &octets)).await);
    let metrics = served.handle.metrics().clone();
    let copies = || metrics.copied.list().map(|named| (named.name, named.count.get())).collect::<Vec<_>>();
    let before = copies();
    let messages = metrics.connections.messages.get();
    let ask = Ask { writes: vec![vec![1 << 20]], ..get(vec![range("k", 0, 1 << 20)]) };
    assert!(got(peer.call(&ask).await)[0].1 == octets);
    // What follows the Send takes a few more.
    tokio::time::sleep(Duration::from_millis(50)).await;
    let taken = metrics.connections.messages.get() - messages;
    println!("an RPC GET of 1 MiB from RAM: {taken} messages");
    assert!(taken <= 24, "{taken} messages");
    let differing: Vec<_> = copies().into_iter().zip(before).filter(|(after, before)| after != before).collect();
    assert_eq!(differing.len(), 1, "{differing:?}");
    let ((name, after), (_, before)) = differing[0];
    assert_eq!((name, after - before), ("arena_to_slot", 1 << 20));
    // From disk straight into the slots, but for the head.
    served.push_out(&mut peer, "k", 256 << 10).await;
    let before = copies();
    assert!(got(peer.call(&ask).await)[0].1 == octets);
    let differing: Vec<_> = copies().into_iter().zip(before).filter(|(after, before)| after != before).collect();
    let in_ram: u64 = differing.iter().map(|((_, after), (_, before))| after - before).sum();
    assert!(differing.len() <= 1 && in_ram <= 256 << 10, "{differing:?}");
    drop(peer);
    served.until_quiet().await;
    served.shutdown().await;
}

#[actix::test]
async fn the_binary_opens_the_door_and_shows_what_became_of_calls() {
    let daemon = Daemon::builder().flags(&["--rpc", "rpc+iwarp://127.0.0.1:0"]).start();
    let door = daemon.doors().iter().find_map(|door| door.strip_prefix("rpc+iwarp://")).unwrap();
    let address = bulkhead::fabric::Address::Socket(door.parse().unwrap());
    let mut peer = Raw::connect(&bulkhead::fabric::iwarp::Iwarp::default(), &address, 4096).await;
    stored(peer.call(&put_chunk("k", &value(18, 300_000))).await);
    peer.send(&[0; 10]);
    peer.call(&Ask::new(Request::Null)).await.replied();
    let metrics = daemon.admin_get("/metrics");
    for line in [
        "bulkhead_rpc_connection_current 1\n",
        "bulkhead_rpc_calls_total{procedure=\"PUT\"} 1\n",
        "bulkhead_rpc_messages_dropped_total{cause=\"too_short\"} 1\n",
        "bulkhead_copied_bytes_total{where=\"pulled_to_arena\"} 300000\n",
    ] {
        assert!(metrics.contains(line), "{line}{metrics}");
    }
    assert!(daemon.memory_sum().contains(" + rpc "), "{}", daemon.memory_sum());
}
