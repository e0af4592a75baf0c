//! Where history may be lost the worker says so and stops, until an operator's command clears it.

use std::collections::{HashMap, HashSet};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use crate::support::bed::{Bed, EVENTS, Load, OUTBOX, POSITIONS, Rule};
use crate::support::eventually;
use crate::support::oracle::{self, Committed, Topic};
use crate::support::servers::{self, Kafka, Postgres};
use crate::support::worker::Worker;
use crate::tests;

tests![
    a_dropped_slot_is_refused,
    a_slot_dropped_and_made_again_is_refused,
    a_slot_advanced_by_hand_is_refused,
    a_slot_advanced_while_the_worker_starts_is_refused,
    a_change_that_waits_for_synchronous_replication_holds_up_the_position,
    a_limit_lowered_under_the_worker_is_blamed_on_no_event,
    a_lost_slot_is_refused,
    a_slot_that_was_idle_for_too_long_is_refused,
    a_publication_dropped_and_made_again_under_load_is_refused,
    a_publication_changed_and_changed_back_between_two_looks_is_refused,
    a_table_taken_out_and_put_in_again_between_two_looks_is_refused,
    a_row_filter_is_refused_and_start_over_does_not_accept_it,
    a_table_swapped_with_a_copy_is_refused,
    a_dropped_table_is_refused,
    a_renamed_key_column_is_refused_and_loses_nothing,
    a_deleted_position_row_is_refused,
    a_position_raised_by_hand_past_what_was_asked_for_is_refused,
    a_position_raised_by_hand_past_the_end_of_the_wal_is_refused,
    another_server_behind_the_url_is_refused,
    an_oversized_payload_is_refused_and_skipped,
    a_payload_that_only_the_broker_can_refuse_is_refused_and_skipped,
    a_refused_payload_is_published_in_order_once_the_topic_takes_it,
    a_null_key_is_refused_and_skipped,
    of_a_batch_with_one_invalid_record_that_event_is_blamed,
    a_refusal_that_could_not_be_recorded_is_recorded_later,
    another_kafka_cluster_is_refused_until_it_is_accepted,
    a_topic_made_again_with_fewer_partitions_is_refused,
    c80_a_topic_that_has_grown_keeps_its_placement,
];

/// A worker that has delivered ten events of two keys.
fn streaming(bed: &mut Bed) -> Worker {
    bed.observe_apart();
    bed.init();
    let worker = bed.streaming();
    bed.insert(1, 5);
    bed.insert(2, 5);
    bed.arrived();
    worker
}

fn slot_row(bed: &mut Bed) -> String {
    let sql = format!(
        "SELECT concat((SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = '{0}'), ' ',
           (SELECT confirmed_lsn FROM outbox_tailer.position WHERE slot = '{0}'))",
        bed.slot
    );
    bed.value(&sql)
}

/// Waits for the refusal; after it nothing is published or confirmed, and another process refuses
/// as well. Gives the worker, which still runs, and what it said.
fn stays_refused(bed: &mut Bed, mut worker: Worker, reason: &str) -> (Worker, String) {
    let said = worker.refuses(reason);
    let line = worker.logged("refused: ").remove(0);
    assert_eq!(line["ready"], false, "{line}");
    // Its last word may still be on the way.
    let sql =
        format!("SELECT count(*) FROM pg_replication_slots WHERE slot_name = '{}' AND active", bed.slot);
    eventually("the slot is let go", || (bed.value::<i64>(&sql) == 0).then_some(()));
    let before = (bed.topic.count(), slot_row(bed));
    // Goes nowhere; the table may be gone too.
    let insert = "INSERT INTO outbox_event (order_id, revision, event_type, payload) VALUES (1, 77000, 'OrderPaid', '{}')";
    let _ = bed.client.batch_execute(insert);

    let mut leaving = Worker::start(&bed.config, &["--exit-on-refusal"]);
    assert_eq!(leaving.wait().code(), Some(3), "{:#?}", leaving.log());
    let mut restarted = bed.start();
    restarted.refuses(reason);
    restarted.stop();
    assert!(worker.logged("checking again").is_empty(), "nothing but an operator's command clears it");
    assert_eq!((bed.topic.count(), slot_row(bed)), before);
    (worker, said)
}

/// What the topic holds was committed and is in order, and all that was persisted is there.
fn holds(bed: &mut Bed) {
    let committed = bed.committed();
    let persisted: Option<postgres::types::PgLsn> = bed
        .client
        .query_opt("SELECT confirmed_lsn FROM outbox_tailer.position WHERE slot = $1", &[&bed.slot])
        .unwrap()
        .map(|row| row.get(0));
    let messages = bed.topic.read();
    let there: HashSet<String> = messages.iter().map(|m| m.id()).collect();
    for event in &committed.events {
        let persisted = persisted.is_some_and(|p| event.end_lsn <= p.into());
        assert!(!persisted || there.contains(&event.id), "event {} is persisted and not published", event.id);
    }
    // What is left when the missing are taken out is in order, and nothing was invented.
    let events = committed.events.into_iter().filter(|e| there.contains(&e.id)).collect();
    oracle::check(&Committed { events }, &messages);
}

