//! A standby is promoted while the worker runs.

use std::sync::Arc;
use std::time::Duration;

use crate::kills::postgres_through_a_proxy;
use crate::servers_fail::flows;
use crate::support::bed::{Bed, EVENTS, Load, POSITIONS};
use crate::support::eventually;
use crate::support::oracle::{self, Committed, Event};
use crate::support::servers::{self, Postgres};
use crate::tests;

tests![
    a_promoted_standby_that_has_the_slot_loses_nothing_behind_the_same_address,
    a_promoted_standby_without_the_slot_is_refused,
];

/// A primary with a standby that streams from it.
fn primary_and_standby(settings: &[&str]) -> (Bed, Postgres) {
    let mut bed = Bed::on(Arc::new(Postgres::start(&[])), servers::shared_kafka());
    bed.exempt(EVENTS, "the test's own slot is not on the standby");
    bed.exempt(POSITIONS, "there are two slots and two rows");
    bed.init();
    bed.sql("SELECT pg_create_physical_replication_slot('standby', true)");
    let standby = Postgres::standby_of(&bed.postgres, settings);
    (bed, standby)
}

/// The standby takes the old primary's place, with what it has.
fn promote(bed: &mut Bed, standby: Postgres) {
    bed.postgres.stop("immediate");
    standby.connect("postgres").batch_execute("SELECT pg_promote()").unwrap();
    bed.postgres = Arc::new(standby);
    bed.client = bed.connect();
}

/// What the table holds: the commits of a key have rising revisions.
fn in_the_table(bed: &mut Bed) -> Committed {
    let sql = "SELECT order_id::text, event_id::text FROM outbox_event ORDER BY order_id, revision";
    let event = |row: postgres::Row| Event { key: row.get(0), id: row.get(1), end_lsn: 0 };
    Committed { events: bed.client.query(sql, &[]).unwrap().into_iter().map(event).collect() }
}

/// The server lets the worker see only what the standby has, so that nothing is published that a
/// failover loses; what commits without the standby is lost by the database, not by us.
fn a_promoted_standby_that_has_the_slot_loses_nothing_behind_the_same_address() {
    let settings = ["hot_standby_feedback=on", "primary_slot_name=standby", "sync_replication_slots=on"];
    let (mut bed, standby) = primary_and_standby(&settings);
    bed.reload("SET synchronized_standby_slots = 'standby'");
    let proxy = postgres_through_a_proxy(&mut bed);
    let mut worker = bed.streaming();
    let mut there = standby.connect(&bed.database);
    eventually("the slot is on the standby", || {
        // The standby takes a slot only once it needs no older catalog rows than the standby keeps.
        bed.insert(1, 1);
        bed.sql("CHECKPOINT");
        let synced =
            "SELECT count(*) FROM pg_replication_slots WHERE synced AND NOT temporary AND slot_name = $1";
        (there.query_one(synced, &[&bed.slot]).unwrap().get::<_, i64>(0) == 1).then_some(())
    });
    let load = Load::start(&bed, 3, Duration::from_millis(2));
    flows(&bed, 300);
    proxy.repoint(standby.port);
    promote(&mut bed, standby);
    load.stop();
    worker.streams_again(2);
    bed.insert(1, 10);
    let committed = in_the_table(&mut bed);
    let verdict = oracle::check(&committed, &bed.topic.wait_for(committed.ids()));
    eprintln!("events={} lost=0 inverted=0 repeats={}", committed.events.len(), verdict.repeats);
    assert!(worker.logged("no longer in the database").is_empty(), "{:#?}", worker.log());
    worker.stop();
}

fn a_promoted_standby_without_the_slot_is_refused() {
    let (mut bed, standby) = primary_and_standby(&["primary_slot_name=standby"]);
    let proxy = postgres_through_a_proxy(&mut bed);
    let mut worker = bed.streaming();
    bed.insert(1, 10);
    bed.topic.wait_for_count(10);
    let end: postgres::types::PgLsn = bed.value("SELECT pg_current_wal_flush_lsn()");
    eventually("the standby has all", || {
        let replayed = "SELECT pg_last_wal_replay_lsn() >= $1";
        standby.connect("postgres").query_one(replayed, &[&end]).unwrap().get::<_, bool>(0).then_some(())
    });
    proxy.repoint(standby.port);
    promote(&mut bed, standby);
    let said = worker.refuses("gap");
    assert!(said.contains("is gone"), "{said}");
    bed.insert(1, 10);
    assert_eq!(bed.topic.count(), 10);
}
