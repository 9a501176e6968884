//! The iWARP stack over a byte stream: MPA (RFC 5044, 6581), DDP (RFC 5041), RDMAP (RFC 5040).
//!
//! ```text
//! TCP stream:   MPA Request -> | <- MPA Reply | FPDU FPDU FPDU …              both directions
//! FPDU:         ULPDU length (2) | ULPDU = one DDP segment | pad (0..3) | CRC32c (4)
//! DDP segment:  DDP control (1) | RDMAP control (1) | tagged (12) or untagged (16) header | payload
//! ```
//! All numbers are big-endian but the CRC. [`mpa`] has the start-up frames and the framing, [`ddp`] the two segment
//! headers, [`rdmap`] operations and Terminate; [`startup`] settles what Request and Reply say; [`stream`] puts the rest
//! together: a [`stream::Receiver`] turns octets into checked [`stream::Segment`]s, a [`stream::Sender`] cuts messages into
//! segments. `docs/iwarp-conformance.md` has each rule of the RFCs with the tests that prove it, and every departure.
//!
//! Departures from the RFCs, on purpose: markers are neither sent nor accepted (a Request that demands them is refused);
//! MSN and message offsets must rise without a gap; ULPDUs of up to 65,535 octets are accepted.
pub mod ddp;
pub mod mpa;
pub mod rdmap;
pub mod startup;
pub mod stream;
