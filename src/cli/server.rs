//! Flags of every subcommand that talks to a server.

use bulkhead::client::{AnyClient, ClientError, Options, ServerUrl};
use bulkhead::config::TimeSpan;
use clap::Args;

const SERVER_VARIABLE: &str = "BULKHEAD_SERVER";
const SERVER_DEFAULT: &str = "memcache://127.0.0.1:11211";

#[derive(Args, Debug)]
pub struct ServerArgs {
    /// memcache://HOST:PORT, memcache+unix:/path or native+iwarp://HOST:PORT[?crc=off] [default: $BULKHEAD_SERVER,
    /// else memcache://127.0.0.1:11211]
    #[arg(long, value_name = "URL")]
    server: Option<ServerUrl>,
    /// Give up when no octet moves for this long
    #[arg(long, value_name = "TIME", default_value = "60s")]
    timeout: TimeSpan,
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
        Options { io_timeout: self.timeout.0, ..Options::default() }
    }

    pub fn connect(&self) -> Result<AnyClient, ClientError> {
        AnyClient::connect(self.url()?, self.options())
    }
}
