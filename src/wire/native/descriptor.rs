//! What each side tells the other when it connects: where its ring and windows are, and how they are divided.
//!
//! ```text
//!  0      4    6      8        12     14     16        24       28       32      40        48       52     56
//!  | GBRD | 3  | 256  | slots  | 192  | log2 | ring    | ring   | ring   | nonce | bulk    | bulk   | bulk |
//!  |      |    |stride| count  | max  |window| address | key    | octets |       | address | key    |octets|
//! ```
//!
//! All numbers are in network byte order. A receiver may be shown more than 56 octets and ignores the rest.

use super::ring::{RECORD_BYTES_MAX, SLOT_BYTES, SLOTS_OFFSET};
use crate::wire::seq::BulkSequence;
use thiserror::Error;

/// Octets of a descriptor, and all the private data that a connect request may carry.
pub const DESCRIPTOR_BYTES: usize = 56;
/// The protocol's version.
pub const VERSION: u16 = 3;
/// Smallest window in octets.
pub const WINDOW_BYTES_MIN: u64 = 4096;
/// Most windows of one half.
pub const WINDOW_COUNT_MAX: u32 = 65_535;
/// Fewest slots of a control ring.
pub const SLOT_COUNT_MIN: u32 = 2;

const MAGIC: u32 = u32::from_be_bytes(*b"GBRD");
const WINDOW_SHIFT_MIN: u16 = 12;
const WINDOW_SHIFT_MAX: u16 = 31;
/// Leads the nonce of a Bulkhead.
const NONCE_TAG: u32 = u32::from_be_bytes(*b"BLKH");

/// Key of memory that its owner lets a peer reach: *rkey* to verbs, *STag* to iWARP, *handle* to RPC-over-RDMA.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct RemoteKey(pub u32);

/// An address in memory of the peer and the key that opens it.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct RemoteAddress {
    pub address: u64,
    pub key: RemoteKey,
}

/// A number that says who speaks. Peers ignore it, but for one use: a Bulkhead recognises another.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Nonce(pub u64);

impl Nonce {
    /// Nonce of a Bulkhead, with any number in its lower half.
    pub const fn ours(any: u32) -> Self {
        Self((NONCE_TAG as u64) << 32 | any as u64)
    }

    /// The peer is a Bulkhead: it reads on while it answers, and takes commands and trailers joined.
    pub const fn is_ours(self) -> bool {
        self.0 >> 32 == NONCE_TAG as u64
    }
}

/// How a control region is divided: a header of 128 octets, then slots of 256.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct RingGeometry {
    slot_count: u32,
}

impl RingGeometry {
    /// A ring of `slot_count` slots.
    ///
    /// # Errors
    /// [`GeometryError::SlotCount`] below 2, or when the region would not fit 32 bits with a page to spare.
    pub const fn new(slot_count: u32) -> Result<Self, GeometryError> {
        let geometry = Self { slot_count };
        if slot_count < SLOT_COUNT_MIN || geometry.region_bytes() > u32::MAX as u64 - 0xffff {
            return Err(GeometryError::SlotCount(slot_count));
        }
        Ok(geometry)
    }

    /// The ring whose slots take at most `budget_bytes`.
    ///
    /// # Errors
    /// As [`RingGeometry::new`].
    pub const fn within(budget_bytes: u64) -> Result<Self, GeometryError> {
        let slot_count = budget_bytes / SLOT_BYTES as u64;
        Self::new(if slot_count > u32::MAX as u64 { u32::MAX } else { slot_count as u32 })
    }

    /// Slots, at least 2.
    pub const fn slot_count(self) -> u32 {
        self.slot_count
    }

    /// Octets of header and slots.
    pub const fn region_bytes(self) -> u64 {
        SLOTS_OFFSET as u64 + SLOT_BYTES as u64 * self.slot_count as u64
    }

    /// The same in whole pages of `page_bytes` (not zero).
    pub const fn mapping_bytes(self, page_bytes: u64) -> u64 {
        self.region_bytes().next_multiple_of(page_bytes)
    }
}

/// How a bulk mapping is divided: as many windows to send from as to receive into, all of one size.
///
/// ```text
///  bulk address                    + half
///  | TX window 0 | ... | TX n - 1 | RX window 0 | ... | RX n - 1 |
/// ```
///
/// Only the RX half is ever reached by the peer. So the owner need not have the two halves in one mapping: it advertises
/// [`WindowGeometry::bulk_address`] of its RX half, under a key that opens that half alone.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct WindowGeometry {
    window_shift: u16,
    window_count: u32,
}

