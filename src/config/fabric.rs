//! Addresses of the doors on fabrics.

use std::fmt;
use std::marker::PhantomData;
use std::net::SocketAddr;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::fabric::Address;

/// The fabric of a door.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum FabricKind {
    /// Userspace iWARP over TCP; without CRCs if both ends say so.
    Iwarp { crc: bool },
    /// RDMA devices. Only a program built with the feature `verbs` reads or opens such an address.
    Verbs,
    /// Within this process.
    Loopback,
}

/// What a program without the feature `verbs` says of a name that asks for it.
#[cfg(not(feature = "verbs"))]
pub const NO_VERBS: &str = "this program was built without RDMA devices: build it with `cargo build --features verbs`";

/// What is spoken at a door on a fabric.
pub trait Speech: fmt::Debug {
    /// The first word of its URLs.
    const SCHEME: &'static str;
}

/// The native protocol.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Native;

impl Speech for Native {
    const SCHEME: &'static str = "native";
}

/// RPC-over-RDMA.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Rpc;

impl Speech for Rpc {
    const SCHEME: &'static str = "rpc";
}

/// Where a door listens: `native+iwarp://IP:PORT[?crc=off]`, `native+verbs://IP:PORT`, or `native+loopback:NAME` within this
/// process; with another first word for what else is spoken.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct FabricAddress<S> {
    pub fabric: FabricKind,
    pub address: Address,
    speech: PhantomData<S>,
}

/// Where a native door listens.
pub type NativeAddress = FabricAddress<Native>;
/// Where an RPC door listens.
pub type RpcAddress = FabricAddress<Rpc>;

impl<S> FabricAddress<S> {
    pub const fn new(fabric: FabricKind, address: Address) -> Self {
        Self { fabric, address, speech: PhantomData }
    }

    /// Whether RDMA devices open it, and not software of this process.
    pub fn is_on_device(&self) -> bool {
        !matches!(self.fabric, FabricKind::Iwarp { .. } | FabricKind::Loopback)
    }
}

impl<S: Speech> FromStr for FabricAddress<S> {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let scheme = S::SCHEME;
        let wrong = || {
            format!(
                "`{text}` names no {scheme} door: want {scheme}+verbs://IP:PORT, or {scheme}+iwarp://IP:PORT with ?crc=off \
                 or without"
            )
        };
        let way = text.strip_prefix(scheme).and_then(|rest| rest.strip_prefix('+')).ok_or_else(wrong)?;
        if let Some(name) = way.strip_prefix("loopback:").filter(|name| !name.is_empty()) {
            return Ok(Self::new(FabricKind::Loopback, Address::Name(name.to_owned())));
        }
        if let Some(place) = way.strip_prefix("verbs://") {
            #[cfg(not(feature = "verbs"))]
            return Err(format!("{scheme}+verbs://{place}: {NO_VERBS}"));
            #[cfg(feature = "verbs")]
            {
                let address: SocketAddr = place.parse().map_err(|_| wrong())?;
                return Ok(Self::new(FabricKind::Verbs, Address::Socket(address)));
            }
        }
        let place = way.strip_prefix("iwarp://").ok_or_else(wrong)?;
        let (place, crc) = match place.split_once('?') {
            None => (place, true),
            Some((place, "crc=on")) => (place, true),
            Some((place, "crc=off")) => (place, false),
            Some(_) => return Err(wrong()),
        };
        let address: SocketAddr = place.parse().map_err(|_| wrong())?;
        Ok(Self::new(FabricKind::Iwarp { crc }, Address::Socket(address)))
    }
}

impl<S: Speech> fmt::Display for FabricAddress<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (scheme, address) = (S::SCHEME, &self.address);
        match self.fabric {
            FabricKind::Iwarp { crc: true } => write!(f, "{scheme}+iwarp://{address}"),
            FabricKind::Iwarp { crc: false } => write!(f, "{scheme}+iwarp://{address}?crc=off"),
            FabricKind::Verbs => write!(f, "{scheme}+verbs://{address}"),
            FabricKind::Loopback => write!(f, "{scheme}+loopback:{address}"),
        }
    }
}

impl<S: Speech> Serialize for FabricAddress<S> {
    fn serialize<T: Serializer>(&self, serializer: T) -> Result<T::Ok, T::Error> {
        serializer.collect_str(self)
    }
}

impl<'de, S: Speech> Deserialize<'de> for FabricAddress<S> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        String::deserialize(from)?.parse().map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_as_they_are_shown() {
        for url in ["native+iwarp://127.0.0.1:11212", "native+iwarp://[::1]:1?crc=off", "native+loopback:a"] {
            assert_eq!(url.parse::<NativeAddress>().unwrap().to_string(), url);
        }
        for url in ["native+iwarp://localhost:1", "native+iwarp://1.1.1.1:1?x", "native+loopback:", "native+shm:/a"] {
            assert!(url.parse::<NativeAddress>().is_err(), "{url}");
        }
        assert_eq!(
            "rpc+iwarp://127.0.0.1:20049".parse::<RpcAddress>().unwrap().to_string(),
            "rpc+iwarp://127.0.0.1:20049"
        );
        let error = "native+iwarp://127.0.0.1:20049".parse::<RpcAddress>().unwrap_err();
        assert!(error.contains("rpc+iwarp://IP:PORT"), "{error}");
    }

    #[test]
    fn rdma_devices_are_there_or_the_message_says_how_to_get_them() {
        let parsed = "native+verbs://10.0.0.1:11212".parse::<NativeAddress>();
        if cfg!(feature = "verbs") {
            assert_eq!(parsed.unwrap().to_string(), "native+verbs://10.0.0.1:11212");
            assert!("native+verbs://host:11212".parse::<NativeAddress>().is_err());
        } else {
            assert!(parsed.unwrap_err().contains("cargo build --features verbs"));
        }
    }
}
