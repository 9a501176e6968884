//! NFS and MOUNT on the doors of RPC-over-RDMA, as a client of another program's tables makes its calls: our requester, and a
//! peer that lays its chunks by hand, as Linux's client does and otherwise.

use bulkhead::client::rpc::{Answer, Argument, AsyncRpcClient, RawCall, RpcOptions};
use bulkhead::config::Config;
use bulkhead::fabric::iwarp::Iwarp;
use bulkhead::fabric::{Fabric, SharedSpan};
use bulkhead::wire::onc_rpc::{AcceptStatus, OpaqueAuth, Payload, Xid};
use bulkhead::wire::rpcrdma::header::{Placement, RdmaError};
use common::Pattern;
use nfs3_types::mount::mountstat3;
use nfs3_types::nfs3::*;
use rpc::raw::{Ask, Raw, Taken};
use rpc::{FABRICS, Served, cut, put, serve};
use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::Arc;

mod common;
mod nfs;
mod rpc;

const MIB: usize = 1 << 20;
/// Of files, reads and writes: inline and in chunks, of every remainder, up to the most there is.
const LENGTHS: [usize; 12] = [0, 1, 2, 3, 4, 5, 4095, 4096, 4097, 65_535, 262_146, MIB];

fn exporting(config: &mut Config) {
    config.listen.nfs_tcp = vec!["127.0.0.1:0".parse().unwrap()];
}

async fn client(served: &Served, options: RpcOptions) -> AsyncRpcClient {
    let fabric: Arc<dyn Fabric> = match served.fabric.name() {
        "loopback" => Arc::new(bulkhead::actors::fabric_listener::loopback().clone()),
        _ => Arc::new(Iwarp::default()),
    };
    AsyncRpcClient::over(&fabric, served.address.clone(), options).await.unwrap()
}

async fn root(client: &AsyncRpcClient) -> nfs_fh3 {
    nfs::mounted(&client.call(nfs::mnt("/")).await.unwrap()).unwrap()
}

async fn create(client: &AsyncRpcClient, directory: &nfs_fh3, name: &str) -> nfs_fh3 {
    let created: CREATE3res = nfs::results(&client.call(nfs::create(directory, name)).await.unwrap());
    created.unwrap().obj.unwrap()
}

fn data_of(answer: &Answer) -> (Vec<u8>, bool) {
    let read: READ3res<'_> = nfs::results(answer);
    let read = read.unwrap();
    assert_eq!(read.count as usize, read.data.len());
    (read.data.into_owned(), read.eof)
}

#[actix::test]
async fn files_are_made_written_read_and_committed_whatever_is_inline() {
    for fabric in FABRICS {
        for (inline_bytes, segment_bytes_max) in [(1024, 1 << 30), (4096, 9_999), (262_144, 1 << 30)] {
            let served = serve(fabric, "nfs-files", |config| {
                exporting(config);
                config.rpc.inline_bytes = inline_bytes;
            })
            .await;
            let segment_bytes_max = NonZeroU32::new(segment_bytes_max).unwrap();
            let client = client(&served, RpcOptions { inline_bytes, segment_bytes_max, ..RpcOptions::default() }).await;
            client.call(nfs::null()).await.unwrap();
            let root = root(&client).await;
            let info: FSINFO3res = nfs::results(&client.call(nfs::fsinfo(&root)).await.unwrap());
            let info = info.unwrap();
            assert_eq!((info.rtmax as usize, info.wtmax as usize), (MIB, MIB));
            for (number, len) in LENGTHS.into_iter().enumerate() {
                let name = format!("file-{number}");
                let file = create(&client, &root, &name).await;
                let value = Pattern(len as u64).octets(0, len);
                let stable = [stable_how::UNSTABLE, stable_how::DATA_SYNC, stable_how::FILE_SYNC][number % 3];
                let call = nfs::write(&file, 0, stable, Argument::Octets(value.clone()));
                let written: WRITE3res = nfs::results(&client.call(call).await.unwrap());
                let written = written.unwrap();
                assert_eq!((written.count as usize, written.committed), (len, stable));
                for (offset, count) in [(0, len), (len / 2, len), (len.saturating_sub(1), 5), (len + 7, 9)] {
                    let answer = client.call(nfs::read(&file, offset as u64, count as u32)).await.unwrap();
                    let (found, eof) = data_of(&answer);
                    let end = (offset + count).min(len);
                    assert_eq!(found.len(), end.saturating_sub(offset), "{count} at {offset} of {len}");
                    assert_eq!(eof, end == len || offset >= len);
                    Pattern(len as u64).check(offset as u64, &found, "a READ");
                }
                let committed: COMMIT3res = nfs::results(&client.call(nfs::commit(&file, 0, 0)).await.unwrap());
                assert_eq!(committed.unwrap().verf, written.verf);
                assert!(served.by_memcache(&name).await.as_ref() == Some(&value), "{len} octets by another door");
                let attributes: GETATTR3res = nfs::results(&client.call(nfs::getattr(&file)).await.unwrap());
                assert_eq!(attributes.unwrap().obj_attributes.size as usize, len);
                let removed: REMOVE3res = nfs::results(&client.call(nfs::remove(&root, &name)).await.unwrap());
                removed.unwrap();
                let gone: GETATTR3res = nfs::results(&client.call(nfs::getattr(&file)).await.unwrap());
                assert!(matches!(gone, Nfs3Result::Err((nfsstat3::NFS3ERR_STALE, _))), "{gone:?}");
            }
            drop(client);
            served.until_quiet().await;
            served.shutdown().await;
        }
    }
}

