//! The reference poller, four at once, in a process of its own (this program, started again).

use std::process::Command;
use std::time::{Duration, Instant};

use crate::arrivals::{self, Arrivals, Counter};
use crate::backlog::{self, Workload};
use crate::contenders::Running;
use crate::figures::Figure;
use crate::site::Site;
use crate::support::poller::{Poller, TABLES};
use crate::support::servers;
use crate::support::tally::{NUMBERED, Tally};
use crate::{drain, processes};

const AT_ONCE: usize = 4;

/// The process: until it is killed.
pub fn work(url: &str, brokers: &str, topic: &str) {
    let _poller = Poller::start(url, brokers, topic, AT_ONCE);
    loop {
        std::thread::park();
    }
}

pub fn poll(workload: Workload, site: &Site) -> Figure {
    let mut figure = Figure::new("drain", "reference-poller", "tcp", workload.name);
    figure.events = workload.events;
    let server = backlog::server(None);
    let mut client = server.connect("postgres");
    client.batch_execute(TABLES).unwrap();
    let keys = workload.keys();
    client.batch_execute(&format!("INSERT INTO sales_order SELECT generate_series(0, {keys} - 1)")).unwrap();
    client
        .batch_execute(&format!(
            "INSERT INTO outbox_event (event_id, order_id, revision, event_type, payload)
             SELECT {NUMBERED}, 'OrderPaid', jsonb_build_object('orderId', n % keys, 'note', repeat('x', {fill}))
             FROM generate_series(0, {events} - 1) n, (SELECT {keys}::bigint AS keys);
             ANALYZE",
            events = workload.events,
            fill = workload.fill_bytes,
        ))
        .unwrap();
    let topic = arrivals::create_topic(&site.kafka.brokers(), &format!("bench_{}_poller", server.port));
    let folder = servers::folder("poller");
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["poller", &server.url("postgres"), &topic.brokers, &topic.name]);
    let broker_before = processes::usage(site.kafka.pid()).map_or(0.0, |u| u.cpu_s);
    let since_ms = drain::now_ms();
    let mut process = Running::start(command, &folder);
    let deadline = Instant::now() + Duration::from_secs(600);
    let counter = Counter::new(&topic);
    while counter.count().is_none_or(|count| count < workload.events) {
        assert!(Instant::now() < deadline && !process.has_ended(), "the poller: {}", process.last_words());
        std::thread::sleep(Duration::from_millis(100)); // polls a condition
    }
    let events = workload.events as f64;
    figure.cpu_us_per_event = processes::usage(process.pid()).map(|u| u.cpu_s * 1e6 / events);
    figure.broker_cpu_us_per_event =
        processes::usage(site.kafka.pid()).map(|u| (u.cpu_s - broker_before) * 1e6 / events);
    figure.rss_peak_bytes = processes::rss_peak_bytes(process.pid());
    if let Err(e) = process.stop() {
        figure.fail(&e);
    }
    let mut tally = Tally::new(workload.events, keys);
    let arrived = Arrivals::read(&topic, &mut tally);
    figure.count(tally.counts());
    figure.events_per_s = arrived.nth_ms(workload.events).map(|ms| events * 1e3 / (ms - since_ms) as f64);
    topic.delete();
    figure
}
