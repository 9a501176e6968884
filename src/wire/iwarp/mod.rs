//! The iWARP stack over a byte stream: MPA (RFC 5044, 6581), DDP (RFC 5041), RDMAP (RFC 5040).
//!
//! ```text
//! TCP stream:   MPA Request -> | <- MPA Reply | FPDU FPDU FPDU …              both directions
//! FPDU:         ULPDU length (2) | ULPDU = one DDP segment | pad (0..3) | CRC32c (4)
//! DDP segment:  DDP control (1) | RDMAP control (1) | tagged (12) or untagged (16) header | payload
//! ```
//! All numbers are big-endian but the CRC. [`mpa`] has the start-up frames and the framing, [`ddp`] the two segment
//! headers, [`rdmap`] operations and Terminate; [`stream`] puts them together: a [`stream::Receiver`] turns octets into
//! checked [`stream::Segment`]s, a [`stream::Sender`] cuts messages into segments.
//!
//! Departures from the RFCs, on purpose: markers are neither sent nor accepted (a Request that demands them is refused);
//! MSN and message offsets must rise without a gap; ULPDUs of up to 65,535 octets are accepted.
pub mod ddp;
pub mod mpa;
pub mod rdmap;
pub mod stream;
