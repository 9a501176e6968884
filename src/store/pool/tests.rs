use super::*;
use std::collections::BTreeMap;
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};

const MIB: u64 = 1 << 20;

/// Every path below `dir` with what it is and holds; extents files are left out.
fn snapshot(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let entry = entry.unwrap();
        let kind = entry.file_type().unwrap();
        let path = entry.path();
        if kind.is_symlink() {
            found.insert(path.clone(), std::fs::read_link(path).unwrap().into_os_string().into_encoded_bytes());
        } else if kind.is_dir() {
            found.extend(snapshot(&path));
            found.insert(path, b"directory".into());
        } else {
            found.insert(path.clone(), std::fs::read(path).unwrap());
        }
    }
    found
}

fn marked(dir: &Path) {
    init(dir).unwrap();
}

/// Peers that took all descriptors made the pool smaller for ever.
#[test]
fn want_of_descriptors_passes_and_other_errors_stay() {
    let error = |number| failed("create", Path::new("x"), io::Error::from_raw_os_error(number));
    assert!(error(libc::EMFILE).is_passing() && error(libc::ENFILE).is_passing());
    assert!(!error(libc::EROFS).is_passing() && !error(libc::ENOSPC).is_passing());
    assert!(!PoolError::Vanished { dir: "x".into() }.is_passing());
}

#[test]
fn an_absent_directory_is_created_for_this_user_alone_and_blessed() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("a/b/pool");
    let pool = PoolDir::open(&dir, Some(8 * MIB + 5)).unwrap();
    assert_eq!(pool.capacity_bytes(), 8 * MIB);
    assert_eq!(std::fs::metadata(&dir).unwrap().permissions().mode() & 0o777, 0o700);
    let text = std::fs::read_to_string(dir.join(MARKER_NAME)).unwrap();
    let table: toml::Table = text.parse().unwrap();
    assert_eq!(table["version"].as_integer(), Some(1));
    assert_eq!(table["id"].as_str().unwrap().len(), 32);
    assert!(table["created"].as_integer().unwrap() > 0);
}

#[test]
fn an_empty_directory_is_refused_until_init_blesses_it() {
    let temp = tempfile::tempdir().unwrap();
    let error = PoolDir::open(temp.path(), None).unwrap_err();
    assert!(matches!(error, PoolError::Empty { .. }), "{error}");
    assert!(error.to_string().contains("bulkhead pool init"), "{error}");
    assert_eq!(error.exit_code(), Exit::Config);
    assert!(snapshot(temp.path()).is_empty());
    assert_eq!(init(temp.path()).unwrap(), Initialized::Now);
    assert_eq!(init(temp.path()).unwrap(), Initialized::Before);
    PoolDir::open(temp.path(), Some(MIB)).unwrap();
}

#[test]
fn a_fresh_file_system_with_its_lost_and_found_counts_as_empty() {
    let temp = tempfile::tempdir().unwrap();
    std::fs::create_dir(temp.path().join("lost+found")).unwrap();
    assert!(matches!(PoolDir::open(temp.path(), None), Err(PoolError::Empty { .. })));
    assert_eq!(init(temp.path()).unwrap(), Initialized::Now);
    PoolDir::open(temp.path(), Some(MIB)).unwrap();
    assert!(temp.path().join("lost+found").is_dir());
}

#[test]
fn a_directory_with_other_files_is_refused_and_not_touched() {
    for name in ["notes.txt", "extents-0000.bulkhead", ".hidden"] {
        let temp = tempfile::tempdir().unwrap();
        std::fs::write(temp.path().join(name), b"precious").unwrap();
        let before = snapshot(temp.path());
        let error = PoolDir::open(temp.path(), None).unwrap_err();
        assert!(matches!(error, PoolError::Unmarked { .. }), "{error}");
        assert_eq!(error.exit_code(), Exit::Config);
        assert!(matches!(init(temp.path()), Err(PoolError::Unmarked { .. })));
        assert_eq!(snapshot(temp.path()), before);
    }
}

#[test]
fn what_is_no_directory_is_refused() {
    let temp = tempfile::tempdir().unwrap();
    let file = temp.path().join("file");
    std::fs::write(&file, b"x").unwrap();
    for path in [file.clone(), file.join("below")] {
        let error = PoolDir::open(&path, None).unwrap_err();
        assert!(matches!(error, PoolError::NotADirectory { .. }), "{error}");
        assert!(init(&path).is_err());
    }
    let dangling = temp.path().join("dangling");
    symlink(temp.path().join("nowhere"), &dangling).unwrap();
    let error = PoolDir::open(&dangling, None).unwrap_err();
    assert!(matches!(error, PoolError::Io { action: "create", .. }), "{error}");
    assert_eq!(error.exit_code(), Exit::Unavailable);
    assert!(!temp.path().join("nowhere").exists());
}

