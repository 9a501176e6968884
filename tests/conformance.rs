//! Holds `docs/conformance.md` against itself and against the tests it names, so that neither drifts from the other.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

/// How many requirements each section has.
const REQUIREMENTS: [(char, usize); 14] = [
    ('A', 12),
    ('B', 11),
    ('C', 4),
    ('D', 9),
    ('E', 9),
    ('F', 12),
    ('G', 10),
    ('H', 4),
    ('I', 19),
    ('J', 6),
    ('K', 8),
    ('L', 13),
    ('M', 10),
    ('N', 9),
];
const ERRORS: usize = 29;
const BUGS: usize = 41;

/// What the last column of a row says.
#[derive(Debug)]
struct Proof {
    /// `module::function`.
    tests: Vec<String>,
    none: bool,
    not_yet: Option<String>,
}

fn ids() -> Vec<String> {
    let mut ids: Vec<_> = REQUIREMENTS
        .iter()
        .flat_map(|(letter, count)| (1..=*count).map(move |number| format!("{letter}{number}")))
        .collect();
    ids.extend((1..=ERRORS).map(|number| format!("R{number}")));
    ids.extend((1..=BUGS).map(|number| format!("bug {number}")));
    ids
}

fn is_id(cell: &str) -> bool {
    let number = cell.strip_prefix("bug ").or_else(|| cell.strip_prefix(|letter: char| letter.is_ascii_uppercase()));
    number.is_some_and(|number| !number.is_empty() && number.bytes().all(|octet| octet.is_ascii_digit()))
}

/// # Panics
/// If the cell is not of a form that the document gives.
fn proof(id: &str, cell: &str) -> Proof {
    if let Some(reason) = cell.strip_prefix("none: ") {
        assert!(reason.len() > 10, "{id}: no reason");
        return Proof { tests: Vec::new(), none: true, not_yet: None };
    }
    let (named, not_yet) = match cell.split_once("not yet: ") {
        Some((named, missing)) => (named, Some(missing.to_owned())),
        None => (cell, None),
    };
    let test = |name: &str| {
        let name = name.strip_prefix('`').and_then(|name| name.strip_suffix('`'));
        name.filter(|name| name.contains("::")).unwrap_or_else(|| panic!("{id}: {cell}")).to_owned()
    };
    let named = named.trim_end().trim_end_matches(',');
    let tests = if named.is_empty() { Vec::new() } else { named.split(", ").map(test).collect() };
    assert!(!tests.is_empty() || not_yet.is_some(), "{id}: no proof, no reason, and nothing missing");
    Proof { tests, none: false, not_yet }
}

/// Every row that begins with an id.
fn rows() -> Vec<(String, Proof)> {
    let cells = |line: &str| -> Option<(String, Proof)> {
        let line = line.strip_prefix("| ")?.strip_suffix(" |")?;
        let id = line.split(" | ").next().filter(|cell| is_id(cell))?;
        Some((id.to_owned(), proof(id, line.rsplit(" | ").next()?)))
    };
    include_str!("../docs/conformance.md").lines().filter_map(cells).collect()
}

fn sources(dir: &Path, found: &mut Vec<(PathBuf, String)>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&path).unwrap();
            found.push((path, text));
        }
    }
}

/// The file is that module, or a part of it.
fn is_of(path: &Path, module: &str) -> bool {
    path.with_extension("").components().any(|part| part.as_os_str() == module)
}

/// `text` has a test of that name: the attribute stands above it, or it is one that the fabric contract runs on every bed.
fn has_test(text: &str, name: &str) -> bool {
    let lines: Vec<_> = text.lines().map(str::trim_start).collect();
    let begins = |line: &str, words: &str| line.strip_prefix(words).is_some_and(|rest| rest.starts_with('('));
    lines.iter().enumerate().any(|(at, line)| {
        let line = line.strip_prefix("async ").unwrap_or(line);
        if !begins(line, &format!("fn {name}")) {
            return false;
        }
        let above = lines[..at].iter().rev().take_while(|line| line.starts_with("#[") || line.starts_with("///"));
        line.contains("(bed: Bed)") || above.into_iter().any(|line| *line == "#[test]" || line.ends_with("::test]"))
    })
}

#[test]
fn every_id_is_there_once() {
    let mut found = BTreeMap::new();
    for (id, _) in rows() {
        *found.entry(id).or_insert(0) += 1;
    }
    for id in ids() {
        assert_eq!(found.remove(&id), Some(1), "{id}");
    }
    assert!(found.is_empty(), "not known: {:?}", found.keys());
}

#[test]
fn every_named_test_exists() {
    let mut files = Vec::new();
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for dir in ["src", "tests"] {
        sources(&root.join(dir), &mut files);
    }
    let mut missing = Vec::new();
    for (id, proof) in rows() {
        for test in proof.tests {
            let (module, name) = test.split_once("::").unwrap();
            let exists = files
                .iter()
                .any(|(path, text)| is_of(path.strip_prefix(root).unwrap(), module) && has_test(text, name));
            if !exists {
                missing.push(format!("{id}: {test}"));
            }
        }
    }
    assert!(missing.is_empty(), "{missing:#?}");
}

/// Says what is not proven yet, past the test harness, which shows nothing of a test that passes.
#[test]
fn what_is_not_yet_proven_is_counted() {
    let rows = rows();
    let none = rows.iter().filter(|(_, proof)| proof.none).count();
    let mut open: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (id, proof) in &rows {
        if let Some(missing) = &proof.not_yet {
            open.entry(missing).or_default().push(id);
        }
    }
    let not_yet: usize = open.values().map(Vec::len).sum();
    let proven = rows.len() - none - not_yet;
    let mut text = format!("conformance: {proven} proven, {none} without a test and why, {not_yet} not yet:\n");
    for (missing, ids) in open {
        text.push_str(&format!("  {missing}: {}\n", ids.join(", ")));
    }
    let _ = std::io::stderr().write_all(text.as_bytes());
    assert_eq!(proven + none + not_yet, ids().len());
}

#[test]
fn a_test_is_found_by_its_attribute_and_not_by_its_name_alone() {
    let text = "    #[test]\n    fn one() {\n    }\n fn two() {\n    }\n    /// Doc.\n    #[test]\n    #[expect(x)]\n    fn three(seed in any()) {\n#[actix::test]\nasync fn four() {}\nasync fn five() {}";
    assert!(["one", "three", "four"].iter().all(|name| has_test(text, name)));
    assert!(!has_test(text, "two") && !has_test(text, "five") && !has_test(text, "thre") && !has_test(text, "oneself"));
    assert!(is_of(Path::new("src/wire/rpcrdma/responder/tests.rs"), "responder"));
    assert!(!is_of(Path::new("src/wire/rpcrdma/responder/tests.rs"), "rpc"));
}
