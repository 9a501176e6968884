//! The client's side of rpcbind, program 100000 in versions 3 and 4 (RFC 1833 §2): what a service says of itself there, so
//! that others find it by program, version and netid.
//!
//! ```text
//! rpcb     program | version | netid<> | address<> | owner<>     arguments of SET and UNSET, answered with a boolean
//! DUMP     void    -> list of rpcb
//! ```
//!
//! A [`Service`] is one entry of ours; a [`Session`] is what is said over one stream, pure.

pub mod session;

pub use session::{Fault, Registered, Session, Task, shown};

use crate::wire::codec::{Reader, Writer, XdrError};
use crate::wire::onc_rpc::record::RecordLimits;
use std::fmt;
use std::net::{IpAddr, SocketAddr};

/// rpcbind's own program.
pub const PROGRAM_NUMBER: u32 = 100_000;
/// The first version with netids and universal addresses: version 2 is the port mapper, which knows TCP and UDP alone.
pub const VERSION_MIN: u32 = 3;
/// SET, UNSET and DUMP are the same in both.
pub const VERSION_MAX: u32 = 4;

/// Numbers of the procedures used here.
pub mod procedure {
    pub const SET: u32 = 1;
    pub const UNSET: u32 = 2;
    pub const DUMP: u32 = 4;
}

/// Where rpcbind of Debian, and of most others, has its socket.
pub const SOCKET: &str = "/run/rpcbind.sock";
/// Its port over TCP.
pub const PORT: u16 = 111;

/// Octets of a string of an entry: more than rpcbind of Linux takes in from anybody (9,000).
pub const STRING_BYTES_MAX: usize = 16 << 10;
/// Octets of a record of a reply: some 20,000 entries of the usual length.
pub const RECORD_LIMITS: RecordLimits = RecordLimits { bytes_max: 1 << 20, fragments_max: 4096 };
/// Octets of the least entry, the word before it included.
const ENTRY_BYTES_MIN: usize = 24;

/// What carries calls to a service.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Transport {
    Tcp,
    /// RPC-over-RDMA.
    Rdma,
}

impl Transport {
    /// The netid of the transport at an address (RFC 5665 §5.1, RFC 8166 §9).
    pub const fn netid(self, address: &SocketAddr) -> &'static str {
        match (self, address) {
            (Self::Tcp, SocketAddr::V4(_)) => "tcp",
            (Self::Tcp, SocketAddr::V6(_)) => "tcp6",
            (Self::Rdma, SocketAddr::V4(_)) => "rdma",
            (Self::Rdma, SocketAddr::V6(_)) => "rdma6",
        }
    }
}

/// An address and a port as text that every RPC program reads alike: `h1.h2.h3.h4.p1.p2`, or the text of an IPv6 address and
/// `.p1.p2`, ports in two octets (RFC 5665 §5.2.3.3, §5.2.3.4). An IPv6 zone has no place in it.
pub fn universal_address(address: &SocketAddr) -> String {
    let [high, low] = address.port().to_be_bytes();
    match address.ip() {
        IpAddr::V4(ip) => format!("{ip}.{high}.{low}"),
        IpAddr::V6(ip) => format!("{ip}.{high}.{low}"),
    }
}

/// That a version of a program is to be had at an address. rpcbind keeps one address for each program, version and netid.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Service {
    pub program: u32,
    pub version: u32,
    pub netid: &'static str,
    /// A universal address.
    pub address: String,
}

impl Service {
    pub fn new(program: u32, version: u32, transport: Transport, address: &SocketAddr) -> Self {
        Self { program, version, netid: transport.netid(address), address: universal_address(address) }
    }

    /// Whether `entry` is in this one's place, wherever it leads.
    fn is_at(&self, entry: &Entry<'_>) -> bool {
        (self.program, self.version, self.netid.as_bytes()) == (entry.program, entry.version, entry.netid)
    }

    fn entry<'a>(&'a self, owner: &'a str) -> Entry<'a> {
        Entry {
            program: self.program,
            version: self.version,
            netid: self.netid.as_bytes(),
            address: self.address.as_bytes(),
            owner: owner.as_bytes(),
        }
    }
}

impl fmt::Display for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { program, version, netid, address } = self;
        write!(f, "program {program} version {version} netid {netid} at {address}")
    }
}

/// One entry as it travels (`rpcb`). Whoever wrote it, it may be any octets.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Entry<'a> {
    pub program: u32,
    pub version: u32,
    pub netid: &'a [u8],
    pub address: &'a [u8],
    pub owner: &'a [u8],
}

