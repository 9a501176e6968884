//! MPA: start-up frames (RFC 5044 §7.1, RFC 6581 §9) and framing (RFC 5044 §4).
//!
//! ```text
//! start-up frame:  key (16) | flags (1) | revision (1) | private data length (2) | private data…
//! flags:           0x80 markers  0x40 CRC  0x20 rejected  0x10 connection word first in the private data
//! connection word: 15 peer-to-peer  14 RTR Send  13..0 IRD | 15 RTR Write  14 RTR Read  13..0 ORD
//! ```

/// Octets before the private data.
pub const FRAME_BYTES_MIN: usize = 20;
/// Most octets of private data, the connection word included.
pub const PRIVATE_DATA_BYTES_MAX: usize = 512;
/// Octets of the connection word.
pub const WORD_BYTES: usize = 4;
/// "Not negotiated" in place of a depth (RFC 6581 §9.1).
pub const DEPTH_UNSTATED: u16 = 0x3fff;
/// Longest ULPDU a sender may make (RFC 5044 §3).
pub const ULPDU_BYTES_MAX: usize = 64_768;
/// Shortest ULPDU: a tagged header alone.
pub const ULPDU_BYTES_MIN: usize = 14;
/// The longest FPDU that its length field can announce, whole.
pub const FPDU_BYTES_MAX: usize = fpdu_len(u16::MAX as usize);

const CRC_BYTES: usize = 4;
const LENGTH_BYTES: usize = 2;

/// Which of the two start-up frames.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum FrameKind {
    Request,
    Reply,
}

impl FrameKind {
    const fn key(self) -> &'static [u8; 16] {
        match self {
            Self::Request => b"MPA ID Req Frame",
            Self::Reply => b"MPA ID Rep Frame",
        }
    }
}

/// A start-up frame.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Frame {
    /// 1 or 2.
    pub revision: u8,
    /// The sender wants markers in what it receives.
    pub markers: bool,
    /// The sender wants CRCs. They are used in both directions if either end wants them.
    pub crc: bool,
    /// In a Reply: declined.
    pub rejected: bool,
    /// In revision 2 alone.
    pub word: Option<ConnectionWord>,
    /// What the upper layer sees: at most 512 octets, 508 with a connection word.
    pub private_data: Vec<u8>,
}

/// The enhanced connection set-up of RFC 6581.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct ConnectionWord {
    /// The initiator sends a ready-to-receive frame first, so that the responder may send as soon as it came.
    pub peer_to_peer: bool,
    pub rtr_send: bool,
    pub rtr_write: bool,
    pub rtr_read: bool,
    /// Reads its sender can serve at once, 0..=0x3fff.
    pub ird: u16,
    /// Reads its sender will have outstanding, 0..=0x3fff.
    pub ord: u16,
}

/// A start-up frame nobody can talk to: close without an answer (RFC 5044 §7.1.2).
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum FrameError {
    #[error("no MPA start-up frame")]
    Key,
    #[error("MPA revision {0}")]
    Revision(u8),
    #[error("{0} octets of private data announced, the limit is {PRIVATE_DATA_BYTES_MAX}")]
    PrivateDataTooLong(usize),
    #[error("a connection word was announced in {0} octets of private data")]
    NoRoomForWord(usize),
}

impl Frame {
    /// Reads a frame at the start of `input`, and how many octets it has. `None` until all of it is there.
    ///
    /// # Errors
    /// As soon as the octets there cannot begin a frame of this kind.
    pub fn decode(kind: FrameKind, input: &[u8]) -> Result<Option<(Self, usize)>, FrameError> {
        let key_len = input.len().min(16);
        if input[..key_len] != kind.key()[..key_len] {
            return Err(FrameError::Key);
        }
        let Some((head, rest)) = input.split_first_chunk::<FRAME_BYTES_MIN>() else { return Ok(None) };
        let (flags, revision) = (head[16], head[17]);
        if !(1..=2).contains(&revision) {
            return Err(FrameError::Revision(revision));
        }
        let len = usize::from(u16::from_be_bytes([head[18], head[19]]));
        if len > PRIVATE_DATA_BYTES_MAX {
            return Err(FrameError::PrivateDataTooLong(len));
        }
        // In revision 1 the bit is reserved and not looked at.
        let has_word = flags & 0x10 != 0 && revision >= 2;
        if has_word && len < WORD_BYTES {
            return Err(FrameError::NoRoomForWord(len));
        }
        let Some(data) = rest.get(..len) else { return Ok(None) };
        let (word, private_data) = match data.split_first_chunk::<WORD_BYTES>() {
            Some((word, rest)) if has_word => (Some(ConnectionWord::decode(*word)), rest),
            _ => (None, data),
        };
        let frame = Self {
            revision,
            markers: flags & 0x80 != 0,
            crc: flags & 0x40 != 0,
            rejected: flags & 0x20 != 0,
            word,
            private_data: private_data.to_vec(),
        };
        Ok(Some((frame, FRAME_BYTES_MIN + len)))
    }

