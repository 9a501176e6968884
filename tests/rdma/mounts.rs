//! Linux's NFS client: what it mounts, how it is set, what it counts and what of it can be cut.

use std::collections::BTreeMap;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

use super::until;

/// Of sunrpc, one file a setting.
const SETTINGS: &str = "/proc/sys/sunrpc";
const TRACE: &str = "/sys/kernel/tracing";

/// Runs a command to its end; what it said. With its words, so that a failure shows them.
#[track_caller]
pub fn run(program: &str, arguments: &[&str]) -> String {
    run_in(Path::new("/"), program, arguments)
}

#[track_caller]
pub fn run_in(directory: &Path, program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).current_dir(directory).output();
    let output = output.unwrap_or_else(|error| panic!("{program}: {error}"));
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {}: {}\n{said}{errors}", arguments.join(" "), output.status);
    said
}

/// How a mount is carried.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Carrier {
    Rdma,
    Tcp,
}

impl Carrier {
    pub const fn word(self) -> &'static str {
        match self {
            Self::Rdma => "rdma",
            Self::Tcp => "tcp",
        }
    }
}

/// Where a server is, for MOUNT and for NFS.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Place {
    pub carrier: Carrier,
    pub nfs: SocketAddr,
    /// On TCP, at the same address.
    pub mount_port: u16,
}

/// A directory on which something is mounted, until the value goes.
pub struct Mount {
    path: PathBuf,
    place: Place,
    options: String,
    is_mounted: bool,
    /// When it was mounted.
    connections: u64,
}

impl Mount {
    /// As a user would, with `options` besides: `,timeo=50`.
    pub fn new(place: Place, options: &str) -> Self {
        Self::of("/", place, options)
    }

