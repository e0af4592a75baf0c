//! Transactions of every shape, and what an outbox's neighbours do to the stream.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::servers_fail::number;
use crate::support::bed::{Bed, EVENTS, Load};
use crate::support::servers::{self, Postgres};
use crate::support::worker::Worker;
use crate::support::{Defer, eventually, within};
use crate::tests;
use postgres::types::PgLsn;
use std::io::Write as _;

tests![
    one_transaction_of_100_000_rows_takes_less_than_64_mb,
    a_backlog_of_200_000_rows_drains_in_less_than_64_mb,
    long_and_short_transactions_interleave_across_restarts,
    a_row_that_a_savepoint_rolls_back_is_never_published,
    c33_a_partitioned_outbox_takes_new_partitions_while_running,
    c33_a_partition_attached_again_is_refused,
    c33_a_partition_detached_concurrently_is_no_change,
    c33_an_unlogged_partition_is_refused,
    c33_a_partition_that_is_a_foreign_table_is_refused,
    c33_an_outbox_attached_to_a_published_table_is_refused,
    c35_columns_are_added_dropped_moved_and_renamed_under_load,
    c37_a_row_deleted_in_its_own_transaction_is_published,
    c38_updates_and_deletes_are_ignored_and_counted,
    c40_rollbacks_and_empty_transactions_make_no_message,
    c41_truncates_are_ignored_and_counted,
    c42_prepared_transactions_come_when_they_are_committed,
    c43_logical_messages_are_ignored,
    c45_a_copy_killed_half_way_replays_from_its_start,
    c46_the_order_of_a_key_is_the_order_of_commits,
    c48_tables_of_others_in_the_publication_are_ignored,
    c50_an_idle_outbox_follows_its_busy_neighbours,
    an_idle_database_is_not_kept_busy_by_position_writes,
    c51_the_flush_position_never_goes_back,
    c52_ten_restarts_repeat_nothing,
];

const RSS_LIMIT: u64 = 64 << 20;

/// What all sessions of a worker that has ended counted under this name.
fn counted(worker: &Worker, name: &str) -> u64 {
    worker.logged("session ended").iter().map(|line| line[name].as_u64().unwrap()).sum()
}

fn assert_rss(worker: &Worker) {
    let peak = worker.peak_rss_bytes();
    assert!(peak < RSS_LIMIT, "the worker took {peak} bytes");
}

fn one_transaction_of_100_000_rows_takes_less_than_64_mb() {
    let rows = i64::try_from(number("OUTBOX_ROWS", 100_000)).unwrap();
    let mut bed = Bed::new();
    let counted = rows > 1_000_000;
    if counted {
        bed.exempt(EVENTS, "too many to be held in memory: they are counted");
    }
    bed.init();
    let mut worker = bed.streaming();
    bed.insert_many(1, rows);
    let end: PgLsn = bed.value("SELECT pg_current_wal_flush_lsn()");
    if counted {
        let limit = Duration::from_secs(3600);
        within(limit, "all rows arrive", &mut || (bed.topic.count() >= rows).then_some(()));
        assert_eq!(bed.topic.count(), rows);
    } else {
        assert_eq!(bed.arrived().1.repeats, 0);
    }
    bed.insert(1, 1); // the slot follows what is committed after it, too
    eventually("the slot is confirmed past it", || (bed.positions().0 >= end.into()).then_some(()));
    eprintln!("rows={rows} peak_kb={}", worker.peak_rss_bytes() >> 10);
    assert_rss(&worker);
    worker.stop();
}

fn a_backlog_of_200_000_rows_drains_in_less_than_64_mb() {
    let mut bed = Bed::new();
    bed.init();
    bed.insert_in_transactions(1, 100_000, 1);
    bed.insert_in_transactions(2, 100_000, 5000);
    let mut worker = bed.streaming();
    let (_, verdict) = bed.arrived();
    assert_eq!(verdict.repeats, 0);
    bed.confirmed();
    assert_rss(&worker);
    worker.stop();
}

