//! `Connection`: one peer on a TCP or Unix socket, whatever its [`StreamSession`] speaks.
//!
//! The socket is served by one future of the actor: it reads into what the session offers, sends what the session gives,
//! and passes on what the session asks of the store and the disk. A value that is in RAM crosses no mailbox at all; a
//! piece that is on disk costs two messages, a wait for space two.
//!
//! Its mailbox is used by `do_send` alone: at most one answer for each thing asked (one claim, segment or retry, and as many
//! reads as it has staging buffers), one revocation for each claim, and the two messages of a shutdown.

use crate::actors::disk_tail::{DiskTail, ReadTail, TailRead};
use crate::actors::exported::Exported;
use crate::actors::store::{AwaitSpace, Fill, Filled, Reserve, Reserved, SpaceFreed, StoreActor};
use crate::config::TimersConfig;
use crate::fabric::staging::{Staging, StagingBuf};
use crate::metrics::{Count, FabricCounts, Metrics};
use crate::programs::memcache::session::{self, Session};
use crate::programs::stream::{Action, Ask, End, StreamSession};
use crate::store::claims::Revoker;
use actix::prelude::*;
use std::future::Future;
use std::io::{self, IoSlice, IoSliceMut};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context as Task, Poll, Waker};
use std::time::{Duration, Instant};
use tokio::net::{TcpStream, UnixStream};

/// The claim was taken back.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Revoked;

/// End as soon as no request is under way.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Drain;

/// End now.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Kill;

/// Octets moved in one turn before others of the lane run.
const TURN_BYTES: usize = 2 << 20;

/// How long a turn may take, but for one call: there are some that cost much and move few octets.
const TURN: Duration = Duration::from_millis(10);

/// The same while reads from disk are on their way.
const COLD_TURN_BYTES: usize = 512 << 10;

/// The peer's stream.
#[derive(Debug)]
pub enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Socket {
    fn poll_read_ready(&self, task: &mut Task<'_>) -> Poll<io::Result<()>> {
        match self {
            Self::Tcp(stream) => stream.poll_read_ready(task),
            Self::Unix(stream) => stream.poll_read_ready(task),
        }
    }

    fn poll_write_ready(&self, task: &mut Task<'_>) -> Poll<io::Result<()>> {
        match self {
            Self::Tcp(stream) => stream.poll_write_ready(task),
            Self::Unix(stream) => stream.poll_write_ready(task),
        }
    }

    fn try_read(&self, buffers: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.try_read_vectored(buffers),
            Self::Unix(stream) => stream.try_read_vectored(buffers),
        }
    }

    fn try_write(&self, buffers: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.try_write_vectored(buffers),
            Self::Unix(stream) => stream.try_write_vectored(buffers),
        }
    }
}

/// What the connections of a lane share.
#[derive(Clone)]
pub struct Lane {
    pub session: session::Context,
    pub store: Addr<StoreActor>,
    pub tail: Addr<DiskTail>,
    pub staging: Staging,
    pub timers: TimersConfig,
    /// The file system, where there is one.
    pub exported: Option<Exported>,
}

/// Asks the store for what an exchange needs; `of` gets the answer.
pub(super) fn ask<A>(lane: &Lane, asked: Ask, of: Addr<A>)
where
    A: Actor<Context = Context<A>> + Handler<Reserved> + Handler<Filled> + Handler<SpaceFreed> + Handler<Revoked>,
{
    match asked {
        Ask::Reserve { len } => {
            let address = of.clone();
            let revoker: Revoker = Arc::new(move || address.do_send(Revoked));
            lane.store.do_send(Reserve { len, revoker, reply: of.recipient() });
        }
        Ask::Fill { want } => lane.store.do_send(Fill { want, reply: of.recipient() }),
        Ask::Retry => lane.store.do_send(AwaitSpace { reply: of.recipient() }),
    }
}

/// Held by a connection while it counts towards `connections_max`.
pub type Admission = Box<dyn Send>;

