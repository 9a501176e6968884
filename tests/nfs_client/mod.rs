//! The file system of a daemon as `nfs3_client` sees it: NFS and MOUNT of another hand, over TCP, without a kernel.
#![allow(dead_code, reason = "every test file is a crate of its own and uses a part of this")]

use super::load::{Files, Stat};
use nfs3_client::nfs3_types::mount::{dirpath, mountstat3};
use nfs3_client::nfs3_types::nfs3::*;
use nfs3_client::nfs3_types::rpc::{auth_unix, opaque_auth};
use nfs3_client::nfs3_types::xdr_codec::Opaque;
use nfs3_client::tokio::{TokioConnector, TokioIo};
use nfs3_client::{MountClient, MountError, Nfs3Client, RpcError, net::Connector};
use std::cell::{Cell, RefCell};
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use tokio::net::TcpStream;
use tokio::runtime::{Builder, Runtime};

/// Who waits this long waits for ever.
const PATIENCE: Duration = Duration::from_secs(120);
/// Until a call is made again whose answer was JUKEBOX.
const JUKEBOX_PAUSE: Duration = Duration::from_millis(50);
/// As FSINFO says.
pub const TRANSFER_BYTES: usize = 1 << 20;

/// One connection. Blocking.
pub struct Peer {
    pub address: SocketAddr,
    pub uid: u32,
    runtime: Runtime,
    client: RefCell<Nfs3Client<TokioIo<TcpStream>>>,
    pub root: nfs_fh3,
    /// Calls answered with JUKEBOX.
    pub jukeboxes: Cell<u32>,
}

/// An open file, and what the server said of writes that it has not committed.
pub struct Open {
    pub handle: nfs_fh3,
    verifier: Cell<Option<writeverf3>>,
}

fn credential(uid: u32) -> opaque_auth<'static> {
    let machinename = Opaque::borrowed(b"here");
    opaque_auth::auth_unix(&auth_unix { stamp: 1, machinename, uid, gid: uid, gids: vec![] })
}

/// Whatever is not set.
pub fn unset() -> sattr3 {
    sattr3::default()
}

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

async fn bounded<T>(call: impl Future<Output = Result<T, RpcError>>) -> T {
    let answer = tokio::time::timeout(PATIENCE, call).await.expect("an answer");
    answer.unwrap_or_else(|error| panic!("{error}"))
}

/// What MNT gives for a path.
pub fn mount(address: SocketAddr, path: &str) -> Result<nfs_fh3, mountstat3> {
    let runtime = runtime();
    runtime.block_on(async {
        let io = TokioConnector.connect(address).await.unwrap();
        let mut client = MountClient::new_with_auth(io, credential(0), opaque_auth::default());
        let asked = client.mnt(dirpath(Opaque::borrowed(path.as_bytes())));
        match tokio::time::timeout(PATIENCE, asked).await.expect("an answer") {
            Ok(mounted) => Ok(nfs_fh3 { data: Opaque::owned(mounted.fhandle.0.to_vec()) }),
            Err(MountError::Denied(status)) => Err(status),
            Err(error) => panic!("{error}"),
        }
    })
}

/// As Linux names it.
fn errno(status: nfsstat3) -> i32 {
    match status {
        nfsstat3::NFS3ERR_NAMETOOLONG => libc::ENAMETOOLONG,
        nfsstat3::NFS3ERR_NOTEMPTY => libc::ENOTEMPTY,
        nfsstat3::NFS3ERR_DQUOT => libc::EDQUOT,
        nfsstat3::NFS3ERR_STALE | nfsstat3::NFS3ERR_BADHANDLE => libc::ESTALE,
        nfsstat3::NFS3ERR_NOTSUPP => libc::ENOTSUP,
        // Up to here they have the numbers of Unix.
        status if (status as i32) < 63 => status as i32,
        _ => libc::EREMOTEIO,
    }
}

fn failed<T>(status: nfsstat3) -> io::Result<T> {
    Err(io::Error::from_raw_os_error(errno(status)))
}

