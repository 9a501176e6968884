//! `bulkhead serve`.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use bulkhead::config::{
    ByteSize, Flags, LogConfig, LogFormat, NativeAddress, Network, Pin, PoolConfig, RpcAddress, Settings, Switch,
    machine_memory_bytes,
};
use bulkhead::error::Exit;
use bulkhead::programs::rpcbind;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

use super::{Failure, print};
use bulkhead::actors::start;

const EXAMPLES: &str = "\
Examples:
  bulkhead serve
  bulkhead serve --memory 8GiB --pool /mnt/nvme0/bulkhead:500GiB --pool /mnt/nvme1/bulkhead
  bulkhead serve --memcache off --native off --unix /run/bulkhead.sock --admin off
  bulkhead serve --rpc rpc+iwarp://10.0.0.1:20049 --rpcbind
  bulkhead serve --nfs-tcp 10.0.0.1:2049 --nfs-allow 10.0.0.0/24    docs/nfs.md has the mount commands
  bulkhead serve --config /etc/bulkhead.toml --print-config

Order: defaults < --config FILE < BULKHEAD_* environment (BULKHEAD_STORE__MEMORY=64MiB) < flags.
On stdout come one `listening URL` line per door, the memory the daemon may use, then `ready`; \
events go to stderr.
SIGTERM or SIGINT lets transfers in flight finish; a second one ends the daemon at once.";

/// Run the daemon
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Print the configuration in force as TOML and leave
    #[arg(long)]
    print_config: bool,
    #[command(flatten)]
    config: ConfigArgs,
}

// What a configuration is made of. No doc comment: it would become the text of the command that flattens it.
#[derive(clap::Args, Debug)]
pub struct ConfigArgs {
    /// TOML file with any of the keys that configs/bulkhead.toml explains
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Memcache text over TCP, or `off` (repeatable) [default: 127.0.0.1:11211]
    #[arg(long, value_name = "IP:PORT")]
    memcache: Vec<Switch<SocketAddr>>,
    /// Memcache text over a Unix socket (repeatable)
    #[arg(long, value_name = "PATH")]
    unix: Vec<PathBuf>,
    /// The native protocol over a fabric, or `off` (repeatable) [default: native+iwarp://127.0.0.1:11212]
    #[arg(long, value_name = "URL")]
    native: Vec<Switch<NativeAddress>>,
    /// Network or address whose peers native doors admit (repeatable) [default: all who reach the door]
    #[arg(long, value_name = "CIDR")]
    native_allow: Vec<Network>,
    /// RPC-over-RDMA over a fabric, such as rpc+iwarp://127.0.0.1:20049 (repeatable) [default: none]
    #[arg(long, value_name = "URL")]
    rpc: Vec<Switch<RpcAddress>>,
    /// Network or address whose peers RPC doors admit (repeatable) [default: all who reach the door]
    #[arg(long, value_name = "CIDR")]
    rpc_allow: Vec<Network>,
    /// Register RPC and NFS doors at rpcbind, at its socket /run/rpcbind.sock or PATH [default: off]
    #[arg(long, value_name = "PATH", num_args = 0..=1, require_equals = true, default_missing_value = rpcbind::SOCKET)]
    rpcbind: Option<Switch<String>>,
    /// NFS version 3 and MOUNT over TCP, or `off`; RPC doors serve both then, too (repeatable) [default: none]
    #[arg(long, value_name = "IP:PORT")]
    nfs_tcp: Vec<Switch<SocketAddr>>,
    /// Network or address whose hosts may mount (repeatable) [default: 127.0.0.0/8 and ::1]
    #[arg(long, value_name = "CIDR")]
    nfs_allow: Vec<Network>,
    /// The super-user of a host that mounts is nobody here
    #[arg(long)]
    nfs_root_squash: bool,
    /// Metrics and health over HTTP, or `off` [default: 127.0.0.1:11290]
    #[arg(long, value_name = "IP:PORT")]
    admin: Option<Switch<SocketAddr>>,
    /// Pool directory and what it may hold (repeatable) [default: one in the cache directory, half of the free space]
    #[arg(long, value_name = "DIR[:SIZE]")]
    pool: Vec<PoolConfig>,
    /// RAM for heads and hot bodies [default: a quarter of RAM, at most 4GiB]
    #[arg(long, value_name = "SIZE")]
    memory: Option<ByteSize>,
    /// The part of each value that rests in RAM longest [default: 256KiB]
    #[arg(long, value_name = "SIZE")]
    head: Option<ByteSize>,
    /// Largest value taken [default: 16GiB]
    #[arg(long, value_name = "SIZE")]
    value_max: Option<ByteSize>,
    /// Threads that serve connections [default: cores - 1]
    #[arg(long, value_name = "COUNT")]
    lanes: Option<usize>,
    /// Which cores they run on: off, auto (the NUMA node of the doors), or cores such as 0,2,8-11 [default: off]
    #[arg(long, value_name = "CORES")]
    pin: Option<Pin>,
    /// Filter of events: error, warn, info, debug, trace, also per module [default: info]
    #[arg(long, value_name = "FILTER")]
    log_level: Option<String>,
    /// text or json [default: text]
    #[arg(long, value_name = "FORMAT")]
    log_format: Option<LogFormat>,
}