/// A call that is asked by hand.
fn ask(call: RawCall) -> Ask<'static> {
    Ask::other(message(call))
}

fn message(call: RawCall) -> Payload {
    call.into_call().0.message
}

fn reading(file: &nfs_fh3, offset: u64, count: u32, writes: Vec<u32>) -> Ask<'static> {
    Ask { writes: vec![writes], ..ask(nfs::read(file, offset, count)) }
}

fn writing(file: &nfs_fh3, offset: u64, stable: stable_how, data: &[u8], cuts: Option<Vec<u32>>) -> Ask<'static> {
    Ask { cuts, ..ask(nfs::write(file, offset, stable, Argument::Octets(data.to_vec()))).with(data) }
}

/// Count and end of a READ whose octets are in a chunk.
fn read_done(taken: &Taken) -> (u32, bool) {
    let octets = &taken.chunks[0];
    let mut stream = taken.stream.clone();
    stream.extend_from_slice(octets);
    stream.resize(stream.len().next_multiple_of(4), 0);
    let read: READ3res<'_> = nfs::results_of(&stream);
    let read = read.unwrap();
    assert_eq!(read.data.len(), octets.len());
    (read.count, read.eof)
}

async fn raw_root(peer: &mut Raw) -> nfs_fh3 {
    let taken = peer.call_other(&ask(nfs::mnt("/"))).await.unwrap();
    let answer = Answer { stream: taken.stream, chunks: vec![] };
    nfs::mounted(&answer).unwrap()
}

async fn raw_create(peer: &mut Raw, root: &nfs_fh3, name: &str) -> nfs_fh3 {
    let taken = peer.call_other(&ask(nfs::create(root, name))).await.unwrap();
    let created: CREATE3res = nfs::results_of(&taken.stream);
    created.unwrap().obj.unwrap()
}