/// The actor. One per peer, on one lane for its life.
pub struct Connection<S = Session> {
    session: S,
    socket: Socket,
    lane: Lane,
    /// Of the doors of its kind, beside those of all.
    counts: Option<fn(&Metrics) -> &FabricCounts>,
    waker: Option<Waker>,
    /// Waiting for a staging buffer, with others of the lane.
    staging_wait: Option<Pin<Box<dyn Future<Output = StagingBuf>>>>,
    staging_buf: Option<StagingBuf>,
    send_blocked: bool,
    /// Reads were asked for in this turn.
    reads_started: bool,
    draining: bool,
    seen_moved_ms: u64,
    _admission: Admission,
}

impl Connection {
    /// Starts the actor of a memcache peer on the lane of this thread.
    pub fn start_on_lane(socket: Socket, lane: Lane, admission: Admission) -> Addr<Self> {
        let context = lane.session.clone();
        Self::start_with(socket, lane, admission, None, |revoker| Session::new(context, revoker))
    }
}

impl<S: StreamSession> Connection<S> {
    /// Starts the actor on the lane of this thread, around the session that `make` makes: it is given what is called when its
    /// claim is taken back.
    pub fn start_with(
        socket: Socket,
        lane: Lane,
        admission: Admission,
        counts: Option<fn(&Metrics) -> &FabricCounts>,
        make: impl FnOnce(Revoker) -> S,
    ) -> Addr<Self> {
        Self::create(|ctx| {
            let address = ctx.address();
            let session = make(Arc::new(move || address.do_send(Revoked)));
            let metrics = &lane.session.metrics;
            metrics.connections.total.add(1);
            metrics.connections.current.add(1);
            if let Some(counts) = counts.map(|counts| counts(metrics)) {
                counts.total.add(1);
                counts.current.add(1);
            }
            Self {
                session,
                socket,
                lane,
                counts,
                waker: None,
                staging_wait: None,
                staging_buf: None,
                send_blocked: false,
                reads_started: false,
                draining: false,
                seen_moved_ms: 0,
                _admission: admission,
            }
        })
    }

    fn wake(&mut self) {
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }

    fn count_message(&self) {
        self.lane.session.metrics.connections.messages.add(1);
    }

    /// Asks store and disk for what the session wants.
    fn act(&mut self, ctx: &mut Context<Self>, task: &mut Task<'_>) {
        if let Some(wait) = &mut self.staging_wait {
            let Poll::Ready(buf) = wait.as_mut().poll(task) else { return };
            self.staging_wait = None;
            self.staging_buf = Some(buf);
        }
        // A quarter of what nobody has: the next connections still find their share.
        self.session.set_tail_reads(self.lane.staging.available() / 4);
        while let Some(action) = self.session.poll_action() {
            match action {
                Action::Ask(asked) => ask(&self.lane, asked, ctx.address()),
                Action::Read(read) => {
                    let Some(into) = self.staging_buf.take().or_else(|| self.lane.staging.try_take()) else {
                        self.session.handle_read_back(read.ticket);
                        // What came would be kept for a peer that takes nothing, while others wait for it.
                        if self.send_blocked {
                            return;
                        }
                        let mut wait = Box::pin(self.lane.staging.take());
                        if let Poll::Ready(buf) = wait.as_mut().poll(task) {
                            self.staging_buf = Some(buf);
                            continue;
                        }
                        self.staging_wait = Some(wait);
                        return;
                    };
                    let (ticket, extent, crcs) = (read.ticket, read.extent, read.crcs);
                    let (len, reply) = (read.segment.len(), ctx.address().recipient());
                    self.reads_started = true;
                    self.lane.tail.do_send(ReadTail { extent, len, crcs, into, keep: read.segment, ticket, reply });
                }
            }
            self.count_message();
        }
        // A buffer that came too late belongs to the next who waits.
        self.staging_buf = None;
    }