impl ConfigArgs {
    /// All layers together.
    pub fn load(self) -> Result<Settings, Failure> {
        // Names and values that are not Unicode cannot be ours: no key and no value of ours is.
        let environment =
            std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
        let flags = Flags {
            memcache: doors("--memcache", self.memcache)?,
            native: doors("--native", self.native)?,
            native_allow: self.native_allow,
            rpc: doors("--rpc", self.rpc)?,
            rpc_allow: self.rpc_allow,
            rpcbind: self.rpcbind,
            nfs_tcp: doors("--nfs-tcp", self.nfs_tcp)?,
            nfs_allow: self.nfs_allow,
            nfs_root_squash: self.nfs_root_squash,
            unix: (!self.unix.is_empty()).then_some(self.unix),
            admin: self.admin,
            pools: self.pool,
            memory: self.memory,
            head: self.head,
            value_max: self.value_max,
            lanes: self.lanes,
            pin: self.pin,
            log_level: self.log_level,
            log_format: self.log_format,
        };
        Ok(Settings::load(self.config.as_deref(), environment, &flags)?)
    }
}

pub fn run(args: Args) -> Result<Exit, Failure> {
    let settings = args.config.load()?;
    if args.print_config {
        print(&settings.to_toml())?;
        return Ok(Exit::Done);
    }
    start_log(&settings.log)?;
    map_long_buffers();
    raise_descriptor_limit();
    let system = actix_rt::System::new();
    let served = system.block_on(serve(settings));
    actix_rt::System::current().stop();
    served
}

/// The addresses of a flag that can be repeated; none for `off`, and `None` if it was not given.
fn doors<T>(flag: &str, given: Vec<Switch<T>>) -> Result<Option<Vec<T>>, Failure> {
    let count = given.len();
    let doors: Vec<T> = given.into_iter().filter_map(Switch::into_option).collect();
    if !doors.is_empty() && doors.len() < count {
        return Err(Failure::new(Exit::Usage, format!("{flag}: off, or addresses, but not both")));
    }
    Ok((count > 0).then_some(doors))
}

/// Octets from which on a block of the allocator is a mapping of its own.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const MAPPED_BLOCK_BYTES_MIN: libc::c_int = 64 << 10;

/// Lets long buffers go back to the system as soon as they are freed. glibc raises this bound by itself after the first
/// such block and takes later ones from its heap, where a few short blocks above them keep them resident: hundreds of
/// connections that had a long request once would keep its octets while they idle.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[expect(unsafe_code, reason = "std has no call for an option of the allocator")]
fn map_long_buffers() {
    // SAFETY: mallopt reads its two numbers and takes the allocator's own lock; it refuses what it does not know.
    unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPED_BLOCK_BYTES_MIN) };
}

#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
fn map_long_buffers() {}

/// Allows as many descriptors as the system lets this user have: the usual limit of 1,024 is less than 1,024 connections
/// and the daemon's own need. A refusal changes nothing.
fn raise_descriptor_limit() {
    if let Ok((_, most)) = getrlimit(Resource::RLIMIT_NOFILE) {
        let _ = setrlimit(Resource::RLIMIT_NOFILE, most, most);
    }
}

fn start_log(log: &LogConfig) -> Result<(), Failure> {
    let filter = log_filter(&log.level).map_err(|why| Failure::new(Exit::Config, format!("log level: {why}")))?;
    let events = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr);
    match log.format {
        LogFormat::Text => events.with_ansi(false).init(),
        LogFormat::Json => events.json().init(),
    }
    Ok(())
}

