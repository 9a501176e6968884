//! A call of any program that is served here.

use crate::programs::bulkhead::{self, Put, PutMore};
use crate::programs::nfs::Write;
use crate::programs::rpc::{ArgumentFault, Call, Data};
use crate::programs::{mount, nfs};
use crate::wire::rpcrdma::duplicate::first_bytes;
use std::ops::Range;

/// Arguments of a procedure.
#[derive(Debug)]
pub(super) enum Request<'a> {
    Bulkhead(bulkhead::Request<'a, Data>),
    Nfs(nfs::Request<'a>),
    Mount(mount::Request<'a>),
}

impl<'a> Request<'a> {
    pub fn parse(call: Call<'a>) -> Result<Self, ArgumentFault> {
        Ok(match call.program.number {
            nfs::PROGRAM_NUMBER => Self::Nfs(nfs::Request::parse(call)?),
            mount::PROGRAM_NUMBER => Self::Mount(mount::Request::parse(call)?),
            _ => Self::Bulkhead(bulkhead::Request::parse(call)?),
        })
    }

    /// Such calls begin in the order in which they came.
    pub fn is_of_draft(&self) -> bool {
        use bulkhead::Request::{Put, PutDrop, PutMore};
        matches!(self, Self::Bulkhead(Put(_) | PutMore(_) | PutDrop { .. }))
    }

    /// Octets of values are its results.
    pub fn is_read(&self) -> bool {
        matches!(self, Self::Bulkhead(bulkhead::Request::Get(_)) | Self::Nfs(nfs::Request::Read(_)))
    }

    /// It must not be executed twice.
    pub fn has_lasting_effect(&self) -> bool {
        match self {
            Self::Bulkhead(request) => request.has_lasting_effect(),
            Self::Nfs(request) => request.has_lasting_effect(),
            Self::Mount(_) => false,
        }
    }

    /// Octets of the longest reply, but for octets of values.
    pub fn reply_bytes_max(&self) -> u64 {
        match self {
            Self::Bulkhead(request) => request.expectation().reduced_bytes_max(),
            // There are no links to read the paths of.
            Self::Nfs(request) => request.reply_bound().reduced_bytes,
            Self::Mount(request) => request.reply_bound().reduced_bytes,
        }
    }

    /// Octets by which a WRITE is known, where they are in a chunk.
    pub fn first_bytes_to_come(&self) -> usize {
        match self {
            Self::Nfs(nfs::Request::Write(Write { data: Data::Chunk { len, .. }, .. })) => first_bytes(*len),
            _ => 0,
        }
    }

    /// The data of a WRITE, if it is in the stream.
    pub fn data_here<'s>(&self, stream: &'s [u8]) -> &'s [u8] {
        match self {
            Self::Nfs(nfs::Request::Write(Write { data: Data::Inline(range), .. })) => &stream[range.clone()],
            _ => &[],
        }
    }

    /// Where in the stream the item is that could as well be in a chunk.
    pub fn inline_item(&self) -> Option<Range<usize>> {
        let data = match self {
            Self::Bulkhead(
                bulkhead::Request::Put(Put { data, .. }) | bulkhead::Request::PutMore(PutMore { data, .. }),
            ) => data,
            Self::Nfs(nfs::Request::Write(write)) => &write.data,
            Self::Nfs(nfs::Request::SymLink(link)) => &link.path,
            _ => return None,
        };
        match data {
            Data::Inline(range) => Some(range.clone()),
            Data::Chunk { .. } => None,
        }
    }
}
