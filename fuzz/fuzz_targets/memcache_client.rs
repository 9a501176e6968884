//! The client's parser of memcache replies, against a server that says anything and then closes.
//!
//! Input: `[request: 1 octet | …| 0xff | replies…]`: up to four requests of one client, then all that the server ever says.
#![no_main]

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::time::Duration;

use bulkhead::client::{Client, ClientError, Options, ServerUrl};
use libfuzzer_sys::fuzz_target;

#[path = "../seeds.rs"]
mod seeds;

/// One request; `false` when the client cannot be asked any more.
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
            b"\x02\x00\xffVALUE key 0 0 1\r\n\r\nEND\r\nEND\r\n",
            b"\x03\xffSTORED\r\n",
            b"\x03\x03\xffNOT_STORED\r\nSERVER_ERROR out of memory\r\n",
            b"\x04\x04\xffDELETED\r\nNOT_FOUND\r\n",
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
        let second = Duration::from_secs(1);
        let options = Options { connect_timeout: second, io_timeout: second, ..Options::default() };
        let mut client = Client::connect(url, options).expect("the listener has room");
        let (mut server, _) = listener.accept().expect("somebody has connected");
        // Whoever comes back finds nobody.
        drop(listener);
        let _ = fs::remove_file(&path);
        server.write_all(said).expect("a socket takes 8 KiB");
        server.shutdown(std::net::Shutdown::Write).expect("connected");
        for request in requests {
            if let Err(error) = ask(&mut client, *request, said) {
                // A message shows the front of what came, and no more.
                assert!(error.to_string().len() < 20_000);
            }
        }
        drop(client);
        let mut asked = Vec::new();
        let _ = server.read_to_end(&mut asked);
        assert!(asked.len() <= 4 * 400, "{} octets were asked", asked.len());
    }
);
