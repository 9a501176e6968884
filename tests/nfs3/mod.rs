//! Messages of NFS version 3, made of the same parts twice: as `nfs3_types` writes them, and as values of ours.

pub mod reply;
pub mod request;

use bulkhead::programs::nfs::*;
use bulkhead::wire::codec::Writer;
use bulkhead::wire::onc_rpc::{CallHeader, Item, OpaqueAuth, Part, Payload, Xid};
use nfs3_types::nfs3::{self as oracle, Nfs3Option};
use nfs3_types::xdr_codec::{Opaque, Pack, Unpack};
use proptest::prelude::*;
use std::io::Cursor;

pub const XID: Xid = Xid(0x0102_0304);
/// Octets of a call's header with two authentications of no octets, and of a reply's.
pub const CALL_HEADER_BYTES: usize = 40;
pub const REPLY_HEADER_BYTES: usize = 24;

pub fn packed(value: &impl Pack) -> Vec<u8> {
    let mut out = Vec::new();
    value.pack(&mut out).unwrap();
    assert_eq!(out.len(), value.packed_size());
    out
}

/// Whether the oracle reads `octets`, all of them, and writes the same again.
pub fn is_read_there<T: Pack + Unpack>(octets: &[u8]) -> bool {
    let mut input = Cursor::new(octets);
    let (value, _) = T::unpack(&mut input).unwrap();
    input.position() == octets.len() as u64 && packed(&value) == octets
}

pub fn call(program: u32, procedure: u32, arguments: &[u8]) -> Vec<u8> {
    let (version, credential, verifier) = (3, OpaqueAuth::NONE, OpaqueAuth::NONE);
    let mut writer = Writer::new();
    CallHeader { xid: XID, program, version, procedure, credential, verifier }.write(&mut writer);
    assert_eq!(writer.len(), CALL_HEADER_BYTES);
    writer.encoded(arguments);
    writer.finish()
}

