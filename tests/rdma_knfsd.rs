//! Our requester against a responder that is not ours: NFS version 3 with the server of the Linux kernel, by verbs over rxe
//! and siw, and by our own iWARP against siw. What comes and goes is held against the exported directory, which lies here.
//! tests/rdma-vm/suite runs this; elsewhere it says that it is skipped.
#![cfg(feature = "verbs")]

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt, symlink};
use std::sync::Arc;

use bulkhead::client::rpc::{Answer, Argument, AsyncRpcClient, Reduction, RpcClient, RpcOptions};
use bulkhead::fabric::iwarp::Iwarp;
use bulkhead::fabric::verbs::Verbs;
use bulkhead::fabric::{Address, Cause, Fabric, SharedSpan};
use bulkhead::wire::codec::Writer;
use bulkhead::wire::onc_rpc::{AcceptStatus, CallHeader, OpaqueAuth, Xid};
use bulkhead::wire::rpcrdma::header::{Placement, RdmaError};
use bulkhead::wire::rpcrdma::requester::Failure;
use nfs3_types::nfs3::*;

mod common;
use common::pattern::Pattern;

mod nfs;
use nfs::conversation::{Conversation, TERMS, Terms};
use nfs::{Directory, octets, results};

#[path = "rpc/raw.rs"]
#[allow(dead_code, reason = "a part of it is used")]
mod raw;
use raw::Raw;

mod rdma;
use rdma::{RXE, SIW, assert_back, resources, skipped};

/// Octets of memory that nobody wrote to.
const FRESH: u8 = 0xee;
/// Of files, reads and writes: inline and in chunks, with and without roundup, up to what the server takes at once.
const LENGTHS: [usize; 12] = [0, 1, 2, 3, 4, 5, 4095, 4096, 4097, 65_535, 262_146, 1 << 20];
/// Of a segment at most: one, many that begin anywhere in a page.
const SEGMENTS: [u32; 2] = [1 << 30, 9_999];

/// A way to the server.
struct Way {
    name: &'static str,
    url: String,
    ip: &'static str,
    device: &'static str,
    fabric: Arc<dyn Fabric>,
    /// The server may close regions of ours: we have said so.
    invalidates: bool,
    /// And we hear of it.
    tells: bool,
}

impl Way {
    fn conversation(&self, terms: Terms) -> Conversation {
        Conversation::with(&*self.fabric, self.ip, terms)
    }
}

/// All ways; none, and the reason said, where there are none.
fn ways() -> Vec<Way> {
    if rdma::beds().is_empty() {
        return Vec::new();
    }
    if !nfs::is_served() {
        skipped("it needs the kernel's NFS server; tests/rdma-vm/run --nfs starts it");
        return Vec::new();
    }
    let way = |name, scheme, bed: rdma::Bed, fabric, (invalidates, tells)| Way {
        name,
        url: format!("{scheme}://{}", bed.v4),
        ip: bed.v4,
        device: bed.device,
        fabric,
        invalidates,
        tells,
    };
    vec![
        // A Receive on rxe does not say that a key was invalidated (docs/decisions/0007-verbs.md).
        way("verbs over rxe", "rpc+verbs", RXE, Arc::new(Verbs) as Arc<dyn Fabric>, (true, false)),
        // It has no memory windows, so we do not offer that.
        way("verbs over siw", "rpc+verbs", SIW, Arc::new(Verbs), (false, false)),
        way("our iWARP", "rpc+iwarp", SIW, Arc::new(Iwarp::default()), (true, true)),
    ]
}

/// Runs `test` over each way, with a directory for it. Afterwards the kernel has as much as before.
fn over_each_way(mut test: impl FnMut(&Way, &Directory)) {
    for way in ways() {
        eprintln!("{}", way.name);
        let before = resources(way.device);
        let mut first = way.conversation(TERMS);
        let directory = Directory::new(|call| first.answer(call));
        drop(first);
        test(&way, &directory);
        drop(directory);
        assert_back(way.device, &before);
    }
}

/// The handle of a file with these octets.
fn file(peer: &mut Conversation, directory: &Directory, name: &str, octets: &[u8]) -> nfs_fh3 {
    directory.file(name, octets, |call| peer.answer(call))
}

fn data_of(answer: &Answer) -> Vec<u8> {
    let read: READ3res<'_> = results(answer);
    let read = read.unwrap();
    assert_eq!(read.count as usize, read.data.len());
    read.data.into_owned()
}

