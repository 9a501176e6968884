//! `Listener`: one bound address. It admits peers up to `connections_max` and gives each to a lane in turn.

use crate::actors::connection::{Admission, Connection, Drain, Kill, Lane, Socket};
use crate::actors::nfs_connection::{self, NfsDoor};
use crate::metrics::Metrics;
use crate::wire::memcache::response::TOO_MANY_CONNECTIONS;
use actix::prelude::*;
use std::collections::HashMap;
use std::io::{self, Write};
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context as Task, Poll, ready};
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Accepts no more; resolves once the address is free.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Refuse;

/// Pause after the system refused to accept, most likely for want of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Peers accepted in one turn.
const ACCEPTS_PER_TURN: usize = 32;

/// A peer that nothing is heard of is asked after this, and gone when it does not answer for as long again.
const KEEPALIVE_AFTER: Duration = Duration::from_secs(60);
const KEEPALIVE_TRIES: u32 = 6;

fn keepalive() -> socket2::TcpKeepalive {
    let keepalive = socket2::TcpKeepalive::new().with_time(KEEPALIVE_AFTER);
    keepalive.with_interval(KEEPALIVE_AFTER / KEEPALIVE_TRIES).with_retries(KEEPALIVE_TRIES)
}

/// Every living connection, so that a shutdown can reach them.
#[derive(Clone, Default)]
pub struct Registry {
    living: Arc<Mutex<Living>>,
    next: Arc<AtomicU64>,
}

#[derive(Default)]
struct Living {
    connections: HashMap<u64, (Recipient<Drain>, Recipient<Kill>)>,
    draining: bool,
}

impl Registry {
    /// Asks all to end when their requests are answered.
    pub fn drain(&self) {
        self.lock().draining = true;
        self.addresses().into_iter().for_each(|(drain, _)| drain.do_send(Drain));
    }

    /// Ends all.
    pub fn kill(&self) {
        self.addresses().into_iter().for_each(|(_, kill)| kill.do_send(Kill));
    }

    pub fn len(&self) -> usize {
        self.lock().connections.len()
    }

    pub fn is_empty(&self) -> bool {
        self.lock().connections.is_empty()
    }

    fn addresses(&self) -> Vec<(Recipient<Drain>, Recipient<Kill>)> {
        self.lock().connections.values().cloned().collect()
    }

    /// A number for the next connection.
    pub fn next_id(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// What takes connection `id` out of the registry when it is dropped, and gives `permit` back.
    pub fn admitted(&self, id: u64, permit: OwnedSemaphorePermit) -> Admitted {
        Admitted { id, registry: self.clone(), _permit: permit }
    }

    /// Connection `id` lives, and can be told to end. Call it on its own thread, so that it has not ended before.
    pub fn enroll(&self, id: u64, drain: Recipient<Drain>, kill: Recipient<Kill>) {
        let mut living = self.lock();
        if living.draining {
            // Accepted just before the listener refused: it would miss the message that the others got.
            drain.do_send(Drain);
        }
        living.connections.insert(id, (drain, kill));
    }

    fn lock(&self) -> MutexGuard<'_, Living> {
        self.living.lock().expect("no panic under this lock")
    }
}

/// Leaves the registry, and gives the place of the connection back.
pub struct Admitted {
    id: u64,
    registry: Registry,
    _permit: OwnedSemaphorePermit,
}

impl Drop for Admitted {
    fn drop(&mut self) {
        // The address is dropped after the lock is let go.
        let gone = self.registry.lock().connections.remove(&self.id);
        drop(gone);
    }
}

/// A bound address, free again when dropped; the file of a Unix socket goes with it.
pub enum Door {
    Tcp(TcpListener),
    Unix(UnixListener, PathBuf),
}

