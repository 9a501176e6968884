//! Devices, and what is made on them. Everything holds an `Arc` of what it was made from, so that nothing ends before
//! what depends on it, and is given back when dropped.

use std::ffi::{CStr, c_int, c_void};
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ibverbs::{ibv_access_flags, ibv_wc};
use ibverbs_sys::{self as verbs, ibv_context, ibv_cq, ibv_mr, ibv_mw, ibv_pd};

use super::super::Access;
use super::super::region::shared::SharedSpan;
use super::sys;

/// Completions taken from one queue at a time.
pub(super) const POLL_COUNT_MAX: usize = 16;

/// All RDMA devices that librdmacm has opened, kept open.
struct Opened {
    list: NonNull<*mut ibv_context>,
    count: usize,
}

// SAFETY: the list is written by `rdma_get_devices` alone and never changed; contexts of libibverbs may be used by any
// thread.
unsafe impl Send for Opened {}
// SAFETY: as above.
unsafe impl Sync for Opened {}

impl Opened {
    fn new() -> io::Result<Self> {
        let mut count = 0;
        // SAFETY: `count` is valid for writing.
        let list = unsafe { sys::rdma_get_devices(&mut count) };
        match (NonNull::new(list), usize::try_from(count)) {
            (Some(list), Ok(count)) => Ok(Self { list, count }),
            _ => Err(io::Error::last_os_error()),
        }
    }

    fn contexts(&self) -> &[*mut ibv_context] {
        // SAFETY: `rdma_get_devices` gave a list of that many contexts, which lives until `rdma_free_devices`.
        unsafe { std::slice::from_raw_parts(self.list.as_ptr(), self.count) }
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        // SAFETY: the list came from `rdma_get_devices` and is freed once; whoever uses a context holds an `Arc` of this.
        unsafe { sys::rdma_free_devices(self.list.as_ptr()) };
    }
}

/// One RDMA device.
pub(super) struct Device {
    context: NonNull<ibv_context>,
    name: String,
    is_iwarp: bool,
    has_windows: bool,
    send_depth_max: usize,
    completion_depth_max: usize,
    read_depth_max: usize,
    _opened: Arc<Opened>,
}

// SAFETY: libibverbs may be called by any thread with the same context, which `_opened` keeps open.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl Device {
    fn new(context: NonNull<ibv_context>, opened: &Arc<Opened>) -> io::Result<Self> {
        // SAFETY: plain numbers, for which zero is a value.
        let mut limits: verbs::ibv_device_attr = unsafe { std::mem::zeroed() };
        // SAFETY: the context is open while `opened` lives, and `limits` valid for writing.
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
            context,
            name,
            is_iwarp: transport == verbs::IBV_TRANSPORT_IWARP,
            has_windows: limits.device_cap_flags & type_2 != 0 && limits.max_mw > 0 && alloc_mw.is_some(),
            send_depth_max: positive(limits.max_qp_wr),
            completion_depth_max: positive(limits.max_cqe),
            read_depth_max: positive(limits.max_qp_rd_atom.min(limits.max_qp_init_rd_atom)),
            _opened: Arc::clone(opened),
        })
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// RDMAP's rules hold: the sink of a Read is opened to the peer, and any key of a connection may be invalidated by it.
    pub(super) fn is_iwarp(&self) -> bool {
        self.is_iwarp
    }

    /// Memory windows of type 2 can be bound and invalidated by requests.
    pub(super) fn has_windows(&self) -> bool {
        self.has_windows
    }

    /// Requests of one queue.
    pub(super) fn depth_max(&self) -> usize {
        self.send_depth_max
    }

    /// Completions of one queue.
    pub(super) fn completion_depth_max(&self) -> usize {
        self.completion_depth_max
    }

    /// Reads outstanding in one direction.
    pub(super) fn read_depth_max(&self) -> usize {
        self.read_depth_max
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

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device").field("name", &self.name).field("is_iwarp", &self.is_iwarp).finish_non_exhaustive()
    }
}

/// The devices a lane has met.
#[derive(Debug)]
pub(super) struct Devices {
    known: Mutex<Vec<Arc<Device>>>,
}

impl Devices {
    /// # Errors
    /// `NotFound` if there is none, else what librdmacm says.
    pub(super) fn new() -> io::Result<Self> {
        let none = || io::Error::new(io::ErrorKind::NotFound, "this machine has no RDMA device");
        // Without any, libibverbs says "function not implemented" and librdmacm "no such device".
        match ibverbs::devices() {
            Ok(devices) if devices.is_empty() => return Err(none()),
            Ok(_) => {}
            Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => return Err(none()),
            Err(error) => return Err(error),
        }
        let devices = Self { known: Mutex::default() };
        devices.list(&mut devices.lock())?;
        Ok(devices)
    }

    fn list(&self, known: &mut Vec<Arc<Device>>) -> io::Result<()> {
        let opened = Arc::new(Opened::new()?);
        for context in opened.contexts().iter().copied().filter_map(NonNull::new) {
            if !known.iter().any(|device| device.context == context) {
                known.push(Arc::new(Device::new(context, &opened)?));
            }
        }
        Ok(())
    }

    /// The device behind a context that librdmacm opened.
    pub(super) fn of(&self, context: NonNull<ibv_context>) -> io::Result<Arc<Device>> {
        let mut known = self.lock();
        let find = |known: &[Arc<Device>]| known.iter().find(|device| device.context == context).cloned();
        if let Some(device) = find(&known) {
            return Ok(device);
        }
        // It was plugged in since.
        self.list(&mut known)?;
        find(&known).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    pub(super) fn all(&self) -> Vec<Arc<Device>> {
        self.lock().clone()
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
        let access = match pd.device.is_iwarp {
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
