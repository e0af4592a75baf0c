//! Draining a backlog: how fast, at what cost, and is everything there.

use std::time::{Duration, Instant, SystemTime};

use crate::arrivals::{self, Arrivals, Counter};
use crate::backlog::Backlog;
use crate::contenders::{Contender, Job, Running, Transport};
use crate::figures::Figure;
use crate::mock::MockBroker;
use crate::processes;
use crate::site::Site;
use crate::support::oracle::Topic;
use crate::support::servers::{self, Kafka};
use crate::support::tally::Tally;
use crate::support::within;

/// A drain that makes no progress for so long has failed.
const PATIENCE: Duration = Duration::from_secs(120);
/// The part of a drain that is shown apart where a contender starts cold.
const COLD_EVENTS: u64 = 100_000;

pub fn drain(contender: Contender, transport: Transport, backlog: &mut Backlog, site: &Site) -> Figure {
    let slot = backlog.copy_slot();
    let folder = servers::folder(contender.name());
    let mut figure = Figure::new("drain", contender.name(), transport.name(), backlog.workload.name);
    figure.events = backlog.workload.events;
    let topic = format!("bench_{}_{slot}", backlog.server.port);
    match contender {
        Contender::Floor => {
            let job = Job { site, backlog, transport, slot: &slot, brokers: "", topic: "", linger_ms: 0 };
            let command = job.prepare(contender, &folder);
            floor(&mut figure, backlog, &slot, || Running::start(command, &folder));
        }
        Contender::TailerMock => {
            let mock = MockBroker::start(&topic);
            let topic =
                Topic { brokers: mock.brokers.clone(), name: topic, partitions: arrivals::PARTITIONS };
            let job = Job {
                site,
                backlog,
                transport,
                slot: &slot,
                brokers: &mock.brokers,
                topic: &topic.name,
                linger_ms: 0,
            };
            let command = job.prepare(contender, &folder);
            let streaming =
                publish(&mut figure, backlog, &slot, &topic, mock.pid(), || Running::start(command, &folder));
            // It keeps only the newest messages, so they can be counted, not read.
            let count = topic.count().cast_unsigned();
            figure.events_per_s = Some(figure.events as f64 / streaming.all_there.as_secs_f64());
            figure.lost = Some(figure.events.saturating_sub(count));
            figure.repeats = Some(count.saturating_sub(figure.events));
        }
        Contender::Tailer | Contender::Debezium => {
            let plain = site.kafka.brokers();
            let topic = arrivals::create_topic(&plain, &topic);
            let brokers = match (transport, &site.brokers_for_veth) {
                (Transport::Veth, Some(brokers)) => brokers,
                _ => &plain,
            };
            let job =
                Job { site, backlog, transport, slot: &slot, brokers, topic: &topic.name, linger_ms: 5 };
            let command = job.prepare(contender, &folder);
            let streaming = publish(&mut figure, backlog, &slot, &topic, site.kafka.pid(), || {
                Running::start(command, &folder)
            });
            check(&mut figure, backlog, &topic, Some(streaming.since_ms));
            topic.delete();
            if contender == Contender::Tailer && backlog.confirmed(&slot) < backlog.end {
                figure.fail("the slot was not confirmed to the end");
            }
        }
    }
    if figure.failed.is_none() {
        let _ = std::fs::remove_dir_all(&folder);
    }
    backlog.drop_slot(&slot);
    figure
}

/// Reads to the end of the backlog and ends; nothing arrives anywhere.
fn floor(figure: &mut Figure, backlog: &mut Backlog, slot: &str, start: impl FnOnce() -> Running) {
    let postmaster = backlog.postmaster();
    let children_cpu_s = || processes::usage(postmaster).map_or(0.0, |u| u.children_cpu_s);
    let children_before = children_cpu_s();
    let began = Instant::now();
    let mut process = start();
    let streaming = Streaming::wait(backlog, slot, &process, began);
    while !process.has_ended() {
        figure.rss_peak_bytes = processes::rss_peak_bytes(process.pid()).or(figure.rss_peak_bytes);
        std::thread::sleep(Duration::from_millis(5)); // polls a condition
    }
    let events = figure.events as f64;
    figure.events_per_s = Some(events / streaming.since.elapsed().as_secs_f64());
    figure.slot_after_ms = Some(streaming.after.as_secs_f64() * 1e3);
    figure.cpu_us_per_event = processes::usage(process.pid()).map(|u| u.cpu_s * 1e6 / events);
    if let Err(e) = process.wait() {
        figure.fail(&e);
    }
    // Its times are added to the postmaster's when it has been reaped.
    crate::support::eventually("the walsender ends", || {
        processes::usage(streaming.walsender).is_none().then_some(())
    });
    figure.walsender_cpu_us_per_event = Some((children_cpu_s() - children_before) * 1e6 / events);
}