#[test]
fn a_place_where_nothing_can_be_created_says_so() {
    let error = PoolDir::open(Path::new("/proc/bulkhead-test/pool"), None).unwrap_err();
    assert!(matches!(error, PoolError::Io { action: "create", .. }), "{error}");
    assert_eq!(error.exit_code(), Exit::Unavailable);
}

#[test]
fn a_lock_that_goes_soon_is_waited_for() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("pool");
    let first = PoolDir::open(&dir, Some(MIB)).unwrap();
    // As a program that is about to be executed has it.
    let inherited = first._marker.try_clone().unwrap();
    drop(first);
    let executed = thread::spawn(move || {
        thread::sleep(Duration::from_millis(20));
        drop(inherited);
    });
    PoolDir::open(&dir, Some(MIB)).unwrap();
    executed.join().unwrap();
}

#[test]
fn a_second_daemon_is_locked_out_until_the_first_lets_go() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("pool");
    let first = PoolFiles::new(PoolDir::open(&dir, Some(2 * MIB)).unwrap());
    first.grow().unwrap().unwrap();
    let error = PoolDir::open(&dir, Some(MIB)).unwrap_err();
    assert!(matches!(error, PoolError::Locked { .. }), "{error}");
    assert_eq!(error.exit_code(), Exit::Unavailable);
    assert!(dir.join("extents-0000.bulkhead").exists(), "who is locked out wipes nothing");
    assert_eq!(init(&dir).unwrap(), Initialized::Before);
    drop(first);
    PoolDir::open(&dir, Some(MIB)).unwrap();
    assert!(!dir.join("extents-0000.bulkhead").exists());
}

#[test]
fn wiping_removes_regular_extents_files_and_nothing_else() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("pool");
    marked(&dir);
    let target = temp.path().join("target");
    std::fs::write(&target, b"outside").unwrap();
    symlink(&target, dir.join("extents-0001.bulkhead")).unwrap();
    std::fs::create_dir(dir.join("extents-0002.bulkhead")).unwrap();
    std::fs::create_dir(dir.join("sub")).unwrap();
    for name in [
        "extents-1.bulkhead",
        "extents-00003.bulkhead",
        "extents-000a.bulkhead",
        "extents-0004.bulkhead.bak",
        "xextents-0004.bulkhead",
        "EXTENTS-0004.bulkhead",
        "notes.txt",
        "sub/extents-0005.bulkhead",
    ] {
        std::fs::write(dir.join(name), name).unwrap();
    }
    let before = snapshot(temp.path());
    for name in ["extents-0000.bulkhead", "extents-0007.bulkhead", "extents-9999.bulkhead"] {
        std::fs::write(dir.join(name), b"old").unwrap();
    }
    let files = PoolFiles::new(PoolDir::open(&dir, Some(2 * MIB)).unwrap());
    assert_eq!(snapshot(temp.path()), before);

    let mut files = files;
    files.file_bytes_max = MIB;
    files.grow().unwrap().unwrap();
    files.grow().unwrap().unwrap();
    assert!(dir.join("extents-0003.bulkhead").is_file(), "names that are taken are passed over");
    assert_eq!(std::fs::read(&target).unwrap(), b"outside");
}

#[test]
fn a_marker_that_is_not_of_this_version_is_refused_and_left_alone() {
    for text in [
        "version = 2\nnew = true\n",
        "version = \"1\"\ncreated = 1\nid = \"a\"\n",
        "created = 1\nid = \"a\"\n",
        "version = 1\n",
        "version 1",
        "\u{0}\u{1}",
        &"#".repeat(5000),
    ] {
        let temp = tempfile::tempdir().unwrap();
        std::fs::write(temp.path().join(MARKER_NAME), text).unwrap();
        std::fs::write(temp.path().join("extents-0000.bulkhead"), b"other").unwrap();
        let before = snapshot(temp.path());
        let error = PoolDir::open(temp.path(), Some(MIB)).unwrap_err();
        assert!(matches!(error, PoolError::BadMarker { .. }), "{text:?}: {error}");
        assert_eq!(error.exit_code(), Exit::Config);
        assert!(matches!(init(temp.path()), Err(PoolError::BadMarker { .. })));
        assert_eq!(snapshot(temp.path()), before);
    }
}

