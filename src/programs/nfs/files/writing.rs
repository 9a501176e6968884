//! What is in files: READ, WRITE, COMMIT, and the size that SETATTR sets.
//!
//! ```text
//!  READ   read ──▶ Reading { pieces }: sent from where they lie, kept until the reply has left
//!  WRITE  begin_write ──▶ Writing ──▶ write* ──▶ end_write ──▶ reply      each part is copied once
//!                                       └─ Wait: once more when space came free, or end_write with what there is
//! ```
//! A file that is written to has a draft. It is all that this door sees of the file, and is committed by COMMIT, by a WRITE that
//! asks for stable storage, or when nothing was written for [`IDLE_MS`]: [`FileSystem::handle_time`]. Another version or none of
//! the file by then, and the draft is discarded: what another door does wins.

use super::{Caller, FileSystem, Node};
use crate::programs::nfs::types::{Attributes, FileHandle, NfsError, Stable, WccAttributes, WccData};
use crate::programs::nfs::{Commit, Failure, Outcome, Read, Synced, TRANSFER_BYTES_MAX, WriteDone};
use crate::store::files::{FileNumber, FileRecord};
use crate::store::object::{Object, Piece};
use crate::store::sparse::{SparseDraft, SparseError};
use crate::store::{Lookup, Pinned, Short};
use dashmap::DashMap;
use std::sync::{Arc, Mutex, MutexGuard};

/// Milliseconds without a WRITE after which other doors see what was written.
pub const IDLE_MS: u64 = 1000;
/// Drafts at the same time: beyond that a file that has none is not written to.
const DRAFTS_MAX: usize = 4096;

/// The drafts of a file system.
#[derive(Debug, Default)]
pub(super) struct Drafts {
    slots: DashMap<FileNumber, Arc<Mutex<Slot>>, ahash::RandomState>,
}

/// A place for the draft of one file.
#[derive(Debug, Default)]
struct Slot {
    draft: Option<Box<SparseDraft>>,
    /// Millisecond of the store's clock at which it was written to last.
    active_ms: u64,
    /// It is in no table any more.
    is_left: bool,
}

impl Drafts {
    fn find(&self, number: FileNumber) -> Option<Arc<Mutex<Slot>>> {
        self.slots.get(&number).map(|slot| slot.value().clone())
    }

    /// Drops the draft of a file, if it has one.
    pub(super) fn discard(&self, number: FileNumber) {
        if let Some(slot) = self.find(number) {
            let mut slot = lock(&slot);
            slot.draft = None;
            self.leave(number, &mut slot);
        }
    }

    /// Takes an empty slot out.
    fn leave(&self, number: FileNumber, slot: &mut Slot) {
        if slot.draft.is_none() && !slot.is_left {
            slot.is_left = true;
            self.slots.remove(&number);
        }
    }
}

fn lock(slot: &Mutex<Slot>) -> MutexGuard<'_, Slot> {
    slot.lock().expect("no panic under this lock")
}

/// A READ that is answered from what lies here.
#[derive(Debug)]
pub struct Reading {
    pub file_attributes: Attributes,
    pub eof: bool,
    /// In order. Some may have to be read from disk.
    pub pieces: Vec<Piece>,
    /// Octets of all of them.
    pub len: u32,
    /// What they are of, but for those of a draft, which stay by themselves.
    pub pinned: Option<Pinned>,
}

/// A WRITE whose octets are arriving.
#[derive(Debug)]
pub struct Writing {
    number: FileNumber,
    offset: u64,
    /// Octets that were written.
    written: u32,
    before: WccAttributes,
    changed_ns: u64,
    /// Of the super-user.
    is_of_root: bool,
    failure: Option<NfsError>,
}

impl Writing {
    pub fn written(&self) -> u32 {
        self.written
    }
}

/// What became of a part of a WRITE.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum WriteStep {
    /// So many octets were written, not all of them perhaps.
    Done(usize),
    /// None, until memory or a place on disk is free.
    Wait(Short),
    /// None; nothing more is taken. [`FileSystem::end_write`] says why, if nothing was written before.
    Refused(NfsError),
}

fn sparse_error(error: SparseError) -> NfsError {
    match error {
        SparseError::TooLong { .. } => NfsError::FBig,
        SparseError::TooManyParts | SparseError::NoSpace { .. } => NfsError::NoSpc,
        SparseError::Busy | SparseError::Short(_) => NfsError::Jukebox,
    }
}

