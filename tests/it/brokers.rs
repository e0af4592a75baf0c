//! Three brokers, each topic on all of them, two of which must have what is acknowledged: brokers die,
//! freeze, are restarted, and give their partitions away.

use std::sync::{Arc, MutexGuard};
use std::time::Duration;

use crate::servers_fail::{all_is_well, flows, number};
use crate::support::bed::{Bed, Load, Rule};
use crate::support::servers::{self, Kafka};
use crate::support::{eventually, oracle};
use crate::tests;

tests![
    leaders_killed_frozen_and_restarted_in_turn_lose_and_repeat_nothing,
    without_enough_replicas_nothing_is_acknowledged_or_confirmed,
];

/// One test has the cluster at a time, and leaves it whole.
fn cluster() -> (MutexGuard<'static, servers::Cluster>, Vec<Arc<Kafka>>, Bed) {
    let (guard, brokers) = servers::shared_cluster();
    let mut bed = Bed::on(servers::shared_postgres(), Arc::clone(&brokers[0]));
    bed.init();
    (guard, brokers, bed)
}

/// Every partition has so many replicas in sync.
fn in_sync(bed: &Bed, replicas: usize) {
    eventually("the replicas are in sync", || {
        oracle::replicas_in_sync(&bed.topic).filter(|least| *least == replicas)
    });
}

fn leads(bed: &Bed, broker: &Kafka, expected: bool) {
    eventually("the leaders have moved", || {
        (oracle::led_by(&bed.topic, broker.port)?.is_empty() != expected).then_some(())
    });
}

/// Each broker in turn goes away under load, and comes back to lead again: its partitions move twice.
/// One session, nothing twice.
fn leaders_killed_frozen_and_restarted_in_turn_lose_and_repeat_nothing() {
    const TERM: usize = 0;
    const KILL: usize = 1;
    let (_guard, brokers, mut bed) = cluster();
    // The end of a partition is asked of its leader in every sample.
    bed.exempt(&[Rule::PositionBehindTopic], "a leader that wakes up, or is new, may tell an old end");
    let mut worker = bed.streaming();
    let load = Load::start(&bed, 3, Duration::from_millis(2));
    // After nine rounds each of them has had each fault.
    for round in 0..usize::try_from(number("OUTBOX_BROKER_FAULTS", 3)).unwrap() {
        let (broker, fault) = (&brokers[round % 3], (round + round / 3) % 3);
        leads(&bed, broker, true);
        flows(&bed, 100);
        match fault {
            TERM => broker.stop("TERM"),
            KILL => broker.stop("KILL"),
            _ => broker.signal("STOP"),
        }
        leads(&bed, broker, false);
        flows(&bed, 100);
        match fault {
            TERM | KILL => broker.start_again(),
            _ => broker.signal("CONT"),
        }
        in_sync(&bed, 3);
    }
    flows(&bed, 100);
    load.stop();
    assert_eq!(all_is_well(&mut bed), 0, "the producer is idempotent");
    assert_eq!(worker.logged("streaming").len(), 1, "{:#?}", worker.log());
    worker.stop();
}

fn without_enough_replicas_nothing_is_acknowledged_or_confirmed() {
    // Two dead controllers of three would be another fault: here one replica too few is one.
    let (_guard, brokers, mut bed) = cluster();
    bed.topic.set("min.insync.replicas", "3");
    let mut worker = bed.streaming();
    bed.insert(1, 10);
    bed.arrived();
    bed.confirmed();
    brokers[2].stop("KILL");
    in_sync(&bed, 2);
    bed.insert(1, 100);
    let said = worker.says("Kafka does not acknowledge the oldest event");
    assert_eq!(said["ready"], false);
    let end = bed.committed().events.last().unwrap().end_lsn;
    assert!(bed.positions().1 < end);
    brokers[2].start_again();
    let said = worker.says("Kafka acknowledges again");
    assert_eq!(said["ready"], true);
    all_is_well(&mut bed);
    in_sync(&bed, 3);
    worker.stop();
}
