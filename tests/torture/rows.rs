//! How much memory the worker takes: one transaction of millions of rows, or a backlog that grew while
//! Kafka was down. Read from outside, from /proc.

use std::fs;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::support::bed::{Bed, EVENTS};
use crate::support::eventually;
use crate::support::oracle::{Reader, Topic};
use crate::support::servers::{Kafka, Postgres};
use crate::support::tally::{Counts, NUMBERED, Tally};
use crate::support::worker::Worker;

const KEYS: u64 = 1000;
/// Without indexes, so that millions of rows are there in a minute.
const TABLE: &str = "CREATE TABLE outbox_event (
    event_id uuid NOT NULL, order_id bigint NOT NULL, revision bigint NOT NULL, event_type text NOT NULL, payload jsonb NOT NULL)";

fn bed() -> Bed {
    let settings = ["max_wal_size=8GB", "checkpoint_timeout=1h", "synchronous_commit=off"];
    let (postgres, kafka) = (Postgres::start(&settings), Kafka::start(&[]));
    let mut bed = Bed::with(Arc::new(postgres), Arc::new(kafka), TABLE, &[]);
    bed.exempt(EVENTS, "the tally judges them, a list would not fit");
    bed.init();
    bed
}

/// Events of these numbers, in one transaction.
fn insert(from: u64, to: u64) -> String {
    format!(
        "INSERT INTO outbox_event SELECT {NUMBERED}, 'OrderPaid', '{{}}'
         FROM generate_series({from}::bigint, {to} - 1) n, (SELECT {KEYS}::bigint AS keys)"
    )
}

/// Gives whether everything arrived.
pub fn one_transaction(rows: u64) -> bool {
    let mut bed = bed();
    let worker = bed.streaming();
    let began = Instant::now();
    bed.sql(&insert(0, rows));
    report(&bed, &worker, rows, began, "one_transaction")
}

/// The same in transactions of 100, all of them while Kafka is down.
pub fn backlog(rows: u64) -> bool {
    let mut bed = bed();
    let worker = bed.streaming();
    bed.kafka.stop("KILL");
    let began = Instant::now();
    bed.sql(&format!(
        "DO $do$ BEGIN FOR i IN 0..{rows} - 1 BY 100 LOOP {}; COMMIT; END LOOP; END $do$",
        insert(0, 0).replace("0::bigint, 0 - 1", &format!("i, least(i + 100, {rows}) - 1"))
    ));
    let says = "does not acknowledge";
    eventually("the worker has waited", || (!worker.logged(says).is_empty()).then_some(()));
    let (peak, _) = peaks_kb(&worker);
    println!("while Kafka is down: peak_rss_kb={peak}");
    bed.kafka.start_again();
    report(&bed, &worker, rows, began, "backlog")
}

fn report(bed: &Bed, worker: &Worker, rows: u64, began: Instant, name: &str) -> bool {
    let committed_s = began.elapsed().as_secs();
    let counts = read(&bed.topic, rows);
    let (peak, address_space) = peaks_kb(worker);
    println!(
        "{name}={rows} committed_s={committed_s} arrived_s={} lost={} inverted={} invented={} repeats={} \
         peak_rss_kb={peak} peak_address_space_kb={address_space}",
        began.elapsed().as_secs(),
        counts.lost,
        counts.inverted,
        counts.foreign,
        counts.repeats
    );
    if !counts.kept_the_promise() {
        println!("{:#?}", worker.log());
    }
    counts.kept_the_promise()
}

/// Reads until every event was there, or nothing comes any more.
fn read(topic: &Topic, rows: u64) -> Counts {
    let (mut reader, mut tally, mut progress) = (Reader::new(topic), Tally::new(rows, KEYS), Instant::now());
    // A large transaction is written to disk by the server before the first row comes.
    while tally.counts().lost > 0 && progress.elapsed() < Duration::from_secs(120) {
        reader.poll();
        for message in reader.messages.drain(..) {
            let revision = message.header("revision").unwrap_or_default();
            let key = message.key.as_deref().unwrap_or_default();
            tally.take(message.partition, message.id().as_bytes(), key, revision.as_bytes());
            progress = Instant::now();
        }
    }
    tally.counts()
}

/// Resident and address space.
fn peaks_kb(worker: &Worker) -> (u64, u64) {
    let status = fs::read_to_string(format!("/proc/{}/status", worker.pid())).unwrap_or_default();
    let field = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name))?;
        line.split_whitespace().nth(1)?.parse().ok()
    };
    (field("VmHWM:").unwrap_or(0), field("VmPeak:").unwrap_or(0))
}
