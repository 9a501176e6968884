//! XDR (RFC 4506): big-endian items in multiples of four octets.
//!
//! ```text
//! u32        | value (4) |                      enum, int and unsigned int alike
//! u64        | high (4) | low (4) |
//! bool       | 0 or 1 (4) |                     anything else is an error (RFC 4506 §4.4)
//! optional   | 0 (4) |  or  | 1 (4) | item |    likewise (§4.19)
//! opaque[n]  | n octets | roundup (0..3) |      no length word (§4.9)
//! opaque<>   | n (4) | n octets | roundup |     (§4.10; a string too, §4.11)
//! array<>    | n (4) | n items |                (§4.13)
//! list       { | 1 (4) | item | }* | 0 (4) |    optional-data, one after the other
//! ```
//!
//! **Roundup octets.** They are sent as zeros and read past without a look. RFC 4506 §3 calls them zeros, but a roundup
//! that travels in a chunk is whatever lay in the sender's memory behind the item (RFC 8166 §3.4.5.2), and it carries no
//! value: to refuse it would cut off peers that do no harm. They must be there, though.

use thiserror::Error;

/// Octets of an XDR unit.
pub const UNIT_BYTES: usize = 4;

/// Roundup octets behind an item of `len` octets: 0 to 3.
pub const fn roundup_bytes(len: u64) -> u64 {
    len.wrapping_neg() % UNIT_BYTES as u64
}

/// Why octets are not the item that was wanted of them.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
#[error("octet {offset}: {wanted}")]
pub struct XdrError {
    /// Where the item began, from the start of what the reader was given.
    pub offset: usize,
    /// What was wanted there.
    pub wanted: Wanted,
}

/// What was wanted, and what was there instead.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
#[non_exhaustive]
pub enum Wanted {
    /// Octets, roundup included.
    #[error("wanted {needed} octets, {left} are left")]
    Octets { needed: u64, left: usize },
    #[error("wanted 0 or 1, found {0:#x}")]
    Boolean(u32),
    /// Octets of an opaque, or items of an array or list.
    #[error("wanted a count of at most {limit}, found {found}")]
    AtMost { limit: usize, found: u64 },
    /// A value that the enumeration or the caller's rule has.
    #[error("wanted {what}, found {found:#x}")]
    Value { what: &'static str, found: u32 },
    #[error("wanted the end, {left} octets are left")]
    End { left: usize },
}

/// Takes items from octets, front to back. Nothing is allocated but what [`Reader::array`] and [`Reader::list`] return,
/// and no more of that than the octets that are left can hold.
#[derive(Clone, Debug)]
pub struct Reader<'a> {
    octets: &'a [u8],
    offset: usize,
}

impl<'a> Reader<'a> {
    pub const fn new(octets: &'a [u8]) -> Self {
        Self { octets, offset: 0 }
    }

    /// Octets taken so far.
    pub const fn offset(&self) -> usize {
        self.offset
    }

    /// Octets not yet taken.
    pub const fn left(&self) -> usize {
        self.octets.len() - self.offset
    }

    /// # Errors
    /// [`Wanted::Octets`], as every item that is cut.
    pub fn u32(&mut self) -> Result<u32, XdrError> {
        self.octets_exactly().map(u32::from_be_bytes)
    }

    /// # Errors
    /// [`Wanted::Octets`].
    pub fn u64(&mut self) -> Result<u64, XdrError> {
        self.octets_exactly().map(u64::from_be_bytes)
    }

    /// A boolean, or the word that says whether optional data follows.
    ///
    /// # Errors
    /// [`Wanted::Boolean`] for anything but 0 and 1.
    pub fn bool(&mut self) -> Result<bool, XdrError> {
        let offset = self.offset;
        match self.u32()? {
            0 => Ok(false),
            1 => Ok(true),
            found => Err(XdrError { offset, wanted: Wanted::Boolean(found) }),
        }
    }

    /// Optional data: `item` reads it if it is there.
    ///
    /// # Errors
    /// [`Wanted::Boolean`], and those of `item`.
    pub fn optional<T, E: From<XdrError>>(
        &mut self,
        item: impl FnOnce(&mut Self) -> Result<T, E>,
    ) -> Result<Option<T>, E> {
        if self.bool()? { item(self).map(Some) } else { Ok(None) }
    }

