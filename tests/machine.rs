//! RDMA devices, NUMA nodes and the placement of lanes, on trees of /sys that are made here.

use std::fs;
use std::net::IpAddr;
use std::os::unix::fs::symlink;
use std::path::Path;

use bulkhead::machine::interfaces::Interface;
use bulkhead::machine::numa::{self, Door, LanePlace, Pin, PlaceError, Placement, place};
use bulkhead::machine::rdma::{Device, devices, interfaces_of, resolve};
use tempfile::TempDir;

/// A tree of /sys.
struct Tree(TempDir);

impl Tree {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn root(&self) -> &Path {
        self.0.path()
    }

    fn put(&self, path: &str, text: &str) -> &Self {
        let path = self.root().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, format!("{text}\n")).unwrap();
        self
    }

    fn link(&self, path: &str, to: &str) -> &Self {
        let path = self.root().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        symlink(self.root().join(to), path).unwrap();
        self
    }

    /// Nodes with their cores.
    fn nodes(&self, lists: &[&str]) -> &Self {
        self.put("devices/system/node/online", "0");
        for (node, cores) in lists.iter().enumerate() {
            self.put(&format!("devices/system/node/node{node}/cpulist"), cores);
        }
        self
    }

    fn ethernet(&self, name: &str, node: Option<i32>) -> &Self {
        self.put(&format!("class/net/{name}/type"), "1");
        if let Some(node) = node {
            self.put(&format!("class/net/{name}/device/numa_node"), &node.to_string());
        }
        self
    }

    /// A device with one port, which is `state`, and GIDs: (octets in hexadecimal, kind, interface).
    fn device(&self, name: &str, kind: &str, state: &str, gids: &[(&str, &str, &str)]) -> &Self {
        self.put(&format!("class/infiniband/{name}/node_type"), kind);
        let port = format!("class/infiniband/{name}/ports/1");
        self.put(&format!("{port}/state"), state).put(&format!("{port}/phys_state"), "5: LinkUp");
        self.put(&format!("{port}/link_layer"), "Ethernet").put(&format!("{port}/rate"), "100 Gb/sec (4X EDR)");
        for (index, (gid, kind, interface)) in gids.iter().enumerate() {
            self.put(&format!("{port}/gids/{index}"), gid);
            self.put(&format!("{port}/gid_attrs/types/{index}"), kind);
            self.put(&format!("{port}/gid_attrs/ndevs/{index}"), interface);
        }
        self
    }
}

const NO_GID: &str = "0000:0000:0000:0000:0000:0000:0000:0000";
const LINK_LOCAL: &str = "fe80:0000:0000:0000:0202:c9ff:fe00:0001";
/// 10.0.0.1 and 10.0.1.1.
const GID_10_0_0_1: &str = "0000:0000:0000:0000:0000:ffff:0a00:0001";
const GID_10_0_1_1: &str = "0000:0000:0000:0000:0000:ffff:0a00:0101";

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn interface(name: &str, address: &str) -> Interface {
    Interface { name: name.to_owned(), address: ip(address), is_up: true, is_loopback: name == "lo" }
}

/// Device, port and GID index that `address` of `owner` resolves to.
fn found(tree: &Tree, address: &str, owner: Option<&str>) -> Option<(String, u32, Option<u32>)> {
    let devices = devices(tree.root());
    let place = resolve(tree.root(), &devices, ip(address), owner)?;
    Some((place.device.name.clone(), place.port.number, place.gid.map(|gid| gid.index)))
}

fn roce() -> Tree {
    let tree = Tree::new();
    tree.ethernet("eth2", Some(1)).put("class/infiniband/mlx5_0/device/numa_node", "1").device(
        "mlx5_0",
        "1: CA",
        "4: ACTIVE",
        &[
            (LINK_LOCAL, "IB/RoCE v1", "eth2"),
            (LINK_LOCAL, "RoCE v2", "eth2"),
            (GID_10_0_0_1, "IB/RoCE v1", "eth2"),
            (GID_10_0_0_1, "RoCE v2", "eth2"),
            (NO_GID, "", ""),
            (GID_10_0_1_1, "RoCE v2", "eth2.7"),
        ],
    );
    tree
}

#[test]
fn a_machine_without_rdma_has_no_device() {
    assert_eq!(devices(Tree::new().root()), Vec::<Device>::new());
    assert_eq!(found(&Tree::new(), "10.0.0.1", Some("eth0")), None);
}

