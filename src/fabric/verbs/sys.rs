//! The part of librdmacm that is used, declared by hand. Layouts are those of `rdma/rdma_cma.h`; a test asks the C
//! compiler whether they still are. Types of libibverbs come from `ibverbs-sys`.

use std::ffi::{c_int, c_void};

use ibverbs_sys::{ibv_context, ibv_pd, ibv_qp, ibv_qp_init_attr};

/// `RDMA_PS_TCP`: reliable, connected.
pub(super) const PORT_SPACE_TCP: c_int = 0x0106;

/// `enum rdma_cm_event_type`.
pub(super) mod event {
    pub const ADDR_RESOLVED: u32 = 0;
    pub const ADDR_ERROR: u32 = 1;
    pub const ROUTE_RESOLVED: u32 = 2;
    pub const ROUTE_ERROR: u32 = 3;
    pub const CONNECT_REQUEST: u32 = 4;
    pub const CONNECT_ERROR: u32 = 6;
    pub const UNREACHABLE: u32 = 7;
    pub const REJECTED: u32 = 8;
    pub const ESTABLISHED: u32 = 9;
    pub const DISCONNECTED: u32 = 10;
    pub const DEVICE_REMOVAL: u32 = 11;
    pub const TIMEWAIT_EXIT: u32 = 15;
}

/// `struct rdma_event_channel`.
#[repr(C)]
pub(super) struct EventChannel {
    pub fd: c_int,
}

/// `struct rdma_addr`: two socket addresses, then what only InfiniBand knows.
#[repr(C)]
pub(super) struct Addresses {
    pub source: libc::sockaddr_storage,
    pub destination: libc::sockaddr_storage,
    pub infiniband: [u64; 5],
}

/// `struct rdma_route`.
#[repr(C)]
pub(super) struct Route {
    pub addresses: Addresses,
    pub path_records: *mut c_void,
    pub path_count: c_int,
}

/// `struct rdma_cm_id`. The library fills it; of its fields only `context` may be written.
#[repr(C)]
pub(super) struct Identifier {
    pub verbs: *mut ibv_context,
    pub channel: *mut EventChannel,
    pub context: *mut c_void,
    pub qp: *mut ibv_qp,
    pub route: Route,
    pub port_space: c_int,
    pub port_num: u8,
    pub event: *mut Event,
    pub send_channel: *mut c_void,
    pub send_cq: *mut c_void,
    pub receive_channel: *mut c_void,
    pub receive_cq: *mut c_void,
    pub srq: *mut c_void,
    pub pd: *mut ibv_pd,
    pub qp_type: c_int,
}

/// `struct rdma_conn_param`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct ConnectionParameters {
    pub private_data: *const c_void,
    pub private_data_len: u8,
    pub responder_resources: u8,
    pub initiator_depth: u8,
    pub flow_control: u8,
    pub retry_count: u8,
    pub rnr_retry_count: u8,
    pub srq: u8,
    pub qp_num: u32,
}

/// `struct rdma_cm_event`. Its union also has an arm for datagrams, which is longer than that for connections.
#[repr(C)]
pub(super) struct Event {
    pub id: *mut Identifier,
    pub listen_id: *mut Identifier,
    pub kind: u32,
    pub status: c_int,
    pub connection: ConnectionParameters,
    pub datagram_rest: [u64; 4],
}

const _: () = assert!(size_of::<EventChannel>() == 4);
const _: () = assert!(size_of::<Addresses>() == 296);
const _: () = assert!(size_of::<Route>() == 312);
const _: () = assert!(size_of::<Identifier>() == 416);
const _: () = assert!(size_of::<ConnectionParameters>() == 24);
const _: () = assert!(size_of::<Event>() == 80);

