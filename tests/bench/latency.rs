//! From COMMIT to a message that a consumer has, at a fixed rate of single-event transactions, and from
//! the start of the process to its first message.
//!
//! The writers keep a timetable: one that is late does not put off the next event, and the time it was
//! late is not in the figures, because the clock of an event starts when its COMMIT has returned. With
//! `synchronous_commit = on` that is about when the server may send it.

use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant};

use crate::arrivals;
use crate::backlog::{self, Backlog, Workload};
use crate::contenders::{Contender, Job, Running, Transport};
use crate::figures::Figure;
use crate::processes;
use crate::site::Site;
use crate::support::servers;
use crate::support::tally::{NUMBERED, Tally};

const WRITERS: u64 = 8;
/// Writers must share no key, so that each key's events are committed in the order of their numbers.
const KEYS: u64 = WRITERS * 100;

/// Event `$1`.
fn insert() -> String {
    format!(
        "INSERT INTO outbox_event (event_id, order_id, revision, event_type, payload)
         SELECT {NUMBERED}, 'OrderPaid', jsonb_build_object('orderId', n, 'note', repeat('x', 180))
         FROM (SELECT $1::bigint AS n, {KEYS}::bigint AS keys)"
    )
}

/// Microseconds since the first event was due; -1: not yet.
struct Times {
    sent: Vec<AtomicI64>,
    committed: Vec<AtomicI64>,
}

/// Names of the workloads.
pub const FIRST_MESSAGE: &str = "first_message";
pub const RATES_PER_S: [(u64, &str); 3] = [(100, "100_per_s"), (1_000, "1000_per_s"), (5_000, "5000_per_s")];

pub fn latency(
    contender: Contender,
    (rate_per_s, workload): (u64, &str),
    seconds: u64,
    warm_up_s: u64,
    site: &Site,
) -> Figure {
    let events = rate_per_s * (warm_up_s + seconds);
    let mut bench = Bench::new(events, site);
    let mut figure = Figure::new("latency", contender.name(), Transport::Tcp.name(), workload);
    figure.events = events;
    let process = bench.start(contender, site);
    bench.wait_until_streaming(&process);

    let times = Times {
        sent: (0..events).map(|_| AtomicI64::new(-1)).collect(),
        committed: (0..events).map(|_| AtomicI64::new(-1)).collect(),
    };
    let mut readable = vec![-1_i64; events as usize];
    let consumer = arrivals::consumer(&site.kafka.brokers(), &bench.topic.name);
    let mut tally = Tally::new(events, KEYS);
    let _ = consumer.poll(Duration::from_secs(1)); // it knows its partitions then
    let began = Instant::now() + Duration::from_millis(100);
    let micros = |at: Instant| at.saturating_duration_since(began).as_micros() as i64;
    std::thread::scope(|scope| {
        for writer in 0..WRITERS {
            let (times, mut client) = (&times, bench.backlog.server.connect(bench.backlog.database()));
            scope.spawn(move || {
                client.batch_execute("SET synchronous_commit = on").unwrap();
                let insert = client.prepare(&insert()).unwrap();
                for n in (writer..events).step_by(WRITERS as usize) {
                    let due = began + Duration::from_nanos(n * 1_000_000_000 / rate_per_s);
                    std::thread::sleep(due.saturating_duration_since(Instant::now()));
                    times.sent[n as usize].store(micros(Instant::now()), Ordering::Relaxed);
                    client.execute(&insert, &[&n.cast_signed()]).unwrap();
                    times.committed[n as usize].store(micros(Instant::now()), Ordering::Relaxed);
                }
            });
        }
        let (mut open, mut last_progress) = (events, Instant::now());
        let limit = Duration::from_secs(60);
        while open > 0 && last_progress.elapsed() < limit {
            if let Some(Ok(message)) = consumer.poll(Duration::from_millis(100)) {
                last_progress = Instant::now();
                if let Some(n) = arrivals::take(&mut tally, &message)
                    && readable[n as usize] < 0
                {
                    readable[n as usize] = micros(last_progress);
                    open -= 1;
                }
            }
        }
    });
    figure.count(tally.counts());
    figure.cpu_us_per_event = processes::usage(process.pid()).map(|u| u.cpu_s * 1e6 / events as f64);
    figure.rss_peak_bytes = processes::rss_peak_bytes(process.pid());
    bench.end(process, &mut figure);

    let counted = (rate_per_s * warm_up_s) as usize..events as usize;
    let since = |times: &[AtomicI64]| -> Vec<f64> {
        let since = |n: usize| (readable[n] - times[n].load(Ordering::Relaxed)) as f64 / 1e3;
        let mut all: Vec<f64> = counted.clone().map(since).collect();
        all.sort_by(f64::total_cmp);
        all
    };
    let (committed, sent) = (since(&times.committed), since(&times.sent));
    let quantile = |sorted: &[f64], of: f64| Some(sorted[((sorted.len() - 1) as f64 * of).round() as usize]);
    figure.p50_ms = quantile(&committed, 0.5);
    figure.p99_ms = quantile(&committed, 0.99);
    figure.max_ms = quantile(&committed, 1.0);
    figure.p50_from_send_ms = quantile(&sent, 0.5);
    figure.p99_from_send_ms = quantile(&sent, 0.99);
    let last = times.committed.iter().map(|t| t.load(Ordering::Relaxed)).max().unwrap_or(0);
    let reached_per_s = events as f64 * 1e6 / last as f64;
    figure.rate_per_s = Some(reached_per_s);
    if reached_per_s < 0.95 * rate_per_s as f64 {
        figure.fail(&format!("the writers reached only {reached_per_s:.0} commits a second"));
    }
    figure
}