fn long_and_short_transactions_interleave_across_restarts() {
    let mut bed = Bed::new();
    bed.init();
    let mut worker = bed.streaming();
    let (mut first, mut second) = (bed.connect(), bed.connect());
    let mut long = first.transaction().unwrap();
    let mut longer = second.transaction().unwrap();
    // Both add to key 1 beside their own, so that commit order and statement order differ.
    let insert = "INSERT INTO outbox_event (order_id, revision, event_type, payload) VALUES ($1, $2, 'OrderPaid', '{}')";
    let short = |bed: &mut Bed, revision: i64| {
        bed.client.execute(insert, &[&1i64, &revision]).unwrap();
        for key in 2..20i64 {
            bed.client.execute(insert, &[&key, &revision]).unwrap();
        }
    };
    long.execute(insert, &[&1i64, &1000i64]).unwrap();
    longer.execute(insert, &[&1i64, &2000i64]).unwrap();
    short(&mut bed, 1);
    bed.arrived();
    worker.stop();

    long.execute(insert, &[&1i64, &1001i64]).unwrap();
    short(&mut bed, 2);
    worker = bed.streaming();
    long.commit().unwrap();
    short(&mut bed, 3);
    worker.kill();

    longer.execute(insert, &[&1i64, &2001i64]).unwrap();
    worker = bed.streaming();
    short(&mut bed, 4);
    longer.commit().unwrap();
    short(&mut bed, 5);
    let (messages, _) = bed.arrived();
    bed.confirmed();
    let mut seen = Vec::new();
    for revision in messages.iter().filter(|m| m.key() == "1").map(|m| m.header("revision").unwrap()) {
        if !seen.contains(&revision) {
            seen.push(revision);
        }
    }
    assert_eq!(seen, ["1", "2", "1000", "1001", "3", "4", "2000", "2001", "5"]);
    worker.stop();
}

fn a_row_that_a_savepoint_rolls_back_is_never_published() {
    let mut bed = Bed::new();
    bed.init();
    let mut worker = bed.streaming();
    let row = |revision| {
        format!(
            "INSERT INTO outbox_event (order_id, revision, event_type, payload) VALUES (1, {revision}, 'OrderPaid', '{{}}');"
        )
    };
    let (one, two, three, four) = (row(1), row(2), row(3), row(4));
    bed.sql(&format!(
        "BEGIN; {one} SAVEPOINT a; {two} SAVEPOINT b; {three} ROLLBACK TO b; RELEASE a; {four} COMMIT"
    ));
    let (messages, _) = bed.arrived();
    let revisions: Vec<_> = messages.iter().map(|m| m.header("revision").unwrap()).collect();
    assert_eq!(revisions, ["1", "2", "4"]);
    worker.stop();
}

const PARTITIONED: &str = "CREATE TABLE outbox_event (
    event_id uuid NOT NULL DEFAULT gen_random_uuid(), order_id bigint NOT NULL, revision bigint NOT NULL, event_type text NOT NULL,
    payload jsonb NOT NULL, day int NOT NULL, PRIMARY KEY (event_id, day)) PARTITION BY RANGE (day);
    CREATE TABLE outbox_1 PARTITION OF outbox_event FOR VALUES FROM (1) TO (2);
    CREATE TABLE outbox_2 PARTITION OF outbox_event FOR VALUES FROM (2) TO (3)";

fn partitioned() -> Bed {
    let mut bed = Bed::with(servers::shared_postgres(), servers::shared_kafka(), PARTITIONED, &[]);
    bed.init();
    bed
}

fn insert_day(bed: &mut Bed, table: &str, day: i32, events: i64) {
    let sql = format!(
        "INSERT INTO {table} (order_id, revision, event_type, payload, day)
         SELECT 1, {day} * 1000 + n, 'OrderPaid', '{{}}', {day} FROM generate_series(1, {events}) n"
    );
    bed.sql(&sql);
}

