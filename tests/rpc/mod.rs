//! A daemon in this process with an RPC door, and the calls that tests make of it.
#![allow(dead_code, reason = "every test file is a crate of its own and uses a part of this")]

pub mod raw;

use bulkhead::actors::{Handle, start};
use bulkhead::config::Config;
use bulkhead::fabric::iwarp::Iwarp;
use bulkhead::fabric::{Address, Fabric};
use bulkhead::programs::bulkhead::answer::Answer;
use bulkhead::programs::bulkhead::{GetRequest, Item, Key, Put, PutMore, RangeOf, Request, Stat, StatRequest, Status};
use bulkhead::store::Condition;
use raw::{Ask, Outcome, PATIENCE, Raw, Replied};
use std::path::Path;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// A daemon in this process with a door, and how to reach it.
pub struct Served {
    pub handle: Handle,
    pub fabric: Box<dyn Fabric>,
    pub address: Address,
    _dir: TempDir,
}

pub const FABRICS: [&str; 2] = ["loopback", "iwarp"];

fn config(dir: &Path, url: &str) -> Config {
    let mut config = Config::small(dir.join("pool"));
    config.lanes = 2;
    config.listen.rpc = vec![url.parse().unwrap()];
    config
}

pub async fn serve(fabric: &str, name: &str, change: impl FnOnce(&mut Config)) -> Served {
    let dir = tempfile::tempdir().unwrap();
    let url = match fabric {
        "loopback" => format!("rpc+loopback:{name}"),
        _ => "rpc+iwarp://127.0.0.1:0".to_owned(),
    };
    let mut config = config(dir.path(), &url);
    change(&mut config);
    let handle = start(config).await.unwrap();
    let address = handle.rpc_addresses()[0].clone();
    let fabric: Box<dyn Fabric> = match fabric {
        "loopback" => Box::new(bulkhead::actors::fabric_listener::loopback().clone()),
        _ => Box::new(Iwarp::default()),
    };
    Served { handle, fabric, address, _dir: dir }
}

impl Served {
    pub async fn connect(&self) -> Raw {
        Raw::connect(&*self.fabric, &self.address, 4096).await
    }

    /// The value of `name` as the memcache door tells it.
    pub async fn by_memcache(&self, name: &str) -> Option<Vec<u8>> {
        let mut peer = TcpStream::connect(self.handle.addresses()[0]).await.unwrap();
        peer.write_all(format!("get {name}\r\nquit\r\n").as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        peer.read_to_end(&mut answer).await.unwrap();
        if answer == b"END\r\n" {
            return None;
        }
        let line = answer.windows(2).position(|end| end == b"\r\n").unwrap();
        let text = String::from_utf8(answer[..line].to_vec()).unwrap();
        let len: usize = text.rsplit(' ').next().unwrap().parse().unwrap();
        assert_eq!(&answer[line + 2 + len..], b"\r\nEND\r\n");
        Some(answer[line + 2..line + 2 + len].to_vec())
    }

    /// Stores values of 1 MiB until `name` has no more in RAM than `head_bytes`.
    pub async fn push_out(&self, peer: &mut Raw, name: &str, ram_bytes: u64) {
        for round in 0..64_u32 {
            if stat(peer, name).await.ram_bytes <= ram_bytes {
                return;
            }
            let value = vec![round as u8; 1 << 20];
            self.handle.local().put(&round.to_le_bytes(), &value, 0, 0).await.unwrap();
        }
        panic!("{name} stays in RAM");
    }

    /// Everything that connections held is given back.
    pub async fn until_quiet(&self) {
        let limit = Instant::now() + PATIENCE;
        loop {
            let gauges = self.handle.store().gauges();
            let held = [
                self.handle.metrics().rpc.current.get(),
                self.handle.metrics().connections.current.get(),
                gauges.pins,
                gauges.pinned_bytes,
                gauges.claims,
                gauges.claimed_bytes,
            ];
            if held == [0; 6] {
                return;
            }
            assert!(Instant::now() < limit, "connections, pins, claims: {held:?}");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    pub async fn shutdown(self) {
        self.handle.shutdown().await;
    }
}

pub fn key(octets: &str) -> Key<'_> {
    Key::new(octets.as_bytes()).unwrap()
}

pub fn range(name: &str, offset: u64, count: u32) -> RangeOf<'_> {
    RangeOf { key: key(name), version: 0, offset, count }
}

pub fn get<'a>(ranges: Vec<RangeOf<'a>>) -> Ask<'a> {
    Ask::new(Request::Get(GetRequest { crc32c: false, deadline_us: 0, ranges }))
}

pub fn put<'a>(name: &'a str, value: &[u8]) -> Ask<'a> {
    let len = value.len() as u32;
    let put = Put {
        key: key(name),
        draft: 0,
        len: len.into(),
        flags: 7,
        ttl_s: 0,
        condition: Condition::Any,
        commit: true,
        crc32c: None,
        data: Item { token: 0, len },
    };
    Ask { data: value.to_vec(), ..Ask::new(Request::Put(put)) }
}

/// A PUT in a read chunk of one segment.
pub fn put_chunk<'a>(name: &'a str, value: &[u8]) -> Ask<'a> {
    Ask { cuts: Some(vec![value.len() as u32]), ..put(name, value) }
}

pub fn stored(outcome: Outcome) -> u64 {
    match outcome.replied().answer {
        Answer::Put(result) if result.status == Status::Ok => result.version,
        other => panic!("{other:?}"),
    }
}

/// Statuses and octets of a GET.
pub fn got(outcome: Outcome) -> Vec<(Status, Vec<u8>)> {
    let Replied { answer: Answer::Get(got), data, .. } = outcome.replied() else { panic!("no GET") };
    got.iter().map(|got| got.status).zip(data).collect()
}

/// The first range of a value that comes in several.
pub fn draft<'a>(name: &'a str, number: u64, len: u64, data: &[u8], cuts: Vec<u32>) -> Ask<'a> {
    let whole = put(name, data);
    let Request::Put(put) = whole.request else { unreachable!() };
    let request = Request::Put(Put { draft: number, len, commit: false, ..put });
    Ask { request, cuts: Some(cuts), ..Ask::new(Request::Null) }.with(data)
}

/// A further range.
pub fn more(number: u64, offset: u64, data: &[u8], cuts: Vec<u32>, commit: bool) -> Ask<'static> {
    let item = Item { token: 0, len: data.len() as u32 };
    let request = Request::PutMore(PutMore { draft: number, offset, commit, crc32c: None, data: item });
    Ask { cuts: Some(cuts), ..Ask::new(request) }.with(data)
}

pub async fn stat(peer: &mut Raw, name: &str) -> Stat {
    let request = Request::Stat(StatRequest { until_miss: false, keys: vec![key(name)] });
    match peer.call(&Ask::new(request)).await.replied().answer {
        Answer::Stat { stats, .. } => stats[0],
        other => panic!("{other:?}"),
    }
}

/// `len` cut into segments of these lengths, over and over.
pub fn cut(len: u32, lengths: &[u32]) -> Vec<u32> {
    let (mut rest, mut cuts) = (len, Vec::new());
    for &length in lengths.iter().cycle() {
        if rest == 0 {
            break;
        }
        cuts.push(length.min(rest));
        rest -= length.min(rest);
    }
    cuts
}
