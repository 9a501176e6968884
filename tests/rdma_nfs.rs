//! Linux's own NFS client mounts the store: over rxe, over siw on a door of verbs, over siw opposite our own iWARP, and over TCP.
//! tests/rdma-vm/suite runs this; elsewhere it says that it is skipped. `BULKHEAD_NFS_FULL=1` has all of it done everywhere
//! (tests/rdma-vm/README.md).
#![cfg(feature = "verbs")]

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bulkhead::client::rpc::{PutOptions, RpcClient, RpcOptions};
use bulkhead::client::{Client, Geometry, Options, ServerUrl};

mod common;
use common::daemon::{Builder, Daemon};
use common::pattern::Pattern;

#[path = "nfs_load/mod.rs"]
mod load;
use load::mounted::Mounted;
use load::scrambler::{Plan, scramble};
use load::{Counts, Files};

#[path = "native/doors.rs"]
mod doors;
use doors::{Stream, door_of};

mod rdma;
use rdma::mounts::{Carrier, Mount, Place, Settings, Trace, cut, run, run_in};
use rdma::{RXE, SIW, assert_back, beds, resources, until};

mod rig;

/// How a client comes to the store.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Way {
    Rxe,
    /// Both ends are siw's.
    Siw,
    /// The kernel's siw, opposite our iWARP in user space.
    OurIwarp,
    Tcp,
}

impl Way {
    const ALL: [Self; 4] = [Self::Rxe, Self::Siw, Self::OurIwarp, Self::Tcp];
    const RDMA: [Self; 3] = [Self::Rxe, Self::Siw, Self::OurIwarp];

    const fn ip(self) -> &'static str {
        match self {
            Self::Rxe => RXE.v4,
            _ => SIW.v4,
        }
    }

    /// Of the door, but its port.
    const fn scheme(self) -> &'static str {
        match self {
            Self::Rxe | Self::Siw => "rpc+verbs://",
            Self::OurIwarp => "rpc+iwarp://",
            Self::Tcp => "nfs+tcp://",
        }
    }

    const fn carrier(self) -> Carrier {
        match self {
            Self::Tcp => Carrier::Tcp,
            _ => Carrier::Rdma,
        }
    }
}

/// A daemon with all of its doors, on ports that stay the same when it starts again.
struct Server {
    daemon: Daemon,
    addresses: Vec<(Way, SocketAddr)>,
    /// Of MOUNT.
    ports: Vec<(IpAddr, u16)>,
    native: ServerUrl,
    made: fn() -> Builder,
}

fn plain() -> Builder {
    Daemon::builder().memory("192MiB").pool("512MiB")
}

impl Server {
    fn start(made: fn() -> Builder) -> Self {
        Self::with_ports(made, &|_, _| 0)
    }

    fn with_ports(made: fn() -> Builder, port: &dyn Fn(&str, &str) -> u16) -> Self {
        let mut flags = Vec::new();
        for way in Way::RDMA {
            let (scheme, ip) = (way.scheme(), way.ip());
            flags.extend(["--rpc".to_owned(), format!("{scheme}{ip}:{}", port(scheme, ip))]);
        }
        for ip in [RXE.v4, SIW.v4] {
            flags.extend(["--nfs-tcp".to_owned(), format!("{ip}:{}", port("nfs+tcp://", ip))]);
        }
        flags.extend(["--nfs-allow", "10.98.0.0/15", "--native", "native+iwarp://127.0.0.1:0"].map(str::to_owned));
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        let daemon = made().flags(&flags).start();
        let address = |scheme: &str, ip: &str| -> SocketAddr {
            let prefix = format!("{scheme}{ip}:");
            let door = daemon.doors().iter().find(|door| door.starts_with(&prefix));
            let door = door.unwrap_or_else(|| panic!("no {prefix} among {:?}", daemon.doors()));
            door[scheme.len()..].split(['?', '/']).next().unwrap().parse().unwrap()
        };
        let addresses: Vec<_> = Way::ALL.map(|way| (way, address(way.scheme(), way.ip()))).to_vec();
        let ports = [RXE.v4, SIW.v4].map(|ip| (ip.parse().unwrap(), address("nfs+tcp://", ip).port())).to_vec();
        let native = door_of(&daemon, "native+");
        Self { daemon, addresses, ports, native, made }
    }

