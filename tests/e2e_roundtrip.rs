//! Values go in and come out octet by octet: every size, command, door and place where a value may lie.

mod common;

use common::{MIB, Pattern, serve};

#[test]
fn one_value_of_each_interesting_size_comes_back() {
    let daemon = serve(&[]);
    let mut client = daemon.connect();
    let sizes = [0, 1, 4095, 4096, 4097, 65_535, 65_536, 65_537, 262_143, 262_144, 262_145, MIB, 8 * MIB, 100 * MIB];
    for (seed, size) in sizes.into_iter().enumerate() {
        client.set("key", Pattern(seed as u64), size);
        client.get("key", Pattern(seed as u64), size);
    }
}
