//! What is said to rpcbind over one stream: one call at a time, and what its answers mean.
//!
//! ```text
//! Look       DUMP ─▶ done                                      would Register be possible?
//! Register   DUMP ─▶ { UNSET of what is stale, SET }* ─▶ DUMP ─▶ done: with the owner that rpcbind wrote down
//! Withdraw   DUMP ─▶ UNSET* of what is still ours ─▶ done
//!            any call answered PROG_MISMATCH with version 3 is made again in that; anything unexpected: a [`Fault`]
//! ```
//!
//! **Whose is an entry?** rpcbind has one for each program, version and netid, and answers false to a SET that would change it.
//! An entry with the very address that we listen at can be nobody else's: a daemon that was killed left it, and it is made
//! anew. One with another address may lead to somebody who lives, so it is never touched. On the way out only what has our
//! address and the owner that was written down for us is taken back: a superuser's UNSET would take anybody's.

use super::{Entry, PROGRAM_NUMBER, RECORD_LIMITS, Service, VERSION_MAX, VERSION_MIN, procedure, read_dump};
use crate::wire::codec::{Reader, Writer, XdrError};
use crate::wire::onc_rpc::record::{RecordFault, RecordReader, marked};
use crate::wire::onc_rpc::{AcceptStatus, CallHeader, Denial, OpaqueAuth, Reply, ReplyHeader, Versions, Xid};
use std::collections::VecDeque;
use thiserror::Error;

/// Why it was not done.
#[derive(Clone, Debug, Eq, Error, PartialEq)]
#[non_exhaustive]
pub enum Fault {
    #[error("its answer is none: {0}")]
    Record(#[from] RecordFault),
    #[error("its answer is none: {0}")]
    Malformed(#[from] XdrError),
    #[error("it answers xid {found:#x}, and xid {wanted:#x} was asked")]
    OtherXid { wanted: u32, found: u32 },
    #[error("it says something that was not asked for")]
    Unasked,
    #[error("it speaks versions {} to {}, and versions {VERSION_MIN} and {VERSION_MAX} have netids", .0.low, .0.high)]
    Versions(Versions),
    #[error("it does not let this process ask: {0:?}")]
    Denied(Denial),
    #[error("it does not do what it is asked: {0:?}")]
    NotDone(AcceptStatus),
    #[error(
        "it has {} already, registered by {owner}, and one address is all it keeps: another daemon has it, or one that was \
         killed left it there and `rpcinfo -d {} {}` takes it away", .there, .there.program, .there.version
    )]
    Taken { there: Service, owner: String },
    #[error("{service} is there, registered by {owner}, and it does not let this process take it away")]
    NotOurs { service: Service, owner: String },
    #[error("it refuses {0}")]
    Refused(Service),
    #[error("{0} was registered, and is not there")]
    Vanished(Service),
}

/// What is to be done.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Task {
    /// Ask whether [`Task::Register`] would find its places free. Nothing is changed.
    Look,
    Register,
    Withdraw,
}

/// A service, and whom rpcbind wrote down for it: `None` if that was never learnt.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Registered {
    pub service: Service,
    pub owner: Option<Vec<u8>>,
}

impl Registered {
    /// Whether `entry` is it.
    fn is(&self, entry: &Entry<'_>) -> bool {
        self.service.is_at(entry)
            && self.service.address.as_bytes() == entry.address
            && self.owner.as_ref().is_none_or(|owner| owner == entry.owner)
    }
}