/// A span in the middle of memory that is [`FRESH`].
fn landing(len: usize) -> (SharedSpan, SharedSpan) {
    let whole = SharedSpan::new(len + 128).unwrap();
    whole.copy_in(0, &vec![FRESH; len + 128]);
    let part = whole.slice(64..64 + len);
    (whole, part)
}

/// Nobody wrote beside `len` octets in the middle.
fn assert_beside(whole: &SharedSpan, len: usize) {
    let all = octets(whole, whole.len() as u64);
    assert!(all[..64].iter().chain(&all[64 + len..]).all(|octet| *octet == FRESH), "written beside the result");
}

/// The client as programs use it.
#[test]
fn a_client_calls_every_procedure() {
    over_each_way(|way, directory| {
        let mut client = RpcClient::connect(way.url.parse().unwrap(), RpcOptions::default()).unwrap();
        client.call(nfs::null()).unwrap();
        let value = Pattern(1).octets(0, 100_001);
        let created: CREATE3res = results(&client.call(nfs::create(&directory.handle, "a")).unwrap());
        let handle = created.unwrap().obj.unwrap();
        let span = SharedSpan::new(value.len()).unwrap();
        span.copy_in(0, &value);
        let call = nfs::write(&handle, 0, stable_how::UNSTABLE, Argument::Span(span));
        let written: WRITE3res = results(&client.call(call).unwrap());
        let written = written.unwrap();
        let committed: COMMIT3res = results(&client.call(nfs::commit(&handle, 0, 0)).unwrap());
        assert_eq!(committed.unwrap().verf, written.verf);
        assert!(fs::read(directory.path.join("a")).unwrap() == value);
        let found: LOOKUP3res = results(&client.call(nfs::lookup(&directory.handle, "a")).unwrap());
        assert_eq!(found.unwrap().object, handle);
        let missed: LOOKUP3res = results(&client.call(nfs::lookup(&directory.handle, "b")).unwrap());
        assert!(matches!(missed, Nfs3Result::Err((nfsstat3::NFS3ERR_NOENT, _))));
        let attributes: GETATTR3res = results(&client.call(nfs::getattr(&handle)).unwrap());
        let (attributes, local) = (attributes.unwrap().obj_attributes, fs::metadata(directory.path.join("a")).unwrap());
        assert_eq!((attributes.size, attributes.fileid), (local.len(), local.ino()));
        assert!(data_of(&client.call(nfs::read(&handle, 0, 100_001)).unwrap()) == value);
        let removed: REMOVE3res = results(&client.call(nfs::remove(&directory.handle, "a")).unwrap());
        removed.unwrap();
        assert!(!directory.path.join("a").exists());
        drop(client);

        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        fs::write(directory.path.join("c"), &value).unwrap();
        runtime.block_on(async {
            let client = AsyncRpcClient::connect(way.url.parse().unwrap(), RpcOptions::default()).await.unwrap();
            let found: LOOKUP3res = results(&client.call(nfs::lookup(&directory.handle, "c")).await.unwrap());
            let handle = found.unwrap().object;
            let read = |offset| client.call(nfs::read(&handle, offset, 50_000));
            let (one, other) = tokio::join!(read(0), read(50_000));
            assert!([data_of(&one.unwrap()), data_of(&other.unwrap())].concat() == value[..100_000]);
        });
    });
}

#[test]
fn what_is_read_is_what_the_file_has() {
    over_each_way(|way, directory| {
        for segment_bytes_max in SEGMENTS {
            let mut peer = way.conversation(Terms { segment_bytes_max, ..TERMS });
            for len in LENGTHS {
                let value = Pattern(len as u64).octets(0, len);
                let handle = file(&mut peer, directory, "r", &value);
                for reduction in [Reduction::Fit, Reduction::Always, Reduction::Never] {
                    let (whole, into) = landing(len.max(8));
                    let into = (len > 0).then_some(into);
                    let mut call = nfs::read_into(&handle, 0, len as u32, len as u32, into);
                    call.reduce(Reduction::Fit, reduction);
                    let answer = peer.answer(call);
                    assert!(data_of(&answer) == value, "{len} octets, {reduction:?}");
                    // Where it came: in segments of the length that was asked for, or behind the header, or all of it in
                    // the reply chunk.
                    let sent = peer.last_sent().clone();
                    let is_chunk = match reduction {
                        Reduction::Fit => len > 4000,
                        Reduction::Always => len > 0,
                        Reduction::Never => false,
                    };
                    let segments = sent.lists.writes.first().map_or(0, Vec::len);
                    assert_eq!(segments, if is_chunk { len.div_ceil(segment_bytes_max as usize) } else { 0 });
                    assert_eq!(sent.lists.reply.is_some(), reduction == Reduction::Never && len > 4000);
                    assert_beside(&whole, if is_chunk { len } else { 0 });
                    if is_chunk {
                        assert_eq!(answer.chunks[0].1, len as u64);
                    }
                }
            }
        }
    });
}

