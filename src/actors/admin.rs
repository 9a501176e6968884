//! The admin port: metrics as OpenMetrics text on `/metrics`, health on `/healthz`.
//!
//! Nothing is counted here. The text is made from the counters and gauges of the other parts at the moment it is asked
//! for, so the data path keeps its plain atomics. Names are `bulkhead_<part>_<what>_<unit>`; what differs by its cause
//! alone is one metric with a label `cause`, octets copied by the way they went one with a label `where`.

use crate::actors::StartError;
use crate::actors::disk_tail::TailMetrics;
use crate::fabric::staging::Staging;
use crate::fabric::{self, Resources};
use crate::metrics::{CloseCounts, ConnectionCounts, Count, FabricCounts, Metrics, RpcCallCounts};
use crate::store::{Counters, Gauges, Store};
use actix_web::dev::ServerHandle;
use actix_web::{App, HttpResponse, HttpServer, web};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, text};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::{Registry, Unit};
use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

/// What the port shows; clones show the same.
#[derive(Clone, Debug)]
pub struct Views {
    pub store: Store,
    pub metrics: Arc<Metrics>,
    pub tails: Arc<TailMetrics>,
    /// One for each lane.
    pub staging: Vec<Staging>,
    /// Lanes of doors on fabrics, for as long as those live.
    pub fabrics: Vec<Weak<dyn fabric::Lane>>,
    /// Set once a shutdown has begun.
    pub draining: Arc<AtomicBool>,
}

impl Views {
    /// Everything in OpenMetrics text, version 1.0.0.
    ///
    /// # Errors
    /// None in practice: writing to a `String` cannot fail.
    pub fn to_text(&self) -> Result<String, fmt::Error> {
        let mut registry = Registry::with_prefix("bulkhead");
        registry.register_collector(Box::new(self.clone()));
        let mut out = String::new();
        text::encode(&mut out, &registry)?;
        Ok(out)
    }
}

impl Collector for Views {
    fn encode(&self, encoder: DescriptorEncoder) -> fmt::Result {
        let mut page = Page { encoder };
        encode_gauges(&mut page, &self.store.gauges())?;
        encode_counters(&mut page, self.store.counters())?;
        encode_staging(&mut page, &self.staging)?;
        encode_fabrics(&mut page, &self.fabrics)?;
        encode_metrics(&mut page, &self.metrics)?;
        encode_tails(&mut page, &self.tails)?;
        encode_process(&mut page)
    }
}

/// The text as it grows, one metric at a time.
struct Page<'a> {
    encoder: DescriptorEncoder<'a>,
}

const BYTES: Option<Unit> = Some(Unit::Bytes);

impl Page<'_> {
    fn gauge(&mut self, name: &str, help: &str, unit: Option<Unit>, value: u64) -> fmt::Result {
        let gauge = ConstGauge::new(value);
        gauge.encode(self.encoder.encode_descriptor(name, help, unit.as_ref(), gauge.metric_type())?)
    }

    fn counter(&mut self, name: &str, help: &str, unit: Option<Unit>, value: u64) -> fmt::Result {
        let counter = ConstCounter::new(value);
        counter.encode(self.encoder.encode_descriptor(name, help, unit.as_ref(), counter.metric_type())?)
    }

    fn causes<'c>(&mut self, name: &str, help: &str, values: impl IntoIterator<Item = (&'c str, u64)>) -> fmt::Result {
        self.family(name, help, None, "cause", values)
    }

    fn family<'c>(
        &mut self,
        name: &str,
        help: &str,
        unit: Option<Unit>,
        label: &str,
        values: impl IntoIterator<Item = (&'c str, u64)>,
    ) -> fmt::Result {
        let kind = ConstCounter::new(0_u64).metric_type();
        let mut metric = self.encoder.encode_descriptor(name, help, unit.as_ref(), kind)?;
        for (word, value) in values {
            let labels = [(label, word)];
            ConstCounter::new(value).encode(metric.encode_family(&labels)?)?;
        }
        Ok(())
    }
}

