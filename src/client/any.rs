//! One client for every URL.

use std::io::{self, Read, Write};
use std::time::Duration;

use super::rpc::{PutOptions, RpcClient};
use super::{Client, ClientError, Info, NativeClient, Options, ServerUrl};

/// The client that a URL asks for; what all can do.
#[derive(Debug)]
pub enum AnyClient {
    Memcache(Box<Client>),
    Native(Box<NativeClient>),
    Rpc(Box<RpcClient>),
}

/// Calls the same method of whichever it is; what RPC has differently stands behind.
macro_rules! either {
    ($client:expr, $inner:ident => $call:expr) => {
        either!($client, $inner => $call, $call)
    };
    ($client:expr, $inner:ident => $call:expr, $rpc:expr) => {
        match $client {
            AnyClient::Memcache($inner) => $call,
            AnyClient::Native($inner) => $call,
            AnyClient::Rpc($inner) => $rpc,
        }
    };
}

/// What program `bulkhead` has no procedure for.
fn not_over_rpc(what: &str) -> ClientError {
    ClientError::Refused { reply: format!("{what} cannot be asked for over RPC") }
}

impl AnyClient {
    /// Connects to `url`.
    ///
    /// # Errors
    /// As [`Client::connect`], [`NativeClient::connect`] or [`RpcClient::connect`].
    pub fn connect(url: ServerUrl, options: Options) -> Result<Self, ClientError> {
        if url.is_rpc() {
            return RpcClient::connect(url, options.into()).map(Box::new).map(Self::Rpc);
        }
        if url.is_native() {
            return NativeClient::connect(url, options).map(Box::new).map(Self::Native);
        }
        Client::connect(url, options).map(Box::new).map(Self::Memcache)
    }

    /// The server's name.
    pub fn url(&self) -> &ServerUrl {
        either!(self, client => client.url())
    }

    /// Stores exactly `len` octets from `value`, see [`Client::put`].
    ///
    /// # Errors
    /// As [`Client::put`].
    pub fn put(
        &mut self,
        key: impl AsRef<[u8]>,
        value: &mut impl Read,
        len: u64,
        flags: u32,
        ttl: Option<Duration>,
    ) -> Result<(), ClientError> {
        let options = PutOptions { flags, ttl, ..PutOptions::default() };
        either!(self, client => client.put(key, value, len, flags, ttl), client.put(key, value, len, options).map(drop))
    }

    /// Streams a value into `sink`; `None` is a miss.
    ///
    /// # Errors
    /// As [`Client::get`].
    pub fn get(&mut self, key: impl AsRef<[u8]>, sink: &mut impl Write) -> Result<Option<Info>, ClientError> {
        either!(self, client => client.get(key, sink))
    }

    /// As [`get`](Self::get), with a sink that is made once the value is known to exist.
    ///
    /// # Errors
    /// As [`Client::get_with`].
    pub fn get_with<W: Write>(
        &mut self,
        key: impl AsRef<[u8]>,
        open: impl FnOnce(&Info) -> io::Result<W>,
    ) -> Result<Option<(Info, W)>, ClientError> {
        either!(self, client => client.get_with(key, open))
    }

    /// Reads a value into the front of `buffer`; `None` is a miss.
    ///
    /// # Errors
    /// As [`Client::get_into`].
    pub fn get_into(&mut self, key: impl AsRef<[u8]>, buffer: &mut [u8]) -> Result<Option<Info>, ClientError> {
        either!(self, client => client.get_into(key, buffer))
    }

    /// Length, flags and version of a value; `None` is a miss.
    ///
    /// # Errors
    /// As [`Client::stat`].
    pub fn stat(&mut self, key: impl AsRef<[u8]>) -> Result<Option<Info>, ClientError> {
        let info = |stat: super::rpc::Stat| Info { len: stat.len, flags: stat.flags, cas: stat.version };
        either!(self, client => client.stat(key), Ok(client.stat(key)?.map(info)))
    }

    /// Removes a value; `false` if there was none.
    ///
    /// # Errors
    /// As [`Client::delete`].
    pub fn delete(&mut self, key: impl AsRef<[u8]>) -> Result<bool, ClientError> {
        either!(self, client => client.delete(key))
    }

    /// Gives a value a new time to live (`None`: for ever); `false` if there is none.
    ///
    /// # Errors
    /// As [`Client::touch`].
    pub fn touch(&mut self, key: impl AsRef<[u8]>, ttl: Option<Duration>) -> Result<bool, ClientError> {
        either!(self, client => client.touch(key, ttl))
    }

    /// The server's version.
    ///
    /// # Errors
    /// As [`Client::version`].
    pub fn version(&mut self) -> Result<String, ClientError> {
        either!(self, client => client.version(), Err(not_over_rpc(&format!("the version of {}", client.url()))))
    }

    /// Names and values of one group of statistics; `None` is the general one.
    ///
    /// # Errors
    /// As [`Client::stats`].
    pub fn stats(&mut self, group: Option<&str>) -> Result<Vec<(String, String)>, ClientError> {
        either!(self, client => client.stats(group), Err(not_over_rpc(&format!("the statistics of {}", client.url()))))
    }
}
