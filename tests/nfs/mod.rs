//! NFS version 3 and MOUNT (RFC 1813) as calls of any program, with the types of `nfs3_types`, and the server of
//! tests/rdma-vm, whose export is a directory here too.
#![allow(dead_code, reason = "every test file is a crate of its own and uses a part of this")]

pub mod conversation;

use bulkhead::client::rpc::{Answer, Argument, RawCall};
use bulkhead::fabric::{RemoteKey, SharedSpan};
use bulkhead::wire::codec::{Reader, Writer, roundup_bytes};
use bulkhead::wire::onc_rpc::auth::AuthSys;
use bulkhead::wire::onc_rpc::reply::{AcceptStatus, Reply, ReplyHeader};
use bulkhead::wire::onc_rpc::{CallHeader, OpaqueAuth, Xid};
use nfs3_types::mount::{self, dirpath, mountres3};
use nfs3_types::nfs3::*;
use nfs3_types::portmap;
use nfs3_types::xdr_codec::{Opaque, Pack, Unpack};
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// What the server exports, as it exports it and as it lies here.
pub const EXPORT: &str = "/srv/nfs";
pub const RDMA_PORT: u16 = 20049;

/// Octets of the results of READ but for the data, and of most other procedures at most.
const SMALL_BYTES: u64 = 512;

/// Whether the kernel of this machine serves NFS over RDMA.
pub fn is_served() -> bool {
    let ports = fs::read_to_string("/proc/fs/nfsd/portlist").unwrap_or_default();
    ports.lines().any(|line| line == format!("rdma {RDMA_PORT}")) && Path::new(EXPORT).is_dir()
}

/// Where the kernel says what it does.
const TRACE: &str = "/sys/kernel/tracing";

/// From now on the server notes of each reply whose key it invalidates.
pub fn trace_invalidations() {
    fs::write(Path::new(TRACE).join("events/rpcrdma/svcrdma_post_send/enable"), "1").unwrap();
}

/// Whether a reply has invalidated this key, as the server notes it.
pub fn was_invalidated(key: RemoteKey) -> bool {
    let noted = fs::read_to_string(Path::new(TRACE).join("trace")).unwrap();
    noted.lines().any(|line| line.ends_with(&format!(" inv_rkey={:#010x}", key.0)))
}

/// A directory of this test alone below the export, and its handle. It goes with the value.
pub struct Directory {
    pub handle: nfs_fh3,
    pub path: PathBuf,
}

impl Directory {
    /// MOUNT would give the handle of a directory, and gives that of the export: the rest is asked for by name.
    pub fn new(lookup: impl FnOnce(RawCall) -> Answer) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("test-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let path = Path::new(EXPORT).join(&name);
        fs::create_dir(&path).unwrap();
        let found: LOOKUP3res = results(&lookup(self::lookup(&root(), &name)));
        Self { handle: found.unwrap().object, path }
    }

