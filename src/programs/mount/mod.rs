//! MOUNT version 3 (RFC 1813 appendix I) as it is on the wire, pure: how a client comes by its first file handle.
//!
//! Clients speak it over TCP alone (RFC 8267 §5.1), and nothing of it may be reduced.

use super::nfs::{FILE_HANDLE_BYTES_MAX, FileHandle};
use super::rpc::{ArgumentFault, ArgumentReader, Call, Procedure, Program, ReplyBound, success};
use crate::wire::codec::{Codec, Reader, Writer, codec_enum, roundup_bytes};
use crate::wire::onc_rpc::{Payload, Xid};

/// RFC 1813 §5.1.2.
pub const PROGRAM_NUMBER: u32 = 100_005;
/// The version of the program.
pub const VERSION: u32 = 3;

/// MNTPATHLEN: octets of the path of a directory.
pub const PATH_BYTES_MAX: usize = 1024;
/// MNTNAMLEN: octets of the name of a host or group of hosts.
pub const NAME_BYTES_MAX: usize = 255;
/// Mounts that are listed.
pub const MOUNTS_MAX: usize = 256;
/// Exports that are listed.
pub const EXPORTS_MAX: usize = 64;
/// Groups that are listed of one export.
pub const GROUPS_MAX: usize = 64;
/// Flavors of credentials that one export takes.
pub const FLAVORS_MAX: usize = 8;

/// Numbers of the procedures (§5.2).
pub mod procedure {
    pub const NULL: u32 = 0;
    pub const MNT: u32 = 1;
    pub const DUMP: u32 = 2;
    pub const UMNT: u32 = 3;
    pub const UMNTALL: u32 = 4;
    pub const EXPORT: u32 = 5;
}

const fn inline(number: u32, name: &'static str) -> Procedure {
    Procedure { number, name, arguments: &[], results: &[] }
}

/// The program. It has nothing that may be reduced.
pub static PROGRAM: Program = Program {
    number: PROGRAM_NUMBER,
    version: VERSION,
    procedures: &[
        inline(procedure::NULL, "NULL"),
        inline(procedure::MNT, "MNT"),
        inline(procedure::DUMP, "DUMP"),
        inline(procedure::UMNT, "UMNT"),
        inline(procedure::UMNTALL, "UMNTALL"),
        inline(procedure::EXPORT, "EXPORT"),
    ],
};

codec_enum! {
    /// Why a directory is not mounted: mountstat3 but for MNT3_OK (§5.1.5).
    pub enum MountError, "an error" {
        Perm = 1,
        NoEnt = 2,
        Io = 5,
        Acces = 13,
        NotDir = 20,
        Inval = 22,
        NameTooLong = 63,
        NotSupp = 10004,
        ServerFault = 10006,
    }
}

/// A call of the program. Paths are at most 1,024 octets, any but for that.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Request<'a> {
    Null,
    /// A directory is to be mounted.
    Mnt {
        directory: &'a [u8],
    },
    /// What is mounted.
    Dump,
    /// A directory is not mounted any more.
    Umnt {
        directory: &'a [u8],
    },
    /// None is.
    UmntAll,
    /// What can be mounted.
    Export,
}

impl<'a> Request<'a> {
    /// Reads the arguments of `call`.
    ///
    /// # Errors
    /// [`ArgumentFault`].
    ///
    /// # Panics
    /// If `call` is to another program.
    pub fn parse(call: Call<'a>) -> Result<Self, ArgumentFault> {
        assert_eq!((call.program.number, call.program.version), (PROGRAM_NUMBER, VERSION));
        call.arguments.read_all(|arguments| Self::read(call.procedure.number, arguments))
    }

    fn read(number: u32, arguments: &mut ArgumentReader<'a>) -> Result<Self, ArgumentFault> {
        let path = |words: &mut Reader<'a>| words.opaque(PATH_BYTES_MAX);
        Ok(match number {
            procedure::NULL => Self::Null,
            procedure::MNT => Self::Mnt { directory: path(arguments.words())? },
            procedure::DUMP => Self::Dump,
            procedure::UMNT => Self::Umnt { directory: path(arguments.words())? },
            procedure::UMNTALL => Self::UmntAll,
            procedure::EXPORT => Self::Export,
            other => unreachable!("procedure {other} is not in the table"),
        })
    }

