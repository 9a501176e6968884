//! Names: what is where, what comes, goes and moves.

use super::access::{EXECUTE, WRITE};
use super::{Caller, FileSystem, Node, apply, nanoseconds};
use crate::programs::nfs::types::{Attributes, CreateVerifier, NfsError, Place, Time, WccAttributes, WccData};
use crate::programs::nfs::{
    Create, CreateHow, Created, Failure, Looked, MakeDirectory, Outcome, Rename, Renamed, SetAttributes,
};
use crate::store::directories::{Directory, DirectoryError, parent};
use crate::store::files::DELIMITER;
use crate::store::key::KEY_BYTES_MAX;
use crate::store::{Committed, RelocateError};
use std::sync::{Arc, MutexGuard, RwLockWriteGuard};

/// A directory with more keys below it is not renamed: clients copy then.
pub(super) const RENAMED_KEYS_MAX: usize = 10_000;
/// Of a file whose creator says nothing of it.
const FILE_MODE: u32 = 0o644;
const DIRECTORY_MODE: u32 = 0o755;

pub(super) fn directory_error(error: DirectoryError) -> NfsError {
    match error {
        DirectoryError::TooLong { .. } => NfsError::NameTooLong,
        DirectoryError::Full { .. } => NfsError::NoSpc,
        DirectoryError::NotEmpty => NfsError::NotEmpty,
    }
}

/// A directory that is about to be changed.
struct Watch {
    directory: Arc<Directory>,
    before: WccAttributes,
    changes: u64,
}

impl FileSystem {
    fn watch(&self, directory: &Arc<Directory>) -> Watch {
        let (metadata, changes) = directory.snapshot();
        let before = WccAttributes::from(&self.directory_attributes(directory, &metadata));
        Watch { directory: directory.clone(), before, changes }
    }

    /// What the reply says of it, `own` changes later. Where there were others as well, a client must not take what it knew
    /// for what there was before.
    fn seen(&self, watch: &Watch, own: u64) -> WccData {
        // It may have become another record, with its number, by being renamed.
        let now = self.store.known_directory(watch.directory.number()).unwrap_or_else(|| watch.directory.clone());
        let (metadata, changes) = now.snapshot();
        let before = (changes == watch.changes + own).then_some(watch.before);
        WccData { before, after: Some(self.directory_attributes(&now, &metadata)) }
    }

    fn failed<T>(&self, error: NfsError, directory: &Arc<Directory>) -> Outcome<T, WccData> {
        let attributes = self.seen(&self.watch(directory), 0);
        Err(Failure { error, attributes: WccData { before: None, ..attributes } })
    }

