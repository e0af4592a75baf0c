//! Connections that are slow, silent, cut or wrong.

use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use crate::kills::{SQL, STREAM, insert_saying, kafka_through_a_proxy, postgres_through_a_proxy};
use crate::servers_fail::{RSS_LIMIT, all_is_well, flows, number};
use crate::support::bed::{Bed, Load};
use crate::support::proxy::Fault::{Corrupt, Cut, Hold};
use crate::support::proxy::Way::{ToClient, ToServer};
use crate::support::servers::{self, Postgres};
use crate::tests;

tests![
    long_ways_to_both_servers_only_take_longer,
    a_slow_broker_holds_up_the_stream_and_not_the_session,
    an_acknowledgement_lost_after_the_append_repeats_nothing,
    connections_to_kafka_cut_at_random_bytes_repeat_nothing,
    connections_to_postgresql_cut_at_random_bytes_lose_nothing,
    a_batch_corrupted_on_its_way_to_kafka_is_sent_again,
    a_fatal_error_of_the_producer_is_followed_by_a_new_one,
    a_corrupted_replication_message_is_no_event,
    a_silent_wire_to_postgresql_is_left_and_made_again,
    a_silent_sql_session_beside_a_living_stream_is_left,
    a_slot_whose_worker_vanished_without_a_word_is_waited_for,
    a_frozen_postgresql_is_noticed_and_waited_for,
    a_silent_kafka_is_told_while_nothing_is_in_flight,
];

/// The session's own `wal_sender_timeout`: how long the server waits for a silent client.
fn wal_sender_timeout(bed: &mut Bed, seconds: u32) {
    bed.settings.url.push_str(&format!("?options=-c%20wal_sender_timeout%3D{seconds}s"));
    bed.write_config();
}

fn long_ways_to_both_servers_only_take_longer() {
    let (mut bed, kafka) = kafka_through_a_proxy();
    let postgres = postgres_through_a_proxy(&mut bed);
    kafka.delay(Duration::from_millis(50));
    postgres.delay(Duration::from_millis(50));
    let mut worker = bed.streaming();
    for key in 0..20 {
        bed.insert(key, 10);
    }
    assert_eq!(all_is_well(&mut bed), 0);
    worker.stop();
}

fn a_slow_broker_holds_up_the_stream_and_not_the_session() {
    let (mut bed, proxy) = kafka_through_a_proxy();
    wal_sender_timeout(&mut bed, 1);
    let mut worker = bed.streaming();
    bed.insert(1, 1);
    bed.arrived();
    proxy.throttle(Some(100 << 10));
    bed.insert_in_transactions(1, 30_000, 100);
    flows(&bed, 3000); // at some 300 bytes each, it takes several times the time-out
    assert!(bed.topic.count() < 30_000, "the broker was not slow");
    proxy.heal();
    assert_eq!(all_is_well(&mut bed), 0);
    assert_eq!(worker.logged("streaming").len(), 1, "{:#?}", worker.log());
    assert!(worker.peak_rss_bytes() < RSS_LIMIT);
    worker.stop();
}

fn an_acknowledgement_lost_after_the_append_repeats_nothing() {
    let (mut bed, proxy) = kafka_through_a_proxy();
    let mut worker = bed.streaming();
    for round in 1..=5 {
        // The first ones of a producer in a partition, too.
        proxy.when(ToServer, "a marked event", Cut(ToClient, 0));
        insert_saying(&mut bed, round, "a marked event");
        bed.insert(round, 10);
        proxy.happened(usize::try_from(round).unwrap());
        bed.arrived();
    }
    assert_eq!(all_is_well(&mut bed), 0);
    assert_eq!(worker.logged("streaming").len(), 1, "{:#?}", worker.log());
    worker.stop();
}

fn random() -> fastrand::Rng {
    let seed = number("OUTBOX_SEED", fastrand::u64(..));
    eprintln!("OUTBOX_SEED={seed}");
    fastrand::Rng::with_seed(seed)
}