impl<'a> Entry<'a> {
    /// # Errors
    /// It is cut, or a string is longer than [`STRING_BYTES_MAX`].
    pub fn read(reader: &mut Reader<'a>) -> Result<Self, XdrError> {
        Ok(Self {
            program: reader.u32()?,
            version: reader.u32()?,
            netid: reader.opaque(STRING_BYTES_MAX)?,
            address: reader.opaque(STRING_BYTES_MAX)?,
            owner: reader.opaque(STRING_BYTES_MAX)?,
        })
    }

    pub fn write(&self, writer: &mut Writer) {
        writer.u32(self.program);
        writer.u32(self.version);
        for text in [self.netid, self.address, self.owner] {
            writer.opaque(text);
        }
    }
}

/// Reads the results of DUMP to their end and keeps the entries that `keep` takes.
///
/// # Errors
/// They are not what DUMP answers.
pub fn read_dump<'a>(octets: &'a [u8], keep: impl Fn(&Entry<'a>) -> bool) -> Result<Vec<Entry<'a>>, XdrError> {
    let (mut reader, mut kept) = (Reader::new(octets), Vec::new());
    // Of the others nothing is held, however many there are.
    reader.list(octets.len() / ENTRY_BYTES_MIN, |reader| -> Result<(), XdrError> {
        let entry = Entry::read(reader)?;
        if keep(&entry) {
            kept.push(entry);
        }
        Ok(())
    })?;
    reader.finish()?;
    Ok(kept)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn universal_addresses_and_netids_are_those_of_rfc_5665() {
        let cases = [
            ("10.1.2.3:20049", "rdma", "10.1.2.3.78.81"),
            ("0.0.0.0:111", "rdma", "0.0.0.0.0.111"),
            ("255.255.255.255:65535", "rdma", "255.255.255.255.255.255"),
            ("[::1]:20049", "rdma6", "::1.78.81"),
            ("[fd99::1]:256", "rdma6", "fd99::1.1.0"),
            ("[2001:db8:0:0:1:0:0:1]:1", "rdma6", "2001:db8::1:0:0:1.0.1"),
        ];
        for (address, netid, universal) in cases {
            let address: SocketAddr = address.parse().unwrap();
            assert_eq!((Transport::Rdma.netid(&address), universal_address(&address).as_str()), (netid, universal));
        }
        let with_zone = SocketAddr::V6(std::net::SocketAddrV6::new("fe80::1".parse().unwrap(), 258, 0, 7));
        assert_eq!(universal_address(&with_zone), "fe80::1.1.2");
        assert_eq!(Transport::Tcp.netid(&with_zone), "tcp6");
        assert_eq!(Transport::Tcp.netid(&"1.2.3.4:5".parse().unwrap()), "tcp");
    }

    #[test]
    fn an_entry_is_read_from_its_octets_and_written_as_them() {
        // By hand from RFC 1833 §2.1.
        let octets = [
            &[0, 1, 0x86, 0xa3, 0, 0, 0, 3][..],
            b"\0\0\0\x04rdma",
            b"\0\0\0\x0e10.1.2.3.78.81\0\0",
            b"\0\0\0\x09superuser\0\0\0",
        ]
        .concat();
        let service = Service::new(100_003, 3, Transport::Rdma, &"10.1.2.3:20049".parse().unwrap());
        let entry = service.entry("superuser");
        assert_eq!(Entry::read(&mut Reader::new(&octets)), Ok(entry));
        let mut writer = Writer::new();
        entry.write(&mut writer);
        assert_eq!(writer.finish(), octets);
        assert!(service.is_at(&Entry { address: b"elsewhere", owner: b"", ..entry }));
        for other in [Entry { program: 1, ..entry }, Entry { version: 4, ..entry }, Entry { netid: b"RDMA", ..entry }] {
            assert!(!service.is_at(&other));
        }
        assert_eq!(service.to_string(), "program 100003 version 3 netid rdma at 10.1.2.3.78.81");
    }

    #[test]
    fn a_dump_is_read_to_its_end_and_only_what_is_wanted_is_kept() {
        let service = Service::new(7, 1, Transport::Tcp, &"1.2.3.4:5".parse().unwrap());
        let empty = Entry { program: 0, version: 0, netid: b"", address: b"", owner: b"" };
        let mut writer = Writer::new();
        writer.list([empty, service.entry("me"), empty], |writer, entry| entry.write(writer));
        let dump = writer.finish();
        assert_eq!(read_dump(&dump, |entry| service.is_at(entry)), Ok(vec![service.entry("me")]));
        assert_eq!(read_dump(&dump, |_| true).unwrap().len(), 3);
        assert_eq!(read_dump(&[0; 4], |_| true), Ok(Vec::new()));
        for cut in 0..dump.len() {
            assert!(read_dump(&dump[..cut], |_| true).is_err(), "cut at {cut}");
        }
        assert!(read_dump(&[&dump[..], &[0; 4]].concat(), |_| true).is_err(), "something behind the end");
    }
}
