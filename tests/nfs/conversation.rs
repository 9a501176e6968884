//! A requester of ours with a server that is not, turn by turn, and what both said.

use bulkhead::client::rpc::port::{Finished, Port, attributes};
use bulkhead::client::rpc::{Answer, RawCall};
use bulkhead::fabric::{self, Address, Cause, Event, Fabric, Lane, RemoteKey, Status, WorkKind};
use bulkhead::wire::onc_rpc::{Part, Xid};
use bulkhead::wire::rpcrdma::header::{Header, Message, RdmaError};
use bulkhead::wire::rpcrdma::private_data::PrivateData;
use bulkhead::wire::rpcrdma::requester::{Call, Failure, Output, Settings};
use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::RDMA_PORT;

/// An emulated machine is slow; who waits this long waits for ever.
const PATIENCE: Duration = Duration::from_secs(120);
/// Between two tries to connect.
const PAUSE: Duration = Duration::from_millis(200);

/// How calls are made.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    pub inline_bytes: u32,
    pub credits: u32,
    pub segment_bytes_max: u32,
}

pub const TERMS: Terms = Terms { inline_bytes: 4096, credits: 32, segment_bytes_max: 1 << 30 };

/// A message from the server.
#[derive(Debug)]
pub struct Heard {
    pub xid: Xid,
    pub credit: u32,
    /// The header, or an RDMA_ERROR.
    pub said: Result<Header, RdmaError>,
    /// The handle that it closed.
    pub invalidated: Option<RemoteKey>,
}

/// See the module's text.
pub struct Conversation {
    address: Address,
    pub port: Port,
    /// What the server said of itself when the last connection was made.
    pub server: Option<PrivateData>,
    /// Headers of our calls.
    pub sent: Vec<Header>,
    pub heard: Vec<Heard>,
    /// Regions that this side opened, and those that it closed itself.
    pub opened: usize,
    pub closed: usize,
    /// Calls unanswered, at most.
    pub in_flight_max: u32,
    /// Why connections ended.
    pub ends: Vec<Cause>,
    finished: HashMap<Xid, Finished>,
    dialled: Option<Instant>,
    events: Vec<Event>,
    /// Goes last: it tells the server goodbye.
    lane: Arc<dyn Lane>,
}

impl Conversation {
    /// With the server at `ip`. There is a connection from the first call on.
    pub fn with(fabric: &dyn Fabric, ip: &str, terms: Terms) -> Self {
        let own =
            PrivateData { remote_invalidate: true, send_bytes: terms.inline_bytes, receive_bytes: terms.inline_bytes };
        // The server remembers calls by their xid, whoever makes them.
        let first_xid = Xid(std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_micros() as u32);
        let settings = Settings {
            own,
            credits: NonZeroU32::new(terms.credits).unwrap(),
            segment_bytes_max: NonZeroU32::new(terms.segment_bytes_max).unwrap(),
            reply_timeout: PATIENCE / 2,
            attempts_max: NonZeroU32::new(4).unwrap(),
            first_xid,
        };
        Self {
            address: Address::Socket((ip.parse::<std::net::IpAddr>().unwrap(), RDMA_PORT).into()),
            port: Port::new(settings),
            server: None,
            sent: Vec::new(),
            heard: Vec::new(),
            opened: 0,
            closed: 0,
            in_flight_max: 0,
            ends: Vec::new(),
            finished: HashMap::new(),
            dialled: None,
            events: Vec::new(),
            lane: fabric.lane().unwrap(),
        }
    }

    /// Makes a call.
    pub fn submit(&mut self, call: RawCall) -> Xid {
        let (call, lent) = call.into_call();
        self.port.call(lent, |xid| Call { message: call.message.with_xid(xid), ..call })
    }

    /// Waits for the end of a call.
    pub fn wait(&mut self, xid: Xid) -> Result<Answer, Failure> {
        let what = |it: &Self| format!("no end of {xid:?}: {:?}, {:?}", it.ends, it.port.requester().credits());
        self.until(what, |it| it.finished.contains_key(&xid));
        self.finished.remove(&xid).expect("it is there").outcome
    }

    pub fn call(&mut self, call: RawCall) -> Result<Answer, Failure> {
        let xid = self.submit(call);
        self.wait(xid)
    }

