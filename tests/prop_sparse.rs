//! Sparse drafts against plain vectors: octets written in any order, cut off and grown, committed or dropped, while others
//! set and delete the same keys in an arena and a pool so small that octets go to disk all the time.

mod rig;

use bulkhead::store::files::Metadata;
use bulkhead::store::object::Piece;
use bulkhead::store::segment::{Class, Content};
use bulkhead::store::sparse::{SparseDraft, SparseError};
use bulkhead::store::{Committed, Joined, Side, Sizes, Store};
use rig::{Disk, Seeded, assert_whole, for_each_seed, grow, octets, write_one};
use std::collections::HashMap;

const MIB: u64 = 1 << 20;
const HEAD_BYTES: u64 = 64 << 10;
const VALUE_BYTES_MAX: u64 = 2 * MIB;

fn store(memory_bytes: u64, pool_bytes: u64) -> Store {
    let store = Store::with_files(Sizes {
        memory_bytes,
        head_bytes: HEAD_BYTES,
        value_bytes_max: VALUE_BYTES_MAX,
        index_bytes_max: 8 * MIB,
        pinned_share: 0.5,
        pool_bytes: vec![pool_bytes],
    });
    let store = store.unwrap();
    while grow(&store) {}
    store
}

fn read(disk: &Disk, pieces: &[Piece]) -> Vec<u8> {
    let mut octets = Vec::new();
    for piece in pieces {
        match piece.segment.content() {
            Content::Ram(ram) => octets.extend_from_slice(piece.octets(&ram)),
            Content::Disk { extent, crcs } => {
                let segment = disk.read(extent, crcs);
                octets.extend_from_slice(&segment[piece.start as usize..(piece.start + piece.len) as usize]);
            }
            Content::Lost => panic!("no drive failed"),
        }
    }
    octets
}

/// What is asked of a draft, and of a vector.
fn step(random: &mut Seeded, draft: &mut SparseDraft, wanted: &mut Vec<u8>, disk: &Disk, store: &Store) -> bool {
    let len_max = if random.one_in(3) { 100_000 } else { VALUE_BYTES_MAX };
    match random.below(8) {
        0 => {
            let len = random.below(len_max);
            if draft.set_len(len).is_ok() {
                wanted.resize(len as usize, 0);
            }
        }
        1 | 2 => {
            let (offset, len) = (random.below(len_max), random.below(300_000));
            let found = read(disk, &draft.range(offset, len));
            let end = wanted.len().min((offset + len) as usize);
            assert!(found == wanted[(offset as usize).min(end)..end], "{len} octets at {offset}");
        }
        3 => while write_one(store, disk, true, false) {},
        _ => {
            let offset = if random.one_in(3) { wanted.len() as u64 } else { random.below(len_max) };
            let len = match random.below(4) {
                0 => random.below(100),
                1 => 4096,
                _ => random.below(200_000),
            };
            let new = octets(random.next(), len as usize);
            let mut done = 0;
            while done < new.len() {
                match draft.write(offset + done as u64, &new[done..]) {
                    Ok(count) => {
                        let from = offset as usize + done;
                        wanted.resize(wanted.len().max(from + count), 0);
                        wanted[from..from + count].copy_from_slice(&new[done..done + count]);
                        done += count;
                    }
                    Err(SparseError::TooLong { max }) => {
                        assert!(offset + new.len() as u64 > max);
                        break;
                    }
                    Err(SparseError::Short(_)) if write_one(store, disk, true, false) => {}
                    Err(SparseError::Short(_) | SparseError::Busy) => return false,
                    Err(error) => panic!("{error}"),
                }
            }
        }
    }
    assert_eq!(draft.len(), wanted.len() as u64);
    true
}

