//! Networks whose peers a native door admits.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use ipnet::IpNet;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// `10.0.0.0/8`, `fd00::/8`, or one address.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Network(IpNet);

impl Network {
    /// Whether `address` is of it. An IPv4 address in an IPv6 socket counts as what it is.
    pub fn contains(self, address: IpAddr) -> bool {
        self.0.contains(&address.to_canonical())
    }
}

impl FromStr for Network {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("`{text}` is no network: want ADDRESS or ADDRESS/BITS, such as 10.0.0.0/8 or fd00::/8");
        let network = match text.parse::<IpAddr>() {
            Ok(address) => IpNet::from(address),
            Err(_) => text.parse::<IpNet>().map_err(|_| wrong())?,
        };
        let whole = network.trunc();
        if whole != network {
            // Either the address or the length is not what was meant, and guessing would let somebody in.
            return Err(format!("`{text}` has bits beyond its length: the network of that length is {whole}"));
        }
        match network.addr() {
            IpAddr::V6(address) if address.to_ipv4_mapped().is_some() => {
                Err(format!("`{text}` is IPv4 in disguise, and no peer has such an address: write it as IPv4"))
            }
            _ => Ok(Self(network)),
        }
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Serialize for Network {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Network {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        String::deserialize(from)?.parse().map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_are_read_as_they_are_shown() {
        for text in ["10.0.0.0/8", "fd00::/8", "0.0.0.0/0", "::/0", "192.0.2.7/32", "::1/128"] {
            assert_eq!(text.parse::<Network>().unwrap().to_string(), text);
        }
        assert_eq!("192.0.2.7".parse::<Network>(), "192.0.2.7/32".parse());
        for text in ["", "10.0.0.0/33", "10/8", "host/8", "10.0.0.1/8", "fd00::1/8", "::ffff:10.0.0.0/104", "10.0.0.0/"]
        {
            assert!(text.parse::<Network>().unwrap_err().contains(text), "{text}");
        }
    }

    #[test]
    fn a_network_ends_where_its_bits_do() {
        let holds =
            |network: &str, address: &str| network.parse::<Network>().unwrap().contains(address.parse().unwrap());
        assert!(holds("10.0.0.0/8", "10.255.255.255") && holds("10.0.0.0/8", "::ffff:10.1.2.3"));
        assert!(!holds("10.0.0.0/8", "11.0.0.0") && !holds("10.0.0.0/8", "9.255.255.255"));
        assert!(holds("192.0.2.7", "192.0.2.7") && !holds("192.0.2.7", "192.0.2.6"));
        assert!(holds("fd00::/8", "fdff::1") && !holds("fd00::/8", "fe80::1"));
        assert!(holds("0.0.0.0/0", "203.0.113.1") && holds("::/0", "2001:db8::1"));
        assert!(!holds("::/0", "203.0.113.1") && !holds("::/0", "::ffff:203.0.113.1") && !holds("0.0.0.0/0", "::1"));
    }
}
