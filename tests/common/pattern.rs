//! Octets that follow from a seed and a place, so that values need never be held whole.

/// An endless sequence of octets; any part of it can be made at any time.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Pattern(pub u64);

/// Octets made at a time.
pub const CHUNK_BYTES: usize = 64 << 10;

impl Pattern {
    /// Writes the octets from `offset` on into `out`.
    pub fn fill(self, offset: u64, out: &mut [u8]) {
        let seed = self.0.wrapping_mul(0xd6e8_feb8_6659_fd93);
        let mut at = offset;
        let mut rest = out;
        while !rest.is_empty() {
            let skip = (at % 8) as usize;
            let octets = mix(seed.wrapping_add(at / 8)).to_le_bytes();
            let count = rest.len().min(8 - skip);
            let (now, later) = rest.split_at_mut(count);
            now.copy_from_slice(&octets[skip..skip + count]);
            rest = later;
            at += count as u64;
            if at.is_multiple_of(8) {
                let whole = rest.len() / 8 * 8;
                for word in rest[..whole].chunks_exact_mut(8) {
                    word.copy_from_slice(&mix(seed.wrapping_add(at / 8)).to_le_bytes());
                    at += 8;
                }
                rest = &mut rest[whole..];
            }
        }
    }

    /// The octets from `offset` on, `len` of them.
    pub fn octets(self, offset: u64, len: usize) -> Vec<u8> {
        let mut octets = vec![0; len];
        self.fill(offset, &mut octets);
        octets
    }

    /// # Panics
    /// If `found` is not what lies at `offset`; says where the first difference is.
    pub fn check(self, offset: u64, found: &[u8], what: &str) {
        let mut expected = [0; 4096];
        for (index, part) in found.chunks(expected.len()).enumerate() {
            let at = offset + (index * expected.len()) as u64;
            let expected = &mut expected[..part.len()];
            self.fill(at, expected);
            if let Some(place) = expected.iter().zip(part).position(|(want, got)| want != got) {
                panic!(
                    "{what}: octet {} is {:#04x}, not {:#04x} of pattern {}; what follows is {:?}",
                    at + place as u64,
                    part[place],
                    expected[place],
                    self.0,
                    String::from_utf8_lossy(&part[place..part.len().min(place + 60)])
                );
            }
        }
    }
}

fn mix(n: u64) -> u64 {
    let mut z = n.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
