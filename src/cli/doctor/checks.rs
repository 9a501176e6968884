//! What `doctor` looks at, one check a function.

use std::fs;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::unix::net::UnixStream;
use std::path::Path;

use actix_rt::System;
use bulkhead::actors::fabric_listener::{FabricDoor, Protocol, fabric_of};
use bulkhead::actors::gate::Gate;
use bulkhead::actors::native_connection::NativeProtocol;
use bulkhead::actors::rpc_connection::{RpcDoor, RpcProtocol};
use bulkhead::actors::rpcbind::{self, Place};
use bulkhead::actors::{MemorySum, placement, places_to_come_to};
use bulkhead::config::{
    ByteSize, Config, FabricAddress, NativeAddress, Network, Pin, PoolConfig, Speech, machine_memory_bytes,
};
use bulkhead::fabric::Address;
use bulkhead::machine::interfaces::{owner_of, source_towards};
use bulkhead::machine::rdma::{Device, Gid, Port};
use bulkhead::machine::{SYSFS, numa, rdma};
use bulkhead::store::pool::{PoolError, inspect};
use bulkhead::store::uring::{AlignedBuf, Backend, TailIo};
use nix::sys::resource::{Resource, getrlimit};

use super::{Asked, Finding, Patient};

impl Patient {
    pub fn findings(&self, asked: &[Asked]) -> Vec<Finding> {
        let mut findings = self.rdma();
        findings.extend(asked.iter().map(|asked| self.address(asked)));
        findings.extend(self.doors());
        findings.extend(self.allow());
        findings.extend(self.rpcbind());
        findings.push(self.lanes());
        findings.push(self.memory());
        findings.push(self.locked_memory());
        findings.push(huge_pages(Path::new("/sys/kernel/mm/transparent_hugepage/enabled")));
        findings.push(io_uring());
        findings.push(self.descriptors());
        findings.extend(self.config.store.pools.iter().map(pool));
        findings.extend(self.congestion_control());
        findings
    }

    /// URLs and addresses of the doors that RDMA devices open.
    fn doors_on_devices(&self) -> impl Iterator<Item = (String, SocketAddr)> + use<> {
        let doors = places_to_come_to(&self.config).into_iter().filter(|door| door.is_on_device);
        doors.filter_map(|door| Some((door.url, door.address?)))
    }

    fn rdma(&self) -> Vec<Finding> {
        const CHECK: &str = "rdma";
        if self.devices.is_empty() {
            let text = "no RDMA device: doors on iwarp work over TCP";
            return match self.doors_on_devices().next() {
                None => vec![Finding::ok(CHECK, text)],
                Some((door, _)) => {
                    let text = format!("{text}, and {door} does not");
                    let mend =
                        "rdma link add rxe0 type rxe netdev INTERFACE, or a door on iwarp instead of one on verbs";
                    vec![Finding::trouble(CHECK, text, mend)]
                }
            };
        }
        let mut findings = Vec::new();
        for device in &self.devices {
            for port in &device.ports {
                let text = port_text(device, port);
                findings.push(match port.is_active() {
                    true => Finding::ok(CHECK, text),
                    false => Finding::note(CHECK, text, port_mend(device, port)),
                });
            }
        }
        if "native+verbs://0.0.0.0:0".parse::<NativeAddress>().is_err() {
            let text = "this program was built without RDMA devices: it reaches none of these";
            findings.push(Finding::note(CHECK, text, "cargo build --release --features verbs"));
        } else if let Some(why) = rdma::access_trouble(Path::new("/dev"), &self.devices) {
            let mend = "modprobe -a ib_uverbs rdma_ucm, and read and write access to /dev/infiniband for this user";
            findings.push(match self.doors_on_devices().next() {
                None => Finding::note(CHECK, why, mend),
                Some(_) => Finding::trouble(CHECK, why, mend),
            });
        }
        findings
    }