/// Publishes to the end of the backlog, and is stopped then.
pub fn publish(
    figure: &mut Figure,
    backlog: &mut Backlog,
    slot: &str,
    topic: &Topic,
    broker: i32,
    start: impl FnOnce() -> Running,
) -> Streaming {
    let broker_before = processes::usage(broker).map_or(0.0, |u| u.cpu_s);
    let began = Instant::now();
    let mut process = start();
    let mut streaming = Streaming::wait(backlog, slot, &process, began);
    let counter = Counter::new(topic);
    let (mut count, mut last_progress) = (0, Instant::now());
    while count < figure.events {
        assert!(
            last_progress.elapsed() < PATIENCE,
            "no progress at {count} events: {}",
            process.last_words()
        );
        std::thread::sleep(Duration::from_millis(100)); // polls a condition
        if let Some(now) = counter.count().filter(|now| *now > count) {
            (count, last_progress) = (now, Instant::now());
        }
    }
    streaming.all_there = streaming.since.elapsed();
    figure.slot_after_ms = Some(streaming.after.as_secs_f64() * 1e3);
    let events = figure.events as f64;
    let per_event = |pid, before| processes::usage(pid).map(|u| (u.cpu_s - before) * 1e6 / events);
    figure.cpu_us_per_event = per_event(process.pid(), 0.0);
    figure.walsender_cpu_us_per_event = per_event(streaming.walsender, 0.0);
    if figure.walsender_cpu_us_per_event.is_none() {
        figure.fail("it lost its connection on the way");
    }
    figure.broker_cpu_us_per_event = per_event(broker, broker_before);
    figure.rss_peak_bytes = processes::rss_peak_bytes(process.pid());
    if let Err(e) = process.stop() {
        figure.fail(&e);
    }
    streaming
}

/// The broker goes away in the middle of a drain and comes back: what is held then, and that it goes on.
pub fn outage(backlog: &mut Backlog, site: &Site, seconds: u64) -> Figure {
    let kafka = Kafka::start(&[]);
    let (contender, transport, slot) = (Contender::Tailer, Transport::Tcp, backlog.copy_slot());
    let mut figure = Figure::new("outage", contender.name(), transport.name(), backlog.workload.name);
    figure.events = backlog.workload.events;
    let topic = arrivals::create_topic(&kafka.brokers(), &slot);
    let folder = servers::folder(contender.name());
    let job = Job {
        site,
        backlog,
        transport,
        slot: &slot,
        brokers: &topic.brokers,
        topic: &topic.name,
        linger_ms: 5,
    };
    let mut process = Running::start(job.prepare(contender, &folder), &folder);
    let counter = Counter::new(&topic);
    let reaches = |process: &Running, events: u64| {
        within(Duration::from_secs(300), "the events arrive", &mut || {
            assert!(!process.has_ended(), "{}", process.last_words());
            counter.count().filter(|count| *count >= events)
        });
    };
    reaches(&process, figure.events / 10);
    kafka.stop("TERM");
    std::thread::sleep(Duration::from_secs(seconds)); // the length of the outage
    kafka.start_again();
    reaches(&process, figure.events);
    figure.cpu_us_per_event = processes::usage(process.pid()).map(|u| u.cpu_s * 1e6 / figure.events as f64);
    figure.rss_peak_bytes = processes::rss_peak_bytes(process.pid());
    // With repeats there are as many messages as events before all events are there.
    within(Duration::from_secs(60), "the slot is confirmed to the end", &mut || {
        (backlog.confirmed(&slot) >= backlog.end).then_some(())
    });
    if let Err(e) = process.stop() {
        figure.fail(&e);
    }
    check(&mut figure, backlog, &topic, None);
    backlog.drop_slot(&slot);
    figure
}

/// Reads what arrived and when, and what the promise says to it.
pub fn check(figure: &mut Figure, backlog: &Backlog, topic: &Topic, since_ms: Option<i64>) {
    let mut tally = Tally::new(backlog.workload.events, backlog.workload.keys());
    let arrived = Arrivals::read(topic, &mut tally);
    figure.count(tally.counts());
    if let Some(since_ms) = since_ms {
        let rate = |events: u64| Some(events as f64 * 1e3 / (arrived.nth_ms(events)? - since_ms) as f64);
        figure.events_per_s = rate(figure.events);
        figure.first_100_000_events_per_s = rate(COLD_EVENTS);
    }
}

/// The moment the contender has the slot: the same for all, and before the server decodes anything.
pub struct Streaming {
    walsender: i32,
    since: Instant,
    pub since_ms: i64,
    /// The process was started.
    after: Duration,
    /// The topic has as many messages as there are events.
    pub all_there: Duration,
}

impl Streaming {
    fn wait(backlog: &mut Backlog, slot: &str, process: &Running, began: Instant) -> Self {
        loop {
            if let Some(walsender) = backlog.walsender(slot) {
                return Streaming {
                    walsender,
                    since: Instant::now(),
                    since_ms: now_ms(),
                    after: began.elapsed(),
                    all_there: Duration::ZERO,
                };
            }
            let ended = process.has_ended();
            assert!(!ended && began.elapsed() < PATIENCE, "did not take the slot: {}", process.last_words());
            std::thread::sleep(Duration::from_millis(1)); // polls a condition
        }
    }
}

pub fn now_ms() -> i64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_millis().try_into().unwrap()
}