#[test]
fn a_device_shows_its_ports_and_the_gids_that_are_set() {
    let tree = roce();
    let all = devices(tree.root());
    let [device] = &all[..] else { panic!("{all:?}") };
    assert_eq!((device.name.as_str(), device.is_iwarp, device.node), ("mlx5_0", false, Some(1)));
    let port = &device.ports[0];
    assert_eq!((port.number, port.state.as_str(), port.is_active()), (1, "ACTIVE", true));
    assert_eq!((port.physical_state.as_str(), port.link_layer.as_str()), ("LinkUp", "Ethernet"));
    assert_eq!(port.rate, "100 Gb/sec (4X EDR)");
    assert_eq!(port.gids.iter().map(|gid| gid.index).collect::<Vec<_>>(), [0, 1, 2, 3, 5], "zeros are no GID");
    let gid = &port.gids[3];
    assert_eq!(IpAddr::from(gid.address).to_canonical(), ip("10.0.0.1"));
    assert_eq!((gid.kind.as_str(), gid.interface.as_deref()), ("RoCE v2", Some("eth2")));
}

#[test]
fn an_address_leads_to_the_gid_that_has_it_version_2_first() {
    let tree = roce();
    let at = |gid| Some(("mlx5_0".to_owned(), 1, gid));
    assert_eq!(found(&tree, "10.0.0.1", Some("eth2")), at(Some(3)));
    assert_eq!(found(&tree, "10.0.1.1", Some("eth2.7")), at(Some(5)), "a VLAN's address");
    assert_eq!(found(&tree, "fe80::202:c9ff:fe00:1", Some("eth2")), at(Some(1)));
    assert_eq!(found(&tree, "10.0.0.1", None), at(Some(3)), "the GID is enough");
    assert_eq!(found(&tree, "10.0.0.9", Some("eth2")), at(None), "the interface is enough");
    assert_eq!(found(&tree, "10.0.0.9", Some("eth3")), None);
    assert_eq!(found(&tree, "10.0.0.9", None), None);
}

#[test]
fn of_two_devices_with_an_address_the_one_that_works_is_taken() {
    let tree = roce();
    tree.device("mlx4_0", "1: CA", "1: DOWN", &[(GID_10_0_0_1, "RoCE v2", "eth2")]);
    assert_eq!(found(&tree, "10.0.0.1", Some("eth2")), Some(("mlx5_0".to_owned(), 1, Some(3))));
    fs::write(tree.root().join("class/infiniband/mlx5_0/ports/1/state"), "1: DOWN\n").unwrap();
    fs::write(tree.root().join("class/infiniband/mlx4_0/ports/1/state"), "4: ACTIVE\n").unwrap();
    assert_eq!(found(&tree, "10.0.0.1", Some("eth2")), Some(("mlx4_0".to_owned(), 1, Some(0))));
}

#[test]
fn an_infiniband_interface_leads_to_its_port() {
    let tree = Tree::new();
    tree.device("mlx5_1", "1: CA", "4: ACTIVE", &[("fe80:0000:0000:0000:0002:c903:0000:0001", "", "")]);
    tree.put("class/infiniband/mlx5_1/ports/2/state", "4: ACTIVE");
    tree.put("class/infiniband/mlx5_1/device/net/ib0/type", "32");
    tree.put("class/infiniband/mlx5_1/device/net/ib1/type", "32");
    tree.put("class/net/ib0/dev_port", "0").put("class/net/ib1/dev_port", "1");
    assert_eq!(found(&tree, "10.0.0.1", Some("ib0")), Some(("mlx5_1".to_owned(), 1, None)));
    assert_eq!(found(&tree, "10.0.0.2", Some("ib1")), Some(("mlx5_1".to_owned(), 2, None)));
    // An older driver counts in hexadecimal elsewhere.
    fs::write(tree.root().join("class/net/ib1/dev_port"), "0\n").unwrap();
    tree.put("class/net/ib1/dev_id", "0x1");
    assert_eq!(found(&tree, "10.0.0.2", Some("ib1")), Some(("mlx5_1".to_owned(), 2, None)));
}

#[test]
fn software_devices_lie_where_their_interface_does() {
    let tree = Tree::new();
    tree.ethernet("eth0", Some(0)).ethernet("eth1", Some(1)).put("class/net/eth1/address", "02:00:00:00:00:07");
    tree.device("rxe0", "1: CA", "4: ACTIVE", &[(GID_10_0_0_1, "RoCE v2", "eth0")]);
    tree.put("class/infiniband/rxe0/parent", "eth0");
    // Soft-iWARP: the GID is the hardware address, and nothing names the interface.
    tree.device("siw0", "4: RNIC", "4: ACTIVE", &[("0200:0000:0007:0000:0000:0000:0000:0000", "", "")]);
    let all = devices(tree.root());
    assert_eq!((all[0].name.as_str(), all[0].node, all[0].is_iwarp), ("rxe0", Some(0), false));
    assert_eq!((all[1].name.as_str(), all[1].node, all[1].is_iwarp), ("siw0", Some(1), true));
    assert_eq!(interfaces_of(tree.root(), &all[0]), ["eth0"]);
    assert_eq!(interfaces_of(tree.root(), &all[1]), ["eth1"]);
    assert_eq!(found(&tree, "10.0.0.1", Some("eth0")), Some(("rxe0".to_owned(), 1, Some(0))));
    assert_eq!(found(&tree, "10.0.9.1", Some("eth1")), Some(("siw0".to_owned(), 1, None)));
}

