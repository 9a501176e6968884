//! A driver's share of a run over one native connection: the client library does the pipelining.

use std::io::{self, Read, Write};
use std::sync::Arc;
use std::time::Instant;

use bulkhead::client::{ClientError, NativeClient, Outcome};

use super::driver::{Driver, Op};
use super::values::{self, Item};

/// Octets of values that nobody checks: the same again and again.
const UNCHECKED_BYTES: usize = 256 << 10;

/// The octets of a value, made as they are asked for.
struct Octets {
    seed: u64,
    offset: u64,
    len: u64,
    /// Sent instead, where nobody checks: then the client's own work is a copy and no more.
    unchecked: Option<Arc<[u8]>>,
}

impl Read for Octets {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let remaining = usize::try_from(self.len - self.offset).unwrap_or(usize::MAX);
        let mut count = into.len().min(remaining);
        match &self.unchecked {
            Some(octets) => {
                count = count.min(octets.len());
                into[..count].copy_from_slice(&octets[..count]);
            }
            None => values::fill(self.seed, self.offset, &mut into[..count]),
        }
        self.offset += count as u64;
        Ok(count)
    }
}

/// Takes the octets of a value and looks at them, if they are to be checked.
struct Check {
    seed: u64,
    offset: u64,
    is_checked: bool,
    is_right: bool,
    first_at: Option<Instant>,
}

impl Write for Check {
    fn write(&mut self, octets: &[u8]) -> io::Result<usize> {
        self.first_at.get_or_insert_with(Instant::now);
        if self.is_checked && self.is_right {
            self.is_right = values::matches(self.seed, self.offset, octets);
        }
        self.offset += octets.len() as u64;
        Ok(octets.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Asks and waits until the driver is finished.
///
/// # Errors
/// Those of the connection, after which it is of no use.
pub fn drive(driver: &mut Driver, client: &mut NativeClient) -> Result<(), ClientError> {
    let (op, is_checked) = (driver.plan().op, driver.plan().is_checked);
    let items = driver.items();
    let unchecked = (op == Op::Set && !is_checked).then(|| {
        let mut octets = vec![0; UNCHECKED_BYTES];
        values::fill(0, 0, &mut octets);
        Arc::<[u8]>::from(octets)
    });
    loop {
        while let Some(index) = driver.next_request() {
            let Item { key, len, seed, .. } = &items[index];
            match op {
                Op::Get => client.submit_get(key)?,
                Op::Set => {
                    let octets = Octets { seed: *seed, offset: 0, len: *len, unchecked: unchecked.clone() };
                    client.submit_set(key, octets, *len, 0, None)?;
                }
            }
        }
        let Some(index) = driver.oldest() else { return Ok(()) };
        let item = &items[index];
        let mut check = Check { seed: item.seed, offset: 0, is_checked, is_right: true, first_at: None };
        match client.wait(&mut check) {
            Ok(Outcome::Value(info)) => {
                let is_right = !is_checked || check.is_right && info.len == item.len;
                driver.handle_value(info.len, check.first_at, is_right);
            }
            Ok(Outcome::Stored) => {
                item.mark_stored();
                driver.handle_value(item.len, None, true);
            }
            Ok(_) => driver.handle_miss(),
            Err(ClientError::Refused { reply }) => driver.handle_refusal(reply),
            Err(error) => return Err(error),
        }
    }
}
