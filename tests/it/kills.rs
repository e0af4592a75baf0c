//! The worker is killed at each point between a commit and its confirmation. The wire holds up what
//! would follow, so that the kill comes exactly there.

use crate::servers_fail::{all_is_well, sent};
use crate::support::bed::Bed;
use crate::support::eventually;
use crate::support::proxy::Fault::{Cut, Hold};
use crate::support::proxy::Proxy;
use crate::support::proxy::Way::{ToClient, ToServer};
use crate::support::servers;
use crate::support::worker::Worker;
use crate::tests;

tests![
    a_kill_before_kafka_has_anything_repeats_nothing,
    a_kill_between_the_append_and_its_acknowledgement_repeats_that_event,
    a_kill_after_some_acknowledgements_of_a_transaction_repeats_all_of_it,
    a_kill_before_the_position_is_written_repeats_what_was_acknowledged_since,
    a_kill_while_the_position_write_is_on_its_way_repeats_what_it_was_about,
    a_kill_before_the_position_write_is_answered_repeats_nothing,
    a_position_write_cut_off_on_its_way_is_made_good,
    a_position_write_whose_answer_is_cut_off_repeats_nothing,
    a_kill_between_the_position_write_and_the_confirmation_repeats_nothing,
    a_kill_after_the_confirmation_repeats_nothing,
];

/// In the start-up message of the SQL session and of the walsender session.
pub const SQL: &str = "lock_timeout";
pub const STREAM: &str = "replication\0database";

/// The worker reaches PostgreSQL through the proxy, the test does not.
pub fn postgres_through_a_proxy(bed: &mut Bed) -> Proxy {
    let proxy = Proxy::start(bed.postgres.port);
    let (from, to) = (format!(":{}/", bed.postgres.port), format!(":{}/", proxy.port));
    bed.settings.url = bed.settings.url.replace(&from, &to);
    bed.write_config();
    proxy
}

/// The worker reaches Kafka through the proxy, the test does not.
pub fn kafka_through_a_proxy() -> (Bed, Proxy) {
    let (kafka, proxy) = servers::shared_kafka_through_a_proxy();
    let mut bed = Bed::on(servers::shared_postgres(), kafka);
    bed.init();
    bed.brokers = format!("127.0.0.1:{}", proxy.port);
    bed.write_config();
    (bed, proxy)
}

pub fn insert_saying(bed: &mut Bed, key: i64, text: &str) {
    let sql = "INSERT INTO outbox_event (order_id, revision, event_type, payload)
               VALUES ($1, (SELECT coalesce(max(revision), 0) + 1 FROM outbox_event WHERE order_id = $1), 'OrderPaid', to_jsonb($2::text))";
    bed.client.execute(sql, &[&key, &text]).unwrap();
}

/// Streams, and has delivered and confirmed ten events.
fn delivering(bed: &mut Bed) -> Worker {
    let worker = bed.streaming();
    bed.insert(1, 10);
    bed.arrived();
    bed.confirmed();
    worker
}

/// Killed; what the wire has held up never arrives. The next worker must repeat so many events.
fn killed(bed: &mut Bed, proxy: &Proxy, worker: &mut Worker, repeats: usize) {
    worker.kill();
    proxy.cut_all();
    proxy.heal();
    let mut next = bed.streaming();
    bed.insert(2, 1);
    assert_eq!(all_is_well(bed), repeats);
    next.stop();
}

fn last_end(bed: &mut Bed) -> u64 {
    bed.committed().events.last().unwrap().end_lsn
}

fn a_kill_before_kafka_has_anything_repeats_nothing() {
    let (mut bed, proxy) = kafka_through_a_proxy();
    let mut worker = delivering(&mut bed);
    proxy.spoil("", Hold(ToServer));
    bed.insert(1, 100);
    sent(&mut bed);
    proxy.happened(1);
    assert_eq!(bed.topic.count(), 10);
    killed(&mut bed, &proxy, &mut worker, 0);
}

fn a_kill_between_the_append_and_its_acknowledgement_repeats_that_event() {
    let (mut bed, proxy) = kafka_through_a_proxy();
    let mut worker = delivering(&mut bed);
    proxy.when(ToServer, "a marked event", Hold(ToClient));
    insert_saying(&mut bed, 1, "a marked event");
    bed.topic.wait_for_count(11);
    proxy.happened(1);
    assert!(bed.positions().1 < last_end(&mut bed));
    killed(&mut bed, &proxy, &mut worker, 1);
}