impl Door {
    fn poll_accept(&self, task: &mut Task<'_>) -> Poll<io::Result<Accepted>> {
        Poll::Ready(match self {
            Self::Tcp(listener) => ready!(listener.poll_accept(task)).and_then(|(stream, peer)| {
                stream.set_nodelay(true)?;
                // Best effort, as below: without it peers that vanished keep their places for ever.
                let _ = socket2::SockRef::from(&stream).set_tcp_keepalive(&keepalive());
                if peer.ip().is_loopback() {
                    // On loopback there is no path to probe: BBR, where it is the default, costs 8 to 20 %.
                    let _ = socket2::SockRef::from(&stream).set_tcp_congestion(b"cubic");
                }
                Ok(Accepted::Tcp(stream.into_std()?, peer.ip()))
            }),
            Self::Unix(listener, _) => {
                ready!(listener.poll_accept(task)).and_then(|(stream, _)| stream.into_std().map(Accepted::Unix))
            }
        })
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        if let Self::Unix(_, path) = self {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// What is spoken behind a door.
#[derive(Clone)]
pub enum Spoken {
    Memcache,
    /// NFS and MOUNT.
    Nfs(NfsDoor),
}

enum Accepted {
    Tcp(std::net::TcpStream, IpAddr),
    Unix(std::os::unix::net::UnixStream),
}

impl Accepted {
    /// On the thread that will serve it.
    fn into_socket(self) -> io::Result<Socket> {
        match self {
            Self::Tcp(stream, _) => TcpStream::from_std(stream).map(Socket::Tcp),
            Self::Unix(stream) => UnixStream::from_std(stream).map(Socket::Unix),
        }
    }

    /// Of the peer; whoever reaches a Unix socket is of this host.
    fn address(&self) -> IpAddr {
        match self {
            Self::Tcp(_, address) => *address,
            Self::Unix(_) => Ipv4Addr::LOCALHOST.into(),
        }
    }

    fn refuse(self) {
        // Best effort, and never waits: the stream does not block, and the line fits any socket buffer.
        let _ = match self {
            Self::Tcp(mut stream, _) => stream.write(TOO_MANY_CONNECTIONS),
            Self::Unix(mut stream) => stream.write(TOO_MANY_CONNECTIONS),
        };
    }
}

/// The actor. One per bound address.
pub struct Listener {
    door: Option<Door>,
    spoken: Spoken,
    lanes: Arc<[(ArbiterHandle, Lane)]>,
    turn: usize,
    places: Arc<Semaphore>,
    registry: Registry,
    metrics: Arc<Metrics>,
}

impl Listener {
    pub fn new(
        door: Door,
        spoken: Spoken,
        lanes: Arc<[(ArbiterHandle, Lane)]>,
        places: Arc<Semaphore>,
        registry: Registry,
        metrics: Arc<Metrics>,
    ) -> Self {
        Self { door: Some(door), spoken, lanes, turn: 0, places, registry, metrics }
    }

    fn admit(&mut self, accepted: Accepted) {
        let Ok(permit) = self.places.clone().try_acquire_owned() else {
            self.metrics.connections.rejected.add(1);
            return match &self.spoken {
                Spoken::Memcache => accepted.refuse(),
                // There are no words for it.
                Spoken::Nfs(_) => self.metrics.nfs.rejections.add("connections_max"),
            };
        };
        let id = self.registry.next_id();
        let registry = self.registry.clone();
        let admission: Admission = Box::new(registry.admitted(id, permit));
        let (arbiter, lane) = self.lanes[self.turn % self.lanes.len()].clone();
        self.turn += 1;
        let (spoken, address) = (self.spoken.clone(), accepted.address());
        arbiter.spawn(async move {
            let socket = match accepted.into_socket() {
                Ok(socket) => socket,
                Err(error) => return tracing::warn!(%error, "a connection could not be taken over"),
            };
            // On this thread, so the connection cannot end before it is registered.
            let (drain, kill): (Recipient<Drain>, Recipient<Kill>) = match spoken {
                Spoken::Memcache => {
                    let address = Connection::start_on_lane(socket, lane, admission);
                    (address.clone().recipient(), address.recipient())
                }
                Spoken::Nfs(door) => {
                    let address = nfs_connection::start_on_lane(socket, address, &door, lane, admission);
                    (address.clone().recipient(), address.recipient())
                }
            };
            registry.enroll(id, drain, kill);
        });
    }
}

struct Serve;

impl ActorFuture<Listener> for Serve {
    type Output = ();

    fn poll(self: Pin<&mut Self>, actor: &mut Listener, ctx: &mut Context<Listener>, task: &mut Task<'_>) -> Poll<()> {
        for _ in 0..ACCEPTS_PER_TURN {
            let Some(door) = &actor.door else { return Poll::Ready(()) };
            match ready!(door.poll_accept(task)) {
                Ok(accepted) => actor.admit(accepted),
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) => {
                    tracing::warn!(%error, "a connection could not be accepted");
                    ctx.run_later(ACCEPT_PAUSE, |_, ctx| _ = ctx.spawn(Serve));
                    return Poll::Ready(());
                }
            }
        }
        task.waker().wake_by_ref();
        Poll::Pending
    }
}

impl Actor for Listener {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        ctx.spawn(Serve);
    }
}

impl Handler<Refuse> for Listener {
    type Result = ();

