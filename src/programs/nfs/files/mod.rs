//! The file system that the program serves: files and directories over the keys of a store, and drafts of what is written.
//!
//! ```text
//!  FileHandle ──▶ number ──▶ File { record, object } ─┬─▶ draft, where something was written and not committed
//!                            Directory                └─▶ else the object
//! ```
//! Every call gives what its reply says, but that READ gives pieces and WRITE takes octets in parts: see [`writing`]. No
//! call waits. A file system is shared by all connections; its locks, in their order, are one for calls that change which names
//! there are, one for drafts as long as files move, and that of each draft. Decision 14 says what maps to what.

#![expect(
    clippy::result_large_err,
    reason = "a failure tells attributes as a success does; both become a reply at once"
)]

mod access;
mod listing;
#[cfg(test)]
pub(super) mod tests;
mod tree;
pub mod writing;

pub use access::{Caller, NOBODY};
pub use listing::Page;
pub use writing::{Reading, WriteStep, Writing};

use super::types::{
    Attributes, CookieVerifier, Device, FileHandle, FileId, FileType, NfsError, SetAttributes, SetTime, Time,
    WccAttributes, WccData, WriteVerifier,
};
use super::{FsInfo, FsStat, NAME_BYTES_MAX, PathConf, SetAttr, TRANSFER_BYTES_MAX, access as bits, property};
use crate::programs::nfs::{Accessible, Failure, Outcome};
use crate::store::Store;
use crate::store::directories::Directory;
use crate::store::files::{FileNumber, FileRecord, Metadata, Owner};
use crate::store::object::Object;
use std::sync::{Arc, Mutex, RwLock};
use std::time::Duration;

const MAGIC: [u8; 4] = *b"BLK1";
const HANDLE_BYTES: usize = 28;
/// What [`bits::ALL`] means for a file and for a directory.
const FILE_BITS: u32 = bits::READ | bits::MODIFY | bits::EXTEND | bits::EXECUTE;
const DIRECTORY_BITS: u32 = bits::READ | bits::LOOKUP | bits::MODIFY | bits::EXTEND | bits::DELETE;

/// What a file system is told.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Settings {
    /// Tells it from other file systems; the same after a restart.
    pub fsid: u64,
    /// Tells this run from others.
    pub boot: u64,
    /// Of whatever nobody set an owner of.
    pub uid: u32,
    pub gid: u32,
}

/// See the module.
#[derive(Debug)]
pub struct FileSystem {
    store: Store,
    settings: Settings,
    drafts: writing::Drafts,
    /// Held by whoever changes which names there are.
    tree: Mutex<()>,
    /// Held shared by whoever begins a draft or goes on with one, and alone while a file gets another key: a draft that began
    /// between the commit of the one before and the move would be one of an object that is not there any more.
    moving: RwLock<()>,
}

/// What a handle names.
#[derive(Clone, Debug)]
pub(super) enum Node {
    File(Arc<FileRecord>, Arc<Object>),
    Directory(Arc<Directory>),
}

impl FileSystem {
    /// # Panics
    /// If the store was not made with files.
    pub fn new(store: Store, settings: Settings) -> Self {
        assert!(store.has_files(), "a file system needs a store with files");
        Self { store, settings, drafts: writing::Drafts::default(), tree: Mutex::default(), moving: RwLock::default() }
    }

    pub fn store(&self) -> &Store {
        &self.store
    }

    /// The handle that MNT gives.
    pub fn root(&self) -> FileHandle {
        self.handle(FileNumber::ROOT)
    }

    pub fn cookie_verifier(&self) -> CookieVerifier {
        CookieVerifier(self.settings.boot.to_be_bytes())
    }

    /// It changes with every start: what was written and not committed is gone then, and so is the rest.
    pub fn write_verifier(&self) -> WriteVerifier {
        WriteVerifier(self.settings.boot.to_be_bytes())
    }