    /// The answer to a call that cannot fail.
    #[track_caller]
    pub fn answer(&mut self, call: RawCall) -> Answer {
        self.call(call).unwrap_or_else(|failure| panic!("{failure}; connections ended: {:?}", self.ends))
    }

    /// What was sent for the last call.
    pub fn last_sent(&self) -> &Header {
        self.sent.last().expect("a call")
    }

    pub fn last_heard(&self) -> &Heard {
        self.heard.last().expect("a reply")
    }

    /// Ends the connection; the next turn makes another if calls are pending.
    pub fn disconnect(&mut self) {
        self.port.disconnect();
        self.until(|_| "no end of the connection".to_owned(), |it| !it.port.is_attached());
    }

    #[track_caller]
    pub fn until(&mut self, what: impl Fn(&Self) -> String, mut holds: impl FnMut(&Self) -> bool) {
        let limit = Instant::now() + PATIENCE;
        while !holds(self) {
            assert!(Instant::now() < limit, "{}", what(self));
            if self.turn() {
                continue;
            }
            self.lane.arm();
            if !self.turn() {
                let soon = Instant::now() + PAUSE;
                let until = [self.lane.deadline(), self.port.deadline()].into_iter().flatten().fold(soon, Instant::min);
                fabric::sleep(&*self.lane, Some(until)).unwrap();
            }
        }
    }

    /// One turn. `true` if anything moved.
    pub fn turn(&mut self) -> bool {
        let now = Instant::now();
        let is_due = self.dialled.is_none_or(|at| at + PAUSE <= now);
        if !self.port.is_attached() && self.port.pending_count() > 0 && is_due {
            let attributes = attributes(self.port.requester(), PATIENCE);
            let qp = self.lane.dial(&self.address, attributes).unwrap();
            self.port.attach(qp).unwrap();
            self.dialled = Some(now);
        }
        let mut moved = self.lane.progress(now, &mut self.events, 64);
        for event in std::mem::take(&mut self.events) {
            moved = true;
            self.handle(event);
        }
        while let Some(output) = self.port.poll_output(now) {
            moved = true;
            match &output {
                Output::Send { message, .. } => self.sent.push(header_of(message)),
                Output::Register(_) => self.opened += 1,
                Output::Invalidate { .. } => self.closed += 1,
                Output::Disconnect(reason) => panic!("{reason}; heard {:?}", self.heard.last()),
                Output::Receive(_) | Output::Completed { .. } => {}
            }
            self.port.obey(output, now);
            self.in_flight_max = self.in_flight_max.max(self.port.requester().credits().in_flight());
        }
        while let Some(finished) = self.port.take_finished() {
            self.finished.insert(finished.xid, finished);
        }
        moved
    }

    fn handle(&mut self, event: Event) {
        if event.qp() != self.port.number() {
            return;
        }
        match &event {
            Event::Established { private_data, .. } => {
                self.server = PrivateData::find(private_data).map(|(_, told)| told)
            }
            Event::Rejected { .. } => panic!("the server declined"),
            Event::Disconnected { cause, .. } => {
                self.ends.push(cause.clone());
                assert!(self.ends.len() < 10, "{:?}", self.ends);
            }
            Event::Completed { completion, .. }
                if completion.kind == WorkKind::Receive && completion.status == Status::Done =>
            {
                let message = &completion.buf.as_ref().expect("a Receive").as_slice()[..completion.len];
                let (xid, credit, said) = match Message::decode(message).unwrap() {
                    Message::Transport(reply) => (reply.xid, reply.credit, Ok(reply.to_header())),
                    Message::Error { xid, credit, error, .. } => (xid, credit, Err(error)),
                };
                self.heard.push(Heard { xid, credit, said, invalidated: completion.invalidated });
            }
            _ => {}
        }
        self.port.handle_event(event);
    }
}

/// The header at the front of a message of ours.
fn header_of(message: &[Part]) -> Header {
    let octets: Vec<u8> = message
        .iter()
        .flat_map(|part| match part {
            Part::Bytes(octets) => octets.clone(),
            Part::Item(_) => Vec::new(),
        })
        .collect();
    match Message::decode(&octets).unwrap() {
        Message::Transport(call) => call.to_header(),
        other => panic!("{other:?}"),
    }
}
