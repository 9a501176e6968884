//! Runs one driver for each connection, and measures the machine beside them.

use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use bulkhead::client::{ClientError, NativeClient, Options, RpcClient, RpcOptions, ServerUrl, Stream};
use tokio::io::Interest;

use super::driver::{Driver, Tally};
use super::histogram::Histogram;
use super::{native, rpc};

/// Up to so many connections each have a thread, which costs the fewest system calls.
const THREADS_MAX: usize = 64;

/// One connection to the server, of any kind.
pub enum Connection {
    Stream(Stream),
    Native(Box<NativeClient>),
    Rpc(Box<RpcClient>),
}

impl Connection {
    /// # Errors
    /// [`ClientError::Unreachable`], and those of [`NativeClient::connect`] or [`RpcClient::connect`].
    pub fn connect(url: &ServerUrl, options: Options, rpc_options: RpcOptions) -> Result<Self, ClientError> {
        if url.is_rpc() {
            return RpcClient::connect(url.clone(), rpc_options).map(Box::new).map(Self::Rpc);
        }
        if url.is_native() {
            return NativeClient::connect(url.clone(), options).map(Box::new).map(Self::Native);
        }
        let stream = Stream::connect(url, options.connect_timeout)?;
        let timeout = Some(options.io_timeout.max(Duration::from_millis(1)));
        stream
            .set_timeouts(timeout, timeout)
            .map_err(|source| ClientError::Unreachable { url: url.clone(), source })?;
        Ok(Self::Stream(stream))
    }
}

/// What a phase gives.
pub struct Phase {
    pub tally: Tally,
    /// From the start to the deadline, or to the last reply if that came first.
    pub seconds: f64,
    /// User and system time of this process in that span.
    pub cpu_seconds: f64,
    /// The connections that still work.
    pub connections: Vec<Connection>,
}

/// Drives all connections until their drivers are finished. `make` gets the deadline and a connection's index.
///
/// # Errors
/// Those of starting threads and poll loops.
pub fn run(
    connections: Vec<Connection>,
    time: Option<Duration>,
    stall_timeout: Duration,
    make: impl Fn(Option<Instant>, usize) -> Driver + Sync,
) -> io::Result<Phase> {
    // A client over a fabric sleeps on its own lane, so each has a thread, however many there are.
    let is_on_lanes = connections.iter().any(|connection| !matches!(connection, Connection::Stream(_)));
    let thread_count = match connections.len() {
        count if count <= THREADS_MAX || is_on_lanes => count.max(1),
        _ => thread::available_parallelism().map_or(1, |cores| cores.get()),
    };
    let share = connections.len().div_ceil(thread_count).max(1);
    let mut groups: Vec<Vec<(usize, Connection)>> = Vec::new();
    for (index, connection) in connections.into_iter().enumerate() {
        if index % share == 0 {
            groups.push(Vec::new());
        }
        groups.last_mut().expect("pushed for index 0").push((index, connection));
    }
    let (started, cpu_started) = (Instant::now(), cpu_seconds());
    let deadline = time.map(|time| started + time);
    let make = &make;
    thread::scope(|scope| {
        let mut threads = Vec::new();
        for group in groups {
            let spawned = thread::Builder::new().name("bench".to_owned()).spawn_scoped(scope, move || {
                if share == 1 {
                    let drive = |(index, connection)| drive_blocking(make(deadline, index), connection);
                    Ok(group.into_iter().map(drive).collect())
                } else {
                    let drivers = group.into_iter().filter_map(|(index, connection)| match connection {
                        Connection::Stream(stream) => Some((make(deadline, index), stream)),
                        Connection::Native(_) | Connection::Rpc(_) => None,
                    });
                    drive_many(drivers.collect(), stall_timeout)
                }
            })?;
            threads.push(spawned);
        }
        // What finishes after the deadline is not counted, and neither is the time it takes.
        let is_over = |at: Instant| deadline.is_some_and(|deadline| at >= deadline);
        while !is_over(Instant::now()) && !threads.iter().all(|thread| thread.is_finished()) {
            let pause = deadline.map_or(Duration::MAX, |deadline| deadline.saturating_duration_since(Instant::now()));
            // Seldom enough to leave no mark on what is measured.
            thread::sleep(pause.min(Duration::from_millis(20)));
        }
        let (seconds, cpu_seconds) = (started.elapsed().as_secs_f64(), cpu_seconds() - cpu_started);
        let (mut tally, mut connections) = (Tally::new(), Vec::new());
        for thread in threads {
            let driven: io::Result<Vec<_>> = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            for (part, connection) in driven? {
                tally.merge(part);
                connections.extend(connection);
            }
        }
        Ok(Phase { tally, seconds, cpu_seconds, connections })
    })
}

fn drive_blocking(mut driver: Driver, connection: Connection) -> (Tally, Option<Connection>) {
    let driven = match connection {
        Connection::Stream(stream) => drive_stream(&mut driver, stream).map(Connection::Stream),
        Connection::Native(mut client) => match native::drive(&mut driver, &mut client) {
            Ok(()) => Ok(Connection::Native(client)),
            Err(err) => Err(io::Error::other(err)),
        },
        Connection::Rpc(mut client) => match rpc::drive(&mut driver, &mut client) {
            Ok(()) => Ok(Connection::Rpc(client)),
            Err(err) => Err(io::Error::other(err)),
        },
    };
    match driven {
        Ok(connection) => (driver.into_tally(), Some(connection)),
        Err(err) => {
            driver.handle_failure(&err);
            (driver.into_tally(), None)
        }
    }
}