fn c33_a_partitioned_outbox_takes_new_partitions_while_running() {
    let mut bed = partitioned();
    let mut worker = bed.streaming();
    insert_day(&mut bed, "outbox_event", 1, 10);
    insert_day(&mut bed, "outbox_2", 2, 10);
    bed.sql("CREATE TABLE outbox_3 PARTITION OF outbox_event FOR VALUES FROM (3) TO (4)");
    insert_day(&mut bed, "outbox_event", 3, 10);
    insert_day(&mut bed, "outbox_3", 3, 10);
    worker.says("new partitions");
    // What is in a table before it becomes a partition is not in the stream.
    bed.sql("CREATE TABLE outbox_4 (LIKE outbox_event INCLUDING ALL)");
    insert_day(&mut bed, "outbox_4", 4, 5);
    bed.sql("ALTER TABLE outbox_event ATTACH PARTITION outbox_4 FOR VALUES FROM (4) TO (5)");
    insert_day(&mut bed, "outbox_event", 4, 1);
    let detach = "ALTER TABLE outbox_event DETACH PARTITION outbox_1; DROP TABLE outbox_1";
    bed.sql(detach);
    insert_day(&mut bed, "outbox_event", 3, 10);
    let (messages, verdict) = bed.arrived();
    assert_eq!((messages.len(), verdict.repeats), (51, 0));
    bed.confirmed();
    assert!(worker.logged("refused: ").is_empty());
    worker.stop();
    // A restart finds what was accepted.
    worker = bed.streaming();
    insert_day(&mut bed, "outbox_event", 3, 1);
    bed.arrived();
    worker.stop();
}

fn c33_a_partition_attached_again_is_refused() {
    let mut bed = partitioned();
    let mut worker = bed.streaming();
    insert_day(&mut bed, "outbox_event", 1, 10);
    insert_day(&mut bed, "outbox_event", 2, 10);
    bed.arrived();
    bed.confirmed();
    let delivered = bed.committed();
    bed.sql("ALTER TABLE outbox_event DETACH PARTITION outbox_2");
    insert_day(&mut bed, "outbox_2", 2, 10); // never streamed
    bed.sql("ALTER TABLE outbox_event ATTACH PARTITION outbox_2 FOR VALUES FROM (2) TO (3)");
    insert_day(&mut bed, "outbox_event", 1, 1);
    let said = worker.refuses("publication");
    assert!(said.contains("detached and attached again"), "{said}");
    let (confirmed, _) = bed.positions();
    let last = bed.committed().events.last().unwrap().end_lsn;
    assert!(confirmed < last, "nothing after the change is confirmed");
    worker.stop();
    let mut worker = bed.start();
    worker.refuses("publication");
    let messages = bed.topic.wait_for(delivered.ids());
    crate::support::oracle::check(&bed.committed(), &messages);
}

/// Its first half changes the partition's catalog row while it is still attached.
fn c33_a_partition_detached_concurrently_is_no_change() {
    let mut bed = partitioned();
    let mut worker = bed.streaming();
    insert_day(&mut bed, "outbox_event", 2, 10);
    let mut reader = bed.connect();
    let mut transaction = reader.transaction().unwrap();
    transaction.query("SELECT count(*) FROM outbox_event", &[]).unwrap();
    let mut other = bed.connect();
    let detaching = std::thread::spawn(move || {
        other.batch_execute("ALTER TABLE outbox_event DETACH PARTITION outbox_2 CONCURRENTLY").unwrap();
    });
    let pending = "SELECT count(*) FROM pg_inherits WHERE inhdetachpending";
    eventually("the detach waits for the reader", || (bed.value::<i64>(pending) == 1).then_some(()));
    insert_day(&mut bed, "outbox_event", 1, 5);
    bed.confirmed();
    transaction.commit().unwrap();
    detaching.join().unwrap();
    insert_day(&mut bed, "outbox_event", 1, 5);
    bed.arrived();
    bed.confirmed();
    assert!(worker.logged("refused: ").is_empty(), "{:#?}", worker.log());
    worker.stop();
}

fn c33_an_unlogged_partition_is_refused() {
    let mut bed = partitioned();
    let mut worker = bed.streaming();
    insert_day(&mut bed, "outbox_event", 1, 10);
    bed.arrived();
    bed.sql("CREATE UNLOGGED TABLE outbox_3 PARTITION OF outbox_event FOR VALUES FROM (3) TO (4)");
    insert_day(&mut bed, "outbox_event", 3, 5); // not in the WAL
    insert_day(&mut bed, "outbox_event", 1, 1);
    let said = worker.refuses("publication");
    assert!(said.contains("not logged"), "{said}");
    worker.stop();
    let mut worker = bed.start();
    worker.refuses("publication");
    bed.arrived();
}