    /// Moves what can be moved. `Some` when the connection is over.
    fn serve(&mut self, ctx: &mut Context<Self>, task: &mut Task<'_>) -> Option<Over> {
        let mut moved = 0;
        let begun = Instant::now();
        self.reads_started = false;
        loop {
            self.session.process();
            self.act(ctx, task);
            let (before, was_blocked) = (moved, self.send_blocked);
            match self.send(task) {
                Ok(sent) => moved += sent,
                Err(error) => return Some(Over::Socket(error)),
            }
            if was_blocked && !self.send_blocked {
                self.act(ctx, task);
            }
            if self.session.wants_input() {
                match self.receive(task) {
                    Ok(Some(0)) => {
                        self.session.handle_eof();
                        self.session.process();
                        self.act(ctx, task);
                        // One more round: what was received before the end is still answered.
                        moved += 1;
                    }
                    Ok(Some(received)) => {
                        self.session.handle_input(received);
                        moved += received;
                    }
                    Ok(None) => {}
                    Err(error) => return Some(Over::Socket(error)),
                }
            }
            if let Some(end) = self.session.ended() {
                return Some(Over::Session(end));
            }
            if self.draining && !self.session.is_busy() {
                return Some(Over::Shutdown);
            }
            if moved == before {
                return None;
            }
            if moved >= TURN_BYTES || begun.elapsed() >= TURN || std::mem::take(&mut self.reads_started) {
                // Others of the lane have their turn: its disk starts the reads that were asked for.
                task.waker().wake_by_ref();
                return None;
            }
        }
    }