fn load(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

// Each of these takes its struct apart by name and leaves nothing out, so a new field does not compile until it is shown.

fn encode_gauges(page: &mut Page<'_>, gauges: &Gauges) -> fmt::Result {
    let Gauges {
        objects,
        names,
        value_bytes,
        index_bytes,
        memory_bytes,
        memory_free_bytes,
        memory_dirty_bytes,
        memory_writing_bytes,
        memory_clean_bytes,
        memory_ram_only_bytes,
        pool_bytes,
        pool_used_bytes,
        extents,
        claims,
        claimed_bytes,
        writers_waiting,
        pins,
        pinned_bytes,
        held,
        held_bytes,
    } = *gauges;
    page.gauge("store_objects", "Values in the index", None, objects)?;
    page.gauge("store_names", "Keys in the ordered namespace, if a door needs one", None, names)?;
    page.gauge("store_value", "Octets of the values in the index", BYTES, value_bytes)?;
    page.gauge("store_index", "Octets that keys and records of values and segments take", BYTES, index_bytes)?;
    page.gauge("store_claims", "Claims of writers whose values are arriving", None, claims)?;
    page.gauge("store_claimed", "Octets promised by claims", BYTES, claimed_bytes)?;
    page.gauge("store_writers_waiting", "Writers waiting for a claim", None, writers_waiting)?;
    page.gauge("store_pins", "Pins of readers", None, pins)?;
    page.gauge("store_pinned", "Octets that readers keep from being evicted", BYTES, pinned_bytes)?;
    page.gauge("store_holds", "Values that peers asked to keep", None, held)?;
    page.gauge("store_held", "Octets of them, among those that are pinned", BYTES, held_bytes)?;
    page.gauge("arena_total", "Octets of RAM for values", BYTES, memory_bytes)?;
    page.gauge("arena_free", "Octets of the arena in no block", BYTES, memory_free_bytes)?;
    page.gauge("arena_dirty", "Octets of the arena still to be written to disk", BYTES, memory_dirty_bytes)?;
    page.gauge("arena_writing", "Octets of the arena being written to disk", BYTES, memory_writing_bytes)?;
    page.gauge("arena_clean", "Octets of the arena that are on disk as well", BYTES, memory_clean_bytes)?;
    page.gauge("arena_ram_only", "Octets of the arena that never go to disk", BYTES, memory_ram_only_bytes)?;
    page.gauge("pool_capacity", "Octets of extents the drives may hold", BYTES, pool_bytes)?;
    page.gauge("pool_used", "Octets of extents in use", BYTES, pool_used_bytes)?;
    page.gauge("pool_extents", "Extents in use", None, extents)
}

fn encode_counters(page: &mut Page<'_>, counters: &Counters) -> fmt::Result {
    let Counters {
        stored,
        evictions,
        evicted_bytes,
        evicted_unread,
        expired,
        expired_unread,
        flushed,
        lost,
        claims_revoked,
        claims_refused,
        written_behind_bytes,
        warmed,
        warmed_bytes,
        head_hits,
        head_misses,
    } = counters;
    page.counter("store_stored", "Values made visible", None, load(stored))?;
    page.causes(
        "store_removed",
        "Values that left the index without being deleted or replaced",
        [("evicted", load(evictions)), ("expired", load(expired)), ("flushed", load(flushed)), ("lost", load(lost))],
    )?;
    page.causes(
        "store_removed_unread",
        "Those of them that nobody had read",
        [("evicted", load(evicted_unread)), ("expired", load(expired_unread))],
    )?;
    page.counter("store_evicted", "Octets of values evicted", BYTES, load(evicted_bytes))?;
    page.counter("store_claims_revoked", "Claims taken back from idle writers", None, load(claims_revoked))?;
    page.counter("store_claims_refused", "Waits for space that took too long", None, load(claims_refused))?;
    page.counter(
        "store_written_behind",
        "Octets written to disk behind their writers",
        BYTES,
        load(written_behind_bytes),
    )?;
    page.counter("store_warmed", "Segments put back into RAM after a disk read", None, load(warmed))?;
    page.counter("store_warmed", "Octets of segments put back into RAM, a copy each", BYTES, load(warmed_bytes))?;
    page.counter("store_head_hits", "Reads whose first octet was in RAM", None, load(head_hits))?;
    page.counter("store_head_misses", "Reads whose first octet was on disk", None, load(head_misses))
}

fn encode_staging(page: &mut Page<'_>, staging: &[Staging]) -> fmt::Result {
    let sum = |count: fn(&Staging) -> usize| staging.iter().map(|lane| count(lane) as u64).sum();
    page.gauge("staging_buffers", "Buffers between disk and wire, of all lanes", None, sum(Staging::count))?;
    page.gauge("staging_free_buffers", "Those that nobody has", None, sum(Staging::available))
}

fn encode_fabrics(page: &mut Page<'_>, lanes: &[Weak<dyn fabric::Lane>]) -> fmt::Result {
    let mut sum = Resources::default();
    for lane in lanes.iter().filter_map(Weak::upgrade) {
        let Resources { queue_pairs, regions, half_open, listeners, closing } = lane.resources();
        sum.queue_pairs += queue_pairs;
        sum.regions += regions;
        sum.half_open += half_open;
        sum.listeners += listeners;
        sum.closing += closing;
    }
    page.gauge("fabric_queue_pairs", "Queue pairs of doors on fabrics", None, sum.queue_pairs as u64)?;
    page.gauge("fabric_regions", "Memory regions that peers may reach", None, sum.regions as u64)?;
    page.gauge("fabric_half_open", "Peers that have connected and not been answered", None, sum.half_open as u64)?;
    page.gauge("fabric_listeners", "Addresses that fabrics listen at", None, sum.listeners as u64)?;
    page.gauge("fabric_closing", "Sockets that wait for a peer's goodbye", None, sum.closing as u64)
}

fn encode_metrics(page: &mut Page<'_>, metrics: &Metrics) -> fmt::Result {
    let Metrics { memcache, connections, native, rpc, nfs, rpc_calls, copied, failed_reads, reads_repeated } = metrics;
    for named in memcache.list() {
        let help = named.help.trim_end_matches('.');
        page.counter(&format!("memcache_{}", named.name), help, None, named.count.get())?;
    }
    let ConnectionCounts { current, total, rejected, long_line_bytes, bytes_read, bytes_written, closed, messages } =
        connections;
    page.gauge("connection_current", "Connections open", None, current.get())?;
    page.counter("connection_accepted", "Connections served since the start", None, total.get())?;
    page.counter(
        "connection_refused",
        "Peers turned away: no place was free, or a door on a fabric could not take them",
        None,
        rejected.get(),
    )?;
    page.gauge("connection_long_line", "Octets of input buffers grown for long lines", BYTES, long_line_bytes.get())?;
    page.counter("connection_received", "Octets received from peers", BYTES, bytes_read.get())?;
    page.counter("connection_sent", "Octets sent to peers", BYTES, bytes_written.get())?;
    page.counter("connection_messages", "Messages between connections and other actors", None, messages.get())?;
    let CloseCounts { by_peer, by_quit, stalled, idle, protocol, failed_read, socket_error, shutdown } = closed;
    let causes: [(&str, &Count); 8] = [
        ("by_peer", by_peer),
        ("by_quit", by_quit),
        ("stalled", stalled),
        ("idle", idle),
        ("protocol", protocol),
        ("failed_read", failed_read),
        ("socket_error", socket_error),
        ("shutdown", shutdown),
    ];
    page.causes("connection_closed", "Connections ended", causes.map(|(cause, count)| (cause, count.get())))?;
    encode_fabric_counts(page, "native", "a native door", native)?;
    encode_fabric_counts(page, "rpc", "an RPC door", rpc)?;
    encode_fabric_counts(page, "nfs", "an NFS door on TCP", nfs)?;
    let RpcCallCounts { procedures, nfs, mount, refused, denied, dropped, replayed } = rpc_calls;
    page.family("rpc_calls", "Calls executed", None, "procedure", procedures.list())?;
    page.family("nfs_calls", "Calls of NFS executed", None, "procedure", nfs.list())?;
    page.family("mount_calls", "Calls of MOUNT executed", None, "procedure", mount.list())?;
    page.causes("rpc_calls_refused", "Messages answered with RDMA_ERROR", refused.list())?;
    page.causes("rpc_calls_denied", "Calls whose reply says that they were not executed", denied.list())?;
    page.causes("rpc_messages_dropped", "Messages of RPC clients that were not answered", dropped.list())?;
    page.counter("rpc_calls_replayed", "Duplicates answered as the first was", None, replayed.get())?;
    let copies = copied.list().map(|named| (named.name, named.count.get()));
    page.family("copied", "Octets of values copied, besides what kernel and fabric do", BYTES, "where", copies)?;
    page.counter("store_failed_reads", "Disk reads for peers that failed", None, failed_reads.get())?;
    page.counter("staging_reads_repeated", "Disk reads given back unsent for others' sake", None, reads_repeated.get())
}

fn encode_fabric_counts(page: &mut Page<'_>, kind: &str, door: &str, counts: &FabricCounts) -> fmt::Result {
    let FabricCounts { current, total, rejections, ends } = counts;
    page.gauge(&format!("{kind}_connection_current"), &format!("Connections open by {door}"), None, current.get())?;
    page.counter(&format!("{kind}_connection_accepted"), &format!("Connections served by {door}"), None, total.get())?;
    page.causes(&format!("{kind}_connection_rejected"), &format!("Peers that {door} turned away"), rejections.list())?;
    page.causes(&format!("{kind}_connection_closed"), &format!("Connections of {door} that ended"), ends.list())
}

fn encode_tails(page: &mut Page<'_>, tails: &TailMetrics) -> fmt::Result {
    let TailMetrics {
        reads,
        writes,
        read_bytes,
        write_bytes,
        read_errors,
        write_errors,
        checksum_failures,
        cancelled,
        in_flight,
        waiting,
    } = tails;
    page.counter("disk_reads", "Segments read and found good", None, load(reads))?;
    page.counter("disk_writes", "Segments written", None, load(writes))?;
    page.counter("disk_read", "Octets of segments read", BYTES, load(read_bytes))?;
    page.counter("disk_written", "Octets of segments written", BYTES, load(write_bytes))?;
    page.causes(
        "disk_failed",
        "Reads and writes of segments that failed",
        [
            ("read_error", load(read_errors)),
            ("write_error", load(write_errors)),
            ("checksum", load(checksum_failures)),
            ("cancelled", load(cancelled)),
        ],
    )?;
    page.gauge("disk_in_flight", "Operations that the drives have", None, load(in_flight))?;
    page.gauge("disk_waiting", "Reads and writes waiting for a place at their drive", None, load(waiting))
}

fn encode_process(page: &mut Page<'_>) -> fmt::Result {
    page.gauge("process_descriptors", "Open file descriptors", None, descriptors())?;
    page.gauge("process_resident_memory", "Resident memory", BYTES, resident_bytes())
}

/// Open descriptors of this process; 0 where /proc is missing.
fn descriptors() -> u64 {
    // One of them is that of the listing itself.
    std::fs::read_dir("/proc/self/fd").map_or(0, |entries| (entries.count() as u64).saturating_sub(1))
}

/// Resident memory of this process, in octets; 0 where /proc is missing.
fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|rest| rest.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()).unwrap_or(0) << 10
}