/// Its rows are never in the WAL. No foreign server is needed to see that.
fn c33_a_partition_that_is_a_foreign_table_is_refused() {
    // A unique index allows no foreign partition.
    let tables = PARTITIONED.replace(", PRIMARY KEY (event_id, day)", "");
    let foreign = "CREATE FOREIGN DATA WRAPPER none; CREATE SERVER nowhere FOREIGN DATA WRAPPER none;
        CREATE FOREIGN TABLE outbox_3 PARTITION OF outbox_event FOR VALUES FROM (3) TO (4) SERVER nowhere";
    let bed = || Bed::with(servers::shared_postgres(), servers::shared_kafka(), &tables, &[]);
    let mut late = bed();
    late.sql(foreign);
    let publication = late.publication.clone();
    late.sql(&format!(
        "CREATE PUBLICATION {publication} FOR TABLE outbox_event WITH (publish_via_partition_root = true)"
    ));
    late.mistakes(&["init"], &["partition public.outbox_event/", "is not logged"]);

    let mut bed = bed();
    bed.init();
    let mut worker = bed.streaming();
    insert_day(&mut bed, "outbox_event", 1, 10);
    bed.arrived();
    bed.confirmed();
    bed.sql(foreign);
    insert_day(&mut bed, "outbox_event", 1, 1);
    let said = worker.refuses("publication");
    assert!(said.contains("is not logged"), "{said}");
    worker.stop();
    let mut worker = bed.start();
    worker.refuses("publication");
}

/// Its rows come under the name of that table from then on, which is none of ours.
fn c33_an_outbox_attached_to_a_published_table_is_refused() {
    let root = "CREATE TABLE all_events (LIKE outbox_event) PARTITION BY RANGE (order_id)";
    let attach = "ALTER TABLE all_events ATTACH PARTITION outbox_event DEFAULT";
    let publication = |bed: &mut Bed| {
        let make = format!(
            "CREATE PUBLICATION {} FOR ALL TABLES WITH (publish = 'insert', publish_via_partition_root = true)",
            bed.publication
        );
        bed.sql(&make);
    };
    let mut late = Bed::new();
    publication(&mut late);
    late.sql(&format!("{root}; {attach}"));
    late.mistakes(&["init"], &["public.outbox_event is a partition or child of another table"]);

    let mut bed = Bed::new();
    // Nothing of ours comes any more: what is looked at is what others write.
    bed.settings.worker = "idle_interval_ms = 100".to_owned();
    bed.write_config();
    bed.sql(root);
    publication(&mut bed);
    bed.init();
    let mut worker = bed.streaming();
    bed.insert(1, 5);
    bed.arrived();
    bed.confirmed();
    bed.sql(attach);
    bed.insert(1, 1);
    bed.sql("CREATE TABLE noise AS SELECT repeat('x', 900) FROM generate_series(1, 2000)");
    let said = worker.refuses("publication");
    assert!(said.contains("public.outbox_event is a partition or child of another table"), "{said}");
    worker.stop();
    let mut worker = bed.start();
    worker.refuses("publication");
    assert_eq!(bed.topic.count(), 5);
}

fn c35_columns_are_added_dropped_moved_and_renamed_under_load() {
    let mut bed = Bed::new();
    bed.init();
    let mut worker = bed.streaming();
    let load = Load::start(&bed, 2, Duration::from_millis(3));
    let row = |revision: i64, kind: &str| {
        format!(
            "INSERT INTO outbox_event (order_id, revision, event_type, payload) VALUES (9999, {revision}, '{kind}', '{{\"n\": {revision}}}');"
        )
    };
    let steps = [
        "ALTER TABLE outbox_event ADD COLUMN extra int DEFAULT 7".to_owned(),
        row(1, "added"),
        "ALTER TABLE outbox_event ADD COLUMN another text; ALTER TABLE outbox_event DROP COLUMN extra"
            .to_owned(),
        row(2, "dropped"),
        // Dropped and made again, a column is the last one.
        format!(
            "BEGIN; ALTER TABLE outbox_event DROP COLUMN event_type;
             ALTER TABLE outbox_event ADD COLUMN event_type text NOT NULL DEFAULT 'none'; {} COMMIT",
            row(3, "moved")
        ),
        row(4, "last"),
        "ALTER TABLE outbox_event RENAME COLUMN another TO other".to_owned(),
        row(5, "renamed"),
    ];
    for step in &steps {
        bed.sql(step);
    }
    load.stop();
    let (messages, verdict) = bed.arrived();
    assert_eq!(verdict.repeats, 0);
    bed.confirmed();
    let of_ours: Vec<_> = messages
        .iter()
        .filter(|m| m.key() == "9999")
        .map(|m| (m.header("eventType").unwrap(), m.value()))
        .collect();
    let expected = ["added", "dropped", "moved", "last", "renamed"].iter().zip(1..);
    let expected: Vec<_> =
        expected.map(|(kind, n)| ((*kind).to_owned(), format!("{{\"n\": {n}}}"))).collect();
    assert_eq!(of_ours, expected);
    worker.stop();
}