/// Calls until the answer is not JUKEBOX.
macro_rules! ask {
    ($peer:expr, $method:ident, $arguments:expr) => {{
        let since = Instant::now();
        loop {
            let answer = $peer.runtime.block_on(bounded($peer.client.borrow_mut().$method(&$arguments)));
            match answer {
                Nfs3Result::Ok(done) => break Ok(done),
                Nfs3Result::Err((nfsstat3::NFS3ERR_JUKEBOX, _)) => {
                    assert!(since.elapsed() < PATIENCE, "it is always later");
                    $peer.jukeboxes.set($peer.jukeboxes.get() + 1);
                    std::thread::sleep(JUKEBOX_PAUSE);
                }
                Nfs3Result::Err((status, _)) => break Err(status),
            }
        }
    }};
}

impl Peer {
    /// Mounts `/` as the super-user.
    pub fn mount(address: SocketAddr) -> Self {
        Self::mount_as(address, 0)
    }

    pub fn mount_as(address: SocketAddr, uid: u32) -> Self {
        let root = mount(address, "/").unwrap_or_else(|status| panic!("{status:?}"));
        Self::with_root(address, uid, root)
    }

    pub fn with_root(address: SocketAddr, uid: u32, root: nfs_fh3) -> Self {
        let runtime = runtime();
        let io = runtime.block_on(TokioConnector.connect(address)).unwrap();
        let client = RefCell::new(Nfs3Client::new_with_auth(io, credential(uid), opaque_auth::default()));
        Self { address, uid, runtime, client, root, jukeboxes: Cell::new(0) }
    }

    pub fn lookup(&self, dir: &nfs_fh3, name: &str) -> Result<nfs_fh3, nfsstat3> {
        ask!(self, lookup, LOOKUP3args { what: place(dir, name) }).map(|found| found.object)
    }

    /// By its path from the root.
    pub fn find(&self, path: &str) -> Result<nfs_fh3, nfsstat3> {
        let names = path.split('/').filter(|name| !name.is_empty());
        names.into_iter().try_fold(self.root.clone(), |dir, name| self.lookup(&dir, name))
    }

    /// The directory that a path ends in, and the name there.
    fn parent<'a>(&self, path: &'a str) -> Result<(nfs_fh3, &'a str), nfsstat3> {
        let (dir, name) = path.rsplit_once('/').unwrap_or(("", path));
        Ok((self.find(dir)?, name))
    }

    pub fn attributes(&self, handle: &nfs_fh3) -> Result<fattr3, nfsstat3> {
        let done = ask!(self, getattr, GETATTR3args { object: handle.clone() });
        done.map(|done: GETATTR3resok| done.obj_attributes)
    }

    pub fn create_how(&self, path: &str, how: impl Fn() -> createhow3) -> Result<Open, nfsstat3> {
        let (dir, name) = self.parent(path)?;
        let made = ask!(self, create, CREATE3args { where_: place(&dir, name), how: how() })?;
        Ok(Open { handle: made.obj.unwrap(), verifier: Cell::default() })
    }

    pub fn set(&self, handle: &nfs_fh3, new_attributes: sattr3) -> Result<(), nfsstat3> {
        let arguments = SETATTR3args { object: handle.clone(), new_attributes, guard: sattrguard3::None };
        ask!(self, setattr, arguments).map(|_| ())
    }

    /// One WRITE, once.
    pub fn write(
        &self,
        handle: &nfs_fh3,
        offset: u64,
        octets: &[u8],
        stable: stable_how,
    ) -> Result<WRITE3resok, nfsstat3> {
        let data = Opaque::borrowed(octets);
        let arguments = WRITE3args { file: handle.clone(), offset, count: octets.len() as u32, stable, data };
        match self.runtime.block_on(bounded(self.client.borrow_mut().write(&arguments))) {
            Nfs3Result::Ok(done) => Ok(done),
            Nfs3Result::Err((status, _)) => Err(status),
        }
    }

    /// One READ.
    pub fn read(&self, handle: &nfs_fh3, offset: u64, count: u32) -> Result<(Vec<u8>, bool), nfsstat3> {
        let done: READ3resok<'_> = ask!(self, read, READ3args { file: handle.clone(), offset, count })?;
        assert_eq!(done.count as usize, done.data.len());
        Ok((done.data.into_owned(), done.eof))
    }

    /// COMMIT of a whole file.
    pub fn sync(&self, handle: &nfs_fh3) -> Result<writeverf3, nfsstat3> {
        ask!(self, commit, COMMIT3args { file: handle.clone(), offset: 0, count: 0 }).map(|done| done.verf)
    }

    pub fn fsinfo(&self) -> FSINFO3resok {
        ask!(self, fsinfo, FSINFO3args { fsroot: self.root.clone() }).unwrap()
    }

    /// What is in a directory, with handles; and how many calls that took.
    pub fn entries(&self, dir: &nfs_fh3, maxcount: u32) -> Result<(Vec<(String, nfs_fh3)>, usize), nfsstat3> {
        let (mut found, mut cookie, mut cookieverf, mut calls) = (Vec::new(), 0, cookieverf3::default(), 0);
        loop {
            let arguments = READDIRPLUS3args { dir: dir.clone(), cookie, cookieverf, dircount: maxcount, maxcount };
            let page: READDIRPLUS3resok<'_> = ask!(self, readdirplus, arguments)?;
            calls += 1;
            cookieverf = page.cookieverf;
            let entries = page.reply.entries.into_inner();
            assert!(page.reply.eof || !entries.is_empty(), "it goes on and gives nothing");
            for entry in entries {
                cookie = entry.cookie;
                let name = String::from_utf8(entry.name.as_ref().to_vec()).unwrap();
                if name != "." && name != ".." {
                    found.push((name, entry.name_handle.unwrap()));
                }
            }
            if page.reply.eof {
                return Ok((found, calls));
            }
        }
    }

    pub fn null(&self) -> Result<(), RpcError> {
        self.runtime.block_on(self.client.borrow_mut().null())
    }
}