#[actix::test]
async fn chunks_of_any_shape_are_filled_and_emptied() {
    for fabric in FABRICS {
        let served = serve(fabric, "nfs-shapes", exporting).await;
        let mut peer = served.connect().await;
        let root = raw_root(&mut peer).await;
        let file = raw_create(&mut peer, &root, "file").await;
        for len in [1_u32, 2, 3, 4, 4095, 4096, 4097, 100_001, 100_002, 100_003, MIB as u32] {
            let pad = len.next_multiple_of(4) - len;
            let data = Pattern(len.into()).octets(0, len as usize);
            // Exactly the data; with its roundup in the last segment; with that in a segment of its own; in many.
            let shapes = [vec![len], vec![len + pad], vec![len, pad], cut(len, &[4093, 19_001, 40_000])];
            for shape in shapes.into_iter().map(|shape| shape.into_iter().filter(|len| *len > 0).collect::<Vec<_>>()) {
                let ask = writing(&file, 5, stable_how::UNSTABLE, &data, Some(shape.clone()));
                let taken = peer.call_other(&ask).await.unwrap();
                let written: WRITE3res = nfs::results_of(&taken.stream);
                assert_eq!(written.unwrap().count, len);
                let taken = peer.call_other(&reading(&file, 5, len, shape)).await.unwrap();
                assert_eq!(read_done(&taken).0, len);
                assert!(taken.chunks[0] == data, "{len} octets");
                // A page further on, and less than there is room for.
                let (offset, count) = (5 + u64::from(len / 2), len - len / 2);
                let taken = peer.call_other(&reading(&file, offset, count, vec![count + 9])).await.unwrap();
                assert_eq!(read_done(&taken).0, count);
                Pattern(len.into()).check(offset - 5, &taken.chunks[0], "the second half");
            }
        }
        // Nothing leaves a chunk as it was.
        let taken = peer.call_other(&reading(&file, 1 << 30, 4096, vec![4096])).await.unwrap();
        assert_eq!((read_done(&taken), taken.chunks[0].len()), ((0, true), 0));
        // Without a chunk data comes inline, or in the reply chunk.
        let inline = |offset, count, reply| Ask { reply, ..ask(nfs::read(&file, offset, count)) };
        for (count, reply, placement) in
            [(1_001, None, Placement::Inline), (50_001, Some(vec![9_001, 30_000, 30_000]), Placement::Chunk)]
        {
            let taken = peer.call_other(&inline(5, count, reply)).await.unwrap();
            let read: READ3res<'_> = nfs::results_of(&taken.stream);
            Pattern(MIB as u64).check(0, &read.unwrap().data, "octets in the reply");
            assert_eq!(taken.placement, placement);
        }
        // What has no room is refused, and a WRITE behind a call of position zero is understood.
        for ask in [inline(5, 50_001, None), reading(&file, 5, 5_000, vec![4_999])] {
            assert_eq!(peer.call_other(&ask).await.unwrap_err(), RdmaError::Chunk);
        }
        let data = Pattern(3).octets(0, 70_003);
        for cuts in [None, Some(vec![70_003])] {
            let ask = Ask { long: Some(30_000), ..writing(&file, 0, stable_how::FILE_SYNC, &data, cuts) };
            let taken = peer.call_other(&ask).await.unwrap();
            let written: WRITE3res = nfs::results_of(&taken.stream);
            assert_eq!(written.unwrap().count, 70_003);
        }
        assert!(served.by_memcache("file").await.unwrap()[..70_003] == data);
        drop(peer);
        served.until_quiet().await;
        served.shutdown().await;
    }
}

/// Octets in RAM are copied once each way, those on disk not at all.
#[actix::test]
async fn octets_are_copied_as_for_get_and_put() {
    let served = serve("loopback", "nfs-copies", exporting).await;
    let copied = |of: &str| served.handle.metrics().copied.list().find(|named| named.name == of).unwrap().count.get();
    let mut peer = served.connect().await;
    let root = raw_root(&mut peer).await;
    let file = raw_create(&mut peer, &root, "file").await;
    let data = Pattern(1).octets(0, MIB);
    let mib = MIB as u32;
    peer.call_other(&writing(&file, 0, stable_how::FILE_SYNC, &data, Some(vec![mib]))).await.unwrap();
    assert_eq!((copied("pulled_to_arena"), copied("pulled_to_call"), copied("input_to_arena")), (MIB as u64, 0, 0));
    let taken = peer.call_other(&reading(&file, 0, mib, vec![mib])).await.unwrap();
    assert!(taken.chunks[0] == data);
    let all = |ways: [&str; 4]| ways.map(copied);
    let ways = ["arena_to_slot", "staging_to_slot", "slot_to_reply", "reply_to_slot"];
    assert_eq!(all(ways), [MIB as u64, 0, 0, 0]);
    // On disk, but for its head.
    let before = |served: &Served| served.handle.store().peek(b"file", 0).unwrap();
    let in_ram = |served: &Served| {
        before(served)
            .pieces()
            .iter()
            .filter(|piece| piece.segment.is_resident())
            .map(|piece| u64::from(piece.len))
            .sum::<u64>()
    };
    for round in 0..64_u32 {
        if in_ram(&served) <= 256 << 10 {
            break;
        }
        served.handle.local().put(&round.to_le_bytes(), &vec![round as u8; MIB], 0, 0).await.unwrap();
    }
    let resident = in_ram(&served);
    assert!(resident < MIB as u64, "it stays in RAM");
    let taken = peer.call_other(&reading(&file, 0, mib, vec![mib])).await.unwrap();
    assert!(taken.chunks[0] == data);
    let found = all(ways);
    assert!(found[0] <= MIB as u64 + resident && found[1..] == [0, 0, 0], "{found:?}, {resident} in RAM");
    // A draft over what is on disk: both are read.
    let part = Pattern(2).octets(0, 70_000);
    peer.call_other(&writing(&file, 300_001, stable_how::UNSTABLE, &part, Some(vec![70_000]))).await.unwrap();
    let taken = peer.call_other(&reading(&file, 1, mib, vec![mib])).await.unwrap();
    let mut expected = data.clone();
    expected[300_001..370_001].copy_from_slice(&part);
    assert!(taken.chunks[0] == expected[1..], "a draft over a value on disk");
    drop(peer);
    served.until_quiet().await;
    served.shutdown().await;
}