    /// Where an address that was asked about leads to.
    fn address(&self, asked: &Asked) -> Finding {
        const CHECK: &str = "address";
        let Asked { text, address } = asked;
        let (own, how) = match owner_of(&self.interfaces, *address) {
            Some(owner) => (Some(owner), format!("{text} is {}'s", owner.name)),
            None => {
                let source = source_towards(*address);
                let Some(owner) = source.and_then(|source| owner_of(&self.interfaces, source)) else {
                    let text = format!("{text}: no interface has this address, and no route leads to it");
                    return Finding::trouble(
                        CHECK,
                        text,
                        format!("ip address add {address} dev INTERFACE, or ip route add"),
                    );
                };
                (Some(owner), format!("{text} is reached from {} through {}", owner.address, owner.name))
            }
        };
        let (local, name) = own.map_or((*address, None), |owner| (owner.address, Some(owner.name.as_str())));
        match rdma::resolve(Path::new(SYSFS), &self.devices, local, name) {
            None => Finding::ok(CHECK, format!("{how}: no RDMA device there, native+iwarp works over TCP")),
            Some(rdma::Place { device, port, gid }) => {
                let gid = place_text(device, gid);
                let text = format!("{how}: {} port {}, {gid}, {}", device.name, port.number, node_text(device.node));
                match port.is_active() {
                    true => Finding::ok(CHECK, text),
                    false => Finding::note(CHECK, format!("{text}, {}", port.state), port_mend(device, port)),
                }
            }
        }
    }

    /// Every address is bound and let go again.
    fn doors(&self) -> Vec<Finding> {
        const CHECK: &str = "door";
        let mut findings = Vec::new();
        let mut judge = |url: String, bound: Result<(), String>| {
            findings.push(match bound {
                Ok(()) => Finding::ok(CHECK, format!("{url} can be bound")),
                Err(why) => {
                    let mend =
                        "stop the daemon that has it, or name another port, or an address that `ip address` shows";
                    Finding::trouble(CHECK, format!("{url}: {why}"), mend)
                }
            });
        };
        let listen = &self.config.listen;
        let tcp = |address: &SocketAddr| TcpListener::bind(address).map(drop).map_err(|err| err.to_string());
        for address in &listen.memcache {
            judge(format!("memcache://{address}"), tcp(address));
        }
        for address in &listen.nfs_tcp {
            judge(format!("nfs+tcp://{address}"), tcp(address));
        }
        for native in &listen.native {
            judge(native.to_string(), try_to_bind::<NativeProtocol>(native, &self.config.native));
        }
        let rpc_door = RpcDoor::new(self.config.rpc.clone());
        for rpc in &listen.rpc {
            judge(rpc.to_string(), try_to_bind::<RpcProtocol>(rpc, &rpc_door));
        }
        if let Some(address) = &listen.admin {
            judge(format!("http://{address}"), tcp(address));
        }
        for path in &listen.unix {
            let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
            let free = match fs::symlink_metadata(path) {
                Err(_) if dir.is_dir() => Ok(()),
                Err(_) => Err(format!("{} is no directory", dir.display())),
                // One that nobody listens on is left over and will be replaced.
                Ok(_) => match UnixStream::connect(path) {
                    Err(err) if err.kind() == std::io::ErrorKind::ConnectionRefused => Ok(()),
                    Err(err) => Err(err.to_string()),
                    Ok(_) => Err("somebody listens there".to_owned()),
                },
            };
            judge(format!("memcache+unix:{}", path.display()), free);
        }
        for (url, address) in self.doors_on_devices().filter(|_| !self.devices.is_empty()) {
            findings.push(self.device_of_door(&url, address.ip()));
        }
        findings
    }

    fn device_of_door(&self, url: &str, address: IpAddr) -> Finding {
        const CHECK: &str = "door";
        if address.is_unspecified() {
            return Finding::ok(CHECK, format!("{url} takes every RDMA device"));
        }
        let owner = owner_of(&self.interfaces, address).map(|owner| owner.name.as_str());
        match rdma::resolve(Path::new(SYSFS), &self.devices, address, owner) {
            None => {
                let on = owner.unwrap_or("INTERFACE");
                let text = format!("{url}: no RDMA device has this address");
                Finding::trouble(
                    CHECK,
                    text,
                    format!("an address of a device above, or rdma link add rxe0 type rxe netdev {on}"),
                )
            }
            Some(rdma::Place { device, port, gid }) => {
                let gid = place_text(device, gid);
                let text = format!("{url} is {} port {}, {gid}, {}", device.name, port.number, node_text(device.node));
                match port.is_active() {
                    true => Finding::ok(CHECK, text),
                    false => Finding::trouble(CHECK, format!("{text}, {}", port.state), port_mend(device, port)),
                }
            }
        }
    }

