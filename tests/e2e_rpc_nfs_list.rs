//! What every client of the file system must be able to do, over RPC-over-RDMA: a client of another hand speaks to a bridge over
//! TCP, which makes each of its calls with our requester, data in chunks where they do not fit.

use bulkhead::client::ServerUrl;
use bulkhead::client::rpc::{Argument, RawCall, RpcClient, RpcOptions};
use bulkhead::programs::nfs::{Bulk, PROGRAM, PROGRAM_NUMBER, Request};
use bulkhead::programs::rpc::{Arguments, accept};
use bulkhead::programs::{mount, nfs};
use bulkhead::wire::codec::Reader;
use bulkhead::wire::onc_rpc::CallHeader;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::num::NonZeroU32;
use std::thread;
use std::time::{Duration, Instant};

mod common;
use common::Daemon;

#[path = "native/doors.rs"]
mod doors;
use doors::door_of;

#[path = "nfs_load/mod.rs"]
mod load;
use load::{Counts, Files};

#[path = "nfs_client/mod.rs"]
mod client;
use client::Peer;
mod rig;

/// The last fragment of a record has this bit in its mark (RFC 5531 §11).
const LAST: u32 = 1 << 31;

/// What a connection to the bridge is served over: its inline threshold, octets of a segment.
const WAYS: [(u32, u32); 2] = [(4096, 1 << 30), (1024, 60_001)];

/// Listens until the process ends; each connection is one to the door.
fn bridge(door: ServerUrl) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for (socket, way) in listener.incoming().zip(WAYS.into_iter().cycle()) {
            let (socket, door) = (socket.unwrap(), door.clone());
            thread::spawn(move || forward(socket, door, way));
        }
    });
    address
}

fn read_record(socket: &mut TcpStream) -> Option<Vec<u8>> {
    let mut record = Vec::new();
    loop {
        let mut mark = [0; 4];
        socket.read_exact(&mut mark).ok()?;
        let mark = u32::from_be_bytes(mark);
        let start = record.len();
        record.resize(start + (mark & !LAST) as usize, 0);
        socket.read_exact(&mut record[start..]).ok()?;
        if mark & LAST != 0 {
            return Some(record);
        }
    }
}

fn forward(mut socket: TcpStream, door: ServerUrl, (inline_bytes, segment_bytes_max): (u32, u32)) {
    let segment_bytes_max = NonZeroU32::new(segment_bytes_max).unwrap();
    let options = RpcOptions { inline_bytes, segment_bytes_max, ..RpcOptions::default() };
    let mut client = RpcClient::connect(door, options).unwrap();
    socket.set_nodelay(true).unwrap();
    while let Some(message) = read_record(&mut socket) {
        let answer = client.call(call_of(&message)).unwrap();
        let mut reply = answer.stream;
        reply[..4].copy_from_slice(&message[..4]);
        // The data of a READ is the last of its results.
        for (span, len) in answer.chunks {
            let start = reply.len();
            reply.resize(start + len as usize, 0);
            span.copy_out(0, &mut reply[start..]);
            reply.resize(reply.len().next_multiple_of(4), 0);
        }
        let mark = (reply.len() as u32 | LAST).to_be_bytes();
        // A peer that has gone is not there to be told.
        if socket.write_all(&[&mark[..], &reply].concat()).is_err() {
            return;
        }
    }
}

/// The same call, with the data of a WRITE as what may travel in a chunk, and room for the results.
fn call_of(message: &[u8]) -> RawCall {
    let mut reader = Reader::new(message);
    let CallHeader { program, version, procedure, credential, .. } = CallHeader::read(&mut reader).unwrap();
    let start = reader.offset();
    let mut call = RawCall::new(program, version, procedure, credential);
    match Bulk::find(message) {
        Bulk::Data { position, len } => {
            call.words().encoded(&message[start..position - 4]);
            call.item(Argument::Octets(message[position..position + len as usize].to_vec()));
        }
        _ => call.words().encoded(&message[start..]),
    }
    let accepted = accept(&[&PROGRAM, &mount::PROGRAM], Arguments { stream: message, chunks: &[] }).unwrap();
    let bound = match program {
        PROGRAM_NUMBER => Request::parse(accepted).unwrap().reply_bound(),
        _ => mount::Request::parse(accepted).unwrap().reply_bound(),
    };
    call.reply_bytes_max(bound.reduced_bytes);
    if let Some(len) = bound.item_bytes {
        call.result(len, None);
    }
    call
}

#[test]
fn a_client_of_another_hand_passes_the_list_over_a_bridge() {
    let daemon = Daemon::builder()
        .flags(&["--nfs-tcp", "127.0.0.1:0", "--rpc", "rpc+iwarp://127.0.0.1:0"])
        .memory("32MiB")
        .pool("2GiB")
        .start();
    let peer = Peer::mount(bridge(door_of(&daemon, "rpc+")));
    load::run(&peer, &Counts { copied_bytes_max: 64 << 20, ..Counts::FULL }, |step| eprintln!("{step}"));
    assert_eq!(peer.list("").unwrap().len(), 0, "nothing is left");
    let calls = |procedure: &str| daemon.metric(&format!("bulkhead_nfs_calls_total{{procedure=\"{procedure}\"}}"));
    assert!(calls("READ") > Some(100.0) && calls("WRITE") > Some(100.0), "{:?}, {:?}", calls("READ"), calls("WRITE"));
    assert_eq!(daemon.metric("bulkhead_nfs_connection_accepted_total"), Some(0.0), "nothing of it came over TCP");
    assert!(nfs::TRANSFER_BYTES_MAX as usize == client::TRANSFER_BYTES);
    drop(peer);
    let limit = Instant::now() + Duration::from_secs(60);
    while daemon.metric("bulkhead_rpc_connection_current") != Some(0.0) {
        assert!(Instant::now() < limit, "connections are left");
        thread::sleep(Duration::from_millis(20));
    }
    // Where entries were that are gone is remembered for a while, for whoever lists their directory.
    daemon.assert_nothing_leaks_but(&["bulkhead_store_index_bytes"]);
}
