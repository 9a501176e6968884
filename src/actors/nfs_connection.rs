//! A peer that mounts over TCP: a [`Connection`] around the session of NFS and MOUNT.

use crate::actors::connection::{Admission, Connection, Lane, Socket};
use crate::actors::exported::Exported;
use crate::programs::nfs::session::{Context, Session};
use crate::programs::service::Shared;
use actix::prelude::*;
use std::net::IpAddr;
use std::sync::Arc;

/// What its connections have in common.
#[derive(Clone)]
pub struct NfsDoor {
    pub exported: Exported,
    /// Calls remembered, together with those of RPC doors.
    pub shared: Arc<Shared>,
}

/// Starts the actor of a peer at `address` on the lane of this thread.
pub fn start_on_lane(
    socket: Socket,
    address: IpAddr,
    door: &NfsDoor,
    lane: Lane,
    admission: Admission,
) -> Addr<Connection<Session>> {
    let session = Session::new(Context {
        export: door.exported.export.clone(),
        // As calls are known by when they come again, through whichever socket.
        client: door.exported.client(address.to_canonical()),
        shared: door.shared.clone(),
        metrics: lane.session.metrics.clone(),
        calls_max: lane.session.pins_max,
        reserve_wait_ms: lane.session.reserve_wait_ms,
    });
    // A draft claims what it needs by itself, so nobody takes a claim back from the session.
    Connection::start_with(socket, lane, admission, Some(|metrics| &metrics.nfs), |_| session)
}