    pub fn of(export: &str, place: Place, options: &str) -> Self {
        static COUNT: Mutex<u32> = Mutex::new(0);
        let mut count = COUNT.lock().unwrap();
        if *count == 0 {
            run("modprobe", &["-a", "nfs", "nfsv3", "rpcrdma"]);
        }
        *count += 1;
        let path = PathBuf::from(format!("/mnt/{}-{count}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        let options = format!(
            "vers=3,proto={},port={},mountport={},mountproto=tcp,nolock{options}",
            place.carrier.word(),
            place.nfs.port(),
            place.mount_port
        );
        let mut mount = Self { path, place, options, is_mounted: false, connections: 0 };
        mount.mount(export);
        mount
    }

    fn mount(&mut self, export: &str) {
        let what = format!("{}:{export}", self.place.nfs.ip());
        run("mount", &["-t", "nfs", "-o", &self.options, &what, self.path.to_str().unwrap()]);
        self.is_mounted = true;
        assert!(self.stat("xprt:").starts_with(&format!("{} ", self.place.carrier.word())), "{}", self.stat("xprt:"));
        self.connections = self.made();
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn unmount(&mut self) {
        // Whoever had a file open has just gone, or is about to.
        let busy = || Command::new("umount").arg(&self.path).output().is_ok_and(|done| done.status.success());
        until(|| format!("{} cannot be unmounted", self.path.display()), busy);
        self.is_mounted = false;
    }

    pub fn remount(&mut self) {
        self.unmount();
        self.mount("/");
    }

    /// Of `/proc/self/mountstats`: the line of this mount that begins with `name`, without that.
    #[track_caller]
    pub fn stat(&self, name: &str) -> String {
        let all = fs::read_to_string("/proc/self/mountstats").unwrap();
        let on = format!(" mounted on {} with ", self.path.display());
        let own = all.lines().skip_while(|line| !line.contains(&on)).skip(1);
        let mut own = own.take_while(|line| !line.starts_with("device "));
        let line = own.find_map(|line| line.trim().strip_prefix(name).map(|rest| rest.trim().to_owned()));
        line.unwrap_or_else(|| panic!("no {name} of {}\n{all}", self.path.display()))
    }

    /// How often each procedure was called.
    pub fn calls(&self, procedure: &str) -> u64 {
        self.stat(&format!("{procedure}:")).split(' ').next().unwrap().parse().unwrap()
    }

    /// Procedures that were called, how often, and how many milliseconds the server took for one.
    pub fn told(&self) -> String {
        let all = fs::read_to_string("/proc/self/mountstats").unwrap();
        let on = format!(" mounted on {} with ", self.path.display());
        let own = all.lines().skip_while(|line| !line.contains(&on)).skip(1);
        let own = own.take_while(|line| !line.starts_with("device ")).skip_while(|line| !line.contains("per-op"));
        let told = own.skip(1).filter_map(|line| {
            // Operations, transmissions, timeouts, octets sent and received, milliseconds queued, until the reply, and in all.
            let (name, rest) = line.trim().split_once(": ")?;
            let numbers: Vec<u64> = rest.split(' ').filter_map(|word| word.parse().ok()).collect();
            (numbers[0] > 0).then(|| format!("{name} {} {:.1}", numbers[0], numbers[6] as f64 / numbers[0] as f64))
        });
        told.collect::<Vec<_>>().join(", ")
    }

    fn made(&self) -> u64 {
        // Protocol, source port, binds, connections. For TCP the first counts twice.
        self.stat("xprt:").split(' ').nth(3).unwrap().parse().unwrap()
    }

    /// Connections made in the place of the first.
    pub fn reconnections(&self) -> u64 {
        self.made() - self.connections
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if !self.is_mounted {
        } else if std::thread::panicking() {
            // Its server may be gone.
            let _ = Command::new("umount").args(["-f", "-l"]).arg(&self.path).status();
        } else {
            self.unmount();
        }
        let _ = fs::remove_dir(&self.path);
    }
}

/// Settings of the machine's client, as they were before once this goes. New mounts have them.
pub struct Settings {
    before: BTreeMap<String, String>,
}

impl Settings {
    pub fn new() -> Self {
        // Its settings come with the client, which comes with the first mount.
        run("modprobe", &["rpcrdma"]);
        Self { before: BTreeMap::new() }
    }

    pub fn set(&mut self, name: &str, value: u32) {
        let path = format!("{SETTINGS}/{name}");
        let before = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
        self.before.entry(path.clone()).or_insert(before);
        fs::write(&path, format!("{value}\n")).unwrap_or_else(|error| panic!("{path}, {value}: {error}"));
    }
}

impl Drop for Settings {
    fn drop(&mut self) {
        for (path, value) in &self.before {
            let _ = fs::write(path, value);
        }
    }
}

/// Ends every TCP connection of this machine to `port`, those of siw too.
pub fn cut(address: SocketAddr) -> usize {
    let said = run("ss", &["-K", "-n", "-t", "-H", "dst", &format!("{}:{}", address.ip(), address.port())]);
    said.lines().count()
}

/// Events of the client that the kernel notes, from now on until the value goes.
pub struct Trace {
    event: &'static str,
}

impl Trace {
    /// `event`, e.g. `rpcrdma/xprtrdma_chunk_reply`.
    pub fn new(event: &'static str) -> Self {
        if !Path::new(TRACE).join("events").exists() {
            run("mount", &["-t", "tracefs", "tracefs", TRACE]);
        }
        fs::write(Path::new(TRACE).join("buffer_size_kb"), "8192").unwrap();
        fs::write(Path::new(TRACE).join("trace"), "").unwrap();
        let trace = Self { event };
        trace.enable("1");
        trace
    }

    fn enable(&self, value: &str) {
        let path = Path::new(TRACE).join("events").join(self.event).join("enable");
        fs::write(&path, value).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    }

    /// What was noted so far, a line each.
    pub fn lines(&self) -> Vec<String> {
        let name = self.event.rsplit('/').next().unwrap();
        let noted = fs::read_to_string(Path::new(TRACE).join("trace")).unwrap();
        noted.lines().filter(|line| line.contains(&format!(" {name}: "))).map(str::to_owned).collect()
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        self.enable("0");
    }
}
