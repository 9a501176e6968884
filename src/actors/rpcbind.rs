//! Registration at rpcbind: the stream, the clock and the log around [`Session`], which decides. No actor: it happens once
//! when a daemon starts and once when it stops, and nobody sends it anything.

use crate::config;
use crate::fabric::Address;
use crate::programs::rpcbind::{Fault, PORT, Registered, SOCKET, Service, Session, Task, Transport, shown};
use crate::programs::{bulkhead, mount, nfs};
use crate::wire::onc_rpc::Xid;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::timeout;

/// How long one conversation may take.
pub const PATIENCE: Duration = Duration::from_secs(5);

/// Where rpcbind is.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Place {
    /// It tells by its socket who calls, and takes SET and UNSET there whatever its options.
    pub socket: PathBuf,
    /// Tried where nobody listens at the socket. Over TCP it takes them from this host alone, and knows no owner.
    pub tcp: Option<SocketAddr>,
    /// Bound on a conversation.
    pub patience: Duration,
}

impl Place {
    /// By its socket; where that is the usual one, by its usual port of this host as well. A socket that somebody named
    /// is meant.
    pub fn at(socket: &Path) -> Self {
        let tcp = (socket == Path::new(SOCKET)).then(|| SocketAddr::from((Ipv4Addr::LOCALHOST, PORT)));
        Self { socket: socket.to_owned(), tcp, patience: PATIENCE }
    }
}

/// Why rpcbind was not told, or not asked.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RpcbindError {
    #[error(
        "it does not run ({tried}): start it (Debian's package is rpcbind), or do without --rpcbind and rpc.rpcbind"
    )]
    Absent { tried: String },
    #[error("{place}: {source}")]
    Lost { place: String, source: io::Error },
    #[error("{place}: no answer within {patience:?}")]
    Silent { place: String, patience: Duration },
    #[error("{place}: {fault}")]
    Fault { place: String, fault: Fault },
}

/// What is registered for RPC doors at `addresses`: the first of each family, and the addresses left out. rpcbind keeps one
/// address for each netid; what is no IP address has none.
pub fn services(addresses: &[Address]) -> (Vec<Service>, Vec<&Address>) {
    let (mut services, mut left_out) = (Vec::<Service>::new(), Vec::new());
    for address in addresses {
        let service = match address {
            Address::Socket(socket) => {
                Service::new(bulkhead::PROGRAM_NUMBER, bulkhead::VERSION, Transport::Rdma, socket)
            }
            Address::Name(_) => {
                left_out.push(address);
                continue;
            }
        };
        match services.iter().any(|listed| listed.netid == service.netid) {
            true => left_out.push(address),
            false => services.push(service),
        }
    }
    (services, left_out)
}

/// What is registered for NFS doors on TCP at `addresses`: NFS and MOUNT, as [`services`].
pub fn nfs_services(addresses: &[SocketAddr]) -> (Vec<Service>, Vec<&SocketAddr>) {
    let (mut services, mut left_out) = (Vec::<Service>::new(), Vec::new());
    for address in addresses {
        let service = |program, version| Service::new(program, version, Transport::Tcp, address);
        let both = [service(nfs::PROGRAM_NUMBER, nfs::VERSION), service(mount::PROGRAM_NUMBER, mount::VERSION)];
        match services.iter().any(|listed| listed.netid == both[0].netid) {
            true => left_out.push(address),
            false => services.extend(both),
        }
    }
    (services, left_out)
}

/// Entries at rpcbind that lead to this process. They stay there unless [`Registration::withdraw`] is awaited: a drop
/// could not wait for rpcbind's answer.
#[derive(Debug)]
pub struct Registration {
    place: Place,
    entries: Vec<Registered>,
}

/// Registers all of `services`, or none.
///
/// # Errors
/// [`RpcbindError`]; what was registered until then is taken back as far as rpcbind lets itself be asked.
pub async fn register(place: Place, services: Vec<Service>) -> Result<Registration, RpcbindError> {
    let mut session = session(Task::Register, unowned(services));
    if let Err(error) = hold(&place, &mut session).await {
        let left = session.left_behind();
        if !left.is_empty() {
            Registration { place, entries: left }.withdraw().await;
        }
        return Err(error);
    }
    for Registered { service, owner } in session.services() {
        let owner = shown(owner.as_deref().unwrap_or_default());
        tracing::info!(%service, owner, "registered at rpcbind");
    }
    Ok(Registration { place, entries: session.services().to_vec() })
}

/// Asks whether [`register`] would find the places of `services` free; changes nothing.
///
/// # Errors
/// [`RpcbindError`].
pub async fn look(place: &Place, services: Vec<Service>) -> Result<(), RpcbindError> {
    hold(place, &mut session(Task::Look, unowned(services))).await
}

impl Registration {
    /// What rpcbind has, with the owners it wrote down.
    pub fn entries(&self) -> &[Registered] {
        &self.entries
    }

