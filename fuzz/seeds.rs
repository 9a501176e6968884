//! Inputs to start from. A target makes them of the test vectors and plants them into its corpus when `run.sh` tells where
//! that is: so none is committed, and none goes stale.
#![allow(dead_code, reason = "each target takes what it needs")]

use std::fs;
use std::path::PathBuf;

use serde_json::Value;

/// Writes each into the corpus, where there is one.
pub fn plant(seeds: impl IntoIterator<Item = Vec<u8>>) {
    let Some(corpus) = std::env::var_os("BULKHEAD_FUZZ_CORPUS").map(PathBuf::from) else { return };
    for (n, seed) in seeds.into_iter().enumerate() {
        fs::write(corpus.join(format!("seed-{n:03}")), seed).expect("the corpus can be written");
    }
}

/// The vectors of a file below `tests/vectors`.
pub fn vectors(file: &str) -> Vec<Value> {
    let file: Value = serde_json::from_str(file).expect("vectors are JSON");
    file["vectors"].as_array().expect("a list").clone()
}

/// Every string of hexadecimal octets below `value`.
pub fn octets_in(value: &Value) -> Vec<Vec<u8>> {
    match value {
        Value::String(text) => unhex(text).into_iter().collect(),
        Value::Array(items) => items.iter().flat_map(octets_in).collect(),
        Value::Object(fields) => fields.values().flat_map(octets_in).collect(),
        _ => Vec::new(),
    }
}

/// Octets of a text that is nothing but them.
pub fn unhex(text: &str) -> Option<Vec<u8>> {
    if text.is_empty() || text.len() % 2 != 0 || !text.is_ascii() {
        return None;
    }
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).ok()).collect()
}