    fn allow(&self) -> Vec<Finding> {
        let Config { listen, native, rpc, nfs, .. } = &self.config;
        let on_nfs =
            listen.nfs_tcp.iter().filter(|door| Gate::is_open(&Address::Socket(**door), &nfs.allow)).map(|door| {
                let text = format!("nfs+tcp://{door}: everybody who reaches this address may mount, read and write");
                Finding::note("allow", text, "--nfs-allow CIDR, or nfs.allow in the configuration".to_owned())
            });
        open_doors(&listen.native, &native.allow).chain(open_doors(&listen.rpc, &rpc.allow)).chain(on_nfs).collect()
    }

    /// Whether RPC doors could be registered. A door whose port is not known yet has no entry to look for.
    fn rpcbind(&self) -> Option<Finding> {
        const CHECK: &str = "rpcbind";
        let place = Place::at(self.config.rpc.rpcbind.as_ref()?);
        let with_port = |address: &Address| !matches!(address, Address::Socket(socket) if socket.port() == 0);
        let addresses = self.config.listen.rpc.iter().map(|rpc| rpc.address.clone()).filter(with_port);
        let (mut services, _) = rpcbind::services(&addresses.collect::<Vec<_>>());
        let on_tcp: Vec<_> = self.config.listen.nfs_tcp.iter().copied().filter(|nfs| nfs.port() != 0).collect();
        services.extend(rpcbind::nfs_services(&on_tcp).0);
        let mut netids: Vec<_> = services.iter().map(|service| service.netid).collect();
        netids.dedup();
        let netids = match netids.len() {
            0 => "it answers".to_owned(),
            _ => format!("netid {} can be registered", netids.join(" and ")),
        };
        let at = place.socket.display().to_string();
        Some(match System::new().block_on(rpcbind::look(&place, services)) {
            Ok(()) => Finding::ok(CHECK, format!("{at}: {netids}")),
            Err(error) => {
                Finding::trouble(CHECK, error.to_string(), "systemctl start rpcbind; rpcinfo shows what it has")
            }
        })
    }

    fn lanes(&self) -> Finding {
        const CHECK: &str = "numa";
        let nodes = numa::nodes(Path::new(SYSFS)).len().max(1);
        let (pin, lanes) = (&self.config.pin, self.config.lanes);
        let text = format!("{nodes} NUMA node{}, lanes {lanes}, pin {pin}", if nodes == 1 { "" } else { "s" });
        match placement(&self.config) {
            Err(error) => Finding::trouble(CHECK, error.to_string(), "--pin CORES (such as 0,2,8-11), or --pin off"),
            Ok(_) if nodes > 1 && *pin == Pin::Off && self.doors_on_devices().next().is_some() => {
                let text = format!("{text}: lanes may run far from the RDMA device");
                Finding::note(CHECK, text, "--pin auto")
            }
            Ok(_) => Finding::ok(CHECK, text),
        }
    }

    fn memory(&self) -> Finding {
        let (sum, here) = (MemorySum::of(&self.config), machine_memory_bytes());
        let text = format!("{sum}; this machine, or this control group, has {}", mib(here));
        if sum.total_bytes() > here {
            let mend = "a smaller --memory, or native.connections_max, native.windows, rpc.connections_max, rpc.windows or store.staging in \
                 the configuration";
            return Finding::trouble("memory", text, mend);
        }
        Finding::ok("memory", text)
    }