#[test]
fn a_marker_that_is_no_regular_file_is_refused() {
    let temp = tempfile::tempdir().unwrap();
    let link = temp.path().join("link");
    std::fs::create_dir(&link).unwrap();
    std::fs::write(temp.path().join("real"), "version = 1\ncreated = 1\nid = \"a\"\n").unwrap();
    symlink("../real", link.join(MARKER_NAME)).unwrap();
    let folder = temp.path().join("folder");
    std::fs::create_dir_all(folder.join(MARKER_NAME)).unwrap();
    for dir in [link, folder] {
        let error = PoolDir::open(&dir, Some(MIB)).unwrap_err();
        assert!(matches!(error, PoolError::BadMarker { .. }), "{error}");
    }
}

#[test]
fn an_interrupted_blessing_is_finished_only_if_nothing_else_is_there() {
    let temp = tempfile::tempdir().unwrap();
    std::fs::write(temp.path().join(MARKER_NAME), b"").unwrap();
    std::fs::write(temp.path().join("other"), b"x").unwrap();
    assert!(matches!(PoolDir::open(temp.path(), Some(MIB)), Err(PoolError::BadMarker { .. })));
    std::fs::remove_file(temp.path().join("other")).unwrap();
    drop(PoolDir::open(temp.path(), Some(MIB)).unwrap());
    assert_eq!(init(temp.path()).unwrap(), Initialized::Before);
}

#[test]
fn a_size_is_refused_with_both_numbers_when_the_drive_has_less() {
    let temp = tempfile::tempdir().unwrap();
    marked(temp.path());
    let error = PoolDir::open(temp.path(), Some(u64::MAX)).unwrap_err();
    let PoolError::TooLarge { asked_bytes, free_bytes, .. } = error else { panic!("{error}") };
    assert_eq!(asked_bytes, u64::MAX);
    let text = error.to_string();
    assert!(text.contains(&asked_bytes.to_string()) && text.contains(&free_bytes.to_string()), "{text}");
    assert_eq!(error.exit_code(), Exit::Config);
    assert!(matches!(PoolDir::open(temp.path(), Some(MIB - 1)), Err(PoolError::TooSmall { .. })));
}

#[test]
fn without_a_size_a_pool_takes_half_of_what_is_free_or_says_it_is_too_little() {
    let dir = Path::new("/pool");
    assert_eq!(capacity(dir, None, 128 * MIB).unwrap(), 64 * MIB);
    assert_eq!(capacity(dir, None, 131 * MIB).unwrap(), 65 * MIB);
    let error = capacity(dir, None, 128 * MIB - 1).unwrap_err();
    assert!(matches!(error, PoolError::NoRoom { .. }), "{error}");
    assert_eq!(error.exit_code(), Exit::Unavailable);
    assert_eq!(capacity(dir, Some(3 * MIB + 1), 4 * MIB).unwrap(), 3 * MIB);
}

#[test]
fn inspection_says_what_opening_would_and_changes_nothing() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path().join("a/pool");
    let size = Some(8 * UNIT_BYTES);
    let seen = inspect(&dir, size).unwrap();
    assert_eq!((seen.exists, seen.capacity_bytes), (false, 8 * UNIT_BYTES));
    assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 0, "nothing was made");
    let opened = PoolDir::open(&dir, size).unwrap();
    assert!(matches!(inspect(&dir, size), Err(PoolError::Locked { .. })));
    drop(opened);
    std::fs::write(dir.join(extents_name(0)), [1; 100_000]).unwrap();
    let files = || std::fs::read_dir(&dir).unwrap().count();
    let before = files();
    assert!(inspect(&dir, size).unwrap().exists);
    assert_eq!(files(), before, "nothing was wiped, nothing left");
    let free_bytes = match inspect(&dir, Some(u64::MAX)) {
        Err(PoolError::TooLarge { free_bytes, .. }) => free_bytes,
        other => panic!("{other:?}"),
    };
    assert!(free_bytes > 8 * UNIT_BYTES, "what would be wiped counts as free");
    assert!(matches!(inspect(&dir, Some(1)), Err(PoolError::TooSmall { .. })));
    std::fs::remove_file(dir.join(MARKER_NAME)).unwrap();
    assert!(matches!(inspect(&dir, size), Err(PoolError::Unmarked { .. })));
    std::fs::remove_file(dir.join(extents_name(0))).unwrap();
    assert!(matches!(inspect(&dir, size), Err(PoolError::Empty { .. })));
    assert!(matches!(inspect(&dir.join("x"), size), Ok(Inspection { exists: false, .. })));
}