    /// The octets of the frame.
    ///
    /// # Panics
    /// When the private data is too long or a connection word goes with revision 1.
    pub fn encode(&self, kind: FrameKind) -> Vec<u8> {
        assert!(self.word.is_none() || self.revision >= 2, "revision 1 has no connection word");
        let len = self.private_data.len() + self.word.map_or(0, |_| WORD_BYTES);
        assert!(len <= PRIVATE_DATA_BYTES_MAX, "{len} octets of private data");
        let mut out = Vec::with_capacity(FRAME_BYTES_MIN + len);
        out.extend_from_slice(kind.key());
        let flag = |set: bool, bit: u8| if set { bit } else { 0 };
        out.push(
            flag(self.markers, 0x80)
                | flag(self.crc, 0x40)
                | flag(self.rejected, 0x20)
                | flag(self.word.is_some(), 0x10),
        );
        out.push(self.revision);
        out.extend_from_slice(&(len as u16).to_be_bytes());
        out.extend(self.word.map(ConnectionWord::encode).iter().flatten());
        out.extend_from_slice(&self.private_data);
        out
    }
}

impl ConnectionWord {
    fn decode(octets: [u8; WORD_BYTES]) -> Self {
        let high = u16::from_be_bytes([octets[0], octets[1]]);
        let low = u16::from_be_bytes([octets[2], octets[3]]);
        Self {
            peer_to_peer: high & 0x8000 != 0,
            rtr_send: high & 0x4000 != 0,
            ird: high & DEPTH_UNSTATED,
            rtr_write: low & 0x8000 != 0,
            rtr_read: low & 0x4000 != 0,
            ord: low & DEPTH_UNSTATED,
        }
    }

    fn encode(self) -> [u8; WORD_BYTES] {
        let bit = |set: bool, bit: u16| if set { bit } else { 0 };
        let high = bit(self.peer_to_peer, 0x8000) | bit(self.rtr_send, 0x4000) | (self.ird & DEPTH_UNSTATED);
        let low = bit(self.rtr_write, 0x8000) | bit(self.rtr_read, 0x4000) | (self.ord & DEPTH_UNSTATED);
        let ([a, b], [c, d]) = (high.to_be_bytes(), low.to_be_bytes());
        [a, b, c, d]
    }
}

/// Octets of a whole FPDU that carries a ULPDU of `ulpdu_len` octets.
pub const fn fpdu_len(ulpdu_len: usize) -> usize {
    (LENGTH_BYTES + ulpdu_len).next_multiple_of(4) + CRC_BYTES
}

/// The longest ULPDU whose FPDU fills a TCP segment of `emss` octets (RFC 5044 §4.5), within the bounds of §3.
pub fn mulpdu(emss: usize) -> usize {
    emss.saturating_sub(LENGTH_BYTES + CRC_BYTES + emss % 4).clamp(128, ULPDU_BYTES_MAX)
}

/// Why a frame on the stream cannot be taken. There is no way back into step.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum FpduError {
    #[error("a ULPDU of {0} octets has no room for a header")]
    TooShort(usize),
    #[error("CRC {found:#010x}, computed {computed:#010x}")]
    Crc { found: u32, computed: u32 },
}

/// Splits the first FPDU off: its ULPDU and how many octets the FPDU has. `None` until all of it is there.
///
/// # Errors
/// [`FpduError::TooShort`] as soon as the length is there, [`FpduError::Crc`] when `crc` is on and it differs.
pub fn split_fpdu(input: &[u8], crc: bool) -> Result<Option<(&[u8], usize)>, FpduError> {
    let Some((length, _)) = input.split_first_chunk::<LENGTH_BYTES>() else { return Ok(None) };
    let ulpdu_len = usize::from(u16::from_be_bytes(*length));
    if ulpdu_len < ULPDU_BYTES_MIN {
        return Err(FpduError::TooShort(ulpdu_len));
    }
    let total = fpdu_len(ulpdu_len);
    let Some(fpdu) = input.get(..total) else { return Ok(None) };
    let (covered, trailer) = fpdu.split_at(total - CRC_BYTES);
    if crc {
        let found = u32::from_le_bytes(trailer.try_into().expect("four octets"));
        let computed = crc32c::crc32c(covered);
        if found != computed {
            return Err(FpduError::Crc { found, computed });
        }
    }
    Ok(Some((&fpdu[LENGTH_BYTES..LENGTH_BYTES + ulpdu_len], total)))
}

/// Appends what precedes the payload: the length and the DDP header.
///
/// # Panics
/// When the ULPDU would be too long for the length field.
pub fn put_head(out: &mut Vec<u8>, header: &[u8], payload_len: usize) {
    let ulpdu_len = u16::try_from(header.len() + payload_len).expect("segments are cut to fit");
    out.extend_from_slice(&ulpdu_len.to_be_bytes());
    out.extend_from_slice(header);
}

