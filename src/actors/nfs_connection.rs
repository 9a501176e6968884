//! A peer that mounts over TCP: a [`Connection`] around the session of NFS and MOUNT.

use crate::actors::connection::{Admission, Connection, Lane, Socket};
use crate::actors::exported::Exported;
use crate::programs::nfs::session::{Context, Session};
use crate::programs::service::Shared;
use actix::prelude::*;
use std::net::IpAddr;
use std::sync::Arc;

/// What its connections have in common.
#[derive(Clone)]
pub struct NfsDoor {
    pub exported: Exported,
    /// Calls remembered, together with those of RPC doors.
    pub shared: Arc<Shared>,
}

/// Starts the actor of a peer at `address` on the lane of this thread.
pub fn start_on_lane(
    socket: Socket,
    address: IpAddr,
    door: &NfsDoor,
    lane: Lane,
    admission: Admission,
) -> Addr<Connection<Session>> {
    let session = Session::new(Context {
        export: door.exported.export.clone(),
        // As calls are known by when they come again, through whichever socket.
        client: door.exported.client(address.to_canonical()),
        shared: door.shared.clone(),
        metrics: lane.session.metrics.clone(),
        calls_max: lane.session.pins_max,
        reserve_wait_ms: lane.session.reserve_wait_ms,
    });
    // A draft claims what it needs by itself, so nobody takes a claim back from the session.
    Connection::start_with(socket, lane, admission, Some(|metrics| &metrics.nfs), |_| session)
}

#[cfg(test)]
mod tests {
    use crate::actors::rig::{octets, rest, soon, until};
    use crate::actors::{Handle, start};
    use crate::config::Config;
    use crate::programs::nfs::{self, FileHandle, Stable, procedure};
    use crate::wire::codec::{Codec, Writer};
    use crate::wire::onc_rpc::record::{MARK_BYTES, Mark, marked};
    use crate::wire::onc_rpc::{AuthSys, CallHeader, OpaqueAuth, Xid};
    use std::time::Duration;
    use tempfile::TempDir;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;

    async fn serve(change: impl FnOnce(&mut Config)) -> (Handle, TempDir) {
        let dir = tempfile::tempdir().unwrap();
        let mut config = Config::small(dir.path().join("pool"));
        config.listen.nfs_tcp = vec!["127.0.0.1:0".parse().unwrap()];
        change(&mut config);
        (start(config).await.unwrap(), dir)
    }

    async fn connect(handle: &Handle) -> TcpStream {
        TcpStream::connect(handle.nfs_addresses()[0]).await.unwrap()
    }

    fn call(xid: u32, procedure: u32, arguments: impl FnOnce(&mut Writer)) -> Vec<u8> {
        let sys = AuthSys { stamp: 1, machine_name: b"host", uid: 0, gid: 0, gids: vec![] }.body();
        let (program, version) = (nfs::PROGRAM_NUMBER, nfs::VERSION);
        let (credential, verifier) = (AuthSys::around(&sys), OpaqueAuth::NONE);
        let mut writer = Writer::new();
        CallHeader { xid: Xid(xid), program, version, procedure, credential, verifier }.write(&mut writer);
        arguments(&mut writer);
        marked(&writer.finish())
    }

    /// The results of the next reply, behind their header.
    async fn reply(peer: &mut TcpStream) -> Vec<u8> {
        let mut mark = [0; MARK_BYTES];
        soon(peer.read_exact(&mut mark)).await.unwrap();
        let mut octets = vec![0; Mark::read(mark).len as usize];
        soon(peer.read_exact(&mut octets)).await.unwrap();
        octets.split_off(24)
    }

    async fn ask(peer: &mut TcpStream, record: &[u8]) -> Vec<u8> {
        peer.write_all(record).await.unwrap();
        reply(peer).await
    }

    /// A file that another door put, by its handle.
    async fn file(handle: &Handle, peer: &mut TcpStream, value: &[u8]) -> FileHandle {
        soon(handle.local().put(b"f", value, 0, 0)).await.unwrap();
        let files = handle.files.as_ref().expect("there is a file system");
        let lookup = call(900, procedure::LOOKUP, |words| {
            files.root().write(words);
            words.opaque(b"f");
        });
        let found = ask(peer, &lookup).await;
        assert_eq!(found[..4], [0; 4]);
        FileHandle::new(&found[8..36]).unwrap()
    }

    fn write(xid: u32, file: FileHandle, data: &[u8]) -> Vec<u8> {
        call(xid, procedure::WRITE, |words| {
            file.write(words);
            words.u64(0);
            words.u32(data.len() as u32);
            Stable::Unstable.write(words);
            words.opaque(data);
        })
    }

    fn read(xid: u32, file: FileHandle, count: u32) -> Vec<u8> {
        call(xid, procedure::READ, |words| {
            file.write(words);
            words.u64(0);
            words.u32(count);
        })
    }