    /// A word that `value` has something for; `what` is said of one that it has nothing for.
    ///
    /// # Errors
    /// [`Wanted::Value`].
    pub fn value<T>(&mut self, what: &'static str, value: impl FnOnce(u32) -> Option<T>) -> Result<T, XdrError> {
        let offset = self.offset;
        let found = self.u32()?;
        value(found).ok_or(XdrError { offset, wanted: Wanted::Value { what, found } })
    }

    /// An opaque of a length known beforehand; its roundup is read past.
    ///
    /// # Errors
    /// [`Wanted::Octets`].
    pub fn opaque_fixed(&mut self, len: usize) -> Result<&'a [u8], XdrError> {
        let needed = (len as u64).saturating_add(roundup_bytes(len as u64));
        if needed > self.left() as u64 {
            return Err(self.cut(needed));
        }
        let item = &self.octets[self.offset..self.offset + len];
        self.offset += needed as usize;
        Ok(item)
    }

    /// An opaque or string of at most `limit` octets; its roundup is read past.
    ///
    /// # Errors
    /// [`Wanted::AtMost`], [`Wanted::Octets`].
    pub fn opaque(&mut self, limit: usize) -> Result<&'a [u8], XdrError> {
        let len = self.count(limit, 0)?;
        self.opaque_fixed(len)
    }

    /// A count of at most `limit` items, each of `item_bytes_min` octets or more, that are all still to come: so the
    /// caller may allocate for them. Zero octets for an item leaves only the limit.
    ///
    /// # Errors
    /// [`Wanted::AtMost`], [`Wanted::Octets`] where items of the least size do not fit what is left.
    pub fn count(&mut self, limit: usize, item_bytes_min: usize) -> Result<usize, XdrError> {
        let offset = self.offset;
        let found = self.u32()?;
        if u64::from(found) > limit as u64 {
            return Err(XdrError { offset, wanted: Wanted::AtMost { limit, found: u64::from(found) } });
        }
        let needed = u64::from(found).saturating_mul(item_bytes_min as u64);
        if needed > self.left() as u64 {
            return Err(self.cut(needed));
        }
        Ok(found as usize)
    }

    /// An array of at most `limit` items of `item_bytes_min` octets or more, each read by `item`.
    ///
    /// # Errors
    /// Those of [`Reader::count`] and of `item`.
    pub fn array<T, E: From<XdrError>>(
        &mut self,
        limit: usize,
        item_bytes_min: usize,
        mut item: impl FnMut(&mut Self) -> Result<T, E>,
    ) -> Result<Vec<T>, E> {
        let count = self.count(limit, item_bytes_min)?;
        let mut items = Vec::with_capacity(if item_bytes_min == 0 { 0 } else { count });
        for _ in 0..count {
            items.push(item(self)?);
        }
        Ok(items)
    }

    /// A list of at most `limit` items, each behind a word that says it is there, each read by `item`.
    ///
    /// # Errors
    /// [`Wanted::AtMost`] at the item too many, [`Wanted::Boolean`], and those of `item`.
    pub fn list<T, E: From<XdrError>>(
        &mut self,
        limit: usize,
        mut item: impl FnMut(&mut Self) -> Result<T, E>,
    ) -> Result<Vec<T>, E> {
        let mut items = Vec::new();
        loop {
            let offset = self.offset;
            if !self.bool()? {
                return Ok(items);
            }
            if items.len() == limit {
                let found = limit as u64 + 1;
                return Err(XdrError { offset, wanted: Wanted::AtMost { limit, found } }.into());
            }
            items.push(item(self)?);
        }
    }

    /// All that is left, as it is.
    pub fn rest(&mut self) -> &'a [u8] {
        let rest = &self.octets[self.offset..];
        self.offset = self.octets.len();
        rest
    }

    /// Nothing may be left.
    ///
    /// # Errors
    /// [`Wanted::End`].
    pub fn finish(&self) -> Result<(), XdrError> {
        match self.left() {
            0 => Ok(()),
            left => Err(XdrError { offset: self.offset, wanted: Wanted::End { left } }),
        }
    }

    fn octets_exactly<const N: usize>(&mut self) -> Result<[u8; N], XdrError> {
        match self.octets[self.offset..].first_chunk::<N>() {
            Some(octets) => {
                self.offset += N;
                Ok(*octets)
            }
            None => Err(self.cut(N as u64)),
        }
    }

    fn cut(&self, needed: u64) -> XdrError {
        XdrError { offset: self.offset, wanted: Wanted::Octets { needed, left: self.left() } }
    }
}

/// An item that is read and written as it is declared.
pub trait Codec: Sized {
    /// Octets that it has at least.
    const BYTES_MIN: usize;

