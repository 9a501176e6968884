//! `docs/iwarp-conformance.md` names tests; this keeps the names true.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

fn read(path: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path))
        .unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// What stands between backticks.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

/// Functions that are tests, of themselves or as a part of the fabric contract.
fn tests_of(source: &str) -> BTreeSet<&str> {
    let lines: Vec<&str> = source.lines().map(str::trim).collect();
    let with_attribute = lines.windows(2).filter(|pair| pair[0] == "#[test]").map(|pair| pair[1]);
    let of_beds = lines.iter().copied().filter(|line| line.contains("(bed: Bed)"));
    with_attribute.chain(of_beds).filter_map(|line| line.strip_prefix("fn ")?.split('(').next()).collect()
}

#[test]
fn every_test_that_the_table_names_exists_and_none_of_ours_is_missing() {
    let table = read("docs/iwarp-conformance.md");
    let mut files = BTreeMap::new();
    for row in table.lines().filter(|line| line.contains(".rs` |")) {
        let [prefix, file] = quoted(row).collect::<Vec<_>>()[..] else { panic!("{row}") };
        files.insert(prefix, (file, row.ends_with("| all |")));
    }
    assert_eq!(files.len(), 15);
    let mut named: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (prefix, name) in quoted(&table).filter_map(|name| name.split_once("::")) {
        if files.contains_key(prefix) {
            named.entry(prefix).or_default().insert(name);
        } else {
            assert!(["wire", "fabric", "prefix"].contains(&prefix), "no file for {prefix}::{name}");
        }
    }
    for (prefix, (file, is_all)) in files {
        let source = read(file);
        let (tests, named) = (tests_of(&source), named.remove(prefix).unwrap_or_default());
        let unknown: Vec<_> = named.difference(&tests).collect();
        assert!(unknown.is_empty(), "{file} has no {unknown:?}");
        assert!(!named.is_empty(), "nothing of {file} is named");
        let unnamed: Vec<_> = tests.difference(&named).collect();
        assert!(!is_all || unnamed.is_empty(), "{file}: not in the table: {unnamed:?}");
    }
}
