//! Draining a backlog: how fast, at what cost, and is everything there.

use std::process::Child;
use std::time::{Duration, Instant, SystemTime};

use crate::arrivals::{self, Arrivals};
use crate::backlog::Backlog;
use crate::contenders::{Contender, Job, Transport};
use crate::figures::Figure;
use crate::processes;
use crate::support::servers::Kafka;
use crate::support::tally::Tally;
use crate::support::worker::Worker;

/// A drain that makes no progress for so long has failed.
const PATIENCE: Duration = Duration::from_secs(120);
/// The part of a drain that is shown apart where a contender starts cold.
const COLD_EVENTS: u64 = 100_000;

pub fn drain(contender: Contender, transport: Transport, backlog: &mut Backlog, kafka: &Kafka) -> Figure {
    let slot = backlog.copy_slot();
    let mut figure = Figure {
        experiment: "drain".to_owned(),
        contender: contender.name().to_owned(),
        transport: transport.name().to_owned(),
        workload: backlog.workload.name.to_owned(),
        events: backlog.workload.events,
        ..Figure::default()
    };
    match contender {
        Contender::Floor => floor(&mut figure, transport, backlog, &slot),
        Contender::Tailer => publish(&mut figure, transport, backlog, kafka, &slot),
    }
    backlog.drop_slot(&slot);
    figure
}

/// Reads to the end of the backlog and ends; nothing arrives anywhere.
fn floor(figure: &mut Figure, transport: Transport, backlog: &mut Backlog, slot: &str) {
    let postmaster = backlog.postmaster();
    let mut command = Job { backlog, transport, slot, brokers: "", topic: "" }.pg_recvlogical();
    let children_before = children_cpu_s(postmaster);
    let mut process = Ended(command.spawn().unwrap());
    let pid = process.0.id().cast_signed();
    let streaming = Streaming::wait(backlog, slot);
    let mut rss_peak_bytes = None;
    while !processes::has_ended(pid) {
        rss_peak_bytes = processes::rss_peak_bytes(pid).or(rss_peak_bytes);
        std::thread::sleep(Duration::from_millis(5)); // polls a condition
    }
    let seconds = streaming.since.elapsed().as_secs_f64();
    let events = figure.events as f64;
    figure.cpu_us_per_event = processes::usage(pid).map(|u| u.cpu_s * 1e6 / events);
    let status = process.0.wait().unwrap();
    // Its times are added to the postmaster's when it has been reaped.
    crate::support::eventually("the walsender ends", || {
        processes::usage(streaming.walsender).is_none().then_some(())
    });
    figure.walsender_cpu_us_per_event = Some((children_cpu_s(postmaster) - children_before) * 1e6 / events);
    figure.events_per_s = Some(events / seconds);
    figure.slot_after_ms = Some(streaming.after.as_secs_f64() * 1e3);
    figure.rss_peak_bytes = rss_peak_bytes;
    if !status.success() {
        figure.failed = Some(format!("pg_recvlogical ended with {status}"));
    }
}

/// Publishes to the end of the backlog, and is stopped then.
fn publish(figure: &mut Figure, transport: Transport, backlog: &mut Backlog, kafka: &Kafka, slot: &str) {
    let brokers = kafka.brokers();
    let topic = arrivals::create_topic(&brokers, &format!("{slot}_{}", std::process::id()));
    let job = Job { backlog, transport, slot, brokers: &brokers, topic: &topic.name };
    let config = job.tailer_config();
    let mut command = job.tailer(&config);
    let broker_before = processes::usage(kafka.pid()).unwrap().cpu_s;
    let mut worker = Worker::spawn(&mut command);
    let streaming = Streaming::wait(backlog, slot);
    let events = figure.events as f64;

    let (mut count, mut last_progress) = (0, Instant::now());
    while count < figure.events && last_progress.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_millis(100)); // polls a condition
        let now = topic.count().cast_unsigned();
        if now > count {
            (count, last_progress) = (now, Instant::now());
        }
    }
    let per_event = |usage: Option<processes::Usage>| usage.map(|u| u.cpu_s * 1e6 / events);
    figure.cpu_us_per_event = per_event(processes::usage(worker.pid()));
    figure.walsender_cpu_us_per_event = per_event(processes::usage(streaming.walsender));
    figure.broker_cpu_us_per_event =
        processes::usage(kafka.pid()).map(|u| (u.cpu_s - broker_before) * 1e6 / events);
    figure.rss_peak_bytes = processes::rss_peak_bytes(worker.pid());
    figure.slot_after_ms = Some(streaming.after.as_secs_f64() * 1e3);
    worker.stop();
    drop(std::fs::remove_dir_all(config.parent().unwrap()));

    let mut tally = Tally::new(backlog.workload.events, backlog.workload.keys());
    let arrived = Arrivals::read(&topic, &mut tally);
    topic.delete();
    let counts = tally.counts();
    let rate = |events: u64| Some(events as f64 * 1e3 / (arrived.nth_ms(events)? - streaming.since_ms) as f64);
    figure.events_per_s = rate(count.max(figure.events));
    figure.first_100_000_events_per_s = rate(COLD_EVENTS);
    figure.lost = Some(counts.lost);
    figure.inverted = Some(counts.inverted);
    figure.repeats = Some(counts.repeats);
    figure.foreign = Some(counts.foreign);
    if !counts.kept_the_promise() {
        figure.failed = Some(format!("{counts:?}"));
    } else if backlog.confirmed(slot) < backlog.end {
        figure.failed = Some("the slot was not confirmed to the end".to_owned());
    }
}

fn children_cpu_s(pid: i32) -> f64 {
    processes::usage(pid).map_or(0.0, |u| u.children_cpu_s)
}

/// The moment the contender has the slot: the same for all, and before the server decodes anything.
struct Streaming {
    walsender: i32,
    since: Instant,
    since_ms: i64,
    /// The process was started.
    after: Duration,
}

impl Streaming {
    fn wait(backlog: &mut Backlog, slot: &str) -> Self {
        let began = Instant::now();
        loop {
            let walsender = backlog.walsender(slot);
            let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
            if let Some(walsender) = walsender {
                let since_ms = i64::try_from(now.as_millis()).unwrap();
                return Streaming { walsender, since: Instant::now(), since_ms, after: began.elapsed() };
            }
            assert!(began.elapsed() < PATIENCE, "nobody takes the slot");
            std::thread::sleep(Duration::from_millis(1)); // polls a condition
        }
    }
}

/// Killed when dropped.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