    fn locked_memory(&self) -> Finding {
        const CHECK: &str = "memlock";
        const MEND: &str = "ulimit -l unlimited, or LimitMEMLOCK=infinity in the unit of systemd";
        let Config { listen, native, rpc, .. } = &self.config;
        let native_bytes = native.windows.mapping_bytes() + native.ring.mapping_bytes(4096);
        let messages = 2 * u64::from(rpc.credits_max) * u64::from(rpc.inline_bytes).next_multiple_of(4096);
        let rpc_bytes = rpc.windows.mapping_bytes() + messages;
        let windows = on_device(&listen.native) * native.connections_max as u64 * native_bytes
            + on_device(&listen.rpc) * rpc.connections_max as u64 * rpc_bytes;
        let staging = self.config.store.staging_bytes * self.config.lanes as u64;
        // Up to here everything is `u64` and small; the limit is "unlimited" at its largest.
        let limit = match getrlimit(Resource::RLIMIT_MEMLOCK) {
            Ok((limit, _)) => limit,
            Err(error) => return Finding::note(CHECK, format!("the limit is not known: {error}"), MEND),
        };
        if limit == u64::MAX || has_capability(CAP_IPC_LOCK) {
            return Finding::ok(CHECK, format!("no limit; windows of RDMA devices take {}", mib(windows)));
        }
        let text = format!("limit {}, windows of RDMA devices {}, staging {}", mib(limit), mib(windows), mib(staging));
        if windows > limit {
            return Finding::trouble(
                CHECK,
                text,
                format!("{MEND}, or a smaller native.connections_max or rpc.connections_max"),
            );
        }
        if windows + staging > limit {
            return Finding::note(CHECK, format!("{text}: disk reads may cost more CPU"), MEND);
        }
        Finding::ok(CHECK, text)
    }

    fn descriptors(&self) -> Finding {
        const CHECK: &str = "descriptors";
        let files = |pool: &PoolConfig| match inspect(&pool.dir, pool.bytes) {
            Ok(found) => found.capacity_bytes.div_ceil(bulkhead::store::pool::FILE_BYTES_MAX),
            Err(_) => 1,
        };
        let pools: u64 = self.config.store.pools.iter().map(files).sum();
        let listen = &self.config.listen;
        let on_fabrics = listen.native.len() + listen.rpc.len();
        let doors = on_fabrics + listen.memcache.len() + listen.nfs_tcp.len() + listen.unix.len();
        let lanes = self.config.lanes as u64 * (8 + 4 * on_fabrics as u64);
        let needed = self.config.limits.connections_max as u64 + pools + lanes + doors as u64 + 32;
        match getrlimit(Resource::RLIMIT_NOFILE) {
            Err(error) => Finding::note(CHECK, format!("the limit is not known: {error}"), "ulimit -Hn"),
            Ok((_, most)) if most < needed => {
                let text = format!("at most {most}, and connections, pools and lanes may take {needed}");
                let mend = format!("ulimit -Hn {needed}, LimitNOFILE={needed}, or a smaller limits.connections_max");
                Finding::trouble(CHECK, text, mend)
            }
            Ok((_, most)) => Finding::ok(CHECK, format!("at most {most}, {needed} needed")),
        }
    }

    /// A door asks for cubic where its peer is on this host; without the right to that it gets the default.
    fn congestion_control(&self) -> Option<Finding> {
        let read = |name: &str| fs::read_to_string(format!("/proc/sys/net/ipv4/{name}")).ok();
        let (default, allowed) = (read("tcp_congestion_control")?, read("tcp_allowed_congestion_control")?);
        let default = default.trim();
        let has_cubic = allowed.split_whitespace().any(|name| name == "cubic");
        let may_choose = has_cubic || has_capability(CAP_NET_ADMIN);
        let listen = &self.config.listen;
        let is_on_tcp = !listen.memcache.is_empty() || !listen.nfs_tcp.is_empty();
        (default == "bbr" && !may_choose && is_on_tcp).then(|| {
            let text = format!("{default} on loopback costs 8 to 20 %, and a process may not choose cubic");
            let mend = format!("sysctl net.ipv4.tcp_allowed_congestion_control=\"{} cubic\"", allowed.trim());
            Finding::note("tcp", text, mend)
        })
    }
}

fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes >> 20)
}

fn node_text(node: Option<u32>) -> String {
    node.map_or("NUMA node unknown".to_owned(), |node| format!("NUMA node {node}"))
}

/// The GID of a place; iWARP connects by IP addresses alone.
fn place_text(device: &Device, gid: Option<&Gid>) -> String {
    match gid {
        Some(gid) => gid_text(device, gid),
        None if device.is_iwarp => "iWARP".to_owned(),
        None => "no GID of this address".to_owned(),
    }
}