#[test]
fn a_draft_is_what_was_written_to_it_and_so_is_what_is_committed() {
    for_each_seed(0..40, |seed| {
        let mut random = Seeded::new(seed);
        let store = store(4 * MIB, 8 * MIB);
        let disk = Disk::default();
        let now = store.clock().now();
        let mut model: HashMap<&[u8], Vec<u8>> = HashMap::new();
        let (mut committed, mut discarded) = (0, 0);
        for _ in 0..60 {
            let key = *random.pick(&[&b"a"[..], b"b", b"dir/c"]);
            if random.one_in(3) {
                let value = octets(random.next(), random.below(400_000) as usize);
                while store.put(key, &value, 5, 0).is_err() {
                    assert!(write_one(&store, &disk, true, false), "{store:?}");
                }
                model.insert(key, value);
            }
            let Some(old) = store.peek(key, now) else {
                // Evicted.
                model.remove(key);
                continue;
            };
            assert!(read(&disk, old.pieces()) == model[key]);
            let mut draft = store.sparse_draft(key, now).unwrap().expect("it is there");
            let mut wanted = model[key].clone();
            for _ in 0..random.below(24) {
                if !step(&mut random, &mut draft, &mut wanted, &disk, &store) {
                    break;
                }
            }
            assert!(read(&disk, store.peek(key, now).unwrap().pieces()) == model[key], "others see the base");
            match random.below(8) {
                0 => {
                    let (index_bytes, taken) = (store.gauges().index_bytes, draft.index_bytes());
                    drop(draft);
                    assert_eq!(store.gauges().index_bytes, index_bytes - taken);
                    discarded += 1;
                }
                1 => {
                    store.delete(key, now);
                    assert_eq!(store.commit_sparse(draft, now).unwrap(), Committed::NotFound);
                    model.remove(key);
                }
                2 => {
                    let version = store.put(key, b"faster", 1, 0).unwrap();
                    assert_eq!(store.commit_sparse(draft, now).unwrap(), Committed::Exists);
                    assert_eq!(store.peek(key, now).unwrap().version(), version);
                    model.insert(key, b"faster".to_vec());
                }
                _ => {
                    let (flags, number) = (old.flags(), old.record().unwrap().number());
                    drop(old);
                    let mut draft = Box::new(draft);
                    loop {
                        match store.commit_sparse(*draft, now) {
                            Ok(Committed::Stored { .. }) => break,
                            Ok(other) => panic!("{other:?}"),
                            Err((back, _)) => draft = back,
                        }
                        assert!(write_one(&store, &disk, true, false), "{store:?}");
                    }
                    let object = store.peek(key, now).unwrap();
                    assert!(read(&disk, object.pieces()) == wanted);
                    assert_eq!((object.flags(), object.record().unwrap().number()), (flags, number));
                    model.insert(key, wanted);
                    committed += 1;
                }
            }
            let gauges = store.gauges();
            assert_eq!((gauges.claims, gauges.claimed_bytes, gauges.pins), (0, 0, 0));
        }
        assert!(committed > 5 && discarded > 0 || committed > 15, "{committed} committed, {discarded} discarded");
        store.flush_all(0);
        for key in [&b"a"[..], b"b", b"dir/c"] {
            _ = store.get(key, now);
        }
        assert_whole(&store);
    });
}

#[test]
fn holes_take_no_space_and_read_as_zeros() {
    let store = store(4 * MIB, 4 * MIB);
    let now = store.clock().now();
    store.put(b"key", b"", 0, 0).unwrap();
    let mut draft = store.sparse_draft(b"key", now).unwrap().unwrap();
    draft.set_len(VALUE_BYTES_MAX).unwrap();
    assert_eq!(draft.write(MIB + 5, b"island").unwrap(), 6);
    assert!(draft.claimed_bytes() <= 4096);
    assert!(matches!(store.commit_sparse(draft, now), Ok(Committed::Stored { .. })));
    let object = store.peek(b"key", now).unwrap();
    assert_eq!((object.len(), object.class(), object.footprint_bytes()), (VALUE_BYTES_MAX, Class::Large, 4096));
    assert_eq!(store.gauges().pool_used_bytes, 4096);
    let found = read(&Disk::default(), object.pieces());
    let mut wanted = vec![0; VALUE_BYTES_MAX as usize];
    wanted[MIB as usize + 5..][..6].copy_from_slice(b"island");
    assert!(found == wanted);
    // Holes stay holes where another version grows, and an append is no place for a hole.
    let mut again = store.sparse_draft(b"key", now).unwrap().unwrap();
    again.write(0, b"start").unwrap();
    assert!(matches!(store.commit_sparse(again, now), Ok(Committed::Stored { .. })));
    assert!(store.gauges().pool_used_bytes <= 2 * 4096);
    assert!(matches!(draft_too_long(&store, now), SparseError::TooLong { max: VALUE_BYTES_MAX }));
}