    fn send(&mut self, task: &mut Task<'_>) -> io::Result<usize> {
        let mut total = 0;
        self.send_blocked = false;
        loop {
            let mut slices = Vec::new();
            let offered = self.session.gather(&mut slices);
            if offered == 0 {
                return Ok(total);
            }
            match self.socket.poll_write_ready(task) {
                Poll::Ready(ready) => ready?,
                Poll::Pending => break,
            }
            match self.socket.try_write(&slices) {
                Ok(sent) => {
                    drop(slices);
                    self.session.handle_sent(sent);
                    total += sent;
                    // The disk must not run out of requests while what it has read is sent.
                    if total >= TURN_BYTES || total >= COLD_TURN_BYTES && self.session.has_tail_reads() {
                        return Ok(total);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
        self.send_blocked = true;
        // Nobody keeps lane buffers, a place in the queue for them, or memory while waiting for a peer, if others wait.
        if self.lane.staging.available() == 0 {
            self.staging_wait = None;
            self.session.give_back();
        }
        if self.lane.session.store.wake().is_wanted() {
            self.session.give_back_memory();
        }
        Ok(total)
    }

    fn receive(&mut self, task: &mut Task<'_>) -> io::Result<Option<usize>> {
        loop {
            match self.socket.poll_read_ready(task) {
                Poll::Ready(ready) => ready?,
                Poll::Pending => return Ok(None),
            }
            let (first, second) = self.session.targets();
            let mut buffers = [IoSliceMut::new(first), IoSliceMut::new(second)];
            let buffers = if buffers[0].is_empty() { &mut buffers[1..] } else { &mut buffers[..] };
            match self.socket.try_read(buffers) {
                Ok(count) => return Ok(Some(count)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn tick(&mut self, ctx: &mut Context<Self>) {
        let now_ms = self.lane.session.store.clock().now_ms();
        let before = |wait: Duration| now_ms.saturating_sub(wait.as_millis() as u64);
        if self.session.is_stalled(before(self.lane.timers.stall_timeout)) {
            return self.finish(ctx, Over::Stalled);
        }
        let idle = self.lane.timers.idle_timeout;
        if idle.is_some_and(|wait| self.session.is_idle() && self.session.moved_ms() < before(wait)) {
            return self.finish(ctx, Over::Idle);
        }
        let moved_ms = self.session.moved_ms();
        if moved_ms == self.seen_moved_ms {
            self.session.rest();
        }
        self.seen_moved_ms = moved_ms;
        // A sender that was blocked when nobody wanted what it holds may hold it while somebody does now.
        let wanted = self.lane.staging.available() == 0 || self.lane.session.store.wake().is_wanted();
        if self.send_blocked && wanted {
            self.wake();
        }
    }

    fn finish(&mut self, ctx: &mut Context<Self>, over: Over) {
        let metrics = &self.lane.session.metrics;
        let closed = &metrics.connections.closed;
        let (count, cause): (&Count, _) = match &over {
            Over::Session(End::Quit) => (&closed.by_quit, "by_quit"),
            Over::Session(End::ByPeer) => (&closed.by_peer, "by_peer"),
            Over::Session(End::Protocol) => (&closed.protocol, "protocol"),
            Over::Session(End::FailedRead) => (&closed.failed_read, "failed_read"),
            Over::Socket(_) => (&closed.socket_error, "socket_error"),
            Over::Stalled => (&closed.stalled, "stalled"),
            Over::Idle => (&closed.idle, "idle"),
            Over::Shutdown => (&closed.shutdown, "shutdown"),
        };
        count.add(1);
        if let Some(counts) = self.counts {
            counts(metrics).ends.add(cause);
        }
        match &over {
            Over::Socket(error) => tracing::debug!(%error, "connection lost"),
            over => tracing::debug!(?over, "connection closed"),
        }
        ctx.stop();
    }
}

#[derive(Debug)]
enum Over {
    Session(End),
    Socket(io::Error),
    Stalled,
    Idle,
    Shutdown,
}

/// Serves the socket for as long as the actor lives.
struct Serve;

impl<S: StreamSession> ActorFuture<Connection<S>> for Serve {
    type Output = ();

    fn poll(
        self: Pin<&mut Self>,
        actor: &mut Connection<S>,
        ctx: &mut Context<Connection<S>>,
        task: &mut Task<'_>,
    ) -> Poll<()> {
        if !actor.waker.as_ref().is_some_and(|waker| waker.will_wake(task.waker())) {
            actor.waker = Some(task.waker().clone());
        }
        match actor.serve(ctx, task) {
            None => Poll::Pending,
            Some(over) => {
                actor.finish(ctx, over);
                Poll::Ready(())
            }
        }
    }
}

impl<S: StreamSession> Actor for Connection<S> {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        ctx.spawn(Serve);
        let shortest = self
            .lane
            .timers
            .idle_timeout
            .map_or(self.lane.timers.stall_timeout, |idle| idle.min(self.lane.timers.stall_timeout));
        ctx.run_interval((shortest / 4).clamp(Duration::from_millis(20), Duration::from_secs(5)), Self::tick);
    }

    fn stopped(&mut self, _: &mut Self::Context) {
        let metrics = &self.lane.session.metrics;
        metrics.connections.current.sub(1);
        if let Some(counts) = self.counts {
            counts(metrics).current.sub(1);
        }
    }
}

impl<S: StreamSession> Handler<Reserved> for Connection<S> {
    type Result = ();

    fn handle(&mut self, reserved: Reserved, _: &mut Self::Context) {
        self.count_message();
        self.session.handle_claim(reserved.0);
        self.wake();
    }
}

impl<S: StreamSession> Handler<Filled> for Connection<S> {
    type Result = ();

    fn handle(&mut self, filled: Filled, _: &mut Self::Context) {
        self.count_message();
        self.session.handle_segment(filled.0);
        self.wake();
    }
}

impl<S: StreamSession> Handler<SpaceFreed> for Connection<S> {
    type Result = ();

    fn handle(&mut self, _: SpaceFreed, _: &mut Self::Context) {
        self.count_message();
        self.session.handle_retry();
        self.wake();
    }
}

impl<S: StreamSession> Handler<TailRead> for Connection<S> {
    type Result = ();

    fn handle(&mut self, read: TailRead, _: &mut Self::Context) {
        self.count_message();
        let TailRead { ticket, buf, result } = read;
        if let Err(error) = &result {
            tracing::error!(%error, "a segment could not be read");
        }
        self.session.handle_read(ticket, result.is_ok().then_some(buf));
        self.wake();
    }
}

impl<S: StreamSession> Handler<Revoked> for Connection<S> {
    type Result = ();

    fn handle(&mut self, _: Revoked, _: &mut Self::Context) {
        self.count_message();
        self.session.handle_revoked();
        self.wake();
    }
}

impl<S: StreamSession> Handler<Drain> for Connection<S> {
    type Result = ();

    fn handle(&mut self, _: Drain, _: &mut Self::Context) {
        self.draining = true;
        self.wake();
    }
}

impl<S: StreamSession> Handler<Kill> for Connection<S> {
    type Result = ();

    fn handle(&mut self, _: Kill, ctx: &mut Self::Context) {
        self.finish(ctx, Over::Shutdown);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::actors::rig::{Rig, converse, expect, octets, rest, set, soon, until, value_reply};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    /// Longer than the buffers of a socket pair.
    const LONG: usize = 4 << 20;

    #[actix::test]
    async fn requests_are_answered_in_order_though_they_come_in_one_write() {
        let rig = Rig::new(|_| {});
        let (_connection, mut peer) = rig.connect();
        let large = octets(300_000, 1);
        let request = [&set("k", b"hello"), &b"get k\r\n"[..], &set("l", &large), b"get l\r\ndelete k\r\nget k\r\n"];
        let (hello, large) = (value_reply("k", b"hello"), value_reply("l", &large));
        let reply = [b"STORED\r\n", &hello[..], b"STORED\r\n", &large, b"DELETED\r\nEND\r\n"].concat();
        converse(&mut peer, &request.concat(), &reply).await;
        let connections = &rig.metrics.connections;
        assert_eq!(connections.bytes_read.get(), request.concat().len() as u64);
        assert_eq!(connections.bytes_written.get(), reply.len() as u64);
        drop(peer);
        until("it has ended", || connections.current.get() == 0).await;
        assert_eq!((connections.total.get(), connections.closed.by_peer.get()), (1, 1));
    }

    #[actix::test]
    async fn what_is_in_ram_crosses_no_mailbox_and_a_piece_on_disk_costs_two_messages() {
        let rig = Rig::new(|_| {});
        let (_connection, mut peer) = rig.connect();
        let value = octets(2 << 20, 7);
        let messages = || rig.metrics.connections.messages.get();
        let writer = async |peer: &mut UnixStream| converse(peer, &set("k", &value), b"STORED\r\n").await;
        writer(&mut peer).await;
        converse(&mut peer, b"get k\r\n", &value_reply("k", &value)).await;
        assert_eq!(messages(), 0, "free space and RAM are plain calls");

        // Overwritten, so that its first read does not warm it.
        writer(&mut peer).await;
        let cold = soon(rig.push_out(b"k")).await;
        assert_eq!(cold, 7, "all but the head");
        let before = messages();
        converse(&mut peer, b"get k\r\n", &value_reply("k", &value)).await;
        assert_eq!(messages() - before, 2 * cold);
        until("every buffer is back", || rig.lane.staging.available() == rig.lane.staging.count()).await;
    }

    #[actix::test]
    async fn a_set_that_waits_for_its_claim_costs_two_messages() {
        let rig = Rig::new(|_| {});
        let held = rig.store.try_claim(60 << 20, false, &(Arc::new(|| ()) as Revoker)).unwrap();
        held.set_held_up(true);
        let (_connection, peer) = rig.connect();
        let (mut reader, mut writer) = peer.into_split();
        let request = set("k", &octets(8 << 20, 7));
        let send = async { writer.write_all(&request).await.unwrap() };
        let answer = async {
            until("it waits", || rig.store.claims().queued() == 1).await;
            drop(held);
            expect(&mut reader, b"STORED\r\n").await;
        };
        soon(async { tokio::join!(send, answer) }).await;
        assert_eq!(rig.metrics.connections.messages.get(), 2);
    }

    #[actix::test]
    async fn a_drain_waits_for_the_value_that_is_arriving() {
        let rig = Rig::new(|_| {});
        let (connection, mut peer) = rig.connect();
        peer.write_all(b"set k 0 0 10\r\n01234").await.unwrap();
        until("the header was read", || rig.metrics.memcache.cmd_set.get() == 1).await;
        connection.send(Drain).await.unwrap();
        converse(&mut peer, b"56789\r\n", b"STORED\r\n").await;
        assert_eq!(rest(&mut peer).await, b"", "then it ends");
        assert_eq!(rig.metrics.connections.closed.shutdown.get(), 1);
        assert_eq!(rig.store.peek(b"k", 1).map(|object| object.len()), Some(10));
    }

    #[actix::test]
    async fn a_drain_waits_for_the_reply_that_is_leaving() {
        let rig = Rig::new(|_| {});
        let value = octets(LONG, 3);
        rig.local.put(b"k", &value, 0, 0).await.unwrap();
        let (connection, mut peer) = rig.connect();
        peer.write_all(b"get k\r\n").await.unwrap();
        until("it is under way", || rig.metrics.memcache.cmd_get.get() == 1).await;
        connection.send(Drain).await.unwrap();
        assert!(rest(&mut peer).await == value_reply("k", &value), "the whole reply, and the end");
        assert_eq!(rig.store.gauges().pins, 0);
    }

    #[actix::test]
    async fn a_drain_ends_an_idle_connection_at_once() {
        let rig = Rig::new(|_| {});
        let (connection, mut peer) = rig.connect();
        converse(&mut peer, b"version\r\n", b"VERSION ").await;
        connection.send(Drain).await.unwrap();
        assert!(rest(&mut peer).await.ends_with(b"\r\n"));
        until("it has ended", || rig.metrics.connections.current.get() == 0).await;
    }

    #[actix::test]
    async fn a_kill_ends_it_in_the_middle_and_everything_comes_back() {
        let rig = Rig::new(|_| {});
        let before = rig.store.gauges();
        let (connection, mut peer) = rig.connect();
        peer.write_all(&set("k", &octets(100_000, 1))[..50_000]).await.unwrap();
        until("it has a claim", || rig.store.claims().granted().0 == 1).await;
        connection.send(Kill).await.unwrap();
        assert_eq!(rest(&mut peer).await, b"");
        until("it has ended", || rig.metrics.connections.current.get() == 0).await;
        drop(connection);
        until("its space is free", || rig.store.gauges() == before).await;
        assert_eq!(rig.metrics.connections.closed.shutdown.get(), 1);
    }

    #[actix::test]
    async fn a_writer_that_stalls_is_cut_and_its_claim_comes_back() {
        let rig = Rig::new(|config| config.timers.stall_timeout = Duration::from_millis(100));
        let before = rig.store.gauges();
        let (_, mut peer) = rig.connect();
        peer.write_all(&set("k", &octets(100_000, 1))[..50_000]).await.unwrap();
        assert_eq!(rest(&mut peer).await, b"", "no reply, the end");
        assert_eq!(rig.metrics.connections.closed.stalled.get(), 1);
        until("its space is free", || rig.store.gauges() == before).await;
    }

    #[actix::test]
    async fn a_reader_that_stalls_is_cut_and_its_pins_come_back() {
        let rig = Rig::new(|config| config.timers.stall_timeout = Duration::from_millis(100));
        let value = octets(LONG, 3);
        rig.local.put(b"k", &value, 0, 0).await.unwrap();
        let (_, mut peer) = rig.connect();
        peer.write_all(b"get k\r\n").await.unwrap();
        until("it was cut", || rig.metrics.connections.closed.stalled.get() == 1).await;
        until("nothing is pinned", || rig.store.gauges().pins == 0).await;
        assert!(rest(&mut peer).await.len() < LONG, "the reply is visibly not whole");
    }

    /// Sixty-four values were pinned for a peer that read none of them: with a few such peers nobody else could read.
    #[actix::test]
    async fn no_more_is_pinned_for_a_peer_than_is_looked_up_ahead() {
        let rig = Rig::new(|_| {});
        let value = octets(1 << 20, 3);
        rig.local.put(b"k", &value, 0, 0).await.unwrap();
        let (_, mut peer) = rig.connect();
        peer.write_all(&b"get k\r\n".repeat(20)).await.unwrap();
        until("it is under way", || rig.metrics.memcache.cmd_get.get() > 0).await;
        assert!(rig.store.gauges().pins <= 5, "{} pins", rig.store.gauges().pins);
        for _ in 0..20 {
            expect(&mut peer, &value_reply("k", &value)).await;
        }
        until("nothing is pinned", || rig.store.gauges().pins == 0).await;
    }

    #[actix::test]
    async fn an_idle_connection_is_kept_unless_it_is_asked_to_go() {
        let rig = Rig::new(|config| config.timers.stall_timeout = Duration::from_millis(50));
        let (_, mut kept) = rig.connect();
        let lane = Lane { timers: rig.lane.timers.clone(), ..rig.lane.clone() };
        let (ours, mut gone) = UnixStream::pair().unwrap();
        let timers = TimersConfig { idle_timeout: Some(Duration::from_millis(50)), ..lane.timers.clone() };
        Connection::start_on_lane(Socket::Unix(ours), Lane { timers, ..lane }, Box::new(()));
        converse(&mut kept, &set("k", b"v"), b"STORED\r\n").await;
        assert_eq!(rest(&mut gone).await, b"");
        assert_eq!(rig.metrics.connections.closed.idle.get(), 1);
        converse(&mut kept, b"get k\r\n", &value_reply("k", b"v")).await;
        assert_eq!(rig.metrics.connections.closed.stalled.get(), 0);
    }

    #[actix::test]
    async fn a_revoked_claim_is_an_error_and_the_rest_of_its_body_is_skipped() {
        let rig = Rig::new(|config| config.timers.claim_idle = Duration::from_millis(50));
        let (_, mut idle) = rig.connect();
        let request = set("k", &octets(40 << 20, 1));
        idle.write_all(&request[..50_000]).await.unwrap();
        until("it has a claim", || rig.store.claims().granted().0 == 1).await;
        let value = octets(30 << 20, 2);
        soon(rig.local.put(b"other", &value, 0, 0)).await.unwrap();
        let (mut reader, mut writer) = idle.into_split();
        let send = async {
            writer.write_all(&request[50_000..]).await.unwrap();
            writer.write_all(b"get k\r\n").await.unwrap();
        };
        let reply = b"SERVER_ERROR out of memory storing object\r\nEND\r\n";
        soon(async { tokio::join!(send, expect(&mut reader, reply)) }).await;
        assert_eq!(rig.metrics.memcache.store_no_memory.get(), 1);
        assert_eq!(rig.store.claims().granted(), (0, 0));
    }

    #[actix::test]
    async fn half_a_line_at_the_end_of_the_stream_is_no_request() {
        let rig = Rig::new(|_| {});
        let (_, mut peer) = rig.connect();
        peer.write_all(b"get k\r\nget k").await.unwrap();
        peer.shutdown().await.unwrap();
        let mut got = [0; 5];
        soon(peer.read_exact(&mut got)).await.unwrap();
        assert_eq!(&got, b"END\r\n");
        assert_eq!(rest(&mut peer).await, b"");
        assert_eq!(rig.metrics.memcache.cmd_get.get(), 1);
    }
}
