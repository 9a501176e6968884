//! Results of every procedure (RFC 1813 §3.3).

use super::directory::Listing;
use super::types::{Attributes, FileHandle, NfsError, Stable, Time, WccAttributes, WccData, WriteVerifier};
use super::{FILE_HANDLE_BYTES_MAX, PROGRAM, READ_DATA, READLINK_PATH, procedure};
use crate::programs::rpc::{Procedure, success};
use crate::wire::codec::{Codec, Writer, codec_struct};
use crate::wire::onc_rpc::{Item, Payload, PayloadWriter, Xid};

const STATUS_OK: u32 = 0;
const WORD: u64 = 4;
const ATTRIBUTES_BYTES: u64 = Attributes::BYTES_MIN as u64;
/// Octets of a post_op_attr at most.
const POST_ATTRIBUTES_BYTES: u64 = WORD + ATTRIBUTES_BYTES;
/// Octets of a wcc_data at most.
const WCC_BYTES: u64 = WORD + WccAttributes::BYTES_MIN as u64 + POST_ATTRIBUTES_BYTES;
/// Octets of an nfs_fh3 at most.
const HANDLE_BYTES: u64 = WORD + FILE_HANDLE_BYTES_MAX as u64;

/// Octets of the results of a procedure at most, but for those that may be reduced; of READDIR and READDIRPLUS only if they
/// fail.
pub(super) const fn results_bytes_max(number: u32) -> u64 {
    let results = match number {
        procedure::NULL => return 0,
        procedure::GETATTR => ATTRIBUTES_BYTES,
        procedure::LOOKUP => HANDLE_BYTES + 2 * POST_ATTRIBUTES_BYTES,
        procedure::ACCESS | procedure::READLINK => POST_ATTRIBUTES_BYTES + WORD,
        procedure::READ => POST_ATTRIBUTES_BYTES + 3 * WORD,
        procedure::WRITE => WCC_BYTES + 4 * WORD,
        procedure::CREATE | procedure::MKDIR | procedure::SYMLINK | procedure::MKNOD => {
            WORD + HANDLE_BYTES + POST_ATTRIBUTES_BYTES + WCC_BYTES
        }
        procedure::SETATTR | procedure::REMOVE | procedure::RMDIR => WCC_BYTES,
        procedure::RENAME => 2 * WCC_BYTES,
        procedure::LINK => POST_ATTRIBUTES_BYTES + WCC_BYTES,
        procedure::FSSTAT => POST_ATTRIBUTES_BYTES + 13 * WORD,
        procedure::FSINFO => POST_ATTRIBUTES_BYTES + 12 * WORD,
        procedure::PATHCONF => POST_ATTRIBUTES_BYTES + 6 * WORD,
        procedure::COMMIT => WCC_BYTES + 2 * WORD,
        _ => POST_ATTRIBUTES_BYTES,
    };
    WORD + results
}

/// Octets of the results of a READDIR or READDIRPLUS that may have `count` behind their status.
pub(super) const fn listing_bytes_max(count: u32) -> u64 {
    let count = count as u64;
    WORD + if count > POST_ATTRIBUTES_BYTES { count } else { POST_ATTRIBUTES_BYTES }
}

/// What a procedure says: what it did, or why not, with what it knows of attributes all the same.
pub type Outcome<T, F> = Result<T, Failure<F>>;

/// An error.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Failure<F> {
    pub error: NfsError,
    pub attributes: F,
}

codec_struct! {
    /// LOOKUP3resok.
    #[derive(Clone, Copy, Debug, Eq, PartialEq)]
    pub struct Looked {
        pub object: FileHandle,
        pub obj_attributes: Option<Attributes>,
        pub dir_attributes: Option<Attributes>,
    }
}

codec_struct! {
    /// ACCESS3resok.
    #[derive(Clone, Copy, Debug, Eq, PartialEq)]
    pub struct Accessible {
        pub obj_attributes: Option<Attributes>,
        /// Of the bits that were asked for, those that are granted.
        pub access: u32,
    }
}