#[derive(Clone, Debug)]
enum Change {
    /// With the owner it has there.
    Unset(Service, String),
    Set(Service),
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Step {
    Look,
    /// The first of the changes.
    Change,
    Check,
    Done,
}

/// One conversation.
#[derive(Clone, Debug)]
pub struct Session {
    task: Task,
    /// Who we say we are. rpcbind writes down what it knows of the caller instead.
    owner: String,
    services: Vec<Registered>,
    step: Step,
    changes: VecDeque<Change>,
    /// What may have been registered by us so far.
    set: Vec<Service>,
    /// The first that could not be taken back.
    kept: Option<Fault>,
    version: u32,
    xid: u32,
    /// A call is out.
    is_waiting: bool,
    records: RecordReader,
}

impl Session {
    /// `owner` is this process's user by its number, as other clients name themselves. The xids begin with `xid`.
    pub fn new(task: Task, services: Vec<Registered>, owner: impl Into<String>, xid: Xid) -> Self {
        Self {
            task,
            owner: owner.into(),
            services,
            step: Step::Look,
            changes: VecDeque::new(),
            set: Vec::new(),
            kept: None,
            version: VERSION_MAX,
            xid: xid.0,
            is_waiting: false,
            records: RecordReader::new(RECORD_LIMITS),
        }
    }

    pub fn is_done(&self) -> bool {
        self.step == Step::Done
    }

    /// The services, with owners once [`Task::Register`] is done.
    pub fn services(&self) -> &[Registered] {
        &self.services
    }

    /// What a session that did not come to its end may have registered, answered or not.
    pub fn left_behind(&self) -> Vec<Registered> {
        self.set.iter().map(|service| Registered { service: service.clone(), owner: None }).collect()
    }

    /// The record of the next call, or `None` while one is out and when all is done.
    pub fn poll_transmit(&mut self) -> Option<Vec<u8>> {
        if self.is_waiting || self.is_done() {
            return None;
        }
        let (procedure, entry) = match (self.step, self.changes.front()) {
            (Step::Change, Some(Change::Unset(service, _))) => (procedure::UNSET, Some(service.entry(&self.owner))),
            (Step::Change, Some(Change::Set(service))) => {
                // Once, though it may be asked in two versions.
                if !self.set.contains(service) {
                    self.set.push(service.clone());
                }
                (procedure::SET, Some(service.entry(&self.owner)))
            }
            _ => (procedure::DUMP, None),
        };
        let call = CallHeader {
            xid: Xid(self.xid),
            program: PROGRAM_NUMBER,
            version: self.version,
            procedure,
            credential: OpaqueAuth::NONE,
            verifier: OpaqueAuth::NONE,
        };
        let mut writer = Writer::new();
        call.write(&mut writer);
        if let Some(entry) = entry {
            entry.write(&mut writer);
        }
        self.is_waiting = true;
        Some(marked(&writer.finish()))
    }

    /// Octets that came, cut anywhere.
    ///
    /// # Errors
    /// [`Fault`]; the conversation is over.
    pub fn handle_octets(&mut self, mut octets: &[u8]) -> Result<(), Fault> {
        while let Some(message) = self.records.take(&mut octets)? {
            self.handle_reply(&message)?;
        }
        Ok(())
    }

    fn handle_reply(&mut self, message: &[u8]) -> Result<(), Fault> {
        if !self.is_waiting {
            return Err(Fault::Unasked);
        }
        let mut reader = Reader::new(message);
        let ReplyHeader { xid, reply } = ReplyHeader::read(&mut reader)?;
        if xid != Xid(self.xid) {
            return Err(Fault::OtherXid { wanted: self.xid, found: xid.0 });
        }
        self.is_waiting = false;
        self.xid = self.xid.wrapping_add(1);
        match reply {
            Reply::Denied(denial) => Err(Fault::Denied(denial)),
            Reply::Accepted { status: AcceptStatus::ProgMismatch(versions), .. } => {
                let is_spoken = (versions.low..=versions.high).contains(&VERSION_MIN);
                if self.version == VERSION_MIN || !is_spoken {
                    return Err(Fault::Versions(versions));
                }
                self.version = VERSION_MIN;
                Ok(())
            }
            Reply::Accepted { status: AcceptStatus::Success, .. } => self.handle_results(reader.rest()),
            Reply::Accepted { status, .. } => Err(Fault::NotDone(status)),
        }
    }

