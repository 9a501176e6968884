//! RPC doors at an rpcbind of our own making, which does as Debian's does, or misbehaves. tests/rdma_rpcbind.rs has the real one.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bulkhead::actors::rpcbind::{Place, RpcbindError, register, services};
use bulkhead::actors::{StartError, start};
use bulkhead::config::Config;
use bulkhead::error::Exit;
use bulkhead::fabric::Address;
use bulkhead::programs::rpcbind::{Entry, Fault, RECORD_LIMITS, Service, VERSION_MIN, procedure, universal_address};
use bulkhead::wire::codec::{Reader, Writer};
use bulkhead::wire::onc_rpc::record::{RecordReader, marked};
use bulkhead::wire::onc_rpc::{AcceptStatus, CallHeader, Denial, Reply, ReplyHeader, Versions};
use tempfile::TempDir;

mod common;
use common::Daemon;

const PROGRAM: u32 = 0x2042_4c4b;
const OURS: &str = "1000";

#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum Manner {
    #[default]
    Good,
    /// It is of version 3.
    Old,
    /// Takes calls and says nothing.
    Silent,
    /// Hangs up at the first call.
    Curt,
    /// Does what SET asks and hangs up.
    CurtAfterSet,
    /// Answers every SET with false, though its place is free.
    Unwilling,
    /// Refuses whom it does not know, as Debian's does with SET from another host.
    Strict,
    /// Is something else.
    Babbling,
}

/// program, version, netid, address, owner
type Row = (u32, u32, String, String, String);

fn row(netid: &str, address: &str, owner: &str) -> Row {
    (PROGRAM, 1, netid.to_owned(), address.to_owned(), owner.to_owned())
}

/// An rpcbind with the rules of Debian's: one address for each program, version and netid; a SET that changes nothing is
/// true; UNSET is for the owner, who is whoever calls.
#[derive(Default)]
struct Desk {
    rows: Mutex<Vec<Row>>,
    manner: Mutex<Manner>,
    /// Procedures called.
    calls: Mutex<Vec<u32>>,
}

impl Desk {
    /// The results of a call, or `None` to hang up.
    fn answer(&self, call: &CallHeader<'_>, reader: &mut Reader<'_>) -> Option<(Reply<'static>, Vec<u8>)> {
        let (manner, mut rows) = (*self.manner.lock().unwrap(), self.rows.lock().unwrap());
        let mut results = Writer::new();
        if manner == Manner::Old && call.version != VERSION_MIN {
            let versions = Versions { low: 2, high: VERSION_MIN };
            return Some((Reply::accepted(AcceptStatus::ProgMismatch(versions)), Vec::new()));
        }
        if call.procedure == procedure::DUMP {
            results.list(rows.iter(), |writer, (program, version, netid, address, owner)| {
                let [netid, address, owner] = [netid, address, owner].map(String::as_bytes);
                Entry { program: *program, version: *version, netid, address, owner }.write(writer);
            });
            return Some((Reply::accepted(AcceptStatus::Success), results.finish()));
        }
        if manner == Manner::Strict {
            return Some((Reply::Denied(Denial::AuthError(bulkhead::wire::onc_rpc::AuthStatus::TOOWEAK)), Vec::new()));
        }
        let asked = Entry::read(reader).unwrap();
        let [netid, address] = [asked.netid, asked.address].map(|text| String::from_utf8(text.to_vec()).unwrap());
        let place = rows.iter().position(|row| (row.0, row.1, &row.2) == (asked.program, asked.version, &netid));
        let is_done = match (call.procedure, place) {
            (procedure::SET, _) if manner == Manner::Unwilling => false,
            (procedure::SET, Some(place)) => rows[place].3 == address,
            (procedure::SET, None) => {
                rows.push((asked.program, asked.version, netid, address, OURS.to_owned()));
                true
            }
            (procedure::UNSET, Some(place)) if rows[place].4 == OURS => {
                rows.remove(place);
                true
            }
            (procedure::UNSET, place) => place.is_none(),
            other => panic!("{other:?}"),
        };
        if (manner, call.procedure) == (Manner::CurtAfterSet, procedure::SET) {
            // Once: it comes to its senses.
            *self.manner.lock().unwrap() = Manner::Good;
            return None;
        }
        results.bool(is_done);
        Some((Reply::accepted(AcceptStatus::Success), results.finish()))
    }

