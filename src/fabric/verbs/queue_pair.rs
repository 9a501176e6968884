//! The queue pair of a connection on its device: how it is made, the work requests that it is given, and what their errors say.

use std::ffi::CStr;
use std::io;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use ibverbs::{ibv_qp_type, ibv_wc_status};
use ibverbs_sys::{self as verbs, ibv_qp, ibv_send_flags, ibv_wr_opcode};

use super::super::registered::{Domain, LocalRegistration};
use super::super::{Attributes, LocalBuf, QpNum, RemoteKey, Source, Status, Work, WorkKind};
use super::cm::Identifier;
use super::device::{CompletionChannel, CompletionQueue, ProtectionDomain, Registration, check};
use super::regions::Binding;

/// Inline sizes asked for in turn until the device grants one; siw has 80.
const INLINE_STEPS: [usize; 4] = [128, 80, 64, 0];

/// What a completion is of, in the upper half of its request's number.
pub(super) const OF_SEND: u64 = 0;
pub(super) const OF_RECEIVE: u64 = 1 << 32;
pub(super) const OF_BINDING: u64 = 2 << 32;

/// What exists on the device. Fields are dropped in order: the identifier destroys the queue pair first of all.
pub(super) struct Hardware {
    pub(super) id: Identifier,
    qp: NonNull<ibv_qp>,
    /// Copies of inline requests that the device does not take inline.
    pub(super) slab: Option<Slab>,
    inline_bytes_max: usize,
    is_iwarp: bool,
    pub(super) completions: CompletionQueue,
}

// SAFETY: libibverbs may be called by any thread with the same queue pair, which lives as long as `id`.
unsafe impl Send for Hardware {}

/// One place per request of the send queue.
pub(super) struct Slab {
    buf: LocalBuf,
    place_bytes: usize,
}

/// A request with the one piece of memory it may have.
pub(super) struct Entry {
    request: verbs::ibv_send_wr,
    piece: Option<verbs::ibv_sge>,
}

fn blank_request() -> verbs::ibv_send_wr {
    // SAFETY: numbers and pointers, for which zero is a value.
    unsafe { std::mem::zeroed() }
}

fn remote_part(key: RemoteKey, address: u64) -> verbs::ibv_send_wr__bindgen_ty_2__bindgen_ty_1 {
    verbs::ibv_send_wr__bindgen_ty_2__bindgen_ty_1 { remote_addr: address, rkey: key.0 }
}

pub(super) fn hardware_binding(binding: &Binding) -> Entry {
    let mut request = blank_request();
    request.wr_id = OF_BINDING;
    request.opcode = ibv_wr_opcode::IBV_WR_BIND_MW;
    request.send_flags = ibv_send_flags::IBV_SEND_SIGNALED.0;
    // SAFETY: all arms of the union are plain numbers and pointers.
    let bind = unsafe { &mut request.__bindgen_anon_2.bind_mw };
    bind.mw = binding.window;
    bind.rkey = binding.key.0;
    bind.bind_info.mr = binding.registration;
    bind.bind_info.addr = binding.address;
    bind.bind_info.length = binding.len;
    bind.bind_info.mw_access_flags = binding.access_flags;
    Entry { request, piece: None }
}

impl Hardware {
    /// Makes them for `attributes`, and for `bindings` of windows on their way beside these.
    pub(super) fn new(
        mut id: Identifier,
        number: QpNum,
        channel: &Arc<CompletionChannel>,
        (pd, domain): (&Arc<ProtectionDomain>, Domain),
        attributes: &Attributes,
        bindings: usize,
    ) -> io::Result<Self> {
        let Attributes { send_depth, receive_depth, .. } = *attributes;
        let is_iwarp = pd.device().is_iwarp();
        let completions = CompletionQueue::new(channel, send_depth + bindings + receive_depth, number.0)?;
        let sizes = [attributes.inline_bytes_max].into_iter().chain(INLINE_STEPS);
        let mut refusal = io::Error::from(io::ErrorKind::Unsupported);
        let mut made = None;
        for inline_bytes in sizes.filter(|size| *size <= attributes.inline_bytes_max) {
            let mut wanted = verbs::ibv_qp_init_attr {
                qp_context: number.0 as *mut _,
                send_cq: completions.as_ptr(),
                recv_cq: completions.as_ptr(),
                srq: ptr::null_mut(),
                cap: verbs::ibv_qp_cap {
                    max_send_wr: (send_depth + bindings) as u32,
                    max_recv_wr: receive_depth as u32,
                    max_send_sge: 1,
                    max_recv_sge: 1,
                    max_inline_data: inline_bytes as u32,
                },
                qp_type: ibv_qp_type::IBV_QPT_RC,
                sq_sig_all: 0,
            };
            // SAFETY: `Hardware`, which is made next, destroys the queue pair before the completion queue.
            match unsafe { id.create_queue_pair(pd, &mut wanted) } {
                Ok(qp) => {
                    made = Some((qp, wanted.cap.max_inline_data as usize));
                    break;
                }
                Err(error) => refusal = error,
            }
        }
        let Some((qp, inline_bytes_max)) = made else { return Err(refusal) };
        let mut hardware = Self { id, qp, slab: None, inline_bytes_max, is_iwarp, completions };
        if inline_bytes_max < attributes.inline_bytes_max || is_iwarp {
            let place_bytes = attributes.inline_bytes_max.next_multiple_of(64);
            let bufs = allocate(pd, domain, place_bytes * send_depth, 1)?;
            hardware.slab = bufs.into_iter().next().map(|buf| Slab { buf, place_bytes });
        }
        Ok(hardware)
    }

