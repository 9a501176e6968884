//! Devices, and what is made on them. Everything holds an `Arc` of what it was made from, so that nothing ends before
//! what depends on it, and is given back when dropped.

use std::ffi::{CStr, c_int, c_void};
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ibverbs::{ibv_access_flags, ibv_wc};
use ibverbs_sys::{self as verbs, ibv_context, ibv_cq, ibv_mr, ibv_mw, ibv_pd};

use super::super::region::shared::SharedSpan;
use super::super::{Access, QpNum};
use super::cm::{EventChannel, Identifier};
use super::sys;

/// Completions taken from one queue at a time.
pub(super) const POLL_COUNT_MAX: usize = 16;

/// What a device is and can do.
struct Abilities {
    name: String,
    is_iwarp: bool,
    has_windows: bool,
    send_depth_max: usize,
    completion_depth_max: usize,
    read_depth_max: usize,
}

impl Abilities {
    /// # Safety
    /// The context is open.
    unsafe fn of(context: NonNull<ibv_context>) -> io::Result<Self> {
        // SAFETY: plain numbers, for which zero is a value.
        let mut limits: verbs::ibv_device_attr = unsafe { std::mem::zeroed() };
        // SAFETY: the caller's promise, and `limits` is valid for writing.
        check(unsafe { verbs::ibv_query_device(context.as_ptr(), &mut limits) })?;
        // SAFETY: an open context points to its device, whose name ends with a zero.
        let (name, transport, alloc_mw) = unsafe {
            let device = context.as_ref().device;
            let name = CStr::from_ptr(verbs::ibv_get_device_name(device));
            (name.to_string_lossy().into_owned(), (*device).transport_type, context.as_ref().ops.alloc_mw)
        };
        let type_2 = verbs::IBV_DEVICE_MEM_WINDOW_TYPE_2A | verbs::IBV_DEVICE_MEM_WINDOW_TYPE_2B;
        let positive = |number: c_int| usize::try_from(number).unwrap_or(0);
        Ok(Self {
            name,
            is_iwarp: transport == verbs::IBV_TRANSPORT_IWARP,
            has_windows: limits.device_cap_flags & type_2 != 0 && limits.max_mw > 0 && alloc_mw.is_some(),
            send_depth_max: positive(limits.max_qp_wr),
            completion_depth_max: positive(limits.max_cqe),
            read_depth_max: positive(limits.max_qp_rd_atom.min(limits.max_qp_init_rd_atom)),
        })
    }

    fn describe(&self) {
        let transport = if self.is_iwarp { "iWARP" } else { "InfiniBand or RoCE" };
        let invalidation = match self.has_windows {
            true => "memory windows of type 2, bound for each region that the peer may give back",
            false => "a registration for each region",
        };
        tracing::info!(device = self.name, transport, invalidation, "RDMA device");
    }
}

/// Writes what each device of this machine can do into the log. None is kept open.
///
/// # Errors
/// `NotFound` if there is none, else what libibverbs says.
pub(super) fn describe_all() -> io::Result<()> {
    let none = || io::Error::new(io::ErrorKind::NotFound, "this machine has no RDMA device");
    let mut count = 0;
    // SAFETY: `count` is valid for writing.
    let list = unsafe { verbs::ibv_get_device_list(&mut count) };
    let Some(list) = NonNull::new(list) else {
        // Without any, libibverbs says "function not implemented".
        let error = io::Error::last_os_error();
        return Err(if error.raw_os_error() == Some(libc::ENOSYS) { none() } else { error });
    };
    let count = usize::try_from(count).unwrap_or(0);
    for at in 0..count {
        // SAFETY: the list has so many devices, and they live until it is freed.
        let context = NonNull::new(unsafe { verbs::ibv_open_device(*list.as_ptr().add(at)) });
        let Some(context) = context else { continue };
        // SAFETY: just opened.
        match unsafe { Abilities::of(context) } {
            Ok(abilities) => abilities.describe(),
            Err(error) => tracing::warn!(%error, "an RDMA device does not say what it can do"),
        }
        // SAFETY: opened above, and nothing was made of it.
        report("a context", unsafe { verbs::ibv_close_device(context.as_ptr()) });
    }
    // SAFETY: it came from `ibv_get_device_list`, and is freed once.
    unsafe { verbs::ibv_free_device_list(list.as_ptr()) };
    if count == 0 { Err(none()) } else { Ok(()) }
}

