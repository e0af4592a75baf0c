//! Failovers, restored copies and clones, which nothing inside the database can show: the worker is
//! always stopped meanwhile, so that only the witness knows.

use std::collections::HashSet;
use std::sync::Arc;

use crate::support::bed::{Bed, EVENTS, POSITIONS};
use crate::support::eventually;
use crate::support::oracle::Topic;
use crate::support::servers::{self, Postgres};
use crate::tests;

tests![
    a_promoted_standby_without_the_last_events_is_told_by_the_witness,
    without_a_witness_a_lagging_promotion_passes_unseen,
    a_restored_copy_is_refused,
    a_restored_copy_is_refused_by_a_witness_in_a_file,
    a_witness_that_cannot_be_read_is_refused_and_written_anew_by_a_start_over,
    a_restored_copy_whose_wal_has_grown_past_the_witness_is_refused,
    a_clone_that_was_first_shuts_the_original_out,
    a_clone_beside_the_original_is_refused,
    the_slot_is_told_after_the_witness_and_the_witness_after_the_row,
    a_missing_witness_is_waited_for_and_init_makes_it,
];

fn bed(server: Postgres, witness: &str) -> Bed {
    let mut bed = Bed::on(Arc::new(server), servers::shared_kafka());
    bed.exempt(EVENTS, "two histories come into one topic");
    bed.exempt(POSITIONS, "there are two slots and two rows");
    bed.settings.witness = witness.to_owned();
    bed.write_config();
    bed
}

/// A worker delivers so many events and ends.
fn delivers(bed: &mut Bed, events: i64) {
    let mut worker = bed.streaming();
    let before = bed.topic.count();
    bed.insert(1, events);
    eventually("the events arrive", || (bed.topic.count() >= before + events).then_some(()));
    worker.stop();
}

/// What is inserted now arrives.
fn new_events_arrive(bed: &mut Bed) {
    let sql = "INSERT INTO outbox_event (order_id, revision, event_type, payload)
               SELECT 77, (SELECT coalesce(max(revision), 0) FROM outbox_event WHERE order_id = 77) + n, 'OrderPaid', '{}'
               FROM generate_series(1, 5) n RETURNING event_id::text";
    let ids: HashSet<String> = bed.client.query(sql, &[]).unwrap().iter().map(|r| r.get(0)).collect();
    eventually("new events arrive", || {
        let there: HashSet<String> = bed.topic.read().iter().map(|m| m.id()).collect();
        ids.is_subset(&there).then_some(())
    });
}

/// A standby with the slot, promoted without the last ten events that were published.
fn promote_a_lagging_standby(witness: &str) -> Bed {
    let mut bed = bed(Postgres::start(&[]), witness);
    bed.init();
    bed.sql("SELECT pg_create_physical_replication_slot('standby', true)");
    let settings = ["hot_standby_feedback=on", "primary_slot_name=standby", "sync_replication_slots=on"];
    let standby = Postgres::standby_of(&bed.postgres, &settings);
    let mut there = standby.connect(&bed.database);
    let mut worker = bed.streaming();
    eventually("the slot is on the standby", || {
        // The standby takes a slot only once it needs no older catalog rows than the standby keeps.
        bed.insert(1, 1);
        bed.sql("CHECKPOINT");
        let synced =
            "SELECT count(*) FROM pg_replication_slots WHERE synced AND NOT temporary AND slot_name = $1";
        (there.query_one(synced, &[&bed.slot]).unwrap().get::<_, i64>(0) == 1).then_some(())
    });
    worker.stop();
    let end: postgres::types::PgLsn = bed.value("SELECT pg_current_wal_flush_lsn()");
    eventually("the standby has all", || {
        let replayed = "SELECT pg_last_wal_replay_lsn() >= $1";
        there.query_one(replayed, &[&end]).unwrap().get::<_, bool>(0).then_some(())
    });
    standby.stop("fast");
    delivers(&mut bed, 10);
    bed.postgres.stop("immediate");
    standby.start_again();
    standby.connect("postgres").batch_execute("SELECT pg_promote()").unwrap();
    bed.move_to(Arc::new(standby));
    bed
}

fn a_promoted_standby_without_the_last_events_is_told_by_the_witness() {
    let mut bed = promote_a_lagging_standby("");
    let mut worker = bed.start();
    let said = worker.says("are in Kafka and no longer in the database");
    assert_eq!(said["level"], "ERROR");
    let lsn = |name: &str| said[name].as_str().unwrap().parse::<postgres::types::PgLsn>().unwrap();
    assert!(lsn("phantom_from") < lsn("phantom_to"), "{said}");
    worker.streams();
    new_events_arrive(&mut bed);
    worker.stop();
    // It is told once: the witness knows the new history now.
    let mut again = bed.streaming();
    assert!(again.logged("no longer in the database").is_empty());
    again.stop();
}

/// Why there is a witness; and the start says that there is none.
fn without_a_witness_a_lagging_promotion_passes_unseen() {
    let mut bed = promote_a_lagging_standby("kind = 'none'");
    let mut worker = bed.streaming();
    assert!(worker.logged("no longer in the database").is_empty());
    worker.says("witness.kind is none");
    new_events_arrive(&mut bed);
    worker.stop();
}

/// Ten events, a copy of the data directory, ten more, and the copy is put back.
fn restore_a_copy(witness: &str) -> Bed {
    let mut bed = bed(Postgres::start(&[]), witness);
    bed.init();
    delivers(&mut bed, 10);
    bed.postgres.stop("fast");
    let copy = Postgres::copy_of(&bed.postgres);
    bed.postgres.start_again();
    bed.client = bed.connect();
    delivers(&mut bed, 10);
    bed.postgres.stop("fast");
    copy.start_again();
    bed.move_to(Arc::new(copy));
    bed
}