fn draft_too_long(store: &Store, now: u64) -> SparseError {
    let mut draft = store.sparse_draft(b"key", now).unwrap().unwrap();
    assert!(draft.set_len(VALUE_BYTES_MAX + 1).is_err());
    assert!(draft.write(u64::MAX, b"12").is_err());
    draft.write(VALUE_BYTES_MAX - 1, b"12").unwrap_err()
}

/// A value that was cut to a few octets may lie on disk, and so does what is appended to it.
#[test]
fn a_value_that_was_longer_is_appended_to_where_it_lies() {
    let store = store(4 * MIB, 4 * MIB);
    let disk = Disk::default();
    let now = store.clock().now();
    store.put(b"key", &octets(1, 400_000), 0, 0).unwrap();
    while write_one(&store, &disk, true, false) {}
    let mut draft = store.sparse_draft(b"key", now).unwrap().unwrap();
    draft.set_len(100).unwrap();
    assert!(matches!(store.commit_sparse(draft, now), Ok(Committed::Stored { .. })));
    let old = store.peek(b"key", now).unwrap();
    assert_eq!((old.len(), old.class()), (100, Class::Large));
    let mut more = store.draft(4, None);
    more.begin(store.fill(more.want().unwrap()).unwrap());
    more.put(b"more");
    assert!(matches!(store.commit_joined(&old, more, Side::Back, now), Joined::Done(Committed::Stored { .. })));
    let joined = store.peek(b"key", now).unwrap();
    assert_eq!(joined.class(), Class::Large);
    assert!(read(&disk, joined.pieces()) == [&octets(1, 400_000)[..100], b"more"].concat());
}

/// As long as the bound lets it, whatever the pool has; what is more than the pool has will never be there.
#[test]
fn a_value_may_be_longer_than_the_pool_and_not_have_more_octets() {
    let sizes = Sizes {
        memory_bytes: 4 * MIB,
        head_bytes: HEAD_BYTES,
        value_bytes_max: 12 << 30,
        index_bytes_max: 64 * MIB,
        pinned_share: 0.5,
        pool_bytes: vec![2 * MIB],
    };
    let store = Store::with_files(sizes).unwrap();
    while grow(&store) {}
    let (disk, now) = (Disk::default(), store.clock().now());
    store.put(b"key", b"", 0, 0).unwrap();
    let mut draft = store.sparse_draft(b"key", now).unwrap().unwrap();
    draft.set_len(12 << 30).unwrap();
    draft.write((12 << 30) - 3, b"end").unwrap();
    assert!(matches!(store.commit_sparse(draft, now), Ok(Committed::Stored { .. })));
    let object = store.peek(b"key", now).unwrap();
    assert_eq!((object.len(), object.footprint_bytes()), (12 << 30, 4096));
    assert_eq!(read(&disk, &object.range((12 << 30) - 5, 9).collect::<Vec<_>>()), b"\0\0end");
    let mut draft = store.sparse_draft(b"key", now).unwrap().unwrap();
    let mut at = 0;
    let error = loop {
        match draft.write(at, &[7; 128 << 10]) {
            Ok(count) => at += count as u64,
            Err(SparseError::Short(_)) => assert!(write_one(&store, &disk, true, false), "{store:?}"),
            Err(error) => break error,
        }
        assert!(at <= 2 * MIB);
    };
    assert!(
        matches!(error, SparseError::NoSpace { bytes_max, .. } if bytes_max == 2 * MIB) || error == SparseError::Busy,
        "{error}"
    );
    assert!(at >= MIB, "{at}");
}