/// The first event of each partition is acknowledged before the next event is sent.
fn a_kill_after_some_acknowledgements_of_a_transaction_repeats_all_of_it() {
    let (mut bed, proxy) = kafka_through_a_proxy();
    let mut worker = bed.streaming();
    proxy.when(ToServer, "a marked event", Hold(ToClient));
    bed.sql("BEGIN");
    bed.insert(1, 1);
    insert_saying(&mut bed, 2, "a marked event");
    bed.sql("COMMIT");
    bed.topic.wait_for_count(2);
    proxy.happened(1);
    assert!(bed.positions().1 < last_end(&mut bed));
    killed(&mut bed, &proxy, &mut worker, 2);
}

fn a_kill_before_the_position_is_written_repeats_what_was_acknowledged_since() {
    let mut bed = Bed::new();
    bed.init();
    let mut worker = delivering(&mut bed);
    let mut other = bed.connect();
    let mut lock = other.transaction().unwrap();
    lock.execute("SELECT FROM outbox_tailer.position FOR UPDATE", &[]).unwrap();
    bed.insert(1, 50);
    bed.arrived();
    let waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()";
    eventually("the write waits for the lock", || (bed.value::<i64>(waits) == 1).then_some(()));
    worker.kill();
    // The server would execute the statement of a dead client once the lock is free.
    bed.terminate("client backend");
    eventually("the write is given up", || (bed.value::<i64>(waits) == 0).then_some(()));
    lock.rollback().unwrap();
    let mut next = bed.streaming();
    assert_eq!(all_is_well(&mut bed), 50);
    next.stop();
}

fn a_kill_while_the_position_write_is_on_its_way_repeats_what_it_was_about() {
    let mut bed = Bed::new();
    bed.init();
    let proxy = postgres_through_a_proxy(&mut bed);
    let mut worker = delivering(&mut bed);
    proxy.when(ToServer, &bed.slot, Hold(ToServer));
    bed.insert(1, 10);
    bed.arrived();
    proxy.happened(1);
    killed(&mut bed, &proxy, &mut worker, 10);
}

fn a_kill_before_the_position_write_is_answered_repeats_nothing() {
    let mut bed = Bed::new();
    bed.init();
    let proxy = postgres_through_a_proxy(&mut bed);
    let mut worker = delivering(&mut bed);
    proxy.when(ToServer, &bed.slot, Hold(ToClient));
    bed.insert(1, 10);
    let end = last_end(&mut bed);
    eventually("the position is written", || (bed.positions().1 >= end).then_some(()));
    proxy.happened(1);
    assert!(bed.positions().0 < end, "the slot was told before the worker knew");
    killed(&mut bed, &proxy, &mut worker, 0);
}

fn a_position_write_cut_off_on_its_way_is_made_good() {
    position_write_cut_off(Cut(ToServer, 0), 10);
}

fn a_position_write_whose_answer_is_cut_off_repeats_nothing() {
    position_write_cut_off(Cut(ToClient, 0), 0);
}

fn position_write_cut_off(cut: crate::support::proxy::Fault, repeats: usize) {
    let mut bed = Bed::new();
    bed.init();
    let proxy = postgres_through_a_proxy(&mut bed);
    let mut worker = delivering(&mut bed);
    proxy.when(ToServer, &bed.slot, cut);
    bed.insert(1, 10);
    proxy.happened(1);
    worker.streams_again(2);
    assert_eq!(all_is_well(&mut bed), repeats);
    worker.stop();
}

fn a_kill_between_the_position_write_and_the_confirmation_repeats_nothing() {
    let mut bed = Bed::new();
    bed.init();
    let proxy = postgres_through_a_proxy(&mut bed);
    let mut worker = delivering(&mut bed);
    proxy.spoil(STREAM, Hold(ToServer));
    bed.insert(1, 10);
    let end = last_end(&mut bed);
    eventually("the position is written", || (bed.positions().1 >= end).then_some(()));
    proxy.happened(1);
    assert!(bed.positions().0 < end);
    killed(&mut bed, &proxy, &mut worker, 0);
}

fn a_kill_after_the_confirmation_repeats_nothing() {
    let mut bed = Bed::new();
    bed.init();
    for _ in 0..2 {
        delivering(&mut bed).kill();
    }
    let mut worker = bed.streaming();
    bed.insert(1, 1);
    assert_eq!(all_is_well(&mut bed), 0);
    worker.stop();
}
