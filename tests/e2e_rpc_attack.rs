//! The RPC door among peers that send what a message or private data was before octets of it were changed: whatever they say
//! costs at most their own connection, a client beside them never notices, and in the end nothing is held that was not held
//! before.
//!
//! It runs for a few seconds, from a seed that a failure prints. `BULKHEAD_ATTACK_SECONDS` and `BULKHEAD_ATTACK_SEED` say
//! otherwise.

use bulkhead::client::rpc::{Answer, Argument, RawCall};
use bulkhead::config::Config;
use bulkhead::programs::bulkhead::{Deletion, GetRequest, ListRequest, Request, StatRequest, Status, Touch};
use bulkhead::wire::rpcrdma::private_data::PrivateData;
use common::Pattern;
use nfs3_types::nfs3::*;
use rpc::raw::{Ask, Raw};
use rpc::{FABRICS, Served, draft, get, got, key, more, put, put_chunk, range, serve, stored};
use serde_json::Value;
use std::cell::Cell;
use std::rc::Rc;
use std::time::{Duration, Instant};

mod common;
mod nfs;
mod rpc;

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % bound.max(1)
    }

    /// One to four changes: an octet, a word that is often at the edge of something, a cut, octets more.
    fn mutate(&mut self, message: &mut Vec<u8>) {
        for _ in 0..=self.below(4) {
            let len = message.len();
            match self.below(8) {
                0 => message.truncate(self.below(len + 1)),
                1 => message.extend((0..self.below(40)).map(|_| 0)),
                2 | 3 if len > 0 => message[self.below(len)] ^= 1 << self.below(8),
                _ if len >= 4 => {
                    let edges = [0, 1, 2, 3, 4, 5, 8, 28, 44, 1024, 4096, 1 << 20, 1 << 30, u32::MAX - 3, u32::MAX];
                    let at = self.below(len / 4) * 4;
                    message[at..at + 4].copy_from_slice(&edges[self.below(edges.len())].to_be_bytes());
                }
                _ => {}
            }
        }
    }
}

/// A call of every kind.
fn calls(octets: &[u8]) -> Vec<Ask<'static>> {
    let keys = vec![key("good"), key("bad"), key("none")];
    let crc =
        GetRequest { crc32c: true, deadline_us: 500, ranges: vec![range("good", 5, 70_000), range("bad", 0, 99)] };
    let requests = [
        Request::Null,
        Request::Stat(StatRequest { until_miss: false, keys: keys.clone() }),
        Request::Touch(vec![Touch { key: key("bad"), ttl_s: 9 }]),
        Request::Delete(vec![Deletion { key: key("bad"), version: 3 }]),
        Request::List(ListRequest { prefix: b"", cookie: b"a", count: 9, bytes: 3000 }),
        Request::Pin(vec![key("bad")]),
        Request::Unpin(vec![key("bad")]),
        Request::PutDrop { draft: 3 },
    ];
    let mut asks: Vec<Ask<'static>> = requests.into_iter().map(Ask::new).collect();
    asks.extend([
        Ask { writes: vec![vec![70_000], vec![50, 49]], ..Ask::new(Request::Get(crc)) },
        Ask { writes: vec![vec![], vec![10]], reply: Some(vec![90_000]), ..get(vec![range("good", 0, 80_000)]) },
        get(vec![range("bad", 0, 100)]),
        put("bad", &octets[..100]),
        put_chunk("bad", &octets[..9_000]),
        draft("bad", 3, 30_000, &octets[..20_000], vec![7_000, 13_000]),
        more(3, 20_000, &octets[..10_000], vec![10_000], true),
        Ask { long: Some(30), ..Ask::new(Request::Stat(StatRequest { until_miss: true, keys })) },
    ]);
    asks
}

/// Calls of NFS on a file and a directory that nobody else needs, and of MOUNT.
fn nfs_calls(root: &nfs_fh3, file: &nfs_fh3, octets: &[u8]) -> Vec<Ask<'static>> {
    let plain = |call: RawCall| Ask::other(call.into_call().0.message);
    let write = |offset: u64, stable, data: &[u8]| {
        plain(nfs::write(file, offset, stable, Argument::Octets(data.to_vec()))).with(data)
    };
    let (unstable, stable) = (stable_how::UNSTABLE, stable_how::FILE_SYNC);
    let list = |bytes: u32| plain(nfs::readdirplus(root, (0, cookieverf3::default()), bytes, bytes.into()));
    vec![
        plain(nfs::null()),
        plain(nfs::mnt("/")),
        plain(nfs::getattr(file)),
        plain(nfs::fsinfo(root)),
        plain(nfs::lookup(root, "bad file")),
        plain(nfs::create(root, "bad file")),
        plain(nfs::create(root, "bad other")),
        plain(nfs::remove(root, "bad other")),
        plain(nfs::commit(file, 0, 0)),
        plain(nfs::symlink(root, "bad link", b"path")).with(b"path"),
        plain(nfs::readlink(file, 100)),
        plain(nfs::read(file, 5, 700)),
        Ask { writes: vec![vec![60_000, 10_000, 3]], ..plain(nfs::read(file, 5, 70_001)) },
        Ask { writes: vec![vec![]], reply: Some(vec![40_000, 40_000]), ..plain(nfs::read(file, 0, 70_000)) },
        write(3, stable, &octets[..300]),
        Ask { cuts: Some(vec![9_000]), ..write(1 << 20, unstable, &octets[..9_000]) },
        Ask { cuts: Some(vec![50_000, 20_001, 3]), ..write(0, stable, &octets[..70_001]) },
        Ask { long: Some(3_000), ..write(70_000, unstable, &octets[..9_000]) },
        list(900),
        Ask { reply: Some(vec![900, 900, 9_000]), ..list(9_000) },
    ]
}

