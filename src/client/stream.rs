//! A connected socket, TCP or Unix, behind one type.

use std::io::{self, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::net::{TcpStream, ToSocketAddrs};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use socket2::{Domain, SockAddr, SockRef, Socket, Type};

use super::{ClientError, ServerUrl};

/// A connection to a server, blocking unless told otherwise.
#[derive(Debug)]
pub enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Stream {
    /// Connects within `timeout`; every address of a name is tried in turn, each with the whole of it.
    ///
    /// # Errors
    /// [`ClientError::Unreachable`] with the last address's error.
    pub fn connect(url: &ServerUrl, timeout: Duration) -> Result<Self, ClientError> {
        let connected = match url {
            ServerUrl::Memcache { host, port } => tcp(host, *port, timeout).map(Self::Tcp),
            ServerUrl::MemcacheUnix { path } => Socket::new(Domain::UNIX, Type::STREAM, None).and_then(|socket| {
                // A listener whose backlog is full makes a plain connect wait without end.
                socket.connect_timeout(&SockAddr::unix(path)?, timeout)?;
                Ok(Self::Unix(socket.into()))
            }),
            ServerUrl::NativeIwarp { .. } | ServerUrl::NativeVerbs { .. } | ServerUrl::Native { .. } => {
                Err(io::Error::new(io::ErrorKind::Unsupported, "no stream of octets leads to a native server"))
            }
            ServerUrl::RpcIwarp { .. } | ServerUrl::RpcVerbs { .. } | ServerUrl::Rpc { .. } => {
                Err(io::Error::new(io::ErrorKind::Unsupported, "no stream of octets leads to an RPC server"))
            }
        };
        connected.map_err(|source| ClientError::Unreachable { url: url.clone(), source })
    }

    /// Bounds each read and each write; `None` waits for ever. One of them returns `WouldBlock` when its time is up.
    ///
    /// # Errors
    /// As `setsockopt` does.
    pub fn set_timeouts(&self, read: Option<Duration>, write: Option<Duration>) -> io::Result<()> {
        let socket = self.socket();
        socket.set_read_timeout(read)?;
        socket.set_write_timeout(write)
    }

    /// Whether octets (or the end of the stream, or an error) wait to be read; never blocks.
    pub fn has_input(&self) -> bool {
        let mut octet = [MaybeUninit::uninit(); 1];
        match self.socket().recv_with_flags(&mut octet, libc::MSG_PEEK | libc::MSG_DONTWAIT) {
            Ok(_) => true,
            Err(err) => !matches!(err.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted),
        }
    }

    fn socket(&self) -> SockRef<'_> {
        match self {
            Self::Tcp(stream) => SockRef::from(stream),
            Self::Unix(stream) => SockRef::from(stream),
        }
    }
}

fn tcp(host: &str, port: u16, timeout: Duration) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for address in (host, port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, timeout) {
            Ok(stream) => {
                stream.set_nodelay(true)?;
                return Ok(stream);
            }
            Err(err) => last = err,
        }
    }
    Err(last)
}

impl Read for Stream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.read(into),
            Self::Unix(stream) => stream.read(into),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.write(from),
            Self::Unix(stream) => stream.write(from),
        }
    }

    fn write_vectored(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.write_vectored(from),
            Self::Unix(stream) => stream.write_vectored(from),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
