//! NUMA nodes: where the lanes of the daemon run, and with them the memory of its connections.
//!
//! Memory is not bound page by page: it lies on the node of the processor that touches it first, and windows, rings and
//! staging buffers are first touched on the thread of their lane. So placing lanes places memory.
//!
//! | pin | lanes | connections of a native door |
//! |---|---|---|
//! | `off` | run anywhere | go to every lane |
//! | `auto` | on the cores of the one node that all doors are on | go to every lane |
//! | cores | one core each, in the order of the list, from its start again when it ends | go to the lanes on the door's node |
//!
//! The node of a door is that of the RDMA device its address belongs to, else that of the interface which has the address;
//! a wildcard address stands for every Ethernet interface that is up and has an IPv4 address. Doors on loopback and Unix
//! sockets have no wish; if there are no others, `auto` takes the first node this process may run on. Doors on different or
//! unknown nodes are refused by `auto` on a machine of several: somebody has to say which cores it shall be.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::str::FromStr;

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;
use thiserror::Error;

use super::interfaces::{Interface, owner_of};
use super::{line, names, rdma};

/// Which cores lanes run on.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub enum Pin {
    /// Where the scheduler puts them.
    #[default]
    Off,
    /// On the node of the doors.
    Auto,
    /// On these, one core a lane. Not empty.
    Cores(Vec<usize>),
}

/// Cores of a machine are fewer.
const CORE_COUNT_MAX: usize = 1 << 16;

/// `off`, `auto`, or cores with commas and ranges: `0,2,8-11`.
impl FromStr for Pin {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "off" => Ok(Self::Off),
            "auto" => Ok(Self::Auto),
            _ => cores_of(text)
                .map(Self::Cores)
                .ok_or_else(|| format!("`{text}` is no placement of lanes: want off, auto, or cores such as 0,2,8-11")),
        }
    }
}

impl fmt::Display for Pin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => f.write_str("off"),
            Self::Auto => f.write_str("auto"),
            Self::Cores(cores) => Cores(cores).fmt(f),
        }
    }
}

/// A list of cores as the kernel writes it, each range whole. `None` if it is none, or empty.
fn cores_of(text: &str) -> Option<Vec<usize>> {
    let mut cores = Vec::new();
    for item in text.trim().split(',') {
        let (first, last) = item.split_once('-').unwrap_or((item, item));
        let (first, last): (usize, usize) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        // A core may stand in the list twice, but no list is longer than a machine.
        if first > last || last >= CORE_COUNT_MAX || cores.len() + (last - first) >= CORE_COUNT_MAX {
            return None;
        }
        cores.extend(first..=last);
    }
    Some(cores)
}

/// Shows cores as they are read: `0,2,8-11`.
struct Cores<'a>(&'a [usize]);

impl fmt::Display for Cores<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rest = self.0;
        while let Some(first) = rest.first().copied() {
            let run = (0..rest.len()).take_while(|at| rest[*at] == first + at).count();
            let comma = if run < rest.len() { "," } else { "" };
            match run {
                1 => write!(f, "{first}{comma}")?,
                _ => write!(f, "{first}-{}{comma}", first + run - 1)?,
            }
            rest = &rest[run..];
        }
        Ok(())
    }
}

/// An address peers come to.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Door {
    pub url: String,
    /// `None`: peers are on this host.
    pub address: Option<SocketAddr>,
    /// It is opened by RDMA devices and not by the network stack.
    pub is_on_device: bool,
}

/// What speaks for a node.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Candidate {
    /// URL of the door.
    pub door: String,
    /// The device or interface behind it; `None` if nothing of this machine has the address.
    pub through: Option<String>,
    pub node: Option<u32>,
}

impl fmt::Display for Candidate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { door, through, node } = self;
        write!(f, "{door} through {} on ", through.as_deref().unwrap_or("no interface"))?;
        match node {
            Some(node) => write!(f, "node {node}"),
            None => f.write_str("an unknown node"),
        }
    }
}

/// Where one lane runs.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct LanePlace {
    /// The cores it may run on; empty: any.
    pub cores: Vec<usize>,
    /// Their node; `None` if they are of several, or not known.
    pub node: Option<u32>,
}

/// Where everything runs.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Placement {
    /// One for each lane.
    pub lanes: Vec<LanePlace>,
    /// For each door, in the order they were given, the lanes its connections go to: indices, never none.
    pub doors: Vec<Vec<usize>>,
}

impl Placement {
    /// Every lane runs where the scheduler puts it and serves every door.
    pub fn anywhere(lane_count: usize, door_count: usize) -> Self {
        Self { lanes: vec![LanePlace::default(); lane_count], doors: vec![(0..lane_count).collect(); door_count] }
    }
}