pub(super) fn bind(address: SocketAddr) -> Result<(String, TcpListener), StartError> {
    let failed = |source| StartError::Bind { url: format!("http://{address}"), source };
    let socket = TcpListener::bind(address).map_err(failed)?;
    let bound = socket.local_addr().map_err(failed)?;
    Ok((format!("http://{bound}/metrics"), socket))
}

/// Connections of the port at once; others wait to be accepted. Without a bound they could take every descriptor.
const CONNECTIONS_MAX: usize = 64;

pub(super) fn serve(socket: TcpListener, views: Views) -> io::Result<ServerHandle> {
    let server = HttpServer::new(move || {
        App::new()
            .app_data(web::Data::new(views.clone()))
            .route("/metrics", web::get().to(metrics))
            .route("/healthz", web::get().to(healthz))
    })
    .workers(1)
    .max_connections(CONNECTIONS_MAX)
    .disable_signals()
    .listen(socket)?
    .run();
    let handle = server.handle();
    actix::spawn(async move {
        if let Err(error) = server.await {
            tracing::error!(%error, "the admin port ended");
        }
    });
    Ok(handle)
}

async fn healthz(views: web::Data<Views>) -> HttpResponse {
    if views.draining.load(Ordering::Relaxed) {
        HttpResponse::ServiceUnavailable().content_type("text/plain").body("draining\n")
    } else {
        HttpResponse::Ok().content_type("text/plain").body("ok\n")
    }
}

