//! What this machine has: RDMA devices, addresses, NUMA nodes, limits. Everything is read from /sys, /proc and the C
//! library, so it works without the feature `verbs`; what is read from /sys takes the root of the tree as an argument.

pub mod interfaces;
pub mod numa;
pub mod rdma;

use std::fs;
use std::path::Path;

/// Where the kernel shows its devices.
pub const SYSFS: &str = "/sys";

/// The text of a one-line file without the space around it; `None` if it cannot be read or says nothing. Some files of
/// /sys are there and answer `EINVAL`, which is the same.
fn line(path: &Path) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let text = text.trim();
    (!text.is_empty()).then(|| text.to_owned())
}

/// Names in a directory, sorted so that numbers within them count as such; none if there is no such directory.
fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let mut names: Vec<_> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort_by_key(|name| {
        let digits = name.len() - name.trim_end_matches(|c: char| c.is_ascii_digit()).len();
        let (stem, number) = name.split_at(name.len() - digits);
        (stem.to_owned(), number.parse::<u64>().unwrap_or(0), name.clone())
    });
    names
}