/// READLINK3resok.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct ReadLinkDone {
    pub symlink_attributes: Option<Attributes>,
    /// At most 4,096 octets.
    pub data: Item,
}

/// READ3resok. Its count is the length of `data`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct ReadDone {
    pub file_attributes: Option<Attributes>,
    /// The last octet of the file was read, or there is none at the offset.
    pub eof: bool,
    /// At most [`TRANSFER_BYTES_MAX`](super::TRANSFER_BYTES_MAX) octets, and no more than were asked for.
    pub data: Item,
}

codec_struct! {
    /// WRITE3resok.
    #[derive(Clone, Copy, Debug, Eq, PartialEq)]
    pub struct WriteDone {
        pub file_wcc: WccData,
        /// Octets that were written, from the first on.
        pub count: u32,
        /// No less than was asked for.
        pub committed: Stable,
        pub verf: WriteVerifier,
    }
}

codec_struct! {
    /// CREATE3resok, and those of MKDIR, SYMLINK and MKNOD, which are the same.
    #[derive(Clone, Copy, Debug, Eq, PartialEq)]
    pub struct Created {
        pub obj: Option<FileHandle>,
        pub obj_attributes: Option<Attributes>,
        pub dir_wcc: WccData,
    }
}

codec_struct! {
    /// What RENAME says, done or not.
    #[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
    pub struct Renamed {
        pub fromdir_wcc: WccData,
        pub todir_wcc: WccData,
    }
}

codec_struct! {
    /// What LINK says, done or not.
    #[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
    pub struct Linked {
        pub file_attributes: Option<Attributes>,
        pub linkdir_wcc: WccData,
    }
}

codec_struct! {
    /// FSSTAT3resok: octets and objects, in all, free, and free for the caller.
    #[derive(Clone, Copy, Debug, Eq, PartialEq)]
    pub struct FsStat {
        pub obj_attributes: Option<Attributes>,
        pub tbytes: u64,
        pub fbytes: u64,
        pub abytes: u64,
        pub tfiles: u64,
        pub ffiles: u64,
        pub afiles: u64,
        /// Seconds for which nothing is expected to change.
        pub invarsec: u32,
    }
}

codec_struct! {
    /// FSINFO3resok: octets at most, preferred, and of what multiple, of READ and WRITE; preferred of READDIR.
    #[derive(Clone, Copy, Debug, Eq, PartialEq)]
    pub struct FsInfo {
        pub obj_attributes: Option<Attributes>,
        pub rtmax: u32,
        pub rtpref: u32,
        pub rtmult: u32,
        pub wtmax: u32,
        pub wtpref: u32,
        pub wtmult: u32,
        pub dtpref: u32,
        pub maxfilesize: u64,
        /// As fine as times are kept.
        pub time_delta: Time,
        /// Bits of [`property`](super::property).
        pub properties: u32,
    }
}

codec_struct! {
    /// PATHCONF3resok.
    #[derive(Clone, Copy, Debug, Eq, PartialEq)]
    pub struct PathConf {
        pub obj_attributes: Option<Attributes>,
        pub linkmax: u32,
        pub name_max: u32,
        /// Longer names are refused rather than cut.
        pub no_trunc: bool,
        pub chown_restricted: bool,
        pub case_insensitive: bool,
        pub case_preserving: bool,
    }
}

codec_struct! {
    /// COMMIT3resok.
    #[derive(Clone, Copy, Debug, Eq, PartialEq)]
    pub struct Synced {
        pub file_wcc: WccData,
        pub verf: WriteVerifier,
    }
}