    /// # Errors
    /// [`XdrError`].
    fn read(reader: &mut Reader<'_>) -> Result<Self, XdrError>;

    fn write(&self, writer: &mut Writer);
}

impl Codec for u32 {
    const BYTES_MIN: usize = 4;

    fn read(reader: &mut Reader<'_>) -> Result<Self, XdrError> {
        reader.u32()
    }

    fn write(&self, writer: &mut Writer) {
        writer.u32(*self);
    }
}

impl Codec for u64 {
    const BYTES_MIN: usize = 8;

    fn read(reader: &mut Reader<'_>) -> Result<Self, XdrError> {
        reader.u64()
    }

    fn write(&self, writer: &mut Writer) {
        writer.u64(*self);
    }
}

impl Codec for bool {
    const BYTES_MIN: usize = 4;

    fn read(reader: &mut Reader<'_>) -> Result<Self, XdrError> {
        reader.bool()
    }

    fn write(&self, writer: &mut Writer) {
        writer.bool(*self);
    }
}

/// An opaque of a length known beforehand.
impl<const N: usize> Codec for [u8; N] {
    const BYTES_MIN: usize = N + roundup_bytes(N as u64) as usize;

    fn read(reader: &mut Reader<'_>) -> Result<Self, XdrError> {
        let octets = reader.opaque_fixed(N)?;
        Ok(*octets.first_chunk().expect("as many as were asked for"))
    }

    fn write(&self, writer: &mut Writer) {
        writer.opaque_fixed(self);
    }
}

/// Optional data, or a union of a boolean that has nothing where it is false: the same octets.
impl<T: Codec> Codec for Option<T> {
    const BYTES_MIN: usize = 4;

    fn read(reader: &mut Reader<'_>) -> Result<Self, XdrError> {
        reader.optional(T::read)
    }

    fn write(&self, writer: &mut Writer) {
        writer.optional(self.as_ref(), |writer, value| value.write(writer));
    }
}

/// Void.
impl Codec for () {
    const BYTES_MIN: usize = 0;

    fn read(_: &mut Reader<'_>) -> Result<Self, XdrError> {
        Ok(())
    }

