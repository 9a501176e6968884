//! What each side tells the other when it connects (RFC 8797), and what follows for the connection.
//!
//! ```text
//!  0             4         5            6           7
//!  | f6 ab 0e 18 | version | 0000 000 R | send size | receive size |
//! ```
//! R: the sender can have its memory invalidated by its peer. A size is `octets / 1024 - 1`. The message is sent at the
//! start of the private data; a receiver looks for it at every octet, because other layers may have put theirs in front
//! and the transport may have padded behind.

/// Octets of the message.
pub const PRIVATE_DATA_BYTES: usize = 8;
/// Inline threshold that every implementation has, and the smallest that can be told (RFC 8166 §3.3.3).
pub const INLINE_BYTES_MIN: u32 = 1024;
/// Largest inline threshold that can be told.
pub const INLINE_BYTES_MAX: u32 = 262_144;

const IDENTIFIER: [u8; 4] = [0xf6, 0xab, 0x0e, 0x18];
const VERSION: u8 = 1;
const REMOTE_INVALIDATE: u8 = 0x01;
const SIZE_UNIT: u32 = 1024;

/// What one side tells.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct PrivateData {
    /// The R bit.
    pub remote_invalidate: bool,
    /// Octets of its longest Send.
    pub send_bytes: u32,
    /// Octets of its Receives.
    pub receive_bytes: u32,
}

impl PrivateData {
    /// What holds of a peer that told nothing (RFC 8797 §5.1).
    pub const ABSENT: Self =
        Self { remote_invalidate: false, send_bytes: INLINE_BYTES_MIN, receive_bytes: INLINE_BYTES_MIN };

    /// The octets to send. Sizes are rounded down: less is told than there is, never more.
    ///
    /// # Panics
    /// For a size under [`INLINE_BYTES_MIN`], which no implementation may have.
    pub fn encode(&self) -> [u8; PRIVATE_DATA_BYTES] {
        let mut out = [0; PRIVATE_DATA_BYTES];
        out[..4].copy_from_slice(&IDENTIFIER);
        out[4] = VERSION;
        out[5] = if self.remote_invalidate { REMOTE_INVALIDATE } else { 0 };
        out[6] = size_code(self.send_bytes);
        out[7] = size_code(self.receive_bytes);
        out
    }

    /// The first message of version 1 in `octets`, at any alignment, and where it begins. What looks like one of another
    /// version is passed over (the RFC does not say whether the search goes on; it harms nobody). Reserved bits and
    /// octets behind are not looked at.
    pub fn find(octets: &[u8]) -> Option<(usize, Self)> {
        let found = |message: &[u8]| message[..4] == IDENTIFIER && message[4] == VERSION;
        let at = octets.windows(PRIVATE_DATA_BYTES).position(found)?;
        let message = &octets[at..at + PRIVATE_DATA_BYTES];
        let told = Self {
            remote_invalidate: message[5] & REMOTE_INVALIDATE != 0,
            send_bytes: size_octets(message[6]),
            receive_bytes: size_octets(message[7]),
        };
        Some((at, told))
    }

    /// What a peer told with `octets`, or what holds if it told nothing.
    pub fn of_peer(octets: &[u8]) -> Self {
        Self::find(octets).map_or(Self::ABSENT, |(_, told)| told)
    }

    /// The same as a peer hears it.
    fn as_told(self) -> Self {
        Self {
            send_bytes: size_octets(size_code(self.send_bytes)),
            receive_bytes: size_octets(size_code(self.receive_bytes)),
            ..self
        }
    }
}

/// The code of a size of `octets`, rounded down to a multiple of 1,024, and to [`INLINE_BYTES_MAX`].
///
/// # Panics
/// Under [`INLINE_BYTES_MIN`].
pub const fn size_code(octets: u32) -> u8 {
    assert!(octets >= INLINE_BYTES_MIN, "every implementation takes 1,024 octets");
    let units = octets / SIZE_UNIT - 1;
    if units > 0xff { 0xff } else { units as u8 }
}

/// Octets of the size with this code: 1,024 to 262,144.
pub const fn size_octets(code: u8) -> u32 {
    (code as u32 + 1) * SIZE_UNIT
}

/// What two sides agreed on, for the life of the connection.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Agreed {
    /// Octets of header and payload of a message from client to server at most; a message of exactly so many fits.
    pub call_inline_bytes: u32,
    /// The same from server to client.
    pub reply_inline_bytes: u32,
    /// Replies may be sent with Send with Invalidate: both sides set R (RFC 8797 §4.1).
    pub remote_invalidate: bool,
}

impl Agreed {
    /// What `client` and `server` come to: in each direction the smaller of what one sends and the other receives.
    pub fn between(client: PrivateData, server: PrivateData) -> Self {
        let (client, server) = (client.as_told(), server.as_told());
        Self {
            call_inline_bytes: client.send_bytes.min(server.receive_bytes),
            reply_inline_bytes: server.send_bytes.min(client.receive_bytes),
            remote_invalidate: client.remote_invalidate && server.remote_invalidate,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_message_is_found_at_every_alignment_and_not_when_cut() {
        let told = PrivateData { remote_invalidate: true, send_bytes: 8192, receive_bytes: 4096 };
        for before in 0..=188 {
            let mut octets = vec![0xf6; before];
            octets.extend(told.encode());
            assert_eq!(PrivateData::find(&octets), Some((before, told)));
            octets.pop();
            assert_eq!(PrivateData::of_peer(&octets), PrivateData::ABSENT);
        }
    }

    #[test]
    fn both_sides_must_want_invalidation() {
        let side = |remote_invalidate| PrivateData { remote_invalidate, ..PrivateData::ABSENT };
        for (client, server) in [(false, false), (false, true), (true, false), (true, true)] {
            assert_eq!(Agreed::between(side(client), side(server)).remote_invalidate, client && server);
        }
    }

    #[test]
    fn our_own_size_counts_as_the_peer_hears_it() {
        let odd = PrivateData { remote_invalidate: false, send_bytes: 5000, receive_bytes: 1_000_000 };
        let large = PrivateData { remote_invalidate: false, send_bytes: 262_144, receive_bytes: 262_144 };
        let agreed = Agreed::between(large, odd);
        assert_eq!((agreed.call_inline_bytes, agreed.reply_inline_bytes), (262_144, 4096));
    }

    proptest! {
        #[test]
        fn never_more_is_told_than_there_is(octets in 1024_u32..=u32::MAX) {
            let told = size_octets(size_code(octets));
            prop_assert!(told <= octets);
            prop_assert!(told == INLINE_BYTES_MAX || octets - told < 1024);
        }

        #[test]
        fn any_octets_are_private_data_or_none(octets in prop::collection::vec(prop_oneof![Just(0xf6_u8), Just(0xab), Just(0x0e), Just(0x18), Just(1), any::<u8>()], 0..200)) {
            if let Some((at, told)) = PrivateData::find(&octets) {
                prop_assert_eq!(&octets[at..at + 5], &[0xf6, 0xab, 0x0e, 0x18, 1]);
                prop_assert_eq!(PrivateData::find(&told.encode()), Some((0, told)));
            }
        }
    }
}