/// The results of a call.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Reply {
    Null,
    GetAttr(Outcome<Attributes, ()>),
    SetAttr(Outcome<WccData, WccData>),
    Lookup(Outcome<Looked, Option<Attributes>>),
    Access(Outcome<Accessible, Option<Attributes>>),
    ReadLink(Outcome<ReadLinkDone, Option<Attributes>>),
    Read(Outcome<ReadDone, Option<Attributes>>),
    Write(Outcome<WriteDone, WccData>),
    Create(Outcome<Created, WccData>),
    MkDir(Outcome<Created, WccData>),
    SymLink(Outcome<Created, WccData>),
    MkNod(Outcome<Created, WccData>),
    Remove(Outcome<WccData, WccData>),
    RmDir(Outcome<WccData, WccData>),
    Rename(Outcome<Renamed, Renamed>),
    Link(Outcome<Linked, Linked>),
    /// From a [`DirectoryPage`](super::DirectoryPage).
    ReadDir(Outcome<Listing, Option<Attributes>>),
    /// From a [`PlusPage`](super::PlusPage).
    ReadDirPlus(Outcome<Listing, Option<Attributes>>),
    FsStat(Outcome<FsStat, Option<Attributes>>),
    FsInfo(Outcome<FsInfo, Option<Attributes>>),
    PathConf(Outcome<PathConf, Option<Attributes>>),
    Commit(Outcome<Synced, WccData>),
}

impl Reply {
    /// The procedure whose results they are.
    pub fn procedure(&self) -> &'static Procedure {
        let number = match self {
            Self::Null => procedure::NULL,
            Self::GetAttr(_) => procedure::GETATTR,
            Self::SetAttr(_) => procedure::SETATTR,
            Self::Lookup(_) => procedure::LOOKUP,
            Self::Access(_) => procedure::ACCESS,
            Self::ReadLink(_) => procedure::READLINK,
            Self::Read(_) => procedure::READ,
            Self::Write(_) => procedure::WRITE,
            Self::Create(_) => procedure::CREATE,
            Self::MkDir(_) => procedure::MKDIR,
            Self::SymLink(_) => procedure::SYMLINK,
            Self::MkNod(_) => procedure::MKNOD,
            Self::Remove(_) => procedure::REMOVE,
            Self::RmDir(_) => procedure::RMDIR,
            Self::Rename(_) => procedure::RENAME,
            Self::Link(_) => procedure::LINK,
            Self::ReadDir(_) => procedure::READDIR,
            Self::ReadDirPlus(_) => procedure::READDIRPLUS,
            Self::FsStat(_) => procedure::FSSTAT,
            Self::FsInfo(_) => procedure::FSINFO,
            Self::PathConf(_) => procedure::PATHCONF,
            Self::Commit(_) => procedure::COMMIT,
        };
        // The table has every number, in order: a test sees to that.
        &PROGRAM.procedures[number as usize]
    }

    /// The reply message.
    ///
    /// # Panics
    /// If there is more in it than may be.
    pub fn encode(&self, xid: Xid) -> Payload {
        let mut writer = success(xid);
        self.encode_results(&mut writer);
        writer.finish()
    }

    fn encode_results(&self, writer: &mut PayloadWriter) {
        let words = writer.words();
        match self {
            Self::Null => {}
            Self::GetAttr(outcome) => write(words, outcome),
            Self::SetAttr(outcome) | Self::Remove(outcome) | Self::RmDir(outcome) => write(words, outcome),
            Self::Lookup(outcome) => write(words, outcome),
            Self::Access(outcome) => write(words, outcome),
            Self::ReadLink(Ok(ReadLinkDone { symlink_attributes, data })) => {
                assert!(data.len <= READLINK_PATH.bytes_max, "a path of {} octets", data.len);
                words.u32(STATUS_OK);
                symlink_attributes.write(words);
                writer.item(*data);
            }
            Self::Read(Ok(ReadDone { file_attributes, eof, data })) => {
                assert!(data.len <= READ_DATA.bytes_max, "{} octets of data", data.len);
                words.u32(STATUS_OK);
                file_attributes.write(words);
                words.u32(data.len);
                words.bool(*eof);
                writer.item(*data);
            }
            Self::ReadDir(Ok(listing)) | Self::ReadDirPlus(Ok(listing)) => {
                words.u32(STATUS_OK);
                words.encoded(listing.as_bytes());
            }
            Self::ReadLink(Err(failure)) | Self::Read(Err(failure)) => write_failure(words, failure),
            Self::ReadDir(Err(failure)) | Self::ReadDirPlus(Err(failure)) => write_failure(words, failure),
            Self::Write(outcome) => write(words, outcome),
            Self::Create(outcome) | Self::MkDir(outcome) | Self::SymLink(outcome) | Self::MkNod(outcome) => {
                write(words, outcome);
            }
            Self::Rename(outcome) => write(words, outcome),
            Self::Link(outcome) => write(words, outcome),
            Self::FsStat(outcome) => write(words, outcome),
            Self::FsInfo(outcome) => write(words, outcome),
            Self::PathConf(outcome) => write(words, outcome),
            Self::Commit(outcome) => write(words, outcome),
        }
    }
}