    fn serve(&self, mut stream: impl Read + Write) {
        let (mut records, mut octets) = (RecordReader::new(RECORD_LIMITS), [0; 1000]);
        loop {
            let len = stream.read(&mut octets).unwrap_or(0);
            let mut rest = &octets[..len];
            if len == 0 {
                return;
            }
            while let Some(message) = records.take(&mut rest).unwrap() {
                let mut reader = Reader::new(&message);
                let call = CallHeader::read(&mut reader).unwrap();
                self.calls.lock().unwrap().push(call.procedure);
                match *self.manner.lock().unwrap() {
                    Manner::Silent => continue,
                    Manner::Curt => return,
                    Manner::Babbling => {
                        let _ = stream.write_all(b"220 mail.example.org ESMTP\r\n");
                        continue;
                    }
                    _ => {}
                }
                let Some((reply, results)) = self.answer(&call, &mut reader) else { return };
                let mut writer = Writer::new();
                ReplyHeader { xid: call.xid, reply }.write(&mut writer);
                writer.encoded(&results);
                if stream.write_all(&marked(&writer.finish())).is_err() {
                    return;
                }
            }
        }
    }
}

struct Rpcbind {
    desk: Arc<Desk>,
    dir: TempDir,
}

impl Rpcbind {
    fn start(manner: Manner, rows: &[Row]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let desk = Arc::new(Desk { rows: Mutex::new(rows.to_vec()), manner: Mutex::new(manner), ..Desk::default() });
        let (listener, for_thread) = (UnixListener::bind(dir.path().join("rpcbind.sock")).unwrap(), desk.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let desk = for_thread.clone();
                std::thread::spawn(move || desk.serve(stream.unwrap()));
            }
        });
        Self { desk, dir }
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("rpcbind.sock")
    }

    fn flag(&self) -> String {
        format!("--rpcbind={}", self.socket().display())
    }

    fn place(&self) -> Place {
        Place { patience: Duration::from_secs(30), ..Place::at(&self.socket()) }
    }

    fn rows(&self) -> Vec<Row> {
        self.desk.rows.lock().unwrap().clone()
    }

    fn set_manner(&self, manner: Manner) {
        *self.desk.manner.lock().unwrap() = manner;
    }

    fn calls(&self) -> Vec<u32> {
        std::mem::take(&mut self.desk.calls.lock().unwrap())
    }
}

/// An entry that is none of ours: the same program and netid in another version.
fn others() -> Row {
    (PROGRAM, 2, "rdma".to_owned(), "127.0.0.1.78.81".to_owned(), OURS.to_owned())
}

fn config(dir: &Path, rpcbind: &Rpcbind, doors: &[&str]) -> Config {
    let mut config = Config::small(dir.join("pool"));
    config.listen.rpc = doors.iter().map(|door| door.parse().unwrap()).collect();
    config.rpc.connections_max = 4;
    config.rpc.rpcbind = Some(rpcbind.socket());
    config.check().unwrap();
    config
}

fn universal(address: &Address) -> String {
    let (services, left_out) = services(std::slice::from_ref(address));
    assert!(left_out.is_empty());
    services[0].address.clone()
}

/// One service at an address that nobody has.
fn one() -> Vec<Service> {
    services(&[Address::Socket("127.0.0.1:20049".parse().unwrap())]).0
}

#[actix::test]
async fn doors_are_registered_once_they_listen_and_taken_back_at_shutdown() {
    for manner in [Manner::Good, Manner::Old] {
        let rpcbind = Rpcbind::start(manner, &[others()]);
        let dir = tempfile::tempdir().unwrap();
        // The second one of IPv4 has no place there.
        let mut doors = vec!["rpc+iwarp://127.0.0.1:0", "rpc+iwarp://127.0.0.1:0"];
        let has_v6 = TcpListener::bind("[::1]:0").is_ok();
        if has_v6 {
            doors.push("rpc+iwarp://[::1]:0");
        }
        let handle = start(config(dir.path(), &rpcbind, &doors)).await.unwrap();
        let addresses = handle.rpc_addresses();
        let mut expected = vec![others(), row("rdma", &universal(&addresses[0]), OURS)];
        if has_v6 {
            expected.push(row("rdma6", &universal(&addresses[2]), OURS));
        }
        assert_eq!(rpcbind.rows(), expected);
        handle.shutdown().await;
        assert_eq!(rpcbind.rows(), [others()]);
    }
}

