//! Addresses and geometry of the native doors.

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::fabric::Address;

/// The fabric of a native address.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum NativeFabric {
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

/// Where a native door listens: `native+iwarp://IP:PORT[?crc=off]`, `native+verbs://IP:PORT`, or `native+loopback:NAME`
/// within this process.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct NativeAddress {
    pub fabric: NativeFabric,
    pub address: Address,
}

impl NativeAddress {
    /// Whether RDMA devices open it, and not software of this process.
    pub fn is_on_device(&self) -> bool {
        !matches!(self.fabric, NativeFabric::Iwarp { .. } | NativeFabric::Loopback)
    }
}

impl FromStr for NativeAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "`{text}` names no native door: want native+verbs://IP:PORT, or native+iwarp://IP:PORT with ?crc=off or \
                 without"
            )
        };
        if let Some(name) = text.strip_prefix("native+loopback:").filter(|name| !name.is_empty()) {
            return Ok(Self { fabric: NativeFabric::Loopback, address: Address::Name(name.to_owned()) });
        }
        if let Some(place) = text.strip_prefix("native+verbs://") {
            #[cfg(not(feature = "verbs"))]
            return Err(format!("native+verbs://{place}: {NO_VERBS}"));
            #[cfg(feature = "verbs")]
            {
                let address: SocketAddr = place.parse().map_err(|_| wrong())?;
                return Ok(Self { fabric: NativeFabric::Verbs, address: Address::Socket(address) });
            }
        }
        let place = text.strip_prefix("native+iwarp://").ok_or_else(wrong)?;
        let (place, crc) = match place.split_once('?') {
            None => (place, true),
            Some((place, "crc=on")) => (place, true),
            Some((place, "crc=off")) => (place, false),
            Some(_) => return Err(wrong()),
        };
        let address: SocketAddr = place.parse().map_err(|_| wrong())?;
        Ok(Self { fabric: NativeFabric::Iwarp { crc }, address: Address::Socket(address) })
    }
}

impl fmt::Display for NativeAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.fabric {
            NativeFabric::Iwarp { crc: true } => write!(f, "native+iwarp://{}", self.address),
            NativeFabric::Iwarp { crc: false } => write!(f, "native+iwarp://{}?crc=off", self.address),
            NativeFabric::Verbs => write!(f, "native+verbs://{}", self.address),
            NativeFabric::Loopback => write!(f, "native+loopback:{}", self.address),
        }
    }
}

impl Serialize for NativeAddress {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for NativeAddress {
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