    fn handle(&mut self, _: Refuse, ctx: &mut Self::Context) {
        self.door = None;
        ctx.stop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::actors::rig::{Rig, converse, rest, set, soon, until};
    use std::net::SocketAddr;

    struct Gate {
        rig: Rig,
        listener: Addr<Listener>,
        places: Arc<Semaphore>,
        registry: Registry,
    }

    fn open(door: Door, places: usize) -> Gate {
        let rig = Rig::new(|_| {});
        let lanes: Arc<[_]> = [(Arbiter::current(), rig.lane.clone())].into();
        let (places, registry) = (Arc::new(Semaphore::new(places)), Registry::default());
        let listener =
            Listener::new(door, Spoken::Memcache, lanes, places.clone(), registry.clone(), rig.metrics.clone()).start();
        Gate { rig, listener, places, registry }
    }

    async fn tcp(places: usize) -> (Gate, SocketAddr) {
        let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = socket.local_addr().unwrap();
        (open(Door::Tcp(socket), places), address)
    }

    #[actix::test]
    async fn peers_are_admitted_up_to_the_bound_and_places_are_given_back() {
        let (gate, address) = tcp(2).await;
        let connections = &gate.rig.metrics.connections;
        let mut first = TcpStream::connect(address).await.unwrap();
        converse(&mut first, &set("k", b"v"), b"STORED\r\n").await;
        let mut second = TcpStream::connect(address).await.unwrap();
        converse(&mut second, b"delete k\r\n", b"DELETED\r\n").await;
        assert_eq!((gate.registry.len(), gate.places.available_permits()), (2, 0));

        let mut third = TcpStream::connect(address).await.unwrap();
        assert_eq!(rest(&mut third).await, TOO_MANY_CONNECTIONS);
        assert_eq!((connections.rejected.get(), connections.total.get(), connections.current.get()), (1, 2, 2));

        drop(first);
        until("its place is free", || gate.places.available_permits() == 1).await;
        until("nobody knows it any more", || gate.registry.len() == 1).await;
        let mut fourth = TcpStream::connect(address).await.unwrap();
        converse(&mut fourth, &set("k", b"v"), b"STORED\r\n").await;
        assert_eq!((connections.rejected.get(), connections.total.get(), connections.current.get()), (1, 3, 2));
    }

    #[actix::test]
    async fn once_it_refuses_the_address_is_free_and_peers_stay() {
        let (gate, address) = tcp(2).await;
        let mut peer = TcpStream::connect(address).await.unwrap();
        converse(&mut peer, &set("k", b"v"), b"STORED\r\n").await;
        soon(gate.listener.send(Refuse)).await.unwrap();
        let refused = TcpStream::connect(address).await.unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
        converse(&mut peer, b"delete k\r\n", b"DELETED\r\n").await;
    }

    #[actix::test]
    async fn a_drain_and_a_kill_reach_every_connection() {
        let (gate, address) = tcp(8).await;
        let mut idle = TcpStream::connect(address).await.unwrap();
        converse(&mut idle, &set("k", b"v"), b"STORED\r\n").await;
        let mut busy = TcpStream::connect(address).await.unwrap();
        converse(&mut busy, b"get x\r\nset k 0 0 5\r\nab", b"END\r\n").await;
        until("the header was read", || gate.rig.metrics.memcache.cmd_set.get() == 2).await;
        gate.registry.drain();
        assert_eq!(rest(&mut idle).await, b"");
        until("one is left", || gate.registry.len() == 1).await;
        gate.registry.kill();
        assert_eq!(rest(&mut busy).await, b"");
        until("all are gone", || gate.registry.is_empty() && gate.places.available_permits() == 8).await;
        assert_eq!(gate.rig.metrics.connections.current.get(), 0);
    }

    /// It was told nothing, and the shutdown waited for it until its deadline.
    #[actix::test]
    async fn a_connection_accepted_while_others_drain_is_drained_too() {
        let (gate, address) = tcp(8).await;
        gate.registry.drain();
        let mut late = TcpStream::connect(address).await.unwrap();
        assert_eq!(rest(&mut late).await, b"");
        until("it is gone", || gate.registry.is_empty()).await;
    }

    /// Peers whose machine went away without a word held their places until no other peer was admitted.
    #[actix::test]
    async fn the_system_asks_after_peers_that_are_silent() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let _peer = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let door = Door::Tcp(listener);
        let accepted = soon(std::future::poll_fn(|task| door.poll_accept(task))).await.unwrap();
        let Accepted::Tcp(stream, _) = accepted else { panic!("a TCP door") };
        let socket = socket2::SockRef::from(&stream);
        assert!(socket.keepalive().unwrap());
        assert_eq!(socket.tcp_keepalive_time().unwrap(), KEEPALIVE_AFTER);
    }

    #[actix::test]
    async fn the_file_of_a_unix_socket_goes_with_its_door() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("door");
        let gate = open(Door::Unix(UnixListener::bind(&path).unwrap(), path.clone()), 2);
        let mut peer = UnixStream::connect(&path).await.unwrap();
        converse(&mut peer, &set("k", b"v"), b"STORED\r\n").await;
        assert!(path.exists());
        soon(gate.listener.send(Refuse)).await.unwrap();
        assert!(!path.exists());
        converse(&mut peer, b"delete k\r\n", b"DELETED\r\n").await;
    }
}
