//! What loopback TCP itself gives: one stream of 256 KiB writes, and a blocking ping-pong of 64 octets. The yardstick of
//! `compare.py native`, which pins the two ends to the cores of server and client.
//!
//! ```text
//! tcp serve                    prints its port, serves until its standard input ends
//! tcp stream PORT SECONDS      octets a second from the server to here
//! tcp ping PORT SECONDS        median round trip, microseconds
//! ```
//!
//! Without arguments, or with `--test`, one short pass of both within one process.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

const STREAM_BYTES: usize = 256 << 10;
const PING_BYTES: usize = 64;

fn serve(listener: &TcpListener) -> io::Result<()> {
    loop {
        let (mut peer, _) = listener.accept()?;
        peer.set_nodelay(true)?;
        let mut kind = [0];
        peer.read_exact(&mut kind)?;
        // A peer that has seen enough closes.
        if kind == *b"s" {
            let octets = vec![0x55; STREAM_BYTES];
            while peer.write_all(&octets).is_ok() {}
        } else {
            let mut octets = [0; PING_BYTES];
            while peer.read_exact(&mut octets).and_then(|()| peer.write_all(&octets)).is_ok() {}
        }
    }
}

fn connect(port: u16, kind: &[u8]) -> io::Result<TcpStream> {
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_nodelay(true)?;
    stream.write_all(kind)?;
    Ok(stream)
}

/// Octets a second.
fn stream(port: u16, time: Duration) -> io::Result<f64> {
    let mut peer = connect(port, b"s")?;
    let mut octets = vec![0; STREAM_BYTES];
    // The window opens first.
    for _ in 0..64 {
        peer.read_exact(&mut octets)?;
    }
    let (start, mut count) = (Instant::now(), 0);
    while start.elapsed() < time {
        match peer.read(&mut octets)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            read => count += read,
        }
    }
    Ok(count as f64 / start.elapsed().as_secs_f64())
}

/// Microseconds.
fn ping(port: u16, time: Duration) -> io::Result<f64> {
    let mut peer = connect(port, b"p")?;
    let mut octets = [0x55; PING_BYTES];
    let (start, mut times) = (Instant::now(), Vec::new());
    while start.elapsed() < time {
        let sent_at = Instant::now();
        peer.write_all(&octets)?;
        peer.read_exact(&mut octets)?;
        times.push(sent_at.elapsed());
    }
    times.sort_unstable();
    Ok(times[times.len() / 2].as_secs_f64() * 1e6)
}

fn main() -> io::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let number = |index: usize| arguments.get(index).and_then(|text| text.parse::<f64>().ok());
    match (arguments.first().map(String::as_str), number(1), number(2)) {
        (Some("serve"), ..) => {
            let listener = TcpListener::bind(("127.0.0.1", 0))?;
            println!("{}", listener.local_addr()?.port());
            thread::spawn(move || serve(&listener));
            io::copy(&mut io::stdin(), &mut io::sink())?;
        }
        (Some("stream"), Some(port), Some(seconds)) => {
            println!("{}", stream(port as u16, Duration::from_secs_f64(seconds))?);
        }
        (Some("ping"), Some(port), Some(seconds)) => {
            println!("{}", ping(port as u16, Duration::from_secs_f64(seconds))?);
        }
        (None | Some("--test"), ..) => {
            let listener = TcpListener::bind(("127.0.0.1", 0))?;
            let port = listener.local_addr()?.port();
            thread::spawn(move || serve(&listener));
            let time = Duration::from_millis(if arguments.is_empty() { 1000 } else { 20 });
            println!("one stream       {:.0} MiB/s", stream(port, time)? / f64::from(1 << 20));
            println!("64-octet ping    {:.1} us", ping(port, time)?);
        }
        _ => {
            eprintln!("usage: tcp serve | tcp stream PORT SECONDS | tcp ping PORT SECONDS");
            std::process::exit(64);
        }
    }
    Ok(())
}