    /// That of the root is the same after a restart, and no other is.
    fn handle(&self, number: FileNumber) -> FileHandle {
        let boot = if number == FileNumber::ROOT { 0 } else { self.settings.boot };
        let mut octets = [0; HANDLE_BYTES];
        octets[..4].copy_from_slice(&MAGIC);
        for (at, word) in [(4, self.settings.fsid), (12, boot), (20, number.0)] {
            octets[at..at + 8].copy_from_slice(&word.to_be_bytes());
        }
        FileHandle::new(&octets).expect("28 are fewer than 64")
    }

    fn number(&self, handle: &FileHandle) -> Result<FileNumber, NfsError> {
        let octets = handle.as_bytes();
        if octets.len() != HANDLE_BYTES || octets[..4] != MAGIC {
            return Err(NfsError::BadHandle);
        }
        let word = |at: usize| u64::from_be_bytes(octets[at..at + 8].try_into().expect("eight octets"));
        let number = FileNumber(word(20));
        if *handle == self.handle(number) { Ok(number) } else { Err(NfsError::Stale) }
    }

    fn node(&self, handle: &FileHandle) -> Result<Node, NfsError> {
        let number = self.number(handle)?;
        let now = self.store.clock().now();
        if let Some((record, object)) = self.store.file(number, now) {
            return Ok(Node::File(record, object));
        }
        self.living_directory(number, now).map(Node::Directory)
    }

    fn living_directory(&self, number: FileNumber, now: u64) -> Result<Arc<Directory>, NfsError> {
        let known = self.store.known_directory(number).ok_or(NfsError::Stale)?;
        // Nothing may be left of it.
        let found = self.store.directory(known.path(), now).ok().flatten();
        found.filter(|found| found.number() == number).ok_or(NfsError::Stale)
    }

    fn directory(&self, handle: &FileHandle) -> Result<Arc<Directory>, NfsError> {
        match self.node(handle)? {
            Node::Directory(directory) => Ok(directory),
            Node::File(..) => Err(NfsError::NotDir),
        }
    }

    fn owner(&self, metadata: &Metadata, is_directory: bool) -> Owner {
        let mode = if is_directory { 0o755 } else { 0o644 };
        metadata.owner.unwrap_or(Owner { mode, uid: self.settings.uid, gid: self.settings.gid })
    }

    fn owner_of(&self, node: &Node) -> Owner {
        match node {
            Node::File(record, _) => self.owner(&record.metadata(), false),
            Node::Directory(directory) => self.owner(&directory.metadata(), true),
        }
    }

    fn attributes(&self, node: &Node) -> Attributes {
        match node {
            Node::File(record, object) => {
                let (size, used) = self.size(record.number(), object);
                self.encode(FileType::Regular, record.number(), &record.metadata(), size, used)
            }
            Node::Directory(directory) => self.directory_attributes(directory, &directory.metadata()),
        }
    }

    fn directory_attributes(&self, directory: &Directory, metadata: &Metadata) -> Attributes {
        self.encode(FileType::Directory, directory.number(), metadata, 4096, 4096)
    }

    fn encode(&self, kind: FileType, number: FileNumber, metadata: &Metadata, size: u64, used: u64) -> Attributes {
        let is_directory = kind == FileType::Directory;
        let Owner { mode, uid, gid } = self.owner(metadata, is_directory);
        Attributes {
            kind,
            mode,
            // Of a directory too, as where subdirectories are not counted: walkers take 2 for a directory without any.
            nlink: 1,
            uid,
            gid,
            size,
            used,
            rdev: Device::NONE,
            fsid: self.settings.fsid,
            fileid: FileId(number.0),
            atime: time(metadata.accessed_ns),
            mtime: time(metadata.modified_ns),
            ctime: time(metadata.changed_ns),
        }
    }

    /// As attributes are where there is a node, for failures too.
    fn some_attributes(&self, node: &Result<Node, NfsError>) -> Option<Attributes> {
        node.as_ref().ok().map(|node| self.attributes(node))
    }

    /// GETATTR.
    ///
    /// # Errors
    /// As the reply says; so in all that follow.
    pub fn get_attr(&self, object: &FileHandle) -> Outcome<Attributes, ()> {
        let node = self.node(object).map_err(|error| Failure { error, attributes: () })?;
        Ok(self.attributes(&node))
    }

