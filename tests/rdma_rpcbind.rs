//! RPC doors at Debian's rpcbind, which `rpcinfo` reads: over userspace iWARP wherever root may make namespaces, where
//! rpcbind finds no other; over RDMA devices in tests/rdma-vm.

use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

mod common;
mod rdma;
use common::Daemon;

const PROGRAM: &str = "541215819";

/// A real rpcbind that dies with this.
struct Rpcbind {
    child: Child,
    /// In network and mount namespaces of its own; otherwise in those of this process.
    is_apart: bool,
}

impl Rpcbind {
    /// `None`, and the reason said, where there can be none.
    fn start(is_apart: bool) -> Option<Self> {
        let run = |command: &str| Command::new("sh").args(["-c", command]).output().expect("sh runs");
        let may = |command: &str| run(command).status.success();
        if !may("command -v rpcbind rpcinfo") {
            rdma::skipped("the real rpcbind: no rpcbind and rpcinfo here (Debian's package is rpcbind)");
            return None;
        }
        if is_apart && !may("unshare --net --mount true") {
            rdma::skipped("the real rpcbind: namespaces of its own are root's to make");
            return None;
        }
        let script = "mount -t tmpfs none /run && ip link set lo up && exec rpcbind -f";
        let mut command = match is_apart {
            true => Command::new("unshare"),
            false => Command::new("rpcbind"),
        };
        match is_apart {
            true => command.args(["--net", "--mount", "sh", "-c", script]),
            false => command.arg("-f"),
        };
        let child = command.stdin(Stdio::null()).spawn().expect("it was found");
        let rpcbind = Self { child, is_apart };
        rdma::until(|| "rpcbind does not answer".to_owned(), || rpcbind.run(&["rpcinfo"]).status.success());
        Some(rpcbind)
    }

    /// What comes before a command, so that it finds this rpcbind.
    fn through(&self) -> Vec<String> {
        match self.is_apart {
            true => {
                format!("nsenter --target {} --net --mount", self.child.id()).split(' ').map(str::to_owned).collect()
            }
            false => vec!["env".to_owned()],
        }
    }

    fn run(&self, words: &[&str]) -> Output {
        let through = self.through();
        let mut command = Command::new(&through[0]);
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("BULKHEAD_")) {
            command.env_remove(name);
        }
        command.args(&through[1..]).args(words).output().expect("it is part of util-linux")
    }

    /// netid, universal address and owner of what our program has there.
    fn entries(&self) -> Vec<String> {
        // With a host it asks over TCP.
        let output = self.run(&["rpcinfo", "127.0.0.1"]);
        assert!(output.status.success(), "{output:?}");
        let text = String::from_utf8(output.stdout).unwrap();
        let ours = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        let ours = ours.filter(|words| words[0] == PROGRAM);
        // program, version, netid, address, name of the service, owner
        let mut shown: Vec<_> =
            ours.map(|words| format!("{} {} {} {}", words[1], words[2], words[3], words[5])).collect();
        shown.sort();
        shown
    }

    fn daemon(&self, flags: &[&str]) -> Daemon {
        Daemon::builder().pool("64MiB").flags(flags).flags(&["--rpcbind"]).through(self.through()).start()
    }
}

impl Drop for Rpcbind {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The RPC doors of a daemon as rpcbind has them, in version 1 and with `owner`.
fn expected(daemon: &Daemon, owner: &str) -> Vec<String> {
    let doors = daemon.doors().iter().filter_map(|door| door.strip_prefix("rpc+")?.split_once("://"));
    let mut shown: Vec<_> = doors
        .map(|(_, address)| {
            let (host, port) = address.rsplit_once(':').unwrap();
            let (host, netid) = match host.strip_prefix('[') {
                Some(host) => (host.trim_end_matches(']'), "rdma6"),
                None => (host, "rdma"),
            };
            let port: u16 = port.parse().unwrap();
            format!("1 {netid} {host}.{}.{} {owner}", port / 256, port % 256)
        })
        .collect();
    shown.sort();
    shown
}

#[test]
fn rpcinfo_shows_the_doors_of_a_daemon_while_it_runs() {
    let Some(rpcbind) = Rpcbind::start(true) else { return };
    let doors = ["--rpc", "rpc+iwarp://127.0.0.1:20049", "--rpc", "rpc+iwarp://[::1]:20049"];
    let mut daemon = rpcbind.daemon(&doors);
    assert_eq!(rpcbind.entries(), ["1 rdma 127.0.0.1.78.81 superuser", "1 rdma6 ::1.78.81 superuser"]);
    assert_eq!(rpcbind.entries(), expected(&daemon, "superuser"));
    // A second daemon does not take them over, and starts no service under them.
    let second = rpcbind.run(&[
        env!("CARGO_BIN_EXE_bulkhead"),
        "serve",
        "--memcache",
        "off",
        "--native",
        "off",
        "--admin",
        "off",
        "--rpc",
        "rpc+iwarp://127.0.0.1:20050",
        "--rpcbind",
        "--pool",
        &format!("{}:64MiB", daemon.dir().join("second").display()),
    ]);
    let said = String::from_utf8_lossy(&second.stderr).into_owned();
    assert_eq!(second.status.code(), Some(69), "{said}");
    assert!(said.contains("127.0.0.1.78.81 already, registered by superuser"), "{said}");
    assert_eq!(rpcbind.entries(), expected(&daemon, "superuser"));

    // Killed, its entries stay; the next one makes them anew and takes them along.
    daemon.signal("KILL");
    assert_eq!(daemon.wait(), -1);
    assert_eq!(rpcbind.entries().len(), 2);
    let mut heir = rpcbind.daemon(&doors);
    assert_eq!(rpcbind.entries(), expected(&heir, "superuser"));
    heir.stop();
    assert_eq!(rpcbind.entries(), [""; 0]);

    // What the message advises does take a stale entry away.
    let mut killed = rpcbind.daemon(&["--rpc", "rpc+iwarp://127.0.0.1:0"]);
    killed.signal("KILL");
    killed.wait();
    assert_eq!(rpcbind.entries().len(), 1);
    assert!(rpcbind.run(&["rpcinfo", "-d", PROGRAM, "1"]).status.success());
    assert_eq!(rpcbind.entries(), [""; 0]);

    // Without its socket it is asked over TCP, where it knows nobody.
    assert!(rpcbind.run(&["rm", "/run/rpcbind.sock"]).status.success());
    let mut over_tcp = rpcbind.daemon(&doors);
    assert_eq!(rpcbind.entries(), expected(&over_tcp, "unknown"));
    over_tcp.stop();
    assert_eq!(rpcbind.entries(), [""; 0]);
}

#[test]
#[cfg_attr(not(feature = "verbs"), ignore = "it needs the feature verbs")]
fn doors_on_devices_are_registered_as_well() {
    // One of another test program, or the machine's own, would be in the way.
    let beds = rdma::beds();
    if beds.is_empty() || Path::new("/run/rpcbind.sock").exists() {
        return;
    }
    let Some(rpcbind) = Rpcbind::start(false) else { return };
    for bed in beds {
        let doors = [format!("rpc+verbs://{}:20049", bed.v4), format!("rpc+verbs://[{}]:20049", bed.v6)];
        let mut daemon = rpcbind.daemon(&["--rpc", &doors[0], "--rpc", &doors[1]]);
        assert_eq!(rpcbind.entries(), expected(&daemon, "superuser"), "{}", bed.device);
        assert_eq!(rpcbind.entries().len(), 2, "{}", bed.device);
        daemon.stop();
        assert_eq!(rpcbind.entries(), [""; 0], "{}", bed.device);
    }
}
