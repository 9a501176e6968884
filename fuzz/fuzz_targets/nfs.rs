//! NFS version 3 under hostile octets: the arguments of every procedure.
//!
//! Input: `[procedure: 1 | chunks: 1, at most 3 | (position / 4: 1, octets: 1) for each | arguments…]`. Without chunks,
//! what is understood is read by `nfs3_types` too, to the last octet, and what that writes again is understood as the same.
#![no_main]

use bulkhead::programs::nfs::{
    Bulk, Cookie, CookieVerifier, DirectoryPage, Entry, FileId, Name, NfsError, Node, PROGRAM, PROGRAM_NUMBER, Request,
    VERSION, procedure,
};
use bulkhead::programs::rpc::{Arguments, Data, Reduced, Refusal, accept};
use bulkhead::wire::codec::Writer;
use bulkhead::wire::onc_rpc::{CallHeader, OpaqueAuth, Xid};
use libfuzzer_sys::fuzz_target;
use nfs3_types::nfs3 as oracle;
use nfs3_types::xdr_codec::{Pack, Unpack};
use std::io::Cursor;

#[path = "../seeds.rs"]
mod seeds;

const XID: Xid = Xid(7);
const HEADER_BYTES: usize = 40;

fn call(procedure: u32, arguments: &[u8]) -> Vec<u8> {
    let (program, version, credential, verifier) = (PROGRAM_NUMBER, VERSION, OpaqueAuth::NONE, OpaqueAuth::NONE);
    let mut writer = Writer::new();
    CallHeader { xid: XID, program, version, procedure, credential, verifier }.write(&mut writer);
    assert_eq!(writer.len(), HEADER_BYTES);
    writer.encoded(arguments);
    writer.finish()
}

fn parse<'a>(stream: &'a [u8], chunks: &'a [Reduced]) -> Option<Request<'a>> {
    match accept(&[&PROGRAM], Arguments { stream, chunks }) {
        Ok(call) => Request::parse(call).ok(),
        Err(refusal) => {
            assert_eq!(refusal, Refusal::ChunkError, "the header is good, so a chunk lies in it");
            None
        }
    }
}

/// What another implementation writes of what it reads.
fn again<T: Pack + Unpack>(arguments: &[u8]) -> Vec<u8> {
    let mut input = Cursor::new(arguments);
    let (value, _) = T::unpack(&mut input).expect("what is understood here is there");
    assert_eq!(input.position(), arguments.len() as u64);
    let mut out = Vec::new();
    value.pack(&mut out).expect("what was read can be written");
    out
}

fn written_again(number: u32, arguments: &[u8]) -> Vec<u8> {
    match number {
        procedure::NULL => Vec::new(),
        procedure::GETATTR => again::<oracle::GETATTR3args>(arguments),
        procedure::SETATTR => again::<oracle::SETATTR3args>(arguments),
        procedure::LOOKUP => again::<oracle::LOOKUP3args<'static>>(arguments),
        procedure::ACCESS => again::<oracle::ACCESS3args>(arguments),
        procedure::READLINK => again::<oracle::READLINK3args>(arguments),
        procedure::READ => again::<oracle::READ3args>(arguments),
        procedure::WRITE => again::<oracle::WRITE3args<'static>>(arguments),
        procedure::CREATE => again::<oracle::CREATE3args<'static>>(arguments),
        procedure::MKDIR => again::<oracle::MKDIR3args<'static>>(arguments),
        procedure::SYMLINK => again::<oracle::SYMLINK3args<'static>>(arguments),
        procedure::MKNOD => again::<oracle::MKNOD3args<'static>>(arguments),
        procedure::REMOVE => again::<oracle::REMOVE3args<'static>>(arguments),
        procedure::RMDIR => again::<oracle::RMDIR3args<'static>>(arguments),
        procedure::RENAME => again::<oracle::RENAME3args<'static, 'static>>(arguments),
        procedure::LINK => again::<oracle::LINK3args<'static>>(arguments),
        procedure::READDIR => again::<oracle::READDIR3args>(arguments),
        procedure::READDIRPLUS => again::<oracle::READDIRPLUS3args>(arguments),
        procedure::FSSTAT => again::<oracle::FSSTAT3args>(arguments),
        procedure::FSINFO => again::<oracle::FSINFO3args>(arguments),
        procedure::PATHCONF => again::<oracle::PATHCONF3args>(arguments),
        _ => again::<oracle::COMMIT3args>(arguments),
    }
}

