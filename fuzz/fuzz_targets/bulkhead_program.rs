//! Program `bulkhead` under hostile octets, as the server reads calls and as the client reads replies.
//!
//! Input: `[procedure: 1 | chunks: 1, at most 3 | (position / 4: 1, octets: 1) for each | arguments…]`. The same octets
//! are the results too. A call that is understood is written again and must be understood as the same, without chunks and
//! with them where they were.
#![no_main]

use bulkhead::programs::bulkhead::{Answer, Item, PROGRAM, Request};
use bulkhead::programs::rpc::{Arguments, Data, Reduced, Refusal, accept};
use bulkhead::wire::onc_rpc::{OpaqueAuth, Part, Payload, Xid};
use libfuzzer_sys::fuzz_target;

const XID: Xid = Xid(7);

/// The message with its items left out, and where they were.
fn reduced(payload: &Payload) -> (Vec<u8>, Vec<Reduced>) {
    let (mut stream, mut position, mut chunks) = (Vec::new(), 0, Vec::new());
    for part in payload.parts() {
        match part {
            Part::Bytes(bytes) => {
                stream.extend_from_slice(bytes);
                position += bytes.len() as u64;
            }
            Part::Item(item) => {
                chunks.push(Reduced { position, len: u64::from(item.len) });
                position += u64::from(item.len).next_multiple_of(4);
            }
        }
    }
    (stream, chunks)
}

fn item(data: Data) -> Item {
    Item { token: 0, len: data.len() }
}

fuzz_target!(|input: &[u8]| {
    let [procedure, count, rest @ ..] = input else { return };
    let count = usize::from(count % 4);
    let Some((chunks, words)) = rest.split_at_checked(2 * count) else { return };
    let (mut stream, _) = reduced(&Request::<Item>::Null.encode(XID, OpaqueAuth::NONE));
    stream[23] = *procedure % PROGRAM.procedures.len() as u8;
    stream.extend_from_slice(words);
    let mut position = 0;
    let chunks: Vec<_> = chunks
        .chunks_exact(2)
        .map(|chunk| {
            position += u64::from(chunk[0]) * 4;
            Reduced { position, len: u64::from(chunk[1]) }
        })
        .collect();
    let call = match accept(&[&PROGRAM], Arguments { stream: &stream, chunks: &chunks }) {
        Ok(call) => call,
        // The header is good, so a chunk lies in it.
        Err(refusal) => return assert_eq!(refusal, Refusal::ChunkError),
    };
    let Ok(request) = Request::parse(call) else { return };
    let payload = request.clone().map_data(item).encode(XID, OpaqueAuth::NONE);
    let (again, places) = reduced(&payload);
    let found = Request::parse(accept(&[&PROGRAM], Arguments { stream: &again, chunks: &places }).unwrap()).unwrap();
    assert_eq!(found.clone().map_data(item), request.clone().map_data(item));
    assert_eq!(found.procedure(), request.procedure());

    // The results of what was just asked, from a server that is as hostile.
    let expected = request.expectation();
    let (mut reply, _) = reduced(&Answer::<Item>::Null.encode(XID));
    reply.extend_from_slice(words);
    let written: Vec<_> = chunks.iter().map(|chunk| (chunk.len % 3 != 1).then_some(chunk.len)).collect();
    if let Ok((xid, answer)) = expected.decode(&reply, &written) {
        assert_eq!(xid, XID);
        let (again, places) = reduced(&answer.clone().map_data(item).encode(XID));
        let written: Vec<_> = places.iter().map(|place| Some(place.len)).collect();
        let (_, found) = expected.decode(&again, &written).unwrap();
        assert_eq!(found.map_data(item), answer.map_data(item));
    }
});
