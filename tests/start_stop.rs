//! A daemon that was shut down leaves nothing in its process. Alone in its program: it counts what the process has.

use std::fs;
use std::io::Read;
use std::time::{Duration, Instant};

use bulkhead::actors::start;
use bulkhead::client::{Client, Options, ServerUrl};
use bulkhead::config::Config;

/// Threads and open descriptors of this process.
fn census() -> (usize, usize) {
    let count = |dir| fs::read_dir(dir).unwrap().count();
    (count("/proc/self/task"), count("/proc/self/fd"))
}

fn use_it(url: ServerUrl) {
    let mut client = Client::connect(url, Options::default()).unwrap();
    // More than the memory holds, so that the disk works when the daemon is told to stop.
    for number in 0..40 {
        let mut value = std::io::repeat(number).take(1 << 20);
        client.put(format!("key{number}"), &mut value, 1 << 20, 0, None).unwrap();
    }
    let mut first = Vec::new();
    client.get("key0", &mut first).unwrap().unwrap();
    assert_eq!(first, vec![0; 1 << 20]);
}

#[test]
fn a_shutdown_leaves_no_thread_and_no_descriptor() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = Config::small(dir.path().join("pool"));
    config.lanes = 2;
    config.listen.unix = vec![dir.path().join("door")];
    config.listen.native = vec!["native+iwarp://127.0.0.1:0".parse().unwrap()];
    config.listen.admin = Some(([127, 0, 0, 1], 0).into());
    actix::System::new().block_on(async {
        let mut after_first = None;
        for _ in 0..4 {
            let handle = start(config.clone()).await.unwrap();
            let url: ServerUrl = handle.doors()[0].parse().unwrap();
            let client = std::thread::spawn(move || use_it(url));
            while !client.is_finished() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            client.join().unwrap();
            let (threads, descriptors) = census();
            handle.shutdown().await;

            // What the first round leaves may stay: the runtime keeps a pipe for signals. Nothing is added to it; the
            // thread of the admin port ends a moment after it said so.
            let (threads_max, descriptors_max) = *after_first.get_or_insert_with(census);
            let limit = Instant::now() + Duration::from_secs(30);
            let is_clean = || census().0 <= threads_max && census().1 <= descriptors_max;
            while !is_clean() && Instant::now() < limit {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            let left = census();
            assert!(is_clean(), "{left:?} instead of {:?}", (threads_max, descriptors_max));
            assert!(left.0 < threads && left.1 < descriptors, "{left:?} of {:?}", (threads, descriptors));
        }
    });
}