impl WindowGeometry {
    /// `window_count` windows of `window_bytes` in each half.
    ///
    /// # Errors
    /// [`GeometryError::WindowBytes`] unless a power of two of at least 4,096; [`GeometryError::WindowCount`] outside
    /// 1..=65,535; [`GeometryError::BulkBytes`] if both halves do not fit 32 bits.
    pub const fn new(window_bytes: u64, window_count: u32) -> Result<Self, GeometryError> {
        if !window_bytes.is_power_of_two() || window_bytes < WINDOW_BYTES_MIN || window_bytes > 1 << WINDOW_SHIFT_MAX {
            return Err(GeometryError::WindowBytes(window_bytes));
        }
        if window_count == 0 || window_count > WINDOW_COUNT_MAX {
            return Err(GeometryError::WindowCount(window_count));
        }
        let geometry = Self { window_shift: window_bytes.trailing_zeros() as u16, window_count };
        if geometry.mapping_bytes() > u32::MAX as u64 {
            return Err(GeometryError::BulkBytes(geometry.mapping_bytes()));
        }
        Ok(geometry)
    }

    /// Octets of one window.
    pub const fn window_bytes(self) -> u32 {
        1 << self.window_shift
    }

    /// Windows of one half.
    pub const fn window_count(self) -> u32 {
        self.window_count
    }

    /// Octets of one half, and the offset of the RX half.
    pub const fn half_bytes(self) -> u64 {
        self.window_bytes() as u64 * self.window_count as u64
    }

    /// Octets of both halves.
    pub const fn mapping_bytes(self) -> u64 {
        2 * self.half_bytes()
    }

    /// The bulk address to advertise for an RX half that starts at `rx_address`; `None` if it would be zero or below.
    pub const fn bulk_address(self, rx_address: u64) -> Option<u64> {
        match rx_address.checked_sub(self.half_bytes()) {
            Some(0) | None => None,
            address => address,
        }
    }

    /// Offset in the RX half of the window that carries `sequence`.
    pub const fn rx_offset(self, sequence: BulkSequence) -> u64 {
        sequence.window_index(self.window_count) as u64 * self.window_bytes() as u64
    }
}

/// What two geometries allow a sender, in either direction.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Negotiated {
    /// Octets of one fragment at most.
    pub fragment_bytes_max: u32,
    /// Fragments sent and not released at most.
    pub in_flight_max: u32,
}

impl Negotiated {
    /// The smaller of each.
    pub fn between(local: WindowGeometry, peer: WindowGeometry) -> Self {
        Self {
            fragment_bytes_max: local.window_bytes().min(peer.window_bytes()),
            in_flight_max: local.window_count().min(peer.window_count()),
        }
    }
}

/// One side's ring and windows.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Descriptor {
    pub ring: RingGeometry,
    pub ring_at: RemoteAddress,
    /// Octets of the control region as mapped, at least [`RingGeometry::region_bytes`].
    pub ring_bytes: u32,
    pub nonce: Nonce,
    pub windows: WindowGeometry,
    /// Start of the bulk mapping, whose RX half the key opens.
    pub bulk_at: RemoteAddress,
}

impl Descriptor {
    /// As private data.
    pub fn encode(&self) -> [u8; DESCRIPTOR_BYTES] {
        let mut out = [0; DESCRIPTOR_BYTES];
        out[0..4].copy_from_slice(&MAGIC.to_be_bytes());
        out[4..6].copy_from_slice(&VERSION.to_be_bytes());
        out[6..8].copy_from_slice(&(SLOT_BYTES as u16).to_be_bytes());
        out[8..12].copy_from_slice(&self.ring.slot_count.to_be_bytes());
        out[12..14].copy_from_slice(&(RECORD_BYTES_MAX as u16).to_be_bytes());
        out[14..16].copy_from_slice(&self.windows.window_shift.to_be_bytes());
        out[16..24].copy_from_slice(&self.ring_at.address.to_be_bytes());
        out[24..28].copy_from_slice(&self.ring_at.key.0.to_be_bytes());
        out[28..32].copy_from_slice(&self.ring_bytes.to_be_bytes());
        out[32..40].copy_from_slice(&self.nonce.0.to_be_bytes());
        out[40..48].copy_from_slice(&self.bulk_at.address.to_be_bytes());
        out[48..52].copy_from_slice(&self.bulk_at.key.0.to_be_bytes());
        out[52..56].copy_from_slice(&(self.windows.mapping_bytes() as u32).to_be_bytes());
        out
    }

