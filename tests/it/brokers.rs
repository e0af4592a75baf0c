//! Three brokers, each topic on all of them, two of which must have what is acknowledged: brokers die,
//! are restarted one after the other, and give their partitions away.

use std::sync::Arc;
use std::time::Duration;

use crate::support::bed::{Bed, Load};
use crate::support::servers::{self, Kafka};
use crate::support::{eventually, oracle};
use crate::tests;

tests![
    a_leader_killed_with_events_in_flight_loses_and_repeats_nothing,
    a_rolling_restart_of_all_brokers_shows_nothing_but_a_pause,
    without_enough_replicas_nothing_is_acknowledged_or_confirmed,
];

fn cluster() -> (Vec<Arc<Kafka>>, Bed) {
    let brokers = Kafka::cluster(&[]);
    let bed = Bed::on(servers::shared_postgres(), Arc::clone(&brokers[0]));
    (brokers, bed)
}

fn flows(bed: &Bed, events: i64) {
    let before = bed.topic.count();
    eventually("events flow", || (bed.topic.count() >= before + events).then_some(()));
}

/// Every partition has so many replicas in sync.
fn in_sync(bed: &Bed, replicas: usize) {
    eventually("the replicas are in sync", || {
        oracle::replicas_in_sync(&bed.topic).filter(|least| *least >= replicas)
    });
}

/// Rows 13 and 23: the leader of partitions goes without a word, and comes back to lead them again.
fn a_leader_killed_with_events_in_flight_loses_and_repeats_nothing() {
    let (brokers, mut bed) = cluster();
    bed.init();
    let mut worker = bed.streaming();
    let load = Load::start(&bed, 3, Duration::from_millis(2));
    for broker in &brokers {
        flows(&bed, 100);
        assert!(!oracle::led_by(&bed.topic, broker.port).is_empty(), "a broker that leads nothing");
        broker.stop("KILL");
        flows(&bed, 100);
        broker.start_again();
        in_sync(&bed, 3);
        eventually("it leads again", || (!oracle::led_by(&bed.topic, broker.port).is_empty()).then_some(()));
    }
    flows(&bed, 100);
    load.stop();
    let (_, verdict) = bed.arrived();
    bed.confirmed();
    assert_eq!(verdict.repeats, 0, "the producer is idempotent");
    assert_eq!(worker.logged("streaming").len(), 1, "{:#?}", worker.log());
    worker.stop();
}

fn a_rolling_restart_of_all_brokers_shows_nothing_but_a_pause() {
    let (brokers, mut bed) = cluster();
    bed.init();
    let mut worker = bed.streaming();
    let load = Load::start(&bed, 3, Duration::from_millis(2));
    for broker in &brokers {
        flows(&bed, 100);
        broker.stop("TERM");
        flows(&bed, 100);
        broker.start_again();
        in_sync(&bed, 3);
    }
    load.stop();
    let (_, verdict) = bed.arrived();
    bed.confirmed();
    assert_eq!(verdict.repeats, 0, "the producer is idempotent");
    assert_eq!(worker.logged("streaming").len(), 1, "{:#?}", worker.log());
    worker.stop();
}

fn without_enough_replicas_nothing_is_acknowledged_or_confirmed() {
    // The controllers would lose their quorum with two brokers gone: here one replica too few is
    // one that is gone.
    let (brokers, mut bed) = cluster();
    bed.topic.set("min.insync.replicas", "3");
    bed.init();
    let mut worker = bed.streaming();
    bed.insert(1, 10);
    bed.arrived();
    bed.confirmed();
    brokers[2].stop("KILL");
    eventually("a replica is out of sync", || {
        oracle::replicas_in_sync(&bed.topic).filter(|least| *least == 2)
    });
    let before = bed.positions();
    bed.insert(1, 100);
    let said = worker.says("Kafka does not acknowledge the oldest event");
    assert_eq!(said["ready"], false);
    assert_eq!(bed.positions(), before);
    brokers[2].start_again();
    let said = worker.says("Kafka acknowledges again");
    assert_eq!(said["ready"], true);
    bed.arrived();
    bed.confirmed();
    worker.stop();
}
