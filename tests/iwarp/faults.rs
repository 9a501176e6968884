//! Errors and the end, in both roles.

use bulkhead::fabric::iwarp::Options;
use bulkhead::fabric::*;
use bulkhead::wire::iwarp::ddp::{Msn, Tagged, Untagged};
use bulkhead::wire::iwarp::rdmap::{Operation, ReadRequest, Reason, Terminate};
use bulkhead::wire::iwarp::stream::{Kind, Receiver, Sender};

use crate::peer::*;

#[test]
fn protocol_errors_are_answered_with_a_terminate_and_end_that_connection_alone() {
    let mut ours = Ours::new(Options::default());
    let listener = listen(&ours);
    let (mut witness, witness_qp, _) = admitted(&mut ours, &*listener, &request(true, true));
    witness.say(&write_fpdu(1, 0, b"", true));
    let read_request = |stag: u32, len: u32, msn: u32| {
        let request = ReadRequest { sink_stag: 9, sink_offset: 9, len, source_stag: stag, source_offset: 1 << 33 };
        let control = Operation::ReadRequest.control();
        let header = Untagged { last: true, control, own: 0, queue: 1, msn: Msn(msn), offset: 0 };
        fpdu(&header.encode(), &request.encode(), true)
    };
    let send = |msn, last, offset, control| {
        let header = Untagged { last, control, own: 77, queue: 0, msn: Msn(msn), offset };
        fpdu(&header.encode(), b"abcd", true)
    };
    let mut bad_crc = write_fpdu(1, 0, b"abcd", true);
    bad_crc[17] ^= 1;
    let responded = Tagged { last: true, control: Operation::ReadResponse.control(), stag: 1, offset: 0 }.encode();
    let cases = [
        (bad_crc, Reason::CRC),
        (vec![0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], Reason::LENGTH),
        (write_fpdu(77, 1 << 33, b"abcd", true), Reason::TAGGED_STAG),
        (fpdu(&responded, b"", true), Reason::TAGGED_STAG),
        (read_request(77, 8, 1), Reason::READ_STAG),
        (read_request(77, 0, 2), Reason::MSN),
        (send(1, true, 0, Operation::Send.control()), Reason::NO_BUFFER),
        (send(1, true, 4, Operation::Send.control()), Reason::MESSAGE_OFFSET),
        (send(1, true, 0, 0x48), Reason::OPERATION),
        (send(1, true, 0, 0x83), Reason::RDMAP_VERSION),
    ];
    for (octets, reason) in cases {
        let (mut peer, qp, reply) = admitted(&mut ours, &*listener, &request(true, true));
        let word = reply.word.expect("answered in kind");
        assert!(word.peer_to_peer && word.rtr_write && !word.rtr_read && !word.rtr_send);
        peer.say(&[write_fpdu(1, 0, b"", true), octets].concat());
        let said = peer.hear_to_the_end(&mut ours);
        let mut receiver = Receiver::new(true, 1);
        let (segment, len) = receiver.next(&said).unwrap().expect("a whole frame");
        let Kind::Terminate(head) = segment.kind else { panic!("{segment:?}") };
        assert_eq!((head.readings().0, len), (reason, said.len()));
        let terminate = Terminate::decode(segment.payload).unwrap();
        assert_eq!(terminate.culprit.is_some(), reason.layer < 2);
        drop(peer);
        assert!(matches!(ours.cause(), Cause::PeerFault(_)));
        drop(qp);
    }
    let buf = witness_qp.allocate(1, 1).unwrap().remove(0);
    witness_qp.post_receive(buf).unwrap();
    witness.say(&send_fpdu(1, b"fine", true));
    assert_eq!(ours.completion().status, Status::Done);
    drop((witness, witness_qp));
    ours.settle();
}

#[test]
fn a_terminate_of_the_peer_and_a_loss_inside_a_frame_are_told_apart_from_a_goodbye() {
    let terminate = Terminate::bare(Reason::CRC);
    let mut octets = Vec::new();
    Sender::new(true, 1 << 10).put_terminate(&mut octets, &terminate);
    let half = write_fpdu(1, 0, b"", true)[..9].to_vec();
    for (octets, expected) in [(octets, "refused"), (half, "lost"), (Vec::new(), "peer")] {
        let mut ours = Ours::new(Options::default());
        let listener = listen(&ours);
        let (mut peer, _qp, _) = admitted(&mut ours, &*listener, &request(true, true));
        peer.say(&[write_fpdu(1, 0, b"", true), octets].concat());
        peer.stream.shutdown(std::net::Shutdown::Write).unwrap();
        let cause = ours.cause();
        let found = match cause {
            Cause::RefusedByPeer(_) => "refused",
            Cause::Lost(_) => "lost",
            Cause::Peer => "peer",
            _ => "another",
        };
        assert_eq!(found, expected, "{cause:?}");
        ours.settle();
    }
}