    /// Reads private data of a peer: its first 56 octets.
    ///
    /// # Errors
    /// What is wrong with it. The connection is refused and nothing is said.
    pub fn decode(private_data: &[u8]) -> Result<Self, DescriptorError> {
        let Some(octets) = private_data.first_chunk::<DESCRIPTOR_BYTES>() else {
            return Err(DescriptorError::Short(private_data.len()));
        };
        let u16_at = |at: usize| u16::from_be_bytes([octets[at], octets[at + 1]]);
        let u32_at = |at: usize| u32::from(u16_at(at)) << 16 | u32::from(u16_at(at + 2));
        let u64_at = |at: usize| u64::from(u32_at(at)) << 32 | u64::from(u32_at(at + 4));

        let expect = |right: bool, error: DescriptorError| if right { Ok(()) } else { Err(error) };
        expect(u32_at(0) == MAGIC, DescriptorError::Magic(u32_at(0)))?;
        expect(u16_at(4) == VERSION, DescriptorError::Version(u16_at(4)))?;
        expect(usize::from(u16_at(6)) == SLOT_BYTES, DescriptorError::SlotStride(u16_at(6)))?;
        let slot_count = u32_at(8);
        expect(slot_count >= SLOT_COUNT_MIN, DescriptorError::SlotCount(slot_count))?;
        expect(usize::from(u16_at(12)) == RECORD_BYTES_MAX, DescriptorError::RecordMax(u16_at(12)))?;
        let window_shift = u16_at(14);
        let shifts = WINDOW_SHIFT_MIN..=WINDOW_SHIFT_MAX;
        expect(shifts.contains(&window_shift), DescriptorError::WindowShift(window_shift))?;

        let ring = RingGeometry { slot_count };
        let (ring_address, ring_bytes) = (u64_at(16), u32_at(28));
        expect(ring_address != 0, DescriptorError::RingAddress)?;
        let enough = u64::from(ring_bytes) >= ring.region_bytes();
        expect(enough, DescriptorError::RingBytes { bytes: ring_bytes, slot_count })?;
        let ends = ring_address.checked_add(u64::from(ring_bytes)).is_some();
        expect(ends, DescriptorError::RingRange { address: ring_address, bytes: ring_bytes })?;

        let (bulk_address, bulk_bytes) = (u64_at(40), u32_at(52));
        expect(bulk_address != 0, DescriptorError::BulkAddress)?;
        let pair_bytes = 2_u64 << window_shift;
        let whole = bulk_bytes != 0 && u64::from(bulk_bytes).is_multiple_of(pair_bytes);
        expect(whole, DescriptorError::BulkBytes { bytes: bulk_bytes, window_shift })?;
        let window_count = (u64::from(bulk_bytes) / pair_bytes) as u32;
        expect(window_count <= WINDOW_COUNT_MAX, DescriptorError::WindowCount(window_count))?;
        let ends = bulk_address.checked_add(u64::from(bulk_bytes)).is_some();
        expect(ends, DescriptorError::BulkRange { address: bulk_address, bytes: bulk_bytes })?;

        Ok(Self {
            ring,
            ring_at: RemoteAddress { address: ring_address, key: RemoteKey(u32_at(24)) },
            ring_bytes,
            nonce: Nonce(u64_at(32)),
            windows: WindowGeometry { window_shift, window_count },
            bulk_at: RemoteAddress { address: bulk_address, key: RemoteKey(u32_at(48)) },
        })
    }

    /// Where a fragment for this side goes: its RX window for `sequence`.
    pub fn window_at(&self, sequence: BulkSequence) -> RemoteAddress {
        // Cannot wrap: the whole mapping ends below 2^64, see `decode`.
        let address = self.bulk_at.address + self.windows.half_bytes() + self.windows.rx_offset(sequence);
        RemoteAddress { address, key: self.bulk_at.key }
    }
}

/// Geometry that cannot be had. The message shows the number and its bounds.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
#[non_exhaustive]
pub enum GeometryError {
    #[error("a ring of {0} slots: at least 2, and below 4 GiB in all")]
    SlotCount(u32),
    #[error("windows of {0} octets: a power of two from 4,096 to 2^31")]
    WindowBytes(u64),
    #[error("{0} windows: from 1 to 65,535")]
    WindowCount(u32),
    #[error("{0} octets of windows in both halves: below 2^32")]
    BulkBytes(u64),
}