#[test]
fn a_draft_claims_by_trying_and_passes_nobody_who_waits() {
    let store = store(4 * MIB, 4 * MIB);
    let now = store.clock().now();
    store.put(b"key", b"", 0, 0).unwrap();
    let mut draft = store.sparse_draft(b"key", now).unwrap().unwrap();
    draft.write(0, &[7; 400_000]).unwrap();
    let claimed = draft.claimed_bytes();
    assert!((400_000..=512 << 10).contains(&claimed), "{claimed}");
    store.claims().set_queued(1);
    assert_eq!(draft.write(MIB, &[7; 4096]), Err(SparseError::Busy));
    assert_eq!(draft.write(300_000, &[8; 4096]).unwrap(), 4096, "there is a block for it");
    store.claims().set_queued(0);
    assert_eq!(draft.write(MIB, &[7; 4096]).unwrap(), 4096);
    let idle_ms = store.clock().now_ms() + 1000;
    assert_eq!(store.claims().revoke_idle(idle_ms, 1000), 1);
    assert!(draft.is_revoked());
    assert!(matches!(store.commit_sparse(draft, now), Ok(Committed::Stored { .. })), "it is complete at any time");
    assert_eq!(store.gauges().claims, 0);
    // Whatever a draft holds is not evicted from under it.
    let mut draft = store.sparse_draft(b"key", now).unwrap().unwrap();
    draft.write(100, b"changed").unwrap();
    for number in 0..40_u8 {
        _ = store.put(&[number], &[1; 300_000], 0, 0);
        while write_one(&store, &Disk::default(), true, false) {}
    }
    assert_eq!(
        store.commit_sparse(draft, now).map_err(|_| ()),
        Ok(Committed::Stored { version: store.peek(b"key", now).unwrap().version() })
    );
    assert_eq!(store.peek(b"key", now).unwrap().len(), MIB + 4096);
    assert!(matches!(store.create_file(b"key", Metadata::new(None, 0), now), Committed::NotStored));
}

/// A store whose index is full of pieces before its pool is full of blocks.
fn store_of_parts(index_bytes_max: u64) -> Store {
    let sizes = Sizes {
        memory_bytes: 64 * MIB,
        head_bytes: HEAD_BYTES,
        value_bytes_max: 64 << 30,
        index_bytes_max,
        pinned_share: 0.5,
        pool_bytes: vec![64 * MIB],
    };
    let store = Store::with_files(sizes).unwrap();
    while grow(&store) {}
    store
}

/// One octet in every MiB from the `first` on, as many as are taken; and why no more.
fn islands(store: &Store, draft: &mut SparseDraft, first: u64) -> (u64, SparseError) {
    for number in first.. {
        if let Err(error) = draft.write(number * MIB, b"x") {
            return (number, error);
        }
        assert!(store.gauges().index_bytes <= store.sizes().index_bytes_max);
    }
    unreachable!("a value has an end")
}