    /// Ends it as a power failure would, and starts it anew at the same addresses.
    fn restart(self) -> Self {
        let Self { mut daemon, addresses, ports, made, .. } = self;
        daemon.signal("KILL");
        daemon.wait();
        drop(daemon);
        Self::with_ports(made, &|scheme, ip| {
            let ip: IpAddr = ip.parse().unwrap();
            let of_nfs = addresses.iter().find(|(way, address)| way.scheme() == scheme && address.ip() == ip);
            let of_mount = || ports.iter().find(|(address, _)| *address == ip).expect("it had one").1;
            of_nfs.map_or_else(of_mount, |(_, address)| address.port())
        })
    }

    fn place(&self, way: Way) -> Place {
        let nfs = self.addresses.iter().find(|(other, _)| *other == way).expect("all have one").1;
        let mount_port = self.ports.iter().find(|(ip, _)| *ip == nfs.ip()).expect("all have one").1;
        Place { carrier: way.carrier(), nfs, mount_port }
    }

    fn mount(&self, way: Way, options: &str) -> Mount {
        Mount::new(self.place(way), options)
    }

    fn rpc(&self) -> RpcClient {
        let options = RpcOptions { connect_timeout: Duration::from_secs(60), ..RpcOptions::default() };
        RpcClient::connect(door_of(&self.daemon, "rpc+iwarp://"), options).unwrap()
    }
}

fn text(daemon: &Daemon) -> Client {
    Client::connect(door_of(daemon, "memcache://"), Options::default()).expect("the text door is open")
}

/// Removes all, as `rm -r` does, and asserts that nothing is left of it in the daemon: directories that clients made would stay.
fn assert_empty(mount: Mount, server: Server) {
    let files = Mounted::new(mount.path());
    for name in files.list("").unwrap() {
        if files.stat(&name).unwrap().is_directory {
            load::remove_all(&files, &name);
        } else {
            files.remove(&name).unwrap();
        }
    }
    drop(mount);
    server.daemon.assert_nothing_leaks_but(&["bulkhead_store_index_bytes"]);
}

/// Whether there are devices; if not, that is said.
fn has_devices() -> bool {
    !beds().is_empty()
}

/// Whether all is done that takes long. A daily run does a part of it over each way.
fn is_full() -> bool {
    std::env::var("BULKHEAD_NFS_FULL").is_ok()
}

fn counts() -> Counts {
    if is_full() { Counts::FULL } else { Counts::BRIEF }
}

/// The whole list over one way, with the page cache and past it; then programs that know nothing of all this.
fn passes_the_list(way: Way) {
    if !has_devices() {
        return;
    }
    let before = [RXE, SIW].map(|bed| resources(bed.device));
    let server = Server::start(plain);
    let mut mount = server.mount(way, "");
    let begun = Instant::now();
    let say = |step: &str| eprintln!("{way:?}: {:4} s: {step}", begun.elapsed().as_secs());
    let counts = counts();
    let files = Mounted::new(mount.path());
    load::run(&files, &Counts { operations: counts.operations / 4, ..counts }, say);
    say(&mount.told());
    say("past the page cache");
    let direct = files.direct();
    load::alignments(&direct, &counts);
    if is_full() {
        load::odd_blocks(&direct, &Counts { copied_bytes_max: 1 << 20, ..counts });
    }
    load::readers(&direct, &counts);
    load::random_operations(&direct, &counts);
    say("four at once");
    std::thread::scope(|scope| {
        for seed in 0..4 {
            let files = if seed % 2 == 0 { files.clone() } else { direct.clone() };
            let plan = Plan::new(100 + seed, counts.operations / 4);
            scope.spawn(move || scramble(&files, &format!("scrambled-{seed}"), &plan));
        }
    });
    say("programs");
    use_programs(mount.path(), &counts);
    say(&mount.told());
    let listed = run("ls", &["-lR", mount.path().to_str().unwrap()]);
    mount.remount();
    assert_eq!(run("ls", &["-lR", mount.path().to_str().unwrap()]), listed, "as before");
    run("git", &["-c", "safe.directory=*", "-C", &format!("{}/clone", mount.path().display()), "fsck", "--full"]);
    for procedure in ["READ", "LOOKUP", "READDIRPLUS"] {
        assert!(mount.calls(procedure) > 0, "{procedure} was never called");
    }
    assert_eq!(mount.reconnections(), 0, "{}", mount.stat("xprt:"));
    say("done");
    assert_empty(mount, server);
    for (bed, before) in [RXE, SIW].iter().zip(&before) {
        assert_back(bed.device, before);
    }
}

