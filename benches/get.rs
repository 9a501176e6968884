//! GET over loopback TCP, one client, one request at a time: hot values of several sizes, and values whose bodies are on
//! disk.
//!
//! `cargo bench --bench get`; `cargo bench --bench get -- --test` only sees whether it runs, and whether the octets are
//! right. Daemon and client share the machine: compare runs of the same machine. The pool lies in
//! `$BULKHEAD_BENCH_DIR`, or below the target directory.

mod loopback;

use bulkhead::client::Client;
use loopback::{Plan, measure, octets, with_daemon};

fn main() {
    let plan = Plan::of_arguments();
    with_daemon(&plan, |client| {
        for len in [64, 64 << 10, 1 << 20, 8 << 20] {
            hot(client, &plan, len);
        }
        cold(client, &plan, 1 << 20);
    });
}

fn hot(client: &mut Client, plan: &Plan, len: usize) {
    let value = octets(len);
    put(client, "hot", &value);
    let mut buffer = vec![0; len];
    measure("get hot ", len, plan.count(len), |_| get(client, "hot", &mut buffer));
    assert!(buffer == value, "the octets are those that were put");
}

/// Twice as much as fits into memory, read in the order it was written: what is wanted next left RAM longest ago.
fn cold(client: &mut Client, plan: &Plan, len: usize) {
    let value = octets(len);
    let objects = 2 * plan.memory_bytes / len as u64;
    for number in 0..objects {
        put(client, &format!("cold/{number}"), &value);
    }
    let mut buffer = vec![0; len];
    measure("get cold", len, plan.count(len).min(objects), |number| {
        get(client, &format!("cold/{number}"), &mut buffer)
    });
    assert!(buffer == value, "the octets are those that were put");
}

fn put(client: &mut Client, key: &str, value: &[u8]) {
    client.put(key, &mut &value[..], value.len() as u64, 0, None).expect("STORED");
}

fn get(client: &mut Client, key: &str, buffer: &mut [u8]) {
    let info = client.get_into(key, buffer).expect("a reply").expect("a hit");
    assert_eq!(info.len, buffer.len() as u64);
}