#[test]
fn the_parts_of_drafts_are_counted_in_the_index_until_they_are_committed_or_dropped() {
    let store = store_of_parts(MIB);
    let now = store.clock().now();
    for number in 0..1000_u32 {
        store.put(format!("other{number}").as_bytes(), b"x", 0, 0).unwrap();
    }
    for number in 0..3_u8 {
        store.put(&[number], b"", 0, 0).unwrap();
    }
    let mut drafts: Vec<_> = (0..3).map(|number| store.sparse_draft(&[number], now).unwrap().unwrap()).collect();
    let mut counts = Vec::new();
    for draft in &mut drafts {
        let (count, error) = islands(&store, draft, 0);
        assert_eq!((error, draft.is_revoked()), (SparseError::Busy, true));
        counts.push(count);
    }
    // Each may have half of it; others went as far as they were in the way.
    assert!(counts[0] > 1000 && counts[1] > 500 && counts[2] < 100, "{counts:?}");
    assert!((0..1000).all(|number| store.peek(format!("other{number}").as_bytes(), now).is_none()));
    // What was written stays, and can be written over where it is.
    let mut taken: u64 = drafts.iter().map(SparseDraft::index_bytes).sum();
    let before = store.gauges().index_bytes;
    taken -= drafts[1].index_bytes();
    drop(drafts.remove(1));
    assert!(store.gauges().index_bytes < before && store.gauges().index_bytes >= taken);
    let (count, error) = islands(&store, &mut drafts[1], counts[2]);
    assert!(count > 500 && error == SparseError::Busy, "{count}");
    let (third, first) = (drafts.pop().unwrap(), drafts.pop().unwrap());
    let first_bytes = first.index_bytes();
    assert!(matches!(store.commit_sparse(first, now), Ok(Committed::Stored { .. })));
    let object = store.peek(&[0], now).unwrap();
    assert_eq!(object.len(), (counts[0] - 1) * MIB + 1);
    drop(third);
    // The object takes what its draft took, more or less, and leaves when others need it.
    let index_bytes = store.gauges().index_bytes;
    assert!(first_bytes / 2 < index_bytes && index_bytes < first_bytes * 2, "{first_bytes}, {index_bytes}");
    let mut draft = store.sparse_draft(&[0], now).unwrap().unwrap();
    let (_, error) = islands(&store, &mut draft, counts[0]);
    assert!(matches!(error, SparseError::TooManyParts | SparseError::Busy), "{error}");
    drop((draft, object));
    store.delete(&[0], now);
    store.flush_all(0);
    for number in 0..3 {
        _ = store.get(&[number], now);
    }
    assert_whole(&store);
}

/// Alone in the index a draft is told to be committed, and that is no help any more once its parts are what there is too much of.
#[test]
fn a_value_of_too_many_parts_is_refused_for_good() {
    let store = store_of_parts(MIB);
    let now = store.clock().now();
    store.put(b"key", b"", 0, 0).unwrap();
    let mut commits = 0;
    let mut at = 0;
    loop {
        let mut draft = store.sparse_draft(b"key", now).unwrap().expect("nobody else needs room");
        let (count, error) = islands(&store, &mut draft, at);
        if error == SparseError::TooManyParts {
            assert!(!draft.is_revoked());
            break;
        }
        assert!(count > at && error == SparseError::Busy, "{count} islands, {error}");
        at = count;
        assert!(matches!(store.commit_sparse(draft, now), Ok(Committed::Stored { .. })));
        commits += 1;
        assert!(commits < 100);
    }
    assert!(at > 1000 && commits > 0, "{at} islands, {commits} commits");
    // Of fewer parts it is written to again.
    let mut draft = store.sparse_draft(b"key", now).unwrap().unwrap();
    draft.set_len(100 * MIB).unwrap();
    assert!(matches!(store.commit_sparse(draft, now), Ok(Committed::Stored { .. })));
    let mut draft = store.sparse_draft(b"key", now).unwrap().unwrap();
    assert_eq!(draft.write(0, b"y"), Ok(1));
}

/// Octets with gaps between them in one block are parts of it, and joined before they are many.
#[test]
fn single_octets_in_one_block_do_not_become_many_pieces() {
    let store = store(4 * MIB, 8 * MIB);
    let now = store.clock().now();
    store.put(b"key", &octets(1, 400_000), 0, 0).unwrap();
    let mut draft = store.sparse_draft(b"key", now).unwrap().unwrap();
    let mut wanted = octets(1, 400_000);
    for at in (0..400_000).step_by(200) {
        assert_eq!(draft.write(at, b"#"), Ok(1));
        wanted[at as usize] = b'#';
    }
    assert!(draft.index_bytes() < 100 << 10, "{}", draft.index_bytes());
    assert!(read(&Disk::default(), &draft.range(0, 400_000)) == wanted);
}