/// Parts that begin anywhere in a page, the last of which has less than was asked for: the file ends.
#[test]
fn parts_are_read_from_any_offset() {
    over_each_way(|way, directory| {
        let mut peer = way.conversation(TERMS);
        let value = Pattern(77).octets(0, 40_000);
        let handle = file(&mut peer, directory, "p", &value);
        for (offset, count) in [(1, 4096), (4095, 8193), (12_345, 20_001), (39_999, 9000), (40_000, 5000)] {
            let (whole, into) = landing(count);
            let mut call = nfs::read_into(&handle, offset as u64, count as u32, count as u32, Some(into));
            call.reduce(Reduction::Fit, Reduction::Always);
            let answer = peer.answer(call);
            let expected = &value[offset..value.len().min(offset + count)];
            assert!(data_of(&answer) == expected, "{count} octets from {offset} on");
            assert_eq!(answer.chunks[0].1, expected.len() as u64);
            assert_beside(&whole, expected.len());
        }
        // What fails has no data, and its chunk comes back unused.
        let mut call = nfs::read(&directory.handle, 0, 9000);
        call.reduce(Reduction::Fit, Reduction::Always);
        let answer = peer.answer(call);
        let failed: READ3res<'_> = results(&answer);
        assert!(
            matches!(failed, Nfs3Result::Err((nfsstat3::NFS3ERR_ISDIR | nfsstat3::NFS3ERR_INVAL, _))),
            "{failed:?}"
        );
        assert!(answer.chunks.iter().all(|(_, len)| *len == 0));
    });
}

#[test]
fn what_is_written_is_in_the_file() {
    over_each_way(|way, directory| {
        for segment_bytes_max in SEGMENTS {
            let mut peer = way.conversation(Terms { segment_bytes_max, ..TERMS });
            let handle = file(&mut peer, directory, "w", &[]);
            let local = fs::File::open(directory.path.join("w")).unwrap();
            for (index, len) in LENGTHS.into_iter().enumerate() {
                for reduction in [Reduction::Fit, Reduction::Always, Reduction::Never] {
                    let value = Pattern((len * 3) as u64 + reduction as u64).octets(0, len);
                    let offset = index as u64 * 3;
                    let mut call = nfs::write(&handle, offset, stable_how::FILE_SYNC, Argument::Octets(value.clone()));
                    call.reduce(reduction, Reduction::Fit);
                    let written: WRITE3res = results(&peer.answer(call));
                    let written = written.unwrap();
                    assert_eq!((written.count as usize, written.committed), (len, stable_how::FILE_SYNC));
                    let mut found = vec![0; len];
                    local.read_exact_at(&mut found, offset).unwrap();
                    assert!(found == value, "{len} octets, {reduction:?}");
                    let sent = peer.last_sent();
                    let octets: u64 = sent.lists.reads.iter().map(|segment| u64::from(segment.target.length)).sum();
                    let is_large = len > 3900;
                    match reduction {
                        // At the place of the data, without roundup.
                        Reduction::Always | Reduction::Fit
                            if len > 0 && (is_large || reduction == Reduction::Always) =>
                        {
                            assert_eq!((sent.placement, octets), (Placement::Inline, len as u64));
                            assert!(sent.lists.reads.iter().all(|segment| segment.position > 0));
                            assert_eq!(sent.lists.reads.len(), len.div_ceil(segment_bytes_max as usize));
                        }
                        // A call that is long: all of it, roundup included.
                        Reduction::Never if is_large => {
                            assert_eq!(sent.placement, Placement::Chunk);
                            assert!(sent.lists.reads.iter().all(|segment| segment.position == 0));
                            assert!(octets.is_multiple_of(4) && octets > len as u64);
                        }
                        _ => assert_eq!((sent.placement, octets), (Placement::Inline, 0)),
                    }
                }
            }
            let committed: COMMIT3res = results(&peer.answer(nfs::commit(&handle, 0, 0)));
            committed.unwrap();
        }
    });
}