#[test]
fn the_list_over_rxe() {
    passes_the_list(Way::Rxe);
}

#[test]
fn the_list_over_siw() {
    passes_the_list(Way::Siw);
}

#[test]
fn the_list_over_our_iwarp() {
    passes_the_list(Way::OurIwarp);
}

#[test]
fn the_list_over_tcp() {
    passes_the_list(Way::Tcp);
}

/// `cp`, `dd`, `tar` and `git clone`, each compared with what is outside of the mount.
fn use_programs(root: &Path, counts: &Counts) {
    let outside = tempfile::tempdir().unwrap();
    let (inside, own) = (root.to_str().unwrap(), outside.path().to_str().unwrap());
    let sizes = load::SIZES.into_iter().filter(|len| *len <= counts.copied_bytes_max);
    // From the longest on, for others copy parts of that.
    for len in sizes.rev().step_by(if is_full() { 1 } else { 4 }) {
        let (from, to, back) = (format!("{own}/of-{len}"), format!("{inside}/of-{len}"), format!("{own}/back-{len}"));
        fs::write(&from, Pattern(len as u64).octets(0, len)).unwrap();
        run("cp", &["--preserve=all", &from, &to]);
        run("cmp", &[&from, &to]);
        run("cp", &[&to, &back]);
        run("cmp", &[&from, &back]);
        fs::remove_file(&back).unwrap();
    }
    // Odd sizes, odd places, in the middle of what is there.
    let large = (8 << 20) + 3;
    fs::write(format!("{own}/dd"), Pattern(5).octets(0, large)).unwrap();
    fs::write(format!("{own}/source"), Pattern(6).octets(0, (4 << 20) + 1)).unwrap();
    run("cp", &[&format!("{own}/dd"), &format!("{inside}/dd")]);
    for (block, skip, seek, count) in
        [(777, 3, 1000, 500), (4097, 11, 7, 333), (65_537, 1, 30, 60), (1, 5, 70_001, 999)]
    {
        for directory in [own, inside] {
            let (from, to) = (format!("if={own}/source"), format!("of={directory}/dd"));
            let [block, skip, seek, count] = [("bs", block), ("skip", skip), ("seek", seek), ("count", count)]
                .map(|(name, value)| format!("{name}={value}"));
            run("dd", &[&from, &to, &block, &skip, &seek, &count, "conv=notrunc,fsync", "status=none"]);
        }
        run("cmp", &[&format!("{own}/dd"), &format!("{inside}/dd")]);
    }
    run("dd", &[&format!("if={inside}/dd"), &format!("of={own}/direct"), "bs=99991", "iflag=direct", "status=none"]);
    run("cmp", &[&format!("{own}/direct"), &format!("{inside}/dd")]);

    let many = outside.path().join("many");
    for index in 0..counts.small_files {
        let path = many.join(format!("{}/{}", index % 7, index % 3));
        fs::create_dir_all(&path).unwrap();
        fs::write(path.join(format!("file {index}")), Pattern(index as u64).octets(0, index * 31 % 9001)).unwrap();
    }
    run("tar", &["-C", own, "-cf", &format!("{inside}/many.tar"), "many"]);
    run("tar", &["-C", inside, "-xf", &format!("{inside}/many.tar")]);
    run("diff", &["-r", many.to_str().unwrap(), &format!("{inside}/many")]);
    run("tar", &["-C", inside, "--compare", "-f", &format!("{inside}/many.tar")]);

    // A repository that is made here: what is around may be anything.
    let repository = many.to_str().unwrap();
    let git = |arguments: &[&str]| {
        let who = ["-c", "user.name=a", "-c", "user.email=a@localhost", "-c", "safe.directory=*"];
        run("git", &[&who, arguments].concat())
    };
    git(&["init", "--quiet", repository]);
    git(&["-C", repository, "add", "."]);
    git(&["-C", repository, "commit", "--quiet", "-m", "all of it"]);
    fs::write(many.join("one more"), "octets").unwrap();
    git(&["-C", repository, "add", "."]);
    git(&["-C", repository, "commit", "--quiet", "-m", "one more"]);
    git(&["clone", "--quiet", "--no-local", repository, &format!("{inside}/clone")]);
    let inside_clone = format!("{inside}/clone");
    assert_eq!(git(&["-C", &inside_clone, "status", "--porcelain"]), "");
    assert_eq!(git(&["-C", &inside_clone, "rev-parse", "HEAD"]), git(&["-C", repository, "rev-parse", "HEAD"]));
    fs::write(Path::new(&inside_clone).join("changed"), "here").unwrap();
    git(&["-C", &inside_clone, "add", "."]);
    git(&["-C", &inside_clone, "commit", "--quiet", "-m", "from the mount"]);
    if is_full() {
        git(&["-C", &inside_clone, "gc", "--quiet"]);
    }
    assert_eq!(git(&["-C", &inside_clone, "log", "--oneline"]).lines().count(), 3);
    fs::remove_dir_all(outside.path().join("many")).unwrap();
    let listed = run_in(root, "ls", &["-lR"]);
    assert!(listed.lines().count() > 2 * counts.small_files, "{listed}");
}

