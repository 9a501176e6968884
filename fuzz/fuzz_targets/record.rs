//! Record marking under hostile octets: the same records and the same fault however the stream is cut.
//!
//! Input: `[octets at most: 1 | fragments at most: 1 | cut every: 1 | taken at most: 1 | stream…]`.
#![no_main]

use bulkhead::wire::onc_rpc::record::{Piece, RecordDecoder, RecordFault, RecordLimits};
use libfuzzer_sys::fuzz_target;

#[path = "../seeds.rs"]
mod seeds;

type Decoded = (Vec<Vec<u8>>, Vec<u8>, Result<(), RecordFault>);

fn decode(stream: &[u8], limits: RecordLimits, cut: usize, len_max: usize) -> Decoded {
    let mut decoder = RecordDecoder::new(limits);
    let (mut records, mut record) = (Vec::new(), Vec::new());
    for mut part in stream.chunks(cut) {
        loop {
            match decoder.next(&mut part, len_max) {
                Ok(Some(Piece::Octets(octets))) => {
                    assert!(!octets.is_empty() && octets.len() <= len_max);
                    record.extend_from_slice(octets);
                    assert!(record.len() <= limits.bytes_max as usize);
                    assert!(!decoder.is_between_records());
                }
                Ok(Some(Piece::End)) => {
                    assert!(decoder.is_between_records());
                    records.push(std::mem::take(&mut record));
                }
                Ok(None) => break assert!(part.is_empty()),
                Err(fault) => return (records, record, Err(fault)),
            }
        }
    }
    (records, record, Ok(()))
}

fn plant() {
    seeds::plant([
        b"\x40\x04\x03\x09\x00\x00\x00\x02ab\x00\x00\x00\x00\x80\x00\x00\x01c\x80\x00\x00\x00".to_vec(),
        b"\x03\x04\x03\x09\x80\x00\x00\x04abcd".to_vec(),
    ]);
}

fuzz_target!(init: plant(), |input: &[u8]| {
    let [bytes_max, fragments_max, cut, len_max, stream @ ..] = input else { return };
    let limits = RecordLimits { bytes_max: (*bytes_max).into(), fragments_max: (*fragments_max).into() };
    let whole = decode(stream, limits, usize::MAX, usize::MAX);
    let (cut, len_max) = (usize::from(*cut) + 1, usize::from(*len_max) + 1);
    assert_eq!(decode(stream, limits, cut, len_max), whole);
    assert_eq!(decode(stream, limits, 1, usize::MAX), whole);
});
