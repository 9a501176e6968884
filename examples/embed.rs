//! Another actix service that embeds Bulkhead: `cargo run --example embed`.
//!
//! The service makes reports. Its actor keeps them in the store directly, and a client of the same process, in the place
//! of some other program, reads and writes the same objects over TCP.
//!
//! ```text
//!  this service                          Bulkhead, on its own lanes
//!  Reports --- Local::get, put ------------> store <--- Connection <--- TCP --- Client
//!          `-- Store::draft, fill, commit -----^
//! ```

use std::error::Error;

use actix::prelude::*;
use bulkhead::actors::local::{Local, LocalError};
use bulkhead::actors::start;
use bulkhead::client::{Client, Options, ServerUrl};
use bulkhead::config::Config;
use bulkhead::store::segment::Content;
use bulkhead::store::{Committed, Condition, Lookup, Store};

/// The report of one day.
#[derive(Message)]
#[rtype(result = "Result<Vec<u8>, LocalError>")]
struct Report {
    day: u32,
}

/// The service's own actor: makes each report once and keeps it in Bulkhead.
struct Reports {
    objects: Local,
    made: u32,
}

impl Actor for Reports {
    type Context = Context<Self>;
}

impl Handler<Report> for Reports {
    type Result = ResponseActFuture<Self, Result<Vec<u8>, LocalError>>;

    fn handle(&mut self, Report { day }: Report, _: &mut Self::Context) -> Self::Result {
        let objects = self.objects.clone();
        let answer = async move {
            let key = format!("report/{day}");
            if let Some(report) = objects.get(key.as_bytes()).await? {
                return Ok((report, false));
            }
            let report = format!("report of day {day}\n").repeat(100_000).into_bytes();
            objects.put(key.as_bytes(), &report, 0, 0).await?;
            Ok::<_, LocalError>((report, true))
        };
        Box::pin(answer.into_actor(self).map(|answer, actor, _| {
            let (report, fresh) = answer?;
            actor.made += u32::from(fresh);
            Ok(report)
        }))
    }
}

/// How many reports were made.
#[derive(Message)]
#[rtype(result = "u32")]
struct Made;

impl Handler<Made> for Reports {
    type Result = u32;

    fn handle(&mut self, _: Made, _: &mut Self::Context) -> u32 {
        self.made
    }
}

/// The store's own calls, for octets that come in parts: here each part is made right in the store's memory.
fn store_squares(store: &Store, key: &[u8], count: u32) -> Result<u64, Box<dyn Error>> {
    let mut octets = (0..count).flat_map(|number| number.wrapping_mul(number).to_le_bytes());
    let mut draft = store.draft(u64::from(count) * 4, None);
    while let Some(want) = draft.want() {
        // `Err` says that nothing is free at once; `Local::put` waits for it.
        draft.begin(store.fill(want)?);
        while !draft.spare().is_empty() {
            let spare = draft.spare();
            spare.iter_mut().zip(&mut octets).for_each(|(place, octet)| *place = octet);
            let filled = spare.len();
            draft.advance(filled);
        }
    }
    match store.commit(key, draft, 0, 0, Condition::Absent, store.clock().now()) {
        Committed::Stored { version } => Ok(version),
        refused => Err(format!("not stored: {refused:?}").into()),
    }
}

/// The sum of all octets of a value, without a copy of it. The pin keeps the value as it is meanwhile.
fn sum(store: &Store, key: &[u8]) -> Option<u64> {
    let Lookup::Hit(pinned) = store.get(key, store.clock().now()) else { return None };
    let mut total = 0;
    for piece in pinned.pieces() {
        // What has gone to disk already is for `Local::read`.
        let Content::Ram(ram) = piece.segment.content() else { return None };
        total += piece.octets(&ram).iter().map(|octet| u64::from(*octet)).sum::<u64>();
    }
    Some(total)
}

/// Another program, as far as Bulkhead can tell.
fn other_program(url: ServerUrl) -> Result<(Vec<u8>, Vec<u8>), Box<dyn Error + Send + Sync>> {
    let mut client = Client::connect(url, Options::default())?;
    let (mut report, mut squares) = (Vec::new(), Vec::new());
    client.get("report/7", &mut report)?.ok_or("the report is missing")?;
    client.get("squares", &mut squares)?.ok_or("the squares are missing")?;
    client.put("report/8", &mut &b"made elsewhere"[..], 14, 0, None)?;
    Ok((report, squares))
}

#[actix::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let dir = tempfile::tempdir()?;
    let bulkhead = start(Config::small(dir.path().join("pool"))).await?;
    for door in bulkhead.doors() {
        println!("embedded: {door}");
    }

    let reports = Reports { objects: bulkhead.local().clone(), made: 0 }.start();
    let first = reports.send(Report { day: 7 }).await??;
    store_squares(bulkhead.store(), b"squares", 500_000)?;

    let url = bulkhead.doors()[0].parse()?;
    let other = tokio::task::spawn_blocking(move || other_program(url)).await?;
    let (report, squares) = other.map_err(|error| error.to_string())?;
    assert_eq!(report, first, "the peer reads what the actor stored");
    let total = squares.iter().map(|octet| u64::from(*octet)).sum();
    assert_eq!(sum(bulkhead.store(), b"squares"), Some(total), "both read the same octets");

    assert_eq!(reports.send(Report { day: 7 }).await??, first);
    assert_eq!(reports.send(Report { day: 8 }).await??, b"made elsewhere", "the actor reads what the peer stored");
    assert_eq!(reports.send(Made).await?, 1, "everything else came from the store");
    println!(
        "embedded: {} objects, {} octets",
        bulkhead.store().gauges().objects,
        bulkhead.store().gauges().value_bytes
    );

    bulkhead.shutdown().await;
    println!("embedded: stopped");
    Ok(())
}