#[test]
fn long_calls_are_understood() {
    over_each_way(|way, directory| {
        let mut peer = way.conversation(Terms { inline_bytes: 1024, segment_bytes_max: 100, ..TERMS });
        let link = |name: &str, len: usize, reduction| {
            let path: Vec<u8> = (0..len).map(|at| b'a' + (at * 7 % 26) as u8).collect();
            let mut call = nfs::symlink(&directory.handle, name, &path);
            call.reduce(reduction, Reduction::Fit);
            (path, call)
        };
        // A call of the threshold goes inline; with one word more it goes in a chunk of many segments.
        let mut placements = Vec::new();
        for len in (700..1020).step_by(4).chain([1019, 1021]) {
            let name = format!("s{len}");
            let (path, call) = link(&name, len, Reduction::Never);
            let made: SYMLINK3res = results(&peer.answer(call));
            let handle = made.unwrap().obj.unwrap();
            assert_eq!(fs::read_link(directory.path.join(&name)).unwrap().as_os_str().as_encoded_bytes(), path);
            placements.push(peer.last_sent().placement);
            let mut call = nfs::readlink(&handle, 1024);
            call.reduce(Reduction::Fit, Reduction::Never);
            let answer = peer.answer(call);
            let read: READLINK3res<'_> = results(&answer);
            assert_eq!(read.unwrap().data.as_ref(), path);
        }
        assert_eq!((placements[0], placements[placements.len() - 1]), (Placement::Inline, Placement::Chunk));
        let changes = placements.windows(2).filter(|pair| pair[0] != pair[1]).count();
        assert_eq!(changes, 1, "{placements:?}");
    });
}

/// A stream that does not fit with its item in a chunk already: a chunk at position zero and another behind it. Linux 6.1
/// takes as many items of the read list as there are segments of each kind, wherever those are, and loses the last of them:
/// the call ends too early for its arguments, and that is what it says.
#[test]
fn a_long_call_with_another_read_chunk_is_more_than_the_server_reads() {
    over_each_way(|way, directory| {
        let mut peer = way.conversation(Terms { inline_bytes: 1024, segment_bytes_max: 38, ..TERMS });
        let name = "n".repeat(255);
        let mut call = nfs::symlink(&directory.handle, &name, "p".repeat(1000).as_bytes());
        call.reduce(Reduction::Always, Reduction::Fit);
        let answer = peer.answer(call);
        assert_eq!(nfs::status(&answer), AcceptStatus::GarbageArgs);
        let sent = peer.last_sent();
        let (stream, path): (Vec<_>, Vec<_>) = sent.lists.reads.iter().copied().partition(|read| read.position == 0);
        assert_eq!((sent.placement, stream.len(), path.len()), (Placement::Chunk, 10, 27));
        let lens: u32 = path.iter().map(|read| read.target.length).sum();
        let streamed: u32 = stream.iter().map(|read| read.target.length).sum();
        assert_eq!((lens, path[0].position), (1000, streamed));
        assert_eq!(fs::read_dir(&directory.path).unwrap().count(), 0);
        peer.answer(nfs::null());
        assert_eq!(peer.ends, []);
    });
}

/// All entries of a directory, with their attributes, by calls whose results have at most `bytes` octets. Also how many
/// calls that took.
fn list(peer: &mut Conversation, directory: &Directory, bytes: u32) -> (BTreeMap<Vec<u8>, (u64, u64)>, usize) {
    let (mut entries, mut calls, mut at) = (BTreeMap::new(), 0, (0, cookieverf3::default()));
    loop {
        let answer = peer.answer(nfs::readdirplus(&directory.handle, at, bytes, u64::from(bytes) + 64));
        let listed: READDIRPLUS3res<'_> = results(&answer);
        let listed = listed.unwrap();
        calls += 1;
        at.1 = listed.cookieverf;
        for entry in listed.reply.entries.0 {
            let attributes = entry.name_attributes.unwrap();
            assert_eq!(attributes.fileid, entry.fileid);
            at.0 = entry.cookie;
            if ![&b"."[..], b".."].contains(&entry.name.as_ref()) {
                entries.insert(entry.name.as_ref().to_vec(), (entry.fileid, attributes.size));
            }
        }
        if listed.reply.eof {
            return (entries, calls);
        }
    }
}