    fn handle_results(&mut self, results: &[u8]) -> Result<(), Fault> {
        match self.step {
            Step::Look | Step::Check => {
                let entries = read_dump(results, |entry| self.services.iter().any(|ours| ours.service.is_at(entry)))?;
                if self.step == Step::Look { self.handle_list(&entries) } else { self.handle_check(&entries) }
            }
            Step::Change => {
                let mut reader = Reader::new(results);
                let is_done = reader.bool()?;
                reader.finish()?;
                self.handle_change(is_done)
            }
            Step::Done => unreachable!("no call is out when all is done"),
        }
    }

    /// What there is in our places: what has to be changed.
    fn handle_list(&mut self, entries: &[Entry<'_>]) -> Result<(), Fault> {
        let mut changes = VecDeque::new();
        for ours in &self.services {
            let service = &ours.service;
            for entry in entries.iter().filter(|entry| service.is_at(entry)) {
                let owner = shown(entry.owner);
                if ours.is(entry) {
                    changes.push_back(Change::Unset(service.clone(), owner));
                } else if self.task != Task::Withdraw {
                    let there = Service { address: shown(entry.address), ..service.clone() };
                    return Err(Fault::Taken { there, owner });
                }
            }
            if self.task == Task::Register {
                changes.push_back(Change::Set(service.clone()));
            }
        }
        self.changes = if self.task == Task::Look { VecDeque::new() } else { changes };
        self.go_on();
        Ok(())
    }

    fn handle_change(&mut self, is_done: bool) -> Result<(), Fault> {
        match self.changes.pop_front() {
            Some(Change::Unset(service, owner)) if !is_done => {
                let fault = Fault::NotOurs { service, owner };
                if self.task == Task::Register {
                    return Err(fault);
                }
                // The others are taken back all the same.
                self.kept.get_or_insert(fault);
            }
            Some(Change::Set(service)) if !is_done => {
                self.set.retain(|set| *set != service);
                return Err(Fault::Refused(service));
            }
            _ => {}
        }
        self.go_on();
        self.kept.take_if(|_| self.step == Step::Done).map_or(Ok(()), Err)
    }

    fn go_on(&mut self) {
        self.step = match (self.changes.is_empty(), self.task) {
            (false, _) => Step::Change,
            (true, Task::Register) => Step::Check,
            (true, Task::Look | Task::Withdraw) => Step::Done,
        };
    }

    /// Whether all of ours is there, and by whom.
    fn handle_check(&mut self, entries: &[Entry<'_>]) -> Result<(), Fault> {
        for ours in &mut self.services {
            let Some(entry) = entries.iter().find(|entry| ours.is(entry)) else {
                return Err(Fault::Vanished(ours.service.clone()));
            };
            ours.owner = Some(entry.owner.to_vec());
        }
        self.step = Step::Done;
        Ok(())
    }
}

/// What somebody wrote into an entry, for a line of a log or of a terminal.
pub fn shown(octets: &[u8]) -> String {
    const SHOWN_BYTES_MAX: usize = 80;
    let (start, more) = octets.split_at(octets.len().min(SHOWN_BYTES_MAX));
    format!("{}{}", start.escape_ascii(), if more.is_empty() { "" } else { "..." })
}

#[cfg(test)]
mod tests {
    use super::super::Transport;
    use super::*;
    use proptest::prelude::*;

    const XID: u32 = u32::MAX - 1;

    fn service(netid: &str, port: u16) -> Service {
        let host = if netid == "rdma6" { "[::1]" } else { "127.0.0.1" };
        let service = Service::new(77, 1, Transport::Rdma, &format!("{host}:{port}").parse().unwrap());
        assert_eq!(service.netid, netid);
        service
    }

    fn unowned(services: &[Service]) -> Vec<Registered> {
        services.iter().map(|service| Registered { service: service.clone(), owner: None }).collect()
    }

    /// What a call asks, as words: `SET 4 127.0.0.1.0.5`.
    fn asked(record: &[u8]) -> String {
        let mut records = RecordReader::new(RECORD_LIMITS);
        let message = records.take(&mut &record[..]).unwrap().expect("one whole record");
        let mut reader = Reader::new(&message);
        let call = CallHeader::read(&mut reader).unwrap();
        assert_eq!(call.program, PROGRAM_NUMBER);
        let name = match call.procedure {
            procedure::SET => "SET",
            procedure::UNSET => "UNSET",
            procedure::DUMP => "DUMP",
            other => panic!("procedure {other}"),
        };
        let mut words = format!("{name} {}", call.version);
        if name != "DUMP" {
            let entry = Entry::read(&mut reader).unwrap();
            assert_eq!((entry.program, entry.version, entry.owner), (77, 1, &b"1000"[..]));
            words += &format!(" {}", std::str::from_utf8(entry.address).unwrap());
        }
        reader.finish().unwrap();
        words
    }

    fn reply(xid: u32, reply: Reply<'_>, results: impl FnOnce(&mut Writer)) -> Vec<u8> {
        let mut writer = Writer::new();
        ReplyHeader { xid: Xid(xid), reply }.write(&mut writer);
        results(&mut writer);
        marked(&writer.finish())
    }

    fn success(xid: u32, results: impl FnOnce(&mut Writer)) -> Vec<u8> {
        reply(xid, Reply::accepted(AcceptStatus::Success), results)
    }

    /// What rpcbind answers.
    #[derive(Clone, Debug)]
    enum Say {
        Bool(bool),
        /// Addresses and owners of our entries, behind one of somebody else.
        Dump(Vec<(Service, &'static str)>),
        Reply(Reply<'static>),
    }

    impl Say {
        fn octets(&self, xid: u32) -> Vec<u8> {
            match self {
                Self::Bool(value) => success(xid, |writer| writer.bool(*value)),
                Self::Dump(entries) => success(xid, |writer| {
                    let other = Service { version: 2, ..service("rdma", 1) };
                    let all = [(other, "superuser")].into_iter().chain(entries.iter().cloned());
                    writer.list(all, |writer, (service, owner)| service.entry(owner).write(writer));
                }),
                Self::Reply(with) => reply(xid, *with, |_| {}),
            }
        }
    }

    /// Answers the calls of a session in turn: what was asked, and how it ended.
    fn converse(session: &mut Session, says: &[Say]) -> (Vec<String>, Result<(), Fault>) {
        let mut calls = Vec::new();
        let mut says = says.iter();
        let mut xid = XID;
        while let Some(call) = session.poll_transmit() {
            calls.push(asked(&call));
            assert_eq!(session.poll_transmit(), None, "one call at a time");
            let Some(say) = says.next() else { return (calls, Err(Fault::Unasked)) };
            if let Err(fault) = session.handle_octets(&say.octets(xid)) {
                assert_eq!(says.len(), 0, "it ended early: {fault}");
                return (calls, Err(fault));
            }
            xid = xid.wrapping_add(1);
        }
        assert!(session.is_done() && says.len() == 0);
        (calls, Ok(()))
    }

    fn session(task: Task, services: &[Service]) -> Session {
        Session::new(task, unowned(services), "1000", Xid(XID))
    }

    #[test]
    fn every_answer_leads_to_the_right_call_or_to_the_right_fault() {
        use Say::{Bool, Dump};
        use Task::{Look, Register, Withdraw};
        let (four, six) = (service("rdma", 5), service("rdma6", 5));
        let (elsewhere, both) = (service("rdma", 6), vec![four.clone(), six.clone()]);
        let one = vec![four.clone()];
        let dump = |entries: &[(&Service, &'static str)]| {
            Dump(entries.iter().map(|(service, owner)| ((*service).clone(), *owner)).collect())
        };
        let (none, ours) = (|| dump(&[]), || dump(&[(&four, "1000")]));
        let status = |status| Say::Reply(Reply::accepted(status));
        let mismatch = |low, high| status(AcceptStatus::ProgMismatch(Versions { low, high }));
        let not_ours = |owner: &str| Err(Fault::NotOurs { service: four.clone(), owner: owner.to_owned() });
        let taken = Err(Fault::Taken { there: elsewhere.clone(), owner: "superuser".to_owned() });
        let denial = Denial::AuthError(crate::wire::onc_rpc::AuthStatus::TOOWEAK);
        // Task, services, answers; calls, end, and how many are left behind.
        type Case<'a> = (Task, &'a [Service], Vec<Say>, &'a str, Result<(), Fault>, usize);
        let table: Vec<Case<'_>> = vec![
            (Look, &one, vec![none()], "DUMP 4", Ok(()), 0),
            (Look, &one, vec![ours()], "DUMP 4", Ok(()), 0),
            (Look, &one, vec![dump(&[(&elsewhere, "superuser")])], "DUMP 4", taken.clone(), 0),
            (Register, &one, vec![none(), Bool(true), ours()], "DUMP 4, SET 4 127.0.0.1.0.5, DUMP 4", Ok(()), 1),
            (
                Register,
                &both,
                vec![none(), Bool(true), Bool(true), dump(&[(&six, "superuser"), (&four, "superuser")])],
                "DUMP 4, SET 4 127.0.0.1.0.5, SET 4 ::1.0.5, DUMP 4",
                Ok(()),
                2,
            ),
            // A killed daemon left it.
            (
                Register,
                &one,
                vec![ours(), Bool(true), Bool(true), ours()],
                "DUMP 4, UNSET 4 127.0.0.1.0.5, SET 4 127.0.0.1.0.5, DUMP 4",
                Ok(()),
                1,
            ),
            (
                Register,
                &one,
                vec![dump(&[(&four, "superuser")]), Bool(false)],
                "DUMP 4, UNSET 4 127.0.0.1.0.5",
                not_ours("superuser"),
                0,
            ),
            (Register, &both, vec![dump(&[(&elsewhere, "superuser")])], "DUMP 4", taken, 0),
            // Somebody was faster.
            (
                Register,
                &one,
                vec![none(), Bool(false)],
                "DUMP 4, SET 4 127.0.0.1.0.5",
                Err(Fault::Refused(four.clone())),
                0,
            ),
            (
                Register,
                &both,
                vec![none(), Bool(true), Bool(false)],
                "DUMP 4, SET 4 127.0.0.1.0.5, SET 4 ::1.0.5",
                Err(Fault::Refused(six.clone())),
                1,
            ),
            (
                Register,
                &one,
                vec![none(), Bool(true), dump(&[(&elsewhere, "1000")])],
                "DUMP 4, SET 4 127.0.0.1.0.5, DUMP 4",
                Err(Fault::Vanished(four.clone())),
                1,
            ),
            // An older rpcbind, and a port mapper.
            (
                Register,
                &one,
                vec![mismatch(2, 3), none(), Bool(true), ours()],
                "DUMP 4, DUMP 3, SET 3 127.0.0.1.0.5, DUMP 3",
                Ok(()),
                1,
            ),
            (Register, &one, vec![mismatch(2, 2)], "DUMP 4", Err(Fault::Versions(Versions { low: 2, high: 2 })), 0),
            (
                Register,
                &one,
                vec![mismatch(3, 3), mismatch(3, 3)],
                "DUMP 4, DUMP 3",
                Err(Fault::Versions(Versions { low: 3, high: 3 })),
                0,
            ),
            (
                Register,
                &one,
                vec![none(), Say::Reply(Reply::Denied(denial))],
                "DUMP 4, SET 4 127.0.0.1.0.5",
                Err(Fault::Denied(denial)),
                1,
            ),
            (
                Register,
                &one,
                vec![status(AcceptStatus::ProcUnavail)],
                "DUMP 4",
                Err(Fault::NotDone(AcceptStatus::ProcUnavail)),
                0,
            ),
            (Withdraw, &one, vec![ours(), Bool(true)], "DUMP 4, UNSET 4 127.0.0.1.0.5", Ok(()), 0),
            (Withdraw, &one, vec![none()], "DUMP 4", Ok(()), 0),
            (Withdraw, &one, vec![dump(&[(&elsewhere, "1000")])], "DUMP 4", Ok(()), 0),
            // One that stays is no reason to leave the other.
            (
                Withdraw,
                &both,
                vec![dump(&[(&four, "0"), (&six, "1000")]), Bool(false), Bool(true)],
                "DUMP 4, UNSET 4 127.0.0.1.0.5, UNSET 4 ::1.0.5",
                not_ours("0"),
                0,
            ),
        ];
        for (task, services, says, calls, end, left) in table {
            let mut session = session(task, services);
            let (asked, ended) = converse(&mut session, &says);
            assert_eq!((asked.join(", "), &ended), (calls.to_owned(), &end), "{task:?} {says:?}");
            assert_eq!(session.left_behind().len(), left, "{task:?} {says:?}");
        }
    }

    #[test]
    fn only_what_rpcbind_wrote_down_for_us_is_taken_back() {
        let (four, six) = (service("rdma", 5), service("rdma6", 5));
        let mut register = session(Task::Register, &[four.clone(), six.clone()]);
        let there = Say::Dump(vec![(four.clone(), "superuser"), (six.clone(), "superuser")]);
        let says = [Say::Dump(Vec::new()), Say::Bool(true), Say::Bool(true), there];
        assert_eq!(converse(&mut register, &says).1, Ok(()));
        let owners: Vec<_> = register.services().iter().map(|ours| ours.owner.as_deref()).collect();
        assert_eq!(owners, [Some(&b"superuser"[..]); 2]);
        // In the meantime another user's daemon got one of the places, at the same address.
        let mut withdraw = Session::new(Task::Withdraw, register.services().to_vec(), "1000", Xid(XID));
        let says = [Say::Dump(vec![(four, "1001"), (six, "superuser")]), Say::Bool(true)];
        assert_eq!(converse(&mut withdraw, &says), (vec!["DUMP 4".to_owned(), "UNSET 4 ::1.0.5".to_owned()], Ok(())));
    }

    #[test]
    fn what_others_wrote_is_shown_on_one_line_of_bounded_length() {
        assert_eq!(shown(b"::1.78.81"), "::1.78.81");
        assert_eq!(shown(b"a\n\x1b[2J\xff"), r"a\n\x1b[2J\xff");
        assert_eq!(shown(&[b'x'; 9000]).len(), 83);
    }

    #[test]
    fn answers_to_nothing_and_answers_that_are_none_are_faults() {
        let fresh = || {
            let mut session = session(Task::Register, &[service("rdma", 5)]);
            session.poll_transmit().unwrap();
            session
        };
        let dump = Say::Dump(Vec::new()).octets(XID);
        assert_eq!(session(Task::Look, &[]).handle_octets(&dump), Err(Fault::Unasked), "before the call");
        assert_eq!(fresh().handle_octets(&[&dump[..], &dump].concat()), Err(Fault::Unasked), "twice");
        let other = Say::Dump(Vec::new()).octets(7);
        assert_eq!(fresh().handle_octets(&other), Err(Fault::OtherXid { wanted: XID, found: 7 }));
        let malformed = |octets: &[u8]| matches!(fresh().handle_octets(octets), Err(Fault::Malformed(_)));
        assert!(malformed(&marked(b"")));
        assert!(malformed(&session(Task::Look, &[]).poll_transmit().unwrap()), "a call is no reply");
        assert!(malformed(&success(XID, |writer| writer.u32(2))), "a list goes on or does not");
        assert!(malformed(&success(XID, |writer| writer.u64(0))), "something behind the list");
        let mut in_set = fresh();
        in_set.handle_octets(&dump).unwrap();
        in_set.poll_transmit().unwrap();
        let two = success(XID.wrapping_add(1), |writer| writer.u32(2));
        assert!(matches!(in_set.handle_octets(&two), Err(Fault::Malformed(_))), "a boolean is 0 or 1");
        let too_long = fresh().handle_octets(&(RECORD_LIMITS.bytes_max + 1).to_be_bytes());
        assert!(matches!(too_long, Err(Fault::Record(_))), "{too_long:?}");
    }

    #[test]
    fn a_list_in_many_fragments_is_read_however_it_is_cut() {
        // Debian's rpcbind sends fragments of at most 9,000 octets.
        let entry = service("rdma", 5);
        let message = {
            let mut writer = Writer::new();
            ReplyHeader { xid: Xid(XID), reply: Reply::accepted(AcceptStatus::Success) }.write(&mut writer);
            let others = (0..999).map(|program| Service { program: 1000 + program, ..entry.clone() });
            writer.list(others.chain([entry.clone()]), |writer, service| service.entry("0").write(writer));
            writer.finish()
        };
        let mut octets = Vec::new();
        let mut fragments = message.chunks(8996).peekable();
        while let Some(fragment) = fragments.next() {
            let mut one = marked(fragment);
            one[0] &= if fragments.peek().is_some() { 0x7f } else { 0xff };
            octets.extend(one);
        }
        for cut in [1, 3, 1000, octets.len()] {
            let mut session = session(Task::Withdraw, std::slice::from_ref(&entry));
            session.poll_transmit().unwrap();
            for part in octets.chunks(cut) {
                session.handle_octets(part).unwrap();
            }
            assert_eq!(asked(&session.poll_transmit().unwrap()), "UNSET 4 127.0.0.1.0.5");
        }
    }

    fn mutated() -> impl Strategy<Value = Vec<u8>> {
        let ours = || (service("rdma", 5), "1000");
        let say = prop_oneof![
            any::<bool>().prop_map(Say::Bool),
            Just(Say::Dump(Vec::new())),
            Just(Say::Dump(vec![ours()])),
            Just(Say::Dump(vec![(service("rdma", 6), "0"), ours(), (service("rdma6", 5), "0")])),
            (0_u32..5, 0_u32..5).prop_map(|(low, high)| {
                Say::Reply(Reply::accepted(AcceptStatus::ProgMismatch(Versions { low, high })))
            }),
        ];
        let strokes = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4);
        let good = (say, 0_u32..5, strokes).prop_map(|(say, ahead, strokes)| {
            let mut octets = say.octets(XID.wrapping_add(ahead));
            for (at, value) in strokes {
                let at = at.index(octets.len());
                octets[at] = value;
            }
            octets
        });
        prop_oneof![4 => good, 1 => prop::collection::vec(any::<u8>(), 0..120)]
    }

    proptest! {
        #[test]
        fn any_octets_end_a_session_or_are_taken_and_never_harm(
            parts in prop::collection::vec(mutated(), 1..8),
            task in prop_oneof![Just(Task::Look), Just(Task::Register), Just(Task::Withdraw)],
        ) {
            let ours = [service("rdma", 5), service("rdma6", 5)];
            let mut session = session(task, &ours);
            for part in parts {
                if let Some(call) = session.poll_transmit() {
                    // Nobody else's place is ever named in a change.
                    let asked = asked(&call);
                    prop_assert!(asked.starts_with("DUMP") || ours.iter().any(|ours| asked.ends_with(&ours.address)));
                    prop_assert!(asked.starts_with("DUMP") || task != Task::Look);
                }
                if session.handle_octets(&part).is_err() {
                    break;
                }
            }
            prop_assert!(session.left_behind().len() <= ours.len());
            prop_assert!(task == Task::Register || session.left_behind().is_empty());
        }
    }
}