impl FileSystem {
    /// Octets of a file, and those that it takes.
    pub(super) fn size(&self, number: FileNumber, object: &Object) -> (u64, u64) {
        if let Some(slot) = self.drafts.find(number) {
            let mut slot = lock(&slot);
            if let Some(draft) = self.living_draft(number, &mut slot) {
                return (draft.len(), draft.base().footprint_bytes() + draft.claimed_bytes());
            }
        }
        (object.len(), object.footprint_bytes())
    }

    /// The draft in a slot, if it still counts.
    fn living_draft<'a>(&self, number: FileNumber, slot: &'a mut Slot) -> Option<&'a mut SparseDraft> {
        let draft = slot.draft.take()?;
        // Looked up under the lock of the slot: an object from before may be the one before the draft's.
        let (_, object) = self.store.file(number, self.store.clock().now())?;
        if object.version() != draft.base().version() {
            return None;
        }
        slot.draft = Some(draft);
        slot.draft.as_deref_mut()
    }

    /// Changes the draft of a file, which is begun if there is none.
    fn with_draft<T>(
        &self,
        number: FileNumber,
        change: impl FnOnce(&mut SparseDraft) -> Result<T, SparseError>,
    ) -> Result<Result<T, SparseError>, NfsError> {
        let _unmoved = self.moving.read().expect("no panic under this lock");
        loop {
            if !self.drafts.slots.contains_key(&number) && self.drafts.slots.len() >= DRAFTS_MAX {
                return Err(NfsError::Jukebox);
            }
            let slot = self.drafts.slots.entry(number).or_default().value().clone();
            let mut slot = lock(&slot);
            if slot.is_left {
                continue;
            }
            let now_ms = self.store.clock().now_ms();
            let result = if let Some(draft) = self.living_draft(number, &mut slot) {
                change(draft)
            } else {
                slot.active_ms = now_ms;
                match self.begin_draft(number) {
                    Ok(draft) => change(slot.draft.insert(Box::new(draft))),
                    Err(error) => {
                        self.drafts.leave(number, &mut slot);
                        return Err(error);
                    }
                }
            };
            // Whoever tries in vain must not keep it from being committed: that may be what there is no room without.
            if result.is_ok() {
                slot.active_ms = now_ms;
            }
            return Ok(result);
        }
    }

    fn begin_draft(&self, number: FileNumber) -> Result<SparseDraft, NfsError> {
        let now = self.store.clock().now();
        let (record, _) = self.store.file(number, now).ok_or(NfsError::Stale)?;
        let draft = self.store.sparse_draft(record.key(), now).map_err(sparse_error)?.ok_or(NfsError::Stale)?;
        // Its key may be another file's by now.
        let is_same = draft.base().record().is_some_and(|found| found.number() == number);
        if is_same { Ok(draft) } else { Err(NfsError::Stale) }
    }

    /// Others see what was written to a file. Nothing happens where nothing was.
    ///
    /// # Errors
    /// [`NfsError::Jukebox`]; the draft stays then.
    pub(super) fn publish(&self, number: FileNumber) -> Result<(), NfsError> {
        let Some(slot) = self.drafts.find(number) else { return Ok(()) };
        let mut slot = lock(&slot);
        let result = match slot.draft.take() {
            Some(draft) if draft.is_changed() => match self.store.commit_sparse(*draft, self.store.clock().now()) {
                // Or another door was there before: then there is nothing to commit to.
                Ok(_) => Ok(()),
                Err((draft, _)) => {
                    slot.draft = Some(draft);
                    Err(NfsError::Jukebox)
                }
            },
            _ => Ok(()),
        };
        self.drafts.leave(number, &mut slot);
        result
    }

    /// The same for all files below a directory.
    pub(super) fn publish_below(&self, path: &[u8]) -> Result<(), NfsError> {
        // Numbers first: the table is locked while it is walked.
        let numbers: Vec<_> = self.drafts.slots.iter().map(|slot| *slot.key()).collect();
        for number in numbers {
            if self.store.place_of(number, path).is_some() {
                self.publish(number)?;
            }
        }
        Ok(())
    }

    /// Commits what nobody wrote to for [`IDLE_MS`], and what others need the space of. To be called several times a second;
    /// returns how many drafts are left.
    pub fn handle_time(&self, now_ms: u64) -> usize {
        let slots: Vec<_> = self.drafts.slots.iter().map(|slot| (*slot.key(), slot.value().clone())).collect();
        for (number, slot) in slots {
            // Whoever has it writes to it.
            let Ok(slot) = slot.try_lock() else { continue };
            let is_revoked = slot.draft.as_ref().is_some_and(|draft| draft.is_revoked());
            let is_due = is_revoked || now_ms.saturating_sub(slot.active_ms) >= IDLE_MS;
            drop(slot);
            if is_due {
                // If there is no space now, there may be next time.
                _ = self.publish(number);
            }
        }
        self.drafts.slots.len()
    }

    pub(super) fn set_size(&self, number: FileNumber, size: u64) -> Result<(), NfsError> {
        let now = self.store.clock().now();
        let (_, object) = self.store.file(number, now).ok_or(NfsError::Stale)?;
        if self.size(number, &object).0 == size {
            return Ok(());
        }
        self.with_draft(number, |draft| draft.set_len(size))?.map_err(sparse_error)
    }

    /// READ.
    ///
    /// # Errors
    /// As the reply says.
    pub fn read(&self, caller: &Caller, arguments: &Read) -> Result<Reading, Failure<Option<Attributes>>> {
        let node = self.node(&arguments.file);
        let file_attributes = self.some_attributes(&node);
        let failed = |error| Failure { error, attributes: file_attributes };
        let (record, object) = match node.map_err(failed)? {
            Node::File(record, object) => (record, object),
            Node::Directory(_) => return Err(failed(NfsError::IsDir)),
        };
        if !caller.may_read(self.owner(&record.metadata(), false)) {
            return Err(failed(NfsError::Acces));
        }
        let count = u64::from(arguments.count.min(TRANSFER_BYTES_MAX));
        let drafted = self.drafts.find(record.number()).and_then(|slot| {
            let mut slot = lock(&slot);
            let draft = self.living_draft(record.number(), &mut slot)?;
            Some((draft.range(arguments.offset, count), draft.len()))
        });
        let (pieces, size, pinned) = match drafted {
            Some((pieces, size)) => (pieces, size, None),
            None => {
                let pinned = match self.pin(&record) {
                    Ok(pinned) => pinned,
                    Err(NfsError::Stale) => return Err(Failure { error: NfsError::Stale, attributes: None }),
                    Err(error) => return Err(failed(error)),
                };
                pinned.count_head();
                (pinned.range(arguments.offset, count).collect(), pinned.len(), Some(pinned))
            }
        };
        let len = pieces.iter().map(|piece| piece.len).sum::<u32>();
        let eof = arguments.offset.saturating_add(u64::from(len)) >= size;
        let file_attributes = self.attributes(&Node::File(record, object));
        // Of the moment at which the octets were there.
        Ok(Reading { file_attributes: Attributes { size, ..file_attributes }, eof, pieces, len, pinned })
    }

    /// The object of a file, under whichever key it is by now.
    fn pin(&self, record: &Arc<FileRecord>) -> Result<Pinned, NfsError> {
        let (number, mut record) = (record.number(), record.clone());
        loop {
            let now = self.store.clock().now();
            match self.store.get(record.key(), now) {
                Lookup::Hit(pinned) if pinned.record().is_some_and(|found| found.number() == number) => {
                    return Ok(pinned);
                }
                Lookup::Busy => return Err(NfsError::Jukebox),
                Lookup::Hit(_) | Lookup::Miss(_) => record = self.store.file(number, now).ok_or(NfsError::Stale)?.0,
            }
        }
    }

    /// A WRITE of `len` octets from `offset` on begins.
    ///
    /// # Errors
    /// As the reply says.
    pub fn begin_write(
        &self,
        caller: &Caller,
        file: &FileHandle,
        offset: u64,
        len: u32,
    ) -> Result<Writing, Failure<WccData>> {
        let node = self.node(file);
        let after = self.some_attributes(&node);
        let failed = |error| Failure { error, attributes: WccData { before: None, after } };
        let record = match node.map_err(failed)? {
            Node::File(record, _) => record,
            Node::Directory(_) => return Err(failed(NfsError::IsDir)),
        };
        let metadata = record.metadata();
        if !caller.may_write(self.owner(&metadata, false)) {
            return Err(failed(NfsError::Acces));
        }
        let max = self.store.sparse_bytes_max();
        if offset.checked_add(u64::from(len)).is_none_or(|end| end > max) {
            return Err(failed(NfsError::FBig));
        }
        let number = record.number();
        let before = after.as_ref().map(WccAttributes::from).ok_or(failed(NfsError::ServerFault))?;
        Ok(Writing {
            number,
            offset,
            written: 0,
            before,
            changed_ns: metadata.changed_ns,
            is_of_root: caller.is_root(),
            failure: None,
        })
    }

    /// The next octets of a WRITE. All that was written is seen through this door at once.
    pub fn write(&self, writing: &mut Writing, octets: &[u8]) -> WriteStep {
        if let Some(error) = writing.failure {
            return WriteStep::Refused(error);
        }
        let at = writing.offset + u64::from(writing.written);
        let result = self.with_draft(writing.number, |draft| draft.write(at, octets));
        let error = match result {
            Ok(Ok(count)) => {
                writing.written += count as u32;
                return WriteStep::Done(count);
            }
            Ok(Err(SparseError::Short(short))) => return WriteStep::Wait(short),
            Ok(Err(error)) => sparse_error(error),
            Err(error) => error,
        };
        writing.failure = Some(error);
        WriteStep::Refused(error)
    }

    /// The reply of a WRITE that has all its octets, or gets no more.
    ///
    /// # Errors
    /// What it was refused with, or [`NfsError::Jukebox`], if nothing was written and something should have been; what its
    /// commit is refused with.
    pub fn end_write(&self, writing: Writing, len: u32, stable: Stable) -> Outcome<WriteDone, WccData> {
        let Writing { number, written, before, changed_ns, is_of_root, failure, .. } = writing;
        let now_ns = self.store.clock().now_ns();
        let file = self.store.file(number, self.store.clock().now());
        let mut is_alone = false;
        if let Some((record, _)) = file.as_ref().filter(|_| written > 0) {
            is_alone = record.update(|metadata| {
                let is_alone = metadata.changed_ns == changed_ns;
                metadata.modify(now_ns);
                Caller::drop_rights(is_of_root, metadata);
                is_alone
            });
        }
        let mut error = match failure {
            _ if file.is_none() => Some(NfsError::Stale),
            _ if written > 0 || len == 0 => None,
            failure => Some(failure.unwrap_or(NfsError::Jukebox)),
        };
        if error.is_none() && stable != Stable::Unstable {
            error = self.publish(number).err();
        }
        let wcc = WccData { before: is_alone.then_some(before), after: self.attributes_now(number) };
        match error {
            Some(error) => Err(Failure { error, attributes: wcc }),
            None => Ok(WriteDone { file_wcc: wcc, count: written, committed: stable, verf: self.write_verifier() }),
        }
    }

    /// COMMIT: of the whole file, whatever part of it is asked for.
    pub fn commit(&self, caller: &Caller, arguments: &Commit) -> Outcome<Synced, WccData> {
        let node = self.node(&arguments.file);
        let after = self.some_attributes(&node);
        let failed = |error| Failure { error, attributes: WccData { before: None, after } };
        let record = match node.map_err(failed)? {
            Node::File(record, _) => record,
            Node::Directory(_) => return Err(failed(NfsError::IsDir)),
        };
        if !caller.may_write(self.owner(&record.metadata(), false)) {
            return Err(failed(NfsError::Acces));
        }
        self.publish(record.number()).map_err(failed)?;
        // Nothing that attributes tell is changed by it.
        let after = self.attributes_now(record.number());
        let file_wcc = WccData { before: after.as_ref().map(WccAttributes::from), after };
        Ok(Synced { file_wcc, verf: self.write_verifier() })
    }

    fn attributes_now(&self, number: FileNumber) -> Option<Attributes> {
        let (record, object) = self.store.file(number, self.store.clock().now())?;
        Some(self.attributes(&Node::File(record, object)))
    }
}

#[cfg(test)]
impl FileSystem {
    /// Files that have a draft.
    pub(super) fn drafts_left(&self) -> usize {
        self.drafts.slots.iter().filter(|slot| lock(slot).draft.is_some()).count()
    }
}