/// What `mount -o vers=3,proto=tcp` asks for where it is told no port.
#[actix::test]
async fn nfs_doors_are_registered_for_nfs_and_for_mount_and_taken_back() {
    let rpcbind = Rpcbind::start(Manner::Good, &[others()]);
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(dir.path(), &rpcbind, &["rpc+iwarp://127.0.0.1:0"]);
    config.listen.nfs_tcp = vec!["127.0.0.1:0".parse().unwrap()];
    let has_v6 = TcpListener::bind("[::1]:0").is_ok();
    if has_v6 {
        config.listen.nfs_tcp.push("[::1]:0".parse().unwrap());
    }
    let handle = start(config.clone()).await.unwrap();
    let mut expected = vec![others(), row("rdma", &universal(&handle.rpc_addresses()[0]), OURS)];
    for (address, netid) in handle.nfs_addresses().iter().zip(["tcp", "tcp6"]) {
        let at = universal_address(address);
        expected.extend([100_003, 100_005].map(|program| (program, 3, netid.to_owned(), at.clone(), OURS.to_owned())));
    }
    assert_eq!(rpcbind.rows(), expected);
    assert_eq!(handle.nfs_addresses().len(), 1 + usize::from(has_v6));
    handle.shutdown().await;
    assert_eq!(rpcbind.rows(), [others()]);

    // Without any RPC door, too.
    config.listen.rpc.clear();
    config.listen.nfs_tcp.truncate(1);
    let handle = start(config).await.unwrap();
    assert_eq!(rpcbind.rows().len(), 3);
    handle.shutdown().await;
    assert_eq!(rpcbind.rows(), [others()]);
}

#[test]
fn an_entry_of_a_killed_daemon_is_made_anew_and_leaves_with_its_heir() {
    let rpcbind = Rpcbind::start(Manner::Good, &[others()]);
    let rpc = |door: &str| Daemon::builder().flags(&["--rpc", door, &rpcbind.flag()]).start();
    let mut killed = rpc("rpc+iwarp://127.0.0.1:0");
    let door = killed.doors().iter().find(|door| door.starts_with("rpc+")).unwrap().clone();
    let left = rpcbind.rows();
    assert_eq!(left.len(), 2, "{left:?}");
    killed.signal("KILL");
    assert_eq!(killed.wait(), -1);
    assert_eq!(rpcbind.rows(), left);
    rpcbind.calls();

    let mut heir = rpc(&door);
    assert_eq!(rpcbind.rows(), left);
    use procedure::{DUMP, SET, UNSET};
    assert_eq!(rpcbind.calls(), [DUMP, UNSET, SET, DUMP]);
    assert!(heir.log().contains("registered at rpcbind") && heir.log().contains("netid rdma at 127.0.0.1."));
    heir.stop();
    assert_eq!(rpcbind.calls(), [DUMP, UNSET]);
    assert_eq!(rpcbind.rows(), [others()]);
}

/// A command without what this environment would configure.
fn bulkhead(program: &str) -> Command {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("BULKHEAD_")) {
        command.env_remove(name);
    }
    command
}

/// `serve` that is expected not to start.
fn serve(flags: &[&str]) -> Output {
    let dir = tempfile::tempdir().unwrap();
    let mut command = bulkhead("timeout");
    command.args(["60", env!("CARGO_BIN_EXE_bulkhead"), "serve", "--memcache", "127.0.0.1:0", "--native", "off"]);
    command.args(["--admin", "off", "--memory", "8MiB", "--head", "64KiB"]).args(flags);
    command.arg("--pool").arg(format!("{}:16MiB", dir.path().join("pool").display()));
    command.output().unwrap()
}