/// Why lanes cannot be placed as asked.
#[derive(Clone, Debug, Eq, Error, PartialEq)]
#[non_exhaustive]
pub enum PlaceError {
    #[error("pin = \"auto\": {}; say which cores it shall be: {nodes}", join(candidates, "; "))]
    Undecided { candidates: Vec<Candidate>, nodes: String },
    #[error("pin names core {core}, which this process may not run on: it may run on {allowed}")]
    NoSuchCore { core: usize, allowed: String },
    #[error("pin = \"auto\": this process may run on no core of node {node}: it may run on {allowed}")]
    NoCores { node: u32, allowed: String },
}

fn join(items: &[Candidate], between: &str) -> String {
    items.iter().map(ToString::to_string).collect::<Vec<_>>().join(between)
}

/// The nodes that have processors, each with its cores, in order.
pub fn nodes(sysfs: &Path) -> Vec<(u32, Vec<usize>)> {
    let dir = sysfs.join("devices/system/node");
    let node = |name: String| {
        let number = name.strip_prefix("node")?.parse().ok()?;
        let cores = cores_of(&line(&dir.join(name).join("cpulist"))?)?;
        Some((number, cores))
    };
    names(&dir).into_iter().filter_map(node).collect()
}

/// The node in `dir/device/numa_node`, or in that of a bus above it: virtual functions and virtio devices say nothing
/// themselves. `None` for -1, which is the kernel's word for "unknown".
pub(super) fn node_of_device(dir: &Path) -> Option<u32> {
    let device = dir.join("device").canonicalize().ok()?;
    let said = device.ancestors().map_while(|above| above.parent().map(|_| above.join("numa_node")));
    said.filter_map(|path| line(&path)).find_map(|text| text.parse().ok())
}

/// Bonds over VLANs over bridges: more layers are a loop.
const LAYERS_MAX: usize = 8;

/// The node of a network interface; of one that lies over others, the node that they all have.
pub fn node_of_interface(sysfs: &Path, interface: &str) -> Option<u32> {
    fn look(sysfs: &Path, interface: &str, layers: usize) -> Option<u32> {
        let dir = sysfs.join("class/net").join(interface);
        if let Some(node) = node_of_device(&dir) {
            return Some(node);
        }
        let layers = layers.checked_sub(1)?;
        let below = names(&dir).into_iter().filter_map(|name| name.strip_prefix("lower_").map(str::to_owned));
        let mut nodes = below.map(|below| look(sysfs, &below, layers));
        let first = nodes.next()??;
        nodes.all(|node| node == Some(first)).then_some(first)
    }
    look(sysfs, interface, LAYERS_MAX)
}

/// ARPHRD_ETHER, in `class/net/*/type`.
const ETHERNET: &str = "1";

/// What speaks for a node at `door`: nothing for loopback.
pub fn candidates(sysfs: &Path, interfaces: &[Interface], door: &Door) -> Vec<Candidate> {
    let Some(address) = door.address.map(|address| address.ip().to_canonical()) else { return Vec::new() };
    let candidate = |through: Option<String>, node| Candidate { door: door.url.clone(), through, node };
    let devices = if door.is_on_device { rdma::devices(sysfs) } else { Vec::new() };
    if address.is_loopback() {
        return Vec::new();
    }
    if address.is_unspecified() {
        if door.is_on_device {
            return devices.into_iter().map(|device| candidate(Some(device.name), device.node)).collect();
        }
        let mut names: Vec<_> = interfaces
            .iter()
            .filter(|interface| interface.is_up && !interface.is_loopback && interface.address.is_ipv4())
            .map(|interface| interface.name.clone())
            .filter(|name| line(&sysfs.join("class/net").join(name).join("type")).as_deref() == Some(ETHERNET))
            .collect();
        names.dedup();
        return names
            .into_iter()
            .map(|name| (node_of_interface(sysfs, &name), name))
            .map(|(n, s)| candidate(Some(s), n))
            .collect();
    }
    let owner = owner_of(interfaces, address).filter(|owner| owner.is_up && !owner.is_loopback);
    let owner = owner.map(|owner| owner.name.as_str());
    if let Some(place) = rdma::resolve(sysfs, &devices, address, owner) {
        return vec![candidate(Some(place.device.name.clone()), place.device.node)];
    }
    vec![candidate(owner.map(str::to_owned), owner.and_then(|owner| node_of_interface(sysfs, owner)))]
}

/// The node all of `candidates` are on.
fn common_node(candidates: &[Candidate]) -> Option<u32> {
    let first = candidates.first()?.node?;
    candidates.iter().all(|candidate| candidate.node == Some(first)).then_some(first)
}

