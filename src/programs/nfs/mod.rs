//! NFS version 3 (RFC 1813) as it is on the wire, pure: what a client asks, and what it can be told.
//!
//! ```text
//! Arguments ─ accept, parse ─▶ Request ──▶ the file system ──▶ Reply ─ encode ─▶ Payload
//!                                │ reply_bound: room to be made before anything is done
//!                                └ refuse: the Reply that says nothing but an error
//! ```
//!
//! The data of a WRITE and the path of a SYMLINK are [`Data`](super::rpc::Data) where they are read, the data of a READ and
//! the path of a READLINK [`Item`](crate::wire::onc_rpc::Item)s where they are written: RFC 8267 §4 lets these four be
//! reduced and nothing else. On a byte stream [`bulk`] finds the data of a WRITE while it is still to come. Directories are
//! encoded entry by entry, until their [page](directory) is full. The file system is [`files`].

pub mod bulk;
pub mod directory;
pub mod export;
pub mod files;
pub mod reply;
pub mod request;
pub mod session;
pub mod types;

pub use bulk::Bulk;
pub use directory::{DirectoryPage, Entry, EntryPlus, Listing, PlusPage};
pub use export::{Client, Executed, Export, Rules};
pub use files::FileSystem;
pub use reply::{
    Accessible, Created, Failure, FsInfo, FsStat, Linked, Looked, Outcome, PathConf, ReadDone, ReadLinkDone, Renamed,
    Reply, Synced, WriteDone,
};
pub use request::{
    Commit, Create, CreateHow, LinkTo, MakeDirectory, MakeNode, MakeSymbolicLink, Node, Read, ReadDirectory,
    ReadDirectoryPlus, Rename, Request, SetAttr, Write,
};
pub use types::{
    Attributes, Cookie, CookieVerifier, CreateVerifier, Device, FileHandle, FileId, FileType, Name, NfsError, Place,
    SetAttributes, SetTime, Stable, Time, WccAttributes, WccData, WriteVerifier,
};

use super::rpc::{Eligible, Procedure, Program};

/// RFC 1813 §2.2.
pub const PROGRAM_NUMBER: u32 = 100_003;
/// The version of the program.
pub const VERSION: u32 = 3;

/// NFS3_FHSIZE.
pub const FILE_HANDLE_BYTES_MAX: usize = 64;
/// Octets of a name in a directory, as PATHCONF says.
pub const NAME_BYTES_MAX: usize = crate::store::files::NAME_BYTES_MAX;
/// Octets of a name or path that are read at all: the longest path of common systems. The RFC has no bound; a name between the two
/// is answered with an error of its own.
pub const NAME_BYTES_READ_MAX: usize = 4096;
/// Octets of one READ or WRITE: no more than Linux's client makes chunks for.
pub const TRANSFER_BYTES_MAX: u32 = 1 << 20;
/// Octets of one READDIR or READDIRPLUS.
pub const DIRECTORY_BYTES_MAX: u32 = 1 << 20;
/// Octets of a call message but for the data of a WRITE: header with credential and verifier, two handles, two names.
pub const CALL_BYTES_MAX: usize = 24 + 2 * (8 + 400) + 2 * (4 + FILE_HANDLE_BYTES_MAX) + 2 * (4 + NAME_BYTES_READ_MAX);

/// Numbers of the procedures (RFC 1813 §3).
pub mod procedure {
    pub const NULL: u32 = 0;
    pub const GETATTR: u32 = 1;
    pub const SETATTR: u32 = 2;
    pub const LOOKUP: u32 = 3;
    pub const ACCESS: u32 = 4;
    pub const READLINK: u32 = 5;
    pub const READ: u32 = 6;
    pub const WRITE: u32 = 7;
    pub const CREATE: u32 = 8;
    pub const MKDIR: u32 = 9;
    pub const SYMLINK: u32 = 10;
    pub const MKNOD: u32 = 11;
    pub const REMOVE: u32 = 12;
    pub const RMDIR: u32 = 13;
    pub const RENAME: u32 = 14;
    pub const LINK: u32 = 15;
    pub const READDIR: u32 = 16;
    pub const READDIRPLUS: u32 = 17;
    pub const FSSTAT: u32 = 18;
    pub const FSINFO: u32 = 19;
    pub const PATHCONF: u32 = 20;
    pub const COMMIT: u32 = 21;
}

/// Bits of an ACCESS (RFC 1813 §3.3.4).
pub mod access {
    pub const READ: u32 = 0x01;
    pub const LOOKUP: u32 = 0x02;
    pub const MODIFY: u32 = 0x04;
    pub const EXTEND: u32 = 0x08;
    pub const DELETE: u32 = 0x10;
    pub const EXECUTE: u32 = 0x20;
    pub const ALL: u32 = 0x3f;
}

/// Bits of [`FsInfo::properties`] (RFC 1813 §3.3.19).
pub mod property {
    pub const LINK: u32 = 0x01;
    pub const SYMLINK: u32 = 0x02;
    pub const HOMOGENEOUS: u32 = 0x08;
    pub const CANSETTIME: u32 = 0x10;
}

/// `data` of WRITE.
pub const WRITE_DATA: Eligible = Eligible { name: "data of WRITE3args", bytes_max: TRANSFER_BYTES_MAX };
/// `symlink_data` of SYMLINK.
pub const SYMLINK_PATH: Eligible =
    Eligible { name: "symlink_data of SYMLINK3args", bytes_max: NAME_BYTES_READ_MAX as u32 };