fn connections_to_kafka_cut_at_random_bytes_repeat_nothing() {
    let mut random = random();
    let (mut bed, proxy) = kafka_through_a_proxy();
    let mut worker = bed.streaming();
    let load = Load::start(&bed, 3, Duration::from_millis(1));
    let cuts = number("OUTBOX_CUTS", 20);
    for cut in 1..=cuts {
        flows(&bed, 20);
        let way = if random.bool() { ToServer } else { ToClient };
        proxy.spoil("", Cut(way, random.u64(0..3000)));
        proxy.happened(usize::try_from(cut).unwrap());
    }
    load.stop();
    assert_eq!(all_is_well(&mut bed), 0, "the producer is idempotent");
    assert_eq!(worker.logged("streaming").len(), 1, "{:#?}", worker.log());
    worker.stop();
}

fn connections_to_postgresql_cut_at_random_bytes_lose_nothing() {
    let mut random = random();
    let mut bed = Bed::new();
    bed.init();
    let proxy = postgres_through_a_proxy(&mut bed);
    let mut worker = bed.streaming();
    let load = Load::start(&bed, 3, Duration::from_millis(1));
    let cuts = usize::try_from(number("OUTBOX_CUTS", 20)).unwrap();
    for cut in 1..=cuts {
        flows(&bed, 20);
        let connection = if random.bool() { SQL } else { STREAM };
        let way = if random.bool() { ToServer } else { ToClient };
        proxy.spoil(connection, Cut(way, random.u64(0..1000)));
        proxy.happened(cut);
        worker.streams_again(cut + 1);
    }
    load.stop();
    let repeats = all_is_well(&mut bed);
    eprintln!("cuts={cuts} events={} lost=0 inverted=0 repeats={repeats}", bed.committed().events.len());
    worker.stop();
}

/// The broker sees that its checksum does not fit, and librdkafka sends it again.
fn a_batch_corrupted_on_its_way_to_kafka_is_sent_again() {
    let (mut bed, proxy) = kafka_through_a_proxy();
    let mut worker = bed.streaming();
    bed.insert(1, 10);
    bed.arrived();
    proxy.when(ToServer, "a marked event", Corrupt(ToServer, 0, 0xff));
    insert_saying(&mut bed, 1, "a marked event");
    bed.insert(1, 10);
    proxy.happened(1);
    assert_eq!(all_is_well(&mut bed), 0);
    assert_eq!(worker.logged("streaming").len(), 1, "{:#?}", worker.log());
    worker.stop();
}

/// An error that librdkafka does not try again after, so that the producer cannot go on.
fn a_fatal_error_of_the_producer_is_followed_by_a_new_one() {
    const INVALID_REQUEST: u8 = 42;
    let (mut bed, proxy) = kafka_through_a_proxy();
    let mut worker = bed.streaming();
    bed.insert(1, 10);
    bed.arrived();
    bed.confirmed();
    // ProduceResponse, from version 9 on: length, correlation id, no tags, one topic and its name, one
    // partition and its number, error code.
    let error = 4 + 4 + 1 + 1 + (1 + bed.topic.name.len()) + 1 + 4 + 1;
    proxy.when(ToServer, "a marked event", Corrupt(ToClient, error as u64, INVALID_REQUEST));
    insert_saying(&mut bed, 1, "a marked event");
    proxy.happened(1);
    assert_eq!(worker.says("Kafka did not take an event")["ready"], false);
    worker.streams_again(2);
    assert_eq!(all_is_well(&mut bed), 1, "it was appended");
    worker.stop();
}

fn a_corrupted_replication_message_is_no_event() {
    let mut bed = Bed::new();
    bed.init();
    let proxy = postgres_through_a_proxy(&mut bed);
    let mut worker = bed.streaming();
    // The type of the message, its length, and the type of what it carries.
    for (round, byte) in [0, 1, 5].into_iter().enumerate() {
        bed.insert(1, 5);
        bed.arrived();
        bed.confirmed();
        proxy.spoil(STREAM, Corrupt(ToClient, byte, 0xff));
        bed.insert(1, 5);
        proxy.happened(round + 1);
        worker.streams_again(round + 2);
    }
    assert_eq!(all_is_well(&mut bed), 0);
    assert!(worker.peak_rss_bytes() < RSS_LIMIT);
    assert!(worker.logged("panicked").is_empty());
    worker.stop();
}

