//! The connection manager: identifiers, and the channel on which their events come.
//!
//! Every event is copied and acknowledged before anybody sees it, so destroying an identifier never waits.

use std::ffi::{c_int, c_void};
use std::io;
use std::mem::offset_of;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::{self, NonNull, addr_of_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::time::Duration;

use ibverbs_sys::{ibv_context, ibv_qp, ibv_qp_init_attr};

use super::device::{ProtectionDomain, set_nonblocking};
use super::sys::{self, event};

/// What both sides of a connection agree on beside their private data.
#[derive(Clone, Copy, Debug)]
pub(super) struct Terms {
    /// Reads of the peer that this side serves at a time.
    pub(super) reads_in: u8,
    /// Reads of this side that the peer serves at a time.
    pub(super) reads_out: u8,
}

impl Terms {
    /// What an event says of the peer, seen from here: its initiator depth is the Reads to be served, its responder resources
    /// limit ours.
    fn said(connection: &sys::ConnectionParameters) -> Self {
        Self { reads_in: connection.responder_resources, reads_out: connection.initiator_depth }
    }

    /// The peer serves no Reads.
    pub(super) fn is_deaf(self) -> bool {
        self.reads_out == 0
    }
}

/// What happened to an identifier.
#[derive(Debug)]
pub(super) enum Happened {
    AddressResolved,
    RouteResolved,
    /// A peer asks: its identifier, what it can do as seen from here, what it says.
    Request {
        id: Identifier,
        terms: Terms,
        private_data: Vec<u8>,
    },
    Established {
        terms: Terms,
        private_data: Vec<u8>,
    },
    Rejected {
        status: i32,
        private_data: Vec<u8>,
    },
    Failed {
        what: &'static str,
        status: i32,
    },
    Disconnected,
    /// The device is about to go.
    Removed,
}

/// An event channel. Never blocks.
#[derive(Debug)]
pub(super) struct EventChannel {
    raw: NonNull<sys::EventChannel>,
}

// SAFETY: librdmacm may be called by any thread with the same channel.
unsafe impl Send for EventChannel {}
// SAFETY: as above.
unsafe impl Sync for EventChannel {}

impl EventChannel {
    pub(super) fn new() -> io::Result<Self> {
        // SAFETY: no arguments.
        let raw = unsafe { sys::rdma_create_event_channel() };
        let channel = Self { raw: NonNull::new(raw).ok_or_else(io::Error::last_os_error)? };
        set_nonblocking(channel.as_fd())?;
        Ok(channel)
    }

    /// The next event and the token of the identifier it belongs to: of a request, that of the listener.
    pub(super) fn poll(self: &Arc<Self>) -> io::Result<Option<(u64, Happened)>> {
        loop {
            let mut raw = ptr::null_mut();
            // SAFETY: a live channel, and a pointer valid for writing.
            if unsafe { sys::rdma_get_cm_event(self.raw.as_ptr(), &mut raw) } != 0 {
                let error = io::Error::last_os_error();
                return if error.kind() == io::ErrorKind::WouldBlock { Ok(None) } else { Err(error) };
            }
            // SAFETY: an event that is not acknowledged is valid, and so are the identifiers it names.
            let (kind, status, token, request, connection) = unsafe {
                let seen = &*raw;
                let of = if seen.kind == event::CONNECT_REQUEST { seen.listen_id } else { seen.id };
                (seen.kind, seen.status, token_of(of), seen.id, seen.connection)
            };
            let carries_data = matches!(kind, event::CONNECT_REQUEST | event::ESTABLISHED | event::REJECTED);
            let mut private_data = Vec::new();
            if carries_data && !connection.private_data.is_null() {
                // SAFETY: for these kinds the union holds this arm, whose data lies in the event.
                private_data.extend_from_slice(unsafe {
                    std::slice::from_raw_parts(connection.private_data.cast(), connection.private_data_len.into())
                });
            }
            // SAFETY: it came from `rdma_get_cm_event` and is acknowledged once; nothing of it is used afterwards.
            let acknowledged = unsafe { sys::rdma_ack_cm_event(raw) };
            debug_assert_eq!(acknowledged, 0);
            let terms = Terms::said(&connection);
            let happened = match kind {
                event::ADDR_RESOLVED => Happened::AddressResolved,
                event::ROUTE_RESOLVED => Happened::RouteResolved,
                event::CONNECT_REQUEST => {
                    let Some(raw) = NonNull::new(request) else { continue };
                    let id = Identifier { raw, channel: Arc::clone(self) };
                    Happened::Request { id, terms, private_data }
                }
                event::ESTABLISHED => Happened::Established { terms, private_data },
                event::REJECTED => Happened::Rejected { status, private_data },
                event::ADDR_ERROR => Happened::Failed { what: "the address was not resolved", status },
                event::ROUTE_ERROR => Happened::Failed { what: "no route was found", status },
                event::CONNECT_ERROR => Happened::Failed { what: "the connection failed", status },
                event::UNREACHABLE => Happened::Failed { what: "the peer was not reached", status },
                event::DISCONNECTED | event::TIMEWAIT_EXIT => Happened::Disconnected,
                event::DEVICE_REMOVAL => Happened::Removed,
                // Changes of addresses and multicast do not concern connections.
                _ => continue,
            };
            return Ok(Some((token, happened)));
        }
    }
}

impl AsFd for EventChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is the channel's and open as long as it lives.
        unsafe { BorrowedFd::borrow_raw(self.raw.as_ref().fd) }
    }
}

