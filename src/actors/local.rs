//! [`Local`]: the store as other actors of the process use it, whole values at a time.
//!
//! It goes the way a connection goes: plain calls as long as the octets are in RAM and space is free, messages to
//! `StoreActor` and `DiskTail` for what has to wait. For values that are not at hand as a whole, or not wanted as one,
//! use the store's own calls ([`Store::draft`], [`Store::fill`], [`Store::commit`]; [`Store::get`] and the pieces).

use crate::actors::disk_tail::{DiskTail, ReadTail};
use crate::actors::store::{AwaitSpace, Fill, Reserve, StoreActor};
use crate::fabric::staging::Staging;
use crate::store::claims::Revoker;
use crate::store::segment::Content;
use crate::store::whole::PutError;
use crate::store::{Committed, Condition, Lookup, Pinned, Store};
use actix::prelude::*;
use std::sync::Arc;
use tokio::sync::oneshot;

/// Why a value was not stored, or not read.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum LocalError {
    #[error(transparent)]
    Put(#[from] PutError),
    #[error("no space came free within reserve_wait")]
    NoSpace,
    /// The value has left the index: its drive failed, or gave other octets than were written.
    #[error("the value could not be read from disk")]
    Lost,
    #[error("the daemon was shut down")]
    Stopped,
}

/// Gets and puts whole values. Cheap to clone; use it from any thread that has an Arbiter.
#[derive(Clone, Debug)]
pub struct Local {
    pub(super) store: Store,
    pub(super) actor: Addr<StoreActor>,
    pub(super) tail: Addr<DiskTail>,
    pub(super) staging: Staging,
}

impl Local {
    /// The store itself.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Stores `octets`, replacing what is there, and returns the version. Waits for space like any writer, in arrival
    /// order. `expiry` is a second of the store's [clock](Store::clock), 0 is never.
    ///
    /// # Errors
    /// [`LocalError::Put`] for a key or value of an impossible length, `NoSpace`, `Stopped`; nothing was changed then.
    pub async fn put(&self, key: &[u8], octets: &[u8], flags: u32, expiry: u64) -> Result<u64, LocalError> {
        let len = self.store.check_put(key, octets.len() as u64)?;
        // Nobody is ever idle here: all octets are at hand.
        let revoker: Revoker = Arc::new(|| ());
        let claim = match self.store.try_claim(len, false, &revoker) {
            Some(claim) => claim,
            None => {
                let reserved = ask(|reply| self.actor.do_send(Reserve { len, revoker, reply })).await?;
                reserved.0.ok_or(LocalError::NoSpace)?
            }
        };
        claim.set_held_up(true);
        let mut draft = self.store.draft(len, Some(claim));
        let mut rest = octets;
        while let Some(want) = draft.want() {
            let filling = match self.store.fill(want) {
                Ok(filling) => filling,
                Err(_) => {
                    let filled = ask(|reply| self.actor.do_send(Fill { want, reply })).await?;
                    filled.0.ok_or(LocalError::NoSpace)?
                }
            };
            draft.begin(filling);
            rest = &rest[draft.put(rest)..];
        }
        match self.store.commit(key, draft, flags, expiry, Condition::Any, self.store.clock().now()) {
            Committed::Stored { version } => Ok(version),
            refused => unreachable!("a put without a condition was {refused:?}"),
        }
    }

    /// A copy of the value; `None` if there is none. Reads from disk what is not in RAM.
    ///
    /// # Errors
    /// [`LocalError::Lost`], `Stopped`.
    pub async fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, LocalError> {
        let pinned = loop {
            match self.store.get(key, self.store.clock().now()) {
                Lookup::Hit(pinned) => break pinned,
                Lookup::Miss(_) => return Ok(None),
                Lookup::Busy => _ = ask(|reply| self.actor.do_send(AwaitSpace { reply })).await?,
            }
        };
        pinned.count_head();
        self.read(&pinned).await.map(Some)
    }