/// An event is waiting; the process is started; a consumer that is already there has the message.
pub fn start_up(contender: Contender, times: u64, site: &Site) -> Figure {
    let mut figure = Figure::new("startup", contender.name(), Transport::Tcp.name(), FIRST_MESSAGE);
    figure.events = times;
    let mut bench = Bench::new(times, site);
    let consumer = arrivals::consumer(&site.kafka.brokers(), &bench.topic.name);
    let mut tally = Tally::new(times, KEYS);
    let mut all = Vec::new();
    let insert = bench.backlog.client.prepare(&insert()).unwrap();
    for n in 0..times {
        bench.backlog.client.execute(&insert, &[&n.cast_signed()]).unwrap();
        let _ = consumer.poll(Duration::from_millis(500));
        let began = Instant::now();
        let process = bench.start(contender, site);
        loop {
            assert!(began.elapsed() < Duration::from_secs(60), "no message: {}", process.last_words());
            if let Some(Ok(message)) = consumer.poll(Duration::from_millis(100)) {
                let elapsed = began.elapsed();
                if arrivals::take(&mut tally, &message) == Some(n) {
                    all.push((elapsed - bench.prepared_in).as_secs_f64() * 1e3);
                    break;
                }
            }
        }
        figure.rss_peak_bytes = processes::rss_peak_bytes(process.pid());
        bench.stop(process, &mut figure);
    }
    bench.topic.delete();
    figure.count(tally.counts());
    figure.p50_ms = crate::figures::median(&all);
    figure.max_ms = all.iter().copied().reduce(f64::max);
    figure
}

/// A server with an empty outbox, a slot, a topic.
struct Bench {
    backlog: Backlog,
    slot: String,
    topic: crate::support::oracle::Topic,
    /// What an operator does before the start takes no part in the start-up time.
    prepared_in: Duration,
}

impl Bench {
    fn new(events: u64, site: &Site) -> Self {
        let workload = Workload { name: "steady", says: "", events, transaction_events: 1, fill_bytes: 180 };
        let mut backlog = Backlog::empty(backlog::server(None), workload);
        let slot = backlog.copy_slot();
        let topic =
            arrivals::create_topic(&site.kafka.brokers(), &format!("bench_{}_steady", backlog.server.port));
        Bench { backlog, slot, topic, prepared_in: Duration::ZERO }
    }

    fn start(&mut self, contender: Contender, site: &Site) -> Running {
        let began = Instant::now();
        let folder = servers::folder(contender.name());
        let job = Job {
            site,
            backlog: &self.backlog,
            transport: Transport::Tcp,
            slot: &self.slot,
            brokers: &self.topic.brokers,
            topic: &self.topic.name,
            linger_ms: 0,
        };
        let command = job.prepare(contender, &folder);
        self.prepared_in = began.elapsed();
        Running::start(command, &folder)
    }

    fn wait_until_streaming(&mut self, process: &Running) {
        crate::support::eventually("it streams", || {
            assert!(!process.has_ended(), "{}", process.last_words());
            self.backlog.walsender(&self.slot)
        });
    }

    fn stop(&mut self, mut process: Running, figure: &mut Figure) {
        if let Err(e) = process.stop() {
            figure.fail(&e);
        }
        crate::support::eventually("the slot is free", || {
            self.backlog.walsender(&self.slot).is_none().then_some(())
        });
    }

    fn end(&mut self, process: Running, figure: &mut Figure) {
        self.stop(process, figure);
        self.topic.delete();
    }
}