impl Drop for EventChannel {
    fn drop(&mut self) {
        // SAFETY: made by `new` and destroyed once; no identifier is left, for each holds an `Arc` of this.
        unsafe { sys::rdma_destroy_event_channel(self.raw.as_ptr()) };
    }
}

/// An identifier: a listener, or one side of a connection. Its queue pair, if it has one, is destroyed with it.
#[derive(Debug)]
pub(super) struct Identifier {
    raw: NonNull<sys::Identifier>,
    channel: Arc<EventChannel>,
}

// SAFETY: librdmacm may be called by any thread with the same identifier; it is destroyed by its one owner.
unsafe impl Send for Identifier {}
// SAFETY: as above; methods that change what others read take `&mut self`, the token is read and written as an atomic.
unsafe impl Sync for Identifier {}

impl Identifier {
    pub(super) fn new(channel: &Arc<EventChannel>, token: u64) -> io::Result<Self> {
        let mut raw = ptr::null_mut();
        // SAFETY: a live channel and a pointer valid for writing; the context is a number that nobody follows.
        check(unsafe {
            sys::rdma_create_id(channel.raw.as_ptr(), &mut raw, token as *mut c_void, sys::PORT_SPACE_TCP)
        })?;
        Ok(Self { raw: NonNull::new(raw).ok_or(io::ErrorKind::OutOfMemory)?, channel: Arc::clone(channel) })
    }

    /// Another one at the same local address, and so of the same device, with a port of its own.
    pub(super) fn beside(&self, channel: &Arc<EventChannel>, token: u64) -> io::Result<Self> {
        let own = Self::new(channel, token)?;
        // SAFETY: a live identifier. librdmacm writes this field when it is bound or made, which is over when this is asked.
        let mut address = unsafe { self.raw.as_ref().route.addresses.source };
        set_port(&mut address, 0);
        // SAFETY: a live identifier, and an address that is only read.
        check(unsafe { sys::rdma_bind_addr(own.raw.as_ptr(), ptr::from_mut(&mut address).cast()) })?;
        Ok(own)
    }

    /// Events carry `token` from now on.
    pub(super) fn set_token(&self, token: u64) {
        // SAFETY: the identifier is alive, and librdmacm itself never touches this field after creation.
        let context = unsafe { AtomicPtr::from_ptr(addr_of_mut!((*self.raw.as_ptr()).context)) };
        context.store(token as *mut c_void, Ordering::Release);
    }

    /// Events come on `channel` from now on.
    pub(super) fn migrate(&mut self, channel: &Arc<EventChannel>) -> io::Result<()> {
        if !Arc::ptr_eq(channel, &self.channel) {
            // SAFETY: identifier and channel are alive.
            check(unsafe { sys::rdma_migrate_id(self.raw.as_ptr(), channel.raw.as_ptr()) })?;
            self.channel = Arc::clone(channel);
        }
        Ok(())
    }

