//! The iWARP decoders under hostile octets: start-up frames, and a stream of FPDUs with CRCs off, so that the fuzzer gets
//! past them. However the stream is cut, the same segments come out and the same fault ends it.
//!
//! Input: `[choices: 1 octet | stream…]`.
#![no_main]

use bulkhead::wire::iwarp::mpa::{FPDU_BYTES_MAX, Frame, FrameKind};
use bulkhead::wire::iwarp::rdmap::Terminate;
use bulkhead::wire::iwarp::stream::{Kind, PeerError, Receiver};
use libfuzzer_sys::fuzz_target;

/// What a stream comes to when its octets arrive in steps of `step`.
fn drive(stream: &[u8], crc: bool, step: usize) -> (Vec<(Kind, Vec<u8>)>, Option<PeerError>, usize) {
    let mut receiver = Receiver::new(crc, 4);
    receiver.await_read(1, 0, 64);
    receiver.await_read(2, u64::MAX - 3, 8);
    let (mut start, mut end, mut segments) = (0, 0, Vec::new());
    loop {
        match receiver.next(&stream[start..end]) {
            Ok(Some((segment, len))) => {
                assert!(len <= end - start);
                start += len;
                if let Kind::ReadRequest(_) = segment.kind {
                    if segments.len() % 2 == 0 {
                        receiver.response_sent();
                    }
                }
                segments.push((segment.kind, segment.payload.to_vec()));
            }
            Ok(None) if end == stream.len() => return (segments, None, start),
            Ok(None) => {
                assert!(end - start < FPDU_BYTES_MAX, "more octets are wanted than a frame may have");
                end = (end + step).min(stream.len());
            }
            Err(fault) => {
                let octets = fault.terminate.encode();
                assert_eq!(Terminate::decode(&octets).map(|again| again.reason), Some(fault.terminate.reason));
                return (segments, Some(fault.error), start);
            }
        }
    }
}

fuzz_target!(|input: &[u8]| {
    let Some((choices, stream)) = input.split_first() else { return };
    for kind in [FrameKind::Request, FrameKind::Reply] {
        if let Ok(Some((frame, len))) = Frame::decode(kind, stream) {
            let again = Frame::decode(kind, &frame.encode(kind)).expect("ours").expect("whole");
            assert_eq!(again, (frame, len));
        }
    }
    let crc = choices & 1 != 0;
    let whole = drive(stream, crc, stream.len().max(1));
    assert_eq!(drive(stream, crc, 1), whole);
    assert_eq!(drive(stream, crc, usize::from(choices >> 1) + 1), whole);
});