fn write<T: Codec, F: Codec>(words: &mut Writer, outcome: &Outcome<T, F>) {
    match outcome {
        Ok(done) => {
            words.u32(STATUS_OK);
            done.write(words);
        }
        Err(failure) => write_failure(words, failure),
    }
}

fn write_failure<F: Codec>(words: &mut Writer, failure: &Failure<F>) {
    failure.error.write(words);
    failure.attributes.write(words);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::programs::nfs::{Device, FileId, FileType, TRANSFER_BYTES_MAX};
    use crate::programs::rpc::ReplyBound;
    use crate::wire::onc_rpc::Part;

    const TIME: Time = Time { seconds: 1, nseconds: 2 };
    const ATTRIBUTES: Attributes = Attributes {
        kind: FileType::Regular,
        mode: 0o644,
        nlink: 1,
        uid: 1000,
        gid: 1000,
        size: 9,
        used: 9,
        rdev: Device::NONE,
        fsid: 1,
        fileid: FileId(7),
        atime: TIME,
        mtime: TIME,
        ctime: TIME,
    };

    /// The largest of each procedure but READDIR and READDIRPLUS, done and failed.
    fn largest() -> Vec<Reply> {
        let some = Some(ATTRIBUTES);
        let wcc = WccData { before: Some(WccAttributes::from(&ATTRIBUTES)), after: some };
        let handle = FileHandle::new(&[9; 64]).unwrap();
        let verf = WriteVerifier([7; 8]);
        fn failed<T, F>(attributes: F) -> Outcome<T, F> {
            Err(Failure { error: NfsError::Io, attributes })
        }
        let created = Created { obj: Some(handle), obj_attributes: some, dir_wcc: wcc };
        let renamed = Renamed { fromdir_wcc: wcc, todir_wcc: wcc };
        let linked = Linked { file_attributes: some, linkdir_wcc: wcc };
        let write = WriteDone { file_wcc: wcc, count: 9, committed: Stable::FileSync, verf };
        let data = |len| Item { token: 4, len };
        let stat = FsStat {
            obj_attributes: some,
            tbytes: 1,
            fbytes: 2,
            abytes: 3,
            tfiles: 4,
            ffiles: 5,
            afiles: 6,
            invarsec: 0,
        };
        let info = FsInfo {
            obj_attributes: some,
            rtmax: 1,
            rtpref: 2,
            rtmult: 3,
            wtmax: 4,
            wtpref: 5,
            wtmult: 6,
            dtpref: 7,
            maxfilesize: 8,
            time_delta: TIME,
            properties: 9,
        };
        let conf = PathConf {
            obj_attributes: some,
            linkmax: 1,
            name_max: 255,
            no_trunc: true,
            chown_restricted: true,
            case_insensitive: false,
            case_preserving: true,
        };
        vec![
            Reply::Null,
            Reply::GetAttr(Ok(ATTRIBUTES)),
            Reply::GetAttr(failed(())),
            Reply::SetAttr(Ok(wcc)),
            Reply::SetAttr(failed(wcc)),
            Reply::Lookup(Ok(Looked { object: handle, obj_attributes: some, dir_attributes: some })),
            Reply::Lookup(failed(some)),
            Reply::Access(Ok(Accessible { obj_attributes: some, access: 0x3f })),
            Reply::Access(failed(some)),
            Reply::ReadLink(Ok(ReadLinkDone { symlink_attributes: some, data: data(READLINK_PATH.bytes_max) })),
            Reply::ReadLink(failed(some)),
            Reply::Read(Ok(ReadDone { file_attributes: some, eof: false, data: data(TRANSFER_BYTES_MAX) })),
            Reply::Read(failed(some)),
            Reply::Write(Ok(write)),
            Reply::Write(failed(wcc)),
            Reply::Create(Ok(created)),
            Reply::Create(failed(wcc)),
            Reply::MkDir(Ok(created)),
            Reply::MkDir(failed(wcc)),
            Reply::SymLink(Ok(created)),
            Reply::SymLink(failed(wcc)),
            Reply::MkNod(Ok(created)),
            Reply::MkNod(failed(wcc)),
            Reply::Remove(Ok(wcc)),
            Reply::Remove(failed(wcc)),
            Reply::RmDir(Ok(wcc)),
            Reply::RmDir(failed(wcc)),
            Reply::Rename(Ok(renamed)),
            Reply::Rename(failed(renamed)),
            Reply::Link(Ok(linked)),
            Reply::Link(failed(linked)),
            Reply::ReadDir(failed(some)),
            Reply::ReadDirPlus(failed(some)),
            Reply::FsStat(Ok(stat)),
            Reply::FsStat(failed(some)),
            Reply::FsInfo(Ok(info)),
            Reply::FsInfo(failed(some)),
            Reply::PathConf(Ok(conf)),
            Reply::PathConf(failed(some)),
            Reply::Commit(Ok(Synced { file_wcc: wcc, verf })),
            Reply::Commit(failed(wcc)),
        ]
    }

    #[test]
    fn the_largest_reply_of_each_procedure_is_as_large_as_its_bound_and_none_larger() {
        let mut found = vec![0; PROGRAM.procedures.len()];
        for reply in largest() {
            let payload = reply.encode(Xid(1));
            let items: u64 = payload.items().map(|item| u64::from(item.len)).sum();
            let reduced = payload.stream_bytes() - items;
            let largest = &mut found[reply.procedure().number as usize];
            *largest = reduced.max(*largest);
        }
        for (number, reduced) in found.into_iter().enumerate() {
            let bound = ReplyBound::new(results_bytes_max(number as u32)).reduced_bytes;
            assert_eq!(reduced, bound, "{}", PROGRAM.procedures[number].name);
        }
    }

    #[test]
    fn attributes_that_are_missing_are_said_to_be() {
        // Header of 24 octets, status, no attributes before, none after.
        let reply = Reply::SetAttr(Err(Failure { error: NfsError::NotSync, attributes: WccData::default() }));
        let payload = reply.encode(Xid(0x0102_0304));
        let [Part::Bytes(bytes)] = payload.parts() else { panic!("{payload:?}") };
        assert_eq!(bytes[..8], [1, 2, 3, 4, 0, 0, 0, 1]);
        assert_eq!(bytes[24..], [0, 0, 0x27, 0x12, 0, 0, 0, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn the_data_of_a_read_is_an_item_behind_its_length_said_twice() {
        let data = Item { token: 4, len: 5 };
        let payload = Reply::Read(Ok(ReadDone { file_attributes: None, eof: true, data })).encode(Xid(1));
        let [Part::Bytes(bytes), Part::Item(item)] = payload.parts() else { panic!("{payload:?}") };
        assert_eq!((&bytes[24..], *item), (&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 1, 0, 0, 0, 5][..], data));
    }

    #[test]
    fn a_listing_may_be_as_long_as_asked_and_an_error_longer() {
        assert_eq!(listing_bytes_max(0), 92);
        assert_eq!(listing_bytes_max(88), 92);
        assert_eq!(listing_bytes_max(89), 93);
        assert_eq!(listing_bytes_max(u32::MAX), u64::from(u32::MAX) + 4);
    }
}