#[link(name = "rdmacm")]
unsafe extern "C" {
    pub(super) fn rdma_create_event_channel() -> *mut EventChannel;
    pub(super) fn rdma_destroy_event_channel(channel: *mut EventChannel);
    pub(super) fn rdma_create_id(
        channel: *mut EventChannel,
        id: *mut *mut Identifier,
        context: *mut c_void,
        port_space: c_int,
    ) -> c_int;
    pub(super) fn rdma_destroy_id(id: *mut Identifier) -> c_int;
    pub(super) fn rdma_migrate_id(id: *mut Identifier, channel: *mut EventChannel) -> c_int;
    pub(super) fn rdma_bind_addr(id: *mut Identifier, address: *mut libc::sockaddr) -> c_int;
    pub(super) fn rdma_listen(id: *mut Identifier, backlog: c_int) -> c_int;
    pub(super) fn rdma_get_src_port(id: *mut Identifier) -> u16;
    pub(super) fn rdma_resolve_addr(
        id: *mut Identifier,
        source: *mut libc::sockaddr,
        destination: *mut libc::sockaddr,
        timeout_ms: c_int,
    ) -> c_int;
    pub(super) fn rdma_resolve_route(id: *mut Identifier, timeout_ms: c_int) -> c_int;
    pub(super) fn rdma_create_qp(id: *mut Identifier, pd: *mut ibv_pd, attributes: *mut ibv_qp_init_attr) -> c_int;
    pub(super) fn rdma_destroy_qp(id: *mut Identifier);
    pub(super) fn rdma_connect(id: *mut Identifier, parameters: *mut ConnectionParameters) -> c_int;
    pub(super) fn rdma_accept(id: *mut Identifier, parameters: *mut ConnectionParameters) -> c_int;
    pub(super) fn rdma_reject(id: *mut Identifier, private_data: *const c_void, private_data_len: u8) -> c_int;
    pub(super) fn rdma_disconnect(id: *mut Identifier) -> c_int;
    pub(super) fn rdma_get_cm_event(channel: *mut EventChannel, event: *mut *mut Event) -> c_int;
    pub(super) fn rdma_ack_cm_event(event: *mut Event) -> c_int;
    pub(super) fn rdma_get_devices(count: *mut c_int) -> *mut *mut ibv_context;
    pub(super) fn rdma_free_devices(list: *mut *mut ibv_context);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fmt::Write as _;
    use std::mem::offset_of;
    use std::process::Command;

    /// Sizes and offsets as the C compiler of this machine sees them, one line each.
    fn layout_in_c(questions: &[(&str, Option<&str>)]) -> Vec<usize> {
        let mut source =
            "#include <stdio.h>\n#include <stddef.h>\n#include <rdma/rdma_cma.h>\nint main(void) {\n".to_owned();
        for (structure, field) in questions {
            let what = match field {
                Some(field) => format!("offsetof(struct {structure}, {field})"),
                None => format!("sizeof(struct {structure})"),
            };
            writeln!(source, "printf(\"%zu\\n\", {what});").unwrap();
        }
        source.push_str("return 0; }\n");
        let dir = tempfile::tempdir().unwrap();
        let (input, program) = (dir.path().join("layout.c"), dir.path().join("layout"));
        std::fs::write(&input, source).unwrap();
        let compiled = Command::new("cc").arg("-o").arg(&program).arg(&input).output().expect("a C compiler");
        assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
        let said = String::from_utf8(Command::new(&program).output().unwrap().stdout).unwrap();
        said.lines().map(|line| line.parse().unwrap()).collect()
    }

    #[test]
    fn every_structure_and_every_field_lies_where_c_has_it() {
        macro_rules! layout {
            ($($c:ident = $rust:ty { $($c_field:expr => $($field:ident).+),* $(,)? }),* $(,)?) => {{
                let mut questions = Vec::new();
                let mut answers = Vec::new();
                $(
                    questions.push((stringify!($c), None));
                    answers.push(size_of::<$rust>());
                    $(
                        questions.push((stringify!($c), Some($c_field)));
                        answers.push(offset_of!($rust, $($field).+));
                    )*
                )*
                (questions, answers)
            }};
        }
        let (questions, answers) = layout! {
            rdma_event_channel = EventChannel { "fd" => fd },
            rdma_addr = Addresses { "src_addr" => source, "dst_addr" => destination, "addr" => infiniband },
            rdma_route = Route { "addr" => addresses, "path_rec" => path_records, "num_paths" => path_count },
            rdma_cm_id = Identifier {
                "verbs" => verbs, "channel" => channel, "context" => context, "qp" => qp, "route" => route,
                "route.addr.dst_addr" => route.addresses.destination, "ps" => port_space, "port_num" => port_num,
                "event" => event, "send_cq_channel" => send_channel, "send_cq" => send_cq,
                "recv_cq_channel" => receive_channel, "recv_cq" => receive_cq, "srq" => srq, "pd" => pd,
                "qp_type" => qp_type,
            },
            rdma_conn_param = ConnectionParameters {
                "private_data" => private_data, "private_data_len" => private_data_len,
                "responder_resources" => responder_resources, "initiator_depth" => initiator_depth,
                "flow_control" => flow_control, "retry_count" => retry_count, "rnr_retry_count" => rnr_retry_count,
                "srq" => srq, "qp_num" => qp_num,
            },
            rdma_cm_event = Event {
                "id" => id, "listen_id" => listen_id, "event" => kind, "status" => status, "param" => connection,
            },
            ibv_wc = ibverbs_sys::ibv_wc { "imm_data" => imm_data, "wc_flags" => wc_flags },
            ibv_send_wr = ibverbs_sys::ibv_send_wr {
                "wr_id" => wr_id, "next" => next, "sg_list" => sg_list, "num_sge" => num_sge, "opcode" => opcode,
                "send_flags" => send_flags, "invalidate_rkey" => __bindgen_anon_1, "wr" => wr,
                "bind_mw" => __bindgen_anon_2,
            },
            ibv_recv_wr = ibverbs_sys::ibv_recv_wr { "wr_id" => wr_id, "sg_list" => sg_list, "num_sge" => num_sge },
            ibv_sge = ibverbs_sys::ibv_sge { "addr" => addr, "length" => length, "lkey" => lkey },
            ibv_qp_init_attr = ibverbs_sys::ibv_qp_init_attr {
                "qp_context" => qp_context, "send_cq" => send_cq, "recv_cq" => recv_cq, "cap" => cap,
                "qp_type" => qp_type, "sq_sig_all" => sq_sig_all,
            },
            ibv_device_attr = ibverbs_sys::ibv_device_attr {
                "max_qp_wr" => max_qp_wr, "device_cap_flags" => device_cap_flags, "max_cqe" => max_cqe,
                "max_qp_rd_atom" => max_qp_rd_atom, "max_qp_init_rd_atom" => max_qp_init_rd_atom,
            },
            ibv_async_event = ibverbs_sys::ibv_async_event { "element" => element, "event_type" => event_type },
            ibv_context = ibverbs_sys::ibv_context {
                "device" => device, "ops" => ops, "ops.alloc_mw" => ops.alloc_mw,
                "ops.dealloc_mw" => ops.dealloc_mw, "ops.poll_cq" => ops.poll_cq,
                "ops.req_notify_cq" => ops.req_notify_cq, "ops.post_send" => ops.post_send,
                "ops.post_recv" => ops.post_recv, "async_fd" => async_fd,
            },
            ibv_qp = ibverbs_sys::ibv_qp { "context" => context, "qp_context" => qp_context },
            ibv_cq = ibverbs_sys::ibv_cq { "context" => context, "cq_context" => cq_context },
            ibv_mr = ibverbs_sys::ibv_mr { "lkey" => lkey, "rkey" => rkey },
            ibv_mw = ibverbs_sys::ibv_mw { "rkey" => rkey },
            ibv_mw_bind_info = ibverbs_sys::ibv_mw_bind_info {
                "mr" => mr, "addr" => addr, "length" => length, "mw_access_flags" => mw_access_flags,
            },
            ibv_comp_channel = ibverbs_sys::ibv_comp_channel { "fd" => fd },
            ibv_device = ibverbs_sys::ibv_device { "transport_type" => transport_type },
        };
        for ((question, ours), c) in questions.iter().zip(&answers).zip(layout_in_c(&questions)) {
            assert_eq!(*ours, c, "{question:?}");
        }
    }
}