    /// ACCESS.
    pub fn access(&self, caller: &Caller, object: &FileHandle, asked: u32) -> Outcome<Accessible, Option<Attributes>> {
        let node = self.node(object).map_err(|error| Failure { error, attributes: None })?;
        let owner = self.owner_of(&node);
        let is_directory = matches!(node, Node::Directory(_));
        let may = |bits: u32| caller.may(owner, bits, is_directory);
        let meanings = [
            (bits::READ, access::READ),
            (bits::LOOKUP | bits::EXECUTE, access::EXECUTE),
            (bits::MODIFY | bits::EXTEND | bits::DELETE, access::WRITE),
        ];
        let all = if is_directory { DIRECTORY_BITS } else { FILE_BITS };
        let granted = meanings.iter().filter(|(_, mode)| may(*mode)).fold(0, |granted, (bits, _)| granted | bits);
        Ok(Accessible { obj_attributes: Some(self.attributes(&node)), access: granted & asked & all })
    }

    /// SETATTR. A directory whose attributes are set is kept as one that was made.
    pub fn set_attr(&self, caller: &Caller, arguments: &SetAttr) -> Outcome<WccData, WccData> {
        let node = self.node(&arguments.object).map_err(|error| Failure { error, attributes: WccData::default() })?;
        let before = self.attributes(&node);
        let result = self.set(caller, &node, arguments, &before);
        let after = self.node(&arguments.object).ok().map(|node| self.attributes(&node));
        match result {
            Ok(is_alone) => Ok(WccData { before: is_alone.then(|| WccAttributes::from(&before)), after }),
            Err(error) => Err(Failure { error, attributes: WccData { before: None, after } }),
        }
    }

    /// True if nobody else changed the attributes since `before`.
    fn set(&self, caller: &Caller, node: &Node, arguments: &SetAttr, before: &Attributes) -> Result<bool, NfsError> {
        let new = &arguments.new_attributes;
        if arguments.guard.is_some_and(|ctime| ctime != before.ctime) {
            return Err(NfsError::NotSync);
        }
        let owner = self.owner_of(node);
        self.check_set(caller, owner, new)?;
        let is_alone = |metadata: &Metadata| time(metadata.changed_ns) == before.ctime;
        match node {
            Node::File(record, _) => {
                if let Some(size) = new.size {
                    if !caller.may_write(owner) {
                        return Err(NfsError::Acces);
                    }
                    self.set_size(record.number(), size)?;
                }
                let now_ns = self.store.clock().now_ns();
                Ok(record.update(|metadata| {
                    let is_alone = is_alone(metadata);
                    if new.size.is_some() {
                        metadata.modify(now_ns);
                        Caller::drop_rights(caller.is_root(), metadata);
                    }
                    apply(metadata, owner, new, now_ns, caller);
                    is_alone
                }))
            }
            Node::Directory(_) if new.size.is_some() => Err(NfsError::IsDir),
            Node::Directory(directory) => {
                let kept = self.store.make_directory(directory.path(), directory.metadata());
                let kept = kept.map_err(tree::directory_error)?;
                let now_ns = self.store.clock().now_ns();
                Ok(kept.update(|metadata| {
                    let is_alone = is_alone(metadata);
                    apply(metadata, owner, new, now_ns, caller);
                    is_alone
                }))
            }
        }
    }

    fn check_set(&self, caller: &Caller, owner: Owner, new: &SetAttributes) -> Result<(), NfsError> {
        let times = [new.atime, new.mtime];
        let is_good = |time: &SetTime| !matches!(time, SetTime::ClientTime(time) if time.since_epoch().is_none());
        if !times.iter().all(is_good) {
            return Err(NfsError::Inval);
        }
        let is_owner = caller.owns(owner);
        let gives_away = new.uid.is_some_and(|uid| uid != owner.uid);
        let leaves_group = new.gid.is_some_and(|gid| gid != owner.gid && !caller.is_in(gid));
        let sets_client_time = times.iter().any(|time| matches!(time, SetTime::ClientTime(_)));
        let sets_owner = new.mode.is_some() || new.gid.is_some() || new.uid.is_some() || sets_client_time;
        if (sets_owner && !is_owner) || ((gives_away || leaves_group) && !caller.is_root()) {
            return Err(NfsError::Perm);
        }
        let sets_now = times.contains(&SetTime::ServerTime);
        if sets_now && !is_owner && !caller.may(owner, access::WRITE, false) {
            return Err(NfsError::Acces);
        }
        Ok(())
    }

