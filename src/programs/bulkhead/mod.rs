//! Program `bulkhead`, version 1, as `docs/bulkhead.x` defines it: pure, for both sides.
//!
//! ```text
//! client   Request<Item> ─ encode ─▶ Payload ═══▶ Arguments ─ accept, parse ─▶ Request   server
//!          Answer        ◀─ decode ─ stream  ◀═══ Payload   ◀─ encode ─ Answer<Item> ◀──── │ execute
//! ```
//!
//! Eligible items are [`Item`]s where a message is made and [`Data`](super::rpc::Data) where it is read, so no octet of a
//! value is ever held here. A [`session::Session`] is what one connection has: it answers what is immediate ([`execute`]), a GET
//! becomes a [`get::Get`], values arrive in [`put::Drafts`], and what it pins ([`pins`]) is kept from being evicted.

pub mod answer;
pub mod execute;
pub mod get;
pub mod pins;
pub mod put;
pub mod request;
#[cfg(test)]
pub(super) mod rig;
pub mod session;

pub use crate::wire::onc_rpc::Item;
pub use answer::{Answer, Entry, Expectation, Got, Page, PinnedVersion, PutResult, Stat};
pub use request::{Deletion, GetRequest, Key, ListRequest, Put, PutMore, RangeOf, Request, StatRequest, Touch};

use super::rpc::{Eligible, Procedure, Program};

/// From the numbers that local administrators define (RFC 5531 §8.3).
pub const PROGRAM_NUMBER: u32 = 0x2042_4c4b;
/// The version of the program.
pub const VERSION: u32 = 1;

/// Keys in one STAT, DELETE, TOUCH, PIN or UNPIN.
pub const KEYS_MAX: usize = 1024;
/// Ranges in one GET.
pub const RANGES_MAX: usize = 256;
/// Octets of data in one PUT or PUT_MORE.
pub const PUT_BYTES_MAX: u32 = 1 << 30;
/// Entries in one answer of LIST.
pub const LIST_ENTRIES_MAX: usize = 4096;
/// Octets of the entries in one answer of LIST.
pub const LIST_BYTES_MAX: u32 = 1 << 20;
/// Octets of the longest entry of LIST.
pub const ENTRY_BYTES_MAX: u32 = 1044;
/// Octets of a call message but for what is in read chunks with a position other than zero.
pub const CALL_BYTES_MAX: usize = 1_114_112;
/// Drafts that one connection may have open.
pub const DRAFTS_MAX: usize = 16;
/// Keys that one connection may have pinned.
pub const PINS_MAX: usize = 1024;

/// Numbers of the procedures.
pub mod procedure {
    pub const NULL: u32 = 0;
    pub const STAT: u32 = 1;
    pub const GET: u32 = 2;
    pub const PUT: u32 = 3;
    pub const PUT_MORE: u32 = 4;
    pub const PUT_DROP: u32 = 5;
    pub const DELETE: u32 = 6;
    pub const TOUCH: u32 = 7;
    pub const LIST: u32 = 8;
    pub const PIN: u32 = 9;
    pub const UNPIN: u32 = 10;
}

/// `data` of PUT and PUT_MORE.
pub const PUT_DATA: Eligible = Eligible { name: "data of put_args and put_more_args", bytes_max: PUT_BYTES_MAX };
/// `data` of each range of GET.
pub const GOT_DATA: Eligible = Eligible { name: "data of got", bytes_max: u32::MAX };

const fn inline(number: u32, name: &'static str) -> Procedure {
    Procedure { number, name, arguments: &[], results: &[] }
}

/// The program and its upper-layer binding.
pub static PROGRAM: Program = Program {
    number: PROGRAM_NUMBER,
    version: VERSION,
    procedures: &[
        inline(procedure::NULL, "NULL"),
        inline(procedure::STAT, "STAT"),
        Procedure { results: &[GOT_DATA], ..inline(procedure::GET, "GET") },
        Procedure { arguments: &[PUT_DATA], ..inline(procedure::PUT, "PUT") },
        Procedure { arguments: &[PUT_DATA], ..inline(procedure::PUT_MORE, "PUT_MORE") },
        inline(procedure::PUT_DROP, "PUT_DROP"),
        inline(procedure::DELETE, "DELETE"),
        inline(procedure::TOUCH, "TOUCH"),
        inline(procedure::LIST, "LIST"),
        inline(procedure::PIN, "PIN"),
        inline(procedure::UNPIN, "UNPIN"),
    ],
};

/// What became of one key, range or call.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(u32)]
pub enum Status {
    Ok = 0,
    NotFound = 1,
    Exists = 2,
    Changed = 3,
    Late = 4,
    Busy = 5,
    NoSpace = 6,
    TooLarge = 7,
    IoError = 8,
    BadChecksum = 9,
    BadDraft = 10,
    BadRange = 11,
    TooSmall = 12,
    Limit = 13,
    Unsupported = 14,
}

impl Status {
    /// All of them, each at its number.
    pub const ALL: [Self; 15] = [
        Self::Ok,
        Self::NotFound,
        Self::Exists,
        Self::Changed,
        Self::Late,
        Self::Busy,
        Self::NoSpace,
        Self::TooLarge,
        Self::IoError,
        Self::BadChecksum,
        Self::BadDraft,
        Self::BadRange,
        Self::TooSmall,
        Self::Limit,
        Self::Unsupported,
    ];