#[test]
fn directories_come_in_reply_chunks_and_inline() {
    over_each_way(|way, directory| {
        let mut expected = BTreeMap::new();
        let mut make = |count: usize| {
            for at in expected.len()..count {
                let name = format!("entry-{at}-{}", "x".repeat(at % 60));
                let path = directory.path.join(&name);
                fs::write(&path, vec![1; at]).unwrap();
                expected.insert(name.into_bytes(), (fs::metadata(&path).unwrap().ino(), at as u64));
            }
            expected.clone()
        };
        let few = make(3);
        for segment_bytes_max in [1 << 30, 1000] {
            let mut peer = way.conversation(Terms { segment_bytes_max, ..TERMS });
            assert_eq!(list(&mut peer, directory, 2048), (few.clone(), 1));
            assert!(peer.last_sent().lists.reply.is_none());
            assert_eq!(peer.last_heard().said.as_ref().unwrap().placement, Placement::Inline);
        }
        let many = make(500);
        for segment_bytes_max in [1 << 30, 1000] {
            let mut peer = way.conversation(Terms { segment_bytes_max, ..TERMS });
            for bytes in [4096, 9_001, 32_768, 131_072] {
                let (found, calls) = list(&mut peer, directory, bytes);
                assert!(found == many, "{} entries of {}", found.len(), many.len());
                assert!(calls > 1 || bytes == 131_072, "{calls} calls of {bytes} octets");
                assert!(peer.last_sent().lists.reply.is_some());
                assert_eq!(peer.last_heard().said.as_ref().unwrap().placement, Placement::Chunk);
            }
        }
    });
}

#[test]
fn credits_grow_to_what_the_server_grants() {
    over_each_way(|way, directory| {
        for (credits, window) in [(1, 1), (32, 32), (200, 64)] {
            let mut peer = way.conversation(Terms { credits, ..TERMS });
            // Many are waiting from the beginning, and one goes out.
            let xids: Vec<_> = (0..300).map(|_| peer.submit(nfs::getattr(&directory.handle))).collect();
            peer.until(|_| "nothing was sent".to_owned(), |peer| !peer.sent.is_empty());
            assert_eq!((peer.in_flight_max, peer.port.requester().credits().window().get()), (1, 1));
            for xid in xids {
                let found: GETATTR3res = results(&peer.wait(xid).unwrap());
                found.unwrap();
            }
            assert!(peer.heard.iter().all(|heard| heard.credit == 64), "{:?}", peer.heard[0].credit);
            assert_eq!((peer.in_flight_max, peer.port.requester().credits().window().get()), (window, window));
            assert_eq!(peer.sent.len(), 300, "none went out twice");
        }
    });
}

/// Sixty-four calls with chunks in flight, both ways at the same time.
#[test]
fn chunks_of_many_calls_do_not_get_mixed_up() {
    over_each_way(|way, directory| {
        let mut peer = way.conversation(Terms { credits: 64, segment_bytes_max: 9_999, ..TERMS });
        let value = Pattern(5).octets(0, 3_000_000);
        let (from, to) = (file(&mut peer, directory, "from", &value), file(&mut peer, directory, "to", &[]));
        let mut under_way = Vec::new();
        for at in 0..100 {
            let (offset, len) = (at * 30_000, 30_000 - at % 7);
            let read = peer.submit(nfs::read(&from, offset as u64, len as u32));
            let part = value[offset..offset + 30_000].to_vec();
            let write = peer.submit(nfs::write(&to, offset as u64, stable_how::UNSTABLE, Argument::Octets(part)));
            under_way.push((offset, len, read, write));
        }
        for (offset, len, read, write) in under_way {
            assert!(data_of(&peer.wait(read).unwrap()) == value[offset..offset + len], "{len} octets from {offset} on");
            let written: WRITE3res = results(&peer.wait(write).unwrap());
            assert_eq!(written.unwrap().count, 30_000);
        }
        assert!(fs::read(directory.path.join("to")).unwrap() == value);
        assert!(peer.in_flight_max > 32, "{}", peer.in_flight_max);
    });
}

