//! A driver's share of a run over one RPC connection: each value in a call of its own, or GETs in batches.

use std::collections::VecDeque;
use std::io;

use bulkhead::client::rpc::{GetRange, PutCall, PutOptions, RangesCall, RpcClient, Status};
use bulkhead::client::{ClientError, ServerUrl};
use bulkhead::fabric::SharedSpan;

use super::driver::{Driver, Op};
use super::values;

/// The values of one call, the oldest first, and the memory of each.
struct Flight {
    call: Call,
    spans: Vec<SharedSpan>,
}

enum Call {
    Get(RangesCall),
    Set(PutCall),
}

/// Memory for values, taken again and again.
struct Spans {
    free: Vec<SharedSpan>,
    /// Of the longest value, at least 1.
    len: usize,
}

impl Spans {
    /// Filled with octets that nobody checks, if it is fresh.
    fn take(&mut self) -> io::Result<SharedSpan> {
        if let Some(span) = self.free.pop() {
            return Ok(span);
        }
        let mut span = SharedSpan::new(self.len)?;
        values::fill(0, 0, owned(&mut span)?);
        Ok(span)
    }
}

/// Memory that no call has any more.
fn owned(span: &mut SharedSpan) -> io::Result<&mut [u8]> {
    span.get_mut().ok_or_else(|| io::Error::other("memory of a call that is over is lent still"))
}

/// Asks and waits until the driver is finished.
///
/// # Errors
/// Those of the connection, after which it is of no use.
pub fn drive(driver: &mut Driver, client: &mut RpcClient) -> Result<(), ClientError> {
    let local = |source| ClientError::Local { source };
    let (op, is_checked, batch) = (driver.plan().op, driver.plan().is_checked, driver.plan().batch);
    let items = driver.items();
    let len_max = items.iter().map(|item| item.len).max().unwrap_or(0).max(1);
    let len = usize::try_from(len_max).map_err(|_| local(io::ErrorKind::OutOfMemory.into()))?;
    let mut spans = Spans { free: Vec::new(), len };
    let mut under_way: VecDeque<Flight> = VecDeque::new();
    loop {
        let asked: Vec<usize> = std::iter::from_fn(|| driver.next_request()).collect();
        for asked in asked.chunks(batch) {
            let mut taken = Vec::with_capacity(asked.len());
            for _ in asked {
                taken.push(spans.take().map_err(local)?);
            }
            let call = match op {
                Op::Get => {
                    let range = |(index, span): (&usize, &SharedSpan)| {
                        let item = &items[*index];
                        let into = span.slice(0..item.len as usize);
                        GetRange { key: item.key.to_vec(), version: 0, offset: 0, into }
                    };
                    let ranges: Vec<GetRange> = asked.iter().zip(&taken).map(range).collect();
                    Call::Get(client.submit_ranges(&ranges, None)?)
                }
                Op::Set => {
                    let item = &items[asked[0]];
                    if is_checked {
                        values::fill(item.seed, 0, &mut owned(&mut taken[0]).map_err(local)?[..item.len as usize]);
                    }
                    let value = taken[0].slice(0..item.len as usize);
                    Call::Set(client.submit_put(&item.key, &value, PutOptions::default())?)
                }
            };
            under_way.push_back(Flight { call, spans: taken });
        }
        let Some(Flight { call, spans: taken }) = under_way.pop_front() else { return Ok(()) };
        match call {
            Call::Get(call) => {
                for (got, mut span) in client.wait_ranges(call)?.into_iter().zip(taken) {
                    let Some(index) = driver.oldest() else { break };
                    let item = &items[index];
                    match got.status {
                        Status::Ok => {
                            let is_right = !is_checked || {
                                let octets = &owned(&mut span).map_err(local)?[..got.count as usize];
                                got.len == item.len && values::matches(item.seed, 0, octets)
                            };
                            driver.handle_value(got.count.into(), None, is_right);
                        }
                        Status::NotFound => driver.handle_miss(),
                        status => driver.handle_refusal(format!("{status:?}")),
                    }
                    spans.free.push(span);
                }
            }
            Call::Set(call) => {
                let Some(index) = driver.oldest() else { continue };
                match client.wait_put(call) {
                    Ok(_) => {
                        items[index].mark_stored();
                        driver.handle_value(items[index].len, None, true);
                    }
                    Err(ClientError::Refused { reply }) => driver.handle_refusal(reply),
                    Err(error) => return Err(error),
                }
                spans.free.extend(taken);
            }
        }
    }
}

/// What a run asks of an RPC connection that it has not.
pub fn refuse_lengths(url: &ServerUrl, op: Op, len_max: u64) -> Result<(), String> {
    let limit = match op {
        Op::Get => u64::from(u32::MAX),
        Op::Set => 1 << 30,
    };
    match url.is_rpc() && len_max > limit {
        true => Err(format!("values of {len_max} octets: one call carries {limit} at most")),
        false => Ok(()),
    }
}