    /// The procedure it calls.
    pub fn procedure(&self) -> &'static Procedure {
        let number = match self {
            Self::Null => procedure::NULL,
            Self::Mnt { .. } => procedure::MNT,
            Self::Dump => procedure::DUMP,
            Self::Umnt { .. } => procedure::UMNT,
            Self::UmntAll => procedure::UMNTALL,
            Self::Export => procedure::EXPORT,
        };
        // The table has every number, in order: a test sees to that.
        &PROGRAM.procedures[number as usize]
    }

    /// The largest reply that there can be to it, from a server whose verifier has no body.
    pub fn reply_bound(&self) -> ReplyBound {
        let opaque = |bytes_max: usize| 4 + bytes_max as u64 + roundup_bytes(bytes_max as u64);
        let list = |count: usize, item_bytes: u64| 4 + count as u64 * (4 + item_bytes);
        ReplyBound::new(match self {
            Self::Null | Self::Umnt { .. } | Self::UmntAll => 0,
            Self::Mnt { .. } => 4 + opaque(FILE_HANDLE_BYTES_MAX) + 4 + 4 * FLAVORS_MAX as u64,
            Self::Dump => list(MOUNTS_MAX, opaque(NAME_BYTES_MAX) + opaque(PATH_BYTES_MAX)),
            Self::Export => list(EXPORTS_MAX, opaque(PATH_BYTES_MAX) + list(GROUPS_MAX, opaque(NAME_BYTES_MAX))),
        })
    }
}

/// mountres3_ok.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Mounted {
    /// Of the directory.
    pub handle: FileHandle,
    /// Of credentials that are taken, the best first; at most [`FLAVORS_MAX`].
    pub flavors: Vec<u32>,
}

/// mountbody: who has mounted what.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Mount {
    /// At most [`NAME_BYTES_MAX`] octets.
    pub host: Vec<u8>,
    /// At most [`PATH_BYTES_MAX`] octets.
    pub directory: Vec<u8>,
}

/// exportnode: what can be mounted, and by whom.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Export {
    /// At most [`PATH_BYTES_MAX`] octets.
    pub directory: Vec<u8>,
    /// At most [`GROUPS_MAX`], of at most [`NAME_BYTES_MAX`] octets; none for everybody.
    pub groups: Vec<Vec<u8>>,
}

/// The results of a call.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Reply {
    Null,
    Mnt(Result<Mounted, MountError>),
    /// At most [`MOUNTS_MAX`].
    Dump(Vec<Mount>),
    Umnt,
    UmntAll,
    /// At most [`EXPORTS_MAX`].
    Export(Vec<Export>),
}

impl Reply {
    /// The reply message.
    ///
    /// # Panics
    /// If there is more in it than may be.
    pub fn encode(&self, xid: Xid) -> Payload {
        let mut writer = success(xid);
        let words = writer.words();
        match self {
            Self::Null | Self::Umnt | Self::UmntAll => {}
            Self::Mnt(Ok(Mounted { handle, flavors })) => {
                assert!(flavors.len() <= FLAVORS_MAX, "{} flavors", flavors.len());
                words.u32(0);
                handle.write(words);
                words.array(flavors, |words, flavor| words.u32(*flavor));
            }
            Self::Mnt(Err(error)) => error.write(words),
            Self::Dump(mounts) => {
                assert!(mounts.len() <= MOUNTS_MAX, "{} mounts", mounts.len());
                words.list(mounts, |words, mount| {
                    write_bounded(words, &mount.host, NAME_BYTES_MAX);
                    write_bounded(words, &mount.directory, PATH_BYTES_MAX);
                });
            }
            Self::Export(exports) => {
                assert!(exports.len() <= EXPORTS_MAX, "{} exports", exports.len());
                words.list(exports, |words, export| {
                    assert!(export.groups.len() <= GROUPS_MAX, "{} groups", export.groups.len());
                    write_bounded(words, &export.directory, PATH_BYTES_MAX);
                    words.list(&export.groups, |words, group| write_bounded(words, group, NAME_BYTES_MAX));
                });
            }
        }
        writer.finish()
    }
}

