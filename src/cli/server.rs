//! Flags of every subcommand that talks to a server.

use bulkhead::client::{AnyClient, ClientError, Geometry, Options, ServerUrl};
use bulkhead::config::{ByteSize, TimeSpan};
use clap::Args;

const SERVER_VARIABLE: &str = "BULKHEAD_SERVER";
const SERVER_DEFAULT: &str = "native+iwarp://127.0.0.1:11212";

#[derive(Args, Debug)]
pub struct ServerArgs {
    /// memcache://HOST:PORT, memcache+unix:/path, native+iwarp://HOST:PORT[?crc=off] or native+verbs://HOST:PORT [default:
    /// $BULKHEAD_SERVER, else native+iwarp://127.0.0.1:11212]
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

    pub fn connect(&self) -> Result<AnyClient, ClientError> {
        AnyClient::connect(self.url()?, self.options())
    }
}