/// Why a peer's descriptor is refused.
#[derive(Clone, Copy, Debug, Eq, Error, Hash, PartialEq)]
#[non_exhaustive]
pub enum DescriptorError {
    #[error("{0} octets of private data, fewer than 56")]
    Short(usize),
    #[error("magic {0:#010x}")]
    Magic(u32),
    #[error("version {0}, not 3")]
    Version(u16),
    #[error("slot stride {0}, not 256")]
    SlotStride(u16),
    #[error("{0} control slots, fewer than 2")]
    SlotCount(u32),
    #[error("control records of up to {0} octets, not 192")]
    RecordMax(u16),
    #[error("windows of 2^{0} octets, not from 2^12 to 2^31")]
    WindowShift(u16),
    #[error("no ring address")]
    RingAddress,
    #[error("{bytes} octets are too few for {slot_count} control slots")]
    RingBytes { bytes: u32, slot_count: u32 },
    #[error("a ring of {bytes} octets at {address:#x} wraps")]
    RingRange { address: u64, bytes: u32 },
    #[error("no bulk address")]
    BulkAddress,
    #[error("{bytes} octets are no whole pairs of windows of 2^{window_shift} octets")]
    BulkBytes { bytes: u32, window_shift: u16 },
    #[error("{0} windows, more than 65,535")]
    WindowCount(u32),
    #[error("windows of {bytes} octets at {address:#x} wrap")]
    BulkRange { address: u64, bytes: u32 },
}

impl DescriptorError {
    /// One word for counting.
    pub const fn cause(&self) -> &'static str {
        match self {
            Self::Short(_) => "short",
            Self::Magic(_) => "magic",
            Self::Version(_) => "version",
            Self::SlotStride(_) => "slot_stride",
            Self::SlotCount(_) => "slot_count",
            Self::RecordMax(_) => "record_max",
            Self::WindowShift(_) => "window_shift",
            Self::RingAddress => "ring_address",
            Self::RingBytes { .. } => "ring_bytes",
            Self::RingRange { .. } => "ring_range",
            Self::BulkAddress => "bulk_address",
            Self::BulkBytes { .. } => "bulk_bytes",
            Self::WindowCount(_) => "window_count",
            Self::BulkRange { .. } => "bulk_range",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn default() -> Descriptor {
        Descriptor {
            ring: RingGeometry::within(64 << 10).unwrap(),
            ring_at: RemoteAddress { address: 0x1000, key: RemoteKey(7) },
            ring_bytes: 69_632,
            nonce: Nonce::ours(9),
            windows: WindowGeometry::new(256 << 10, 4).unwrap(),
            bulk_at: RemoteAddress { address: 0x10_0000, key: RemoteKey(8) },
        }
    }

    #[test]
    fn our_nonce_starts_with_the_four_letters() {
        assert_eq!(default().encode()[32..36], [0x42, 0x4c, 0x4b, 0x48]);
        assert!(Nonce::ours(u32::MAX).is_ours());
        assert!(!Nonce(0).is_ours());
        assert!(!Nonce(0x484b_4c42 << 32).is_ours());
    }

    #[test]
    fn a_window_of_two_to_the_thirty_one_cannot_be_described() {
        let mut octets = default().encode();
        octets[15] = 31;
        assert_eq!(Descriptor::decode(&octets).unwrap_err().cause(), "bulk_bytes");
        assert!(WindowGeometry::new(1 << 30, 1).is_ok());
        assert_eq!(WindowGeometry::new(1 << 31, 1), Err(GeometryError::BulkBytes(1 << 32)));
    }

    #[test]
    fn a_region_that_wraps_is_refused() {
        let mut octets = default().encode();
        octets[16..24].fill(0xff);
        assert_eq!(Descriptor::decode(&octets).unwrap_err().cause(), "ring_range");
    }

    #[test]
    fn the_rx_half_alone_is_reached_from_the_advertised_address() {
        let windows = WindowGeometry::new(4096, 2).unwrap();
        let bulk = windows.bulk_address(0x10_0000_0000).unwrap();
        let descriptor =
            Descriptor { windows, bulk_at: RemoteAddress { address: bulk, key: RemoteKey(1) }, ..default() };
        let decoded = Descriptor::decode(&descriptor.encode()).unwrap();
        assert_eq!(decoded.window_at(BulkSequence::FIRST).address, 0x10_0000_0000);
        assert_eq!(decoded.window_at(BulkSequence::new(2).unwrap()).address, 0x10_0000_1000);
        assert_eq!(decoded.window_at(BulkSequence::new(3).unwrap()).address, 0x10_0000_0000);
        assert_eq!(windows.bulk_address(windows.half_bytes()), None, "zero is no address");
        assert_eq!(windows.bulk_address(1), None);
    }

    #[test]
    fn a_ring_must_fit_four_gibibytes() {
        assert_eq!(RingGeometry::within(u64::MAX), Err(GeometryError::SlotCount(u32::MAX)));
        assert_eq!(RingGeometry::new(1), Err(GeometryError::SlotCount(1)));
        let largest = RingGeometry::new(0xff_fe00).unwrap();
        assert!(largest.mapping_bytes(64 << 10) <= u64::from(u32::MAX));
    }
}