    /// A file with `octets`, made here, and its handle by the server.
    pub fn file(&self, name: &str, octets: &[u8], lookup: impl FnOnce(RawCall) -> Answer) -> nfs_fh3 {
        fs::write(self.path.join(name), octets).unwrap();
        let found: LOOKUP3res = results(&lookup(self::lookup(&self.handle, name)));
        found.unwrap().object
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// A call over TCP, with record marks (RFC 5531 §11).
fn call_over_tcp(port: u16, program: u32, version: u32, procedure: u32, arguments: &impl Pack) -> Vec<u8> {
    let mut writer = Writer::new();
    let body = credential();
    let header = CallHeader {
        xid: Xid(7),
        program,
        version,
        procedure,
        credential: AuthSys::around(&body),
        verifier: OpaqueAuth::NONE,
    };
    header.write(&mut writer);
    writer.encoded(&packed(arguments));
    let message = writer.finish();
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.write_all(&(message.len() as u32 | 1 << 31).to_be_bytes()).unwrap();
    stream.write_all(&message).unwrap();
    let mut mark = [0; 4];
    stream.read_exact(&mut mark).unwrap();
    let mark = u32::from_be_bytes(mark);
    assert!(mark >> 31 == 1, "a reply in one fragment");
    let mut reply = vec![0; (mark & !(1 << 31)) as usize];
    stream.read_exact(&mut reply).unwrap();
    reply
}

/// The handle of the export, as MOUNT tells it.
pub fn root() -> nfs_fh3 {
    let wanted = portmap::mapping { prog: mount::PROGRAM, vers: mount::VERSION, prot: portmap::IPPROTO_TCP, port: 0 };
    const GETPORT: u32 = 3;
    const MNT: u32 = 1;
    let reply = call_over_tcp(portmap::PMAP_PORT, portmap::PROGRAM, portmap::VERSION, GETPORT, &wanted);
    let port: u32 = unpacked(body_of(&reply));
    let path = dirpath(Opaque::borrowed(EXPORT.as_bytes()));
    let reply = call_over_tcp(port as u16, mount::PROGRAM, mount::VERSION, MNT, &path);
    match unpacked(body_of(&reply)) {
        mountres3::Ok(mounted) => nfs_fh3 { data: Opaque::owned(mounted.fhandle.0.to_vec()) },
        mountres3::Err(status) => panic!("{EXPORT}: {status}"),
    }
}

fn credential() -> Vec<u8> {
    AuthSys { stamp: 1, machine_name: b"bulkhead", uid: 0, gid: 0, gids: vec![] }.body()
}

fn packed(value: &impl Pack) -> Vec<u8> {
    let mut octets = Vec::new();
    value.pack(&mut octets).unwrap();
    octets
}

/// # Panics
/// If `octets` are something else, or more.
fn unpacked<T: Unpack>(octets: &[u8]) -> T {
    let (value, len) = T::unpack(&mut &*octets).unwrap_or_else(|error| panic!("{error:?}: {octets:02x?}"));
    assert_eq!(len, octets.len(), "octets behind the results");
    value
}

/// The results in a reply message.
fn body_of(message: &[u8]) -> &[u8] {
    let mut reader = Reader::new(message);
    let header = ReplyHeader::read(&mut reader).unwrap();
    match header.reply {
        Reply::Accepted { status: AcceptStatus::Success, .. } => reader.rest(),
        other => panic!("{other:?}"),
    }
}

/// The results of a reply message that has all of them.
pub fn results_of<T: Unpack>(message: &[u8]) -> T {
    unpacked(body_of(message))
}

/// The results of a reply. The one that may travel in a chunk is the last of its procedure's, so it is put back there.
pub fn results<T: Unpack>(answer: &Answer) -> T {
    let mut stream = answer.stream.clone();
    assert!(answer.chunks.len() <= 1, "NFS version 3 has one eligible result in a reply");
    for (span, len) in &answer.chunks {
        stream.extend(octets(span, *len));
        stream.resize(stream.len() + roundup_bytes(*len) as usize, 0);
    }
    unpacked(body_of(&stream))
}

/// What became of an accepted call.
pub fn status(answer: &Answer) -> AcceptStatus {
    match ReplyHeader::read(&mut Reader::new(&answer.stream)).unwrap().reply {
        Reply::Accepted { status, .. } => status,
        other => panic!("{other:?}"),
    }
}

/// The first `len` octets of a span.
pub fn octets(span: &SharedSpan, len: u64) -> Vec<u8> {
    let mut octets = vec![0; len as usize];
    span.copy_out(0, &mut octets);
    octets
}

fn call_of(procedure: NFS_PROGRAM, words: &[u8], reply_bytes: u64) -> RawCall {
    let mut call = RawCall::new(PROGRAM, VERSION, procedure as u32, AuthSys::around(&credential()));
    call.words().encoded(words);
    call.reply_bytes_max(reply_bytes);
    call
}

/// A call without an eligible argument, whose results take at most `reply_bytes`.
fn plain(procedure: NFS_PROGRAM, arguments: &impl Pack, reply_bytes: u64) -> RawCall {
    call_of(procedure, &packed(arguments), reply_bytes)
}

/// A call whose last argument is eligible, and empty in `arguments`.
fn with_item(procedure: NFS_PROGRAM, arguments: &impl Pack, item: Argument) -> RawCall {
    let words = packed(arguments);
    let (words, len) = words.split_at(words.len() - 4);
    assert_eq!(len, [0; 4]);
    let mut call = call_of(procedure, words, SMALL_BYTES);
    call.item(item);
    call
}

fn place<'a>(directory: &nfs_fh3, name: &'a str) -> diropargs3<'a> {
    diropargs3 { dir: directory.clone(), name: filename3::from(name.as_bytes()) }
}

pub fn null() -> RawCall {
    RawCall::new(PROGRAM, VERSION, 0, OpaqueAuth::NONE)
}