// ---------------------------------------------------------------------------------------------------------------------
// Nodes.

#[test]
fn the_node_of_an_interface_is_its_devices_or_that_of_what_lies_below() {
    let tree = Tree::new();
    tree.ethernet("eth0", Some(0)).ethernet("eth1", Some(1)).ethernet("eth2", Some(1)).ethernet("odd", Some(-1));
    let node = |name: &str| numa::node_of_interface(tree.root(), name);
    assert_eq!((node("eth0"), node("eth1"), node("odd"), node("none")), (Some(0), Some(1), None, None));
    tree.put("class/net/bond0/lower_eth1/x", "").put("class/net/bond0/lower_eth2/x", "");
    tree.put("class/net/bond0.7/lower_bond0/x", "").put("class/net/bond1/lower_eth0/x", "");
    tree.put("class/net/bond1/lower_eth1/x", "").put("class/net/bond2/lower_eth0/x", "");
    tree.put("class/net/bond2/lower_odd/x", "").put("class/net/ring/lower_ring/x", "");
    assert_eq!((node("bond0"), node("bond0.7")), (Some(1), Some(1)));
    assert_eq!((node("bond1"), node("bond2"), node("ring")), (None, None, None), "different, partly unknown, a loop");
    // A virtio device says nothing; the bus it is on does.
    tree.put("devices/pci0000:00/0000:00:03.0/numa_node", "1");
    tree.put("devices/pci0000:00/0000:00:03.0/virtio2/vendor", "0x1af4");
    tree.link("class/net/eth9/device", "devices/pci0000:00/0000:00:03.0/virtio2");
    assert_eq!(node("eth9"), Some(1));
}

/// Two nodes with four cores each; a device on node 1 with 10.0.0.1, an interface on node 0 with 192.0.2.1.
struct Machine {
    tree: Tree,
    interfaces: Vec<Interface>,
    allowed: Vec<usize>,
}

impl Machine {
    fn new() -> Self {
        let tree = roce();
        tree.nodes(&["0-3", "4-7"]).ethernet("eth0", Some(0));
        let interfaces = vec![
            interface("lo", "127.0.0.1"),
            interface("lo", "::1"),
            interface("eth0", "192.0.2.1"),
            interface("eth0", "fd00::1"),
            interface("eth2", "10.0.0.1"),
        ];
        Self { tree, interfaces, allowed: (0..8).collect() }
    }

    fn place(&self, pin: &str, lanes: usize, doors: &[&str]) -> Result<Placement, PlaceError> {
        let doors: Vec<_> = doors.iter().map(|url| door(url)).collect();
        place(self.tree.root(), &self.interfaces, &self.allowed, &pin.parse::<Pin>().unwrap(), lanes, &doors)
    }

    /// With `pin = "auto"`, where one lane runs, or why it cannot be said.
    fn auto(&self, doors: &[&str]) -> Result<LanePlace, String> {
        let placement = self.place("auto", 1, doors).map_err(|error| error.to_string())?;
        Ok(placement.lanes[0].clone())
    }
}

fn door(url: &str) -> Door {
    let address = url.split_once("://").map(|(_, address)| address.parse().unwrap());
    Door { url: url.to_owned(), address, is_on_device: url.starts_with("native+verbs") }
}

fn on(node: u32) -> Result<LanePlace, String> {
    let cores = if node == 0 { 0..4 } else { 4..8 };
    Ok(LanePlace { cores: cores.collect(), node: Some(node) })
}

#[test]
fn lanes_are_left_alone_unless_asked() {
    let machine = Machine::new();
    let placement = machine.place("off", 3, &["native+verbs://10.0.0.1:1", "memcache://192.0.2.1:1"]).unwrap();
    assert_eq!(placement.lanes, vec![LanePlace::default(); 3]);
    assert_eq!(placement.doors, [[0, 1, 2], [0, 1, 2]]);
}