fn gid_text(device: &Device, gid: &Gid) -> String {
    let address = match device.is_iwarp {
        true => gid.address.octets()[..6].iter().map(|octet| format!("{octet:02x}")).collect::<Vec<_>>().join(":"),
        false => IpAddr::from(gid.address).to_canonical().to_string(),
    };
    // The kernel calls every GID that is not RoCE v2 by the name of the others, those of iWARP too.
    let kind = if device.is_iwarp { "" } else { &gid.kind };
    let attributes = [gid.interface.as_deref().unwrap_or_default(), kind];
    let attributes: Vec<_> = attributes.into_iter().filter(|text| !text.is_empty()).collect();
    match attributes.is_empty() {
        true => format!("GID {} = {address}", gid.index),
        false => format!("GID {} = {address} ({})", gid.index, attributes.join(", ")),
    }
}

fn port_text(device: &Device, port: &Port) -> String {
    let Port { number, state, physical_state, link_layer, rate, gids } = port;
    let kind = if device.is_iwarp { "iWARP over " } else { "" };
    let node = node_text(device.node);
    let gids: String = gids.iter().map(|gid| format!("; {}", gid_text(device, gid))).collect();
    format!("{} port {number}: {state} ({physical_state}), {kind}{link_layer}, {rate}, {node}{gids}", device.name)
}

fn port_mend(device: &Device, port: &Port) -> String {
    if port.link_layer == "InfiniBand" {
        return "a cable to a fabric with a subnet manager, such as opensm".to_owned();
    }
    let interfaces = rdma::interfaces_of(Path::new(SYSFS), device);
    format!("ip link set {} up", interfaces.first().map_or("INTERFACE", String::as_str))
}

/// Memory may be locked without limit.
const CAP_IPC_LOCK: u32 = 14;
/// Any congestion control may be chosen.
const CAP_NET_ADMIN: u32 = 12;

fn has_capability(capability: u32) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let bits = effective.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok());
    bits.is_some_and(|bits| bits >> capability & 1 == 1)
}

fn huge_pages(path: &Path) -> Finding {
    const CHECK: &str = "huge pages";
    let text = fs::read_to_string(path).unwrap_or_default();
    match text.split(['[', ']']).nth(1) {
        Some(word @ ("always" | "madvise")) => {
            Finding::ok(CHECK, format!("{word}: the arena asks for them and gets them"))
        }
        _ => {
            let text = "never: reads and writes of the arena cost more CPU";
            Finding::note(CHECK, text, format!("echo madvise > {}", path.display()))
        }
    }
}

/// Tried, not guessed: containers refuse it in their own ways.
fn io_uring() -> Finding {
    const CHECK: &str = "io_uring";
    let (region, _pieces) = match AlignedBuf::new(4096) {
        Ok(buf) => buf.split(4096),
        Err(error) => return Finding::trouble(CHECK, format!("no memory: {error}"), "free some"),
    };
    match TailIo::<()>::new(Backend::Ring, 4, &region) {
        Ok(_) => Finding::ok(CHECK, "works"),
        Err(error) => {
            let text = format!("{error}: disk I/O goes through a few blocking threads");
            let disabled = fs::read_to_string("/proc/sys/kernel/io_uring_disabled").unwrap_or_default();
            let mend = match disabled.trim() {
                "1" | "2" => "sysctl kernel.io_uring_disabled=0",
                _ => {
                    "a container's seccomp profile that lets io_uring_setup, _enter and _register pass; Linux 5.19 or later"
                }
            };
            Finding::note(CHECK, text, mend)
        }
    }
}

fn pool(pool: &PoolConfig) -> Finding {
    const CHECK: &str = "pool";
    let dir = pool.dir.display();
    match inspect(&pool.dir, pool.bytes) {
        Ok(found) => {
            let system = file_system(&pool.dir).unwrap_or_else(|| "an unknown file system".to_owned());
            let state = if found.exists { "a pool" } else { "will be made" };
            let size = ByteSize(found.capacity_bytes);
            let text = format!("{dir}: {state}, up to {size}, on {system}");
            if found.is_direct {
                return Finding::ok(CHECK, format!("{text} with O_DIRECT"));
            }
            let text = format!("{text} without O_DIRECT: octets go through the page cache, which takes RAM");
            Finding::note(CHECK, text, "a directory on ext4, XFS or Btrfs of a local drive")
        }
        Err(error) => {
            let mend = match &error {
                PoolError::Empty { .. } => format!("bulkhead pool init {dir}"),
                PoolError::Locked { .. } => "stop the daemon that has it, or --pool ANOTHER".to_owned(),
                PoolError::TooLarge { free_bytes, .. } => format!("--pool {dir}:{}MiB", free_bytes >> 20),
                PoolError::TooSmall { .. } | PoolError::NoRoom { .. } => format!("--pool {dir}:SIZE, or another drive"),
                PoolError::Io { .. } => "a directory that this user can make or write".to_owned(),
                _ => "--pool ANOTHER, a directory that does not exist yet".to_owned(),
            };
            Finding::trouble(CHECK, error.to_string(), mend)
        }
    }
}