    /// A copy of the value of `pinned`. Reads from disk what is not in RAM.
    ///
    /// # Errors
    /// [`LocalError::Lost`], `Stopped`.
    pub async fn read(&self, pinned: &Pinned) -> Result<Vec<u8>, LocalError> {
        let mut octets = Vec::with_capacity(usize::try_from(pinned.len()).unwrap_or(0));
        for piece in pinned.pieces() {
            match piece.segment.content() {
                Content::Ram(ram) => octets.extend_from_slice(piece.octets(&ram)),
                Content::Disk { extent, crcs } => {
                    let (len, keep) = (piece.segment.len(), piece.segment.clone());
                    let into = self.staging.take().await;
                    let read = ask(|reply| {
                        self.tail.do_send(ReadTail { extent, len, crcs, into, keep, ticket: 0, reply });
                    });
                    let read = read.await?;
                    if let Err(error) = read.result {
                        tracing::error!(%error, "a segment could not be read");
                        return Err(self.lose(pinned));
                    }
                    let segment = &read.buf.as_slice()[..len as usize];
                    self.store.warm(&piece.segment, segment);
                    octets.extend_from_slice(&segment[piece.start as usize..(piece.start + piece.len) as usize]);
                }
                Content::Lost => return Err(self.lose(pinned)),
            }
        }
        Ok(octets)
    }

    fn lose(&self, pinned: &Pinned) -> LocalError {
        self.store.drop_lost(pinned.object());
        LocalError::Lost
    }
}

/// The one message that answers what `send` sends. An asker that ends first drops the answer and what it carries.
async fn ask<M>(send: impl FnOnce(Recipient<M>)) -> Result<M, LocalError>
where
    M: Message<Result = ()> + Send + Unpin + 'static,
{
    let (sender, answer) = oneshot::channel();
    send(Once(Some(sender)).start().recipient());
    // Nobody is left to answer once the last address of the waiting actor is gone.
    answer.await.map_err(|_| LocalError::Stopped)
}

/// Passes one message on to a future.
struct Once<M>(Option<oneshot::Sender<M>>);

impl<M: Unpin + 'static> Actor for Once<M> {
    type Context = Context<Self>;
}