    fn write(&self, _: &mut Writer) {}
}

/// Declares a struct whose fields go over the wire in the order they are named, and each is named once.
macro_rules! codec_struct {
    ($(#[$meta:meta])* $vis:vis struct $name:ident { $($(#[$field_meta:meta])* $field_vis:vis $field:ident: $type:ty,)+ }) => {
        $(#[$meta])*
        $vis struct $name { $($(#[$field_meta])* $field_vis $field: $type,)+ }

        impl $crate::wire::codec::Codec for $name {
            const BYTES_MIN: usize = 0 $(+ <$type as $crate::wire::codec::Codec>::BYTES_MIN)+;

            fn read(reader: &mut $crate::wire::codec::Reader<'_>) -> Result<Self, $crate::wire::codec::XdrError> {
                Ok(Self { $($field: $crate::wire::codec::Codec::read(reader)?,)+ })
            }

            fn write(&self, writer: &mut $crate::wire::codec::Writer) {
                $($crate::wire::codec::Codec::write(&self.$field, writer);)+
            }
        }
    };
}
pub(crate) use codec_struct;

/// Declares a type of its own around one that goes over the wire.
macro_rules! codec_newtype {
    ($(#[$meta:meta])* $vis:vis struct $name:ident($inner:ty);) => {
        $(#[$meta])*
        $vis struct $name(pub $inner);

        impl $crate::wire::codec::Codec for $name {
            const BYTES_MIN: usize = <$inner as $crate::wire::codec::Codec>::BYTES_MIN;

            fn read(reader: &mut $crate::wire::codec::Reader<'_>) -> Result<Self, $crate::wire::codec::XdrError> {
                <$inner as $crate::wire::codec::Codec>::read(reader).map(Self)
            }

            fn write(&self, writer: &mut $crate::wire::codec::Writer) {
                $crate::wire::codec::Codec::write(&self.0, writer);
            }
        }
    };
}
pub(crate) use codec_newtype;

/// Declares an enumeration whose values are named once, each with its number; `$what` is said where another is found.
macro_rules! codec_enum {
    ($(#[$meta:meta])* $vis:vis enum $name:ident, $what:literal { $($(#[$value_meta:meta])* $value:ident = $number:literal,)+ }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
        #[repr(u32)]
        $vis enum $name { $($(#[$value_meta])* $value = $number,)+ }

        impl $name {
            /// All there are.
            pub const ALL: &'static [Self] = &[$(Self::$value,)+];

            pub const fn number(self) -> u32 {
                self as u32
            }

            /// The value of that number.
            pub const fn from_number(number: u32) -> Option<Self> {
                match number {
                    $($number => Some(Self::$value),)+
                    _ => None,
                }
            }
        }

        impl $crate::wire::codec::Codec for $name {
            const BYTES_MIN: usize = 4;

            fn read(reader: &mut $crate::wire::codec::Reader<'_>) -> Result<Self, $crate::wire::codec::XdrError> {
                reader.value($what, Self::from_number)
            }

            fn write(&self, writer: &mut $crate::wire::codec::Writer) {
                writer.u32(self.number());
            }
        }
    };
}
pub(crate) use codec_enum;

/// Puts items one behind the other.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Writer {
    out: Vec<u8>,
}

impl Writer {
    pub const fn new() -> Self {
        Self { out: Vec::new() }
    }

    /// One that does not allocate before `capacity` octets.
    pub fn with_capacity(capacity: usize) -> Self {
        Self { out: Vec::with_capacity(capacity) }
    }

    /// One that goes on behind `out`.
    pub const fn behind(out: Vec<u8>) -> Self {
        Self { out }
    }

    /// Octets so far.
    pub fn len(&self) -> usize {
        self.out.len()
    }

    pub fn is_empty(&self) -> bool {
        self.out.is_empty()
    }

    pub fn u32(&mut self, value: u32) {
        self.out.extend_from_slice(&value.to_be_bytes());
    }

    pub fn u64(&mut self, value: u64) {
        self.out.extend_from_slice(&value.to_be_bytes());
    }

    pub fn bool(&mut self, value: bool) {
        self.u32(u32::from(value));
    }

    /// Optional data: `item` writes it if it is there.
    pub fn optional<T>(&mut self, value: Option<T>, item: impl FnOnce(&mut Self, T)) {
        self.bool(value.is_some());
        if let Some(value) = value {
            item(self, value);
        }
    }

    /// An opaque of a length that the reader knows, and its roundup.
    pub fn opaque_fixed(&mut self, octets: &[u8]) {
        self.out.extend_from_slice(octets);
        let roundup = roundup_bytes(octets.len() as u64) as usize;
        self.out.extend_from_slice(&[0; UNIT_BYTES - 1][..roundup]);
    }

    /// A length, an opaque or string, and its roundup.
    ///
    /// # Panics
    /// Past 2^32 - 1 octets.
    pub fn opaque(&mut self, octets: &[u8]) {
        self.count(octets.len());
        self.opaque_fixed(octets);
    }

    /// The word before an opaque or an array.
    ///
    /// # Panics
    /// Past 2^32 - 1.
    pub fn count(&mut self, count: usize) {
        self.u32(u32::try_from(count).expect("a count is a word"));
    }

    /// A count and the items, each written by `item`.
    ///
    /// # Panics
    /// Past 2^32 - 1 items.
    pub fn array<T>(&mut self, items: &[T], mut item: impl FnMut(&mut Self, &T)) {
        self.count(items.len());
        for each in items {
            item(self, each);
        }
    }

    /// The items, each behind a word that says it is there, and the word that says no more.
    pub fn list<T>(&mut self, items: impl IntoIterator<Item = T>, mut item: impl FnMut(&mut Self, T)) {
        for each in items {
            self.bool(true);
            item(self, each);
        }
        self.bool(false);
    }

    /// Octets that are encoded already, as they are.
    pub fn encoded(&mut self, octets: &[u8]) {
        self.out.extend_from_slice(octets);
    }

    /// What was written.
    pub fn finish(self) -> Vec<u8> {
        self.out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// One item of any type.
    #[derive(Clone, Debug, PartialEq)]
    enum Item {
        Word(u32),
        Hyper(u64),
        Bool(bool),
        Optional(Option<u64>),
        Fixed(Vec<u8>),
        Opaque(Vec<u8>),
        Array(Vec<u64>),
        List(Vec<u32>),
    }

    fn item() -> impl Strategy<Value = Item> {
        let octets = || prop::collection::vec(any::<u8>(), 0..40);
        prop_oneof![
            any::<u32>().prop_map(Item::Word),
            any::<u64>().prop_map(Item::Hyper),
            any::<bool>().prop_map(Item::Bool),
            any::<Option<u64>>().prop_map(Item::Optional),
            octets().prop_map(Item::Fixed),
            octets().prop_map(Item::Opaque),
            prop::collection::vec(any::<u64>(), 0..9).prop_map(Item::Array),
            prop::collection::vec(any::<u32>(), 0..9).prop_map(Item::List),
        ]
    }

    fn write(writer: &mut Writer, item: &Item) {
        match item {
            Item::Word(value) => writer.u32(*value),
            Item::Hyper(value) => writer.u64(*value),
            Item::Bool(value) => writer.bool(*value),
            Item::Optional(value) => writer.optional(*value, Writer::u64),
            Item::Fixed(octets) => writer.opaque_fixed(octets),
            Item::Opaque(octets) => writer.opaque(octets),
            Item::Array(items) => writer.array(items, |writer, item| writer.u64(*item)),
            Item::List(items) => writer.list(items.iter().copied(), Writer::u32),
        }
    }

    /// Reads an item of the same type (and, for an opaque of fixed length, of the same length).
    fn read(reader: &mut Reader<'_>, like: &Item) -> Result<Item, XdrError> {
        Ok(match like {
            Item::Word(_) => Item::Word(reader.u32()?),
            Item::Hyper(_) => Item::Hyper(reader.u64()?),
            Item::Bool(_) => Item::Bool(reader.bool()?),
            Item::Optional(_) => Item::Optional(reader.optional(Reader::u64)?),
            Item::Fixed(octets) => Item::Fixed(reader.opaque_fixed(octets.len())?.to_vec()),
            Item::Opaque(_) => Item::Opaque(reader.opaque(40)?.to_vec()),
            Item::Array(_) => Item::Array(reader.array(9, 8, Reader::u64)?),
            Item::List(_) => Item::List(reader.list(9, Reader::u32)?),
        })
    }

    proptest! {
        #[test]
        fn what_was_written_is_read(items in prop::collection::vec(item(), 0..12), rest in prop::collection::vec(any::<u8>(), 0..9)) {
            let mut writer = Writer::new();
            let mut ends = Vec::new();
            for item in &items {
                write(&mut writer, item);
                prop_assert_eq!(writer.len() % UNIT_BYTES, 0);
                ends.push(writer.len());
            }
            writer.encoded(&rest);
            let octets = writer.finish();
            let mut reader = Reader::new(&octets);
            for (item, end) in items.iter().zip(ends) {
                prop_assert_eq!(read(&mut reader, item).unwrap(), item.clone());
                prop_assert_eq!(reader.offset(), end);
            }
            prop_assert_eq!(reader.rest(), &rest[..]);
            prop_assert_eq!(reader.finish(), Ok(()));
        }

        #[test]
        fn a_cut_item_is_an_error_that_says_where(item in item(), cut in any::<prop::sample::Index>()) {
            let mut writer = Writer::new();
            write(&mut writer, &item);
            let octets = writer.finish();
            prop_assume!(!octets.is_empty());
            let cut = cut.index(octets.len());
            let error = read(&mut Reader::new(&octets[..cut]), &item).unwrap_err();
            prop_assert!(error.offset <= cut);
            let left = cut - error.offset;
            prop_assert!(
                matches!(error.wanted, Wanted::Octets { needed, left: found } if found == left && needed > left as u64),
                "{}", error
            );
        }

        #[test]
        fn any_octets_are_read_or_refused_and_nothing_more_is_taken(
            octets in prop::collection::vec(prop_oneof![Just(0_u8), Just(1), any::<u8>()], 0..80),
            items in prop::collection::vec(item(), 1..6),
        ) {
            let mut reader = Reader::new(&octets);
            for like in &items {
                let before = reader.offset();
                match read(&mut reader, like) {
                    Ok(_) => prop_assert!(reader.offset() >= before && reader.offset() <= octets.len()),
                    Err(error) => {
                        prop_assert!(error.offset >= before && error.offset <= octets.len());
                        break;
                    }
                }
            }
            prop_assert_eq!(reader.offset() + reader.left(), octets.len());
        }
    }

    #[test]
    fn booleans_are_zero_or_one() {
        for found in [2, 0x100, 0x0100_0000, u32::MAX] {
            let octets = [&[0; 4][..], &found.to_be_bytes()].concat();
            let mut reader = Reader::new(&octets);
            assert_eq!(reader.bool(), Ok(false));
            let error = XdrError { offset: 4, wanted: Wanted::Boolean(found) };
            assert_eq!(reader.clone().bool(), Err(error));
            assert_eq!(reader.optional(Reader::u32), Err(error));
        }
    }

    #[test]
    fn roundup_must_be_there_but_may_be_anything() {
        let octets = [0, 0, 0, 5, b'h', b'e', b'l', b'l', b'o', 1, 2, 0xff];
        let mut reader = Reader::new(&octets);
        assert_eq!(reader.opaque(5), Ok(&b"hello"[..]));
        assert_eq!(reader.finish(), Ok(()));
        let error = Reader::new(&octets[..11]).opaque(5).unwrap_err();
        assert_eq!(error, XdrError { offset: 4, wanted: Wanted::Octets { needed: 8, left: 7 } });
        assert_eq!(error.to_string(), "octet 4: wanted 8 octets, 7 are left");
    }

    #[test]
    fn bounds_hold_to_the_item() {
        let five = [0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0, 0];
        assert!(Reader::new(&five).opaque(5).is_ok());
        let too_many = XdrError { offset: 0, wanted: Wanted::AtMost { limit: 4, found: 5 } };
        assert_eq!(Reader::new(&five).opaque(4), Err(too_many));
        let mut writer = Writer::new();
        writer.list([7, 8], Writer::u32);
        let list = writer.finish();
        assert_eq!(Reader::new(&list).list::<_, XdrError>(2, Reader::u32), Ok(vec![7, 8]));
        let too_many = XdrError { offset: 8, wanted: Wanted::AtMost { limit: 1, found: 2 } };
        assert_eq!(Reader::new(&list).list::<_, XdrError>(1, Reader::u32), Err(too_many));
    }

    #[test]
    fn a_count_is_held_against_what_is_left_in_sixty_four_bits() {
        // 0x1000_0001 times 16 is 16 in 32 bits: exactly what is there.
        for found in [0x1000_0001_u32, u32::MAX, 2] {
            let octets = [&found.to_be_bytes()[..], &[0; 16]].concat();
            let mut reader = Reader::new(&octets);
            let error = reader.count(usize::MAX, 16).unwrap_err();
            let needed = u64::from(found) * 16;
            assert_eq!(error, XdrError { offset: 4, wanted: Wanted::Octets { needed, left: 16 } });
        }
        assert_eq!(Reader::new(&[0xff; 4]).count(usize::MAX, 0), Ok(u32::MAX as usize));
    }

    #[test]
    fn the_end_is_where_nothing_is_left() {
        let mut reader = Reader::new(&[0; 8]);
        reader.u32().unwrap();
        assert_eq!(reader.finish(), Err(XdrError { offset: 4, wanted: Wanted::End { left: 4 } }));
        assert_eq!(reader.rest(), [0; 4]);
        assert_eq!(reader.finish(), Ok(()));
    }

    codec_enum! {
        enum Colour, "a colour" {
            Red = 1,
            Blue = 70,
        }
    }

    codec_newtype! {
        #[derive(Debug, Eq, PartialEq)]
        struct Seal([u8; 5]);
    }

    #[test]
    fn declared_items_are_read_as_they_are_written() {
        let mut writer = Writer::new();
        Colour::Blue.write(&mut writer);
        Seal(*b"seals").write(&mut writer);
        Some(Colour::Red).write(&mut writer);
        None::<Colour>.write(&mut writer);
        ().write(&mut writer);
        let octets = writer.finish();
        assert_eq!(octets, *b"\0\0\0\x46seals\0\0\0\0\0\0\x01\0\0\0\x01\0\0\0\0");
        let mut reader = Reader::new(&octets);
        assert_eq!(Colour::read(&mut reader), Ok(Colour::Blue));
        assert_eq!(Seal::read(&mut reader), Ok(Seal(*b"seals")));
        assert_eq!(Codec::read(&mut reader), Ok(Some(Colour::Red)));
        assert_eq!(Codec::read(&mut reader), Ok(None::<Colour>));
        assert_eq!(reader.finish(), Ok(()));
        assert_eq!((Seal::BYTES_MIN, Colour::ALL.len()), (8, 2));
        let wanted = Wanted::Value { what: "a colour", found: 2 };
        assert_eq!(Colour::read(&mut Reader::new(&[0, 0, 0, 2])), Err(XdrError { offset: 0, wanted }));
    }

    #[test]
    fn roundup_is_to_four() {
        let pads: Vec<u64> = (0..6).map(roundup_bytes).collect();
        assert_eq!(pads, [0, 3, 2, 1, 0, 3]);
        assert_eq!(roundup_bytes(u64::MAX), 1);
    }
}
