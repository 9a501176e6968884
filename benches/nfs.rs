//! What files cost over the NFS door on TCP, one connection, without a kernel's client: the programs behind `compare.py nfs`.
//!
//! ```text
//! nfs load ADDRESS COUNT BYTES                   writes files `0` to `COUNT - 1` of so many octets
//! nfs read ADDRESS SECONDS COUNT BYTES DEPTH     octets a second of READs of those files, one after the other
//! nfs write ADDRESS SECONDS COUNT BYTES DEPTH    the same of WRITEs, with a COMMIT behind each file
//! nfs null ADDRESS SECONDS                       median round trip of NULL, microseconds
//! ```
//!
//! READs and WRITEs are of 1 MiB at most, DEPTH of them in flight. What is read lands in memory that was made before and is not
//! looked at. Without arguments, or with `--test`, one short pass of all against a daemon within the process.

#[expect(dead_code, reason = "of what get and set share, it needs the daemon alone")]
mod loopback;

use std::io::{self, IoSlice, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use bulkhead::programs::mount;
use bulkhead::programs::nfs::{self, FileHandle, Stable, TRANSFER_BYTES_MAX, procedure};
use bulkhead::wire::codec::{Codec, Reader, Writer};
use bulkhead::wire::onc_rpc::record::{MARK_BYTES, Mark};
use bulkhead::wire::onc_rpc::{AuthSys, CallHeader, OpaqueAuth, Xid};

/// Header of a reply, status, attributes, count, end, length of the data.
const READ_HEAD_BYTES: usize = 24 + 4 + 88 + 12;

struct Client {
    stream: TcpStream,
    credential: Vec<u8>,
    next_xid: u32,
    /// The last reply.
    data: Vec<u8>,
}

impl Client {
    fn connect(address: SocketAddr) -> io::Result<Self> {
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        let credential = AuthSys { stamp: 0, machine_name: b"bench", uid: 0, gid: 0, gids: Vec::new() }.body();
        Ok(Self { stream, credential, next_xid: 1, data: vec![0; TRANSFER_BYTES_MAX as usize + 4096] })
    }

    /// Sends a call; `data` goes behind its arguments.
    fn send(
        &mut self,
        program: u32,
        procedure: u32,
        arguments: impl FnOnce(&mut Writer),
        data: &[u8],
    ) -> io::Result<()> {
        let (version, credential, verifier) = (3, AuthSys::around(&self.credential), OpaqueAuth::NONE);
        let mut writer = Writer::new();
        CallHeader { xid: Xid(self.next_xid), program, version, procedure, credential, verifier }.write(&mut writer);
        self.next_xid += 1;
        arguments(&mut writer);
        let head = writer.finish();
        let mark = Mark::whole((head.len() + data.len()) as u64).octets();
        let mut parts = &mut [IoSlice::new(&mark), IoSlice::new(&head), IoSlice::new(data)][..];
        while !parts.is_empty() {
            let sent = self.stream.write_vectored(parts)?;
            IoSlice::advance_slices(&mut parts, sent);
        }
        Ok(())
    }

    /// The next reply, from its header on. It must be a successful one.
    fn receive(&mut self) -> io::Result<&[u8]> {
        let mut mark = [0; MARK_BYTES];
        self.stream.read_exact(&mut mark)?;
        let reply = &mut self.data[..Mark::read(mark).len as usize];
        self.stream.read_exact(reply)?;
        let word = |at: usize| u32::from_be_bytes(reply[at..at + 4].try_into().expect("four octets"));
        // NULL has no status.
        if word(20) != 0 || reply.len() > 24 && word(24) != 0 {
            return Err(io::Error::other(format!("refused: {:?}", &reply[..reply.len().min(28)])));
        }
        Ok(&self.data[..Mark::read(mark).len as usize])
    }

    fn root(&mut self) -> io::Result<FileHandle> {
        self.send(mount::PROGRAM_NUMBER, mount::procedure::MNT, |words| words.opaque(b"/"), &[])?;
        let reply = self.receive()?;
        FileHandle::read(&mut Reader::new(&reply[28..])).map_err(io::Error::other)
    }

    /// Makes a file, or finds it.
    fn file(&mut self, root: FileHandle, name: &str) -> io::Result<FileHandle> {
        let arguments = |words: &mut Writer| {
            root.write(words);
            words.opaque(name.as_bytes());
            // Unchecked, and nothing is set.
            (0..7).for_each(|_| words.u32(0));
        };
        self.send(nfs::PROGRAM_NUMBER, procedure::CREATE, arguments, &[])?;
        let reply = self.receive()?;
        // It is told behind a word that says so.
        FileHandle::read(&mut Reader::new(&reply[32..])).map_err(io::Error::other)
    }

    fn files(&mut self, count: usize) -> io::Result<Vec<FileHandle>> {
        let root = self.root()?;
        (0..count).map(|number| self.file(root, &number.to_string())).collect()
    }

    fn send_read(&mut self, file: FileHandle, offset: usize, count: usize) -> io::Result<()> {
        let arguments = |words: &mut Writer| {
            file.write(words);
            words.u64(offset as u64);
            words.u32(count as u32);
        };
        self.send(nfs::PROGRAM_NUMBER, procedure::READ, arguments, &[])
    }

    fn send_write(&mut self, file: FileHandle, offset: usize, data: &[u8]) -> io::Result<()> {
        let arguments = |words: &mut Writer| {
            file.write(words);
            words.u64(offset as u64);
            words.u32(data.len() as u32);
            Stable::Unstable.write(words);
            words.u32(data.len() as u32);
        };
        self.send(nfs::PROGRAM_NUMBER, procedure::WRITE, arguments, data)
    }

    fn write_file(&mut self, file: FileHandle, octets: &[u8], depth: usize) -> io::Result<()> {
        let mut in_flight = 0;
        for (at, part) in octets.chunks(TRANSFER_BYTES_MAX as usize).enumerate() {
            if in_flight == depth {
                self.receive()?;
                in_flight -= 1;
            }
            self.send_write(file, at * TRANSFER_BYTES_MAX as usize, part)?;
            in_flight += 1;
        }
        for _ in 0..in_flight {
            self.receive()?;
        }
        let arguments = |words: &mut Writer| {
            file.write(words);
            words.u64(0);
            words.u32(0);
        };
        self.send(nfs::PROGRAM_NUMBER, procedure::COMMIT, arguments, &[])?;
        self.receive().map(|_| ())
    }
}

fn load(address: SocketAddr, count: usize, bytes: usize) -> io::Result<()> {
    let mut client = Client::connect(address)?;
    let octets = loopback::octets(bytes);
    for file in client.files(count)? {
        client.write_file(file, &octets, 4)?;
    }
    Ok(())
}

/// Octets a second.
fn read(address: SocketAddr, time: Duration, count: usize, bytes: usize, depth: usize) -> io::Result<f64> {
    let mut client = Client::connect(address)?;
    let files = client.files(count)?;
    let part = bytes.min(TRANSFER_BYTES_MAX as usize);
    let mut places = files.iter().cycle().flat_map(|file| (0..bytes).step_by(part).map(|offset| (*file, offset)));
    let (start, mut octets, mut in_flight) = (Instant::now(), 0, 0);
    loop {
        while in_flight < depth && start.elapsed() < time {
            let (file, offset) = places.next().expect("they go round");
            client.send_read(file, offset, part.min(bytes - offset))?;
            in_flight += 1;
        }
        if in_flight == 0 {
            return Ok(octets as f64 / start.elapsed().as_secs_f64());
        }
        in_flight -= 1;
        // Replies may come in another order than calls went.
        octets += client.receive()?.len().saturating_sub(READ_HEAD_BYTES);
    }
}

/// Octets a second.
fn write(address: SocketAddr, time: Duration, count: usize, bytes: usize, depth: usize) -> io::Result<f64> {
    let mut client = Client::connect(address)?;
    let files = client.files(count)?;
    let octets = loopback::octets(bytes);
    let (start, mut written) = (Instant::now(), 0);
    for file in files.iter().cycle() {
        if start.elapsed() >= time {
            break;
        }
        client.write_file(*file, &octets, depth)?;
        written += bytes;
    }
    Ok(written as f64 / start.elapsed().as_secs_f64())
}

/// Microseconds.
fn null(address: SocketAddr, time: Duration) -> io::Result<f64> {
    let (mut client, mut times) = (Client::connect(address)?, Vec::new());
    let start = Instant::now();
    while start.elapsed() < time {
        let sent_at = Instant::now();
        client.send(nfs::PROGRAM_NUMBER, procedure::NULL, |_| {}, &[])?;
        client.receive()?;
        times.push(sent_at.elapsed());
    }
    times.sort_unstable();
    Ok(times[times.len() / 2].as_secs_f64() * 1e6)
}

/// One of each, against a daemon of its own.
fn pass() -> io::Result<()> {
    let plan = loopback::Plan::of_arguments();
    let mut done = Ok(());
    let adjust = |config: &mut bulkhead::config::Config| config.listen.nfs_tcp = vec![([127, 0, 0, 1], 0).into()];
    loopback::with_printed_doors(&plan, adjust, |doors| {
        let door = doors.iter().find_map(|door| door.strip_prefix("nfs+tcp://")).expect("the door is open");
        let address = door.parse().expect("an address");
        let time = Duration::from_millis(if plan.requests > 100 { 1000 } else { 20 });
        let rate = |octets: f64| octets / f64::from(1 << 20);
        done = (|| {
            load(address, 2, 3 << 20)?;
            println!("READ of 3 MiB, one in flight      {:.0} MiB/s", rate(read(address, time, 2, 3 << 20, 1)?));
            println!("READ of 3 MiB, four in flight     {:.0} MiB/s", rate(read(address, time, 2, 3 << 20, 4)?));
            println!("WRITE of 3 MiB, four in flight    {:.0} MiB/s", rate(write(address, time, 2, 3 << 20, 4)?));
            println!("NULL                              {:.1} us", null(address, time)?);
            Ok(())
        })();
    });
    done
}

fn main() -> io::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with("--")).collect();
    let Some((what, rest)) = arguments.split_first() else { return pass() };
    let (address, numbers) = rest.split_first().expect("the address of a server");
    let address: SocketAddr = address.parse().expect("an address and a port");
    let numbers: Vec<f64> = numbers.iter().map(|number| number.parse().expect("a number")).collect();
    let time = || Duration::from_secs_f64(numbers[0]);
    match (what.as_str(), numbers.as_slice()) {
        ("load", [count, bytes]) => load(address, *count as usize, *bytes as usize)?,
        ("null", [_]) => println!("{}", null(address, time())?),
        ("read", [_, count, bytes, depth]) => {
            println!("{}", read(address, time(), *count as usize, *bytes as usize, *depth as usize)?);
        }
        ("write", [_, count, bytes, depth]) => {
            println!("{}", write(address, time(), *count as usize, *bytes as usize, *depth as usize)?);
        }
        _ => {
            eprintln!("usage: nfs load | read | write | null ADDRESS NUMBER..., see the head of benches/nfs.rs");
            std::process::exit(64);
        }
    }
    Ok(())
}
