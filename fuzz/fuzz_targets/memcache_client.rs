//! The client's parser of memcache replies, against a server that says anything.
//!
//! Input: `[request: 1 octet | … | 0xff | reply… | 0xfe | reply…]`: up to four requests of one client. The server says a reply
//! when something was asked, and closes its side after the last one.
#![no_main]

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::LazyLock;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::Duration;

use bulkhead::client::{Client, ClientError, Options, ServerUrl};
use libfuzzer_sys::fuzz_target;

#[path = "../seeds.rs"]
mod seeds;

/// A socket, what is said on it, and how many octets were asked.
static SERVER: LazyLock<(SyncSender<(UnixStream, Vec<Vec<u8>>)>, std::sync::Mutex<Receiver<usize>>)> =
    LazyLock::new(|| {
        let (begin, conversations) = sync_channel::<(UnixStream, Vec<Vec<u8>>)>(1);
        let (done, asked) = sync_channel(1);
        thread::spawn(move || {
            for (mut socket, replies) in conversations {
                let (mut octets, mut asked) = ([0; 4096], 0);
                for (n, reply) in replies.into_iter().enumerate() {
                    // A client that waits for the rest of a reply asks for nothing more, and gets the end.
                    let patience = (n > 0).then_some(Duration::from_millis(1));
                    socket.set_read_timeout(patience).expect("a time above zero");
                    // Input before a request would be taken for what it is: a server out of step.
                    match socket.read(&mut octets) {
                        Ok(0) | Err(_) => break,
                        Ok(len) => asked += len,
                    }
                    if socket.write_all(&reply).is_err() {
                        break;
                    }
                }
                let _ = socket.shutdown(std::net::Shutdown::Write);
                socket.set_read_timeout(None).expect("none is fine");
                // Closing over unread octets would take back what was said.
                while let Ok(len @ 1..) = socket.read(&mut octets) {
                    asked += len;
                }
                done.send(asked).expect("somebody waits");
            }
        });
        (begin, asked.into())
    });

fn ask(client: &mut Client, request: u8, said: &[u8]) -> Result<(), ClientError> {
    match request % 8 {
        0 => {
            let mut value = Vec::new();
            if let Some(info) = client.get("key", &mut value)? {
                assert_eq!(info.len, value.len() as u64);
                assert!(said.windows(value.len().max(1)).any(|window| value.is_empty() || window == value));
            }
        }
        1 => {
            let mut buffer = [0xa5; 64];
            if let Some(info) = client.get_into("key", &mut buffer)? {
                assert!(buffer[info.len as usize..].iter().all(|octet| *octet == 0xa5));
            }
        }
        2 => drop(client.stat("key")?),
        3 => client.put("key", &mut &[7; 300][..], 300, 1, None)?,
        4 => drop(client.delete("key")?),
        5 => drop(client.touch("key", Some(Duration::from_secs(5)))?),
        6 => {
            let stats = client.stats(None)?;
            assert!(stats.iter().map(|(name, value)| name.len() + value.len()).sum::<usize>() <= 3 * said.len());
        }
        _ => drop(client.version()?),
    }
    Ok(())
}

fuzz_target!(
    init: {
        let replies: [&[u8]; 12] = [
            b"\x00\xffVALUE key 1 5 7\r\nhello\r\nEND\r\n",
            b"\x01\xffVALUE key 1 5 7\r\nhello\r\nEND\r\n",
            b"\x02\x00\xffVALUE key 0 0 1\r\n\r\nEND\r\n\xfeEND\r\n",
            b"\x03\xffSTORED\r\n",
            b"\x03\x03\xffNOT_STORED\r\n\xfeSERVER_ERROR out of memory\r\n",
            b"\x04\x04\xffDELETED\r\n\xfeNOT_FOUND\r\n",
            b"\x05\xffTOUCHED\r\n",
            b"\x06\xffSTAT pid 1\r\nSTAT version 1.6\r\nEND\r\n",
            b"\x06\xffRESET\r\n",
            b"\x07\xffVERSION 1.6.18\r\n",
            b"\x00\xffCLIENT_ERROR bad\r\n",
            b"\x00\xffERROR\r\n",
        ];
        seeds::plant(replies.map(<[u8]>::to_vec));
    },
    |input: &[u8]| {
        let Some(at) = input.iter().take(5).position(|octet| *octet == 0xff) else { return };
        let (requests, said) = (&input[..at], &input[at + 1..]);
        let path = std::env::temp_dir().join(format!("bulkhead-fuzz-{}.sock", std::process::id()));
        let _ = fs::remove_file(&path);
        let listener = UnixListener::bind(&path).expect("a socket of our own");
        let url = ServerUrl::MemcacheUnix { path: path.clone() };
        let second = Duration::from_secs(10);
        let options = Options { connect_timeout: second, io_timeout: second, ..Options::default() };
        let mut client = Client::connect(url, options).expect("the listener has room");
        let (server, _) = listener.accept().expect("somebody has connected");
        // Whoever comes back finds nobody.
        drop(listener);
        let _ = fs::remove_file(&path);
        let replies = said.split(|octet| *octet == 0xfe).map(<[u8]>::to_vec).collect();
        SERVER.0.send((server, replies)).expect("the server runs");
        for request in requests {
            if let Err(error) = ask(&mut client, *request, said) {
                // A message shows the front of what came, and no more.
                assert!(error.to_string().len() < 20_000);
            }
        }
        drop(client);
        let asked = SERVER.1.lock().expect("one at a time").recv().expect("the server runs");
        assert!(asked <= 4 * 400, "{asked} octets were asked");
    }
);
