//! From a connection of TCP to full operation: Request, Reply and the ready-to-receive frame.

use super::{End, EndState, Failure, Link, Phase};
use crate::fabric::{Attributes, Cause, Event, TURN_BYTES_MAX};
use crate::wire::iwarp::mpa::{self, Frame, FrameKind};
use crate::wire::iwarp::rdmap::{Reason, Terminate};
use crate::wire::iwarp::startup::{self, Offer, ReadyFrame};
use std::io;

impl End {
    fn offer(&self, attributes: &Attributes) -> Offer {
        let read_depth = attributes.read_depth.min(startup::READS_SERVED_MAX.into()) as u16;
        Offer { form: self.options.form, crc: self.options.crc, read_depth, never_reads: attributes.never_reads }
    }

    pub(super) fn finish_connecting(&self, state: &mut EndState) {
        let Some(link) = &mut state.link else { return };
        match link.stream.take_error() {
            Ok(None) => {}
            Ok(Some(error)) | Err(error) => {
                state.failure = Some(Failure::lost(error));
                return;
            }
        }
        match link.stream.peer_addr() {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotConnected => return,
            Err(error) => {
                state.failure = Some(Failure::lost(error));
                return;
            }
        }
        let request = self.offer(&state.attributes).request(std::mem::take(&mut state.question));
        let octets = request.encode(FrameKind::Request);
        link.out.frame(|out| out.extend_from_slice(&octets));
        state.phase = Phase::Asking;
    }

    /// Handshake frames carry no payload of requests.
    pub(super) fn send_handshake(&self, state: &mut EndState) {
        let Some(link) = &mut state.link else { return };
        if link.out.is_empty() || link.is_blocked {
            return;
        }
        match link.out.write(&link.stream, |_| &[]) {
            Ok(all) => link.is_blocked = !all,
            Err(error) => state.failure = Some(Failure::lost(error)),
        }
    }

    pub(super) fn take_reply(&self, state: &mut EndState) {
        let Some(reply) = self.read_reply(state) else { return };
        if reply.rejected {
            self.rejected(state, reply.private_data);
            return;
        }
        if let Err(failure) = self.agree(state, &reply) {
            state.failure = Some(failure);
            return;
        }
        state.events.push_back(Event::Established { qp: self.number, private_data: reply.private_data });
        // An FPDU may have come with the Reply.
        self.receive(state, TURN_BYTES_MAX);
    }

    /// The Reply, once all of it came.
    fn read_reply(&self, state: &mut EndState) -> Option<Frame> {
        let link = state.link.as_mut()?;
        let eof = match link.fill_inbox(mpa::FRAME_BYTES_MIN + mpa::PRIVATE_DATA_BYTES_MAX) {
            Ok((_, eof)) => eof,
            Err(error) => {
                state.failure = Some(Failure::lost(error));
                return None;
            }
        };
        match Frame::decode(FrameKind::Reply, &link.inbox[link.start..link.end]) {
            Ok(Some((reply, len))) => {
                link.start += len;
                return Some(reply);
            }
            Ok(None) if eof => state.failure = Some(Failure::lost("the peer closed during the handshake")),
            Ok(None) => {}
            Err(error) => state.failure = Some(Cause::PeerFault(error.to_string()).into()),
        }
        None
    }

    fn rejected(&self, state: &mut EndState, private_data: Vec<u8>) {
        state.phase = Phase::Ended;
        state.flush(self.number);
        state.events.push_back(Event::Rejected { qp: self.number, private_data });
        state.link = None;
        self.regions.clear();
    }

    /// What a Reply settles. The ready-to-receive frame is on its way before anything else can happen, an error of ours
    /// not excepted: Linux's iWARP connection manager does not survive a connection that ends before that frame.
    fn agree(&self, state: &mut EndState, reply: &Frame) -> Result<(), Failure> {
        let link = state.link.as_mut().expect("a Reply came over it");
        let (terms, reason) =
            self.offer(&state.attributes).conclude(reply).map_err(|error| Cause::PeerFault(error.to_string()))?;
        link.begin(&self.options, &terms);
        state.phase = Phase::Connected;
        if let Some(ready) = terms.ready {
            let Link { out, sender, receiver, .. } = link;
            out.frame(|out| ready.put(out, sender, receiver));
            link.awaits_ready_response = ready == ReadyFrame::Read;
            link.is_blocked = !link.out.write(&link.stream, |_| &[]).map_err(Failure::lost)?;
        }
        if let Some(reason) = reason {
            let what = match reason {
                Reason::NO_READY_FRAME => "no ready-to-receive frame that we could send",
                _ => "its read depths do not fit ours",
            };
            let (cause, terminate) = (Cause::PeerFault(what.into()), Some(Terminate::bare(reason)));
            return Err(Failure { cause, terminate, ends_batch: false });
        }
        link.may_send = true;
        state.attributes.read_depth = terms.reads_out;
        Ok(())
    }

    /// This end leaves during the handshake: a Reply that has come is still answered.
    pub(super) fn answer_before_leaving(&self, state: &mut EndState) {
        if let Some(reply) = self.read_reply(state).filter(|reply| !reply.rejected) {
            // Why it leaves is settled.
            let _ = self.agree(state, &reply);
        }
        state.failure = None;
    }

    /// The responder's answer. The link is there and watched.
    pub(in crate::fabric::iwarp) fn accept(&self, state: &mut EndState, request: &Frame, private_data: &[u8]) {
        let link = state.link.as_mut().expect("made of the request's stream");
        let offer = self.offer(&state.attributes);
        let (reply, terms) = startup::answer(request, offer.crc, offer.read_depth);
        let octets = Frame { private_data: private_data.to_vec(), ..reply }.encode(FrameKind::Reply);
        link.out.frame(|out| out.extend_from_slice(&octets));
        link.begin(&self.options, &terms);
        link.awaited_ready = terms.ready;
        state.attributes.read_depth = terms.reads_out;
        state.phase = Phase::Connected;
        state.events.push_back(Event::Established { qp: self.number, private_data: Vec::new() });
    }
}