#[test]
fn files_are_made_in_steps_until_the_capacity_is_reached() {
    let temp = tempfile::tempdir().unwrap();
    let mut files = PoolFiles::new(PoolDir::open(&temp.path().join("pool"), Some(5 * MIB)).unwrap());
    files.file_bytes_max = 2 * MIB;
    assert!(files.file(0).is_none());
    let grown: Vec<_> = std::iter::from_fn(|| files.grow().unwrap()).map(|grown| (grown.index, grown.bytes)).collect();
    assert_eq!(grown, [(0, 2 * MIB), (1, 2 * MIB), (2, MIB)]);
    assert_eq!((files.file_count(), files.allocated_bytes()), (3, 5 * MIB));
    let last = files.file(2).unwrap();
    let metadata = last.as_file().metadata().unwrap();
    assert_eq!((metadata.len(), last.byte_len()), (MIB, MIB));
    assert!(metadata.blocks() * 512 >= MIB, "preallocated, not sparse");
    assert_eq!(metadata.permissions().mode() & 0o777, 0o600);
    let mut buf = crate::fabric::region::aligned::AlignedBuf::new(4096).unwrap();
    buf.as_mut_slice().fill(9);
    last.as_file().write_all_at(buf.as_slice(), MIB - 4096).unwrap();
    assert_ne!(files.file(0).unwrap().serial(), files.file(1).unwrap().serial());
}

#[test]
fn a_full_file_system_shrinks_the_capacity_to_what_there_is() {
    let temp = tempfile::tempdir().unwrap();
    let mut files = PoolFiles::new(PoolDir::open(&temp.path().join("pool"), Some(16 * MIB)).unwrap());
    files.file_bytes_max = 8 * MIB;
    let room = |most: u64| {
        move |file: &File, bytes: u64| {
            if bytes > most {
                file.set_len(most)?;
                return Err(io::Error::from_raw_os_error(libc::ENOSPC));
            }
            sys::preallocate(file, bytes)
        }
    };
    files.grow().unwrap().unwrap();
    let grown = files.grow_with(&room(3 * MIB)).unwrap().unwrap();
    assert_eq!(grown, Grown { index: 1, bytes: 3 * MIB });
    assert_eq!(files.capacity_bytes(), 11 * MIB);
    assert_eq!(files.file(1).unwrap().as_file().metadata().unwrap().len(), 3 * MIB);
    assert_eq!(files.grow().unwrap(), None);

    let mut files = PoolFiles::new(PoolDir::open(&temp.path().join("other"), Some(16 * MIB)).unwrap());
    files.file_bytes_max = 8 * MIB;
    assert_eq!(files.grow_with(&room(0)).unwrap(), None);
    assert_eq!((files.capacity_bytes(), files.file_count()), (0, 0));
    assert!(!temp.path().join("other/extents-0000.bulkhead").exists());
}

#[test]
fn growing_in_a_directory_that_vanished_says_so() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("pool");
    let files = PoolFiles::new(PoolDir::open(&dir, Some(MIB)).unwrap());
    std::fs::remove_dir_all(&dir).unwrap();
    let error = files.grow().unwrap_err();
    assert!(matches!(error, PoolError::Vanished { .. }), "{error}");
    assert_eq!(error.exit_code(), Exit::Unavailable);
}

#[test]
fn an_extent_id_is_small_and_counts_in_units() {
    assert_eq!(size_of::<ExtentId>(), 12);
    let extent = ExtentId::new(1, 2, u32::MAX, 6);
    assert_eq!(extent.byte_offset(), u64::from(u32::MAX) * 4096);
    assert_eq!(extent.byte_len(), 256 * 1024);
    assert_eq!((extent.drive(), extent.file(), extent.offset(), extent.order()), (1, 2, u32::MAX, 6));
    assert_eq!(ExtentId::new(0, 0, 0, ExtentId::ORDER_MAX).byte_len(), FILE_BYTES_MAX);
}

#[test]
fn blocks_are_summed_one_by_one() {
    let segment: Vec<u8> = (0..CRC_BLOCK_BYTES + 9).map(|at| at as u8).collect();
    let crcs = block_crcs(&segment);
    assert_eq!(crcs[0], crc32c::crc32c(&segment[..CRC_BLOCK_BYTES]));
    assert_eq!(crcs[1], crc32c::crc32c(&segment[CRC_BLOCK_BYTES..]));
    assert_eq!(crcs[2..], [0, 0]);
    // RFC 3720 §B.4: 32 octets of zeros.
    assert_eq!(block_crcs(&[0; 32])[0], 0x8a91_36aa);
}