    #[actix::test]
    async fn a_shutdown_waits_for_the_write_that_is_arriving_and_shows_it_to_nobody_too_early() {
        let (handle, _dir) = serve(|_| {}).await;
        let metrics = handle.metrics().clone();
        let mut peer = connect(&handle).await;
        let file = file(&handle, &mut peer, b"before").await;
        let data = octets(200_000, 1);
        let record = write(1, file, &data);
        peer.write_all(&record[..100_000]).await.unwrap();
        until("its head was read", || metrics.rpc_calls.nfs.get("WRITE") == 1).await;
        assert_eq!(handle.local().get(b"f").await, Ok(Some(b"before".to_vec())));
        let rest_of_it = async {
            until("it drains", || metrics.connections.current.get() == 1).await;
            let done = ask(&mut peer, &record[100_000..]).await;
            assert_eq!(done[..4], [0; 4]);
            assert_eq!(rest(&mut peer).await, b"", "then it ends");
        };
        soon(async { tokio::join!(handle.shutdown(), rest_of_it) }).await;
        assert_eq!((metrics.nfs.current.get(), metrics.nfs.ends.get("shutdown")), (0, 1));
    }

    #[actix::test]
    async fn a_shutdown_cuts_a_write_that_does_not_end() {
        let (handle, _dir) = serve(|config| config.timers.shutdown_grace = Duration::from_millis(50)).await;
        let metrics = handle.metrics().clone();
        let mut peer = connect(&handle).await;
        let file = file(&handle, &mut peer, b"before").await;
        peer.write_all(&write(1, file, &octets(200_000, 1))[..100_000]).await.unwrap();
        until("its head was read", || metrics.rpc_calls.nfs.get("WRITE") == 1).await;
        soon(handle.shutdown()).await;
        assert_eq!(rest(&mut peer).await, b"");
    }

    #[actix::test]
    async fn peers_beyond_the_bound_find_the_door_closed() {
        let (handle, _dir) = serve(|config| config.limits.connections_max = 2).await;
        let null = call(1, procedure::NULL, |_| {});
        let (mut first, mut second) = (connect(&handle).await, connect(&handle).await);
        ask(&mut first, &null).await;
        ask(&mut second, &null).await;
        let mut third = connect(&handle).await;
        assert_eq!(rest(&mut third).await, b"");
        let metrics = handle.metrics();
        assert_eq!((metrics.nfs.rejections.get("connections_max"), metrics.nfs.total.get()), (1, 2));
        drop(first);
        until("its place is free", || metrics.nfs.current.get() == 1).await;
        let mut fourth = connect(&handle).await;
        ask(&mut fourth, &null).await;
        handle.shutdown().await;
    }

    /// What is in RAM crosses no mailbox; each piece on disk is a message there and one back.
    #[actix::test]
    async fn a_read_from_disk_costs_two_messages_for_each_piece() {
        let (handle, _dir) = serve(|_| {}).await;
        let metrics = handle.metrics().clone();
        let mut peer = connect(&handle).await;
        let value = octets(1 << 20, 7);
        let file = file(&handle, &mut peer, &value).await;
        let messages = || metrics.connections.messages.get();
        let is_whole = |results: &[u8]| results[results.len() - (1 << 20)..] == value;
        assert!(is_whole(&ask(&mut peer, &read(1, file, 1 << 20)).await));
        assert_eq!(messages(), 0);
        let cold = || {
            let object = handle.store().peek(b"f", handle.store().clock().now()).expect("it stays");
            object.pieces().iter().filter(|piece| !piece.segment.is_resident()).count() as u64
        };
        for round in 0..64_u32 {
            if cold() >= 3 {
                break;
            }
            handle.local().put(&round.to_le_bytes(), &octets(1 << 20, round), 0, 0).await.unwrap();
        }
        let pieces = cold();
        assert!(pieces >= 3, "{pieces} pieces are on disk");
        assert!(is_whole(&ask(&mut peer, &read(2, file, 1 << 20)).await));
        assert_eq!(messages(), 2 * pieces);
        handle.shutdown().await;
    }

    #[actix::test]
    async fn an_idle_peer_goes_where_that_is_asked_for_and_nowhere_else() {
        let idle = |idle_timeout| {
            move |config: &mut Config| {
                config.timers.stall_timeout = Duration::from_millis(100);
                config.timers.idle_timeout = idle_timeout;
            }
        };
        let null = call(1, procedure::NULL, |_| {});
        let (handle, _dir) = serve(idle(Some(Duration::from_millis(100)))).await;
        let mut peer = connect(&handle).await;
        ask(&mut peer, &null).await;
        assert_eq!(rest(&mut peer).await, b"");
        assert_eq!(handle.metrics().nfs.ends.get("idle"), 1);
        handle.shutdown().await;
        let (handle, _dir) = serve(idle(None)).await;
        let mut peer = connect(&handle).await;
        ask(&mut peer, &null).await;
        tokio::time::sleep(Duration::from_millis(400)).await;
        ask(&mut peer, &null).await;
        // Half a call is another matter.
        peer.write_all(&null[..20]).await.unwrap();
        assert_eq!(rest(&mut peer).await, b"");
        assert_eq!(handle.metrics().nfs.ends.get("stalled"), 1);
        handle.shutdown().await;
    }
}