fn write_bounded(words: &mut Writer, octets: &[u8], bytes_max: usize) {
    assert!(octets.len() <= bytes_max, "{} octets", octets.len());
    words.opaque(octets);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::programs::rpc::{Arguments, Reduced, accept};
    use crate::wire::onc_rpc::{AUTH_SYS, CallHeader, OpaqueAuth, Part};

    fn call(procedure: u32, arguments: impl FnOnce(&mut Writer)) -> Vec<u8> {
        let (credential, verifier) = (OpaqueAuth::NONE, OpaqueAuth::NONE);
        let mut writer = Writer::new();
        CallHeader { xid: Xid(1), program: PROGRAM_NUMBER, version: VERSION, procedure, credential, verifier }
            .write(&mut writer);
        arguments(&mut writer);
        writer.finish()
    }

    fn parse<'a>(stream: &'a [u8], chunks: &'a [Reduced]) -> Result<Request<'a>, ArgumentFault> {
        Request::parse(accept(&[&PROGRAM], Arguments { stream, chunks }).unwrap())
    }

    fn path(len: usize) -> impl FnOnce(&mut Writer) {
        move |words| words.opaque(&vec![b'p'; len])
    }

    #[test]
    fn every_procedure_is_in_the_table_at_its_number() {
        for (at, procedure) in PROGRAM.procedures.iter().enumerate() {
            let has_path = [procedure::MNT, procedure::UMNT].contains(&procedure.number);
            let stream = call(procedure.number, |words| {
                if has_path {
                    words.opaque(b"/")
                }
            });
            let request = parse(&stream, &[]).unwrap();
            assert_eq!((procedure.number, request.procedure()), (at as u32, procedure));
        }
        assert_eq!(PROGRAM.procedures.len(), 6);
    }

    #[test]
    fn a_path_has_1024_octets_at_most_and_nothing_follows_it() {
        for number in [procedure::MNT, procedure::UMNT] {
            for (len, good) in [(0, true), (1024, true), (1025, false)] {
                assert_eq!(parse(&call(number, path(len)), &[]).is_ok(), good, "{len} octets");
            }
            let longer = [call(number, path(3)), vec![0; 4]].concat();
            assert!(matches!(parse(&longer, &[]), Err(ArgumentFault::Xdr(_))));
        }
    }

    #[test]
    fn nothing_may_be_reduced() {
        let stream = call(procedure::MNT, path(8));
        for position in (40..=stream.len() as u64).step_by(4) {
            assert!(parse(&stream, &[Reduced { position, len: 8 }]).unwrap_err().is_chunk_error(), "at {position}");
        }
    }

    fn octets(reply: &Reply) -> Vec<u8> {
        let payload = reply.encode(Xid(1));
        let [Part::Bytes(bytes)] = payload.parts() else { panic!("{payload:?}") };
        bytes.clone()
    }

    #[test]
    fn the_largest_reply_is_as_large_as_its_bound() {
        let name = || vec![b'n'; NAME_BYTES_MAX];
        let directory = || vec![b'p'; PATH_BYTES_MAX];
        let handle = FileHandle::new(&[1; FILE_HANDLE_BYTES_MAX]).unwrap();
        let export = Export { directory: directory(), groups: vec![name(); GROUPS_MAX] };
        for (request, reply) in [
            (Request::Null, Reply::Null),
            (Request::Mnt { directory: b"" }, Reply::Mnt(Ok(Mounted { handle, flavors: vec![AUTH_SYS; FLAVORS_MAX] }))),
            (Request::Dump, Reply::Dump(vec![Mount { host: name(), directory: directory() }; MOUNTS_MAX])),
            (Request::Umnt { directory: b"" }, Reply::Umnt),
            (Request::UmntAll, Reply::UmntAll),
            (Request::Export, Reply::Export(vec![export; EXPORTS_MAX])),
        ] {
            let found = octets(&reply).len() as u64;
            assert_eq!(found, request.reply_bound().reduced_bytes, "{}", request.procedure().name);
        }
    }

    #[test]
    fn a_mounted_directory_is_a_handle_and_the_flavors_it_takes() {
        let handle = FileHandle::new(b"root").unwrap();
        let done = octets(&Reply::Mnt(Ok(Mounted { handle, flavors: vec![AUTH_SYS] })));
        assert_eq!(done[24..], *b"\0\0\0\0\0\0\0\x04root\0\0\0\x01\0\0\0\x01");
        assert_eq!(octets(&Reply::Mnt(Err(MountError::Acces)))[24..], [0, 0, 0, 13]);
        assert_eq!(octets(&Reply::Dump(vec![]))[24..], [0; 4]);
    }
}