/// `init --start-over --from-now` lets the worker that still runs go on with what comes from now.
fn starts_over(bed: &mut Bed, worker: &mut Worker) {
    holds(bed);
    let before: HashSet<String> = bed.topic.read().iter().map(|m| m.id()).collect();
    let ended = bed.run(&["init", "--start-over", "--from-now"]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    streams_on(worker);
    goes_on(bed, worker, &before);
}

/// Waits until it streams after its refusal.
fn streams_on(worker: &mut Worker) {
    let said = |text: &str| {
        worker.log().iter().rposition(|l| l["message"].as_str().is_some_and(|said| said.contains(text)))
    };
    let what = format!("the worker (pid {}) streams after the refusal", worker.pid());
    eventually(&what, || (said("streaming") > said("refused: ")).then_some(()));
}

fn goes_on(bed: &mut Bed, worker: &mut Worker, before: &HashSet<String>) {
    let from: postgres::types::PgLsn = bed.value("SELECT pg_current_wal_insert_lsn()");
    bed.insert(1, 5);
    bed.insert(3, 5);
    let all = bed.committed().events;
    let (events, given_up): (Vec<_>, Vec<_>) =
        all.into_iter().partition(|e| before.contains(&e.id) || e.end_lsn > u64::from(from));
    bed.given_up = given_up.into_iter().map(|e| e.id).collect();
    assert_eq!(events.len(), before.len() + 10);
    let committed = Committed { events };
    let messages = bed.topic.wait_for(committed.ids());
    oracle::check(&committed, &messages);
    bed.confirmed();
    worker.stop();
}

/// Takes the slot away from the worker and drops it.
fn drop_slot(bed: &mut Bed) {
    let drop = format!(
        "SELECT pg_terminate_backend(active_pid, 5000) FROM pg_replication_slots WHERE slot_name = '{0}';
         SELECT pg_drop_replication_slot('{0}')",
        bed.slot
    );
    eventually("the slot is dropped", || bed.client.batch_execute(&drop).ok());
}

fn make_slot(bed: &mut Bed) {
    bed.exempt(&[Rule::SlotBehindPosition], "a slot that is made now is ahead of the position");
    let make = format!("SELECT pg_create_logical_replication_slot('{}', 'pgoutput')", bed.slot);
    bed.sql(&make);
}

fn a_dropped_slot_is_refused() {
    let mut bed = Bed::new();
    let worker = streaming(&mut bed);
    bed.confirmed();
    drop_slot(&mut bed);
    bed.insert(1, 3);
    let (worker, said) = stays_refused(&mut bed, worker, "gap");
    assert!(said.contains("is gone") && said.contains("--start-over --from-now"), "{said}");
    // Its mere return clears nothing, neither for the running worker nor for a new one.
    make_slot(&mut bed);
    let (mut worker, said) = stays_refused(&mut bed, worker, "gap");
    assert!(said.contains("is gone"), "{said}");
    starts_over(&mut bed, &mut worker);
}

fn a_slot_dropped_and_made_again_is_refused() {
    let mut bed = Bed::new();
    let mut worker = streaming(&mut bed);
    bed.confirmed();
    worker.stop();
    drop_slot(&mut bed);
    bed.insert(1, 3); // never streamed
    make_slot(&mut bed);
    let worker = bed.start();
    let (mut worker, said) = stays_refused(&mut bed, worker, "gap");
    assert!(said.contains("made it anew"), "{said}");
    starts_over(&mut bed, &mut worker);
}

fn a_slot_advanced_by_hand_is_refused() {
    let mut bed = Bed::new();
    let mut worker = streaming(&mut bed);
    bed.confirmed();
    worker.stop();
    let position: postgres::types::PgLsn = bed.value("SELECT confirmed_lsn FROM outbox_tailer.position");
    bed.exempt(&[Rule::SlotBehindPosition], "the slot is advanced by hand");
    bed.insert(1, 10);
    let advance =
        format!("SELECT end_lsn FROM pg_replication_slot_advance('{}', pg_current_wal_lsn())", bed.slot);
    let advanced: postgres::types::PgLsn = bed.value(&advance);
    let worker = bed.start();
    let (mut worker, said) = stays_refused(&mut bed, worker, "gap");
    assert!(said.contains(&format!("({position}, {advanced}]")), "{said}");
    starts_over(&mut bed, &mut worker);
}

/// Between the first look at the slot and the start of the stream lies the talk with Kafka.
fn a_slot_advanced_while_the_worker_starts_is_refused() {
    let mut bed = Bed::on(servers::shared_postgres(), Arc::new(Kafka::start(&[])));
    let mut worker = streaming(&mut bed);
    bed.confirmed();
    worker.stop();
    bed.insert(1, 1);
    let broker = bed.kafka.pid();
    let signal = |name: &str| {
        let sent = std::process::Command::new("kill").args(["-s", name, &broker.to_string()]).status();
        assert!(sent.unwrap().success());
    };
    signal("STOP");
    let mut worker = bed.start();
    let sessions = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
                    AND application_name = 'outbox-tailer'";
    eventually("the worker has looked", || (bed.value::<i64>(sessions) == 2).then_some(()));
    let looked = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
                  AND application_name = 'outbox-tailer' AND query LIKE '%commit_lsn%'";
    eventually("the worker asks Kafka", || (bed.value::<i64>(looked) == 1).then_some(()));
    bed.exempt(&[Rule::SlotBehindPosition], "the slot is advanced by hand");
    bed.sql(&format!("SELECT pg_replication_slot_advance('{}', pg_current_wal_lsn())", bed.slot));
    signal("CONT");
    worker.refuses("gap");
}

/// Decoding sees a commit before it is visible: the position must not pass it.
fn a_change_that_waits_for_synchronous_replication_holds_up_the_position() {
    let mut bed = Bed::on(Arc::new(Postgres::start(&[])), servers::shared_kafka());
    bed.settings.worker = "idle_interval_ms = 50".to_owned();
    bed.write_config();
    let mut worker = streaming(&mut bed);
    bed.confirmed();
    bed.sql("ALTER SYSTEM SET synchronous_standby_names = 'nobody'");
    bed.sql("SELECT pg_reload_conf()");
    eventually("the setting is in force", || {
        (bed.connect().query_one("SHOW synchronous_standby_names", &[]).unwrap().get::<_, String>(0)
            == "nobody")
            .then_some(())
    });
    let before: postgres::types::PgLsn = bed.value("SELECT pg_current_wal_insert_lsn()");
    let (mut changing, publication) = (bed.connect(), bed.publication.clone());
    let change = std::thread::spawn(move || {
        changing.batch_execute(&format!("ALTER PUBLICATION {publication} SET (publish = 'update')")).unwrap();
    });
    let waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'";
    eventually("the change waits", || (bed.value::<i64>(waits) == 1).then_some(()));
    let after: postgres::types::PgLsn = bed.value("SELECT pg_current_wal_insert_lsn()");
    bed.sql("SET synchronous_commit = local");
    bed.sql("CREATE TABLE noise AS SELECT repeat('x', 900) FROM generate_series(1, 2000)");
    worker.says("a change of publication");
    let persisted = bed.positions().1;
    assert!(
        persisted <= u64::from(after),
        "{persisted:X} has passed the change between {before} and {after}"
    );
    bed.sql("ALTER SYSTEM RESET synchronous_standby_names");
    bed.sql("SELECT pg_reload_conf()");
    change.join().unwrap();
    worker.refuses("publication");
}

/// A batch over the new limit fails as a whole; each of its events fits.
fn a_limit_lowered_under_the_worker_is_blamed_on_no_event() {
    let mut bed = Bed::new();
    bed.settings.properties = "\"linger.ms\" = 100".to_owned();
    bed.write_config();
    let mut worker = streaming(&mut bed);
    bed.confirmed();
    bed.topic.set("max.message.bytes", "3000");
    (1..5).for_each(|key| bed.insert(key, 300));
    bed.arrived();
    bed.confirmed();
    assert!(worker.logged("refused: ").is_empty(), "{:#?}", worker.log());
    worker.stop();
}

fn a_lost_slot_is_refused() {
    let settings = ["max_slot_wal_keep_size=16MB", "max_wal_size=32MB", "min_wal_size=32MB"];
    let mut bed = Bed::on(Arc::new(Postgres::start(&settings)), servers::shared_kafka());
    bed.exempt(EVENTS, "the test's own slot is lost as well");
    let mut worker = streaming(&mut bed);
    bed.confirmed();
    worker.stop();
    bed.insert(1, 10);
    let delivered = bed.topic.read();
    bed.sql("CREATE TABLE noise (t text)");
    let status = format!("SELECT wal_status FROM pg_replication_slots WHERE slot_name = '{}'", bed.slot);
    eventually("the slot is lost", || {
        bed.sql("INSERT INTO noise SELECT repeat('x', 900) FROM generate_series(1, 20000)");
        bed.sql("CHECKPOINT");
        (bed.value::<String>(&status) == "lost").then_some(())
    });
    let worker = bed.start();
    let (mut worker, said) = stays_refused(&mut bed, worker, "gap");
    assert!(said.contains("is lost (wal_removed)"), "{said}");
    // The test's own slot starts over with the worker's.
    bed.sql("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE NOT active");
    let ended = bed.run(&["init", "--start-over", "--from-now"]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    bed.observe();
    streams_on(&mut worker);
    bed.insert(3, 5);
    let committed = bed.committed();
    let messages = bed.topic.wait_for(committed.ids());
    assert_eq!(messages.len(), delivered.len() + 5);
    let ids: HashSet<_> = delivered.iter().map(|m| m.id()).collect();
    let new: Vec<_> = messages.into_iter().filter(|m| !ids.contains(&m.id())).collect();
    oracle::check(&committed, &new);
    worker.stop();
}

fn a_slot_that_was_idle_for_too_long_is_refused() {
    let mut bed =
        Bed::on(Arc::new(Postgres::start(&["idle_replication_slot_timeout=1s"])), servers::shared_kafka());
    bed.exempt(EVENTS, "the test's own slot is lost as well");
    let mut worker = streaming(&mut bed);
    bed.confirmed();
    worker.stop();
    let status = format!("SELECT wal_status FROM pg_replication_slots WHERE slot_name = '{}'", bed.slot);
    eventually("the slot is lost", || {
        bed.sql("CHECKPOINT");
        (bed.value::<String>(&status) == "lost").then_some(())
    });
    let said = bed.start().refuses("gap");
    assert!(said.contains("is lost (idle_timeout)"), "{said}");
}

fn a_publication_dropped_and_made_again_under_load_is_refused() {
    let mut bed = Bed::new();
    let worker = streaming(&mut bed);
    let load = Load::start(&bed, 2, Duration::from_millis(2));
    let before = bed.topic.count();
    eventually("events flow", || (bed.topic.count() > before + 100).then_some(()));
    let name = bed.publication.clone();
    bed.sql(&format!("DROP PUBLICATION {name}"));
    let rows: i64 = bed.value("SELECT count(*) FROM outbox_event");
    eventually("rows are committed without a publication", || {
        (bed.value::<i64>("SELECT count(*) FROM outbox_event") > rows + 20).then_some(())
    });
    bed.sql(&format!("CREATE PUBLICATION {name} FOR TABLE outbox_event WITH (publish = 'insert')"));
    let mut worker = worker;
    worker.refuses("publication");
    load.stop();
    let (mut worker, _) = stays_refused(&mut bed, worker, "publication");
    starts_over(&mut bed, &mut worker);
}

/// Two changes that undo each other, with rows between them that are never streamed.
fn changed_and_back(there: &str, back: &str) {
    let mut bed = Bed::new();
    // Both changes come between two looks.
    bed.settings.worker = "position_interval_ms = 60000".to_owned();
    bed.write_config();
    let mut worker = streaming(&mut bed);
    let name = bed.publication.clone();
    bed.sql(&there.replace("$P", &name));
    bed.insert(1, 5); // never streamed
    bed.sql(&back.replace("$P", &name));
    bed.insert(1, 5);
    eventually("what came after the change is published", || (bed.topic.count() >= 15).then_some(()));
    assert_eq!(bed.topic.count(), 15, "what came between is not in the stream");
    bed.terminate("walsender"); // the next session looks again
    worker.refuses("publication");
    holds(&mut bed);
    let (mut worker, said) = stays_refused(&mut bed, worker, "publication");
    assert!(said.contains(&name), "{said}");
    bed.settings.worker.clear();
    bed.write_config();
    worker.stop();
    let mut worker = bed.start();
    worker.refuses("publication");
    starts_over(&mut bed, &mut worker);
}

fn a_publication_changed_and_changed_back_between_two_looks_is_refused() {
    changed_and_back(
        "ALTER PUBLICATION $P SET (publish = 'update')",
        "ALTER PUBLICATION $P SET (publish = 'insert')",
    );
}

fn a_table_taken_out_and_put_in_again_between_two_looks_is_refused() {
    changed_and_back(
        "ALTER PUBLICATION $P DROP TABLE outbox_event",
        "ALTER PUBLICATION $P ADD TABLE outbox_event",
    );
}

fn a_row_filter_is_refused_and_start_over_does_not_accept_it() {
    let mut bed = Bed::new();
    let worker = streaming(&mut bed);
    bed.sql("ALTER TABLE outbox_event REPLICA IDENTITY FULL");
    let name = bed.publication.clone();
    bed.sql(&format!("ALTER PUBLICATION {name} SET TABLE outbox_event WHERE (order_id < 2)"));
    bed.insert(2, 1); // filtered out
    bed.insert(1, 1);
    let (mut worker, said) = stays_refused(&mut bed, worker, "publication");
    assert!(said.contains("outbox_event"), "{said}");
    let before = slot_row(&mut bed);
    let ended = bed.run(&["init", "--start-over", "--from-now"]);
    assert_eq!(ended.code, Some(2), "{}", ended.stderr);
    assert!(ended.line().contains("row filter"), "{}", ended.stderr);
    assert_eq!(slot_row(&mut bed), before, "a mistake changes nothing");
    bed.sql(&format!("ALTER PUBLICATION {name} SET TABLE outbox_event"));
    starts_over(&mut bed, &mut worker);
}

fn a_table_swapped_with_a_copy_is_refused() {
    let mut bed = Bed::new();
    let worker = streaming(&mut bed);
    bed.sql(
        "BEGIN; ALTER TABLE outbox_event RENAME TO old_outbox;
         CREATE TABLE outbox_event (LIKE old_outbox INCLUDING ALL); COMMIT",
    );
    bed.insert(1, 5); // not in the publication
    bed.sql(
        "INSERT INTO old_outbox (order_id, revision, event_type, payload) VALUES (5, 1, 'OrderPaid', '{}')",
    );
    let (mut worker, said) = stays_refused(&mut bed, worker, "publication");
    assert!(said.contains("another table now"), "{said}");
    for publication in [&bed.publication.clone(), &bed.observed.clone()] {
        bed.sql(&format!("ALTER PUBLICATION {publication} SET TABLE outbox_event, old_outbox"));
    }
    starts_over(&mut bed, &mut worker);
}

fn a_dropped_table_is_refused() {
    let mut bed = Bed::new();
    bed.settings.worker = "idle_interval_ms = 100".to_owned();
    bed.write_config();
    let worker = streaming(&mut bed);
    bed.confirmed();
    bed.sql("DROP TABLE outbox_event; CREATE TABLE noise AS SELECT repeat('x', 900) FROM generate_series(1, 2000)");
    let mut worker = worker;
    worker.refuses("publication");
    // Another one of the same name is another table.
    bed.sql(OUTBOX);
    let (mut worker, said) = stays_refused(&mut bed, worker, "publication");
    assert!(said.contains("does not exist any more"), "{said}");
    for publication in [&bed.publication.clone(), &bed.observed.clone()] {
        bed.sql(&format!("ALTER PUBLICATION {publication} ADD TABLE outbox_event"));
    }
    starts_over(&mut bed, &mut worker);
}

fn a_renamed_key_column_is_refused_and_loses_nothing() {
    let mut bed = Bed::new();
    let mut worker = streaming(&mut bed);
    bed.sql("ALTER TABLE outbox_event RENAME order_id TO aggregateid");
    let row = "INSERT INTO outbox_event (aggregateid, revision, event_type, payload) VALUES (1, 100, 'OrderPaid', '{}')";
    bed.sql(row);
    let said = worker.refuses("columns");
    assert!(said.contains("outbox_event") && said.contains("order_id"), "{said}");
    bed.sql("ALTER TABLE outbox_event RENAME aggregateid TO order_id");
    bed.insert(1, 1);
    // The row is in the WAL under the other name, so the configuration must know both.
    let (mut worker, _) = stays_refused(&mut bed, worker, "columns");
    worker.stop();
    bed.settings.outbox = format!(
        "[[outbox]]\ntable = 'public.outbox_event'\ntopic = {:?}\nkey = ['order_id', 'aggregateid']",
        bed.topic.name
    );
    bed.write_config();
    let mut worker = bed.streaming();
    bed.arrived();
    bed.confirmed();
    worker.stop();
}

fn a_deleted_position_row_is_refused() {
    let mut bed = Bed::new();
    let worker = streaming(&mut bed);
    bed.confirmed();
    bed.sql("DELETE FROM outbox_tailer.position");
    bed.insert(1, 5);
    let (mut worker, said) = stays_refused(&mut bed, worker, "gap");
    assert!(said.contains("position row") && said.contains("deleted"), "{said}");
    starts_over(&mut bed, &mut worker);
}

/// The fault is the edit: nowhere else does a test write to the row.
fn raise_position(bed: &mut Bed, to: &str) {
    bed.sql(&format!("UPDATE outbox_tailer.position SET confirmed_lsn = {to}"));
}

fn a_position_raised_by_hand_past_what_was_asked_for_is_refused() {
    // By the next write of the position, and by the next start check.
    for ends_the_session in [false, true] {
        let mut bed = Bed::new();
        if ends_the_session {
            bed.settings.worker = "position_interval_ms = 60000".to_owned();
            bed.write_config();
        }
        let mut worker = streaming(&mut bed);
        if !ends_the_session {
            bed.confirmed();
        }
        bed.sql("SELECT pg_logical_emit_message(false, 'noise', 'noise', true)");
        raise_position(&mut bed, "pg_current_wal_insert_lsn()");
        let says = if ends_the_session {
            bed.terminate("walsender");
            "more than we have asked for"
        } else {
            bed.insert(1, 1);
            "by another hand"
        };
        let said = worker.refuses("gap");
        assert!(said.contains(says), "{said}");
        // A new process has no memory, and remembers all the same.
        eventually("the refusal is in the row", || {
            bed.value::<bool>("SELECT refusal IS NOT NULL FROM outbox_tailer.position").then_some(())
        });
        worker.kill();
        worker = bed.start();
        let again = worker.refuses("gap");
        assert_eq!(again, said);
        starts_over(&mut bed, &mut worker);
    }
}

fn a_position_raised_by_hand_past_the_end_of_the_wal_is_refused() {
    let mut bed = Bed::new();
    bed.exempt(&[Rule::PositionBehindTopic], "the position is past everything");
    let mut worker = streaming(&mut bed);
    bed.confirmed();
    worker.stop();
    raise_position(&mut bed, "'FFFFFFFF/0'");
    bed.insert(1, 3);
    let worker = bed.start();
    let (_worker, said) = stays_refused(&mut bed, worker, "gap");
    assert!(said.contains("beyond the end of the server's WAL"), "{said}");
}

fn another_server_behind_the_url_is_refused() {
    let mut bed = Bed::on(Arc::new(Postgres::start(&[])), servers::shared_kafka());
    bed.exempt(EVENTS, "the topic holds what another server committed");
    bed.exempt(POSITIONS, "the two servers' positions have nothing to do with each other");
    let worker = streaming(&mut bed);
    bed.confirmed();
    let programs = Postgres::programs();
    let run = |program: &str, port: u16, arguments: &[&str], input: Option<std::fs::File>| {
        let mut command = Command::new(programs.join(program));
        command.args(["-h", "127.0.0.1", "-U", "postgres", "-p", &port.to_string()]).args(arguments);
        if let Some(input) = input {
            command.stdin(input);
        }
        let output = command.output().unwrap();
        assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
        output.stdout
    };
    let dump = servers::folder("dump").join("dump.sql");
    std::fs::write(&dump, run("pg_dump", bed.postgres.port, &[&bed.database], None)).unwrap();
    let mut other = Postgres::stopped("18.6", &[]);
    bed.postgres.stop("fast");
    other.port = bed.postgres.port;
    other.start_again();
    other.connect("postgres").batch_execute(&format!("CREATE DATABASE {}", bed.database)).unwrap();
    let original = std::mem::replace(&mut bed.postgres, Arc::new(other));
    bed.client = bed.connect();
    make_slot(&mut bed);
    let load = ["--single-transaction", "-q", "-v", "ON_ERROR_STOP=1", "-d", &bed.database];
    run("psql", bed.postgres.port, &load, Some(std::fs::File::open(&dump).unwrap()));
    bed.observe();
    let (mut worker, said) = stays_refused(&mut bed, worker, "identity");
    assert!(said.contains("system identifier"), "{said}");
    // Everything that the topic holds now came from the first server.
    let before = bed.topic.read().len();
    let ended = bed.run(&["init", "--start-over", "--from-now"]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    streams_on(&mut worker);
    let from: postgres::types::PgLsn = bed.value("SELECT pg_current_wal_insert_lsn()");
    bed.insert(9, 5);
    let mut committed = bed.committed();
    committed.events.retain(|e| e.end_lsn > u64::from(from));
    let messages = bed.topic.wait_for(committed.ids());
    assert_eq!(messages.len(), before + 5);
    let new: Vec<_> = messages.into_iter().filter(|m| m.key() == "9").collect();
    oracle::check(&committed, &new);
    worker.stop();
    drop(original);
}

/// The worker refuses event `id`, which an operator then skips; everything else arrives.
fn poison(bed: &mut Bed, worker: Worker, id: &str, says: &[&str]) {
    let (worker, said) = stays_refused(bed, worker, "poison");
    for text in ["public.outbox_event", id, &format!("skip {id}")].iter().chain(says) {
        assert!(said.contains(text), "{text:?} is not in {said}");
    }
    let committed = bed.committed();
    let place = committed.events.iter().position(|e| e.id == id).unwrap();
    let before = Committed { events: committed.events[..place].to_vec() };
    oracle::check(&before, &bed.topic.read());
    let (confirmed, poisoned) = (bed.positions().0, &committed.events[place]);
    assert!(confirmed >= before.events.last().unwrap().end_lsn, "what was before it is confirmed");
    assert!(confirmed < poisoned.end_lsn);

    skips(bed, worker, id, &before.events[0].id);
}

/// An operator skips event `id`, after trying another one; everything else arrives.
fn skips(bed: &mut Bed, mut worker: Worker, id: &str, another: &str) {
    let other = bed.run(&["skip", another]);
    assert_eq!(other.code, Some(2), "{}", other.stderr);
    assert!(other.line().contains(id), "{}", other.stderr);
    assert!(worker.logged("checking again").is_empty());
    let skipped = bed.run(&["skip", id, "--reason", "a test"]);
    assert_eq!(skipped.code, Some(0), "{}", skipped.stderr);
    bed.given_up.insert(id.to_owned());
    streams_on(&mut worker);
    let mut committed = bed.committed();
    committed.events.retain(|e| e.id != id);
    let messages = bed.topic.wait_for(committed.ids());
    oracle::check(&committed, &messages);
    bed.confirmed();
    let audit = format!(
        "SELECT count(*) FROM outbox_tailer.audit WHERE action = 'skip' AND slot = '{}'
           AND detail->>'event_id' = '{id}' AND detail->>'reason' = 'a test'",
        bed.slot
    );
    assert_eq!(bed.value::<i64>(&audit), 1);
    worker.stop();
}

/// A row whose payload is about 200 kB that do not compress; gives its id.
fn insert_large(bed: &mut Bed) -> String {
    bed.value(
        "INSERT INTO outbox_event (order_id, revision, event_type, payload)
         SELECT 2, 100, 'OrderPaid', jsonb_build_object('large', string_agg(md5(random()::text), ''))
         FROM generate_series(1, 6250) RETURNING event_id::text",
    )
}

fn small_limit(properties: &str) -> Bed {
    let limit = [("max.message.bytes", "100000")];
    let mut bed = Bed::with(servers::shared_postgres(), servers::shared_kafka(), OUTBOX, &limit);
    bed.settings.properties = properties.to_owned();
    bed.write_config();
    bed
}

fn an_oversized_payload_is_refused_and_skipped() {
    let mut bed = small_limit("");
    let worker = streaming(&mut bed);
    bed.insert(1, 5);
    let id = insert_large(&mut bed);
    bed.insert(1, 5);
    bed.insert(2, 5);
    let says = ["key 2", "max.message.bytes is 100000", "message.max.bytes is 1004096", "record takes 200"];
    poison(&mut bed, worker, &id, &says);
}

/// Compressed, it might have fitted: only the broker can tell. What it acknowledged before that is
/// persisted, so that a restart repeats nothing.
fn a_payload_that_only_the_broker_can_refuse_is_refused_and_skipped() {
    let mut bed = small_limit("\"compression.type\" = \"lz4\"");
    let mut worker = streaming(&mut bed);
    bed.confirmed();
    bed.insert(1, 5);
    let id = insert_large(&mut bed);
    bed.insert(1, 5);
    bed.insert(2, 5);
    let said = worker.refuses("poison");
    for text in ["public.outbox_event", "key 2", "the broker refuses its 200", &format!("skip {id}")] {
        assert!(said.contains(text), "{text:?} is not in {said}");
    }
    let published = bed.topic.read().len();
    let mut restarted = bed.start();
    restarted.refuses("poison");
    restarted.stop();
    holds(&mut bed);
    assert_eq!(bed.topic.read().len(), published, "the restart repeated something");
    let committed = bed.committed();
    let poisoned = committed.events.iter().find(|e| e.id == id).unwrap();
    assert!(bed.positions().1 < poisoned.end_lsn);
    let after: HashSet<_> =
        committed.events.iter().filter(|e| e.end_lsn >= poisoned.end_lsn).map(|e| &e.id).collect();
    let past = bed.topic.read().iter().filter(|m| after.contains(&m.id())).count();
    assert_eq!(past, 0, "nothing after it is published");
    skips(&mut bed, worker, &id, &committed.events[0].id);
}

/// The other remedy: the order of its key holds, although the event was refused at first.
fn a_refused_payload_is_published_in_order_once_the_topic_takes_it() {
    let mut bed = small_limit("\"compression.type\" = \"lz4\"");
    let mut worker = streaming(&mut bed);
    insert_large(&mut bed);
    bed.insert(2, 5);
    bed.insert(1, 5);
    worker.refuses("poison");
    worker.stop();
    bed.topic.set("max.message.bytes", "1000000");
    let mut worker = bed.streaming();
    bed.arrived();
    bed.confirmed();
    worker.stop();
}

fn a_null_key_is_refused_and_skipped() {
    let table = OUTBOX.replace("order_id bigint NOT NULL", "order_id bigint");
    let mut bed = Bed::with(servers::shared_postgres(), servers::shared_kafka(), &table, &[]);
    let worker = streaming(&mut bed);
    let id: String = bed.value(
        "INSERT INTO outbox_event (revision, event_type, payload) VALUES (1, 'OrderPaid', '{}') RETURNING event_id::text",
    );
    bed.insert(1, 5);
    poison(&mut bed, worker, &id, &["key NULL", "its key is NULL"]);
}

/// Two tables share the topic; of one the time of the commit counts, which the broker finds too old.
/// It refuses the batch, and does not say for whom.
fn of_a_batch_with_one_invalid_record_that_event_is_blamed() {
    let late = OUTBOX.replace("outbox_event (", "late (").replace("outbox_order_revision_key", "late_key");
    let limit = [("message.timestamp.before.max.ms", "8000")];
    let tables = format!("{OUTBOX}; {late}");
    let mut bed = Bed::with(servers::shared_postgres(), servers::shared_kafka(), &tables, &limit);
    let outbox = |table: &str| format!("[[outbox]]\ntable = '{table}'\ntopic = '{}'\n", bed.topic.name);
    bed.settings.outbox = format!("{}{}timestamp = 'commit'\n", outbox("outbox_event"), outbox("late"));
    bed.settings.properties = "\"linger.ms\" = 100".to_owned();
    bed.write_config();
    bed.init();
    let mut worker = bed.streaming();
    bed.insert(1, 1);
    bed.arrived();
    bed.confirmed();
    // It sleeps until the commit is too old, and then sends the three transactions as one batch.
    worker.signal("STOP");
    bed.insert(1, 5);
    let insert =
        "INSERT INTO late (order_id, revision, event_type, payload) VALUES (1, 1, 'OrderPaid', '{}')";
    let id: String = bed.value(&format!("{insert} RETURNING event_id::text"));
    let committed = std::time::Instant::now();
    bed.insert(1, 5);
    eventually("the commit is too old", || (committed.elapsed() > Duration::from_secs(9)).then_some(()));
    worker.signal("CONT");
    let said = worker.refuses("poison");
    for text in ["public.late", "key 1", "InvalidTimestamp", &format!("skip {id}")] {
        assert!(said.contains(text), "{text:?} is not in {said}");
    }
    assert_eq!(bed.topic.count(), 6, "what was before it is published, what was after it is not");
    let first = bed.committed().events[0].id.clone();
    skips(&mut bed, worker, &id, &first);
}

/// `skip` goes by what the row says.
fn a_refusal_that_could_not_be_recorded_is_recorded_later() {
    let table = OUTBOX.replace("order_id bigint NOT NULL", "order_id bigint");
    let mut bed = Bed::with(servers::shared_postgres(), servers::shared_kafka(), &table, &[]);
    bed.init();
    let mut worker = bed.start_with(&["--log", "outbox_tailer=debug"]);
    worker.streams();
    bed.insert(1, 1);
    bed.confirmed();
    bed.sql(
        "CREATE FUNCTION not_now() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION ''not now''; END';
         CREATE TRIGGER not_now BEFORE UPDATE OF refusal ON outbox_tailer.position FOR EACH ROW EXECUTE FUNCTION not_now()",
    );
    let row = "INSERT INTO outbox_event (revision, event_type, payload) VALUES (1, 'OrderPaid', '{}') RETURNING event_id::text";
    let id: String = bed.value(row);
    worker.refuses("poison");
    worker.says("cannot record the refusal");
    let early = bed.run(&["skip", &id]);
    assert_eq!(early.code, Some(2), "{}", early.stderr);
    bed.sql("DROP TRIGGER not_now ON outbox_tailer.position");
    let recorded = "SELECT refusal->'detail'->>'event_id' FROM outbox_tailer.position";
    eventually("the refusal is recorded", || {
        bed.value::<Option<String>>(recorded).filter(|found| *found == id)
    });
    let first = bed.committed().events[0].id.clone();
    skips(&mut bed, worker, &id, &first);
}

/// The messages of a topic that is not the one where the earlier events went.
fn only_what_is_new(bed: &mut Bed, worker: &mut Worker, known: &HashMap<String, ()>) {
    bed.insert(1, 5);
    bed.insert(3, 5);
    let mut committed = bed.committed();
    committed.events.retain(|e| !known.contains_key(&e.id));
    let messages = bed.topic.wait_for(committed.ids());
    oracle::check(&committed, &messages);
    bed.confirmed();
    worker.stop();
}

fn known(bed: &mut Bed) -> HashMap<String, ()> {
    bed.committed().ids().map(|id| (id.clone(), ())).collect()
}

fn another_kafka_cluster_is_refused_until_it_is_accepted() {
    let mut bed = Bed::new();
    bed.exempt(EVENTS, "they are in two topics");
    let mut worker = streaming(&mut bed);
    bed.confirmed();
    let known = known(&mut bed);
    let ended = bed.run(&["init", "--accept-kafka"]);
    assert_eq!(ended.code, Some(2), "a worker at work must be stopped first: {}", ended.stderr);
    worker.stop();
    bed.kafka = Arc::new(Kafka::start(&[]));
    bed.brokers = bed.kafka.brokers();
    bed.topic = Topic::create(&bed.kafka.brokers(), &bed.topic.name, 6, &[]);
    bed.write_config();
    let worker = bed.start();
    let (mut worker, said) = stays_refused(&mut bed, worker, "kafka");
    assert!(said.contains("init --accept-kafka"), "{said}");
    worker.stop();
    let ended = bed.run(&["init", "--accept-kafka"]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let mut worker = bed.streaming();
    only_what_is_new(&mut bed, &mut worker, &known);
}

fn a_topic_made_again_with_fewer_partitions_is_refused() {
    let mut bed = Bed::new();
    bed.exempt(EVENTS, "what was in the topic goes with it");
    let mut worker = streaming(&mut bed);
    bed.confirmed();
    let known = known(&mut bed);
    worker.stop();
    bed.topic.delete();
    eventually("the topic is gone", || (!bed.topic.exists()).then_some(()));
    bed.topic = Topic::create(&bed.topic.brokers, &bed.topic.name, 3, &[]);
    let worker = bed.start();
    let (mut worker, said) = stays_refused(&mut bed, worker, "kafka");
    assert!(said.contains("3 partitions") && said.contains("over 6"), "{said}");
    worker.stop();
    let ended = bed.run(&["init", "--accept-kafka"]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let mut worker = bed.streaming();
    only_what_is_new(&mut bed, &mut worker, &known);
}

fn c80_a_topic_that_has_grown_keeps_its_placement() {
    let mut bed = Bed::new();
    bed.init();
    let mut worker = bed.streaming();
    let insert = |bed: &mut Bed| (0..50).for_each(|key| bed.insert(key, 2));
    insert(&mut bed);
    bed.topic.grow(12);
    insert(&mut bed);
    bed.arrived();
    worker.stop();
    worker = bed.streaming();
    let said = worker.says("the topic has grown");
    assert_eq!(
        (&said["level"], &said["partitions"], &said["recorded"]),
        (&"WARN".into(), &12.into(), &6.into())
    );
    insert(&mut bed);
    // The check says that no key has moved.
    let (messages, verdict) = bed.arrived();
    assert_eq!((messages.len(), verdict.repeats), (300, 0));
    assert!(messages.iter().all(|m| m.partition < 6));
    assert!(worker.logged("refused: ").is_empty());
    bed.confirmed();
    worker.stop();
}