/// The results of a message, with `item` in the place of its item.
pub fn results(payload: &Payload, item: &[u8]) -> Vec<u8> {
    let mut stream = Vec::new();
    for part in payload.parts() {
        match part {
            Part::Bytes(bytes) => stream.extend_from_slice(bytes),
            Part::Item(Item { token: 9, len }) => {
                assert_eq!(*len as usize, item.len());
                stream.extend_from_slice(item);
                stream.resize(stream.len().next_multiple_of(4), 0);
            }
            Part::Item(other) => panic!("{other:?}"),
        }
    }
    assert_eq!(stream.len() as u64, payload.stream_bytes());
    assert_eq!(stream[..REPLY_HEADER_BYTES], [1, 2, 3, 4, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    stream.split_off(REPLY_HEADER_BYTES)
}

/// What arguments and results are made of, whatever the procedure.
#[derive(Clone, Debug)]
pub struct Parts {
    pub handles: [Vec<u8>; 2],
    pub names: [Vec<u8>; 2],
    pub words: [u32; 8],
    pub hypers: [u64; 7],
    pub octets: [u8; 8],
    pub flags: [bool; 4],
    pub data: Vec<u8>,
    pub set: SetAttributes,
    pub time: Option<Time>,
    pub attributes: [Option<Attributes>; 3],
    pub before: [Option<WccAttributes>; 2],
    pub kind: FileType,
    pub stable: Stable,
    pub error: NfsError,
}

pub fn octets(max: usize) -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(any::<u8>(), 0..=max)
}

pub fn time() -> impl Strategy<Value = Time> {
    any::<[u32; 2]>().prop_map(|[seconds, nseconds]| Time { seconds, nseconds })
}

pub fn set_time() -> impl Strategy<Value = SetTime> {
    prop_oneof![Just(SetTime::DontChange), Just(SetTime::ServerTime), time().prop_map(SetTime::ClientTime)]
}

pub fn set_attributes() -> impl Strategy<Value = SetAttributes> {
    (any::<[Option<u32>; 3]>(), any::<Option<u64>>(), set_time(), set_time())
        .prop_map(|([mode, uid, gid], size, atime, mtime)| SetAttributes { mode, uid, gid, size, atime, mtime })
}

pub fn kind() -> impl Strategy<Value = FileType> {
    prop::sample::select(FileType::ALL)
}

pub fn attributes() -> impl Strategy<Value = Attributes> {
    (kind(), any::<[u32; 6]>(), any::<[u64; 4]>(), prop::array::uniform3(time())).prop_map(
        |(kind, [mode, nlink, uid, gid, major, minor], [size, used, fsid, fileid], [atime, mtime, ctime])| {
            let (rdev, fileid) = (Device { major, minor }, FileId(fileid));
            Attributes { kind, mode, nlink, uid, gid, size, used, rdev, fsid, fileid, atime, mtime, ctime }
        },
    )
}

pub fn parts() -> impl Strategy<Value = Parts> {
    let before = (any::<u64>(), time(), time()).prop_map(|(size, mtime, ctime)| WccAttributes { size, mtime, ctime });
    let opaque = (prop::array::uniform2(octets(64)), prop::array::uniform2(octets(300)), octets(200));
    let plain = (any::<[u32; 8]>(), any::<[u64; 7]>(), any::<[u8; 8]>(), any::<[bool; 4]>());
    let set = (set_attributes(), prop::option::of(time()), kind());
    let is = (
        prop::array::uniform3(prop::option::of(attributes())),
        prop::array::uniform2(prop::option::of(before)),
        prop::sample::select(Stable::ALL),
        prop::sample::select(NfsError::ALL),
    );
    (opaque, plain, set, is).prop_map(
        |(
            (handles, names, data),
            (words, hypers, octets, flags),
            (set, time, kind),
            (attributes, before, stable, error),
        )| {
            Parts {
                handles,
                names,
                words,
                hypers,
                octets,
                flags,
                data,
                set,
                time,
                attributes,
                before,
                kind,
                stable,
                error,
            }
        },
    )
}

impl Parts {
    pub fn handle(&self, n: usize) -> FileHandle {
        FileHandle::new(&self.handles[n]).unwrap()
    }

    pub fn place(&self, n: usize) -> Place<'_> {
        Place { dir: self.handle(n), name: Name(&self.names[n]) }
    }

    pub fn wcc(&self, n: usize) -> WccData {
        WccData { before: self.before[n], after: self.attributes[n] }
    }

    pub fn item(&self) -> Item {
        Item { token: 9, len: self.data.len() as u32 }
    }
}

pub fn option<T: Copy, U: Pack + Unpack>(value: Option<T>, there: impl FnOnce(T) -> U) -> Nfs3Option<U> {
    value.map_or(Nfs3Option::None, |value| Nfs3Option::Some(there(value)))
}

pub fn o_handle(handle: FileHandle) -> oracle::nfs_fh3 {
    oracle::nfs_fh3 { data: Opaque::owned(handle.as_bytes().to_vec()) }
}

pub fn o_place<'a>(place: Place<'a>) -> oracle::diropargs3<'a> {
    oracle::diropargs3 { dir: o_handle(place.dir), name: place.name.0.into() }
}

pub fn o_time(time: Time) -> oracle::nfstime3 {
    oracle::nfstime3 { seconds: time.seconds, nseconds: time.nseconds }
}

pub fn o_set(set: SetAttributes) -> oracle::sattr3 {
    oracle::sattr3 {
        mode: option(set.mode, |mode| mode),
        uid: option(set.uid, |uid| uid),
        gid: option(set.gid, |gid| gid),
        size: option(set.size, |size| size),
        atime: match set.atime {
            SetTime::DontChange => oracle::set_atime::DONT_CHANGE,
            SetTime::ServerTime => oracle::set_atime::SET_TO_SERVER_TIME,
            SetTime::ClientTime(time) => oracle::set_atime::SET_TO_CLIENT_TIME(o_time(time)),
        },
        mtime: match set.mtime {
            SetTime::DontChange => oracle::set_mtime::DONT_CHANGE,
            SetTime::ServerTime => oracle::set_mtime::SET_TO_SERVER_TIME,
            SetTime::ClientTime(time) => oracle::set_mtime::SET_TO_CLIENT_TIME(o_time(time)),
        },
    }
}

