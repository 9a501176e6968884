//! What rpcbind answers, with state: whatever it says, nobody else's entry is ever asked away.
//!
//! Input: `[task: 1 octet | { length: 1 octet | octets of the stream }*]`; before each part the session says what it has to say.
#![no_main]

use bulkhead::programs::rpcbind::{
    Entry, PROGRAM_NUMBER, RECORD_LIMITS, Registered, Service, Session, Task, Transport, VERSION_MAX, VERSION_MIN,
    procedure,
};
use bulkhead::wire::codec::{Reader, Writer};
use bulkhead::wire::onc_rpc::record::{MARK_BYTES, RecordReader, marked};
use bulkhead::wire::onc_rpc::{AcceptStatus, CallHeader, Reply, ReplyHeader, Versions, Xid};
use libfuzzer_sys::fuzz_target;

#[path = "../seeds.rs"]
mod seeds;

fn ours() -> Vec<Service> {
    let addresses = ["127.0.0.1:20049", "[::1]:20049"].map(|address| address.parse().expect("an address"));
    addresses.iter().map(|address| Service::new(7, 1, Transport::Rdma, address)).collect()
}

fn part(xid: u32, status: AcceptStatus, results: impl FnOnce(&mut Writer)) -> Vec<u8> {
    let mut writer = Writer::new();
    ReplyHeader { xid: Xid(xid), reply: Reply::accepted(status) }.write(&mut writer);
    results(&mut writer);
    let record = marked(&writer.finish());
    // Longer ones come in several parts.
    record.chunks(255).flat_map(|part| [&[part.len() as u8][..], part].concat()).collect()
}

/// A list with these addresses in the place of our first service, and how the others are answered.
fn conversation(task: u8, addresses: &[&str], changes: u32) -> Vec<u8> {
    let list = |xid| {
        part(xid, AcceptStatus::Success, |writer| {
            writer.list(addresses, |writer, address| {
                let (netid, owner) = (&b"rdma"[..], &b"0"[..]);
                Entry { program: 7, version: 1, netid, address: address.as_bytes(), owner }.write(writer);
            });
        })
    };
    let yes = |xid| part(xid, AcceptStatus::Success, |writer| writer.bool(true));
    let changes = (1..=changes).flat_map(yes);
    [task].into_iter().chain(list(0)).chain(changes).chain(list(3)).collect()
}

fn plant() {
    let mismatch = AcceptStatus::ProgMismatch(Versions { low: 2, high: VERSION_MIN });
    let old =
        [vec![1], part(0, mismatch, |_| {}), part(1, AcceptStatus::Success, |writer| writer.bool(false))].concat();
    let (here, there) = ("127.0.0.1.78.81", "127.0.0.1.78.82");
    let lists: [&[&str]; 4] = [&[], &[here], &[there], &[here, there]];
    let all = lists.iter().flat_map(|list| (0..3).map(|task| conversation(task, list, 3)));
    seeds::plant(all.chain([old]));
}

fuzz_target!(init: plant(), |octets: &[u8]| {
    let Some((&first, mut rest)) = octets.split_first() else { return };
    let task = [Task::Look, Task::Register, Task::Withdraw][usize::from(first) % 3];
    let ours = ours();
    let services = ours.iter().map(|service| Registered { service: service.clone(), owner: None }).collect();
    let mut session = Session::new(task, services, "1000", Xid(0));
    while let Some((&len, behind)) = rest.split_first() {
        let (part, behind) = behind.split_at(behind.len().min(usize::from(len)));
        rest = behind;
        if let Some(call) = session.poll_transmit() {
            assert!(!session.is_done() && session.poll_transmit().is_none());
            let mut records = RecordReader::new(RECORD_LIMITS);
            let message = records.take(&mut &call[..]).expect("it fits").expect("it is whole");
            assert_eq!(message.len() + MARK_BYTES, call.len());
            let mut reader = Reader::new(&message);
            let header = CallHeader::read(&mut reader).expect("a call");
            assert!(header.program == PROGRAM_NUMBER && [VERSION_MIN, VERSION_MAX].contains(&header.version));
            if header.procedure != procedure::DUMP {
                assert!(task != Task::Look && (header.procedure != procedure::SET || task == Task::Register));
                let entry = Entry::read(&mut reader).expect("an entry");
                assert!(ours.iter().any(|ours| ours.address.as_bytes() == entry.address));
            }
            reader.finish().expect("nothing behind it");
        }
        if session.handle_octets(part).is_err() {
            break;
        }
    }
    let left = session.left_behind();
    assert!(left.len() <= ours.len() && (task == Task::Register || left.is_empty()));
});