#[test]
fn lanes_go_to_the_node_of_the_doors_device() {
    let machine = Machine::new();
    assert_eq!(machine.auto(&["native+verbs://10.0.0.1:1"]), on(1));
    assert_eq!(machine.auto(&["native+verbs://10.0.0.1:1", "memcache://127.0.0.1:1"]), on(1), "loopback has no wish");
    assert_eq!(machine.auto(&["native+verbs://0.0.0.0:1"]), on(1), "every RDMA device, and there is one");
    assert_eq!(machine.auto(&["native+iwarp://10.0.0.1:1"]), on(1), "the interface's node");
    assert_eq!(machine.auto(&["native+iwarp://192.0.2.1:1", "memcache://[fd00::1]:1"]), on(0));
    assert_eq!(machine.auto(&["memcache://[::ffff:10.0.0.1]:1"]), on(1));
    // The device's own word goes before that of the interface.
    fs::write(machine.tree.root().join("class/infiniband/mlx5_0/device/numa_node"), "0\n").unwrap();
    assert_eq!(machine.auto(&["native+verbs://10.0.0.1:1"]), on(0));
}

#[test]
fn without_a_wish_the_first_node_this_process_may_run_on_is_taken() {
    let mut machine = Machine::new();
    for doors in [&["memcache://127.0.0.1:1", "memcache+unix:/a"][..], &["memcache://[::1]:1"], &[]] {
        assert_eq!(machine.auto(doors), on(0));
    }
    machine.allowed = vec![5, 6];
    assert_eq!(machine.auto(&[]), Ok(LanePlace { cores: vec![5, 6], node: Some(1) }));
    assert_eq!(machine.auto(&["native+verbs://10.0.0.1:1"]), Ok(LanePlace { cores: vec![5, 6], node: Some(1) }));
    let text = machine.auto(&["memcache://192.0.2.1:1"]).unwrap_err();
    assert!(text.contains("node 0") && text.contains("5-6"), "{text}");
}

#[test]
fn doors_on_different_or_unknown_nodes_must_be_settled_by_hand() {
    let machine = Machine::new();
    let text = machine.auto(&["native+verbs://10.0.0.1:1", "memcache://192.0.2.1:2"]).unwrap_err();
    for part in
        ["native+verbs://10.0.0.1:1 through mlx5_0 on node 1", "192.0.2.1:2 through eth0 on node 0", "node 1 has 4-7"]
    {
        assert!(text.contains(part), "{text}");
    }
    let text = machine.auto(&["native+iwarp://203.0.113.1:1"]).unwrap_err();
    assert!(text.contains("through no interface on an unknown node"), "{text}");
    // A wildcard stands for every Ethernet interface with an IPv4 address: eth0 and eth2.
    let text = machine.auto(&["memcache://0.0.0.0:1"]).unwrap_err();
    assert!(text.contains("eth0 on node 0") && text.contains("eth2 on node 1") && !text.contains("lo "), "{text}");
    fs::write(machine.tree.root().join("class/net/eth2/type"), "32\n").unwrap();
    assert_eq!(machine.auto(&["memcache://0.0.0.0:1"]), on(0), "an InfiniBand interface is no part of a wildcard");
    let mut down = Machine::new();
    down.interfaces.iter_mut().filter(|interface| interface.name == "eth0").for_each(|eth0| eth0.is_up = false);
    assert_eq!(down.auto(&["memcache://[::]:1"]), on(1), "nor is one that is down");
}

#[test]
fn a_machine_of_one_node_has_nothing_to_settle() {
    let mut machine = Machine::new();
    machine.tree = roce();
    let everywhere = Ok(LanePlace { cores: (0..8).collect(), node: None });
    assert_eq!(machine.auto(&["memcache://192.0.2.1:1", "native+verbs://10.0.0.1:1"]), everywhere, "no NUMA at all");
    machine.tree.nodes(&["0-7"]);
    let node = Ok(LanePlace { cores: (0..8).collect(), node: Some(0) });
    assert_eq!(machine.auto(&["memcache://192.0.2.1:1", "native+iwarp://203.0.113.1:1"]), node);
}

#[test]
fn cores_are_dealt_out_and_connections_keep_to_the_node_of_their_device() {
    let machine = Machine::new();
    let doors = ["native+verbs://10.0.0.1:1", "native+iwarp://192.0.2.1:1", "native+iwarp://127.0.0.1:1"];
    let placement = machine.place("0,4-5", 4, &doors).unwrap();
    let places: Vec<_> = placement.lanes.iter().map(|lane| (lane.cores[..].to_vec(), lane.node)).collect();
    assert_eq!(places, [(vec![0], Some(0)), (vec![4], Some(1)), (vec![5], Some(1)), (vec![0], Some(0))]);
    assert_eq!(placement.doors, [vec![1, 2], vec![0, 3], vec![0, 1, 2, 3]]);
    // No lane on the door's node: all are equally far.
    assert_eq!(machine.place("0-1", 2, &doors).unwrap().doors[0], [0, 1]);
    let error = machine.place("0,9", 2, &doors).unwrap_err();
    assert_eq!(error, PlaceError::NoSuchCore { core: 9, allowed: "0-7".to_owned() });
}