/// The admin port's web server tells at `info` how many workers it has and where it listens, which the `listening` lines
/// say already. It is quiet unless the filter names it.
fn log_filter(level: &str) -> Result<EnvFilter, String> {
    // The library takes a bare word that is no level for a module, all of whose events are then shown.
    let is_level = |word: &str| word.is_empty() || word.parse::<LevelFilter>().is_ok();
    let bare =
        level.split(',').map(str::trim).find(|word| !word.contains(['=', '[', '{', '}', ']']) && !is_level(word));
    if let Some(word) = bare {
        return Err(format!("`{word}` is none of off, error, warn, info, debug, trace; for a module: {word}=debug"));
    }
    let try_new = |text: &str| EnvFilter::try_new(text).map_err(|err| err.to_string());
    let filter = try_new(level)?;
    let chatters = filter.max_level_hint().is_none_or(|most| most >= LevelFilter::INFO);
    if chatters && !level.contains(WEB_SERVER) {
        return try_new(&format!("{level},{WEB_SERVER}=warn"));
    }
    Ok(filter)
}

const WEB_SERVER: &str = "actix_server";

async fn serve(settings: Settings) -> Result<Exit, Failure> {
    // Caught before the first door opens: a signal right after `ready` must find its handler.
    let mut signals =
        Signals::catch().map_err(|err| Failure::new(Exit::Unavailable, format!("cannot wait for signals: {err}")))?;
    let handle = tokio::select! {
        started = start(settings.daemon) => started.map_err(|err| Failure::new(err.exit_code(), err.to_string()))?,
        signal = signals.next() => return Err(ended(signal, "while it started")),
    };
    let (sum, here) = (handle.memory_sum().total_bytes(), machine_memory_bytes());
    if sum > here {
        let (sum, here) = (ByteSize(sum).to_string(), ByteSize(here).to_string());
        tracing::warn!(sum, here, "more memory may be taken than the machine, or this group of processes, has");
    }
    let mut text = String::new();
    for door in handle.doors() {
        text.push_str(&format!("listening {door}\n"));
    }
    text.push_str(&format!("{}\nready\n", handle.memory_sum()));
    // A supervisor that does not read is no reason to stop serving.
    if let Err(failure) = print(&text) {
        tracing::warn!(%failure, "nobody was told that the daemon is ready");
    }
    let signal = signals.next().await;
    tracing::info!(signal, "shutting down; transfers in flight may finish");
    tokio::select! {
        () = handle.shutdown() => Ok(Exit::Done),
        signal = signals.next() => {
            // At once: nothing that is still in flight, and no lane, is waited for.
            let failure = ended(signal, "before transfers had finished");
            eprintln!("bulkhead: {failure}");
            std::process::exit(failure.exit.code().into())
        }
    }
}

fn ended(signal: &str, when: &str) -> Failure {
    Failure::new(Exit::Refused, format!("ended by {signal} {when}"))
}

struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn catch() -> io::Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_web_server_is_quiet_unless_it_is_named() {
        let shown = |level| log_filter(level).unwrap().to_string();
        assert!(shown("info").contains("actix_server=warn"));
        assert!(shown("bulkhead=debug,info").contains("actix_server=warn"));
        assert!(!shown("error").contains("actix_server"), "it must not become louder than asked for");
        assert!(shown("warn,actix_server=debug").contains("actix_server=debug"));
        assert!(log_filter("bulkhead=loud").is_err());
    }

    #[test]
    fn a_mistyped_level_is_no_module() {
        for level in ["debgu", "info,verbose", "bulkhead"] {
            assert!(log_filter(level).unwrap_err().contains("trace"), "{level}");
        }
        for level in ["off", "INFO", "warn,bulkhead=debug", "bulkhead[request{key=a}]=trace", "3"] {
            assert!(log_filter(level).is_ok(), "{level}");
        }
    }

    #[test]
    fn off_beside_an_address_is_refused() {
        assert_eq!(doors::<u8>("--memcache", Vec::new()).unwrap(), None);
        assert_eq!(doors::<u8>("--memcache", vec![Switch::Off]).unwrap(), Some(Vec::new()));
        assert_eq!(doors("--memcache", vec![Switch::On(1), Switch::On(2)]).unwrap(), Some(vec![1, 2]));
        assert!(doors("--memcache", vec![Switch::On(1), Switch::Off]).unwrap_err().to_string().contains("not both"));
    }
}
