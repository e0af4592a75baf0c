//! What others are measured by: the oracle of the long runs must see what it is there for, and the
//! reference poller must keep the promise.

use crate::support::bed::Bed;
use crate::support::oracle::{self, Committed, Event, Message};
use crate::support::poller::{self, Poller};
use crate::support::tally::{Counts, NUMBERED, Tally};
use crate::support::{eventually, servers};
use crate::tests;

tests![
    the_reference_poller_publishes_each_event_once_and_in_order,
    the_verdict_accepts_repeats_and_counts_them,
    the_verdict_tells_the_lost_from_the_late,
    the_verdict_sees_an_inversion_and_a_key_that_moves,
    the_verdict_sees_what_was_never_committed,
    the_tally_accepts_every_event_once_in_order,
    the_tally_sees_a_missing_event,
    the_tally_counts_a_repeat_and_allows_it,
    the_tally_sees_an_inversion,
    the_tally_sees_a_key_that_moves_to_another_partition,
    the_tally_sees_what_is_no_event,
];

fn the_reference_poller_publishes_each_event_once_and_in_order() {
    let mut bed = Bed::with(servers::shared_postgres(), servers::shared_kafka(), poller::TABLES, &[]);
    bed.sql("INSERT INTO sales_order SELECT generate_series(0, 2)");
    bed.sql(&format!(
        "INSERT INTO outbox_event (event_id, order_id, revision, event_type, payload)
         SELECT {NUMBERED}, 'OrderPaid', '{{}}' FROM generate_series(0, 99) n, (SELECT 3 AS keys)"
    ));
    let poller = Poller::start(&bed.settings.url, &bed.brokers, &bed.topic.name, 4);
    eventually("every event is marked", || {
        bed.value::<bool>("SELECT bool_and(published_at IS NOT NULL) FROM outbox_event").then_some(())
    });
    poller.stop();
    let mut tally = Tally::new(100, KEYS);
    for message in bed.topic.read() {
        let revision = message.header("revision").unwrap();
        tally.take(message.partition, message.id().as_bytes(), message.key().as_bytes(), revision.as_bytes());
    }
    check(tally.counts(), Counts::default(), true);
}

/// Events a1, a2, a3 of key a and b1 of key b, and a topic with these (partition, id); the key is the
/// first letter. Gives lost, skipped, inverted, invented and the number of repeats.
fn verdict(topic: &[(i32, &str)]) -> ([String; 4], usize) {
    let key = |id: &str| id[..1].to_owned();
    let event = |id: &&str| Event { key: key(id), id: (*id).to_owned(), end_lsn: 0 };
    let committed = Committed { events: ["a1", "b1", "a2", "a3"].iter().map(event).collect() };
    let message = |(offset, &(partition, id)): (usize, &(i32, &str))| Message {
        partition,
        offset: offset as i64,
        key: Some(key(id).into_bytes()),
        value: None,
        headers: vec![("id".to_owned(), Some(id.as_bytes().to_vec()))],
        timestamp_ms: None,
    };
    let found = oracle::judge(&committed, &topic.iter().enumerate().map(message).collect::<Vec<_>>());
    let lists = [found.lost, found.skipped, found.inverted, found.invented];
    (lists.map(|ids| ids.join(" ")), found.repeats)
}

fn the_verdict_accepts_repeats_and_counts_them() {
    let topic = [(0, "a1"), (1, "b1"), (0, "a2"), (0, "a1"), (0, "a2"), (0, "a3"), (1, "b1")];
    assert_eq!(verdict(&topic), (["", "", "", ""].map(str::to_owned), 3));
}

fn the_verdict_tells_the_lost_from_the_late() {
    // a3 and b1 may still come, a2 may not: a3 is its successor.
    assert_eq!(verdict(&[(0, "a1")]), (["a2 a3 b1", "", "", ""].map(str::to_owned), 0));
    assert_eq!(verdict(&[(0, "a1"), (0, "a3")]), (["a2 b1", "a2", "", ""].map(str::to_owned), 0));
}

fn the_verdict_sees_an_inversion_and_a_key_that_moves() {
    let topic = [(0, "a2"), (0, "a1"), (0, "a3"), (1, "b1")];
    assert_eq!(verdict(&topic), (["", "", "a1", ""].map(str::to_owned), 0));
    // In the order of offsets of one partition it would be right, but nobody reads two in step.
    let topic = [(0, "a1"), (0, "a2"), (2, "a3"), (1, "b1"), (2, "b1")];
    assert_eq!(verdict(&topic), (["", "", "a3 b1", ""].map(str::to_owned), 1));
}

fn the_verdict_sees_what_was_never_committed() {
    let topic = [(0, "a1"), (0, "a2"), (0, "a4"), (0, "a3"), (1, "b1")];
    assert_eq!(verdict(&topic), (["", "", "", "a4"].map(str::to_owned), 0));
}

const KEYS: u64 = 3;

/// Takes the events of these numbers, in one partition.
fn tally(events: u64, numbers: &[u64]) -> Counts {
    let mut tally = Tally::new(events, KEYS);
    for n in numbers {
        take(&mut tally, 0, *n);
    }
    tally.counts()
}

fn take(tally: &mut Tally, partition: i32, n: u64) {
    let id = format!("00000000-0000-0000-0000-{n:012x}");
    let (key, revision) = ((n % KEYS).to_string(), (n / KEYS + 1).to_string());
    tally.take(partition, id.as_bytes(), key.as_bytes(), revision.as_bytes());
}

fn check(counts: Counts, expected: Counts, kept: bool) {
    assert_eq!(counts, expected);
    assert_eq!(counts.kept_the_promise(), kept);
}

fn the_tally_accepts_every_event_once_in_order() {
    // Order across keys is free.
    check(tally(7, &[1, 0, 2, 4, 5, 3, 6]), Counts::default(), true);
}

fn the_tally_sees_a_missing_event() {
    check(tally(7, &[0, 1, 2, 3, 5, 6]), Counts { lost: 1, ..Counts::default() }, false);
}

fn the_tally_counts_a_repeat_and_allows_it() {
    // As after a crash: the last ones come again, also in front of new ones.
    check(tally(7, &[0, 1, 2, 3, 0, 3, 4, 5, 6]), Counts { repeats: 2, ..Counts::default() }, true);
}

fn the_tally_sees_an_inversion() {
    check(tally(7, &[3, 0, 1, 2, 4, 5, 6]), Counts { inverted: 1, ..Counts::default() }, false);
}

fn the_tally_sees_a_key_that_moves_to_another_partition() {
    let mut tally = Tally::new(4, KEYS);
    for (partition, n) in [(0, 0), (0, 1), (0, 2), (1, 3)] {
        take(&mut tally, partition, n);
    }
    check(tally.counts(), Counts { inverted: 1, ..Counts::default() }, false);
}

fn the_tally_sees_what_is_no_event() {
    let mut tally = Tally::new(1, KEYS);
    let id = b"00000000-0000-0000-0000-000000000000";
    for (id, key, revision) in [
        (&b"00000000-0000-0000-0000-000000000001"[..], &b"1"[..], &b"1"[..]), // beyond the last
        (&b"ffffffff-ffff-ffff-ffff-ffffffffffff"[..], b"0", b"1"),
        (b"not a uuid", b"0", b"1"),
        (id, b"1", b"1"),
        (id, b"0", b"2"),
        (id, b"", b"1"),
    ] {
        assert_eq!(tally.take(0, id, key, revision), None);
    }
    assert_eq!(tally.take(0, id, b"0", b"1"), Some(0));
    check(tally.counts(), Counts { foreign: 6, ..Counts::default() }, false);
}
