//! Start-up: what the two ends settle with Request and Reply (RFC 5044 §7.1, RFC 6581 §9).
//!
//! ```text
//! initiator                                        responder
//! Offer::request ──────────── Request ───────────► answer ─► Reply and Terms, or refusal ─► Reply with R set
//! Offer::conclude ◄─────────── Reply ────────────
//!   └► Terms: the ready-to-receive frame, if one was agreed on, then everything else
//! ```
//! The frames themselves are in [`mpa`]. What cannot be settled ends the connection, with a Terminate where the Reply has
//! let frames flow and without a word where it has not.

use super::mpa::{self, ConnectionWord, DEPTH_UNSTATED, Frame};
use super::rdmap::{Operation, ReadRequest, Reason};
use super::stream::{Receiver, Sender};

/// Reads of a peer that are served at once, at most (Linux siw's limit too).
pub const READS_SERVED_MAX: u16 = 128;

/// STag of the ready-to-receive frame: some hardware refuses zero, though nobody may look (RFC 5041 §5.2).
const READY_STAG: u32 = 1;

/// The empty message with which an initiator in peer-to-peer mode says that its peer may send (RFC 6581 §9.2).
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum ReadyFrame {
    Write,
    Read,
    Send,
}

/// The form of a Request.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Form {
    /// Revision 2 with a connection word. Of the ready-to-receive frames one is offered: then it is known which comes.
    PeerToPeer(ReadyFrame),
    /// Revision 2 with a connection word: the responder sends nothing before the initiator has sent something.
    ClientServer,
    /// Revision 1, which states no depths: one Read at a time.
    Revision1,
}

impl Default for Form {
    fn default() -> Self {
        Self::PeerToPeer(ReadyFrame::Write)
    }
}

/// What an initiator wants.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Offer {
    pub form: Form,
    /// CRCs are used if either end wants them.
    pub crc: bool,
    /// Reads outstanding in each direction, 1 to [`READS_SERVED_MAX`].
    pub read_depth: u16,
    /// A responder that serves no Reads will do.
    pub never_reads: bool,
}

/// What was settled.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Terms {
    /// CRCs are used, in both directions.
    pub crc: bool,
    /// Reads of ours that may be outstanding (ORD).
    pub reads_out: usize,
    /// Reads of the peer that are served at once (IRD).
    pub reads_in: usize,
    /// Peer-to-peer mode: the initiator sends this before anything else, the responder nothing before it came.
    pub ready: Option<ReadyFrame>,
}

/// A Reply after which no frame may be sent: close without a word (RFC 5044 §7.1.2, RFC 6581 §10).
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum ReplyError {
    #[error("it wants markers")]
    Markers,
    #[error("a Reply without a connection word")]
    NoWord,
    #[error("a Reply with a connection word nobody asked for")]
    SurplusWord,
}

impl Offer {
    /// The Request.
    pub fn request(&self, private_data: Vec<u8>) -> Frame {
        let mut word = ConnectionWord { ird: self.read_depth, ord: self.read_depth, ..ConnectionWord::default() };
        let (revision, word) = match self.form {
            Form::PeerToPeer(ready) => {
                ready.offer_in(&mut word);
                (2, Some(word))
            }
            Form::ClientServer => (2, Some(word)),
            Form::Revision1 => (1, None),
        };
        Frame { revision, markers: false, crc: self.crc, rejected: false, word, private_data }
    }

