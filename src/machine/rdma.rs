//! RDMA devices as /sys shows them, and which of them an address belongs to.
//!
//! ```text
//! class/infiniband/DEVICE/  node_type        "1: CA" (InfiniBand, RoCE) or "4: RNIC" (iWARP)
//!                           device/          the bus; parent: the interface under soft-RoCE
//!                           ports/N/         state, phys_state, link_layer, rate
//!                           ports/N/gids/I   16 octets in hexadecimal; zeros where there is none
//!                           ports/N/gid_attrs/{ndevs,types}/I   interface and kind, or EINVAL
//! ```
//! Source: Linux, Documentation/ABI/stable/sysfs-class-infiniband.

use std::fs;
use std::net::{IpAddr, Ipv6Addr};
use std::path::Path;

use serde::Serialize;

use super::{line, names, numa};

/// An RDMA device.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
pub struct Device {
    pub name: String,
    /// iWARP: its GIDs are hardware addresses and not IP addresses.
    pub is_iwarp: bool,
    /// NUMA node of the device, or of the interface it runs on; `None` if neither says.
    pub node: Option<u32>,
    pub ports: Vec<Port>,
}

/// A port of a device; numbers begin at 1.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
pub struct Port {
    pub number: u32,
    /// `ACTIVE`, `DOWN`, `INIT`, `ARMED`.
    pub state: String,
    /// `LinkUp`, `Polling`, `Disabled` …
    pub physical_state: String,
    /// `InfiniBand` or `Ethernet`.
    pub link_layer: String,
    /// In the kernel's words: `100 Gb/sec (4X EDR)`.
    pub rate: String,
    /// Those that are set.
    pub gids: Vec<Gid>,
}

/// An address of a port.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
pub struct Gid {
    pub index: u32,
    /// IPv4 addresses in their mapped form.
    pub address: Ipv6Addr,
    /// `RoCE v2`, `IB/RoCE v1`; empty if unknown.
    pub kind: String,
    /// The interface it comes from.
    pub interface: Option<String>,
}

/// Where an address leads to.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Place<'a> {
    pub device: &'a Device,
    pub port: &'a Port,
    /// `None`: the interface is the port's, and no GID has this address.
    pub gid: Option<&'a Gid>,
}

impl Port {
    /// Connections can be made.
    pub fn is_active(&self) -> bool {
        self.state == "ACTIVE"
    }
}

/// The devices of the tree at `sysfs`, by name. None where there is no RDMA subsystem.
pub fn devices(sysfs: &Path) -> Vec<Device> {
    let class = sysfs.join("class/infiniband");
    let device = |name: String| {
        let dir = class.join(&name);
        let is_iwarp = line(&dir.join("node_type")).is_some_and(|kind| kind.starts_with("4:"));
        let ports = names(&dir.join("ports")).iter().filter_map(|number| port(&dir.join("ports"), number)).collect();
        let mut device = Device { name, is_iwarp, node: numa::node_of_device(&dir), ports };
        if device.node.is_none() {
            let mut under = interfaces_of(sysfs, &device).into_iter();
            device.node = under.find_map(|interface| numa::node_of_interface(sysfs, &interface));
        }
        device
    };
    names(&class).into_iter().map(device).collect()
}

fn port(ports: &Path, number: &str) -> Option<Port> {
    let dir = ports.join(number);
    // "4: ACTIVE"
    let word = |file| line(&dir.join(file)).map(|text| text.rsplit(": ").next().unwrap_or_default().to_owned());
    let gid = |index: &String| {
        let address: Ipv6Addr = line(&dir.join("gids").join(index))?.parse().ok()?;
        let attribute = |kind| line(&dir.join("gid_attrs").join(kind).join(index));
        let (kind, interface) = (attribute("types").unwrap_or_default(), attribute("ndevs"));
        (!address.is_unspecified()).then_some(Gid { index: index.parse().ok()?, address, kind, interface })
    };
    Some(Port {
        number: number.parse().ok()?,
        state: word("state").unwrap_or_default(),
        physical_state: word("phys_state").unwrap_or_default(),
        link_layer: line(&dir.join("link_layer")).unwrap_or_default(),
        rate: line(&dir.join("rate")).unwrap_or_default(),
        gids: names(&dir.join("gids")).iter().filter_map(gid).collect(),
    })
}