fn place<'a>(dir: &nfs_fh3, name: &'a str) -> diropargs3<'a> {
    diropargs3 { dir: dir.clone(), name: filename3::from(name.as_bytes()) }
}

impl Files for Peer {
    type File = Open;

    fn create(&self, path: &str) -> io::Result<Open> {
        let how =
            || createhow3::UNCHECKED(sattr3 { mode: set_mode3::Some(0o644), size: set_size3::Some(0), ..unset() });
        self.create_how(path, how).or_else(failed)
    }

    fn create_new(&self, path: &str) -> io::Result<Open> {
        let open = self.create_how(path, || createhow3::EXCLUSIVE(createverf3(rand()))).or_else(failed)?;
        // The verifier may be kept in attributes, so they are to be set (RFC 1813 §3.3.8).
        self.set(&open.handle, sattr3 { mode: set_mode3::Some(0o644), ..unset() }).or_else(failed)?;
        Ok(open)
    }

    fn open(&self, path: &str) -> io::Result<Open> {
        let handle = self.find(path).or_else(failed)?;
        match self.attributes(&handle).or_else(failed)?.type_ {
            ftype3::NF3DIR => failed(nfsstat3::NFS3ERR_ISDIR),
            _ => Ok(Open { handle, verifier: Cell::default() }),
        }
    }

    fn write_at(&self, file: &Open, offset: u64, octets: &[u8]) -> io::Result<()> {
        let since = Instant::now();
        let mut done = 0;
        while done < octets.len() {
            let part = &octets[done..octets.len().min(done + TRANSFER_BYTES)];
            match self.write(&file.handle, offset + done as u64, part, stable_how::UNSTABLE) {
                Ok(written) => {
                    assert!((1..=part.len() as u32).contains(&written.count));
                    let first = file.verifier.replace(Some(written.verf));
                    assert!(first.is_none_or(|first| first == written.verf), "the server was started again");
                    done += written.count as usize;
                }
                Err(nfsstat3::NFS3ERR_JUKEBOX) => {
                    assert!(since.elapsed() < PATIENCE, "it is always later");
                    self.jukeboxes.set(self.jukeboxes.get() + 1);
                    std::thread::sleep(JUKEBOX_PAUSE);
                }
                Err(status) => return failed(status),
            }
        }
        Ok(())
    }

