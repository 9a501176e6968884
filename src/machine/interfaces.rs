//! Addresses of this host and the network interfaces that have them.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;

/// One address of one interface.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Interface {
    pub name: String,
    pub address: IpAddr,
    pub is_up: bool,
    pub is_loopback: bool,
}

/// Every address of this host.
///
/// # Errors
/// What `getifaddrs` says.
pub fn interfaces() -> io::Result<Vec<Interface>> {
    let found = getifaddrs()?.filter_map(|entry| {
        let storage = entry.address?;
        let v4 = storage.as_sockaddr_in().map(|address| IpAddr::from(address.ip()));
        let address = v4.or_else(|| storage.as_sockaddr_in6().map(|address| IpAddr::from(address.ip())))?;
        let has = |flag| entry.flags.contains(flag);
        let (is_up, is_loopback) = (has(InterfaceFlags::IFF_UP), has(InterfaceFlags::IFF_LOOPBACK));
        Some(Interface { name: entry.interface_name, address, is_up, is_loopback })
    });
    Ok(found.collect())
}

/// The interface that has `address`; one that is up goes first.
pub fn owner_of(interfaces: &[Interface], address: IpAddr) -> Option<&Interface> {
    let address = address.to_canonical();
    let owners = || interfaces.iter().filter(|interface| interface.address == address);
    owners().find(|interface| interface.is_up).or_else(|| owners().next())
}

/// The address of this host that a connection to `peer` would come from. Asks the routing table and sends nothing.
pub fn source_towards(peer: IpAddr) -> Option<IpAddr> {
    let any: IpAddr = match peer {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    // A datagram socket that is connected has chosen its route; the port is of no consequence.
    let socket = UdpSocket::bind(SocketAddr::new(any, 0)).ok()?;
    socket.connect(SocketAddr::new(peer, 9)).ok()?;
    socket.local_addr().ok().map(|address| address.ip())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_an_interface_and_the_way_to_itself() {
        let here = interfaces().unwrap();
        let address = IpAddr::from(Ipv4Addr::LOCALHOST);
        let owner = owner_of(&here, address).unwrap();
        assert!(owner.is_up && owner.is_loopback, "{owner:?}");
        assert_eq!(owner_of(&here, "::ffff:127.0.0.1".parse().unwrap()), Some(owner));
        assert_eq!(source_towards(address), Some(address));
        assert_eq!(owner_of(&here, "203.0.113.77".parse().unwrap()), None);
    }
}
