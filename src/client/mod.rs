//! The client library: without actix, blocking over std's sockets, or native or RPC over a fabric.
//!
//! ```no_run
//! use bulkhead::client::{Client, Options};
//!
//! # fn main() -> Result<(), bulkhead::client::ClientError> {
//! let url = "memcache://127.0.0.1:11211".parse()?;
//! let mut client = Client::connect(url, Options::default())?;
//! let model = b"bytes of a model";
//! client.put("model", &mut &model[..], model.len() as u64, 0, None)?;
//! let mut copy = Vec::new();
//! let info = client.get("model", &mut copy)?.expect("it was just stored");
//! assert_eq!((info.len, copy.as_slice()), (16, &model[..]));
//! # Ok(())
//! # }
//! ```
//!
//! | part | what it is |
//! |---|---|
//! | [`ServerUrl`] | names a server: `memcache://HOST:PORT`, `memcache+unix:/path`, `native+iwarp://HOST:PORT`, `rpc+iwarp://HOST:PORT` |
//! | [`Client`] | one conversation at a time with one server; values stream through one buffer of 256 KiB |
//! | [`NativeClient`], [`AsyncClient`] | the native protocol: reads that land in the caller's memory, requests in flight |
//! | [`RpcClient`], [`AsyncRpcClient`] | RPC over RDMA: batches of ranges that land in the caller's memory, any program |
//! | [`AnyClient`] | whichever of the blocking ones a URL asks for |
//! | [`Stream`] | a connected socket, for callers that speak the protocol themselves |
//! | [`ClientError`] | who is at fault, and the exit code that says so |

mod any;
mod connection;
mod error;
pub mod native;
pub mod rpc;
mod stream;
mod url;

pub use any::AnyClient;
pub use connection::{Client, Info, KEY_BYTES_MAX, Options};
pub use error::ClientError;
pub use native::{AsyncClient, Geometry, NativeClient, Outcome};
pub use rpc::{AsyncRpcClient, RpcClient, RpcOptions};
pub use stream::Stream;
pub use url::ServerUrl;