/// One object by all doors: octets, flags, time to live and CAS.
#[test]
fn what_the_mount_writes_other_doors_read_and_the_other_way_round() {
    if !has_devices() {
        return;
    }
    let server = Server::start(plain);
    for way in Way::ALL {
        let mount = server.mount(way, "");
        let files = Mounted::new(mount.path());
        let mut text = text(&server.daemon);
        let mut native = doors::connect(&server.native, Geometry::default());
        let mut rpc = server.rpc();
        let deep = format!("{way:?}/er");
        files.make_directory(&format!("{way:?}")).unwrap();
        files.make_directory(&deep).unwrap();
        let (by_mount, by_others) = (format!("{deep}/by-mount"), format!("{deep}/by-others"));
        for (seed, len) in (0..).zip([0, 1, 4097, 262_145, (8 << 20) + 3_u64]) {
            // Closed, and so there for everybody.
            load::copy_in(&files, &by_mount, seed, len as usize);
            for read in 0..3 {
                let mut copy = Stream::new(seed, len);
                let key = &*by_mount;
                let found = match read {
                    0 => text.get(key, &mut copy).unwrap().map(|info| (info.len, info.flags)),
                    1 => native.get(key, &mut copy).unwrap().map(|info| (info.len, info.flags)),
                    _ => rpc.get(key, &mut copy).unwrap().map(|info| (info.len, info.flags)),
                };
                assert_eq!((found, copy.at), (Some((len, 0)), len), "{way:?}, door {read}");
            }
            // Each of the others puts it, over what is there.
            for put in 0..3 {
                let (key, pattern) = (&*by_others, seed * 10 + put);
                let mut value = Stream::new(pattern, len);
                match put {
                    0 => text.put(key, &mut value, len, 7, None).unwrap(),
                    1 => native.put(key, &mut value, len, 7, None).unwrap(),
                    _ => {
                        let options = PutOptions { flags: 7, ..PutOptions::default() };
                        rpc.put(key, &mut value, len, options).map(drop).unwrap();
                    }
                }
                let cached = Mount::new(server.place(way), ",noac");
                load::copy_out(&Mounted::new(cached.path()), key, pattern, len as usize);
            }
        }
        // Flags stay what they were when the mount changes octets; so does the time to live.
        let key = &*by_others;
        let fresh = Mount::new(server.place(way), ",noac");
        let mut wire = server.daemon.connect();
        wire.ask(format!("set {key} 77 1000 5\r\nfirst\r\n"), "STORED\r\n");
        let (before, version) = (rpc.stat(key).unwrap().unwrap(), wire.cas_of(key));
        let file = File::options().write(true).open(fresh.path().join(key)).unwrap();
        file.write_all_at(b"secon", 0).unwrap();
        file.write_all_at(b"d", 5).unwrap();
        file.sync_all().unwrap();
        drop(file);
        wire.ask(format!("get {key}\r\n"), format!("VALUE {key} 77 6\r\nsecond\r\nEND\r\n"));
        let (after, later) = (rpc.stat(key).unwrap().unwrap(), wire.cas_of(key));
        assert_eq!(after.flags, before.flags);
        assert!((1..=before.ttl_s).contains(&after.ttl_s), "{way:?}: it goes on: {before:?}, {after:?}");
        wire.ask(format!("cas {key} 1 0 3 {version}\r\nold\r\n"), "EXISTS\r\n");
        wire.ask(format!("cas {key} 1 0 3 {later}\r\nnew\r\n"), "STORED\r\n");
        assert_eq!(fs::read(fresh.path().join(key)).unwrap(), b"new");
        // What others delete is gone, what they wrote is a file of the daemon's user.
        let seen = fs::metadata(fresh.path().join(key)).unwrap();
        assert_eq!((seen.mode() & 0o7777, seen.uid()), (0o644, 0));
        wire.ask(format!("delete {key}\r\n"), "DELETED\r\n");
        assert!(!fresh.path().join(key).exists());
        drop((fresh, mount));
        wire.ask("flush_all\r\n", "OK\r\n");
    }
}