/// One RDMA device that a lane uses.
///
/// librdmacm opened it, and keeps it open for as long as an identifier is bound to it; `anchor` is one. A device that was
/// removed is gone only when nobody has it open any more: until then, whoever removes it may have to wait.
pub(super) struct Device {
    context: NonNull<ibv_context>,
    abilities: Abilities,
    /// Names the anchor in events.
    token: u64,
    was_removed: AtomicBool,
    /// `Some` until the end.
    anchor: Option<Identifier>,
}

// SAFETY: libibverbs may be called by any thread with the same context, which the anchor keeps open.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl Device {
    pub(super) fn name(&self) -> &str {
        &self.abilities.name
    }

    /// RDMAP's rules hold: the sink of a Read is opened to the peer, and any key of a connection may be invalidated by it.
    pub(super) fn is_iwarp(&self) -> bool {
        self.abilities.is_iwarp
    }

    /// Memory windows of type 2 can be bound and invalidated by requests.
    pub(super) fn has_windows(&self) -> bool {
        self.abilities.has_windows
    }

    /// Requests of one queue.
    pub(super) fn depth_max(&self) -> usize {
        self.abilities.send_depth_max
    }

    /// Completions of one queue.
    pub(super) fn completion_depth_max(&self) -> usize {
        self.abilities.completion_depth_max
    }

    /// Reads outstanding in one direction.
    pub(super) fn read_depth_max(&self) -> usize {
        self.abilities.read_depth_max
    }

    /// Numbers of the queue pairs (their contexts) that the device says a peer has misused since the last call.
    pub(super) fn poll_faults(&self, mut fault: impl FnMut(u64, &'static CStr)) {
        // SAFETY: an open context. The descriptor belongs to it and only its flag is changed.
        let fd = unsafe { BorrowedFd::borrow_raw(self.context.as_ref().async_fd) };
        if set_nonblocking(fd).is_err() {
            return;
        }
        loop {
            // SAFETY: plain numbers and a pointer, for which zero is a value.
            let mut event: verbs::ibv_async_event = unsafe { std::mem::zeroed() };
            // SAFETY: an open context, and `event` is valid for writing.
            if unsafe { verbs::ibv_get_async_event(self.context.as_ptr(), &mut event) } != 0 {
                return;
            }
            let of_qp = matches!(
                event.event_type,
                verbs::IBV_EVENT_QP_FATAL | verbs::IBV_EVENT_QP_REQ_ERR | verbs::IBV_EVENT_QP_ACCESS_ERR
            );
            if of_qp {
                // SAFETY: the event names a queue pair, which cannot be destroyed before the event is acknowledged. Its
                // context is the number it was created with.
                let number = unsafe { (*event.element.qp).qp_context } as u64;
                // SAFETY: a static text of libibverbs for every number.
                fault(number, unsafe { CStr::from_ptr(verbs::ibv_event_type_str(event.event_type)) });
            }
            // SAFETY: the event came from `ibv_get_async_event` and is acknowledged once.
            unsafe { verbs::ibv_ack_async_event(&mut event) };
        }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        drop(self.anchor.take());
        if self.was_removed.load(Ordering::Relaxed) {
            forget_removed();
        }
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device").field("name", &self.name()).field("is_iwarp", &self.is_iwarp()).finish_non_exhaustive()
    }
}

/// librdmacm closes devices that were removed when it lists those that are there, and at no other time (rdma-core 44). With
/// none left it does not.
fn forget_removed() {
    let mut count = 0;
    // SAFETY: `count` is valid for writing.
    let list = unsafe { sys::rdma_get_devices(&mut count) };
    if !list.is_null() {
        // SAFETY: the list came from `rdma_get_devices`, is freed once, and nothing of it was used.
        unsafe { sys::rdma_free_devices(list) };
    }
}

/// The devices a lane uses.
#[derive(Debug, Default)]
pub(super) struct Devices {
    known: Mutex<Vec<Arc<Device>>>,
}