    pub const fn number(self) -> u32 {
        self as u32
    }

    /// The status of that number.
    pub fn from_number(number: u32) -> Option<Self> {
        Self::ALL.get(number as usize).copied()
    }
}

/// When a value expires that has `ttl_s` seconds to live at `now`, second of the store's clock: 0 is never in both.
pub(crate) fn expiry_of(ttl_s: u32, now: u64) -> u64 {
    if ttl_s == 0 { 0 } else { now.saturating_add(u64::from(ttl_s)) }
}

/// The seconds left of a living value that expires at `expiry`, as far as a word tells.
pub(crate) fn ttl_of(expiry: u64, now: u64) -> u32 {
    if expiry == 0 { 0 } else { u32::try_from(expiry.saturating_sub(now).max(1)).unwrap_or(u32::MAX) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    const DEFINITION: &str = include_str!("../../../docs/bulkhead.x");

    fn number(text: &str) -> u32 {
        match text.strip_prefix("0x") {
            Some(hex) => u32::from_str_radix(hex, 16).unwrap(),
            None => text.parse().unwrap(),
        }
    }

    /// `name = number` of every constant and enumeration value, and of every procedure, version and program.
    fn defined() -> HashMap<String, u32> {
        let mut defined = HashMap::new();
        for line in DEFINITION.lines() {
            let line = line.split("/*").next().unwrap().trim().trim_end_matches([';', ',']);
            let Some((left, right)) = line.split_once(" = ") else { continue };
            let name = left.split(['(', '}']).next().unwrap().trim().rsplit(' ').next().unwrap();
            let name = if name.is_empty() { left.trim_matches(['}', ' ']) } else { name };
            defined.insert(name.to_owned(), number(right.trim()));
        }
        defined
    }

    #[test]
    fn constants_are_those_of_the_definition() {
        let defined = defined();
        for (name, value) in [
            ("KEY_OCTETS_MAX", crate::store::key::KEY_BYTES_MAX as u32),
            ("KEYS_MAX", KEYS_MAX as u32),
            ("RANGES_MAX", RANGES_MAX as u32),
            ("PUT_OCTETS_MAX", PUT_BYTES_MAX),
            ("LIST_ENTRIES_MAX", LIST_ENTRIES_MAX as u32),
            ("LIST_OCTETS_MAX", LIST_BYTES_MAX),
            ("ENTRY_OCTETS_MAX", ENTRY_BYTES_MAX),
            ("CALL_OCTETS_MAX", CALL_BYTES_MAX as u32),
            ("DRAFTS_MAX", DRAFTS_MAX as u32),
            ("PINS_MAX", PINS_MAX as u32),
        ] {
            assert_eq!(defined.get(&format!("BULKHEAD_{name}")), Some(&value), "{name}");
        }
        assert!(DEFINITION.contains(&format!("}} = 0x{PROGRAM_NUMBER:x};\n")));
        assert!(DEFINITION.contains(&format!("    }} = {VERSION};\n")));
        assert!((0x2000_0000..=0x3fff_ffff).contains(&PROGRAM_NUMBER), "RFC 5531 section 8.3");
    }

    #[test]
    fn procedures_and_statuses_are_those_of_the_definition() {
        let defined = defined();
        for procedure in PROGRAM.procedures {
            assert_eq!(defined.get(&format!("BULKHEAD_{}", procedure.name)), Some(&procedure.number));
        }
        assert_eq!(DEFINITION.matches(") = ").count(), PROGRAM.procedures.len());
        for (at, status) in Status::ALL.into_iter().enumerate() {
            let name: String = format!("{status:?}")
                .chars()
                .flat_map(|letter| letter.is_uppercase().then_some('_').into_iter().chain([letter]))
                .collect();
            assert_eq!(defined.get(&format!("BULKHEAD{}", name.to_uppercase())), Some(&(at as u32)));
            assert_eq!(Status::from_number(status.number()), Some(status));
        }
        assert_eq!(Status::from_number(Status::ALL.len() as u32), None);
    }

    #[test]
    fn the_binding_lists_what_the_definition_marks_and_nothing_else() {
        let eligible: Vec<_> = PROGRAM
            .procedures
            .iter()
            .filter(|procedure| !procedure.arguments.is_empty() || !procedure.results.is_empty())
            .map(|procedure| (procedure.name, procedure.arguments, procedure.results))
            .collect();
        let (put, got): (&[_], &[_]) = (&[PUT_DATA], &[GOT_DATA]);
        assert_eq!(eligible, [("GET", &[][..], got), ("PUT", put, &[][..]), ("PUT_MORE", put, &[][..])]);
        let marked: Vec<_> = DEFINITION.lines().filter(|line| line.contains("/* ELIGIBLE")).collect();
        assert_eq!(marked.len(), 3, "{marked:?}");
        assert!(marked.iter().all(|line| line.trim().starts_with("opaque data<")), "{marked:?}");
    }

    #[test]
    fn times_to_live_and_expiries_are_each_other() {
        assert_eq!((expiry_of(0, 100), ttl_of(0, 100)), (0, 0));
        assert_eq!((expiry_of(5, 100), ttl_of(105, 100)), (105, 5));
        assert_eq!(expiry_of(u32::MAX, u64::MAX), u64::MAX);
        assert_eq!(ttl_of(u64::MAX, 1), u32::MAX);
        assert_eq!(ttl_of(100, 100), 1, "never mistaken for a value that lives for ever");
    }
}