async fn metrics(views: web::Data<Views>) -> HttpResponse {
    match views.to_text() {
        Ok(text) => {
            HttpResponse::Ok().content_type("application/openmetrics-text; version=1.0.0; charset=utf-8").body(text)
        }
        Err(error) => HttpResponse::InternalServerError().content_type("text/plain").body(format!("{error}\n")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Sizes;
    use crate::store::rig::with_pools;
    use std::collections::HashMap;

    fn page(encode: impl Fn(&mut Page<'_>) -> fmt::Result + Send + Sync + 'static) -> String {
        struct Part<F>(F);
        impl<F> fmt::Debug for Part<F> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("Part")
            }
        }
        impl<F: Fn(&mut Page<'_>) -> fmt::Result + Send + Sync + 'static> Collector for Part<F> {
            fn encode(&self, encoder: DescriptorEncoder) -> fmt::Result {
                (self.0)(&mut Page { encoder })
            }
        }
        let mut registry = Registry::with_prefix("bulkhead");
        registry.register_collector(Box::new(Part(encode)));
        let mut out = String::new();
        text::encode(&mut out, &registry).unwrap();
        out
    }

    /// Samples by name and labels. Checks the form of the text on the way.
    fn parse(text: &str) -> HashMap<String, u64> {
        let mut samples = HashMap::new();
        let mut family = String::new();
        let mut lines = text.lines().peekable();
        while let Some(line) = lines.next() {
            if line == "# EOF" {
                assert_eq!(lines.next(), None, "nothing follows the end");
                return samples;
            }
            if let Some(rest) = line.strip_prefix("# HELP ") {
                let (name, help) = rest.split_once(' ').unwrap();
                assert!(name.starts_with("bulkhead_") && help.len() > 8, "{line}");
                family = name.to_owned();
            } else if let Some(rest) = line.strip_prefix("# TYPE ") {
                let kind = rest.strip_prefix(&family).unwrap().trim();
                assert!(kind == "gauge" || kind == "counter", "{line}");
            } else if let Some(rest) = line.strip_prefix("# UNIT ") {
                assert_eq!(rest, format!("{family} bytes"));
                assert!(family.ends_with("_bytes"));
            } else {
                let (name, value) = line.rsplit_once(' ').unwrap();
                assert!(name.starts_with(&family), "{line} belongs to {family}");
                let known = samples.insert(name.to_owned(), value.parse().expect(line));
                assert_eq!(known, None, "{name} is there once");
            }
        }
        panic!("no end: {text}");
    }

    fn store() -> Store {
        let (memory_bytes, pool_bytes) = (16 << 20, vec![64 << 20]);
        let sizes = Sizes { memory_bytes, value_bytes_max: 1 << 30, pinned_share: 0.5, pool_bytes, ..Sizes::small() };
        with_pools(Store::new, sizes)
    }

    fn views() -> Views {
        Views {
            store: store(),
            metrics: Arc::default(),
            tails: Arc::default(),
            staging: vec![Staging::new(2).unwrap(), Staging::new(3).unwrap()],
            fabrics: Vec::new(),
            draining: Arc::default(),
        }
    }

    /// Every number from `first` to `last` is the value of exactly one sample.
    fn assert_shows(text: &str, first: u64, last: u64) {
        let mut values: Vec<u64> = parse(text).into_values().collect();
        values.sort_unstable();
        assert_eq!(values, (first..=last).collect::<Vec<_>>(), "{text}");
    }

    #[test]
    fn every_gauge_of_the_store_is_shown_once() {
        let gauges = Gauges {
            objects: 1,
            value_bytes: 2,
            index_bytes: 3,
            memory_bytes: 4,
            memory_free_bytes: 5,
            memory_dirty_bytes: 6,
            memory_writing_bytes: 7,
            memory_clean_bytes: 8,
            memory_ram_only_bytes: 9,
            pool_bytes: 10,
            pool_used_bytes: 11,
            claims: 12,
            claimed_bytes: 13,
            writers_waiting: 14,
            pins: 15,
            pinned_bytes: 16,
            extents: 17,
            names: 18,
            held: 19,
            held_bytes: 20,
        };
        assert_shows(&page(move |page| encode_gauges(page, &gauges)), 1, 20);
    }

    #[test]
    fn every_counter_of_the_store_is_shown_once() {
        let counters = Counters {
            stored: 1.into(),
            evictions: 2.into(),
            evicted_bytes: 3.into(),
            evicted_unread: 4.into(),
            expired: 5.into(),
            expired_unread: 6.into(),
            flushed: 7.into(),
            lost: 8.into(),
            claims_revoked: 9.into(),
            claims_refused: 10.into(),
            written_behind_bytes: 11.into(),
            warmed: 12.into(),
            warmed_bytes: 13.into(),
            head_hits: 14.into(),
            head_misses: 15.into(),
        };
        assert_shows(&page(move |page| encode_counters(page, &counters)), 1, 15);
    }

    #[test]
    fn every_count_of_a_disk_is_shown_once() {
        let tails = TailMetrics {
            reads: 1.into(),
            writes: 2.into(),
            read_bytes: 3.into(),
            write_bytes: 4.into(),
            read_errors: 5.into(),
            write_errors: 6.into(),
            checksum_failures: 7.into(),
            cancelled: 8.into(),
            in_flight: 9.into(),
            waiting: 10.into(),
        };
        assert_shows(&page(move |page| encode_tails(page, &tails)), 1, 10);
    }

    #[test]
    fn every_count_of_commands_and_connections_is_shown_once() {
        let metrics = Metrics::default();
        let (connections, closed) = (&metrics.connections, &metrics.connections.closed);
        let others = [
            &connections.current,
            &connections.total,
            &connections.rejected,
            &connections.long_line_bytes,
            &connections.bytes_read,
            &connections.bytes_written,
            &connections.messages,
            &closed.by_peer,
            &closed.by_quit,
            &closed.stalled,
            &closed.idle,
            &closed.protocol,
            &closed.failed_read,
            &closed.socket_error,
            &closed.shutdown,
            &metrics.native.current,
            &metrics.native.total,
            &metrics.rpc.current,
            &metrics.rpc.total,
            &metrics.nfs.current,
            &metrics.nfs.total,
            &metrics.rpc_calls.replayed,
            &metrics.failed_reads,
            &metrics.reads_repeated,
        ];
        let listed = metrics.memcache.list().chain(metrics.copied.list()).map(|named| named.count);
        let counts = listed.chain(others);
        let last = counts.zip(1..).map(|(count, number)| (count.add(number), number).1).last().unwrap();
        assert_eq!(format!("{metrics:?}").matches(": Count(").count() as u64, last, "this test knows every field");
        assert_shows(&page(move |page| encode_metrics(page, &metrics)), 1, last);
    }

    #[test]
    fn gauges_follow_a_put_a_pin_and_a_delete() {
        let views = views();
        let samples = || parse(&views.to_text().unwrap());
        let before = samples();
        assert_eq!(before["bulkhead_store_objects"], 0);
        assert_eq!(before["bulkhead_arena_free_bytes"], before["bulkhead_arena_total_bytes"]);

        views.store.put(b"key", &[7; 100_000], 0, 0).unwrap();
        let pinned = views.store.get(b"key", 1);
        let stored = samples();
        assert_eq!(stored["bulkhead_store_objects"], 1);
        assert_eq!(stored["bulkhead_store_value_bytes"], 100_000);
        assert!(stored["bulkhead_arena_free_bytes"] <= before["bulkhead_arena_free_bytes"] - 100_000);
        assert_eq!(stored["bulkhead_store_pins"], 1);
        assert!(stored["bulkhead_store_pinned_bytes"] >= 100_000);
        assert_eq!(stored["bulkhead_store_stored_total"], 1);

        drop(pinned);
        assert!(views.store.delete(b"key", 1));
        let mut after = samples();
        for name in
            ["bulkhead_store_stored_total", "bulkhead_process_resident_memory_bytes", "bulkhead_process_descriptors"]
        {
            after.insert(name.to_owned(), before[name]);
        }
        assert_eq!(after, before, "everything but the counters and the process is as before");
    }

    #[test]
    fn staging_and_the_process_are_shown() {
        let views = views();
        let _held = views.staging[1].try_take().unwrap();
        let before = parse(&views.to_text().unwrap());
        assert_eq!((before["bulkhead_staging_buffers"], before["bulkhead_staging_free_buffers"]), (5, 4));
        assert!(before["bulkhead_process_resident_memory_bytes"] > 1 << 20);
        assert!(before["bulkhead_process_descriptors"] >= 3);
    }
}