impl Devices {
    /// The device that `id` is bound to. Events of its anchor come on `channel`.
    pub(super) fn of(&self, id: &Identifier, channel: &Arc<EventChannel>) -> io::Result<Arc<Device>> {
        let context = id.context().ok_or(io::ErrorKind::NotConnected)?;
        let mut known = self.lock();
        if let Some(device) = known.iter().find(|device| device.context == context) {
            return Ok(Arc::clone(device));
        }
        let token = QpNum::next().0;
        let anchor = id.beside(channel, token)?;
        if anchor.context() != Some(context) {
            return Err(io::ErrorKind::NotFound.into());
        }
        // SAFETY: the anchor keeps it open.
        let abilities = unsafe { Abilities::of(context) }?;
        let was_removed = AtomicBool::new(false);
        let device = Arc::new(Device { context, abilities, token, was_removed, anchor: Some(anchor) });
        known.push(Arc::clone(&device));
        Ok(device)
    }

    /// Gives away the device whose anchor `token` names: nothing new is made on it.
    pub(super) fn remove(&self, token: u64) -> Option<Arc<Device>> {
        let mut known = self.lock();
        let at = known.iter().position(|device| device.token == token)?;
        let device = known.swap_remove(at);
        device.was_removed.store(true, Ordering::Relaxed);
        Some(device)
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Arc<Device>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Keeps the memory of one connection from all others.
#[derive(Debug)]
pub(super) struct ProtectionDomain {
    raw: NonNull<ibv_pd>,
    device: Arc<Device>,
}

// SAFETY: libibverbs may be called by any thread with the same protection domain.
unsafe impl Send for ProtectionDomain {}
// SAFETY: as above.
unsafe impl Sync for ProtectionDomain {}

impl ProtectionDomain {
    pub(super) fn new(device: Arc<Device>) -> io::Result<Self> {
        // SAFETY: the context is open as long as the device.
        let raw = unsafe { verbs::ibv_alloc_pd(device.context.as_ptr()) };
        Ok(Self { raw: NonNull::new(raw).ok_or_else(io::Error::last_os_error)?, device })
    }

    pub(super) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub(super) fn as_ptr(&self) -> *mut ibv_pd {
        self.raw.as_ptr()
    }
}

impl Drop for ProtectionDomain {
    fn drop(&mut self) {
        // SAFETY: it was allocated by `new` and nothing made in it is left: all of that holds an `Arc` of this.
        report("a protection domain", unsafe { verbs::ibv_dealloc_pd(self.raw.as_ptr()) });
    }
}

/// Memory that the device may reach.
pub(super) struct Registration {
    raw: NonNull<ibv_mr>,
    _pd: Arc<ProtectionDomain>,
}

// SAFETY: after registration only the keys are read, and deregistration takes the value.
unsafe impl Send for Registration {}
// SAFETY: as above.
unsafe impl Sync for Registration {}

impl Registration {
    /// Buffers of this side: never open to the peer, but where RDMAP wants it.
    ///
    /// # Safety
    /// The memory stays mapped, and is not lent as a slice while the device has it, as long as this lives.
    pub(super) unsafe fn private(pd: &Arc<ProtectionDomain>, base: NonNull<u8>, len: usize) -> io::Result<Self> {
        let access = match pd.device.is_iwarp() {
            // A Read's sink is named to the peer, whose Response is a tagged message like a Write (RFC 5040 §5.3).
            true => ibv_access_flags::IBV_ACCESS_LOCAL_WRITE | ibv_access_flags::IBV_ACCESS_REMOTE_WRITE,
            false => ibv_access_flags::IBV_ACCESS_LOCAL_WRITE,
        };
        // SAFETY: the caller's promise.
        unsafe { Self::new(pd, base, len, access) }
    }

    /// Memory that is opened to the peer: by this registration, or by windows bound to it.
    ///
    /// # Safety
    /// `span` outlives this.
    pub(super) unsafe fn shared(
        pd: &Arc<ProtectionDomain>,
        span: &SharedSpan,
        access: Access,
        by_window: bool,
    ) -> io::Result<Self> {
        let mut flags = ibv_access_flags::IBV_ACCESS_LOCAL_WRITE;
        if by_window {
            flags |= ibv_access_flags::IBV_ACCESS_MW_BIND;
        } else {
            flags |= remote_flags(access);
        }
        let (base, len) = span.as_raw();
        // SAFETY: the caller's promise; shared spans are only accessed by atomic words.
        unsafe { Self::new(pd, base, len, flags) }
    }

    unsafe fn new(
        pd: &Arc<ProtectionDomain>,
        base: NonNull<u8>,
        len: usize,
        access: ibv_access_flags,
    ) -> io::Result<Self> {
        // SAFETY: the protection domain is alive; the memory is the caller's promise.
        let raw = unsafe { verbs::ibv_reg_mr(pd.as_ptr(), base.as_ptr().cast(), len, access.0 as c_int) };
        Ok(Self { raw: NonNull::new(raw).ok_or_else(io::Error::last_os_error)?, _pd: Arc::clone(pd) })
    }

    pub(super) fn local_key(&self) -> u32 {
        // SAFETY: alive until drop, and never changed.
        unsafe { self.raw.as_ref().lkey }
    }

    pub(super) fn remote_key(&self) -> u32 {
        // SAFETY: as above.
        unsafe { self.raw.as_ref().rkey }
    }

    pub(super) fn as_ptr(&self) -> *mut ibv_mr {
        self.raw.as_ptr()
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // SAFETY: it was registered by `new` and is deregistered once. Windows bound to it are dropped first.
        report("a memory region", unsafe { verbs::ibv_dereg_mr(self.raw.as_ptr()) });
    }
}

pub(super) fn remote_flags(access: Access) -> ibv_access_flags {
    let mut flags = ibv_access_flags(0);
    if access.remote_write {
        flags |= ibv_access_flags::IBV_ACCESS_REMOTE_WRITE;
    }
    if access.remote_read {
        flags |= ibv_access_flags::IBV_ACCESS_REMOTE_READ;
    }
    flags
}

/// A memory window of type 2: a key that requests bind to a part of a registration, and that the peer may give back.
pub(super) struct Window {
    raw: NonNull<ibv_mw>,
    key: u32,
    _pd: Arc<ProtectionDomain>,
}

// SAFETY: the device's object may be named by any thread; deallocation takes the value.
unsafe impl Send for Window {}
// SAFETY: `&self` only reads.
unsafe impl Sync for Window {}

impl Window {
    pub(super) fn new(pd: &Arc<ProtectionDomain>) -> io::Result<Self> {
        // SAFETY: an open context.
        let allocate = unsafe { pd.device.context.as_ref().ops.alloc_mw }.ok_or(io::ErrorKind::Unsupported)?;
        // SAFETY: a live protection domain of a device that has this function.
        let raw = unsafe { allocate(pd.as_ptr(), verbs::IBV_MW_TYPE_2) };
        let raw = NonNull::new(raw).ok_or_else(io::Error::last_os_error)?;
        // SAFETY: just allocated.
        let key = unsafe { raw.as_ref().rkey };
        Ok(Self { raw, key, _pd: Arc::clone(pd) })
    }

    /// The key to bind it under, another than it has: the low octet is ours to choose.
    pub(super) fn next_key(&mut self) -> u32 {
        self.key = self.key & !0xff | self.key.wrapping_add(1) & 0xff;
        self.key
    }

    pub(super) fn as_ptr(&self) -> *mut ibv_mw {
        self.raw.as_ptr()
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: the window is alive, and so is the context it points to.
        let deallocate = unsafe { (*self.raw.as_ref().context).ops.dealloc_mw };
        if let Some(deallocate) = deallocate {
            // SAFETY: it was allocated by `new` and is deallocated once, which takes it out of service too.
            report("a memory window", unsafe { deallocate(self.raw.as_ptr()) });
        }
    }
}

/// Where completion queues say that there is something.
#[derive(Debug)]
pub(super) struct CompletionChannel {
    raw: NonNull<verbs::ibv_comp_channel>,
    device: Arc<Device>,
}

// SAFETY: libibverbs may be called by any thread with the same channel.
unsafe impl Send for CompletionChannel {}
// SAFETY: as above.
unsafe impl Sync for CompletionChannel {}

impl CompletionChannel {
    pub(super) fn new(device: Arc<Device>) -> io::Result<Self> {
        // SAFETY: an open context.
        let raw = unsafe { verbs::ibv_create_comp_channel(device.context.as_ptr()) };
        let channel = Self { raw: NonNull::new(raw).ok_or_else(io::Error::last_os_error)?, device };
        set_nonblocking(channel.as_fd())?;
        Ok(channel)
    }

    pub(super) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// The context of a queue that was armed and has got something. Call it only where no queue of the channel can be
    /// destroyed at the same time.
    pub(super) fn poll(&self) -> Option<u64> {
        let (mut cq, mut context) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: a live channel and two pointers valid for writing.
        if unsafe { verbs::ibv_get_cq_event(self.raw.as_ptr(), &mut cq, &mut context) } != 0 {
            return None;
        }
        // SAFETY: the queue is alive: it cannot be destroyed before this acknowledgement.
        unsafe { verbs::ibv_ack_cq_events(cq, 1) };
        Some(context as u64)
    }
}

impl AsFd for CompletionChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is the channel's and open as long as it lives.
        unsafe { BorrowedFd::borrow_raw(self.raw.as_ref().fd) }
    }
}

