//! Names of servers.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use super::ClientError;
use crate::config::UNIX_PATH_BYTES_MAX;
use crate::fabric::Address;

/// A server and the way to it.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum ServerUrl {
    /// `memcache://HOST:PORT`: memcache text over TCP. The port is 11211 if none is given.
    Memcache { host: String, port: u16 },
    /// `memcache+unix:/path`: memcache text over a Unix socket.
    MemcacheUnix { path: PathBuf },
    /// `native+iwarp://HOST:PORT[?crc=off]`: the native protocol over iWARP. The port is 11212 if none is given. CRCs
    /// are used unless both sides do without.
    NativeIwarp { host: String, port: u16, crc: bool },
    /// `native+verbs://HOST:PORT`: the native protocol over RDMA devices, of a program built with the feature `verbs`. The
    /// port is 11212 if none is given.
    NativeVerbs { host: String, port: u16 },
    /// A native server at an address of a fabric that the program itself has. No text names it.
    Native { fabric: &'static str, address: Address },
    /// `rpc+iwarp://HOST:PORT[?crc=off]`: RPC over RDMA, over iWARP. The port is 20049 if none is given.
    RpcIwarp { host: String, port: u16, crc: bool },
    /// `rpc+verbs://HOST:PORT`: the same over RDMA devices, of a program built with the feature `verbs`.
    RpcVerbs { host: String, port: u16 },
    /// An RPC server at an address of a fabric that the program itself has. No text names it.
    Rpc { fabric: &'static str, address: Address },
}

const PORT_DEFAULT: u16 = 11211;
const NATIVE_PORT_DEFAULT: u16 = 11212;
const RPC_PORT_DEFAULT: u16 = 20049;

impl ServerUrl {
    /// The native protocol is spoken there.
    pub const fn is_native(&self) -> bool {
        matches!(self, Self::NativeIwarp { .. } | Self::NativeVerbs { .. } | Self::Native { .. })
    }

    /// Host and port of a native server, where the URL has them.
    pub(super) fn native_place(&self) -> Option<(&str, u16)> {
        match self {
            Self::NativeIwarp { host, port, .. } | Self::NativeVerbs { host, port } => Some((host, *port)),
            _ => None,
        }
    }

    /// RPC over RDMA is spoken there.
    pub const fn is_rpc(&self) -> bool {
        matches!(self, Self::RpcIwarp { .. } | Self::RpcVerbs { .. } | Self::Rpc { .. })
    }

    /// Host and port of an RPC server, where the URL has them.
    pub(super) fn rpc_place(&self) -> Option<(&str, u16)> {
        match self {
            Self::RpcIwarp { host, port, .. } | Self::RpcVerbs { host, port } => Some((host, *port)),
            _ => None,
        }
    }
}

impl FromStr for ServerUrl {
    type Err = ClientError;

    fn from_str(url: &str) -> Result<Self, ClientError> {
        let wrong = |reason: String| ClientError::Url { url: url.to_owned(), reason };
        let (scheme, rest) = url.split_once(':').ok_or_else(|| wrong("no scheme".to_owned()))?;
        match scheme {
            "memcache" => {
                let (host, port) = host_and_port(plain_place(rest).map_err(wrong)?, PORT_DEFAULT).map_err(wrong)?;
                Ok(Self::Memcache { host, port })
            }
            "native+iwarp" => {
                let (host, port, crc) = iwarp_place(rest, NATIVE_PORT_DEFAULT).map_err(wrong)?;
                Ok(Self::NativeIwarp { host, port, crc })
            }
            "rpc+iwarp" => {
                let (host, port, crc) = iwarp_place(rest, RPC_PORT_DEFAULT).map_err(wrong)?;
                Ok(Self::RpcIwarp { host, port, crc })
            }
            #[cfg(not(feature = "verbs"))]
            "native+verbs" | "rpc+verbs" => Err(wrong(crate::config::NO_VERBS.to_owned())),
            #[cfg(feature = "verbs")]
            "native+verbs" => {
                let (host, port) =
                    host_and_port(plain_place(rest).map_err(wrong)?, NATIVE_PORT_DEFAULT).map_err(wrong)?;
                Ok(Self::NativeVerbs { host, port })
            }
            #[cfg(feature = "verbs")]
            "rpc+verbs" => {
                let (host, port) = host_and_port(plain_place(rest).map_err(wrong)?, RPC_PORT_DEFAULT).map_err(wrong)?;
                Ok(Self::RpcVerbs { host, port })
            }
            "memcache+unix" => {
                let path = match rest.strip_prefix("//") {
                    Some(path) if path.starts_with('/') => path,
                    _ => rest,
                };
                if !path.starts_with('/') || path.starts_with("//") {
                    return Err(wrong("the path of a socket starts with one slash".to_owned()));
                }
                if path.len() > UNIX_PATH_BYTES_MAX {
                    let len = path.len();
                    return Err(wrong(format!("a path of {len} octets, more than {UNIX_PATH_BYTES_MAX}")));
                }
                Ok(Self::MemcacheUnix { path: PathBuf::from(path) })
            }
            _ => Err(wrong(format!("no scheme `{scheme}` here"))),
        }
    }
}

/// What is between the slashes.
fn plain_place(rest: &str) -> Result<&str, String> {
    let place = rest.strip_prefix("//").ok_or("no // after the scheme")?;
    Ok(place.strip_suffix('/').unwrap_or(place))
}

/// Host and port, and whether CRCs are used.
fn iwarp_place(rest: &str, port_default: u16) -> Result<(String, u16, bool), String> {
    let (place, query) = rest.split_once('?').map_or((rest, None), |(place, query)| (place, Some(query)));
    let crc = match query {
        None | Some("crc=on") => true,
        Some("crc=off") => false,
        Some(query) => return Err(format!("`{query}` is neither crc=on nor crc=off")),
    };
    let (host, port) = host_and_port(plain_place(place)?, port_default)?;
    Ok((host, port, crc))
}

fn host_and_port(place: &str, port_default: u16) -> Result<(String, u16), String> {
    // In brackets, the colons belong to the address.
    let (host, port) = match place.strip_prefix('[') {
        Some(rest) => {
            let (host, after) = rest.split_once(']').ok_or("no ] after the address")?;
            match after.strip_prefix(':') {
                Some(port) => (host, Some(port)),
                None if after.is_empty() => (host, None),
                None => return Err(format!("`{after}` after the address")),
            }
        }
        None => match place.split_once(':') {
            Some((_, port)) if port.contains(':') => return Err("an IPv6 address stands in brackets".to_owned()),
            Some((host, port)) => (host, Some(port)),
            None => (place, None),
        },
    };
    if host.is_empty() || host.contains(['/', '@', '?', '#', ' ']) {
        return Err(format!("`{host}` is no host"));
    }
    let port = match port {
        Some(port) => port.parse().ok().filter(|port| *port != 0).ok_or_else(|| format!("`{port}` is no port"))?,
        None => port_default,
    };
    Ok((host.to_owned(), port))
}

impl fmt::Display for ServerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = |f: &mut fmt::Formatter<'_>, host: &str, port: u16| match host.contains(':') {
            true => write!(f, "[{host}]:{port}"),
            false => write!(f, "{host}:{port}"),
        };
        match self {
            Self::Memcache { host, port } => {
                f.write_str("memcache://")?;
                place(f, host, *port)
            }
            Self::MemcacheUnix { path } => write!(f, "memcache+unix:{}", path.display()),
            Self::NativeIwarp { host, port, crc } => {
                f.write_str("native+iwarp://")?;
                place(f, host, *port)?;
                if *crc { Ok(()) } else { f.write_str("?crc=off") }
            }
            Self::NativeVerbs { host, port } => {
                f.write_str("native+verbs://")?;
                place(f, host, *port)
            }
            Self::Native { fabric, address } => write!(f, "native+{fabric}:{address}"),
            Self::RpcIwarp { host, port, crc } => {
                f.write_str("rpc+iwarp://")?;
                place(f, host, *port)?;
                if *crc { Ok(()) } else { f.write_str("?crc=off") }
            }
            Self::RpcVerbs { host, port } => {
                f.write_str("rpc+verbs://")?;
                place(f, host, *port)
            }
            Self::Rpc { fabric, address } => write!(f, "rpc+{fabric}:{address}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_print_what_they_parse() {
        for url in [
            "memcache://127.0.0.1:11211",
            "memcache://[::1]:7",
            "memcache://host.example:80",
            "memcache+unix:/a/b",
            "native+iwarp://127.0.0.1:11212",
            "native+iwarp://[::1]:7?crc=off",
            "rpc+iwarp://127.0.0.1:20050",
            "rpc+iwarp://[::1]:7?crc=off",
        ] {
            assert_eq!(url.parse::<ServerUrl>().unwrap().to_string(), url);
        }
        for (url, same) in [
            ("memcache://host", "memcache://host:11211"),
            ("memcache://[::1]", "memcache://[::1]:11211"),
            ("memcache://host:1/", "memcache://host:1"),
            ("memcache+unix:///a/b", "memcache+unix:/a/b"),
            ("native+iwarp://host", "native+iwarp://host:11212"),
            ("native+iwarp://host/?crc=on", "native+iwarp://host:11212"),
            ("native+iwarp://host?crc=off", "native+iwarp://host:11212?crc=off"),
            ("rpc+iwarp://host", "rpc+iwarp://host:20049"),
        ] {
            assert_eq!(url.parse::<ServerUrl>().unwrap().to_string(), same);
        }
    }

    #[test]
    fn rdma_devices_are_there_or_the_message_says_how_to_get_them() {
        let parsed = "native+verbs://host".parse::<ServerUrl>();
        if cfg!(feature = "verbs") {
            assert_eq!(parsed.unwrap().to_string(), "native+verbs://host:11212");
        } else {
            assert!(parsed.unwrap_err().to_string().contains("cargo build --features verbs"));
        }
        let parsed = "rpc+verbs://host".parse::<ServerUrl>();
        assert_eq!(
            parsed.map(|url| url.to_string()).ok(),
            cfg!(feature = "verbs").then(|| "rpc+verbs://host:20049".into())
        );
    }

    #[test]
    fn what_cannot_be_reached_is_refused_and_the_message_says_what_can() {
        let long = format!("memcache+unix:/{}", "x".repeat(UNIX_PATH_BYTES_MAX));
        for url in [
            "",
            "host",
            "host:1",
            "http://host:1",
            "native+verbs:host:11212",
            "native+verbs://host:11212?crc=off",
            "native+iwarp:host:11212",
            "native+iwarp://host:11212?crc=maybe",
            "native+iwarp://host:11212?crc=off&crc=on",
            "native+iwarp://host:11212?",
            "native+iwarp://?crc=off",
            "rpc+verbs://host:x",
            "rpc+iwarp:host",
            "rpc+iwarp://host?crc=no",
            "rpc://host:1",
            "memcache:host:1",
            "memcache://",
            "memcache://:1",
            "memcache://host:",
            "memcache://host:0",
            "memcache://host:65536",
            "memcache://host:x",
            "memcache://::1",
            "memcache://::1:11211",
            "memcache://[::1",
            "memcache://[::1]x",
            "memcache://user@host:1",
            "memcache://host:1/path",
            "memcache+unix:",
            "memcache+unix:a",
            "memcache+unix://a/b",
            &long,
        ] {
            let err = url.parse::<ServerUrl>().expect_err(url);
            assert_eq!(err.exit_code(), crate::error::Exit::Usage);
            let text = err.to_string();
            for known in
                ["memcache://HOST:PORT", "memcache+unix:/path", "native+iwarp://HOST:PORT", "rpc+iwarp://HOST:PORT"]
            {
                assert!(text.contains(known), "{text}");
            }
        }
    }
}