#[test]
fn serve_says_why_it_does_not_start() {
    let door = ["--rpc", "rpc+iwarp://127.0.0.1:0"];
    let somebody = row("rdma", "127.0.0.1.0.1", OURS);
    let taken = Rpcbind::start(Manner::Good, std::slice::from_ref(&somebody));
    let strict = Rpcbind::start(Manner::Strict, &[]);
    let (at_taken, at_strict) = (taken.flag(), strict.flag());
    let nowhere = "--rpcbind=/nonexistent/rpcbind.sock";
    let cases: [(&[&str], i32, &[&str]); 6] = [
        (&[&door[..], &[nowhere]].concat(), 69, &["/nonexistent/rpcbind.sock: No such file", "Debian's package"]),
        (
            &[&door[..], &[at_taken.as_str()]].concat(),
            69,
            &["netid rdma at 127.0.0.1.0.1 already, registered by 1000", "`rpcinfo -d 541215819 1`"],
        ),
        (&[&door[..], &[at_strict.as_str()]].concat(), 69, &["does not let this process", "rpcbind.sock"]),
        (&["--rpcbind"], 78, &["rpc.rpcbind = \"/run/rpcbind.sock\"", "no door"]),
        (&[&door[..], &["--rpcbind=rpcbind.sock"]].concat(), 78, &["absolute path"]),
        (&["--rpc", "rpc+loopback:nobody", nowhere], 78, &["no door with an address"]),
    ];
    for (flags, code, words) in cases {
        let output = serve(flags);
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{flags:?}: {said}");
        assert!(words.iter().all(|word| said.contains(word)), "{flags:?}: {said}");
        assert!(!String::from_utf8_lossy(&output.stdout).contains("ready"), "{flags:?}");
    }
    assert_eq!(taken.rows(), [somebody], "it may lead to somebody who lives");
    assert_eq!(strict.rows(), []);
}

#[actix::test]
async fn an_rpcbind_that_misbehaves_is_an_error_in_bounded_time_and_keeps_nothing() {
    type Wanted = fn(&RpcbindError) -> bool;
    let cases: [(Manner, Wanted); 6] = [
        (Manner::Silent, |error| matches!(error, RpcbindError::Silent { .. })),
        (Manner::Curt, |error| matches!(error, RpcbindError::Lost { .. })),
        (Manner::CurtAfterSet, |error| matches!(error, RpcbindError::Lost { .. })),
        (Manner::Unwilling, |error| matches!(error, RpcbindError::Fault { fault: Fault::Refused(_), .. })),
        (Manner::Strict, |error| matches!(error, RpcbindError::Fault { fault: Fault::Denied(_), .. })),
        (Manner::Babbling, |error| matches!(error, RpcbindError::Fault { fault: Fault::Record(_), .. })),
    ];
    for (manner, wanted) in cases {
        let rpcbind = Rpcbind::start(manner, &[others()]);
        let mut place = rpcbind.place();
        if manner == Manner::Silent {
            place.patience = Duration::from_millis(200);
        }
        let error = register(place, one()).await.unwrap_err();
        assert!(wanted(&error), "{manner:?}: {error}");
        assert!(error.to_string().contains("rpcbind.sock"), "{error}");
        assert_eq!(rpcbind.rows(), [others()], "{manner:?}");
        let dir = tempfile::tempdir().unwrap();
        if manner == Manner::Curt {
            let refused = start(config(dir.path(), &rpcbind, &["rpc+iwarp://127.0.0.1:0"])).await.err().unwrap();
            assert!(matches!(refused, StartError::Rpcbind(RpcbindError::Lost { .. })), "{refused}");
            assert_eq!(refused.exit_code(), Exit::Unavailable);
        }
    }
}