/// `data` of READ.
pub const READ_DATA: Eligible = Eligible { name: "data of READ3resok", bytes_max: TRANSFER_BYTES_MAX };
/// `data` of READLINK.
pub const READLINK_PATH: Eligible = Eligible { name: "data of READLINK3resok", bytes_max: NAME_BYTES_READ_MAX as u32 };

const fn inline(number: u32, name: &'static str) -> Procedure {
    Procedure { number, name, arguments: &[], results: &[] }
}

/// The program and its upper-layer binding (RFC 8267 §4).
pub static PROGRAM: Program = Program {
    number: PROGRAM_NUMBER,
    version: VERSION,
    procedures: &[
        inline(procedure::NULL, "NULL"),
        inline(procedure::GETATTR, "GETATTR"),
        inline(procedure::SETATTR, "SETATTR"),
        inline(procedure::LOOKUP, "LOOKUP"),
        inline(procedure::ACCESS, "ACCESS"),
        Procedure { results: &[READLINK_PATH], ..inline(procedure::READLINK, "READLINK") },
        Procedure { results: &[READ_DATA], ..inline(procedure::READ, "READ") },
        Procedure { arguments: &[WRITE_DATA], ..inline(procedure::WRITE, "WRITE") },
        inline(procedure::CREATE, "CREATE"),
        inline(procedure::MKDIR, "MKDIR"),
        Procedure { arguments: &[SYMLINK_PATH], ..inline(procedure::SYMLINK, "SYMLINK") },
        inline(procedure::MKNOD, "MKNOD"),
        inline(procedure::REMOVE, "REMOVE"),
        inline(procedure::RMDIR, "RMDIR"),
        inline(procedure::RENAME, "RENAME"),
        inline(procedure::LINK, "LINK"),
        inline(procedure::READDIR, "READDIR"),
        inline(procedure::READDIRPLUS, "READDIRPLUS"),
        inline(procedure::FSSTAT, "FSSTAT"),
        inline(procedure::FSINFO, "FSINFO"),
        inline(procedure::PATHCONF, "PATHCONF"),
        inline(procedure::COMMIT, "COMMIT"),
    ],
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::programs::mount;
    use crate::programs::rpc::{Arguments, Refusal, accept};
    use crate::wire::codec::Writer;
    use crate::wire::onc_rpc::{AcceptStatus, CallHeader, OpaqueAuth, Reply, ReplyHeader, Versions, Xid};

    /// What a door that serves both programs says of a call without arguments.
    fn dispatch(program: u32, version: u32, procedure: u32) -> Result<&'static str, AcceptStatus> {
        let (credential, verifier) = (OpaqueAuth::NONE, OpaqueAuth::NONE);
        let mut writer = Writer::new();
        CallHeader { xid: Xid(5), program, version, procedure, credential, verifier }.write(&mut writer);
        let stream = writer.finish();
        match accept(&[&PROGRAM, &mount::PROGRAM], Arguments { stream: &stream, chunks: &[] }) {
            Ok(call) => Ok(call.procedure.name),
            Err(Refusal::Reply(ReplyHeader { xid: Xid(5), reply: Reply::Accepted { status, .. } })) => Err(status),
            Err(other) => panic!("{other:?}"),
        }
    }

    #[test]
    fn every_procedure_is_in_the_table_at_its_number() {
        for (at, procedure) in PROGRAM.procedures.iter().enumerate() {
            assert_eq!(procedure.number, at as u32);
            assert_eq!(dispatch(PROGRAM_NUMBER, VERSION, procedure.number), Ok(procedure.name));
        }
        assert_eq!(PROGRAM.procedures.len(), 22);
        assert_eq!(dispatch(PROGRAM_NUMBER, VERSION, 22), Err(AcceptStatus::ProcUnavail));
    }

    #[test]
    fn four_items_may_be_reduced_and_nothing_else() {
        let reduced: Vec<_> = PROGRAM
            .procedures
            .iter()
            .filter(|procedure| !procedure.arguments.is_empty() || !procedure.results.is_empty())
            .map(|procedure| (procedure.name, procedure.arguments, procedure.results))
            .collect();
        let none: &[Eligible] = &[];
        assert_eq!(
            reduced,
            [
                ("READLINK", none, &[READLINK_PATH][..]),
                ("READ", none, &[READ_DATA]),
                ("WRITE", &[WRITE_DATA], none),
                ("SYMLINK", &[SYMLINK_PATH], none),
            ]
        );
    }

    #[test]
    fn other_versions_learn_of_the_third_and_there_is_no_other_program() {
        let third = AcceptStatus::ProgMismatch(Versions { low: 3, high: 3 });
        for version in [0, 1, 2, 4, u32::MAX] {
            assert_eq!(dispatch(PROGRAM_NUMBER, version, 0), Err(third));
            assert_eq!(dispatch(mount::PROGRAM_NUMBER, version, 0), Err(third));
        }
        // NFSACL (RFC 8267 §5.2), the lock manager and the status monitor: a client goes on without them.
        for program in [100_227, 100_021, 100_024, 0] {
            for version in [1, 3] {
                assert_eq!(dispatch(program, version, 0), Err(AcceptStatus::ProgUnavail), "program {program}");
            }
        }
    }
}