/// The daemon is killed while files are read and written, and comes back at the same addresses with nothing in it.
#[test]
fn a_mount_outlives_the_server() {
    if !has_devices() {
        return;
    }
    let mut running = Some(Server::start(plain));
    for way in Way::ALL {
        let server = running.take().expect("it runs again");
        let mount = server.mount(way, ",timeo=20,retrans=1");
        let files = Mounted::new(mount.path());
        files.make_directory("old").unwrap();
        load::copy_in(&files, "old/file", 1, 3 << 20);
        let held = files.open("old/file").unwrap();
        let root = fs::metadata(mount.path()).unwrap();
        let stop = AtomicBool::new(false);
        let rounds = AtomicU64::new(0);
        let server = std::thread::scope(|scope| {
            for index in 0..4 {
                let (files, stop, rounds) = (files.direct(), &stop, &rounds);
                scope.spawn(move || {
                    let mut number = 0_u64;
                    while !stop.load(Ordering::Relaxed) {
                        // Whatever is in flight may fail; nothing may be wrong.
                        let path = format!("load-{index}-{}", number % 5);
                        let done = (|| {
                            let file = files.create(&path)?;
                            files.write_at(&file, 0, &Pattern(number).octets(0, 700_001))?;
                            files.commit(&file)?;
                            let mut into = vec![0; 700_001];
                            let count = files.read_at(&file, 0, &mut into)?;
                            Pattern(number).check(0, &into[..count], &path);
                            files.remove(&path)
                        })();
                        if let Err(error) = done {
                            let number = error.raw_os_error();
                            let known = [libc::ESTALE, libc::EIO, libc::ENOENT].map(Some);
                            assert!(known.contains(&number), "{path}: {error}");
                        }
                        number += 1;
                        rounds.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
            until(|| "nothing is done".to_owned(), || rounds.load(Ordering::Relaxed) >= 12);
            let server = server.restart();
            let then = rounds.load(Ordering::Relaxed);
            until(|| "nothing is done any more".to_owned(), || rounds.load(Ordering::Relaxed) >= then + 12);
            stop.store(true, Ordering::Relaxed);
            server
        });
        // The same root, and nothing of before.
        let now = fs::metadata(mount.path()).unwrap();
        assert_eq!((now.ino(), now.dev()), (root.ino(), root.dev()));
        files.forget(&held).unwrap();
        let stale = files.read_at(&held, 0, &mut [0; 4096]);
        assert_eq!(stale.unwrap_err().raw_os_error(), Some(libc::ESTALE), "{way:?}");
        drop(held);
        load::assert_fails(files.stat("old/file"), &[libc::ENOENT, libc::ESTALE], "a file of before");
        let left: BTreeSet<String> = files.list("").unwrap().into_iter().collect();
        assert!(left.iter().all(|name| name.starts_with("load-")), "{left:?}");
        load::copies(&files, &Counts { copied_bytes_max: 1 << 20, ..Counts::BRIEF });
        drop(mount);
        server.daemon.connect().ask("flush_all\r\n", "OK\r\n");
        running = Some(server);
    }
}

/// Three writers and readers go on until `times` times `disturb` has done harm and they have got over it. All is compared.
fn undisturbed(files: &Mounted, times: usize, mut disturb: impl FnMut()) {
    /// One of them writes what fits a message, and no whole words.
    const LENS: [usize; 3] = [77, (2 << 20) + 77, (2 << 20) + 77];
    let (done, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        for (index, len) in (1_u64..).zip(LENS) {
            let (files, done, stop) = (files.clone(), &done, &stop);
            scope.spawn(move || {
                let told = Told(stop);
                for round in 0.. {
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    let (path, pattern) = (format!("f{index}"), index * 1_000_000 + round);
                    load::copy_in(&files, &path, pattern, len);
                    load::copy_out(&files, &path, pattern, len);
                    done.fetch_add(u64::from(len > 77), Ordering::Relaxed);
                }
                drop(told);
            });
        }
        for _ in 0..times {
            disturb();
            let then = done.load(Ordering::Relaxed);
            // Those that take longer have begun and ended anew.
            let is_over = || done.load(Ordering::Relaxed) >= then + 4 || stop.load(Ordering::Relaxed);
            until(|| "nothing goes on".to_owned(), is_over);
        }
        stop.store(true, Ordering::Relaxed);
    });
}

/// Sets the flag when its thread panics, so that nobody waits for that.
struct Told<'a>(&'a AtomicBool);

impl Drop for Told<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.store(true, Ordering::Relaxed);
        }
    }
}

