//! The requester of RPC-over-RDMA under hostile messages, between calls, cancels and lost connections.
//!
//! Input: `(operation octet, its operands)…`; a message has a length octet in front. The owner obeys, at times late or not
//! at all. Held: no region is open when its call completes, every call completes once, no call goes out beyond the grant,
//! and after the end of the connection nothing is left.
#![no_main]

use bulkhead::wire::onc_rpc::{Item, PayloadWriter};
use bulkhead::wire::rpcrdma::private_data::PrivateData;
use bulkhead::wire::rpcrdma::requester::{Call, Cancel, Output, Reduction, RegionId, Requester, Settings};
use bulkhead::wire::rpcrdma::{RemoteKey, Xid};
use libfuzzer_sys::fuzz_target;
use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::time::{Duration, Instant};

const CALL_COUNT_MAX: usize = 64;

struct Owner {
    requester: Requester,
    now: Instant,
    /// By region: its call, and whether the responder can reach it.
    regions: BTreeMap<RegionId, (Xid, bool)>,
    /// Completed or not.
    calls: BTreeMap<u32, bool>,
    asked: Vec<RegionId>,
    closing: Vec<RegionId>,
    is_connected: bool,
    must_end: bool,
    unanswered_max: u32,
}

impl Owner {
    fn drive(&mut self) {
        while let Some(output) = self.requester.poll_output(self.now) {
            match output {
                Output::Receive(count) => self.requester.handle_receives_posted(count),
                Output::Register(registration) => {
                    assert!(registration.len > 0);
                    self.regions.insert(registration.id, (registration.xid, false));
                    self.asked.push(registration.id);
                }
                Output::Send { .. } => self.requester.handle_sent(),
                Output::Invalidate { id, .. } => self.closing.push(id),
                Output::Completed { xid, outcome } => {
                    let is_open = self.regions.values().any(|(of, is_open)| *of == xid && *is_open);
                    assert!(!is_open, "{outcome:?} before the memory of {xid:?} was fenced");
                    let before = self.calls.insert(xid.0, true);
                    assert_eq!(before, Some(false), "{xid:?} completes once");
                }
                Output::Disconnect(_) => self.must_end = true,
            }
        }
        let credits = self.requester.credits();
        self.unanswered_max = self.unanswered_max.max(credits.in_flight());
        assert!(credits.in_flight() <= 16);
    }

    fn connect(&mut self, told: u8) {
        if !self.is_connected {
            let size = 1024 << (told & 3);
            let peer = PrivateData { remote_invalidate: told & 4 != 0, send_bytes: size, receive_bytes: size };
            self.requester.handle_connected(peer);
            self.is_connected = true;
        }
    }

    fn disconnect(&mut self) {
        self.regions.values_mut().for_each(|(_, is_open)| *is_open = false);
        (self.asked, self.closing) = (Vec::new(), Vec::new());
        self.requester.handle_disconnected();
        (self.is_connected, self.must_end) = (false, false);
    }

    fn call(&mut self, shape: u8) {
        if self.requester.pending_count() >= CALL_COUNT_MAX {
            return;
        }
        let xid = self.requester.mint_xid();
        let mut message = PayloadWriter::new();
        message.words().u32(xid.0);
        message.words().u32(0);
        message.words().encoded(&vec![0; 4 << (shape & 7)]);
        if shape & 8 != 0 {
            message.item(Item { token: 0, len: u32::from(shape) * 40 });
        }
        let reduction = |bit: u8| if shape & bit != 0 { Reduction::Always } else { Reduction::Fit };
        let call = Call {
            message: message.finish(),
            arguments: reduction(16),
            results: vec![u32::from(shape) * 10; usize::from(shape >> 6)],
            results_reduction: reduction(32),
            reply_bytes_max: 40 << (shape & 7),
        };
        assert!(self.calls.insert(xid.0, false).is_none());
        self.requester.call(xid, call);
    }
}

fuzz_target!(|input: &[u8]| {
    let requester = Requester::new(Settings {
        own: PrivateData { remote_invalidate: true, send_bytes: 4096, receive_bytes: 4096 },
        credits: NonZeroU32::new(16).unwrap(),
        segment_bytes_max: NonZeroU32::new(1000).unwrap(),
        reply_timeout: Duration::from_secs(60),
        attempts_max: NonZeroU32::new(3).unwrap(),
        first_xid: Xid(1),
    });
    let mut owner = Owner {
        requester,
        now: Instant::now(),
        regions: BTreeMap::new(),
        calls: BTreeMap::new(),
        asked: Vec::new(),
        closing: Vec::new(),
        is_connected: false,
        must_end: false,
        unanswered_max: 0,
    };
    let mut input = input.iter().copied();
    while let Some(operation) = input.next() {
        let mut operand = || input.next().unwrap_or(0);
        match operation % 10 {
            0 => owner.connect(operand()),
            1 => owner.call(operand()),
            2..=4 if owner.is_connected => {
                let closes = (operation & 0x80 != 0).then(|| RemoteKey(operand().into()));
                let len = usize::from(operand());
                let message: Vec<u8> = input.by_ref().take(len).collect();
                if let Some(key) = closes {
                    let closed = owner.regions.iter_mut().find(|(id, _)| id.0 as u32 == key.0);
                    closed.into_iter().for_each(|(_, (_, is_open))| *is_open = false);
                }
                owner.requester.handle_received(&message, closes);
            }
            5 => {
                for id in std::mem::take(&mut owner.asked) {
                    if operand() % 8 == 7 {
                        owner.requester.handle_refused(id);
                    } else {
                        owner.regions.insert(id, (owner.regions[&id].0, true));
                        owner.requester.handle_registered(id, RemoteKey(id.0 as u32), id.0 << 32);
                    }
                }
            }
            6 => {
                for id in std::mem::take(&mut owner.closing) {
                    if operand() % 8 == 7 {
                        owner.requester.handle_invalidate_failed(id);
                    } else {
                        owner.regions.insert(id, (owner.regions[&id].0, false));
                        owner.requester.handle_invalidated(id);
                    }
                }
            }
            7 => {
                let when = if operation & 0x80 != 0 { Cancel::Now } else { Cancel::Answered };
                owner.requester.cancel(Xid(operand().into()), when);
            }
            8 => owner.disconnect(),
            _ => {
                owner.now += Duration::from_secs(operand().into());
                owner.requester.handle_timeout(owner.now);
            }
        }
        owner.drive();
        if owner.must_end {
            owner.disconnect();
            owner.drive();
        }
    }
    owner.disconnect();
    owner.drive();
    owner.requester.abandon();
    owner.drive();
    assert!(owner.calls.values().all(|is_completed| *is_completed));
    assert_eq!((owner.requester.pending_count(), owner.requester.region_count()), (0, 0));
});