async fn attack(
    served: &Served,
    mut random: Random,
    (root, file): &(nfs_fh3, nfs_fh3),
    (vectors, told): (&[Vec<u8>], &[Vec<u8>]),
    until: Instant,
    rounds: &Cell<u64>,
) {
    let octets = Pattern(99).octets(0, 100_000);
    while Instant::now() < until {
        let mut private_data = match random.below(4) {
            0 => told[random.below(told.len())].clone(),
            _ => PrivateData { remote_invalidate: true, send_bytes: 4096, receive_bytes: 4096 }.encode().to_vec(),
        };
        if random.below(2) > 0 {
            random.mutate(&mut private_data);
        }
        private_data.truncate(56);
        // Whatever it told, it receives 1,024 octets or more.
        let receive_bytes = 1024 << random.below(3);
        let dialled = Raw::dial_with(&*served.fabric, &served.address, &private_data, receive_bytes).await;
        let mut peer = dialled.expect("private data of any kind is admitted");
        // Until its end, or for a while.
        for _ in 0..200 {
            if peer.ended.is_some() || Instant::now() >= until {
                break;
            }
            let (mut message, pending) = if random.below(3) == 0 {
                (vectors[random.below(vectors.len())].clone(), None)
            } else {
                let mut asks = match random.below(2) {
                    0 => calls(&octets),
                    _ => nfs_calls(root, file, &octets),
                };
                let (message, pending) = peer.prepare(&asks.swap_remove(random.below(asks.len())));
                (message, Some(pending))
            };
            if random.below(8) > 0 {
                random.mutate(&mut message);
            }
            message.truncate(4096);
            peer.try_send(&message);
            rounds.set(rounds.get() + 1);
            for _ in 0..random.below(6) {
                peer.turn().await;
            }
            peer.messages.clear();
            drop(pending);
        }
    }
}

fn exporting(config: &mut Config) {
    config.listen.nfs_tcp = vec!["127.0.0.1:0".parse().unwrap()];
}

/// The root, and a file that is made in it.
async fn nfs_handles(peer: &mut Raw) -> (nfs_fh3, nfs_fh3) {
    let mut stream = async |call: RawCall| {
        let ask = Ask::other(call.into_call().0.message);
        peer.call_other(&ask).await.unwrap().stream
    };
    let mounted = Answer { stream: stream(nfs::mnt("/")).await, chunks: vec![] };
    let root = nfs::mounted(&mounted).unwrap();
    let created: CREATE3res = nfs::results_of(&stream(nfs::create(&root, "bad file")).await);
    (root, created.unwrap().obj.unwrap())
}

async fn serve_well(peer: &mut Raw, until: Instant) {
    let mut round = 0;
    while Instant::now() < until {
        round += 1;
        let octets = Pattern(round).octets(0, 200_000);
        stored(peer.call(&put_chunk("good", &octets)).await);
        let ask = Ask { writes: vec![vec![100_001, 99_999]], ..get(vec![range("good", 0, 200_000)]) };
        let found = got(peer.call(&ask).await);
        assert_eq!(found[0].0, Status::Ok);
        Pattern(round).check(0, &found[0].1, "beside an attack");
    }
    assert!(round > 0);
}

#[actix::test]
async fn peers_that_send_changed_messages_hurt_nobody() {
    let seconds = setting("BULKHEAD_ATTACK_SECONDS", 3);
    let seed = setting("BULKHEAD_ATTACK_SEED", std::process::id().into());
    println!("BULKHEAD_ATTACK_SEED={seed}");
    let file: Value = serde_json::from_str(include_str!("vectors/rpcrdma.json")).unwrap();
    let octet = |hex: &str, at: usize| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
    let octets = |hex: &str| -> Vec<u8> { (0..hex.len()).step_by(2).map(|at| octet(hex, at)).collect() };
    let of = |is_told: bool| -> Vec<Vec<u8>> {
        let all = file["vectors"].as_array().unwrap().iter();
        let of = all.filter(|vector| (vector["class"] == "cm_private") == is_told);
        of.filter_map(|vector| vector["hex"].as_str()).map(octets).collect()
    };
    let (vectors, told) = (of(false), of(true));
    assert!(vectors.len() > 40 && told.len() > 5, "{} messages, {} private data", vectors.len(), told.len());
    for fabric in FABRICS {
        let served = Rc::new(serve(fabric, "attack", exporting).await);
        let mut good = served.connect().await;
        let handles = nfs_handles(&mut good).await;
        let until = Instant::now() + Duration::from_secs(seconds);
        let rounds = Rc::new(Cell::new(0));
        let attackers: Vec<_> = (0..3)
            .map(|index| {
                let (served, rounds, vectors, told) = (served.clone(), rounds.clone(), vectors.clone(), told.clone());
                let handles = handles.clone();
                let random = Random(seed.wrapping_mul(31).wrapping_add(index));
                actix::spawn(async move { attack(&served, random, &handles, (&vectors, &told), until, &rounds).await })
            })
            .collect();
        serve_well(&mut good, until).await;
        for attacker in attackers {
            attacker.await.unwrap();
        }
        assert!(rounds.get() > 100, "{} messages", rounds.get());
        let executed = served.handle.metrics().rpc_calls.nfs.list();
        assert!(executed.len() > 5, "of NFS: {executed:?}");
        drop(good);
        served.until_quiet().await;
        let served = Rc::into_inner(served).expect("nobody else has it");
        served.shutdown().await;
    }
}