/// Connections are cut under way, again and again: all is sent anew, and nothing comes of it that anybody sees.
#[test]
fn connections_that_are_cut_are_made_anew_and_calls_sent_again() {
    if !has_devices() {
        return;
    }
    let server = Server::start(plain);
    for way in [Way::Siw, Way::OurIwarp, Way::Tcp] {
        let (place, begun) = (server.place(way), Instant::now());
        let mount = server.mount(way, "");
        let mut cuts = 0;
        undisturbed(&Mounted::new(mount.path()).direct(), if is_full() { 20 } else { 3 }, || {
            // Wherever transfers stand then.
            std::thread::sleep(Duration::from_millis(100 + cuts as u64 * 37 % 200));
            cuts += cut(place.nfs);
        });
        let took = begun.elapsed().as_secs();
        eprintln!("{way:?}: {took} s, {cuts} sockets cut, {} connections made anew", mount.reconnections());
        assert!(cuts > 0 && mount.reconnections() > 0);
        drop(mount);
        server.daemon.assert_nothing_leaks_but(&["bulkhead_store_index_bytes"]);
    }
}

/// A server that says nothing for longer than the client waits: it ends the connection, makes another and sends the calls again. The
/// server has then taken them twice.
#[test]
fn a_server_that_pauses_gets_calls_twice() {
    if !has_devices() {
        return;
    }
    let server = Server::start(plain);
    for way in Way::ALL {
        let begun = Instant::now();
        let mount = server.mount(way, ",timeo=10,retrans=1");
        let files = Mounted::new(mount.path());
        let times = if is_full() { 8 } else { 1 };
        let pause = || {
            server.daemon.signal("STOP");
            std::thread::sleep(Duration::from_millis(4500));
            server.daemon.signal("CONT");
        };
        undisturbed(&files.direct(), times, pause);
        // What cannot be done twice: each call may come twice, and each is answered as the first time.
        let (done, stop) = (AtomicU64::new(0), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let (done, stop) = (&done, &stop);
            for index in 0..3 {
                let files = &files;
                scope.spawn(move || {
                    let told = Told(stop);
                    while !stop.load(Ordering::Relaxed) {
                        let (one, other) = (format!("d{index}"), format!("e{index}"));
                        files.make_directory(&one).unwrap();
                        drop(files.create_new(&format!("{one}/f")).unwrap());
                        files.rename(&one, &other).unwrap();
                        files.remove(&format!("{other}/f")).unwrap();
                        files.remove_directory(&other).unwrap();
                        done.fetch_add(1, Ordering::Relaxed);
                    }
                    drop(told);
                });
            }
            for _ in 0..times {
                std::thread::sleep(Duration::from_millis(300));
                pause();
                let then = done.load(Ordering::Relaxed);
                let is_over = || done.load(Ordering::Relaxed) >= then + 6 || stop.load(Ordering::Relaxed);
                until(|| "nothing goes on".to_owned(), is_over);
            }
            stop.store(true, Ordering::Relaxed);
        });
        let took = begun.elapsed().as_secs();
        eprintln!("{way:?}: {took} s, {} connections made anew; {}", mount.reconnections(), mount.told());
        // Over TCP it waits on, with the connection that it has.
        assert!(way == Way::Tcp || mount.reconnections() > 0);
        drop(mount);
        server.daemon.assert_nothing_leaks_but(&["bulkhead_store_index_bytes"]);
    }
}