impl<M: Message<Result = ()> + Unpin + 'static> Handler<M> for Once<M> {
    type Result = ();

    fn handle(&mut self, message: M, ctx: &mut Self::Context) {
        if let Some(sender) = self.0.take() {
            let _ = sender.send(message);
        }
        ctx.stop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::actors::disk_tail::Stop;
    use crate::actors::rig::{Rig, octets, soon};
    use crate::store::Short;
    use crate::store::key::KEY_BYTES_MAX;
    use std::os::unix::fs::FileExt;

    #[actix::test]
    async fn values_of_more_than_the_memory_are_put_and_got_whole() {
        let rig = Rig::new(|_| {});
        let sizes = [0, 1, 4096, 262_143, 262_144, 262_145, 1 << 20, 20 << 20, 5_000_001];
        for (seed, size) in sizes.into_iter().enumerate() {
            let value = octets(size, seed as u32);
            soon(rig.local.put(&[seed as u8], &value, 0, 0)).await.unwrap();
        }
        assert!(rig.store.counters().written_behind_bytes.load(std::sync::atomic::Ordering::Relaxed) > 0);
        for (seed, size) in sizes.into_iter().enumerate() {
            let got = soon(rig.local.get(&[seed as u8])).await.unwrap().unwrap();
            assert!(got == octets(size, seed as u32), "{size} octets");
        }
        let gauges = rig.store.gauges();
        assert_eq!((gauges.pins, gauges.claims, gauges.claimed_bytes), (0, 0, 0));
        assert_eq!(rig.lane.staging.available(), rig.lane.staging.count());
    }

    #[actix::test]
    async fn where_a_value_lies_and_how_long_it_takes_from_there_is_known_from_reads() {
        use crate::store::location::RAM_US;
        let rig = Rig::new(|_| {});
        soon(rig.local.put(b"key", &octets(1 << 20, 1), 0, 0)).await.unwrap();
        let object = rig.store.peek(b"key", 1).unwrap();
        assert_eq!(rig.store.location(&object).resident_prefix_bytes, 1 << 20);
        soon(rig.push_out(b"key")).await;
        let load = rig.store.drive_loads()[0].sample();
        assert_eq!((load.read_us, load.reads_waiting), (None, 0), "nothing was read yet");
        assert!(load.places > 0);
        let location = rig.store.location(&object);
        assert_eq!(location.resident_prefix_bytes + location.disk_bytes, 1 << 20);
        assert!(location.disk_bytes >= 768 << 10);
        soon(rig.local.get(b"key")).await.unwrap().unwrap();
        let load = rig.store.drive_loads()[0].sample();
        assert!(load.read_us.is_some_and(|took| took > 0) && load.reads_waiting == 0, "{load:?}");
        let last = rig.store.first_octet_us(&object, (1 << 20) - 1).unwrap();
        assert_eq!(last, load.read_us.unwrap() + RAM_US);
        soon(rig.lane.tail.send(Stop)).await.unwrap();
    }

    #[actix::test]
    async fn a_miss_is_none_and_what_cannot_be_put_says_why() {
        let rig = Rig::new(|config| config.store.value_bytes_max = 1000);
        assert_eq!(rig.local.get(b"nothing").await, Ok(None));
        let put = async |key: &[u8], len| soon(rig.local.put(key, &vec![0; len], 0, 0)).await;
        assert_eq!(put(b"", 1).await, Err(LocalError::Put(PutError::Key { len: 0 })));
        let long = vec![b'k'; KEY_BYTES_MAX + 1];
        assert_eq!(put(&long, 1).await, Err(LocalError::Put(PutError::Key { len: KEY_BYTES_MAX + 1 })));
        assert_eq!(put(b"key", 1001).await, Err(LocalError::Put(PutError::TooLarge { len: 1001, max: 1000 })));
        assert_eq!(put(&long[1..], 1000).await, Ok(1), "the longest of both");
        assert_eq!(rig.store.gauges().objects, 1);
    }

    #[actix::test]
    async fn a_store_that_cannot_give_space_at_once_says_so_where_nothing_waits() {
        let rig = Rig::without_files(|_| {});
        let value = octets(1 << 20, 1);
        assert_eq!(rig.store.put(b"key", &value, 0, 0), Err(PutError::Short(Short::Growing)));
        soon(rig.local.put(b"key", &value, 0, 0)).await.unwrap();
        rig.store.put(b"other", &value, 0, 0).unwrap();
        let Lookup::Hit(pinned) = rig.store.get(b"other", 1) else { panic!("it was just put") };
        assert_eq!(pinned.to_vec().as_ref(), Some(&value));
    }

    #[actix::test]
    async fn octets_that_changed_on_disk_are_an_error_and_then_a_miss() {
        let rig = Rig::new(|_| {});
        soon(rig.local.put(b"key", &octets(1 << 20, 1), 0, 0)).await.unwrap();
        assert_eq!(soon(rig.push_out(b"key")).await, 3);
        let Lookup::Hit(pinned) = rig.store.get(b"key", 1) else { panic!("it was just put") };
        assert_eq!(pinned.to_vec(), None, "a part is on disk");
        let Content::Disk { extent, .. } = pinned.pieces()[2].segment.content() else { panic!("pushed out") };
        let file = rig.drives[0].file(extent.file()).unwrap();
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(file.as_file()));
        let plain = std::fs::OpenOptions::new().write(true).open(path).unwrap();
        plain.write_all_at(&[0xff; 16], extent.byte_offset() + 1000).unwrap();
        assert_eq!(soon(rig.local.read(&pinned)).await, Err(LocalError::Lost));
        assert_eq!(soon(rig.local.get(b"key")).await, Ok(None));
        assert_eq!(rig.lane.staging.available(), rig.lane.staging.count());
    }

    #[actix::test]
    async fn after_a_stop_a_read_from_disk_fails_and_does_not_hang() {
        let rig = Rig::new(|_| {});
        soon(rig.local.put(b"key", &octets(1 << 20, 1), 0, 0)).await.unwrap();
        soon(rig.push_out(b"key")).await;
        soon(rig.lane.tail.send(Stop)).await.unwrap();
        assert_eq!(soon(rig.local.get(b"key")).await, Err(LocalError::Stopped));
        assert_eq!(rig.store.gauges().pins, 0);
    }
}
