//! SET over loopback TCP, one client, one request at a time: the same key again and again, and ever new keys, whose
//! values push each other to disk.
//!
//! `cargo bench --bench set`; `cargo bench --bench set -- --test` only sees whether it runs, and whether everything
//! STORED is there. Daemon and client share the machine: compare runs of the same machine. The pool lies in
//! `$BULKHEAD_BENCH_DIR`, or below the target directory.

mod loopback;

use loopback::{Plan, measure, octets, with_daemon};

fn main() {
    let plan = Plan::of_arguments();
    with_daemon(&plan, |client| {
        for len in [64, 64 << 10, 1 << 20, 8 << 20] {
            let value = octets(len);
            measure("set same", len, plan.count(len), |_| {
                client.put("same", &mut &value[..], len as u64, 0, None).expect("STORED");
            });
        }
        let len = 1 << 20;
        let value = octets(len);
        let objects = (plan.pool_bytes / 2 / len as u64).min(2 * plan.memory_bytes / len as u64);
        measure("set new ", len, objects, |number| {
            client.put(format!("new/{number}"), &mut &value[..], len as u64, 0, None).expect("STORED");
        });
        for number in 0..objects {
            assert!(client.exists(format!("new/{number}")).expect("a reply"), "new/{number} was STORED");
        }
    });
}