fn is_refused(bed: &mut Bed, says: &str) {
    let before = bed.topic.count();
    let mut worker = bed.start();
    let said = worker.refuses("identity");
    assert!(said.contains(says), "{said}");
    worker.kill();
    assert_eq!(bed.topic.count(), before);
    let ended = bed.run(&["init", "--start-over", "--from-now"]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let mut worker = bed.streaming();
    new_events_arrive(bed);
    worker.stop();
}

fn a_restored_copy_is_refused() {
    is_refused(&mut restore_a_copy(""), "the database is a restored or older copy");
}

fn a_restored_copy_is_refused_by_a_witness_in_a_file() {
    let file = servers::folder("witness").join("witness.json");
    let mut bed = restore_a_copy(&format!("kind = 'file'\nfile = '{}'", file.display()));
    is_refused(&mut bed, "the database is a restored or older copy");
    assert!(std::fs::read_to_string(file).unwrap().contains(&bed.slot));
}

/// Nothing is given up before it is clear that the new start can be completed.
fn a_witness_that_cannot_be_read_is_refused_and_written_anew_by_a_start_over() {
    let file = servers::folder("witness").join("witness.json");
    let mut bed = Bed::new();
    bed.exempt(EVENTS, "a start-over gives events up");
    bed.exempt(POSITIONS, "a start-over makes another slot");
    bed.settings.witness = format!("kind = 'file'\nfile = '{}'", file.display());
    bed.write_config();
    bed.init();
    delivers(&mut bed, 10);
    std::fs::write(&file, "").unwrap();
    let mut worker = bed.start();
    let said = worker.refuses("identity");
    assert!(said.contains("cannot be read"), "{said}");
    worker.kill();
    let folder = file.parent().unwrap();
    let away = folder.with_extension("away");
    std::fs::rename(folder, &away).unwrap();
    let before = bed.inventory();
    assert_eq!(bed.run(&["init", "--start-over", "--from-now"]).code, Some(4));
    assert_eq!(bed.inventory(), before, "a start-over that cannot be completed changes nothing");
    std::fs::rename(&away, folder).unwrap();
    let ended = bed.run(&["init", "--start-over", "--from-now"]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let mut worker = bed.streaming();
    new_events_arrive(&mut bed);
    worker.stop();
}

fn a_restored_copy_whose_wal_has_grown_past_the_witness_is_refused() {
    let mut bed = restore_a_copy("");
    bed.sql("CREATE TABLE noise AS SELECT repeat('x', 900) FROM generate_series(1, 20000)");
    bed.insert(2, 10);
    is_refused(&mut bed, "the database is a restored or older copy");
}

/// The server, and a copy of it that is not started.
fn clone() -> (Bed, Postgres) {
    let mut bed = bed(Postgres::start(&[]), "");
    bed.init();
    delivers(&mut bed, 10);
    bed.postgres.stop("fast");
    let copy = Postgres::copy_of(&bed.postgres);
    bed.postgres.start_again();
    copy.start_again();
    bed.client = bed.connect();
    (bed, copy)
}

fn a_clone_that_was_first_shuts_the_original_out() {
    let (mut bed, copy) = clone();
    let original = Arc::clone(&bed.postgres);
    bed.move_to(Arc::new(copy));
    bed.streaming().stop(); // a server that was moved looks the same
    bed.move_to(original);
    is_refused(&mut bed, "copy");
}

fn a_clone_beside_the_original_is_refused() {
    let (mut bed, copy) = clone();
    delivers(&mut bed, 10);
    let mut worker = bed.streaming();
    bed.move_to(Arc::new(copy));
    is_refused(&mut bed, "the database is a restored or older copy");
    // Until somebody starts the clone over, which takes the slot's name for it.
    bed.insert(5, 1);
    worker.kill();
}

fn the_slot_is_told_after_the_witness_and_the_witness_after_the_row() {
    let mut bed = Bed::new();
    let topic = format!("{}.witness", bed.database);
    bed.settings.witness = format!("topic = '{topic}'");
    bed.write_config();
    bed.init();
    let witness = Topic { brokers: bed.brokers.clone(), name: topic, partitions: 1 };
    let mut worker = bed.streaming();
    let mut moved = HashSet::new();
    for _ in 0..30 {
        bed.insert(1, 20);
        let slot = bed.slot.clone();
        let confirmed = "SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = $1";
        let confirmed: postgres::types::PgLsn = bed.client.query_one(confirmed, &[&slot]).unwrap().get(0);
        let last = witness.read().pop().unwrap().value();
        let record: serde_json::Value = serde_json::from_str(&last).unwrap();
        let witnessed: postgres::types::PgLsn = record["position"].as_str().unwrap().parse().unwrap();
        let persisted: postgres::types::PgLsn = bed.value("SELECT confirmed_lsn FROM outbox_tailer.position");
        assert!(confirmed <= witnessed && witnessed <= persisted, "{confirmed} {witnessed} {persisted}");
        moved.insert(u64::from(witnessed));
    }
    assert!(moved.len() > 3, "the witness moves with the stream: {moved:?}");
    bed.confirmed();
    worker.stop();
}

fn a_missing_witness_is_waited_for_and_init_makes_it() {
    let mut bed = Bed::new();
    bed.init();
    bed.settings.witness = format!("topic = '{}.late'", bed.database);
    bed.write_config();
    let mut worker = bed.start();
    let said = worker.says("the witness, does not exist");
    assert!(said["message"].as_str().unwrap().contains("run `outbox-tailer init`"), "{said}");
    let ended = bed.run(&["init"]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(ended.stdout.contains("the witness"), "{}", ended.stdout);
    worker.streams();
    bed.insert(1, 5);
    bed.arrived();
    worker.stop();
}