fn drive_stream(driver: &mut Driver, mut stream: Stream) -> io::Result<Stream> {
    loop {
        // Requests are never so many that the server could stop reading them before it has sent a reply.
        while driver.wants_write() {
            driver.write_some(&mut stream)?;
        }
        if driver.is_finished() {
            return Ok(stream);
        }
        driver.read_some(&mut stream)?;
    }
}

fn drive_many(drivers: Vec<(Driver, Stream)>, stall_timeout: Duration) -> io::Result<Vec<(Tally, Option<Connection>)>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let tasks: Vec<_> = drivers
            .into_iter()
            .map(|(driver, stream)| tokio::spawn(drive_polled(driver, stream, stall_timeout)))
            .collect();
        let mut driven = Vec::new();
        for task in tasks {
            driven.push(task.await.map_err(io::Error::other)?);
        }
        Ok(driven)
    })
}

async fn drive_polled(mut driver: Driver, stream: Stream, stall_timeout: Duration) -> (Tally, Option<Connection>) {
    let drive = async {
        let mut socket = Polled::new(stream)?;
        loop {
            let interest = match driver.wants_write() {
                true => Interest::READABLE | Interest::WRITABLE,
                false if driver.is_finished() => return socket.into_blocking(),
                false => Interest::READABLE,
            };
            let waited = tokio::time::timeout(stall_timeout, socket.ready(interest)).await;
            let ready = waited.map_err(|_| io::Error::from(ErrorKind::TimedOut))??;
            let mut turns = [Ok(()), Ok(())];
            if ready.is_writable() && interest.is_writable() {
                turns[0] = driver.write_some(&mut socket);
            }
            if ready.is_readable() {
                turns[1] = driver.read_some(&mut socket);
            }
            for turn in turns {
                match turn {
                    Err(err) if err.kind() != ErrorKind::WouldBlock => return Err(err),
                    _ => {}
                }
            }
            // A socket that is always ready would keep the thread from the others.
            tokio::task::yield_now().await;
        }
    };
    match drive.await {
        Ok(stream) => (driver.into_tally(), Some(Connection::Stream(stream))),
        Err(err) => {
            driver.handle_failure(&err);
            (driver.into_tally(), None)
        }
    }
}

/// A socket that answers `WouldBlock`, as the driver's reader and writer.
enum Polled {
    Tcp(tokio::net::TcpStream),
    Unix(tokio::net::UnixStream),
}

impl Polled {
    fn new(stream: Stream) -> io::Result<Self> {
        match stream {
            Stream::Tcp(stream) => {
                stream.set_nonblocking(true)?;
                tokio::net::TcpStream::from_std(stream).map(Self::Tcp)
            }
            Stream::Unix(stream) => {
                stream.set_nonblocking(true)?;
                tokio::net::UnixStream::from_std(stream).map(Self::Unix)
            }
        }
    }

    fn into_blocking(self) -> io::Result<Stream> {
        match self {
            Self::Tcp(stream) => {
                let stream = stream.into_std()?;
                stream.set_nonblocking(false)?;
                Ok(Stream::Tcp(stream))
            }
            Self::Unix(stream) => {
                let stream = stream.into_std()?;
                stream.set_nonblocking(false)?;
                Ok(Stream::Unix(stream))
            }
        }
    }

    async fn ready(&self, interest: Interest) -> io::Result<tokio::io::Ready> {
        match self {
            Self::Tcp(stream) => stream.ready(interest).await,
            Self::Unix(stream) => stream.ready(interest).await,
        }
    }
}

impl Read for Polled {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.try_read(into),
            Self::Unix(stream) => stream.try_read(into),
        }
    }
}

impl Write for Polled {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(from)])
    }

    fn write_vectored(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.try_write_vectored(from),
            Self::Unix(stream) => stream.try_write_vectored(from),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// User and system time of this process so far.
fn cpu_seconds() -> f64 {
    // Linux reports these in hundredths of a second to every process, whatever its own tick is.
    const TICKS_PER_SECOND: f64 = 100.0;
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The name, in parentheses, may hold anything; the numbers follow the last one.
    let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
    let ticks: u64 = fields.split_whitespace().skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum();
    ticks as f64 / TICKS_PER_SECOND
}

/// Median round trip of 64 octets between two threads over loopback TCP, in microseconds: how fast this machine is now.
///
/// # Errors
/// Those of the sockets.
pub fn pingpong_64_p50_us() -> io::Result<f64> {
    const WARM_UP_COUNT: usize = 200;
    const COUNT: usize = 2_000;
    let listener = TcpListener::bind(("127.0.0.1", 0))?;
    let mut near = TcpStream::connect(listener.local_addr()?)?;
    let (mut far, _) = listener.accept()?;
    near.set_nodelay(true)?;
    far.set_nodelay(true)?;
    let echo = thread::spawn(move || -> io::Result<()> {
        let mut octets = [0; 64];
        for _ in 0..WARM_UP_COUNT + COUNT {
            far.read_exact(&mut octets)?;
            far.write_all(&octets)?;
        }
        Ok(())
    });
    let mut times = Histogram::new();
    let mut octets = [0x55; 64];
    for round in 0..WARM_UP_COUNT + COUNT {
        let sent_at = Instant::now();
        near.write_all(&octets)?;
        near.read_exact(&mut octets)?;
        if round >= WARM_UP_COUNT {
            times.record(sent_at.elapsed());
        }
    }
    echo.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
    Ok(times.quantile_us(0.5))
}