    /// What the device is told of `work`. Its memory is what `work` or the slab owns.
    pub(super) fn request(&mut self, work: &Work, index: u32, is_signaled: bool, depth: usize) -> Entry {
        let is_iwarp = self.is_iwarp;
        let mut request = blank_request();
        request.wr_id = OF_SEND | u64::from(index);
        let flags = work.flags();
        let mut send_flags = 0;
        for (is_set, flag) in [
            (is_signaled, ibv_send_flags::IBV_SEND_SIGNALED),
            // On iWARP Reads are answered in order anyway, and siw refuses to fence one.
            (flags.fenced && !(is_iwarp && work.kind() == WorkKind::Read), ibv_send_flags::IBV_SEND_FENCE),
            (flags.solicited, ibv_send_flags::IBV_SEND_SOLICITED),
        ] {
            if is_set {
                send_flags |= flag.0;
            }
        }
        let place = (index, depth);
        let (remote, piece) = match work {
            Work::Write { from, key, address, .. } => {
                request.opcode = ibv_wr_opcode::IBV_WR_RDMA_WRITE;
                (Some((key, address)), self.source(from, self.inline_bytes_max, place, &mut send_flags))
            }
            Work::Read { into, range, key, address, .. } => {
                request.opcode = ibv_wr_opcode::IBV_WR_RDMA_READ;
                if range.is_empty() && is_iwarp {
                    // siw looks up the key of a Read of no octets; of a Write it does not. Nothing moves either way.
                    request.opcode = ibv_wr_opcode::IBV_WR_RDMA_WRITE;
                }
                (Some((key, address)), piece(into, range.start, range.len()))
            }
            Work::Send { from, invalidate, .. } => {
                let mut inline_bytes_max = self.inline_bytes_max;
                request.opcode = ibv_wr_opcode::IBV_WR_SEND;
                if let Some(key) = invalidate {
                    request.opcode = ibv_wr_opcode::IBV_WR_SEND_WITH_INV;
                    request.__bindgen_anon_1.invalidate_rkey = key.0;
                    // libsiw takes it from here; others do not look.
                    request.wr.rdma = remote_part(*key, 0);
                    // siw knows plain Sends and Writes inline, nothing else.
                    if is_iwarp {
                        inline_bytes_max = 0;
                    }
                }
                (None, self.source(from, inline_bytes_max, place, &mut send_flags))
            }
        };
        request.send_flags = send_flags;
        if let Some((key, address)) = remote {
            request.wr.rdma = remote_part(*key, *address);
        }
        Entry { request, piece }
    }

    /// The octets of `from`; `inline_bytes_max` of them at most go into the request itself.
    fn source(
        &mut self,
        from: &Source,
        inline_bytes_max: usize,
        (index, depth): (u32, usize),
        flags: &mut u32,
    ) -> Option<verbs::ibv_sge> {
        match from {
            Source::Buffer { buf, range } => piece(buf, range.start, range.len()),
            Source::Inline(octets) if octets.is_empty() => None,
            Source::Inline(octets) if octets.len() <= inline_bytes_max => {
                *flags |= ibv_send_flags::IBV_SEND_INLINE.0;
                Some(verbs::ibv_sge { addr: octets.as_ptr() as u64, length: octets.len() as u32, lkey: 0 })
            }
            Source::Inline(octets) => {
                // The place was that of a request `depth` ago, which has completed.
                let slab = self.slab.as_mut().expect("there is one where the device takes less inline");
                let start = index as usize % depth * slab.place_bytes;
                slab.buf.as_mut_slice()[start..start + octets.len()].copy_from_slice(octets);
                piece(&slab.buf, start, octets.len())
            }
        }
    }