pub fn o_kind(kind: FileType) -> oracle::ftype3 {
    match kind {
        FileType::Regular => oracle::ftype3::NF3REG,
        FileType::Directory => oracle::ftype3::NF3DIR,
        FileType::Block => oracle::ftype3::NF3BLK,
        FileType::Character => oracle::ftype3::NF3CHR,
        FileType::SymbolicLink => oracle::ftype3::NF3LNK,
        FileType::Socket => oracle::ftype3::NF3SOCK,
        FileType::Fifo => oracle::ftype3::NF3FIFO,
    }
}

pub fn o_device(device: Device) -> oracle::specdata3 {
    oracle::specdata3 { specdata1: device.major, specdata2: device.minor }
}

pub fn o_attributes(is: Attributes) -> oracle::fattr3 {
    oracle::fattr3 {
        type_: o_kind(is.kind),
        mode: is.mode,
        nlink: is.nlink,
        uid: is.uid,
        gid: is.gid,
        size: is.size,
        used: is.used,
        rdev: o_device(is.rdev),
        fsid: is.fsid,
        fileid: is.fileid.0,
        atime: o_time(is.atime),
        mtime: o_time(is.mtime),
        ctime: o_time(is.ctime),
    }
}

pub fn o_post(is: Option<Attributes>) -> oracle::post_op_attr {
    option(is, o_attributes)
}

pub fn o_wcc(wcc: WccData) -> oracle::wcc_data {
    oracle::wcc_data {
        before: option(wcc.before, |is| oracle::wcc_attr {
            size: is.size,
            mtime: o_time(is.mtime),
            ctime: o_time(is.ctime),
        }),
        after: o_post(wcc.after),
    }
}

pub fn o_stable(stable: Stable) -> oracle::stable_how {
    match stable {
        Stable::Unstable => oracle::stable_how::UNSTABLE,
        Stable::DataSync => oracle::stable_how::DATA_SYNC,
        Stable::FileSync => oracle::stable_how::FILE_SYNC,
    }
}

pub fn o_error(error: NfsError) -> oracle::nfsstat3 {
    use oracle::nfsstat3::*;
    match error {
        NfsError::Perm => NFS3ERR_PERM,
        NfsError::NoEnt => NFS3ERR_NOENT,
        NfsError::Io => NFS3ERR_IO,
        NfsError::Nxio => NFS3ERR_NXIO,
        NfsError::Acces => NFS3ERR_ACCES,
        NfsError::Exist => NFS3ERR_EXIST,
        NfsError::Xdev => NFS3ERR_XDEV,
        NfsError::NoDev => NFS3ERR_NODEV,
        NfsError::NotDir => NFS3ERR_NOTDIR,
        NfsError::IsDir => NFS3ERR_ISDIR,
        NfsError::Inval => NFS3ERR_INVAL,
        NfsError::FBig => NFS3ERR_FBIG,
        NfsError::NoSpc => NFS3ERR_NOSPC,
        NfsError::Rofs => NFS3ERR_ROFS,
        NfsError::MLink => NFS3ERR_MLINK,
        NfsError::NameTooLong => NFS3ERR_NAMETOOLONG,
        NfsError::NotEmpty => NFS3ERR_NOTEMPTY,
        NfsError::DQuot => NFS3ERR_DQUOT,
        NfsError::Stale => NFS3ERR_STALE,
        NfsError::Remote => NFS3ERR_REMOTE,
        NfsError::BadHandle => NFS3ERR_BADHANDLE,
        NfsError::NotSync => NFS3ERR_NOT_SYNC,
        NfsError::BadCookie => NFS3ERR_BAD_COOKIE,
        NfsError::NotSupp => NFS3ERR_NOTSUPP,
        NfsError::TooSmall => NFS3ERR_TOOSMALL,
        NfsError::ServerFault => NFS3ERR_SERVERFAULT,
        NfsError::BadType => NFS3ERR_BADTYPE,
        NfsError::Jukebox => NFS3ERR_JUKEBOX,
    }
}