/// Interfaces of `device`, by what the tree says in any way, the first the likeliest.
pub fn interfaces_of(sysfs: &Path, device: &Device) -> Vec<String> {
    let dir = sysfs.join("class/infiniband").join(&device.name);
    let mut found: Vec<String> = Vec::new();
    found.extend(device.ports.iter().flat_map(|port| port.gids.iter().filter_map(|gid| gid.interface.clone())));
    found.extend(names(&dir.join("device/net")));
    // Soft-RoCE: /sys has the name of its interface alone.
    found.extend(line(&dir.join("parent")));
    if device.is_iwarp {
        found.extend(names(&sysfs.join("class/net")).into_iter().filter(|interface| {
            let address = line(&sysfs.join("class/net").join(interface).join("address"));
            let octets = address.and_then(|address| hardware_address(&address));
            let gids = device.ports.iter().flat_map(|port| &port.gids);
            octets.is_some_and(|octets| gids.into_iter().any(|gid| gid.address.octets()[..6] == octets))
        }));
    }
    let mut seen = Vec::new();
    found.retain(|name| {
        let is_new = !seen.contains(name);
        seen.push(name.clone());
        is_new
    });
    found
}

/// `02:00:00:00:00:01`; zeros are no address.
fn hardware_address(text: &str) -> Option<[u8; 6]> {
    let octets: Result<Vec<u8>, _> = text.split(':').map(|octet| u8::from_str_radix(octet, 16)).collect();
    <[u8; 6]>::try_from(octets.ok()?).ok().filter(|octets| *octets != [0; 6])
}

/// The port that `address` belongs to: the one with a GID of that address (RoCE v2 before version 1, an active port before
/// one that is down), else one of `interface`, which owns the address.
pub fn resolve<'a>(sysfs: &Path, devices: &'a [Device], address: IpAddr, interface: Option<&str>) -> Option<Place<'a>> {
    let mapped = match address {
        IpAddr::V4(address) => address.to_ipv6_mapped(),
        IpAddr::V6(address) => address,
    };
    let ports = || devices.iter().flat_map(|device| device.ports.iter().map(move |port| (device, port)));
    let gids =
        ports().flat_map(|(device, port)| port.gids.iter().map(move |gid| Place { device, port, gid: Some(gid) }));
    let of_address = gids.filter(|place| place.gid.is_some_and(|gid| gid.address == mapped));
    let best = of_address.min_by_key(|place| {
        let gid = place.gid.map(|gid| (gid.interface.as_deref() != interface, gid.kind != "RoCE v2", gid.index));
        (!place.port.is_active(), gid)
    });
    if best.is_some() {
        return best;
    }
    let interface = interface?;
    let of_interface = ports().filter(|(device, _)| interfaces_of(sysfs, device).iter().any(|name| name == interface));
    let number = port_number(sysfs, interface);
    let (device, port) = of_interface.min_by_key(|(device, port)| {
        let is_of_gid = port.gids.iter().any(|gid| gid.interface.as_deref() == Some(interface));
        (!is_of_gid, device.ports.len() > 1 && number != Some(port.number), !port.is_active())
    })?;
    Some(Place { device, port, gid: None })
}

/// The port of the adapter that an interface is: from zero in `dev_port`, and of older drivers in `dev_id`.
fn port_number(sysfs: &Path, interface: &str) -> Option<u32> {
    let dir = sysfs.join("class/net").join(interface);
    let port = line(&dir.join("dev_port")).and_then(|text| text.parse::<u32>().ok()).filter(|port| *port > 0);
    let id = || u32::from_str_radix(line(&dir.join("dev_id"))?.trim_start_matches("0x"), 16).ok();
    port.or_else(id).map(|from_zero| from_zero.saturating_add(1))
}

/// Whether programs may open the devices: why not, else `None`.
pub fn access_trouble(dev: &Path, devices: &[Device]) -> Option<String> {
    let open = |path: &Path| fs::OpenOptions::new().read(true).write(true).open(path).map(drop);
    let dir = dev.join("infiniband");
    if let Err(error) = open(&dir.join("rdma_cm")) {
        return Some(format!("{}: {error}", dir.join("rdma_cm").display()));
    }
    let verbs: Vec<_> = names(&dir).into_iter().filter(|name| name.starts_with("uverbs")).collect();
    if verbs.len() < devices.len() {
        return Some(format!("{} of {} devices have an uverbs file in {}", verbs.len(), devices.len(), dir.display()));
    }
    let closed = verbs.iter().map(|name| dir.join(name)).find_map(|path| Some((open(&path).err()?, path)));
    closed.map(|(error, path)| format!("{}: {error}", path.display()))
}