/// The server closes a region where we permit it, by the reply and although it never permits that itself: its R bit is
/// clear. Only where all segments of a call have one handle, and never that of another call.
#[test]
fn replies_close_our_handles_where_our_private_data_allows_it() {
    over_each_way(|way, directory| {
        nfs::trace_invalidations();
        let mut peer = way.conversation(Terms { segment_bytes_max: 2000, ..TERMS });
        let value = Pattern(3).octets(0, 9001);
        let handle = file(&mut peer, directory, "i", &value);
        let server = peer.server.expect("the server tells of itself");
        assert!(!server.remote_invalidate, "{server:?}");
        assert_eq!((server.send_bytes, server.receive_bytes), (4096, 4096));
        assert!(peer.heard.iter().all(|heard| heard.invalidated.is_none()), "a call without chunks");

        let write = || nfs::write(&handle, 0, stable_how::UNSTABLE, Argument::Octets(value.clone()));
        let mut long = write();
        long.reduce(Reduction::Never, Reduction::Fit);
        for call in [nfs::read(&handle, 0, 9001), write(), long] {
            let (opened, closed) = (peer.opened, peer.closed);
            let answer = peer.answer(call);
            let (sent, heard) = (peer.last_sent(), peer.last_heard());
            let target = sent.lists.reads.first().map(|read| read.target).or_else(|| Some(sent.lists.writes[0][0]));
            let expected = target.map(|target| target.handle).filter(|_| way.tells);
            assert_eq!(nfs::was_invalidated(target.unwrap().handle), way.invalidates, "by the server's own account");
            assert_eq!((heard.invalidated, peer.opened - opened), (expected, 1));
            assert_eq!(peer.closed - closed, usize::from(!way.tells), "what is closed is not closed again");
            assert!(answer.chunks.is_empty() || data_of(&answer) == value);
        }
        // Two regions, two handles: neither is closed for us.
        let mut call = write();
        call.reduce(Reduction::Never, Reduction::Fit);
        call.reply_bytes_max(5000);
        let closed = peer.closed;
        let written: WRITE3res = results(&peer.answer(call));
        written.unwrap();
        assert_eq!((peer.last_heard().invalidated, peer.closed - closed), (None, 2));
        assert_eq!(peer.port.requester().region_count(), 0);
        assert_eq!(peer.ends, []);
    });
}

/// A reply in a reply chunk, its data in a write chunk: the octets are where they belong, but Linux 6.1 counts those of the
/// write chunk among those of the reply chunk (RFC 8166 §4.3.3 has what was written there). Who takes the results for the
/// whole of what was counted finds memory behind them that nobody wrote to.
#[test]
fn a_reply_chunk_beside_a_write_chunk_is_counted_too_long() {
    over_each_way(|way, directory| {
        let mut peer = way.conversation(TERMS);
        let value = Pattern(8).octets(0, 5001);
        let handle = file(&mut peer, directory, "both", &value);
        let (whole, into) = landing(5001);
        let mut call = nfs::read_into(&handle, 0, 5001, 5001, Some(into.clone()));
        call.reply_bytes_max(9000);
        let Answer { stream, chunks } = peer.answer(call);
        let heard = peer.last_heard().said.as_ref().unwrap();
        assert_eq!((heard.placement, heard.lists.writes.len()), (Placement::Chunk, 1));
        assert!(octets(&into, 5001) == value && chunks[0].1 == 5001);
        assert_beside(&whole, 5001);
        let (results, behind) = stream.split_at(stream.len() - 5004);
        assert!(behind.iter().all(|octet| *octet == 0));
        let answer = Answer { stream: results.to_vec(), chunks };
        assert!(data_of(&answer) == value);
    });
}

/// What the server can make nothing of ends that call, and no other.
#[test]
fn errors_of_chunks_end_their_call_alone() {
    over_each_way(|way, directory| {
        for (index, entry) in ["a", "b", "c"].iter().enumerate() {
            fs::write(directory.path.join(format!("{}-{index}", entry.repeat(200))), []).unwrap();
        }
        symlink("p".repeat(1000), directory.path.join("link")).unwrap();
        let mut peer = way.conversation(Terms { inline_bytes: 1024, ..TERMS });
        let value = Pattern(4).octets(0, 9000);
        let handle = file(&mut peer, directory, "e", &value);
        let found: LOOKUP3res = results(&peer.answer(nfs::lookup(&directory.handle, "link")));
        let link = found.unwrap().object;
        for round in 0..3 {
            // A write chunk of less than the data, by one octet and by much; reply chunks of less than the reply.
            let mut read = nfs::read_into(&handle, 0, 9000, 1500, None);
            read.reduce(Reduction::Fit, Reduction::Never);
            let too_small = [
                nfs::read_into(&handle, 0, 9000, 8999, None),
                nfs::read_into(&handle, 0, 9000, 1000, None),
                nfs::readdirplus(&directory.handle, (0, cookieverf3::default()), 4096, 700),
                read,
            ];
            for (index, call) in too_small.into_iter().enumerate() {
                // With others in flight.
                let good = [0, 1].map(|_| peer.submit(nfs::read(&handle, 0, 9000)));
                let bad = peer.submit(call);
                let more = peer.submit(nfs::read(&handle, 0, 9000));
                let outcome = peer.wait(bad);
                assert_eq!(outcome.unwrap_err(), Failure::Rdma(RdmaError::Chunk), "call {index}, round {round}");
                for xid in good.into_iter().chain([more]) {
                    assert!(data_of(&peer.wait(xid).unwrap()) == value);
                }
            }
            // Where all of it would go inline, Linux says SYSTEM_ERR instead, and sends the data behind that.
            let mut call = nfs::read_into(&handle, 0, 600, 500, None);
            call.reduce(Reduction::Fit, Reduction::Always);
            let answer = peer.answer(call);
            assert_eq!((nfs::status(&answer), answer.chunks[0].1), (AcceptStatus::SystemErr, 0));
            let mut call = nfs::readlink(&link, 1000);
            call.reduce(Reduction::Fit, Reduction::Never);
            let read: READLINK3res<'_> = results(&peer.answer(call));
            assert_eq!(read.unwrap().data.as_ref(), "p".repeat(1000).as_bytes());
        }
        let errors = peer.heard.iter().filter(|heard| heard.said == Err(RdmaError::Chunk));
        assert!(errors.clone().all(|heard| (heard.credit, heard.invalidated) == (64, None)));
        assert_eq!(errors.count(), 12);
        assert_eq!(peer.ends, [], "the connection lives");
        assert_eq!(peer.port.requester().region_count(), 0);
    });
}