/// Appends what follows the payload: padding and the CRC over `head` (as [`put_head`] made it), payload and padding, or
/// zero where CRCs are off.
pub fn put_trailer(out: &mut Vec<u8>, head: &[u8], payload: &[u8], crc: bool) {
    let covered = head.len() + payload.len();
    let pad = &[0; 3][..covered.next_multiple_of(4) - covered];
    let value = if crc {
        [payload, pad].iter().fold(crc32c::crc32c(head), |value, part| crc32c::crc32c_append(value, part))
    } else {
        0
    };
    out.extend_from_slice(pad);
    out.extend_from_slice(&value.to_le_bytes());
}

/// Appends a whole FPDU.
pub fn put_fpdu(out: &mut Vec<u8>, header: &[u8], payload: &[u8], crc: bool) {
    let start = out.len();
    put_head(out, header, payload.len());
    out.extend_from_slice(payload);
    let covered = out.len() - start;
    out.resize(start + covered.next_multiple_of(4), 0);
    let value = if crc { crc32c::crc32c(&out[start..]) } else { 0 };
    out.extend_from_slice(&value.to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn garbage_is_refused_at_its_first_wrong_octet() {
        assert_eq!(Frame::decode(FrameKind::Request, b""), Ok(None));
        assert_eq!(Frame::decode(FrameKind::Request, b"MPA ID"), Ok(None));
        assert_eq!(Frame::decode(FrameKind::Request, b"GET /"), Err(FrameError::Key));
        assert_eq!(Frame::decode(FrameKind::Reply, b"MPA ID Req Frame"), Err(FrameError::Key));
    }

    #[test]
    fn a_frame_comes_back_whole_and_not_before_its_last_octet() {
        let word = ConnectionWord { peer_to_peer: true, rtr_write: true, ird: 16, ord: 0x3fff, ..Default::default() };
        let frame = Frame {
            revision: 2,
            markers: false,
            crc: true,
            rejected: true,
            word: Some(word),
            private_data: (0..56).collect(),
        };
        let mut octets = frame.encode(FrameKind::Reply);
        assert_eq!(octets.len(), 80);
        for len in 0..80 {
            assert_eq!(Frame::decode(FrameKind::Reply, &octets[..len]), Ok(None));
        }
        octets.push(9);
        assert_eq!(Frame::decode(FrameKind::Reply, &octets), Ok(Some((frame, 80))));
    }

    #[test]
    fn announced_lengths_are_bounded_before_anything_is_awaited() {
        let mut octets = b"MPA ID Req Frame\x00\x02\x02\x01".to_vec();
        assert_eq!(Frame::decode(FrameKind::Request, &octets), Err(FrameError::PrivateDataTooLong(513)));
        octets[19] = 0;
        assert_eq!(Frame::decode(FrameKind::Request, &octets), Ok(None));
        assert_eq!(split_fpdu(&[0, 13], true), Err(FpduError::TooShort(13)));
        assert_eq!(split_fpdu(&[0, 14], true), Ok(None));
    }

    /// RFC 5044 Figure 5: a marker, then a Send with MSN 1 of 24 zero octets.
    #[test]
    fn the_crc_is_the_one_printed_in_the_rfc() {
        let mut covered = vec![0, 0, 0, 0, 0, 42, 0x41, 0x43];
        covered.extend_from_slice(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0]);
        covered.extend_from_slice(&[0; 24]);
        assert_eq!(crc32c::crc32c(&covered).to_le_bytes(), [0x52, 0x23, 0x99, 0x83]);
        assert_eq!(crc32c::crc32c(b"123456789").to_le_bytes(), [0x83, 0x92, 0x06, 0xe3]);
    }

    #[test]
    fn the_parts_of_an_fpdu_make_the_whole() {
        for len in 0..9 {
            for crc in [false, true] {
                let payload = &[1, 2, 3, 4, 5, 6, 7, 8][..len];
                let mut whole = Vec::new();
                put_fpdu(&mut whole, &[7; 14], payload, crc);
                let mut parts = Vec::new();
                put_head(&mut parts, &[7; 14], len);
                let head = parts.clone();
                parts.extend_from_slice(payload);
                put_trailer(&mut parts, &head, payload, crc);
                assert_eq!(parts, whole);
                assert_eq!(whole.len(), fpdu_len(14 + len));
                let (ulpdu, total) = split_fpdu(&whole, crc).unwrap().unwrap();
                assert_eq!((&ulpdu[14..], total), (payload, whole.len()));
            }
        }
    }

    #[test]
    fn a_segment_size_makes_an_fpdu_that_fits() {
        assert_eq!(mulpdu(1448), 1442);
        assert_eq!(mulpdu(1447), 1438);
        assert_eq!((mulpdu(0), mulpdu(1 << 20)), (128, ULPDU_BYTES_MAX));
        for emss in 200..3000 {
            assert!(fpdu_len(mulpdu(emss)) <= emss);
        }
    }
}