/// A publication as PostgreSQL makes it when nobody says what to publish.
fn default_publication(bed: &mut Bed) {
    let make = format!(
        "ALTER TABLE outbox_event REPLICA IDENTITY FULL; CREATE PUBLICATION {} FOR TABLE outbox_event",
        bed.publication
    );
    bed.sql(&make);
}

fn c37_a_row_deleted_in_its_own_transaction_is_published() {
    for everything in [false, true] {
        let mut bed = Bed::new();
        if everything {
            default_publication(&mut bed);
        }
        bed.init();
        let mut worker = bed.streaming();
        bed.sql(
            "BEGIN; INSERT INTO outbox_event (order_id, revision, event_type, payload) VALUES (9, 1, 'OrderPaid', '{\"a\": 1}');
             DELETE FROM outbox_event; COMMIT",
        );
        let (messages, _) = bed.arrived();
        assert_eq!(messages.iter().map(|m| m.value()).collect::<Vec<_>>(), [r#"{"a": 1}"#]);
        bed.confirmed();
        worker.stop();
        assert_eq!(counted(&worker, "ignored_deletes"), u64::from(everything));
    }
}

fn c38_updates_and_deletes_are_ignored_and_counted() {
    let mut bed = Bed::new();
    default_publication(&mut bed);
    bed.init();
    let mut worker = bed.streaming();
    for revision in 1..=300i64 {
        bed.insert(revision % 7, 1);
        bed.sql("UPDATE outbox_event SET event_type = 'Published' WHERE event_type <> 'Published'");
    }
    bed.sql("DELETE FROM outbox_event");
    bed.insert(100, 1);
    let (messages, verdict) = bed.arrived();
    assert_eq!((messages.len(), verdict.repeats), (301, 0));
    bed.confirmed();
    worker.stop();
    assert_eq!((counted(&worker, "ignored_updates"), counted(&worker, "ignored_deletes")), (300, 300));
    worker.says("only inserts are needed");
    assert!(worker.log().len() < 20, "{:#?}", worker.log());
}

fn c40_rollbacks_and_empty_transactions_make_no_message() {
    let mut bed = Bed::new();
    bed.sql("CREATE TABLE other (n int)");
    bed.init();
    let mut worker = bed.streaming();
    let row =
        "INSERT INTO outbox_event (order_id, revision, event_type, payload) VALUES (1, 1, 'OrderPaid', '{}')";
    for n in 0..300 {
        bed.sql(&format!("BEGIN; {row}; ROLLBACK"));
        bed.sql(&format!("INSERT INTO other VALUES ({n})"));
    }
    let before: PgLsn = bed.value("SELECT pg_current_wal_insert_lsn()");
    bed.sql(row);
    let (messages, _) = bed.arrived();
    assert_eq!(messages.len(), 1);
    bed.confirmed();
    assert!(bed.positions().0 >= u64::from(before));
    worker.stop();
}

fn c41_truncates_are_ignored_and_counted() {
    let mut bed = Bed::new();
    bed.sql("CREATE TABLE other (n int)");
    default_publication(&mut bed);
    bed.init();
    bed.exempt(EVENTS, "the same id comes twice");
    // The first thing that this worker sees of the table is its truncation.
    let mut worker = bed.streaming();
    bed.sql("TRUNCATE outbox_event");
    let row = |bed: &mut Bed, id: u8| {
        let sql = format!(
            "INSERT INTO outbox_event VALUES ('00000000-0000-0000-0000-{id:012}', 1, {id}, 'OrderPaid', '{{}}')"
        );
        bed.sql(&sql);
    };
    row(&mut bed, 1);
    bed.sql("TRUNCATE outbox_event, other RESTART IDENTITY CASCADE");
    row(&mut bed, 1); // an id used before is no repeat of ours
    row(&mut bed, 2);
    eventually("three messages", || (bed.topic.count() >= 3).then_some(()));
    let ids: Vec<_> = bed.topic.read().iter().map(|m| m.id()).collect();
    let id = |n: u8| format!("00000000-0000-0000-0000-{n:012}");
    assert_eq!(ids, [id(1), id(1), id(2)]);
    bed.confirmed();
    worker.stop();
    assert_eq!(counted(&worker, "ignored_truncates"), 2);
}

fn c42_prepared_transactions_come_when_they_are_committed() {
    let mut bed = Bed::new();
    bed.init();
    let mut worker = bed.streaming();
    let (one, two) = (format!("{}_1", bed.slot), format!("{}_2", bed.slot));
    let prepare = |bed: &mut Bed, key: i64, name: &str| {
        bed.sql("BEGIN");
        bed.insert(key, 3);
        bed.sql(&format!("PREPARE TRANSACTION '{name}'"));
    };
    let url = bed.postgres.url(&bed.database);
    // A prepared transaction left behind would hold up every later `init` on this server.
    let _clean = Defer(|| {
        let mut client = postgres::Client::connect(&url, postgres::NoTls).unwrap();
        for name in [&one, &two] {
            let _ = client.batch_execute(&format!("ROLLBACK PREPARED '{name}'"));
        }
    });
    prepare(&mut bed, 1, &one);
    prepare(&mut bed, 2, &two);
    bed.insert(3, 1);
    bed.arrived();
    bed.confirmed();
    assert_eq!(bed.topic.count(), 1);
    worker.stop();
    worker = bed.streaming();
    bed.sql(&format!("COMMIT PREPARED '{one}'"));
    bed.sql(&format!("ROLLBACK PREPARED '{two}'"));
    bed.insert(3, 1);
    let (messages, verdict) = bed.arrived();
    assert_eq!((messages.len(), verdict.repeats), (5, 0));
    assert!(messages.iter().all(|m| m.key() != "2"));
    worker.stop();
}

fn c43_logical_messages_are_ignored() {
    let mut bed = Bed::new();
    bed.init();
    let mut worker = bed.streaming();
    for round in 1..=3 {
        for _ in 0..30 {
            bed.sql("SELECT pg_logical_emit_message(false, 'hb', 'x')");
            bed.insert(round, 1);
            bed.sql("BEGIN; SELECT pg_logical_emit_message(true, 'foo', 'y')");
            bed.insert(round, 1);
            bed.sql("SELECT pg_logical_emit_message(false, 'hb', 'x'); COMMIT");
        }
        bed.sql("SELECT pg_logical_emit_message(true, 'foo', 'last'); SELECT pg_logical_emit_message(false, 'hb', 'last')");
        bed.arrived();
        worker.stop();
        worker = bed.streaming();
    }
    bed.insert(9, 1);
    let (messages, verdict) = bed.arrived();
    assert_eq!((messages.len(), verdict.repeats), (181, 0));
    bed.confirmed();
    worker.stop();
}

fn c45_a_copy_killed_half_way_replays_from_its_start() {
    const ROWS: i64 = 20_000;
    let mut bed = Bed::new();
    // Slow enough to be killed half way; and only commits move the position.
    bed.settings.properties = "\"linger.ms\" = 50".to_owned();
    bed.settings.worker = "window_events = 500\nidle_interval_ms = 600000".to_owned();
    bed.write_config();
    bed.init();
    let mut worker = bed.streaming();
    bed.insert(1, 10);
    bed.arrived();
    bed.confirmed();
    let before: PgLsn = bed.value("SELECT pg_current_wal_insert_lsn()");
    let mut copy =
        bed.client.copy_in("COPY outbox_event (order_id, revision, event_type, payload) FROM STDIN").unwrap();
    for n in 0..ROWS {
        writeln!(copy, "{}\t{}\tOrderPaid\t{{\"n\": {n}}}", 100 + n % 50, 1 + n / 50).unwrap();
    }
    copy.finish().unwrap();
    eventually("5,000 rows are in Kafka", || (bed.topic.count() >= 5_000).then_some(()));
    worker.kill();
    let at_the_kill = bed.topic.count();
    assert!(at_the_kill < ROWS, "killed too late: {at_the_kill} rows were in Kafka");
    worker = bed.streaming();
    let (_, verdict) = bed.arrived();
    assert!(verdict.repeats as i64 >= at_the_kill - 10, "the transaction is replayed from its start");
    bed.confirmed();
    let committed = bed.committed();
    let end = committed.events.last().unwrap().end_lsn;
    for confirmed in bed.sampled() {
        let inside = confirmed > u64::from(before) && confirmed < end;
        assert!(!inside, "{confirmed:X} is inside the transaction ({before}, {end:X})");
    }
    worker.stop();
}

fn c46_the_order_of_a_key_is_the_order_of_commits() {
    let mut bed = Bed::new();
    bed.init();
    let mut worker = bed.streaming();
    let mut other = bed.connect();
    let insert = "INSERT INTO outbox_event (order_id, revision, event_type, payload) VALUES (7, $1, 'OrderPaid', '{}')";
    let mut first = other.transaction().unwrap();
    first.execute(insert, &[&1i64]).unwrap();
    bed.client.execute(insert, &[&2i64]).unwrap();
    first.commit().unwrap();
    bed.sql("BEGIN");
    for revision in 3..=5i64 {
        bed.client.execute(insert, &[&revision]).unwrap();
    }
    bed.sql("COMMIT");
    let (messages, _) = bed.arrived();
    let revisions: Vec<_> = messages.iter().map(|m| m.header("revision").unwrap()).collect();
    assert_eq!(revisions, ["2", "1", "3", "4", "5"]);
    worker.stop();
}

fn c48_tables_of_others_in_the_publication_are_ignored() {
    let mut bed = Bed::new();
    bed.sql("CREATE TABLE orders (order_id bigint, payload text)");
    let make = format!("CREATE PUBLICATION {} FOR ALL TABLES WITH (publish = 'insert')", bed.publication);
    bed.sql(&make);
    bed.init();
    let mut worker = bed.streaming();
    worker.says("every table of the database");
    for key in 0..10 {
        bed.sql("BEGIN; INSERT INTO orders SELECT n, repeat('x', 100) FROM generate_series(1, 2000) n");
        bed.insert(key, 1);
        bed.sql("COMMIT; INSERT INTO orders SELECT n, repeat('x', 100) FROM generate_series(1, 2000) n");
    }
    let ids: Vec<String> = bed
        .client
        .query("SELECT event_id::text FROM outbox_event ORDER BY order_id", &[])
        .unwrap()
        .iter()
        .map(|row| row.get(0))
        .collect();
    let (messages, verdict) = bed.arrived();
    assert_eq!((messages.len(), verdict.repeats), (ids.len(), 0));
    bed.confirmed();
    worker.stop();
    // Our own tables are in it too.
    assert!(counted(&worker, "ignored_other_tables") >= 40_000);
    assert!(worker.log().len() < 20, "{:#?}", worker.log());
}

fn c50_an_idle_outbox_follows_its_busy_neighbours() {
    let mut bed = Bed::new();
    bed.settings.worker = "idle_interval_ms = 500".to_owned();
    bed.write_config();
    bed.init();
    let mut worker = bed.streaming();
    bed.insert(1, 1);
    bed.arrived();
    bed.confirmed();
    let mut other = bed.postgres.connect("postgres");
    let place = "SELECT restart_lsn FROM pg_replication_slots WHERE slot_name = $1";
    let slot = bed.slot.clone();
    let mut here = bed.connect();
    for neighbour in [&mut here, &mut other] {
        let restart_before: PgLsn = bed.client.query_one(place, &[&slot]).unwrap().get(0);
        let noise = format!("noise_{slot}");
        neighbour.batch_execute(&format!("CREATE TABLE {noise} (t text)")).unwrap();
        for _ in 0..6 {
            let insert = format!(
                "INSERT INTO {noise} SELECT repeat(md5(n::text), 30) FROM generate_series(1, 8000) n"
            );
            neighbour.batch_execute(&insert).unwrap();
        }
        neighbour.batch_execute(&format!("DROP TABLE {noise}")).unwrap();
        let written: PgLsn = bed.value("SELECT pg_current_wal_insert_lsn()");
        let written = u64::from(written) - (16 << 20);
        bed.sql("CHECKPOINT");
        eventually("the slot follows to within 16 MB", || (bed.positions().0 > written).then_some(()));
        eventually("the server may remove WAL", || {
            bed.sql("CHECKPOINT");
            let restart: PgLsn = bed.client.query_one(place, &[&slot]).unwrap().get(0);
            (restart > restart_before).then_some(())
        });
    }
    bed.insert(1, 1);
    let (_, verdict) = bed.arrived();
    assert_eq!(verdict.repeats, 0);
    worker.stop();
}

fn an_idle_database_is_not_kept_busy_by_position_writes() {
    for version in ["18.6", "14"] {
        let postgres = Postgres::start_version(version, &["autovacuum=off"]);
        let mut bed = Bed::on(Arc::new(postgres), servers::shared_kafka());
        bed.settings.worker = "idle_interval_ms = 100\nposition_interval_ms = 10".to_owned();
        bed.write_config();
        bed.init();
        let mut worker = bed.streaming();
        bed.insert(1, 5);
        bed.arrived();
        bed.confirmed();
        let row = "SELECT xmin::text || ' ' || updated_at FROM outbox_tailer.position";
        let written: String = bed.value(row);
        let watched = Instant::now();
        // Fifty idle intervals; what is watched for is that nothing happens.
        while watched.elapsed() < Duration::from_secs(5) {
            assert_eq!(bed.value::<String>(row), written, "PostgreSQL {version}");
            std::thread::sleep(Duration::from_millis(50));
        }
        bed.arrived();
        worker.stop();
    }
}

fn c51_the_flush_position_never_goes_back() {
    let mut bed = Bed::new();
    bed.sql("CREATE TABLE noise (t text)");
    bed.init();
    let mut worker = bed.streaming();
    let stop = Arc::new(AtomicBool::new(false));
    let watcher = {
        let (stop, slot, mut client) = (Arc::clone(&stop), bed.slot.clone(), bed.connect());
        std::thread::spawn(move || {
            let sql = "SELECT pid, flush_lsn FROM pg_stat_replication
                       JOIN pg_replication_slots ON active_pid = pid WHERE slot_name = $1 AND flush_lsn IS NOT NULL";
            let mut last: HashMap<i32, PgLsn> = HashMap::new();
            while !stop.load(Ordering::Relaxed) {
                for row in client.query(sql, &[&slot]).unwrap() {
                    let (pid, flushed): (i32, PgLsn) = (row.get(0), row.get(1));
                    let before = last.insert(pid, flushed).unwrap_or(PgLsn::from(1));
                    assert!(before <= flushed, "flush_lsn of PID {pid} went from {before} to {flushed}");
                }
                std::thread::sleep(Duration::from_millis(5)); // the rate of sampling
            }
            last.len()
        })
    };
    let load = Load::start(&bed, 3, Duration::from_millis(2));
    for reconnect in 2..=4 {
        let before = bed.topic.count();
        bed.sql("INSERT INTO noise SELECT repeat('x', 500) FROM generate_series(1, 2000)");
        eventually("events flow", || (bed.topic.count() > before + 200).then_some(()));
        bed.terminate("walsender");
        worker.streams_again(reconnect);
    }
    load.stop();
    let (_, _) = bed.arrived();
    bed.confirmed();
    stop.store(true, Ordering::Relaxed);
    assert!(watcher.join().unwrap() >= 4, "four connections were seen");
    worker.stop();
}

fn c52_ten_restarts_repeat_nothing() {
    let mut bed = Bed::new();
    bed.init();
    for round in 1..=10 {
        let mut worker = bed.streaming();
        bed.insert(round, 50);
        eventually("all are in the topic", || (bed.topic.count() >= round * 50).then_some(()));
        worker.stop();
        let last = bed.committed().events.last().unwrap().end_lsn;
        assert!(bed.positions().0 >= last, "the slot is confirmed when the worker has ended");
    }
    let (messages, verdict) = bed.arrived();
    assert_eq!((messages.len(), verdict.repeats), (500, 0));
}