/// What Linux's client says to our iWARP and RPC-over-RDMA, and what it hears, short enough that each frame has a TCP segment: the
/// suite records it, and tshark must make sense of all of it.
#[test]
fn a_mount_for_the_record() {
    if !has_devices() {
        return;
    }
    let server = Server::start(plain);
    let mut settings = Settings::new();
    settings.set("rdma_max_inline_read", 1024);
    settings.set("rdma_max_inline_write", 1024);
    let mount = server.mount(Way::OurIwarp, ",rsize=2048,wsize=2048");
    let files = Mounted::new(mount.path());
    files.make_directory("d").unwrap();
    for len in [0, 1, 300, 1501, 2048, 5000] {
        let path = format!("d/{len}");
        load::copy_in(&files, &path, len, len as usize);
        load::copy_in(&files.direct(), &path, len + 1, len as usize);
        load::copy_out(&files.direct(), &path, len + 1, len as usize);
    }
    files.set_mode("d/300", 0o600).unwrap();
    files.rename("d/300", "d/301").unwrap();
    files.remove("d/301").unwrap();
    load::assert_listed(&files, "d", ["0", "1", "1501", "2048", "5000"].map(str::to_owned));
    fs::remove_dir_all(mount.path().join("d")).unwrap();
    assert_eq!(mount.reconnections(), 0, "{}", mount.stat("xprt:"));
}

/// Every inline threshold and number of slots that Linux's client can be set to, and servers that take more or less.
#[test]
fn any_setting_of_the_client_is_served() {
    if !has_devices() {
        return;
    }
    let small: fn() -> Builder = || plain().setting("RPC__INLINE", "1024B").setting("RPC__CREDITS", "4");
    let large: fn() -> Builder = || plain().setting("RPC__INLINE", "64KiB");
    let brief = Counts {
        copied_bytes_max: 1 << 20,
        small_files: 30,
        objects: 20,
        rounds_of_readers: 3,
        operations: if is_full() { 2000 } else { 200 },
        entries: 120,
        alignments_apart: 37,
        ..Counts::BRIEF
    };
    for (made, name) in [(plain as fn() -> Builder, "as it comes"), (small, "1 KiB, 4 credits"), (large, "64 KiB")] {
        let server = Server::start(made);
        let mut settings = Settings::new();
        let sweep: &[(u32, u32, u32)] = match name {
            "as it comes" => {
                &[(4, 4096, 4096), (7, 1024, 1024), (16, 1024, 4096), (128, 4096, 1024), (256, 65_536, 65_536)]
            }
            _ => &[(4, 1024, 1024), (128, 4096, 4096)],
        };
        let apart = if is_full() { 1 } else { 2 };
        for (index, (slots, read, write)) in sweep.iter().enumerate().step_by(apart) {
            settings.set("rdma_slot_table_entries", *slots);
            settings.set("rdma_max_inline_read", *read);
            settings.set("rdma_max_inline_write", *write);
            settings.set("rdma_pad_optimize", u32::from(index % 4 == 0));
            let ways = if is_full() { &Way::RDMA[..] } else { &Way::RDMA[(index + name.len()) % 3..][..1] };
            for way in ways {
                let begun = Instant::now();
                let mount = server.mount(*way, "");
                let files = Mounted::new(mount.path());
                load::names(&files, &brief);
                load::small_files(&files, &brief);
                load::large_directory(&files, &brief);
                load::readers(&files.direct(), &brief);
                load::random_operations(&files.direct(), &brief);
                load::alignments(&files.direct(), &brief);
                let took = begun.elapsed().as_secs();
                eprintln!("server {name}; {way:?}: {slots} slots, {read} and {write} octets inline: {took} s");
                assert_eq!(mount.reconnections(), 0, "{}", mount.stat("xprt:"));
            }
        }
        drop(settings);
        server.daemon.assert_nothing_leaks_but(&["bulkhead_store_index_bytes"]);
    }
}

