//! Procedures that are answered at once.

use super::request::{Deletion, StatRequest, Touch};
use super::{Answer, Item, Stat, Status, expiry_of, ttl_of};
use crate::store::object::Object;
use crate::store::{Deleted, Store};

/// STAT. An octet that is on disk alone is expected after `disk_read_us` microseconds.
pub fn stat(request: &StatRequest<'_>, store: &Store, disk_read_us: u32) -> Answer<Item> {
    let now = store.clock().now();
    let (mut leading, mut is_leading) = (0, true);
    let mut stats = Vec::with_capacity(request.keys.len());
    for key in &request.keys {
        let found = store.peek(key.as_bytes(), now);
        is_leading &= found.is_some();
        leading += u32::from(is_leading);
        stats.push(found.map_or(Stat::bare(Status::NotFound), |object| stat_of(&object, now, disk_read_us)));
        if request.until_miss && !is_leading {
            break;
        }
    }
    Answer::Stat { leading, stats }
}

fn stat_of(object: &Object, now: u64, disk_read_us: u32) -> Stat {
    let (mut ram_bytes, mut lead_bytes, mut is_leading) = (0, 0, true);
    for piece in object.pieces() {
        let is_resident = piece.segment.is_resident();
        is_leading &= is_resident;
        if is_resident {
            ram_bytes += u64::from(piece.len);
        }
        if is_leading {
            lead_bytes += u64::from(piece.len);
        }
    }
    let first_octet_us = if lead_bytes > 0 || object.is_empty() { 0 } else { disk_read_us };
    Stat {
        status: Status::Ok,
        flags: object.flags(),
        version: object.version(),
        len: object.len(),
        ram_bytes,
        disk_bytes: object.len() - ram_bytes,
        lead_bytes,
        first_octet_us,
        ttl_s: ttl_of(object.expiry(), now),
    }
}

/// DELETE.
pub fn delete(deletions: &[Deletion<'_>], store: &Store) -> Answer<Item> {
    let now = store.clock().now();
    let delete = |deletion: &Deletion<'_>| {
        let key = deletion.key.as_bytes();
        let deleted = if deletion.version != 0 {
            store.delete_version(key, deletion.version, now)
        } else if store.delete(key, now) {
            Deleted::Done
        } else {
            Deleted::NotFound
        };
        match deleted {
            Deleted::Done => Status::Ok,
            Deleted::NotFound => Status::NotFound,
            Deleted::Changed => Status::Changed,
        }
    };
    Answer::Statuses(deletions.iter().map(delete).collect())
}

/// TOUCH.
pub fn touch(touches: &[Touch<'_>], store: &Store) -> Answer<Item> {
    let now = store.clock().now();
    let touch = |touch: &Touch<'_>| {
        let touched = store.touch(touch.key.as_bytes(), expiry_of(touch.ttl_s, now), now);
        if touched { Status::Ok } else { Status::NotFound }
    };
    Answer::Statuses(touches.iter().map(touch).collect())
}