    /// Takes a local address; one of a device binds the identifier to that device.
    pub(super) fn bind(&self, address: SocketAddr) -> io::Result<()> {
        let address = socket2::SockAddr::from(address);
        // SAFETY: a live identifier, and an address that is only read.
        check(unsafe { sys::rdma_bind_addr(self.raw.as_ptr(), address.as_ptr().cast_mut().cast()) })
    }

    pub(super) fn listen(&self, backlog: c_int) -> io::Result<()> {
        // SAFETY: a live identifier.
        check(unsafe { sys::rdma_listen(self.raw.as_ptr(), backlog) })
    }

    /// The port it is bound to.
    pub(super) fn port(&self) -> u16 {
        // SAFETY: a live identifier.
        u16::from_be(unsafe { sys::rdma_get_src_port(self.raw.as_ptr()) })
    }

    /// Where the other side is, once it is known.
    pub(super) fn peer(&self) -> Option<SocketAddr> {
        // SAFETY: a live identifier. librdmacm writes this field when it handles a request or resolves an address, which
        // is over when this is asked.
        address_of(unsafe { &self.raw.as_ref().route.addresses.destination })
    }

    pub(super) fn resolve_address(&self, peer: SocketAddr, timeout: Duration) -> io::Result<()> {
        let peer = socket2::SockAddr::from(peer);
        let (raw, timeout_ms) = (self.raw.as_ptr(), millis(timeout));
        // SAFETY: a live identifier, no source address, and a destination that is only read.
        check(unsafe { sys::rdma_resolve_addr(raw, ptr::null_mut(), peer.as_ptr().cast_mut().cast(), timeout_ms) })
    }

    pub(super) fn resolve_route(&self, timeout: Duration) -> io::Result<()> {
        // SAFETY: a live identifier.
        check(unsafe { sys::rdma_resolve_route(self.raw.as_ptr(), millis(timeout)) })
    }

    /// The context of its device, if it is bound to one.
    pub(super) fn context(&self) -> Option<NonNull<ibv_context>> {
        // SAFETY: a live identifier; the field is written once, when it is bound or made.
        NonNull::new(unsafe { self.raw.as_ref().verbs })
    }

    /// Makes its queue pair; what was granted is written back.
    ///
    /// # Safety
    /// The completion queues named stay alive until the queue pair is destroyed.
    pub(super) unsafe fn create_queue_pair(
        &mut self,
        pd: &ProtectionDomain,
        attributes: &mut ibv_qp_init_attr,
    ) -> io::Result<NonNull<ibv_qp>> {
        // SAFETY: identifier and protection domain are alive and of one device, or this is refused.
        check(unsafe { sys::rdma_create_qp(self.raw.as_ptr(), pd.as_ptr(), attributes) })?;
        // SAFETY: as above.
        NonNull::new(unsafe { self.raw.as_ref().qp }).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
    }

    /// Destroys its queue pair. Afterwards the device touches no memory for it.
    pub(super) fn destroy_queue_pair(&mut self) {
        // SAFETY: a live identifier.
        if !unsafe { self.raw.as_ref().qp }.is_null() {
            // SAFETY: it has a queue pair.
            unsafe { sys::rdma_destroy_qp(self.raw.as_ptr()) };
        }
    }

    pub(super) fn connect(&self, terms: Terms, private_data: &[u8]) -> io::Result<()> {
        let mut parameters = parameters(terms, private_data);
        // SAFETY: a live identifier with a queue pair; the parameters and their data are copied by the call.
        check(unsafe { sys::rdma_connect(self.raw.as_ptr(), &mut parameters) })
    }

    pub(super) fn accept(&self, terms: Terms, private_data: &[u8]) -> io::Result<()> {
        let mut parameters = parameters(terms, private_data);
        // SAFETY: as for `connect`.
        check(unsafe { sys::rdma_accept(self.raw.as_ptr(), &mut parameters) })
    }

