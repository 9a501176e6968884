//! The memory of a native connection that its peer writes to, each part with the one who may read it: the control ring is
//! the poller's, the RX half belongs to leases.

use crate::actors::cq_poller::{Batch, Ring, TransportEvent};
use crate::fabric::{Access, FabricError, MemoryRegion, QueuePair, SharedSpan};
use crate::wire::native::descriptor::{RemoteAddress, RingGeometry, WindowGeometry};
use crate::wire::native::intake::{Arrival, Reading, RingReader};
use crate::wire::native::poison::Poison;
use crate::wire::native::window::RxLease;
use std::sync::Arc;

/// Unit of what a control ring takes of the address space.
const PAGE_BYTES: u64 = 4096;

fn span(bytes: u64, what: &'static str) -> Result<SharedSpan, FabricError> {
    let bytes = usize::try_from(bytes).map_err(std::io::Error::other);
    bytes.and_then(SharedSpan::new).map_err(|source| FabricError::System { what, source })
}

/// The control region, open to the peer for as long as this lives.
pub struct ControlRegion {
    region: Arc<MemoryRegion>,
    mapping_bytes: u32,
}

impl ControlRegion {
    /// Makes one for the peer of `qp`.
    ///
    /// # Errors
    /// What the fabric lacks.
    pub fn open(qp: &dyn QueuePair, geometry: RingGeometry) -> Result<Self, FabricError> {
        let bytes = geometry.mapping_bytes(PAGE_BYTES);
        let region = qp.register(span(bytes, "map a control ring")?, Access::BOTH)?;
        Ok(Self { region: Arc::new(region), mapping_bytes: u32::try_from(bytes).unwrap_or(u32::MAX) })
    }

    /// Where the peer finds it.
    pub fn address(&self) -> RemoteAddress {
        let remote = self.region.remote();
        RemoteAddress { address: remote.address, key: remote.key }
    }

    /// Octets that are mapped.
    pub fn mapping_bytes(&self) -> u32 {
        self.mapping_bytes
    }

    /// Its ring, for the poller.
    pub fn ring(&self, reader: RingReader) -> NativeRing {
        NativeRing { reader, memory: self.region.clone(), is_stopped: false }
    }
}

/// A control ring of version 3.
pub struct NativeRing {
    reader: RingReader,
    memory: Arc<MemoryRegion>,
    /// The connection was told so.
    is_stopped: bool,
}

impl Ring for NativeRing {
    fn poll(&mut self, batch: &mut Batch, count_max: usize) -> Result<Reading, Poison> {
        let Self { reader, memory, is_stopped } = self;
        let reading = reader.poll(&**memory, count_max, |arrival| {
            *is_stopped = false;
            match arrival {
                Arrival::Inline(text) => batch.inline(text.as_bytes()),
                Arrival::Ready(lease) => batch.push(TransportEvent::BulkReady(lease)),
                Arrival::Released(sequence) => batch.push(TransportEvent::Released(sequence)),
            }
        })?;
        if reading == Reading::Stopped && !std::mem::replace(is_stopped, true) {
            batch.push(TransportEvent::Stopped);
        }
        Ok(reading)
    }
}

/// The RX half, open to the peer for as long as this lives. The only way to its octets is a lease.
pub struct RxHalf {
    region: MemoryRegion,
    /// What the peer is told: the start minus one half.
    advertised: u64,
}

impl RxHalf {
    /// Makes one for the peer of `qp`.
    ///
    /// # Errors
    /// What the fabric lacks.
    pub fn open(qp: &dyn QueuePair, geometry: WindowGeometry) -> Result<Self, FabricError> {
        let region = qp.register(span(geometry.half_bytes(), "map bulk windows")?, Access::WRITE)?;
        // Addresses of regions are at least 2^32, and a half is shorter.
        let advertised = geometry.bulk_address(region.remote().address).ok_or(FabricError::Unaligned)?;
        Ok(Self { region, advertised })
    }

    /// What the peer is told.
    pub fn address(&self) -> RemoteAddress {
        RemoteAddress { address: self.advertised, key: self.region.key() }
    }

    /// Copies octets of the window of `lease`, from its octet `skip` on.
    ///
    /// # Panics
    /// If the lease has fewer.
    pub fn copy_out(&self, lease: &RxLease, skip: usize, into: &mut [u8]) {
        let end = skip.checked_add(into.len());
        let is_inside = end.is_some_and(|end| end <= lease.len() as usize);
        assert!(is_inside, "{} octets at {skip} of a lease of {}", into.len(), lease.len());
        // A half was mapped, so offsets within it fit usize.
        self.region.span().copy_out(lease.offset() as usize + skip, into);
    }
}