    pub(super) fn lock_tree(&self) -> MutexGuard<'_, ()> {
        self.tree.lock().expect("no panic under this lock")
    }

    /// No draft begins, and none goes on.
    fn lock_drafts(&self) -> RwLockWriteGuard<'_, ()> {
        self.moving.write().expect("no panic under this lock")
    }

    /// What a name in a directory, none of `.` and `..`, is.
    pub(super) fn child(&self, directory: &Directory, name: &[u8], now: u64) -> Result<Option<Node>, NfsError> {
        let mut path = [directory.path(), name].concat();
        if path.len() > KEY_BYTES_MAX {
            return Err(NfsError::NameTooLong);
        }
        if path.len() < KEY_BYTES_MAX {
            path.push(DELIMITER);
            if let Some(found) = self.store.directory(&path, now).map_err(directory_error)? {
                return Ok(Some(Node::Directory(found)));
            }
            path.pop();
        }
        let object = self.store.peek(&path, now);
        Ok(object.and_then(|object| Some(Node::File(object.record()?.clone(), object))))
    }

    fn look(&self, directory: &Arc<Directory>, name: &[u8]) -> Result<Node, NfsError> {
        let now = self.store.clock().now();
        match name {
            b"." => Ok(Node::Directory(directory.clone())),
            b".." => {
                let above = self.store.directory(parent(directory.path()), now).map_err(directory_error)?;
                above.map(Node::Directory).ok_or(NfsError::Stale)
            }
            name => self.child(directory, name, now)?.ok_or(NfsError::NoEnt),
        }
    }

    /// LOOKUP.
    ///
    /// # Errors
    /// As the reply says; so in all that follow.
    pub fn lookup(&self, caller: &Caller, place: &Place<'_>) -> Outcome<Looked, Option<Attributes>> {
        let node = self.node(&place.dir);
        let dir_attributes = self.some_attributes(&node);
        let result = node.and_then(|node| {
            let Node::Directory(directory) = &node else { return Err(NfsError::NotDir) };
            if !caller.may(self.owner_of(&node), EXECUTE, true) {
                return Err(NfsError::Acces);
            }
            self.look(directory, place.name.component()?)
        });
        let found = result.map_err(|error| Failure { error, attributes: dir_attributes })?;
        let number = match &found {
            Node::File(record, _) => record.number(),
            Node::Directory(directory) => directory.number(),
        };
        Ok(Looked { object: self.handle(number), obj_attributes: Some(self.attributes(&found)), dir_attributes })
    }

    /// The directory of a place that is about to change, and the name in it.
    fn place<'a>(&self, caller: &Caller, place: &Place<'a>) -> Result<(Arc<Directory>, &'a [u8]), Failure<WccData>> {
        let directory = self.directory(&place.dir);
        let directory = directory.map_err(|error| Failure { error, attributes: WccData::default() })?;
        let owner = self.owner(&directory.metadata(), true);
        let name = if caller.may(owner, WRITE | EXECUTE, true) { place.name.component() } else { Err(NfsError::Acces) };
        match name {
            Ok(name) => Ok((directory, name)),
            Err(error) => self.failed(error, &directory),
        }
    }

    /// CREATE.
    pub fn create(&self, caller: &Caller, arguments: &Create<'_>) -> Outcome<Created, WccData> {
        let _tree = self.lock_tree();
        let (directory, name) = self.place(caller, &arguments.place)?;
        let watch = self.watch(&directory);
        match self.create_in(caller, &directory, name, &arguments.how) {
            Ok((node, own)) => Ok(self.created(&node, &watch, own)),
            Err(error) => self.failed(error, &directory),
        }
    }

    fn created(&self, node: &Node, watch: &Watch, own: u64) -> Created {
        let attributes = self.attributes(node);
        let number = match node {
            Node::File(record, _) => record.number(),
            Node::Directory(directory) => directory.number(),
        };
        let obj = Some(self.handle(number));
        Created { obj, obj_attributes: Some(attributes), dir_wcc: self.seen(watch, own) }
    }

    /// The file, and how often the directory changed for it.
    fn create_in(
        &self,
        caller: &Caller,
        directory: &Arc<Directory>,
        name: &[u8],
        how: &CreateHow,
    ) -> Result<(Node, u64), NfsError> {
        if matches!(name, b"." | b"..") {
            return Err(NfsError::Exist);
        }
        let now = self.store.clock().now();
        let now_ns = self.store.clock().now_ns();
        let above = self.owner(&directory.metadata(), true);
        let set = match how {
            CreateHow::Unchecked(set) | CreateHow::Guarded(set) => *set,
            CreateHow::Exclusive(_) => SetAttributes::default(),
        };
        let mut metadata = caller.begin(above, set.mode.unwrap_or(FILE_MODE), false, now_ns);
        let owner = self.owner(&metadata, false);
        let others = SetAttributes { mode: None, size: None, ..set };
        self.check_set(caller, owner, &SetAttributes { mode: set.mode, ..others })?;
        apply(&mut metadata, owner, &others, now_ns, caller);
        if let CreateHow::Exclusive(verifier) = how {
            (metadata.accessed_ns, metadata.modified_ns) = verifier_times(*verifier);
        }
        // Twice, for one of that name may come in between by another door.
        for _ in 0..2 {
            match self.child(directory, name, now)? {
                Some(Node::Directory(_)) => return Err(NfsError::Exist),
                Some(Node::File(record, object)) => {
                    match how {
                        CreateHow::Guarded(_) => return Err(NfsError::Exist),
                        CreateHow::Exclusive(verifier) => {
                            let found = record.metadata();
                            if (found.accessed_ns, found.modified_ns) != verifier_times(*verifier) {
                                return Err(NfsError::Exist);
                            }
                        }
                        CreateHow::Unchecked(SetAttributes { size: Some(size), .. }) => {
                            if !caller.may_write(self.owner(&record.metadata(), false)) {
                                return Err(NfsError::Acces);
                            }
                            self.set_size(record.number(), *size)?;
                            record.update(|metadata| {
                                metadata.modify(now_ns);
                                Caller::drop_rights(caller.is_root(), metadata);
                            });
                        }
                        CreateHow::Unchecked(_) => {}
                    }
                    return Ok((Node::File(record, object), 0));
                }
                None => {}
            }
            let key = [directory.path(), name].concat();
            if let Committed::Stored { .. } = self.store.create_file(&key, metadata, now)
                && let Some(object) = self.store.peek(&key, now)
                && let Some(record) = object.record().cloned()
            {
                if let Some(size) = set.size.filter(|size| *size > 0) {
                    self.set_size(record.number(), size)?;
                }
                return Ok((Node::File(record, object), 1));
            }
        }
        Err(NfsError::Jukebox)
    }

    /// MKDIR.
    pub fn make_directory(&self, caller: &Caller, arguments: &MakeDirectory<'_>) -> Outcome<Created, WccData> {
        let _tree = self.lock_tree();
        let (directory, name) = self.place(caller, &arguments.place)?;
        let watch = self.watch(&directory);
        let make = || {
            let now = self.store.clock().now();
            if matches!(name, b"." | b"..") || self.child(&directory, name, now)?.is_some() {
                return Err(NfsError::Exist);
            }
            let set = SetAttributes { size: None, ..arguments.attributes };
            let now_ns = self.store.clock().now_ns();
            let above = self.owner(&directory.metadata(), true);
            let mut metadata = caller.begin(above, set.mode.unwrap_or(DIRECTORY_MODE), true, now_ns);
            let owner = self.owner(&metadata, true);
            self.check_set(caller, owner, &set)?;
            apply(&mut metadata, owner, &SetAttributes { mode: None, ..set }, now_ns, caller);
            let path = [directory.path(), name, &[DELIMITER]].concat();
            self.store.make_directory(&path, metadata).map_err(directory_error)
        };
        match make() {
            Ok(made) => Ok(self.created(&Node::Directory(made), &watch, 1)),
            Err(error) => self.failed(error, &directory),
        }
    }

    /// REMOVE.
    pub fn remove(&self, caller: &Caller, place: &Place<'_>) -> Outcome<WccData, WccData> {
        self.take_out(caller, place, |directory, node, now| {
            let Node::File(record, _) = node else { return Err(NfsError::IsDir) };
            self.keep(directory);
            self.drafts.discard(record.number());
            if self.store.delete(record.key(), now) { Ok(()) } else { Err(NfsError::NoEnt) }
        })
    }

    /// RMDIR.
    pub fn remove_directory(&self, caller: &Caller, place: &Place<'_>) -> Outcome<WccData, WccData> {
        match place.name.0 {
            b"." => {
                let directory = self.place(caller, place)?.0;
                return self.failed(NfsError::Inval, &directory);
            }
            b".." => {
                let directory = self.place(caller, place)?.0;
                return self.failed(NfsError::NotEmpty, &directory);
            }
            _ => {}
        }
        self.take_out(caller, place, |directory, node, now| {
            let Node::Directory(found) = node else { return Err(NfsError::NotDir) };
            if self.store.has_below(found.path(), now) {
                return Err(NfsError::NotEmpty);
            }
            self.keep(directory);
            self.store.remove_directory(found, now).map_err(directory_error)
        })
    }

    fn take_out(
        &self,
        caller: &Caller,
        place: &Place<'_>,
        take: impl FnOnce(&Directory, &Node, u64) -> Result<(), NfsError>,
    ) -> Outcome<WccData, WccData> {
        let _tree = self.lock_tree();
        let (directory, name) = self.place(caller, place)?;
        let watch = self.watch(&directory);
        let now = self.store.clock().now();
        let result = self.look(&directory, name).and_then(|node| {
            let above = self.owner(&directory.metadata(), true);
            if !caller.may_remove(above, self.owner_of(&node)) {
                return Err(NfsError::Acces);
            }
            take(&directory, &node, now)
        });
        match result {
            Ok(()) => Ok(self.seen(&watch, 1)),
            Err(error) => self.failed(error, &directory),
        }
    }

    /// It does not vanish with the last of its entries, as far as there is room for markers.
    fn keep(&self, directory: &Directory) {
        _ = self.store.make_directory(directory.path(), directory.metadata());
    }

    /// RENAME.
    pub fn rename(&self, caller: &Caller, arguments: &Rename<'_>) -> Outcome<Renamed, Renamed> {
        let _tree = self.lock_tree();
        let from = self.place(caller, &arguments.from);
        let to = self.place(caller, &arguments.to);
        let ((from_dir, from_name), (to_dir, to_name)) = match (from, to) {
            (Ok(from), Ok(to)) => (from, to),
            (from, to) => {
                let wcc = |place: &Result<(Arc<Directory>, &[u8]), Failure<WccData>>| match place {
                    Ok((directory, _)) => WccData { before: None, ..self.seen(&self.watch(directory), 0) },
                    Err(failure) => failure.attributes,
                };
                let attributes = Renamed { fromdir_wcc: wcc(&from), todir_wcc: wcc(&to) };
                let error = from.err().or(to.err()).map_or(NfsError::ServerFault, |failure| failure.error);
                return Err(Failure { error, attributes });
            }
        };
        let watches = (self.watch(&from_dir), self.watch(&to_dir));
        let result = self.move_entry(caller, (&from_dir, from_name), (&to_dir, to_name));
        // How often one operation changes a directory depends on what it replaces; other changes are not told from that.
        let seen = |watch: &Watch| WccData { before: None, ..self.seen(watch, 0) };
        let renamed = Renamed { fromdir_wcc: seen(&watches.0), todir_wcc: seen(&watches.1) };
        result.map(|()| renamed).map_err(|error| Failure { error, attributes: renamed })
    }

    fn move_entry(
        &self,
        caller: &Caller,
        (from_dir, from_name): (&Arc<Directory>, &[u8]),
        (to_dir, to_name): (&Arc<Directory>, &[u8]),
    ) -> Result<(), NfsError> {
        let is_dot = |name: &[u8]| matches!(name, b"." | b"..");
        if is_dot(from_name) || is_dot(to_name) {
            return Err(NfsError::Inval);
        }
        let now = self.store.clock().now();
        let source = self.child(from_dir, from_name, now)?.ok_or(NfsError::NoEnt)?;
        let target = self.child(to_dir, to_name, now)?;
        let owner = |directory: &Directory| self.owner(&directory.metadata(), true);
        let may_leave = caller.may_remove(owner(from_dir), self.owner_of(&source));
        let may_go = target.as_ref().is_none_or(|node| caller.may_remove(owner(to_dir), self.owner_of(node)));
        if !may_leave || !may_go {
            return Err(NfsError::Acces);
        }
        let path = [to_dir.path(), to_name].concat();
        match (&source, &target) {
            (Node::File(..), Some(Node::Directory(_))) => Err(NfsError::IsDir),
            (Node::Directory(_), Some(Node::File(..))) => Err(NfsError::NotDir),
            (Node::File(from, _), Some(Node::File(to, _))) if from.number() == to.number() => Ok(()),
            (Node::File(from, _), target) => {
                let _unmoved = self.lock_drafts();
                // The draft is one of the object with the old key.
                self.publish(from.number())?;
                if let Some(Node::File(to, _)) = target {
                    self.drafts.discard(to.number());
                }
                self.keep(from_dir);
                self.store.rename(from.key(), &path, now).map_err(relocate_error)
            }
            (Node::Directory(from), target) => {
                let path = [&path, &[DELIMITER][..]].concat();
                if path == from.path() {
                    return Ok(());
                }
                if path.starts_with(from.path()) {
                    return Err(NfsError::Inval);
                }
                if path.len() > KEY_BYTES_MAX {
                    return Err(NfsError::NameTooLong);
                }
                // One that lies above the source is not empty.
                if self.store.has_below(&path, now) {
                    return Err(NfsError::NotEmpty);
                }
                let _unmoved = self.lock_drafts();
                self.publish_below(from.path())?;
                self.keep(from_dir);
                if let Some(Node::Directory(to)) = target {
                    self.store.remove_directory(to, now).map_err(directory_error)?;
                }
                let result = self.store.rename_directory(from.path(), &path, RENAMED_KEYS_MAX, now);
                if let (Err(_), Some(Node::Directory(to))) = (result, target) {
                    // It was there and it is to stay.
                    _ = self.store.make_directory(to.path(), to.metadata());
                }
                result.map_err(relocate_error)
            }
        }
    }
}

fn relocate_error(error: RelocateError) -> NfsError {
    match error {
        RelocateError::NotFound => NfsError::NoEnt,
        RelocateError::NotEmpty => NfsError::NotEmpty,
        RelocateError::TooLong { .. } => NfsError::NameTooLong,
        RelocateError::TooMany { .. } => NfsError::Xdev,
    }
}

/// An exclusive CREATE keeps its verifier in the times of the file until they are set (RFC 1813 §3.3.8).
fn verifier_times(CreateVerifier(verifier): CreateVerifier) -> (u64, u64) {
    let word = |at: usize| u32::from_be_bytes(verifier[at..at + 4].try_into().expect("four octets"));
    let [accessed, modified] = [word(0), word(4)].map(|seconds| nanoseconds(Time { seconds, nseconds: 0 }));
    (accessed, modified)
}