/// What goes for whatever was understood.
fn check(number: u32, request: &Request<'_>) {
    assert_eq!(request.procedure().number, number);
    let reply = request.refuse(NfsError::Jukebox);
    assert_eq!(reply.procedure().number, number);
    let bound = request.reply_bound();
    assert!(reply.encode(XID).stream_bytes() <= bound.reduced_bytes && bound.reduced_bytes <= bound.whole_bytes());
    let names: &[Name<'_>] = match request {
        Request::Lookup(place) | Request::Remove(place) | Request::RmDir(place) => &[place.name],
        Request::Rename(rename) => &[rename.from.name, rename.to.name],
        _ => &[],
    };
    for name in names.iter().filter_map(|name| name.component().ok()) {
        assert!((1..=255).contains(&name.len()) && !name.contains(&b'/'));
        let Ok(mut page) = DirectoryPage::new(304, None, CookieVerifier([0; 8])) else { panic!("it has room") };
        assert!(page.push(&Entry { fileid: FileId(1), name, cookie: Cookie(1) }), "and for any name");
    }
}

fn plant() {
    let handle = [&[0, 0, 0, 8][..], b"a handle"].concat();
    let name = [&[0, 0, 0, 5][..], b"named\0\0\0"].concat();
    let words = |words: &[u32]| words.iter().flat_map(|word| word.to_be_bytes()).collect::<Vec<u8>>();
    let place = [&handle[..], &name].concat();
    let set = words(&[1, 0o644, 1, 5, 0, 1, 0, 9, 1, 2, 7, 8]);
    let arguments = [
        (procedure::GETATTR, handle.clone()),
        (procedure::SETATTR, [&handle[..], &set, &words(&[1, 3, 4])].concat()),
        (procedure::LOOKUP, place.clone()),
        (procedure::READ, [&handle[..], &words(&[0, 1 << 20, 4096])].concat()),
        (procedure::WRITE, [&handle[..], &words(&[0, 9, 5, 2]), &name].concat()),
        (procedure::CREATE, [&place[..], &words(&[1]), &set].concat()),
        (procedure::CREATE, [&place[..], &words(&[2, 7, 7])].concat()),
        (procedure::SYMLINK, [&place[..], &set, &name].concat()),
        (procedure::MKNOD, [&place[..], &words(&[4]), &set, &words(&[1, 3])].concat()),
        (procedure::RENAME, place.repeat(2)),
        (procedure::READDIRPLUS, [&handle[..], &words(&[0, 3, 0, 0, 512, 4096])].concat()),
        (procedure::COMMIT, [&handle[..], &words(&[0, 0, 0])].concat()),
    ];
    seeds::plant(arguments.into_iter().map(|(number, arguments)| [&[number as u8, 0][..], &arguments].concat()));
}

fuzz_target!(init: plant(), |input: &[u8]| {
    let [number, count, rest @ ..] = input else { return };
    let number = u32::from(*number) % PROGRAM.procedures.len() as u32;
    let Some((chunks, arguments)) = rest.split_at_checked(2 * usize::from(count % 4)) else { return };
    let mut position = 0;
    let chunks: Vec<_> = chunks
        .chunks_exact(2)
        .map(|chunk| {
            position += u64::from(chunk[0]) * 4;
            Reduced { position, len: u64::from(chunk[1]) }
        })
        .collect();
    let stream = call(number, arguments);
    let bulk = Bulk::find(&stream);
    for cut in [stream.len() / 2, stream.len().saturating_sub(4)] {
        let found = Bulk::find(&stream[..cut]);
        assert!(found == bulk || found == Bulk::NeedMore, "{found:?} becomes {bulk:?}");
    }
    let Some(request) = parse(&stream, &chunks) else { return };
    check(number, &request);
    if !chunks.is_empty() {
        return;
    }
    match &request {
        Request::Write(write) => {
            let Data::Inline(range) = &write.data else { panic!("there are no chunks") };
            assert_eq!(bulk, Bulk::Data { position: range.start, len: range.len() as u32 });
        }
        // The other implementation reads this, but does not write it.
        Request::MkNod(node) if matches!(node.what, Node::Other(_)) => return,
        _ => assert_eq!(bulk, Bulk::None),
    }
    let stream = call(number, &written_again(number, arguments));
    assert_eq!(parse(&stream, &[]), Some(request));
});
