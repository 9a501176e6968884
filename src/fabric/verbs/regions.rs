//! The memory of one queue pair that its peer may reach.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::super::registered::Revoker;
use super::super::{Access, MemoryRegion, RemoteKey, RemoteSpan, SharedSpan};
use super::LaneShared;
use super::device::{ProtectionDomain, Registration, Window, remote_flags};

/// Keys and what is behind them.
pub(super) struct Regions {
    pd: Arc<ProtectionDomain>,
    table: Mutex<Table>,
    lane: Arc<LaneShared>,
}

#[derive(Default)]
struct Table {
    entries: HashMap<RemoteKey, Entry>,
    watched: Vec<Watched>,
}

/// Fields are dropped in order: the window, what it is bound to, the memory.
struct Entry {
    window: Option<Window>,
    _registration: Registration,
    span: SharedSpan,
}

struct Watched {
    key: RemoteKey,
    span: SharedSpan,
    offset: usize,
    value: u64,
}

/// A window to be bound by a request: what that request says.
pub(super) struct Binding {
    pub(super) window: *mut ibverbs_sys::ibv_mw,
    pub(super) registration: *mut ibverbs_sys::ibv_mr,
    pub(super) key: RemoteKey,
    pub(super) address: u64,
    pub(super) len: u64,
    pub(super) access_flags: u32,
}

impl Regions {
    pub(super) fn new(pd: Arc<ProtectionDomain>, lane: Arc<LaneShared>) -> Arc<Self> {
        Arc::new(Self { pd, table: Mutex::default(), lane })
    }

    /// A key that opens `span` until it is revoked; the peer cannot give it back, where the device can refuse that.
    pub(super) fn register(self: &Arc<Self>, span: SharedSpan, access: Access) -> io::Result<MemoryRegion> {
        // SAFETY: the entry owns a clone of the span, which keeps the memory, and drops the registration first.
        let registration = unsafe { Registration::shared(&self.pd, &span, access, false) }?;
        let key = RemoteKey(registration.remote_key());
        Ok(self.insert(key, Entry { window: None, _registration: registration, span }))
    }

    /// A key that opens `span` once `bind` has posted the request it is given.
    pub(super) fn bind(
        self: &Arc<Self>,
        span: SharedSpan,
        access: Access,
        bind: impl FnOnce(&Binding) -> io::Result<()>,
    ) -> io::Result<MemoryRegion> {
        // SAFETY: as in `register`.
        let registration = unsafe { Registration::shared(&self.pd, &span, access, true) }?;
        let mut window = Window::new(&self.pd)?;
        let key = RemoteKey(window.next_key());
        let (base, len) = span.as_raw();
        bind(&Binding {
            window: window.as_ptr(),
            registration: registration.as_ptr(),
            key,
            address: base.as_ptr() as u64,
            len: len as u64,
            access_flags: remote_flags(access).0,
        })?;
        Ok(self.insert(key, Entry { window: Some(window), _registration: registration, span }))
    }

    fn insert(self: &Arc<Self>, key: RemoteKey, entry: Entry) -> MemoryRegion {
        let span = entry.span.clone();
        let (base, len) = span.as_raw();
        let remote = RemoteSpan { key, address: base.as_ptr() as u64, len: len as u64 };
        self.lane.region_count.fetch_add(1, Ordering::Relaxed);
        let replaced = self.table().entries.insert(key, entry);
        assert!(replaced.is_none(), "a device gives a key to one region at a time");
        let own: Arc<dyn Revoker> = Arc::<Self>::clone(self);
        MemoryRegion::new(remote, span, Arc::downgrade(&own))
    }

    /// The peer has given `key` back, says the device.
    pub(super) fn handle_invalidated(&self, key: RemoteKey) {
        self.remove(key);
    }

    fn remove(&self, key: RemoteKey) -> Option<Entry> {
        let mut table = self.table();
        self.unwatch(&mut table, key);
        let entry = table.entries.remove(&key);
        if entry.is_some() {
            self.lane.region_count.fetch_sub(1, Ordering::Relaxed);
        }
        entry
    }

    fn unwatch(&self, table: &mut Table, key: RemoteKey) {
        let before = table.watched.len();
        table.watched.retain(|watched| watched.key != key);
        self.lane.watch_count.fetch_sub(before - table.watched.len(), Ordering::Relaxed);
    }

    /// Keys whose watched word has changed; each is named once.
    pub(super) fn poll_written(&self, mut written: impl FnMut(RemoteKey)) {
        let mut table = self.table();
        let before = table.watched.len();
        table.watched.retain(|watched| {
            let is_same = watched.span.load_u64_acquire(watched.offset) == watched.value;
            if !is_same {
                written(watched.key);
            }
            is_same
        });
        self.lane.watch_count.fetch_sub(before - table.watched.len(), Ordering::Relaxed);
    }

    /// Takes what is bound out of service, before the queue pair goes: a bound window keeps it, and rxe waits for that until
    /// it gives up, 50 s later.
    pub(super) fn close_windows(&self) {
        self.table().entries.values_mut().for_each(|entry| entry.window = None);
    }

    /// Takes every key out of service, once the queue pair is gone: what it is in the middle of keeps a registration.
    pub(super) fn clear(&self) {
        let mut table = self.table();
        self.lane.region_count.fetch_sub(table.entries.len(), Ordering::Relaxed);
        self.lane.watch_count.fetch_sub(table.watched.len(), Ordering::Relaxed);
        *table = Table::default();
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Revoker for Regions {
    fn revoke(&self, key: RemoteKey) -> bool {
        // Window and registration go here, and the device with them: afterwards it reaches nothing.
        self.remove(key).is_some()
    }

    fn watch(&self, key: RemoteKey, offset: usize, value: u64) {
        let mut table = self.table();
        let is_same = |watched: &Watched| (watched.key, watched.offset, watched.value) == (key, offset, value);
        if table.watched.iter().any(is_same) {
            return;
        }
        let Some(entry) = table.entries.get(&key) else { return };
        let span = entry.span.clone();
        // Shows here, not in the lane, that the word is one.
        span.load_u64_acquire(offset);
        self.unwatch(&mut table, key);
        table.watched.push(Watched { key, span, offset, value });
        self.lane.watch_count.fetch_add(1, Ordering::SeqCst);
        // A lane that went to sleep with nothing to watch has not set its timer.
        self.lane.bell.ring();
    }
}
