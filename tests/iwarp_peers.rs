//! The iWARP fabric against peers that are not ours: scripted ones that speak octets over TCP, strange ones and hostile
//! ones. Whatever they do costs their own connection and nothing else.

#[path = "iwarp/faults.rs"]
mod faults;
#[path = "iwarp/operations.rs"]
mod operations;
#[path = "iwarp/peer.rs"]
mod peer;
#[path = "iwarp/startup.rs"]
mod startup;

use std::io::Write;
use std::time::Instant;

use bulkhead::fabric::iwarp::{Options, Segments};
use bulkhead::fabric::*;
use bulkhead::wire::iwarp::ddp::{Msn, Untagged};
use bulkhead::wire::iwarp::rdmap::{Operation, ReadRequest};

use peer::{Ours, PATIENCE, admitted, fpdu, listen, request, send_fpdu, write_fpdu};

/// Mutated traffic, a thousand connections on one lane: no panic, nothing left behind, a good one beside undisturbed.
#[test]
fn mutated_traffic_costs_its_own_connection() {
    let options = Options { crc: false, segments: Segments::UpTo(1442), ..Options::default() };
    let mut ours = Ours::new(options);
    let listener = listen(&ours);
    let (mut witness, witness_qp, _) = admitted(&mut ours, &*listener, &request(true, true));
    witness.say(&write_fpdu(1, 0, b"", true));
    let before = ours.lane.resources();
    let mut dice = 0x5eed_u64;
    let mut roll = |below: usize| {
        dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (dice >> 33) as usize % below
    };
    for round in 0..1000u32 {
        let crc = round % 2 == 0;
        let frame = request(crc, true);
        let (mut peer, qp, _) = admitted(&mut ours, &*listener, &frame);
        let region = qp.register(SharedSpan::new(4096).unwrap(), Access::BOTH.invalidatable()).unwrap();
        for buf in qp.allocate(4096, 4).unwrap() {
            qp.post_receive(buf).unwrap();
        }
        let to = region.remote();
        let read =
            ReadRequest { sink_stag: 9, sink_offset: 9, len: 4096, source_stag: to.key.0, source_offset: to.address };
        let control = Operation::ReadRequest.control();
        let header = Untagged { last: true, control, own: 0, queue: 1, msn: Msn(1), offset: 0 }.encode();
        let mut traffic = [
            write_fpdu(1, 0, b"", crc),
            write_fpdu(to.key.0, to.address, &[round as u8; 1000], crc),
            send_fpdu(1, b"message", crc),
            fpdu(&header, &read.encode(), crc),
            send_fpdu(2, &[7; 3000], crc),
        ]
        .concat();
        for _ in 0..1 + roll(3) {
            match roll(4) {
                0 => {
                    let at = roll(traffic.len());
                    traffic[at] ^= 1 << roll(8);
                }
                1 => traffic.truncate(roll(traffic.len()).max(1)),
                2 => {
                    let at = roll(traffic.len());
                    traffic.insert(at, roll(256) as u8);
                }
                _ => {
                    let at = roll(traffic.len());
                    traffic.remove(at);
                }
            }
            if traffic.is_empty() {
                traffic.push(0);
            }
        }
        for piece in traffic.chunks(1 + roll(2000)) {
            if (&peer.stream).write_all(piece).is_err() {
                break;
            }
            ours.turn();
        }
        let _ = peer.stream.shutdown(std::net::Shutdown::Write);
        peer.hear_to_the_end(&mut ours);
        drop(peer);
        ours.cause();
        drop((qp, region));
        let start = Instant::now();
        while ours.lane.resources() != before {
            ours.turn();
            assert!(start.elapsed() < PATIENCE, "left behind: {:?}", ours.lane.resources());
        }
        ours.events.clear();
    }
    let buf = witness_qp.allocate(1, 1).unwrap().remove(0);
    witness_qp.post_receive(buf).unwrap();
    witness.say(&send_fpdu(1, b"fine", true));
    assert_eq!(ours.completion().status, Status::Done);
}