fn a_silent_wire_to_postgresql_is_left_and_made_again() {
    let mut bed = Bed::new();
    bed.init();
    let proxy = postgres_through_a_proxy(&mut bed);
    wal_sender_timeout(&mut bed, 3);
    bed.settings.postgres = "silence_timeout_ms = 2000\nconnect_timeout_ms = 1000".to_owned();
    bed.write_config();
    let mut worker = bed.streaming();
    bed.insert(1, 10);
    bed.arrived();
    proxy.black_hole();
    bed.insert(1, 10);
    assert_eq!(worker.says("PostgreSQL has said nothing for")["ready"], false);
    assert_eq!(worker.says("no answer in time")["ready"], false);
    proxy.heal();
    worker.streams_again(2);
    all_is_well(&mut bed);
    worker.stop();
}

fn a_silent_sql_session_beside_a_living_stream_is_left() {
    let mut bed = Bed::new();
    bed.init();
    let proxy = postgres_through_a_proxy(&mut bed);
    bed.settings.postgres = "silence_timeout_ms = 1000".to_owned();
    bed.write_config();
    let mut worker = bed.streaming();
    bed.insert(1, 10);
    bed.arrived();
    bed.confirmed();
    proxy.spoil(SQL, Hold(ToServer));
    bed.insert(1, 10);
    bed.arrived();
    assert_eq!(worker.says("asked to move the position")["ready"], false);
    worker.streams_again(2);
    all_is_well(&mut bed);
    worker.stop();
}

fn a_slot_whose_worker_vanished_without_a_word_is_waited_for() {
    let mut bed = Bed::new();
    bed.init();
    let proxy = postgres_through_a_proxy(&mut bed);
    wal_sender_timeout(&mut bed, 3);
    let mut worker = bed.streaming();
    bed.insert(1, 10);
    bed.arrived();
    proxy.keep_upstream();
    worker.kill();
    let mut next = bed.start();
    next.says("in use by another worker");
    next.streams(); // the server's own time-out has ended the old session
    bed.insert(1, 10);
    all_is_well(&mut bed);
    next.stop();
}

fn a_frozen_postgresql_is_noticed_and_waited_for() {
    let mut bed = Bed::on(Arc::new(Postgres::start(&["wal_sender_timeout=3s"])), servers::shared_kafka());
    bed.init();
    bed.settings.postgres = "silence_timeout_ms = 2000\nconnect_timeout_ms = 1000".to_owned();
    bed.write_config();
    let mut worker = bed.streaming();
    bed.insert(1, 10);
    bed.arrived();
    let postmaster = std::fs::read_to_string(bed.postgres.data.join("postmaster.pid")).unwrap();
    let postmaster = postmaster.lines().next().unwrap().to_owned();
    let children = Command::new("ps").args(["-o", "pid=", "--ppid", &postmaster]).output().unwrap().stdout;
    let children = String::from_utf8(children).unwrap();
    let signal = |signal: &str| {
        // Those that have ended meanwhile do not count.
        let _ =
            Command::new("kill").args(["-s", signal, &postmaster]).args(children.split_whitespace()).output();
    };
    signal("STOP");
    assert_eq!(worker.says("PostgreSQL has said nothing for")["ready"], false);
    worker.says("no answer");
    signal("CONT");
    worker.streams_again(2);
    bed.client = bed.connect();
    bed.insert(1, 10);
    all_is_well(&mut bed);
    worker.stop();
}

fn a_silent_kafka_is_told_while_nothing_is_in_flight() {
    let (mut bed, proxy) = kafka_through_a_proxy();
    let mut worker = bed.streaming();
    bed.insert(1, 10);
    bed.arrived();
    bed.confirmed();
    proxy.black_hole();
    assert_eq!(worker.says("Kafka does not answer")["ready"], false);
    proxy.heal();
    assert_eq!(worker.says("Kafka answers again")["ready"], true);
    bed.insert(1, 10);
    assert_eq!(all_is_well(&mut bed), 0);
    worker.stop();
}