    /// Hands a chain to the device.
    pub(super) fn post_send(&mut self, entries: &mut [Entry]) -> io::Result<()> {
        let mut next = ptr::null_mut();
        for entry in entries.iter_mut().rev() {
            if let Some(piece) = &mut entry.piece {
                entry.request.sg_list = piece;
                entry.request.num_sge = 1;
            }
            entry.request.next = next;
            next = &mut entry.request;
        }
        let mut refused = ptr::null_mut();
        // SAFETY: a live queue pair of an open context; every provider has this function.
        let post = unsafe { (*self.qp.as_ref().context).ops.post_send }.ok_or(io::ErrorKind::Unsupported)?;
        // SAFETY: the chain and its pieces are alive for the call. The memory they name belongs to requests in the queue
        // or to the slab, and is neither moved nor written until their completion, or until the queue pair is destroyed.
        check(unsafe { post(self.qp.as_ptr(), next, &mut refused) })
    }

    pub(super) fn post_receive(&self, buf: &mut LocalBuf, index: u32) -> io::Result<()> {
        let Some(mut piece) = piece(buf, 0, buf.len()) else { return Err(io::ErrorKind::InvalidInput.into()) };
        let wr_id = OF_RECEIVE | u64::from(index);
        let mut request = verbs::ibv_recv_wr { wr_id, next: ptr::null_mut(), sg_list: &mut piece, num_sge: 1 };
        let mut refused = ptr::null_mut();
        // SAFETY: as for `post_send`.
        let post = unsafe { (*self.qp.as_ref().context).ops.post_recv }.ok_or(io::ErrorKind::Unsupported)?;
        // SAFETY: the request is alive for the call; the buffer is in the receive queue, where nobody reads or writes it
        // until its completion, or until the queue pair is destroyed.
        check(unsafe { post(self.qp.as_ptr(), &mut request, &mut refused) })
    }

    pub(super) fn is_in_error(&self) -> bool {
        // SAFETY: numbers and pointers, for which zero is a value.
        let (mut found, mut made): (verbs::ibv_qp_attr, verbs::ibv_qp_init_attr) = unsafe { std::mem::zeroed() };
        let mask = verbs::ibv_qp_attr_mask::IBV_QP_STATE.0 as i32;
        // SAFETY: a live queue pair, and two structures valid for writing.
        let asked = check(unsafe { verbs::ibv_query_qp(self.qp.as_ptr(), &mut found, mask, &mut made) });
        asked.is_ok() && matches!(found.qp_state, verbs::ibv_qp_state::IBV_QPS_ERR | verbs::ibv_qp_state::IBV_QPS_SQE)
    }
}

/// The part of a buffer that a request names; none if it has no octets.
fn piece(buf: &LocalBuf, start: usize, len: usize) -> Option<verbs::ibv_sge> {
    let lkey = buf.local_key()?;
    let addr = buf.as_slice()[start..].as_ptr() as u64;
    (len > 0).then_some(verbs::ibv_sge { addr, length: len as u32, lkey })
}

pub(super) fn allocate(
    pd: &Arc<ProtectionDomain>,
    domain: Domain,
    buf_bytes: usize,
    count: usize,
) -> io::Result<Vec<LocalBuf>> {
    domain.allocate_registered(buf_bytes, count, |base, len| {
        // SAFETY: the buffers keep the memory and drop the registration first. Nobody borrows a buffer that is posted:
        // posting takes it.
        let registration = unsafe { Registration::private(pd, base, len) }?;
        Ok(LocalRegistration { local_key: registration.local_key(), _keep: Arc::new(registration) })
    })
}

/// What an error of the device says about a request.
pub(super) enum Verdict {
    /// The connection ended first.
    Flushed,
    /// The peer refused it.
    Refused(String),
    Lost(String),
}

impl Verdict {
    pub(super) fn of(status: ibv_wc_status::Type) -> Self {
        // SAFETY: a static text of libibverbs for every number.
        let text = || unsafe { CStr::from_ptr(verbs::ibv_wc_status_str(status)) }.to_string_lossy().into_owned();
        match status {
            ibv_wc_status::IBV_WC_WR_FLUSH_ERR => Self::Flushed,
            ibv_wc_status::IBV_WC_REM_ACCESS_ERR
            | ibv_wc_status::IBV_WC_REM_INV_REQ_ERR
            | ibv_wc_status::IBV_WC_REM_OP_ERR
            | ibv_wc_status::IBV_WC_RNR_RETRY_EXC_ERR => Self::Refused(text()),
            _ => Self::Lost(text()),
        }
    }

    pub(super) fn status(&self) -> Status {
        match self {
            Self::Refused(_) => Status::Refused,
            Self::Flushed | Self::Lost(_) => Status::Flushed,
        }
    }
}