impl Drop for CompletionChannel {
    fn drop(&mut self) {
        // SAFETY: made by `new`, destroyed once, and no queue is left: each holds an `Arc` of this.
        report("a completion channel", unsafe { verbs::ibv_destroy_comp_channel(self.raw.as_ptr()) });
    }
}

/// What became of the requests of one queue pair.
pub(super) struct CompletionQueue {
    raw: NonNull<ibv_cq>,
    _channel: Arc<CompletionChannel>,
}

// SAFETY: libibverbs may be called by any thread with the same queue.
unsafe impl Send for CompletionQueue {}
// SAFETY: as above.
unsafe impl Sync for CompletionQueue {}

impl CompletionQueue {
    pub(super) fn new(channel: &Arc<CompletionChannel>, depth: usize, context: u64) -> io::Result<Self> {
        let depth = c_int::try_from(depth).map_err(|_| io::ErrorKind::InvalidInput)?;
        let (device, context) = (channel.device.context.as_ptr(), context as *mut c_void);
        // SAFETY: an open context and a live channel of it; `context` is a number that nobody follows.
        let raw = unsafe { verbs::ibv_create_cq(device, depth, context, channel.raw.as_ptr(), 0) };
        Ok(Self { raw: NonNull::new(raw).ok_or_else(io::Error::last_os_error)?, _channel: Arc::clone(channel) })
    }