/// A header of these words behind its xid.
fn header(xid: u32, words: &[u32]) -> Vec<u8> {
    [xid].iter().chain(words).flat_map(|word| word.to_be_bytes()).collect()
}

/// A NULL call whose header has this version, procedure and read list.
fn null(xid: u32, version: u32, procedure: u32, reads: &[u32]) -> Vec<u8> {
    let mut message = header(xid, &[version, 32, procedure]);
    message.extend(reads.iter().chain(&[0, 0, 0]).flat_map(|word| word.to_be_bytes()));
    let mut call = Writer::new();
    let (credential, verifier) = (OpaqueAuth::NONE, OpaqueAuth::NONE);
    CallHeader { xid: Xid(xid), program: PROGRAM, version: VERSION, procedure: 0, credential, verifier }
        .write(&mut call);
    message.extend(call.finish());
    message
}

/// Headers that no requester of ours makes: each is answered for itself, and the connection lives. A read chunk whose key
/// opens nothing is the end of the connection, and of that one alone.
#[test]
fn errors_of_headers_are_answered_and_the_next_call_is_too() {
    const ERROR: u32 = 4;
    for way in ways() {
        let before = resources(way.device);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let address = Address::Socket((way.ip.parse::<std::net::IpAddr>().unwrap(), nfs::RDMA_PORT).into());
            let mut peer = Raw::connect(&*way.fabric, &address, 4096).await;
            let segment = [1, 3, 0x1234_5678, 8, 0, 4096];
            let not_at_a_word = null(4, 1, 0, &segment);
            for (what, message, answer) in [
                ("version 2", null(1, 2, 0, &[]), header(1, &[2, 64, ERROR, 1, 1, 1])),
                ("RDMA_MSGP", null(2, 1, 2, &[]), header(2, &[1, 64, ERROR, 2])),
                ("procedure 9", null(3, 1, 9, &[]), header(3, &[1, 64, ERROR, 2])),
                ("a position that is none", not_at_a_word, header(4, &[1, 64, ERROR, 2])),
                ("RDMA_DONE, of which nobody speaks", null(5, 1, 3, &[]), Vec::new()),
                ("RDMA_ERROR, likewise", header(6, &[1, 32, ERROR, 2]), Vec::new()),
            ] {
                peer.send(&message);
                if !answer.is_empty() {
                    assert_eq!(peer.receive().await, answer, "{}: {what}", way.name);
                }
                peer.send(&null(100, 1, 0, &[]));
                let reply = peer.receive().await;
                assert_eq!((&reply[..4], reply.len()), (&[0, 0, 0, 100][..], 28 + 24), "{}: behind {what}", way.name);
            }
            peer.send(&null(7, 1, 0, &[1, 40, 0x1234_5678, 8, 0, 4096]));
            peer.end().await;
            let mut peer = Raw::connect(&*way.fabric, &address, 4096).await;
            peer.send(&null(8, 1, 0, &[]));
            assert_eq!(peer.receive().await.len(), 28 + 24, "{}", way.name);
        });
        assert_back(way.device, &before);
    }
}