#[actix::test]
async fn directories_come_in_reply_chunks_of_several_segments() {
    for fabric in FABRICS {
        let served = serve(fabric, "nfs-list", exporting).await;
        let mut peer = served.connect().await;
        let root = raw_root(&mut peer).await;
        let mut expected = BTreeMap::new();
        for number in 0..300_u64 {
            let name = format!("entry-{number:04}-{}", "x".repeat(number as usize % 60));
            peer.call(&put(&name, &vec![1; number as usize])).await.replied();
            expected.insert(name.into_bytes(), number);
        }
        let (mut found, mut at, mut calls) = (BTreeMap::new(), (0, cookieverf3::default()), 0);
        loop {
            let call = nfs::readdirplus(&root, at, 20_000, 20_064);
            let ask = Ask { reply: Some(vec![5_001, 2_999, 13_000]), ..ask(call) };
            let taken = peer.call_other(&ask).await.unwrap();
            calls += 1;
            let listed: READDIRPLUS3res<'_> = nfs::results_of(&taken.stream);
            let listed = listed.unwrap();
            assert!(listed.reply.eof || taken.placement == Placement::Chunk && taken.stream.len() > 8_000);
            at.1 = listed.cookieverf;
            for entry in listed.reply.entries.0 {
                at.0 = entry.cookie;
                if ![&b"."[..], b".."].contains(&entry.name.as_ref()) {
                    found.insert(entry.name.as_ref().to_vec(), entry.name_attributes.unwrap().size);
                }
            }
            if listed.reply.eof {
                break;
            }
        }
        assert!(found == expected && calls > 2, "{} entries in {calls} calls", found.len());
        // Inline, and where there is no room.
        let inline = peer.call_other(&ask(nfs::readdirplus(&root, (0, cookieverf3::default()), 1_500, 1_564))).await;
        let inline = inline.unwrap();
        let listed: READDIRPLUS3res<'_> = nfs::results_of(&inline.stream);
        assert!(inline.placement == Placement::Inline && !listed.unwrap().reply.eof);
        let narrow = nfs::readdirplus(&root, (0, cookieverf3::default()), 20_000, 20_064);
        let narrow = Ask { reply: Some(vec![5_000]), ..ask(narrow) };
        assert_eq!(peer.call_other(&narrow).await.unwrap_err(), RdmaError::Chunk);
        drop(peer);
        served.until_quiet().await;
        served.shutdown().await;
    }
}

/// Sends a call with this xid and gives the RPC message of the reply.
async fn say(peer: &mut Raw, xid: u32, call: RawCall) -> Vec<u8> {
    let (message, pending) = peer.prepare_as(Xid(xid), &ask(call));
    peer.send(&message);
    rpc::raw::taken(&peer.answer_to(&pending).await, &pending).unwrap().stream
}

#[actix::test]
async fn what_comes_again_over_a_new_connection_is_answered_as_before() {
    for fabric in FABRICS {
        let served = serve(fabric, "nfs-again", exporting).await;
        let mut first = served.connect().await;
        let root = raw_root(&mut first).await;
        let created = say(&mut first, 7, nfs::create(&root, "file")).await;
        let removed = say(&mut first, 8, nfs::remove(&root, "file")).await;
        let again: REMOVE3res = nfs::results_of(&say(&mut first, 9, nfs::remove(&root, "file")).await);
        assert!(matches!(again, Nfs3Result::Err((nfsstat3::NFS3ERR_NOENT, _))), "{again:?}");
        first.qp.disconnect();
        first.end().await;
        drop(first);
        let mut second = served.connect().await;
        assert_eq!(say(&mut second, 7, nfs::create(&root, "file")).await, created);
        assert_eq!(say(&mut second, 8, nfs::remove(&root, "file")).await, removed);
        assert!(served.by_memcache("file").await.is_none(), "it was not made again");
        assert_eq!(served.handle.metrics().rpc_calls.replayed.get(), 2);
        assert_eq!(served.handle.metrics().rpc_calls.nfs.get("REMOVE"), 3);
        drop(second);
        served.until_quiet().await;
        served.shutdown().await;
    }
}