    pub(super) fn as_ptr(&self) -> *mut ibv_cq {
        self.raw.as_ptr()
    }

    /// Takes completions to the front of `into`, oldest first; gives their number.
    pub(super) fn poll(&self, into: &mut [ibv_wc; POLL_COUNT_MAX]) -> io::Result<usize> {
        // SAFETY: an open context; every provider has this function.
        let poll = unsafe { (*self.raw.as_ref().context).ops.poll_cq }.ok_or(io::ErrorKind::Unsupported)?;
        // SAFETY: a live queue, and room for as many completions as asked for.
        let count = unsafe { poll(self.raw.as_ptr(), POLL_COUNT_MAX as c_int, into.as_mut_ptr()) };
        usize::try_from(count).map_err(|_| io::Error::other("a completion queue cannot be polled"))
    }

    /// The next completion is told to the channel, once.
    pub(super) fn arm(&self) -> io::Result<()> {
        // SAFETY: an open context; every provider has this function.
        let arm = unsafe { (*self.raw.as_ref().context).ops.req_notify_cq }.ok_or(io::ErrorKind::Unsupported)?;
        // SAFETY: a live queue.
        check(unsafe { arm(self.raw.as_ptr(), 0) })
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        // SAFETY: made by `new`, destroyed once, after its queue pair; every event of it was acknowledged when taken.
        report("a completion queue", unsafe { verbs::ibv_destroy_cq(self.raw.as_ptr()) });
    }
}

/// Turns what libibverbs returns, an error number, into a result.
pub(super) fn check(code: c_int) -> io::Result<()> {
    match code {
        0 => Ok(()),
        code if code > 0 => Err(io::Error::from_raw_os_error(code)),
        _ => Err(io::Error::last_os_error()),
    }
}

/// What cannot be given back is a leak in the device or a bug here; there is nobody to tell but the log.
fn report(what: &'static str, code: c_int) {
    if let Err(error) = check(code) {
        tracing::error!(what, %error, "not given back to the device");
    }
}

pub(super) fn set_nonblocking(fd: BorrowedFd<'_>) -> io::Result<()> {
    socket2::SockRef::from(&fd).set_nonblocking(true)
}