    /// What a Reply that does not reject settles. With a reason: the terms hold, but for a Terminate alone, behind the
    /// ready-to-receive frame if there is one.
    ///
    /// # Errors
    /// [`ReplyError`].
    pub fn conclude(&self, reply: &Frame) -> Result<(Terms, Option<Reason>), ReplyError> {
        if reply.markers {
            return Err(ReplyError::Markers);
        }
        let crc = self.crc || reply.crc;
        let word = match (self.form, reply.word) {
            (Form::Revision1, None) => {
                return Ok((Terms { crc, reads_out: 1, reads_in: READS_SERVED_MAX.into(), ready: None }, None));
            }
            (Form::Revision1, Some(_)) => return Err(ReplyError::SurplusWord),
            (_, None) => return Err(ReplyError::NoWord),
            (_, Some(word)) => word,
        };
        let reads_out = if word.ird == DEPTH_UNSTATED { self.read_depth } else { self.read_depth.min(word.ird) };
        let reads_in = if word.ord == DEPTH_UNSTATED { READS_SERVED_MAX } else { self.read_depth.max(word.ord) };
        let (mut ready, mut reason) = (None, None);
        if let Form::PeerToPeer(offered) = self.form
            && word.peer_to_peer
        {
            let kinds = [offered, ReadyFrame::Write, ReadyFrame::Read, ReadyFrame::Send];
            ready = kinds.into_iter().find(|kind| kind.is_in(&word));
            reason = ready.is_none().then_some(Reason::NO_READY_FRAME);
        }
        // Whoever Reads, and be it to say "ready", needs a peer that serves it.
        let is_deaf = reads_out == 0 && (!self.never_reads || ready == Some(ReadyFrame::Read));
        if is_deaf || reads_in > READS_SERVED_MAX {
            reason = reason.or(Some(Reason::READ_DEPTH));
        }
        let terms = Terms { crc, reads_out: reads_out.into(), reads_in: reads_in.min(READS_SERVED_MAX).into(), ready };
        Ok((terms, reason))
    }
}

/// Whether a responder that Reads can do so: the peer's IRD says how many of its Reads are served at once. How many the peer
/// Reads itself (its ORD) may be none. Without a word depths are not negotiated (RFC 6581 §9.1).
pub fn serves_reads(request: &Frame) -> bool {
    request.word.is_none_or(|word| word.ird > 0)
}

/// The Reply that takes a Request, still without private data, and what it settles. `crc` and `read_depth` are what the
/// responder wants. A Request for markers is for [`refusal`].
pub fn answer(request: &Frame, crc: bool, read_depth: u16) -> (Frame, Terms) {
    let crc = crc || request.crc;
    let reply = |word| Frame { word, crc, markers: false, rejected: false, private_data: Vec::new(), ..*request };
    let Some(theirs) = request.word else {
        return (reply(None), Terms { crc, reads_out: 1, reads_in: READS_SERVED_MAX.into(), ready: None });
    };
    let reads_out = if theirs.ird == DEPTH_UNSTATED { read_depth } else { read_depth.min(theirs.ird) };
    let mut reads_in = if theirs.ord == DEPTH_UNSTATED { READS_SERVED_MAX } else { READS_SERVED_MAX.min(theirs.ord) };
    let mut ours = ConnectionWord::default();
    let mut ready = None;
    if theirs.peer_to_peer {
        // One of those offered, so that it is known which comes; of none, what we could take.
        let kinds = [ReadyFrame::Write, ReadyFrame::Read, ReadyFrame::Send];
        let kind = kinds.into_iter().find(|kind| kind.is_in(&theirs)).unwrap_or(ReadyFrame::Write);
        kind.offer_in(&mut ours);
        ready = Some(kind);
        if kind == ReadyFrame::Read {
            reads_in = reads_in.max(1);
        }
    }
    ours.ird = if theirs.ord == DEPTH_UNSTATED { DEPTH_UNSTATED } else { reads_in };
    ours.ord = if theirs.ird == DEPTH_UNSTATED { DEPTH_UNSTATED } else { reads_out };
    (reply(Some(ours)), Terms { crc, reads_out: reads_out.into(), reads_in: reads_in.into(), ready })
}

/// The Reply that declines a Request. Its depths are what the peer would get, and at least what it would have to give.
pub fn refusal(request: &Frame, private_data: Vec<u8>) -> Frame {
    let (mut reply, _) = answer(request, false, READS_SERVED_MAX);
    if let Some(word) = &mut reply.word {
        word.ord = word.ord.max(1);
    }
    Frame { rejected: true, private_data, ..reply }
}

impl ReadyFrame {
    const fn is_in(self, word: &ConnectionWord) -> bool {
        match self {
            Self::Write => word.rtr_write,
            Self::Read => word.rtr_read,
            Self::Send => word.rtr_send,
        }
    }

    const fn offer_in(self, word: &mut ConnectionWord) {
        word.peer_to_peer = true;
        match self {
            Self::Write => word.rtr_write = true,
            Self::Read => word.rtr_read = true,
            Self::Send => word.rtr_send = true,
        }
    }

