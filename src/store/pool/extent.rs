//! Where segments lie, and their checksums.

use super::{CRC_BLOCK_BYTES, CRC_BLOCK_COUNT, EXTENT_ALIGN};

/// Where one segment lies: `2^order` units of 4 KiB in one file of one drive.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct ExtentId {
    offset: u32,
    drive: u16,
    file: u16,
    order: u8,
}

impl ExtentId {
    /// Largest order: one whole file of 1 GiB.
    pub const ORDER_MAX: u8 = 18;

    /// `offset` counts units of 4 KiB from the start of the file.
    ///
    /// # Panics
    /// When `order` is above [`ORDER_MAX`](Self::ORDER_MAX).
    pub const fn new(drive: u16, file: u16, offset: u32, order: u8) -> Self {
        assert!(order <= Self::ORDER_MAX, "an extent is no longer than a file");
        Self { offset, drive, file, order }
    }

    /// Index of the drive, in the order of the configuration.
    pub const fn drive(self) -> u16 {
        self.drive
    }

    /// Index of the file within its pool.
    pub const fn file(self) -> u16 {
        self.file
    }

    /// Start in units of 4 KiB.
    pub const fn offset(self) -> u32 {
        self.offset
    }

    /// Size as a power of two of units of 4 KiB.
    pub const fn order(self) -> u8 {
        self.order
    }

    /// Start in bytes from the start of the file.
    pub const fn byte_offset(self) -> u64 {
        self.offset as u64 * EXTENT_ALIGN
    }

    /// Size in bytes.
    pub const fn byte_len(self) -> u64 {
        EXTENT_ALIGN << self.order
    }
}

/// CRC32C of each 64 KiB of a segment, the last one perhaps shorter; zero for blocks it does not have.
///
/// # Panics
/// When `segment` is longer than 256 KiB.
pub fn block_crcs(segment: &[u8]) -> [u32; CRC_BLOCK_COUNT] {
    assert!(segment.len() <= CRC_BLOCK_BYTES * CRC_BLOCK_COUNT, "a segment has at most four blocks");
    let mut crcs = [0; CRC_BLOCK_COUNT];
    for (crc, block) in crcs.iter_mut().zip(segment.chunks(CRC_BLOCK_BYTES)) {
        *crc = crc32c::crc32c(block);
    }
    crcs
}