/// MNT of MOUNT, over what NFS goes over.
pub fn mnt(path: &str) -> RawCall {
    const MNT: u32 = 1;
    let mut call = RawCall::new(mount::PROGRAM, mount::VERSION, MNT, AuthSys::around(&credential()));
    call.words().encoded(&packed(&dirpath(Opaque::borrowed(path.as_bytes()))));
    call.reply_bytes_max(SMALL_BYTES);
    call
}

/// The handle that MNT gives.
pub fn mounted(answer: &Answer) -> Result<nfs_fh3, mount::mountstat3> {
    match results(answer) {
        mountres3::Ok(mounted) => Ok(nfs_fh3 { data: Opaque::owned(mounted.fhandle.0.to_vec()) }),
        mountres3::Err(status) => Err(status),
    }
}

pub fn getattr(object: &nfs_fh3) -> RawCall {
    plain(NFS_PROGRAM::NFSPROC3_GETATTR, object, SMALL_BYTES)
}

pub fn fsinfo(root: &nfs_fh3) -> RawCall {
    plain(NFS_PROGRAM::NFSPROC3_FSINFO, root, SMALL_BYTES)
}

pub fn lookup(directory: &nfs_fh3, name: &str) -> RawCall {
    plain(NFS_PROGRAM::NFSPROC3_LOOKUP, &place(directory, name), SMALL_BYTES)
}

/// UNCHECKED, with mode 644.
pub fn create(directory: &nfs_fh3, name: &str) -> RawCall {
    let how = createhow3::UNCHECKED(sattr3 { mode: Nfs3Option::Some(0o644), ..sattr3::default() });
    plain(NFS_PROGRAM::NFSPROC3_CREATE, &CREATE3args { where_: place(directory, name), how }, SMALL_BYTES)
}

pub fn remove(directory: &nfs_fh3, name: &str) -> RawCall {
    plain(NFS_PROGRAM::NFSPROC3_REMOVE, &place(directory, name), SMALL_BYTES)
}

/// Its data is the eligible result, of which the server is told to give `count` octets and is given room for `room`.
pub fn read_into(file: &nfs_fh3, offset: u64, count: u32, room: u32, into: Option<SharedSpan>) -> RawCall {
    let mut call = plain(NFS_PROGRAM::NFSPROC3_READ, &READ3args { file: file.clone(), offset, count }, SMALL_BYTES);
    call.result(room, into);
    call
}

pub fn read(file: &nfs_fh3, offset: u64, count: u32) -> RawCall {
    read_into(file, offset, count, count, None)
}

/// Its data is the eligible argument.
pub fn write(file: &nfs_fh3, offset: u64, stable: stable_how, data: Argument) -> RawCall {
    let (file, count) = (file.clone(), data.len() as u32);
    let arguments = WRITE3args { file, offset, count, stable, data: Opaque::borrowed(&[]) };
    with_item(NFS_PROGRAM::NFSPROC3_WRITE, &arguments, data)
}

pub fn commit(file: &nfs_fh3, offset: u64, count: u32) -> RawCall {
    plain(NFS_PROGRAM::NFSPROC3_COMMIT, &COMMIT3args { file: file.clone(), offset, count }, SMALL_BYTES)
}

/// Its path is the eligible argument.
pub fn symlink(directory: &nfs_fh3, name: &str, path: &[u8]) -> RawCall {
    let symlink = symlinkdata3 { symlink_attributes: sattr3::default(), symlink_data: nfspath3::from(&[][..]) };
    let arguments = SYMLINK3args { where_: place(directory, name), symlink };
    with_item(NFS_PROGRAM::NFSPROC3_SYMLINK, &arguments, Argument::Octets(path.to_vec()))
}

/// Its path, of at most `path_bytes`, is the eligible result.
pub fn readlink(symlink: &nfs_fh3, path_bytes: u32) -> RawCall {
    let mut call = plain(NFS_PROGRAM::NFSPROC3_READLINK, symlink, SMALL_BYTES);
    call.result(path_bytes, None);
    call
}

/// Entries from `cookie` on, as many as `bytes` octets of results hold, which are given room for `room`.
pub fn readdirplus(
    directory: &nfs_fh3,
    (cookie, cookieverf): (cookie3, cookieverf3),
    bytes: u32,
    room: u64,
) -> RawCall {
    let dir = directory.clone();
    let arguments = READDIRPLUS3args { dir, cookie, cookieverf, dircount: bytes, maxcount: bytes };
    plain(NFS_PROGRAM::NFSPROC3_READDIRPLUS, &arguments, room)
}