    fn read_at(&self, file: &Open, offset: u64, into: &mut [u8]) -> io::Result<usize> {
        let mut done = 0;
        while done < into.len() {
            let count = (into.len() - done).min(TRANSFER_BYTES);
            let (octets, eof) = self.read(&file.handle, offset + done as u64, count as u32).or_else(failed)?;
            assert!(octets.len() <= count);
            into[done..done + octets.len()].copy_from_slice(&octets);
            done += octets.len();
            if eof {
                break;
            }
            assert!(!octets.is_empty(), "nothing, and not the end");
        }
        Ok(done)
    }

    fn set_len(&self, file: &Open, len: u64) -> io::Result<()> {
        self.set(&file.handle, sattr3 { size: set_size3::Some(len), ..unset() }).or_else(failed)
    }

    fn len(&self, file: &Open) -> io::Result<u64> {
        self.attributes(&file.handle).map(|attributes| attributes.size).or_else(failed)
    }

    fn commit(&self, file: &Open) -> io::Result<()> {
        let verifier = self.sync(&file.handle).or_else(failed)?;
        assert!(file.verifier.take().is_none_or(|written| written == verifier), "the server was started again");
        Ok(())
    }

    fn forget(&self, _: &Open) -> io::Result<()> {
        Ok(())
    }

    fn close(&self, file: Open) -> io::Result<()> {
        self.commit(&file)
    }

    fn stat(&self, path: &str) -> io::Result<Stat> {
        let handle = self.find(path).or_else(failed)?;
        let fattr3 { type_, mode, size, mtime, .. } = self.attributes(&handle).or_else(failed)?;
        Ok(Stat { is_directory: type_ == ftype3::NF3DIR, len: size, mode, modified: mtime.seconds.into() })
    }

    fn set_mode(&self, path: &str, mode: u32) -> io::Result<()> {
        let handle = self.find(path).or_else(failed)?;
        self.set(&handle, sattr3 { mode: set_mode3::Some(mode), ..unset() }).or_else(failed)
    }

    fn set_modified(&self, path: &str, seconds: u64) -> io::Result<()> {
        let handle = self.find(path).or_else(failed)?;
        let time = nfstime3 { seconds: seconds as u32, nseconds: 0 };
        self.set(&handle, sattr3 { mtime: set_mtime::SET_TO_CLIENT_TIME(time), ..unset() }).or_else(failed)
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let (from_dir, from_name) = self.parent(from).or_else(failed)?;
        let (to_dir, to_name) = self.parent(to).or_else(failed)?;
        let arguments = RENAME3args { from: place(&from_dir, from_name), to: place(&to_dir, to_name) };
        ask!(self, rename, arguments).map(|_| ()).or_else(failed)
    }

    fn remove(&self, path: &str) -> io::Result<()> {
        let (dir, name) = self.parent(path).or_else(failed)?;
        ask!(self, remove, REMOVE3args { object: place(&dir, name) }).map(|_| ()).or_else(failed)
    }

    fn make_directory(&self, path: &str) -> io::Result<()> {
        let (dir, name) = self.parent(path).or_else(failed)?;
        let attributes = || sattr3 { mode: set_mode3::Some(0o755), ..unset() };
        ask!(self, mkdir, MKDIR3args { where_: place(&dir, name), attributes: attributes() })
            .map(|_| ())
            .or_else(failed)
    }

    fn remove_directory(&self, path: &str) -> io::Result<()> {
        let (dir, name) = self.parent(path).or_else(failed)?;
        ask!(self, rmdir, RMDIR3args { object: place(&dir, name) }).map(|_| ()).or_else(failed)
    }

    fn list(&self, path: &str) -> io::Result<Vec<String>> {
        let dir = self.find(path).or_else(failed)?;
        let (entries, _) = self.entries(&dir, 32 << 10).or_else(failed)?;
        Ok(entries.into_iter().map(|(name, _)| name).collect())
    }

    fn another(&self) -> Self {
        Self::mount_as(self.address, self.uid)
    }
}

/// Eight octets that nobody else picks.
fn rand() -> [u8; 8] {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(0).to_be_bytes()
}
