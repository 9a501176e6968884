//! Open connections that ask for nothing: `idle URL COUNT` connects, asks each for the version, prints `open`, and holds
//! them until its standard input ends. `compare.py idle` looks at the daemon meanwhile. Without a URL, two connections to a
//! daemon within the process.

#[expect(dead_code, reason = "of what get and set share, it needs the daemon alone")]
mod loopback;

use std::io;

use bulkhead::client::{AnyClient, Options, ServerUrl};

fn open(url: &ServerUrl, count: usize) -> Vec<AnyClient> {
    let connect = |_| {
        let mut client = AnyClient::connect(url.clone(), Options::default()).expect("a connection");
        client.version().expect("a version");
        client
    };
    (0..count).map(connect).collect()
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with("--")).collect();
    match arguments.as_slice() {
        [url, count] => {
            let (url, count) = (url.parse().expect("the URL of a server"), count.parse().expect("a number"));
            let held = open(&url, count);
            println!("open");
            io::copy(&mut io::stdin(), &mut io::sink()).expect("standard input");
            drop(held);
        }
        _ => loopback::with_daemon(&loopback::Plan::of_arguments(), |client| {
            assert_eq!(open(client.url(), 2).len(), 2);
        }),
    }
}