    pub(super) fn reject(&self, private_data: &[u8]) -> io::Result<()> {
        let len = u8::try_from(private_data.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        // SAFETY: a live identifier; the data is copied by the call.
        check(unsafe { sys::rdma_reject(self.raw.as_ptr(), private_data.as_ptr().cast(), len) })
    }

    pub(super) fn disconnect(&self) -> io::Result<()> {
        // SAFETY: a live identifier.
        check(unsafe { sys::rdma_disconnect(self.raw.as_ptr()) })
    }
}

impl Drop for Identifier {
    fn drop(&mut self) {
        self.destroy_queue_pair();
        // SAFETY: it is destroyed once, by its owner. Events of it are acknowledged in `EventChannel::poll`, without
        // waiting for anybody.
        if let Err(error) = check(unsafe { sys::rdma_destroy_id(self.raw.as_ptr()) }) {
            tracing::error!(%error, "an identifier was not given back");
        }
    }
}

/// # Safety
/// `id` is alive.
unsafe fn token_of(id: *mut sys::Identifier) -> u64 {
    // SAFETY: the caller's promise; every other access is atomic too.
    unsafe { AtomicPtr::from_ptr(addr_of_mut!((*id).context)) }.load(Ordering::Acquire) as u64
}

fn parameters(terms: Terms, private_data: &[u8]) -> sys::ConnectionParameters {
    sys::ConnectionParameters {
        private_data: private_data.as_ptr().cast(),
        private_data_len: u8::try_from(private_data.len()).unwrap_or(u8::MAX),
        responder_resources: terms.reads_in,
        initiator_depth: terms.reads_out,
        flow_control: 0,
        // Both ends use it. With 7, rxe tries for ever to reach a queue pair that is gone.
        retry_count: 6,
        // A Send without a Receive is a fault of the peer, not a reason to try again.
        rnr_retry_count: 0,
        srq: 0,
        qp_num: 0,
    }
}

/// The port lies at one place in addresses of either family.
fn set_port(storage: &mut libc::sockaddr_storage, port: u16) {
    const _: () = assert!(offset_of!(libc::sockaddr_in, sin_port) == offset_of!(libc::sockaddr_in6, sin6_port));
    // SAFETY: the storage is large and aligned enough for either, and every value is a port.
    unsafe { (*ptr::from_mut(storage).cast::<libc::sockaddr_in>()).sin_port = port.to_be() };
}

fn address_of(storage: &libc::sockaddr_storage) -> Option<SocketAddr> {
    match i32::from(storage.ss_family) {
        libc::AF_INET => {
            // SAFETY: the family says what the storage, which is large and aligned enough, holds.
            let found = unsafe { &*ptr::from_ref(storage).cast::<libc::sockaddr_in>() };
            let ip = Ipv4Addr::from(u32::from_be(found.sin_addr.s_addr));
            Some(SocketAddrV4::new(ip, u16::from_be(found.sin_port)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: as above.
            let found = unsafe { &*ptr::from_ref(storage).cast::<libc::sockaddr_in6>() };
            let ip = Ipv6Addr::from(found.sin6_addr.s6_addr);
            Some(SocketAddrV6::new(ip, u16::from_be(found.sin6_port), 0, found.sin6_scope_id).into())
        }
        _ => None,
    }
}

fn millis(timeout: Duration) -> c_int {
    c_int::try_from(timeout.as_millis()).unwrap_or(c_int::MAX).max(1)
}

/// librdmacm returns -1 and sets errno.
fn check(code: c_int) -> io::Result<()> {
    if code == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// rdma_cm turns round what the peer says of itself: what is served by one is asked by the other.
    #[test]
    fn who_serves_no_reads_is_deaf_and_who_never_reads_is_not() {
        for (serves, reads, is_deaf) in [(128, 0, false), (128, 16, false), (0, 16, true), (0, 0, true)] {
            let own = parameters(Terms { reads_in: serves, reads_out: reads }, b"");
            assert_eq!((own.responder_resources, own.initiator_depth), (serves, reads));
            let seen = sys::ConnectionParameters { responder_resources: reads, initiator_depth: serves, ..own };
            let terms = Terms::said(&seen);
            assert_eq!((terms.reads_in, terms.reads_out, terms.is_deaf()), (reads, serves, is_deaf));
        }
    }
}