#[actix::test]
async fn hosts_that_are_not_let_in_and_programs_that_are_not_there_are_told_so() {
    for fabric in FABRICS {
        let closed = serve(fabric, "nfs-closed", |config| {
            exporting(config);
            config.nfs.allow = vec!["192.0.2.0/24".parse().unwrap()];
        })
        .await;
        let open = serve(fabric, "nfs-open", exporting).await;
        let without = serve(fabric, "nfs-without", |_| {}).await;
        let mut peer = open.connect().await;
        let root = raw_root(&mut peer).await;
        let acl = || RawCall::new(100_227, 3, 0, OpaqueAuth::NONE);
        let status = |stream: Vec<u8>| nfs::status(&Answer { stream, chunks: vec![] });
        assert_eq!(status(say(&mut peer, 5, acl()).await), AcceptStatus::ProgUnavail);
        let mut peer = closed.connect().await;
        let refused = Answer { stream: say(&mut peer, 5, nfs::mnt("/")).await, chunks: vec![] };
        assert!(matches!(nfs::mounted(&refused), Err(mountstat3::MNT3ERR_ACCES)));
        let refused: CREATE3res = nfs::results_of(&say(&mut peer, 6, nfs::create(&root, "file")).await);
        assert!(matches!(refused, Nfs3Result::Err((nfsstat3::NFS3ERR_ACCES, _))), "{refused:?}");
        assert_eq!(status(say(&mut peer, 7, nfs::null()).await), AcceptStatus::Success);
        let data = [7; 9_000];
        let refused =
            peer.call_other(&writing(&root, 0, stable_how::UNSTABLE, &data, Some(vec![9_000]))).await.unwrap();
        let refused: WRITE3res = nfs::results_of(&refused.stream);
        assert!(matches!(refused, Nfs3Result::Err((nfsstat3::NFS3ERR_ACCES, _))), "{refused:?}");
        let mut peer = without.connect().await;
        for call in [nfs::null(), nfs::mnt("/"), acl()] {
            assert_eq!(status(say(&mut peer, 5, call).await), AcceptStatus::ProgUnavail);
        }
        for served in [closed, open, without] {
            served.shutdown().await;
        }
    }
}

/// WRITEs and READs of many files and of one at the same time, with a memory that has not room for half of them.
#[actix::test]
async fn many_calls_at_a_time_share_what_there_is() {
    for fabric in FABRICS {
        let served = Arc::new(serve(fabric, "nfs-many", exporting).await);
        let client = client(&served, RpcOptions::default()).await;
        let root = root(&client).await;
        let mut tasks = Vec::new();
        for number in 0..8_u64 {
            let (client, root) = (client.clone(), root.clone());
            tasks.push(actix::spawn(async move {
                let name = format!("file-{number}");
                let file = create(&client, &root, &name).await;
                let value = Pattern(number).octets(0, 3 * MIB);
                // The last part first.
                let mut calls = Vec::new();
                for at in (0..3 * MIB).step_by(MIB / 2).rev() {
                    let part = Argument::Octets(value[at..at + MIB / 2].to_vec());
                    calls.push((
                        at,
                        client.submit(nfs::write(&file, at as u64, stable_how::UNSTABLE, part)).await.unwrap(),
                    ));
                }
                for (at, call) in calls {
                    let written: WRITE3res = nfs::results(&call.wait().await.unwrap());
                    // What was not written is written again.
                    let mut done = match written {
                        Nfs3Result::Ok(written) => written.count as usize,
                        Nfs3Result::Err((nfsstat3::NFS3ERR_JUKEBOX, _)) => 0,
                        other => panic!("{other:?}"),
                    };
                    while done < MIB / 2 {
                        let part = Argument::Octets(value[at + done..at + MIB / 2].to_vec());
                        let call = nfs::write(&file, (at + done) as u64, stable_how::FILE_SYNC, part);
                        if let Nfs3Result::Ok(written) = nfs::results::<WRITE3res>(&client.call(call).await.unwrap()) {
                            done += written.count as usize;
                        }
                    }
                }
                loop {
                    match nfs::results(&client.call(nfs::commit(&file, 0, 0)).await.unwrap()) {
                        COMMIT3res::Ok(_) => break,
                        COMMIT3res::Err((nfsstat3::NFS3ERR_JUKEBOX, _)) => {}
                        other => panic!("{other:?}"),
                    }
                }
                for at in (0..3 * MIB).step_by(MIB) {
                    let into = SharedSpan::new(MIB).unwrap();
                    let call = nfs::read_into(&file, at as u64, MIB as u32, MIB as u32, Some(into));
                    let (found, eof) = data_of(&client.call(call).await.unwrap());
                    assert_eq!((found.len(), eof), (MIB, at == 2 * MIB));
                    Pattern(number).check(at as u64, &found, "among many");
                }
            }));
        }
        for task in tasks {
            task.await.unwrap();
        }
        drop(client);
        served.until_quiet().await;
        Arc::into_inner(served).expect("nobody else has it").shutdown().await;
    }
}