    /// FSSTAT. What can be evicted is free.
    pub fn fs_stat(&self, root: &FileHandle) -> Outcome<FsStat, Option<Attributes>> {
        let node = self.node(root).map_err(|error| Failure { error, attributes: None })?;
        let gauges = self.store.gauges();
        let tbytes = gauges.pool_bytes.max(gauges.memory_bytes);
        let fbytes = tbytes.saturating_sub(gauges.claimed_bytes + gauges.pinned_bytes);
        // What a small object takes of the index, about.
        let tfiles = self.store.sizes().index_bytes_max / 1024;
        let ffiles = tfiles.saturating_sub(gauges.objects);
        Ok(FsStat {
            obj_attributes: Some(self.attributes(&node)),
            tbytes,
            fbytes,
            abytes: fbytes,
            tfiles: tfiles.max(gauges.objects),
            ffiles,
            afiles: ffiles,
            invarsec: 0,
        })
    }

    /// FSINFO.
    pub fn fs_info(&self, root: &FileHandle) -> Outcome<FsInfo, Option<Attributes>> {
        let node = self.node(root).map_err(|error| Failure { error, attributes: None })?;
        Ok(FsInfo {
            obj_attributes: Some(self.attributes(&node)),
            rtmax: TRANSFER_BYTES_MAX,
            rtpref: TRANSFER_BYTES_MAX,
            rtmult: 4096,
            wtmax: TRANSFER_BYTES_MAX,
            wtpref: TRANSFER_BYTES_MAX,
            wtmult: 4096,
            dtpref: 64 << 10,
            maxfilesize: self.store.sparse_bytes_max(),
            time_delta: Time { seconds: 0, nseconds: 1 },
            properties: property::HOMOGENEOUS | property::CANSETTIME,
        })
    }

    /// PATHCONF.
    pub fn path_conf(&self, object: &FileHandle) -> Outcome<PathConf, Option<Attributes>> {
        let node = self.node(object).map_err(|error| Failure { error, attributes: None })?;
        Ok(PathConf {
            obj_attributes: Some(self.attributes(&node)),
            linkmax: 1,
            name_max: NAME_BYTES_MAX as u32,
            no_trunc: true,
            chown_restricted: true,
            case_insensitive: false,
            case_preserving: true,
        })
    }
}

fn time(ns: u64) -> Time {
    Time::from_epoch(Duration::from_nanos(ns))
}

fn nanoseconds(time: Time) -> u64 {
    u64::from(time.seconds) * 1_000_000_000 + u64::from(time.nseconds)
}

/// Sets what is asked for but the size. `owner` is what it was.
fn apply(metadata: &mut Metadata, owner: Owner, new: &SetAttributes, now_ns: u64, caller: &Caller) {
    let pick = |how: SetTime, old: u64| match how {
        SetTime::DontChange => old,
        SetTime::ServerTime => now_ns,
        SetTime::ClientTime(time) => nanoseconds(time),
    };
    metadata.change(now_ns);
    metadata.accessed_ns = pick(new.atime, metadata.accessed_ns);
    metadata.modified_ns = pick(new.mtime, metadata.modified_ns);
    if (new.mode, new.uid, new.gid) == (None, None, None) {
        return;
    }
    let mut set = Owner {
        mode: new.mode.unwrap_or(owner.mode) & 0o7777,
        uid: new.uid.unwrap_or(owner.uid),
        gid: new.gid.unwrap_or(owner.gid),
    };
    // Who gets a file does not get to act as whom it was of.
    if new.mode.is_none() && !caller.is_root() {
        set.mode &= !0o6000;
    }
    if !caller.may_set_group(set.gid) {
        set.mode &= !0o2000;
    }
    metadata.owner = Some(set);
}