/// Places `lane_count` lanes for `doors`; `allowed` are the cores this process may run on. A pure function of its
/// arguments and of the tree at `sysfs`.
///
/// # Errors
/// [`PlaceError`]: what is asked for cannot be had, or the doors are on different or unknown nodes.
pub fn place(
    sysfs: &Path,
    interfaces: &[Interface],
    allowed: &[usize],
    pin: &Pin,
    lane_count: usize,
    doors: &[Door],
) -> Result<Placement, PlaceError> {
    let every_lane = || (0..lane_count).collect::<Vec<_>>();
    let nodes = nodes(sysfs);
    let lanes: Vec<LanePlace> = match pin {
        Pin::Off => return Ok(Placement::anywhere(lane_count, doors.len())),
        Pin::Cores(cores) => {
            if let Some(core) = cores.iter().copied().find(|core| !allowed.contains(core)) {
                return Err(PlaceError::NoSuchCore { core, allowed: Cores(allowed).to_string() });
            }
            let node_of = |core| nodes.iter().find(|(_, cores)| cores.contains(core)).map(|(node, _)| *node);
            let cores = cores.iter().cycle().take(lane_count);
            cores.map(|core| LanePlace { cores: vec![*core], node: node_of(core) }).collect()
        }
        Pin::Auto => {
            let cores_on = |cores: &[usize]| -> Vec<usize> {
                cores.iter().copied().filter(|core| allowed.contains(core)).collect()
            };
            let wishes: Vec<_> = doors.iter().flat_map(|door| candidates(sysfs, interfaces, door)).collect();
            let found = match (&nodes[..], common_node(&wishes)) {
                // A kernel without NUMA shows no node: there is nothing to choose.
                ([] | [_], _) => nodes.first(),
                (_, Some(node)) => nodes.iter().find(|(number, _)| *number == node),
                (_, None) if wishes.is_empty() => nodes.iter().find(|(_, cores)| !cores_on(cores).is_empty()),
                (_, None) => None,
            };
            let place = match found {
                None if nodes.len() > 1 => {
                    let shown = nodes.iter().map(|(node, cores)| format!("node {node} has {}", Cores(cores)));
                    let nodes = shown.collect::<Vec<_>>().join(", ");
                    return Err(PlaceError::Undecided { candidates: wishes, nodes });
                }
                None => LanePlace { cores: allowed.to_vec(), node: None },
                Some((node, cores)) => {
                    let cores = cores_on(cores);
                    if cores.is_empty() {
                        return Err(PlaceError::NoCores { node: *node, allowed: Cores(allowed).to_string() });
                    }
                    LanePlace { cores, node: Some(*node) }
                }
            };
            vec![place; lane_count]
        }
    };
    let doors = doors.iter().map(|door| {
        let node = common_node(&candidates(sysfs, interfaces, door));
        let near: Vec<_> =
            every_lane().into_iter().filter(|lane| node.is_some() && lanes[*lane].node == node).collect();
        if near.is_empty() { every_lane() } else { near }
    });
    let doors = doors.collect();
    Ok(Placement { lanes, doors })
}

/// The cores this process may run on.
///
/// # Errors
/// What `sched_getaffinity` says.
pub fn allowed_cores() -> io::Result<Vec<usize>> {
    let set = sched_getaffinity(Pid::from_raw(0))?;
    Ok((0..CpuSet::count()).filter(|core| set.is_set(*core).unwrap_or(false)).collect())
}

/// Keeps the calling thread, and threads it starts, on `cores`.
///
/// # Errors
/// `EINVAL` if none of them may be used.
pub fn pin_this_thread(cores: &[usize]) -> io::Result<()> {
    let mut set = CpuSet::new();
    for core in cores {
        set.set(*core)?;
    }
    Ok(sched_setaffinity(Pid::from_raw(0), &set)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_placement_is_shown_as_it_is_read() {
        for text in ["off", "auto", "0", "0,2,8-11", "3,2,1", "5-6,5"] {
            assert_eq!(text.parse::<Pin>().unwrap().to_string(), text);
        }
        assert_eq!("1, 3-5".parse(), Ok(Pin::Cores(vec![1, 3, 4, 5])));
        for text in ["", "on", "1,", "-1", "5-2", "0-99999999", "1;2"] {
            assert!(text.parse::<Pin>().unwrap_err().contains("cores"), "{text}");
        }
        // A thousand of the longest range took half a gigabyte.
        assert!("0-65535".parse::<Pin>().is_ok() && "0-65535,0".parse::<Pin>().is_err());
    }

    #[test]
    fn a_pinned_thread_stays_where_it_was_put() {
        let allowed = allowed_cores().unwrap();
        let last = *allowed.last().unwrap();
        let seen = std::thread::spawn(move || pin_this_thread(&[last]).and_then(|()| allowed_cores()));
        assert_eq!(seen.join().unwrap().unwrap(), [last]);
        assert_eq!(allowed_cores().unwrap(), allowed, "other threads are left alone");
    }
}