    /// Takes back what is still ours. A daemon that stops cannot do more than say so if that fails.
    pub async fn withdraw(self) {
        let Self { place, entries } = self;
        match hold(&place, &mut session(Task::Withdraw, entries)).await {
            Ok(()) => tracing::info!("nothing of this daemon is registered at rpcbind any more"),
            Err(error) => tracing::warn!(%error, "entries may be left at rpcbind"),
        }
    }
}

fn unowned(services: Vec<Service>) -> Vec<Registered> {
    services.into_iter().map(|service| Registered { service, owner: None }).collect()
}

fn session(task: Task, services: Vec<Registered>) -> Session {
    // Each has a stream of its own, so any xid will do.
    Session::new(task, services, config::user_id().to_string(), Xid(std::process::id()))
}

/// Holds the whole conversation, within the patience of `place`.
async fn hold(place: &Place, session: &mut Session) -> Result<(), RpcbindError> {
    let mut talks_to = place.socket.display().to_string();
    let held = timeout(place.patience, async {
        let absent =
            |error: &io::Error| matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused);
        let at_socket = match UnixStream::connect(&place.socket).await {
            Ok(stream) => return talk(stream, session).await,
            Err(error) if absent(&error) => error,
            Err(error) => return Err(Broken::Lost(error)),
        };
        let mut tried = format!("{talks_to}: {at_socket}");
        let Some(tcp) = place.tcp else { return Err(Broken::Absent(tried)) };
        talks_to = tcp.to_string();
        match TcpStream::connect(tcp).await {
            Ok(stream) => talk(stream, session).await,
            Err(error) => {
                tried.push_str(&format!("; {tcp}: {error}"));
                Err(Broken::Absent(tried))
            }
        }
    })
    .await;
    let place_text = talks_to;
    match held {
        Ok(Ok(())) => Ok(()),
        Ok(Err(Broken::Absent(tried))) => Err(RpcbindError::Absent { tried }),
        Ok(Err(Broken::Lost(source))) => Err(RpcbindError::Lost { place: place_text, source }),
        Ok(Err(Broken::Fault(fault))) => Err(RpcbindError::Fault { place: place_text, fault }),
        Err(_) => Err(RpcbindError::Silent { place: place_text, patience: place.patience }),
    }
}

/// As [`RpcbindError`], before it is known where.
enum Broken {
    Absent(String),
    Lost(io::Error),
    Fault(Fault),
}

async fn talk(mut stream: impl AsyncRead + AsyncWrite + Unpin, session: &mut Session) -> Result<(), Broken> {
    let mut octets = vec![0; 4096];
    while !session.is_done() {
        if let Some(call) = session.poll_transmit() {
            stream.write_all(&call).await.map_err(Broken::Lost)?;
        }
        match stream.read(&mut octets).await.map_err(Broken::Lost)? {
            0 => return Err(Broken::Lost(io::Error::new(io::ErrorKind::UnexpectedEof, "it hung up"))),
            len => session.handle_octets(&octets[..len]).map_err(Broken::Fault)?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_door_of_each_family_is_registered() {
        let socket = |text: &str| Address::Socket(text.parse().unwrap());
        let addresses = [
            Address::Name("loopback".to_owned()),
            socket("[::1]:20049"),
            socket("10.0.0.1:20049"),
            socket("10.0.0.2:20049"),
        ];
        let (services, left_out) = services(&addresses);
        let shown: Vec<_> = services.iter().map(|service| (service.netid, service.address.as_str())).collect();
        assert_eq!(shown, [("rdma6", "::1.78.81"), ("rdma", "10.0.0.1.78.81")]);
        assert!(services.iter().all(|service| (service.program, service.version) == (0x2042_4c4b, 1)));
        assert_eq!(left_out, [&addresses[0], &addresses[3]]);
    }

    #[test]
    fn nfs_and_mount_are_registered_at_one_door_of_each_family() {
        let addresses =
            ["10.0.0.1:2049", "[::1]:2050", "10.0.0.2:2049"].map(|text| text.parse::<SocketAddr>().unwrap());
        let (services, left_out) = nfs_services(&addresses);
        let shown: Vec<_> = services.iter().map(Service::to_string).collect();
        assert_eq!(
            shown,
            [
                "program 100003 version 3 netid tcp at 10.0.0.1.8.1",
                "program 100005 version 3 netid tcp at 10.0.0.1.8.1",
                "program 100003 version 3 netid tcp6 at ::1.8.2",
                "program 100005 version 3 netid tcp6 at ::1.8.2",
            ]
        );
        assert_eq!(left_out, [&addresses[2]]);
    }

    #[test]
    fn a_port_is_tried_only_beside_the_usual_socket() {
        assert_eq!(Place::at(Path::new("/run/rpcbind.sock")).tcp, Some("127.0.0.1:111".parse().unwrap()));
        assert_eq!(Place::at(Path::new("/run/other.sock")).tcp, None);
    }
}