/// rpcbind was restarted without its memory, hangs, or is gone: a daemon stops all the same.
#[actix::test]
async fn a_shutdown_is_not_held_up() {
    let dir = tempfile::tempdir().unwrap();
    let mut rpcbind = Some(Rpcbind::start(Manner::Good, &[]));
    for what in ["forgets", "forgets and has another", "is gone"] {
        let running = rpcbind.as_ref().unwrap();
        let handle = start(config(dir.path(), running, &["rpc+iwarp://127.0.0.1:0"])).await.unwrap();
        assert_eq!(running.rows().len(), 1);
        let another = row("rdma", "127.0.0.1.0.1", OURS);
        match what {
            "forgets" => running.desk.rows.lock().unwrap().clear(),
            "is gone" => drop(rpcbind.take()),
            _ => *running.desk.rows.lock().unwrap() = vec![another.clone()],
        }
        handle.shutdown().await;
        if what == "forgets and has another" {
            assert_eq!(running_rows(&rpcbind), [another], "{what}");
            rpcbind.as_ref().unwrap().desk.rows.lock().unwrap().clear();
        }
    }
    let rpcbind = Rpcbind::start(Manner::Good, &[]);
    let place = Place { patience: Duration::from_millis(300), ..rpcbind.place() };
    let registration = register(place, one()).await.unwrap();
    assert_eq!(registration.entries()[0].owner.as_deref(), Some(OURS.as_bytes()));
    rpcbind.set_manner(Manner::Silent);
    let before = Instant::now();
    registration.withdraw().await;
    assert!(before.elapsed() < Duration::from_secs(30));
    assert_eq!(rpcbind.rows().len(), 1, "it was not told");
}

fn running_rows(rpcbind: &Option<Rpcbind>) -> Vec<Row> {
    rpcbind.as_ref().map(Rpcbind::rows).unwrap_or_default()
}

#[actix::test]
async fn where_nobody_listens_at_the_socket_its_port_is_tried() {
    let desk = Arc::new(Desk::default());
    let (listener, for_thread) = (TcpListener::bind("127.0.0.1:0").unwrap(), desk.clone());
    let tcp = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            for_thread.serve(stream.unwrap());
        }
    });
    let dir = tempfile::tempdir().unwrap();
    // None there, and one that its owner left.
    let left = dir.path().join("left.sock");
    drop(UnixListener::bind(&left).unwrap());
    for socket in [dir.path().join("none.sock"), left.clone()] {
        let place = Place { socket, tcp: Some(tcp), patience: Duration::from_secs(30) };
        let registration = register(place, one()).await.unwrap();
        assert_eq!(*desk.rows.lock().unwrap(), [row("rdma", "127.0.0.1.78.81", OURS)]);
        registration.withdraw().await;
        assert_eq!(*desk.rows.lock().unwrap(), []);
    }
    // A port that is free now.
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let place = Place { socket: left, tcp: Some(free), patience: Duration::from_secs(30) };
    let said = register(place, one()).await.unwrap_err().to_string();
    assert!(said.contains("left.sock: Connection refused") && said.contains(&free.to_string()), "{said}");
}

#[test]
fn doctor_looks_and_changes_nothing() {
    let doctor = |rpcbind: &str| {
        let dir = tempfile::tempdir().unwrap();
        let mut command = bulkhead(env!("CARGO_BIN_EXE_bulkhead"));
        command.args(["doctor", "--memcache", "off", "--native", "off", "--admin", "off", "--memory", "8MiB"]);
        command.args(["--head", "64KiB", "--rpc", "rpc+iwarp://127.0.0.1:20049", rpcbind, "--pool"]);
        let output = command.arg(format!("{}:16MiB", dir.path().join("pool").display())).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        text.lines().find(|line| line.contains(" rpcbind ")).unwrap_or_else(|| panic!("{text}")).to_owned()
    };
    let rpcbind = Rpcbind::start(Manner::Good, &[others()]);
    let said = doctor(&rpcbind.flag());
    assert!(said.starts_with("ok ") && said.contains("netid rdma can be registered"), "{said}");
    assert_eq!(rpcbind.calls(), [procedure::DUMP]);
    rpcbind.desk.rows.lock().unwrap().push(row("rdma", "127.0.0.1.0.1", "superuser"));
    let said = doctor(&rpcbind.flag());
    assert!(said.starts_with("TROUBLE ") && said.contains("registered by superuser"), "{said}");
    let said = doctor("--rpcbind=/nonexistent/rpcbind.sock");
    assert!(said.starts_with("TROUBLE ") && said.contains("does not run"), "{said}");
}