fn try_to_bind<P: Protocol>(door: &FabricAddress<P::Speech>, config: &P::Config) -> Result<(), String> {
    let bound = FabricDoor::<P>::bind(&*fabric_of(door), &door.address, config, 1);
    bound.map(drop).map_err(|error| error.to_string())
}

/// A note for each door that admits everybody.
fn open_doors<S: Speech>(doors: &[FabricAddress<S>], allow: &[Network]) -> impl Iterator<Item = Finding> {
    let note = |door: &FabricAddress<S>| {
        let text = format!("{door}: everybody who reaches this address may read and write");
        let scheme = S::SCHEME;
        Finding::note("allow", text, format!("--{scheme}-allow CIDR, or {scheme}.allow in the configuration"))
    };
    doors.iter().filter(|door| Gate::is_open(&door.address, allow)).map(note)
}

/// Doors that RDMA devices open.
fn on_device<S: Speech>(doors: &[FabricAddress<S>]) -> u64 {
    doors.iter().filter(|door| door.is_on_device()).count() as u64
}

/// The type of the file system that holds `dir`, or would: of the mounts above it, the longest.
fn file_system(dir: &Path) -> Option<String> {
    let dir =
        dir.ancestors().find_map(|above| above.canonicalize().ok()).or_else(|| Path::new(".").canonicalize().ok())?;
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    let mount = |line: &str| {
        let (place, kind) = line.split_once(" - ")?;
        let place = place.split(' ').nth(4)?.replace("\\040", " ");
        dir.starts_with(&place).then(|| (place.len(), kind.split(' ').next().unwrap_or_default().to_owned()))
    };
    // Of two on one place the later hides the other, and of equals the last is the maximum.
    mounts.lines().filter_map(mount).max_by_key(|(len, _)| *len).map(|(_, kind)| kind)
}

#[cfg(test)]
mod tests {
    use super::super::Level;
    use super::*;

    #[test]
    fn huge_pages_are_a_note_unless_the_arena_gets_them() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("enabled");
        let level = |text: &str| {
            fs::write(&path, text).unwrap();
            huge_pages(&path).level
        };
        assert_eq!(level("always [madvise] never\n"), Level::Ok);
        assert_eq!(level("[always] madvise never\n"), Level::Ok);
        assert_eq!(level("always madvise [never]\n"), Level::Note);
        assert_eq!(huge_pages(Path::new("/nonexistent")).level, Level::Note);
    }

    #[test]
    fn a_pool_that_serve_would_refuse_is_a_trouble_with_its_mend() {
        let home = tempfile::tempdir().unwrap();
        let at = |dir: &Path| pool(&PoolConfig { dir: dir.to_owned(), bytes: Some(8 << 20) });
        let absent = at(&home.path().join("pool"));
        assert!(absent.level != Level::Trouble && absent.text.contains("will be made"), "{absent:?}");
        let empty = at(home.path());
        assert_eq!(empty.level, Level::Trouble);
        assert_eq!(empty.mend, Some(format!("bulkhead pool init {}", home.path().display())));
        fs::write(home.path().join("thesis.tex"), "dear").unwrap();
        let others = at(home.path());
        assert!(others.level == Level::Trouble && others.mend.unwrap().contains("ANOTHER"));
    }

    #[test]
    fn the_file_system_is_that_of_the_nearest_mount() {
        assert_eq!(file_system(Path::new("/proc/self")).as_deref(), Some("proc"));
        assert_eq!(file_system(Path::new("/proc/nonexistent/a/b")).as_deref(), Some("proc"));
    }
}