    /// Appends the frame as an initiator sends it, first of all. The Response to a Read is awaited by `receiver`.
    pub fn put(self, out: &mut Vec<u8>, sender: &mut Sender, receiver: &mut Receiver) {
        let part = match self {
            Self::Write => sender.tagged(Operation::Write, READY_STAG, 0, 0),
            Self::Send => sender.send(None, false, 0, 0),
            Self::Read => {
                let (stag, offset) = (READY_STAG, 0);
                receiver.await_read(stag, offset, 0);
                let request =
                    ReadRequest { sink_stag: stag, sink_offset: offset, len: 0, source_stag: stag, source_offset: 0 };
                return sender.put_read_request(out, &request);
            }
        };
        mpa::put_fpdu(out, part.header(), &[], sender.crc());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::iwarp::mpa::FrameKind;

    const FORMS: [Form; 5] = [
        Form::PeerToPeer(ReadyFrame::Write),
        Form::PeerToPeer(ReadyFrame::Read),
        Form::PeerToPeer(ReadyFrame::Send),
        Form::ClientServer,
        Form::Revision1,
    ];

    fn across(kind: FrameKind, frame: &Frame) -> Frame {
        let octets = frame.encode(kind);
        let (again, len) = Frame::decode(kind, &octets).unwrap().unwrap();
        assert_eq!((&again, len), (frame, octets.len()));
        again
    }

    fn offer() -> Offer {
        Offer { form: Form::default(), crc: true, read_depth: 16, never_reads: false }
    }

    fn word(flags: &str, ird: u16, ord: u16) -> ConnectionWord {
        let is = |flag| flags.contains(flag);
        ConnectionWord { peer_to_peer: is('A'), rtr_send: is('B'), rtr_write: is('C'), rtr_read: is('D'), ird, ord }
    }

    fn request(word: Option<ConnectionWord>) -> Frame {
        let revision = if word.is_some() { 2 } else { 1 };
        Frame { revision, markers: false, crc: false, rejected: false, word, private_data: Vec::new() }
    }

    #[test]
    fn both_ends_of_ours_come_to_the_same_terms_in_every_form() {
        for form in FORMS {
            for (asks, wants) in [(false, false), (false, true), (true, false), (true, true)] {
                for (near, far) in [(1, 1), (16, 16), (16, 128), (128, 16), (1, 128), (128, 1)] {
                    let offer = Offer { form, read_depth: near, crc: asks, ..offer() };
                    let request = across(FrameKind::Request, &offer.request(b"data".to_vec()));
                    assert_eq!((request.crc, request.markers, request.rejected), (asks, false, false));
                    let (reply, theirs) = answer(&request, wants, far);
                    let reply = across(FrameKind::Reply, &reply);
                    let (ours, reason) = offer.conclude(&reply).unwrap();
                    assert_eq!(reason, None);
                    assert_eq!((ours.crc, theirs.crc, reply.crc), (asks || wants, asks || wants, asks || wants));
                    assert_eq!((ours.ready, reply.revision), (theirs.ready, request.revision));
                    let expected = if let Form::PeerToPeer(ready) = form { Some(ready) } else { None };
                    assert_eq!(ours.ready, expected);
                    assert!((1..=theirs.reads_in).contains(&ours.reads_out), "{ours:?} {theirs:?}");
                    assert!((1..=ours.reads_in).contains(&theirs.reads_out), "{ours:?} {theirs:?}");
                    if form != Form::Revision1 {
                        assert_eq!(ours.reads_out, usize::from(near), "we serve what is asked for");
                        assert_eq!(theirs.reads_out, usize::from(near.min(far)));
                    }
                }
            }
        }
    }

    /// RFC 6581 §9.1, §9.2: the flags, the depths and "not negotiated".
    #[test]
    fn the_answer_follows_the_request() {
        let table = [
            // Without A the other flags are nothing, and none is answered.
            (word("", 4, 4), word("", 4, 4), None),
            (word("BCD", 4, 4), word("", 4, 4), None),
            (word("AC", 4, 5), word("AC", 5, 4), Some(ReadyFrame::Write)),
            (word("ABCD", 4, 5), word("AC", 5, 4), Some(ReadyFrame::Write)),
            (word("ABD", 4, 5), word("AD", 5, 4), Some(ReadyFrame::Read)),
            (word("AB", 4, 5), word("AB", 5, 4), Some(ReadyFrame::Send)),
            // None offered: one that would do.
            (word("A", 4, 5), word("AC", 5, 4), Some(ReadyFrame::Write)),
            // The Read that says "ready" must be served, though no other is wanted.
            (word("AD", 4, 0), word("AD", 1, 4), Some(ReadyFrame::Read)),
            (word("", 300, 0), word("", 0, 16), None),
            (word("", 1, 300), word("", 128, 1), None),
            (word("", DEPTH_UNSTATED, 300), word("", 128, DEPTH_UNSTATED), None),
            (word("", 1, DEPTH_UNSTATED), word("", DEPTH_UNSTATED, 1), None),
        ];
        for (asked, said, ready) in table {
            let (reply, terms) = answer(&request(Some(asked)), false, 16);
            assert_eq!((reply.word, terms.ready), (Some(said), ready), "{asked:?}");
            assert_eq!((reply.revision, reply.rejected, reply.markers), (2, false, false));
            let expected = if said.ord == DEPTH_UNSTATED { 16 } else { said.ord };
            assert_eq!(terms.reads_out, usize::from(expected), "its setting stays where nothing is negotiated");
            let expected = if said.ird == DEPTH_UNSTATED { READS_SERVED_MAX } else { said.ird };
            assert_eq!(terms.reads_in, usize::from(expected));
        }
        // Revision 2 without a word, as revision 1, is answered in kind.
        for revision in [1, 2] {
            let (reply, terms) = answer(&Frame { revision, ..request(None) }, false, 16);
            assert_eq!((reply.revision, reply.word), (revision, None));
            assert_eq!((terms.reads_out, terms.reads_in, terms.ready), (1, 128, None));
        }
    }

    /// What Linux's NFS client says on a device of 128: it serves Reads and never Reads.
    #[test]
    fn a_peer_that_never_reads_may_be_read_from() {
        let asked = request(Some(word("", 128, 0)));
        assert!(serves_reads(&asked));
        let (reply, terms) = answer(&asked, false, 16);
        assert_eq!((terms.reads_out, terms.reads_in, reply.word), (16, 0, Some(word("", 0, 16))));
        let few = request(Some(word("AC", 3, 0)));
        assert_eq!((serves_reads(&few), answer(&few, false, 16).1.reads_out), (true, 3));
        // The other way round nobody could be Read from.
        for (ird, ord, serves) in [(0, 0, false), (0, 4, false), (4, 0, true), (DEPTH_UNSTATED, 0, true)] {
            assert_eq!(serves_reads(&request(Some(word("", ird, ord)))), serves, "{ird} {ord}");
        }
        assert!(serves_reads(&request(None)));
    }

    #[test]
    fn a_reply_is_concluded_from() {
        let conclude = |form, said| {
            let reply = request(Some(said));
            let (terms, reason) = Offer { form, ..offer() }.conclude(&reply).unwrap();
            (terms.reads_out, terms.reads_in, terms.ready, reason)
        };
        let writes = Form::default();
        let (write, read, send) = (Some(ReadyFrame::Write), Some(ReadyFrame::Read), Some(ReadyFrame::Send));
        for (form, said, expected) in [
            (writes, word("AC", 16, 16), (16, 16, write, None)),
            (writes, word("AC", 4, 4), (4, 16, write, None)),
            (writes, word("AC", 300, 128), (16, 128, write, None)),
            (writes, word("AC", 300, 129), (16, 128, write, Some(Reason::READ_DEPTH))),
            (writes, word("AC", 0, 16), (0, 16, write, Some(Reason::READ_DEPTH))),
            (writes, word("AC", DEPTH_UNSTATED, DEPTH_UNSTATED), (16, 128, write, None)),
            // What the responder would rather have is sent.
            (writes, word("AD", 16, 16), (16, 16, read, None)),
            (writes, word("AB", 16, 16), (16, 16, send, None)),
            (writes, word("A", 16, 16), (16, 16, None, Some(Reason::NO_READY_FRAME))),
            (Form::PeerToPeer(ReadyFrame::Send), word("ABCD", 16, 16), (16, 16, send, None)),
            (Form::PeerToPeer(ReadyFrame::Read), word("ABCD", 16, 16), (16, 16, read, None)),
            // No peer-to-peer mode: the flags are nothing.
            (writes, word("BCD", 16, 16), (16, 16, None, None)),
            (Form::ClientServer, word("", 16, 16), (16, 16, None, None)),
            (Form::ClientServer, word("AC", 16, 16), (16, 16, None, None)),
        ] {
            assert_eq!(conclude(form, said), expected, "{form:?} {said:?}");
        }
        // Who never Reads needs nobody who serves it, but for a ready-to-receive frame that is one.
        for (said, expected) in [
            (word("AC", 0, 16), None),
            (word("", 0, 16), None),
            (word("AD", 0, 16), Some(Reason::READ_DEPTH)),
            (word("AC", 0, 129), Some(Reason::READ_DEPTH)),
        ] {
            let (terms, reason) = Offer { never_reads: true, ..offer() }.conclude(&request(Some(said))).unwrap();
            assert_eq!((terms.reads_out, reason), (0, expected), "{said:?}");
        }
        let of_word = request(Some(word("AC", 16, 16)));
        assert_eq!(offer().conclude(&Frame { markers: true, ..of_word.clone() }), Err(ReplyError::Markers));
        assert_eq!(offer().conclude(&request(None)), Err(ReplyError::NoWord));
        let old = Offer { form: Form::Revision1, ..offer() };
        assert_eq!(old.conclude(&of_word), Err(ReplyError::SurplusWord));
        let (terms, reason) = old.conclude(&request(None)).unwrap();
        assert_eq!((terms.reads_out, terms.reads_in, terms.ready, reason), (1, 128, None, None));
    }

    #[test]
    fn a_refusal_is_of_the_requests_form_and_asks_for_no_markers() {
        for form in FORMS {
            let asked = Frame { markers: true, ..Offer { form, ..offer() }.request(Vec::new()) };
            let reply = across(FrameKind::Reply, &refusal(&asked, b"why".to_vec()));
            assert_eq!((reply.rejected, reply.markers, &reply.private_data[..]), (true, false, &b"why"[..]));
            assert_eq!((reply.revision, reply.word.is_some()), (asked.revision, asked.word.is_some()));
            let is_peer_to_peer = |frame: &Frame| frame.word.is_some_and(|word| word.peer_to_peer);
            assert_eq!(is_peer_to_peer(&reply), is_peer_to_peer(&asked));
        }
        // Who offers to serve no Reads is told how many would do.
        assert_eq!(refusal(&request(Some(word("", 0, 4))), Vec::new()).word, Some(word("", 4, 1)));
    }

    #[test]
    fn the_ready_to_receive_frame_is_empty_and_comes_out_as_what_it_is() {
        use crate::wire::iwarp::stream::Kind;
        for (ready, octets_len) in [(ReadyFrame::Write, 20), (ReadyFrame::Send, 24), (ReadyFrame::Read, 52)] {
            let (mut sender, mut receiver) = (Sender::new(true, 1 << 10), Receiver::new(true, 1));
            let mut octets = Vec::new();
            ready.put(&mut octets, &mut sender, &mut receiver);
            assert_eq!(octets.len(), octets_len);
            let mut peer = Receiver::new(true, 1);
            let (segment, len) = peer.next(&octets).unwrap().unwrap();
            assert_eq!(len, octets_len);
            match (ready, segment.kind) {
                (ReadyFrame::Write, Kind::Write { stag: 1, offset: 0, last: true }) => {}
                (ReadyFrame::Send, Kind::Send { offset: 0, last: true, invalidate: None, solicited: false }) => {}
                (ReadyFrame::Read, Kind::ReadRequest(ReadRequest { len: 0, .. })) => {
                    assert!(!receiver.is_between_messages(), "its Response is awaited");
                    let part = sender.tagged(Operation::ReadResponse, 1, 0, 0);
                    let mut response = Vec::new();
                    mpa::put_fpdu(&mut response, part.header(), &[], true);
                    let (segment, _) = receiver.next(&response).unwrap().unwrap();
                    assert_eq!(segment.kind, Kind::ReadResponse { done: 0, last: true });
                }
                other => panic!("{other:?}"),
            }
            assert!(receiver.is_between_messages());
        }
    }
}
