//! The codec of RPC-over-RDMA under hostile octets: what decodes encodes back to itself, views and values agree, and a chunk
//! that came back is accepted only as it was offered. Private data is looked for in the same octets.
#![no_main]

use bulkhead::wire::rpcrdma::chunk::{ReadChunk, chunk_bytes, octets_returned, pieces, returned};
use bulkhead::wire::rpcrdma::header::{Message, encode_error};
use bulkhead::wire::rpcrdma::private_data::{Agreed, PrivateData};
use libfuzzer_sys::fuzz_target;

#[path = "../seeds.rs"]
mod seeds;

fn plant() {
    let vectors = seeds::vectors(include_str!("../../tests/vectors/rpcrdma.json"));
    seeds::plant(vectors.iter().flat_map(seeds::octets_in));
}

fuzz_target!(init: plant(), |input: &[u8]| {
    match Message::decode(input) {
        Ok(Message::Transport(found)) => {
            let header = found.to_header();
            let again = [&header.encode()[..], found.payload].concat();
            assert_eq!(again, input);
            assert_eq!(header.encoded_bytes(), input.len() - found.payload.len());
            let _ = (found.message_type(), found.check_reply());
            for chunk in ReadChunk::gather(found.reads.segments()) {
                let all = pieces(&chunk.segments, 0, chunk.len).expect("the whole chunk");
                assert_eq!(chunk_bytes(&all), chunk.len);
                assert!(pieces(&chunk.segments, 1, chunk.len).is_none());
            }
            for chunk in found.writes.chunks().chain(found.reply) {
                let offered = chunk.to_vec();
                let half = chunk.len() / 2;
                let back = returned(&offered, half).expect("half of it fits");
                assert_eq!(octets_returned(&offered, back.into_iter()), Ok(half));
                assert!(returned(&offered, chunk.len() + 1).is_none());
            }
        }
        Ok(Message::Error { xid, vers, credit, error }) => {
            let again = encode_error(xid, vers, credit, error);
            assert_eq!(again, input[..again.len()]);
        }
        Err(_) => {}
    }
    let told = PrivateData::of_peer(input);
    assert_eq!(PrivateData::of_peer(&told.encode()), told);
    let agreed = Agreed::between(told, PrivateData::ABSENT);
    assert_eq!((agreed.call_inline_bytes, agreed.reply_inline_bytes), (1024, 1024));
});