/// Every kind of message, over siw alone and short enough that each frame has a TCP segment: the suite records it, and tshark
/// must make sense of all of it.
#[test]
fn a_conversation_for_the_record() {
    for way in ways().into_iter().filter(|way| way.device == SIW.device) {
        let mut peer = way.conversation(TERMS);
        let directory = Directory::new(|call| peer.answer(call));
        for at in 0..20 {
            fs::write(directory.path.join(format!("entry-{at}")), []).unwrap();
        }
        peer.answer(nfs::null());
        let made: CREATE3res = results(&peer.answer(nfs::create(&directory.handle, "a")));
        let handle = made.unwrap().obj.unwrap();
        let value = Pattern(2).octets(0, 1000);
        for reduction in [Reduction::Fit, Reduction::Always] {
            let mut write = nfs::write(&handle, 0, stable_how::UNSTABLE, Argument::Octets(value.clone()));
            write.reduce(reduction, Reduction::Fit);
            let written: WRITE3res = results(&peer.answer(write));
            assert_eq!(written.unwrap().count, 1000);
            let mut read = nfs::read(&handle, 0, 1000);
            read.reduce(Reduction::Fit, reduction);
            assert!(data_of(&peer.answer(read)) == value);
        }
        let committed: COMMIT3res = results(&peer.answer(nfs::commit(&handle, 0, 0)));
        committed.unwrap();
        let attributes: GETATTR3res = results(&peer.answer(nfs::getattr(&handle)));
        assert_eq!(attributes.unwrap().obj_attributes.size, 1000);
        assert_eq!(list(&mut peer, &directory, 1024).0.len(), 21);
        assert_eq!(list(&mut peer, &directory, 8192), (list(&mut peer, &directory, 4096).0, 1));
        // A call in a chunk, of both lengths of thresholds.
        let mut small = way.conversation(Terms { inline_bytes: 1024, segment_bytes_max: 500, ..TERMS });
        let mut write = nfs::write(&handle, 1000, stable_how::FILE_SYNC, Argument::Octets(value.clone()));
        write.reduce(Reduction::Never, Reduction::Fit);
        let written: WRITE3res = results(&small.answer(write));
        assert_eq!((written.unwrap().count, small.last_sent().placement), (1000, Placement::Chunk));
        let refused = small.call(nfs::readdirplus(&directory.handle, (0, cookieverf3::default()), 4096, 700));
        assert_eq!(refused.unwrap_err(), Failure::Rdma(RdmaError::Chunk));
    }
}

/// Connections end with calls in flight: they are made again with the same xid, on a connection that begins with one credit.
/// They are fewer than the server has threads: each thread waits for its transfer, and another must hear of the end. Over rxe
/// alone: of transfers that a connection leaves behind, siw does not always say that they are over, and a thread of the server
/// waits for ever.
#[test]
fn calls_survive_their_connections() {
    over_each_way(|way, directory| {
        if way.device != RXE.device {
            return;
        }
        let mut peer = way.conversation(TERMS);
        let value = Pattern(6).octets(0, 3 * 349_525);
        let (from, to) = (file(&mut peer, directory, "from", &value), file(&mut peer, directory, "to", &[]));
        let mut again = 0;
        for round in 0..6 {
            let (sent, heard) = (peer.sent.len(), peer.heard.len());
            let calls: Vec<_> = (0..3)
                .map(|at| {
                    let (offset, part) = (at * 349_525, value[at * 349_525..(at + 1) * 349_525].to_vec());
                    let write = nfs::write(&to, offset as u64, stable_how::UNSTABLE, Argument::Octets(part));
                    let read = nfs::read(&from, offset as u64, 349_525);
                    (offset, peer.submit(read), peer.submit(write))
                })
                .collect();
            // At the latest when all are sent, and nobody has looked at a reply; or behind a reply or two.
            let enough = |peer: &Conversation| peer.sent.len() == sent + 6 && peer.heard.len() >= heard + round % 3;
            peer.until(|_| "not all are sent".to_owned(), enough);
            let left = 6 - (peer.heard.len() - heard);
            peer.disconnect();
            assert_eq!(peer.port.requester().credits().window().get(), 1);
            for (offset, read, write) in calls {
                assert!(data_of(&peer.wait(read).unwrap()) == value[offset..offset + 349_525]);
                let written: WRITE3res = results(&peer.wait(write).unwrap());
                assert_eq!(written.unwrap().count, 349_525);
            }
            // Of those left, some may have been answered while the connection ended.
            let sent_again = peer.sent.len() - sent - 6;
            assert!(sent_again <= left, "{sent_again} of {left}");
            again += sent_again;
            let xids: std::collections::BTreeSet<u32> = peer.sent[sent..].iter().map(|call| call.xid.0).collect();
            assert_eq!(xids.len(), 6, "with the xid that they had");
        }
        assert!(again > 0, "all were answered before");
        assert!(fs::read(directory.path.join("to")).unwrap() == value);
        assert_eq!(peer.ends, vec![Cause::Local; 6]);
    });
}
