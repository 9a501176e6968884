//! Flags of every subcommand that talks to a server.

use std::num::NonZeroU32;

use bulkhead::client::{AnyClient, ClientError, Geometry, Options, RpcClient, RpcOptions, ServerUrl};
use bulkhead::config::{ByteSize, TimeSpan};
use bulkhead::wire::rpcrdma::private_data::{INLINE_BYTES_MAX, INLINE_BYTES_MIN};
use clap::Args;

const SERVER_VARIABLE: &str = "BULKHEAD_SERVER";
const SERVER_DEFAULT: &str = "native+iwarp://127.0.0.1:11212";

#[derive(Args, Debug)]
pub struct ServerArgs {
    /// memcache://HOST:PORT, memcache+unix:/path, native+iwarp://HOST:PORT[?crc=off], rpc+iwarp://HOST:PORT[?crc=off],
    /// native+verbs://HOST:PORT or rpc+verbs://HOST:PORT [default: $BULKHEAD_SERVER, else native+iwarp://127.0.0.1:11212]
    #[arg(long, value_name = "URL")]
    server: Option<ServerUrl>,
    /// Give up when no octet moves for this long
    #[arg(long, value_name = "TIME", default_value = "60s")]
    timeout: TimeSpan,
    /// Native servers: octets of a window, a power of two from 4KiB on
    #[arg(long, value_name = "SIZE", default_value = "256KiB")]
    window: ByteSize,
    /// Native servers: windows to receive into, and as many to send from
    #[arg(long, value_name = "COUNT", default_value_t = 4)]
    windows: u32,
    /// Native servers: octets of the control ring
    #[arg(long, value_name = "SIZE", default_value = "64KiB")]
    ring: ByteSize,
    /// RPC servers: octets of the longest message, 1KiB to 256KiB
    #[arg(long, value_name = "SIZE", default_value = "4KiB", value_parser = parse_inline)]
    inline: u32,
    /// RPC servers: calls in flight at most
    #[arg(long, value_name = "COUNT", default_value = "32")]
    credits: NonZeroU32,
    /// RPC servers: check values by CRC32C from end to end
    #[arg(long)]
    crc32c: bool,
}

fn parse_inline(text: &str) -> Result<u32, String> {
    let ByteSize(octets) = text.parse()?;
    let inline = u32::try_from(octets).ok().filter(|octets| (INLINE_BYTES_MIN..=INLINE_BYTES_MAX).contains(octets));
    inline.ok_or_else(|| format!("want {} to {}", ByteSize(INLINE_BYTES_MIN.into()), ByteSize(INLINE_BYTES_MAX.into())))
}

impl ServerArgs {
    /// # Errors
    /// [`ClientError::Url`] if the environment names no server.
    pub fn url(&self) -> Result<ServerUrl, ClientError> {
        match (&self.server, std::env::var(SERVER_VARIABLE)) {
            (Some(url), _) => Ok(url.clone()),
            (None, Ok(url)) if !url.is_empty() => url.parse(),
            _ => SERVER_DEFAULT.parse(),
        }
    }

    pub fn options(&self) -> Options {
        let geometry = Geometry { ring_bytes: self.ring.0, window_bytes: self.window.0, window_count: self.windows };
        Options { io_timeout: self.timeout.0, geometry, ..Options::default() }
    }

    pub fn rpc_options(&self) -> RpcOptions {
        let Self { inline, credits, crc32c, .. } = *self;
        RpcOptions { inline_bytes: inline, credits, crc32c, ..self.options().into() }
    }

    pub fn connect(&self) -> Result<AnyClient, ClientError> {
        match self.url()? {
            url if url.is_rpc() => RpcClient::connect(url, self.rpc_options()).map(Box::new).map(AnyClient::Rpc),
            url => AnyClient::connect(url, self.options()),
        }
    }
}