/// Directories come in reply chunks, which Linux's client makes of a segment for the head, some for pages and one for the end.
#[test]
fn directories_come_in_reply_chunks_of_several_segments() {
    if !has_devices() {
        return;
    }
    let server = Server::start(plain);
    let count = if is_full() { 20_000 } else { 2000 };
    let name = |index: usize| format!("{index:05}-{}", "n".repeat(index % 150));
    // By another door, all at once.
    let mut wire = server.daemon.connect();
    for index in 0..count {
        wire.ask(format!("set dir/{} 0 0 1\r\nx\r\n", name(index)), "STORED\r\n");
    }
    for way in Way::RDMA {
        let mount = server.mount(way, "");
        let files = Mounted::new(mount.path());
        let trace = Trace::new("rpcrdma/xprtrdma_chunk_reply");
        load::assert_listed(&files, "dir", (0..count).map(name));
        let noted = trace.lines();
        drop(trace);
        // A reply chunk: some with more to come, then the last.
        let mut lens = vec![0];
        for line in &noted {
            *lens.last_mut().unwrap() += 1;
            if line.ends_with("(last)") {
                lens.push(0);
            }
        }
        lens.pop();
        println!("{way:?}: {} reply chunks of {:?} segments", lens.len(), lens.iter().collect::<BTreeSet<_>>());
        assert!(!lens.is_empty() && lens.iter().all(|segments| *segments > 1), "{lens:?}");
        // Without attributes too, as who asks for names alone in a large directory.
        let plain = Mount::new(server.place(way), ",nordirplus");
        let trace = Trace::new("rpcrdma/xprtrdma_chunk_reply");
        load::assert_listed(&Mounted::new(plain.path()), "dir", (0..count).map(name));
        assert!(plain.calls("READDIR") > 1 && plain.calls("READDIRPLUS") == 0 && !trace.lines().is_empty());
    }
}

/// Who may not mount is told so; the rest goes on.
#[test]
fn other_hosts_are_refused() {
    if !has_devices() {
        return;
    }
    let made: fn() -> Builder = || plain();
    let daemon = made().flags(&["--nfs-tcp", &format!("{}:0", SIW.v4), "--nfs-allow", "10.99.0.0/16"]).start();
    let address: SocketAddr =
        daemon.doors().iter().find_map(|door| door.strip_prefix("nfs+tcp://")).unwrap().parse().unwrap();
    let options = format!("vers=3,proto=tcp,port={0},mountport={0},mountproto=tcp,nolock", address.port());
    fs::create_dir_all("/mnt/refused").unwrap();
    let said = std::process::Command::new("mount")
        .args(["-t", "nfs", "-o", &options, &format!("{}:/", SIW.v4), "/mnt/refused"])
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&said.stderr).into_owned();
    assert!(!said.status.success() && errors.contains("access denied"), "{errors}");
}
