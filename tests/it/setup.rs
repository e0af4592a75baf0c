//! `init`: what it makes, keeps and refuses, whatever interrupts it or stands in its way.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::mistakes::server_with_passwords;
use crate::support::bed::{Bed, EVENTS, OUTBOX};
use crate::support::oracle::Message;
use crate::support::servers::{Postgres, ROOT, shared_kafka, shared_postgres};
use crate::support::worker::{self, Worker};
use crate::tests;

tests![
    c69_init_prints_what_it_made_and_changes_nothing_the_second_time,
    c69_half_a_set_up_is_refused_and_not_repaired_silently,
    a_dry_run_prints_each_statement_and_changes_nothing,
    a_publication_made_by_a_dba_to_the_same_description_is_kept,
    c31_c36_a_publication_that_would_leave_rows_out_is_refused,
    c48_a_publication_for_all_tables_is_accepted_with_a_note,
    rows_that_exist_are_refused_or_recorded_and_never_published,
    init_killed_at_any_moment_can_be_run_again,
    several_inits_at_once_do_not_disturb_each_other,
    init_killed_before_it_marked_the_slot_for_failover_makes_up_for_it,
    an_open_writer_of_the_outbox_is_waited_for_and_named,
    c67_an_open_transaction_elsewhere_is_waited_for_and_named,
    c67_a_role_without_insight_waits_for_an_open_transaction_too,
    c67_an_interrupt_leaves_nothing_behind,
    a_slot_made_by_others_is_taken_over_only_when_asked,
    a_table_is_added_without_losing_what_is_committed_meanwhile,
    a_table_is_removed_once_its_events_are_delivered,
    a_table_that_was_dropped_can_be_removed,
    a_least_privileged_role_runs_the_worker,
    the_roles_of_the_container_stack_are_enough,
    a_newer_schema_version_is_refused,
    postgresql_14_works,
    postgresql_15_works,
    postgresql_16_works,
    postgresql_17_works,
    a_paid_order_of_the_sample_has_its_event_in_the_same_transaction,
];

fn c69_init_prints_what_it_made_and_changes_nothing_the_second_time() {
    let mut bed = Bed::new();
    let (slot, publication) = (bed.slot.clone(), bed.publication.clone());
    let made = bed.run(&["init"]);
    assert_eq!(made.code, Some(0), "{}", made.stderr);
    let lines = [
        "made schema outbox_tailer, version 1".to_owned(),
        format!("made publication {publication} for \"public\".\"outbox_event\""),
        format!("made slot {slot}, position "),
    ];
    for line in &lines {
        assert!(made.stdout.contains(line.as_str()), "{line}: {}", made.stdout);
    }
    let failover: bool =
        bed.value(&format!("SELECT failover FROM pg_replication_slots WHERE slot_name = '{slot}'"));
    assert!(failover);
    // With unconfirmed data in the slot, which must not go.
    bed.insert(1, 3);
    let before = bed.inventory();
    let kept = bed.run(&["init"]);
    assert_eq!(kept.code, Some(0), "{}", kept.stderr);
    assert!(kept.stdout.contains(&format!("kept publication {publication}, slot {slot}")), "{}", kept.stdout);
    assert_eq!(bed.inventory(), before);
    let _worker = bed.streaming();
    assert_eq!(bed.topic.wait_for_count(3).len(), 3);
    // Also while the worker runs.
    let kept = bed.run(&["init"]);
    assert_eq!(kept.code, Some(0), "{}", kept.stderr);
}

fn c69_half_a_set_up_is_refused_and_not_repaired_silently() {
    let mut bed = Bed::new();
    bed.init();
    let (slot, publication) = (bed.slot.clone(), bed.publication.clone());
    bed.sql(&format!("DROP PUBLICATION {publication}"));
    let before = bed.inventory();
    let ended = bed.run(&["init"]);
    assert_eq!(ended.code, Some(3), "{ended:#?}");
    assert!(
        ended.line().contains(&format!("publication {publication} does not exist any more")),
        "{}",
        ended.line()
    );
    assert_eq!(bed.inventory(), before);

    let mut bed = Bed::new();
    bed.init();
    bed.sql(&format!("SELECT pg_drop_replication_slot('{}')", bed.slot.clone()));
    bed.mistakes(&["init"], &[&format!("slot {} is gone", bed.slot.clone()), "--start-over"]);
    assert_ne!(slot, bed.slot);
    // The way that the message names.
    let again = bed.run(&["init", "--start-over", "--from-now"]);
    assert_eq!(again.code, Some(0), "{}", again.stderr);
    let _worker = bed.streaming();
    bed.insert(1, 1);
    bed.topic.wait_for_count(1);
}

fn a_dry_run_prints_each_statement_and_changes_nothing() {
    let mut bed = Bed::new();
    let (slot, publication) = (bed.slot.clone(), bed.publication.clone());
    let dry = |bed: &mut Bed, arguments: &[&str], says: &[&str]| {
        let before = bed.inventory();
        let ended = bed.run(&[&["init", "--dry-run"], arguments].concat());
        assert_eq!(ended.code, Some(0), "{arguments:?}: {}", ended.stderr);
        for text in says {
            assert!(ended.stdout.contains(text), "{arguments:?} does not print {text:?}: {}", ended.stdout);
        }
        assert_eq!(bed.inventory(), before);
    };
    dry(
        &mut bed,
        &[],
        &[
            "CREATE TABLE IF NOT EXISTS outbox_tailer.position",
            "LOCK TABLE \"public\".\"outbox_event\" IN SHARE ROW EXCLUSIVE MODE;",
            &format!(
                "CREATE PUBLICATION \"{publication}\" FOR TABLE \"public\".\"outbox_event\" WITH (publish = 'insert', publish_via_partition_root = true);"
            ),
            "CREATE_REPLICATION_SLOT \"<temporary>\" TEMPORARY LOGICAL pgoutput (SNAPSHOT 'export');",
            &format!("SELECT pg_copy_logical_replication_slot('<temporary>', '{slot}');"),
            &format!("ALTER_REPLICATION_SLOT \"{slot}\" (FAILOVER true);"),
        ],
    );
    bed.init();
    dry(&mut bed, &[], &["kept publication"]);
    dry(&mut bed, &["--accept-kafka"], &["-- record Kafka cluster"]);
    dry(
        &mut bed,
        &["--start-over"],
        &[&format!("SELECT pg_drop_replication_slot('{slot}')"), "CREATE_REPLICATION_SLOT"],
    );
    bed.sql(&OUTBOX.replace("outbox_event (", "extra (").replace("outbox_order_revision_key", "extra_key"));
    configure(&mut bed, &["outbox_event", "extra"]);
    dry(
        &mut bed,
        &[],
        &[
            "LOCK TABLE \"public\".\"extra\"",
            &format!("ALTER PUBLICATION \"{publication}\" ADD TABLE \"public\".\"extra\""),
        ],
    );

    let mut bed = Bed::with(
        shared_postgres(),
        shared_kafka(),
        "CREATE TABLE outbox_event (event_id int, order_id int, revision int, event_type int, payload int)",
        &[],
    );
    dry(&mut bed, &["--sample"], &["CREATE TABLE IF NOT EXISTS sales_order"]);
    assert!(!bed.value::<bool>("SELECT to_regclass('sales_order') IS NOT NULL"));
}

fn a_publication_made_by_a_dba_to_the_same_description_is_kept() {
    let mut bed = Bed::new();
    let publication = bed.publication.clone();
    bed.sql(&format!("CREATE PUBLICATION {publication} FOR TABLE outbox_event WITH (publish = 'insert', publish_via_partition_root = true)"));
    let identity = format!("SELECT oid || ' ' || xmin FROM pg_publication WHERE pubname = '{publication}'");
    let before: String = bed.value(&identity);
    let made = bed.run(&["init"]);
    assert_eq!(made.code, Some(0), "{}", made.stderr);
    assert!(made.stdout.contains(&format!("kept publication {publication}")), "{}", made.stdout);
    assert!(!made.stdout.contains("note:"), "{}", made.stdout);
    assert_eq!(bed.value::<String>(&identity), before);
    bed.observe();
    let _worker = bed.streaming();
    bed.insert(1, 3);
    bed.arrived();
}

fn c31_c36_a_publication_that_would_leave_rows_out_is_refused() {
    let mut bed = Bed::new();
    bed.sql("CREATE TABLE other (id int)");
    let publication = bed.publication.clone();
    let cases = [
        ("FOR TABLE other", "table public.outbox_event is not in publication"),
        ("", "table public.outbox_event is not in publication"),
        ("FOR TABLE outbox_event WITH (publish = 'update, delete')", "does not publish inserts"),
        ("FOR TABLE outbox_event WHERE (event_type = 'A')", "row filter"),
        ("FOR TABLE outbox_event (event_id, order_id)", "column list"),
    ];
    for (definition, says) in cases {
        bed.sql(&format!("CREATE PUBLICATION {publication} {definition}"));
        bed.mistakes(&["init"], &[&publication, says, "left alone"]);
        bed.sql(&format!("DROP PUBLICATION {publication}"));
    }
}

fn c48_a_publication_for_all_tables_is_accepted_with_a_note() {
    let tables = format!("{OUTBOX}; CREATE TABLE orders (order_id bigint PRIMARY KEY, payload jsonb)");
    let mut bed = Bed::with(shared_postgres(), shared_kafka(), &tables, &[]);
    let publication = bed.publication.clone();
    bed.sql(&format!(
        "CREATE PUBLICATION {publication} FOR ALL TABLES WITH (publish_via_partition_root = true)"
    ));
    let made = bed.run(&["init"]);
    assert_eq!(made.code, Some(0), "{}", made.stderr);
    assert!(made.stdout.contains("note: "), "{}", made.stdout);
    let mut worker = bed.streaming();
    let warned = worker
        .log()
        .iter()
        .any(|line| line["level"] == "WARN" && line["publication"] == publication.as_str());
    assert!(warned, "{:#?}", worker.log());
    for n in 1..=10 {
        bed.sql(&format!(
            "BEGIN; INSERT INTO orders SELECT n, '{{}}' FROM generate_series(1, 1000) n;
             INSERT INTO outbox_event (order_id, revision, event_type, payload) VALUES (7, {n}, 'x', '{{}}');
             UPDATE orders SET payload = '[]'; DELETE FROM orders; COMMIT"
        ));
    }
    let last: postgres::types::PgLsn = bed.value("SELECT pg_current_wal_insert_lsn()");
    assert_eq!(bed.topic.wait_for_count(10).len(), 10);
    // Confirmed past the last commit, which ends just before `last`.
    crate::support::eventually("the slot follows", || {
        (bed.positions().0 + 8192 >= last.into()).then_some(())
    });
    worker.stop();
    let lines = worker.log();
    assert!(lines.len() < 20, "{lines:#?}");
    let ended = &worker.logged("session ended")[0];
    assert!(ended["ignored_other_tables"].as_i64().unwrap() >= 10_000, "{ended}");
    assert!(
        ended["ignored_updates"].as_i64().unwrap() >= 10_000 && ended["ignored_deletes"] == 10_000,
        "{ended}"
    );
}

fn rows_that_exist_are_refused_or_recorded_and_never_published() {
    let mut bed = Bed::new();
    bed.insert(1, 3);
    bed.mistakes(&["init"], &["table public.outbox_event holds rows", "--from-now", "delete them"]);
    let made = bed.run(&["init", "--from-now"]);
    assert_eq!(made.code, Some(0), "{}", made.stderr);
    assert!(
        made.stdout.contains("3 rows that are in the outbox already will not be published"),
        "{}",
        made.stdout
    );
    let recorded = format!("SELECT count(*) FROM outbox_tailer.not_streamed n JOIN outbox_event e ON n.event_id = e.event_id::text
                            WHERE n.slot = '{}' AND n.table_oid = 'outbox_event'::regclass", bed.slot);
    assert_eq!(bed.value::<i64>(&recorded), 3);
    bed.observe();
    let mut worker = bed.streaming();
    bed.insert(1, 2);
    let (messages, _) = bed.arrived();
    assert_eq!(messages.len(), 2);
    let revisions: Vec<Option<String>> = messages.iter().map(|m| m.header("revision")).collect();
    assert_eq!(revisions, [Some("4".to_owned()), Some("5".to_owned())]);
    worker.stop();
}

fn init_killed_at_any_moment_can_be_run_again() {
    let mut bed = Bed::new();
    bed.exempt(EVENTS, "the publication goes and comes, and no other slot must be there");
    let seed = std::env::var("OUTBOX_TESTS_SEED")
        .ok()
        .and_then(|s| s.parse().ok())
        .unwrap_or_else(|| fastrand::u64(..));
    eprintln!("init_killed_at_any_moment: OUTBOX_TESTS_SEED={seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let (slot, publication) = (bed.slot.clone(), bed.publication.clone());
    let mut whole = Duration::from_millis(1500);
    for round in 0..20 {
        let began = Instant::now();
        let mut init = worker::spawn(&bed.config, &["init"]);
        if round > 0 {
            let moment = whole.mul_f64(random.f64());
            std::thread::sleep(moment); // the moment is what is random
            let _ = init.kill();
        }
        init.wait().unwrap();
        if round == 0 {
            whole = began.elapsed();
        }
        let again = bed.run(&["init"]);
        assert_eq!(again.code, Some(0), "seed {seed}, round {round}: {}{}", again.stdout, again.stderr);
        crate::support::eventually("the slot is the only one", || {
            let sql = "SELECT array_agg(slot_name::text) FROM pg_replication_slots WHERE database = current_database() OR slot_name ~ '^outbox_tailer_init_'
                         AND NOT EXISTS (SELECT FROM pg_stat_activity a WHERE a.pid = active_pid AND a.datname <> current_database())";
            (bed.value::<Option<Vec<String>>>(sql).unwrap_or_default() == [slot.clone()]).then_some(())
        });
        assert_eq!(bed.value::<i64>("SELECT count(*) FROM outbox_tailer.position"), 1);
        let mut worker = bed.streaming();
        bed.insert(round + 1, 1);
        bed.topic.wait_for_count(usize::try_from(round).unwrap() + 1);
        worker.stop();
        let active = format!("SELECT active FROM pg_replication_slots WHERE slot_name = '{slot}'");
        crate::support::eventually("nobody holds the slot", || (!bed.value::<bool>(&active)).then_some(()));
        bed.sql(&format!(
            "SELECT pg_drop_replication_slot('{slot}'); DROP PUBLICATION {publication}; DROP SCHEMA outbox_tailer CASCADE; TRUNCATE outbox_event"
        ));
    }
}

/// Two replicas of a deployment that start together, each with `init` before `run`.
fn several_inits_at_once_do_not_disturb_each_other() {
    for round in 0..5 {
        let mut bed = Bed::new();
        let inits: Vec<Child> = (0..3).map(|_| worker::spawn(&bed.config, &["init"])).collect();
        for init in inits {
            let output = init.wait_with_output().unwrap();
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            assert_eq!(
                output.status.code(),
                Some(0),
                "round {round}: {}{}",
                text(&output.stdout),
                text(&output.stderr)
            );
        }
        bed.observe();
        let mut worker = bed.streaming();
        bed.insert(1, 1);
        bed.arrived();
        bed.confirmed();
        worker.stop();
    }
}

fn init_killed_before_it_marked_the_slot_for_failover_makes_up_for_it() {
    let mut bed = Bed::new();
    bed.init();
    let slot = bed.slot.clone();
    // The state after such a kill: a copy is never marked, and the last record is missing.
    bed.sql(&format!(
        "SELECT pg_drop_replication_slot('{slot}');
         SELECT pg_copy_logical_replication_slot('observer_{}', '{slot}');
         DELETE FROM outbox_tailer.audit WHERE action = 'init-done'",
        bed.database
    ));
    let failover = format!("SELECT failover FROM pg_replication_slots WHERE slot_name = '{slot}'");
    assert!(!bed.value::<bool>(&failover));
    let again = bed.run(&["init"]);
    assert_eq!(again.code, Some(0), "{}", again.stderr);
    assert!(bed.value::<bool>(&failover));
    let _worker = bed.streaming();
    bed.insert(1, 1);
    bed.arrived();
}

/// Nothing of an `init` that gave up: the worker's schema may stay, it holds nothing.
fn nothing_is_left(bed: &mut Bed) {
    let left: Vec<String> = bed
        .inventory()
        .into_iter()
        .filter(|line| !line.starts_with("relation ") && !line.starts_with("schema "))
        .collect();
    assert!(left.is_empty(), "{left:#?}");
    let walsenders = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND backend_type = 'walsender'";
    crate::support::eventually("no walsender is left", || (bed.value::<i64>(walsenders) == 0).then_some(()));
}

/// `init --wait 3` gives up in time, with exit code 4, and names the PID.
fn gives_up(bed: &mut Bed, pid: i32) {
    let began = Instant::now();
    let ended = bed.run(&["init", "--wait", "3"]);
    assert_eq!(ended.code, Some(4), "{ended:#?}");
    assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
    let last = ended.stderr.lines().last().unwrap();
    assert!(last.contains(&format!("PID {pid}")), "{}", ended.stderr);
    // Told while it waits, and not each second anew.
    assert!(ended.stderr.lines().next().unwrap().starts_with("waiting for "), "{}", ended.stderr);
    nothing_is_left(bed);
}

fn pid(client: &mut postgres::Client) -> i32 {
    client.query_one("SELECT pg_backend_pid()", &[]).unwrap().get(0)
}

fn an_open_writer_of_the_outbox_is_waited_for_and_named() {
    let mut bed = Bed::new();
    let mut writer = bed.connect();
    writer
        .batch_execute("BEGIN; INSERT INTO outbox_event (order_id, revision, event_type, payload) VALUES (1, 1, 'x', '{}')")
        .unwrap();
    gives_up(&mut bed, pid(&mut writer));
    writer.batch_execute("ROLLBACK").unwrap();
    bed.init();
}

fn c67_an_open_transaction_elsewhere_is_waited_for_and_named() {
    let tables = format!("{OUTBOX}; CREATE TABLE noise (n int)");
    let mut bed = Bed::with(shared_postgres(), shared_kafka(), &tables, &[]);
    let database = bed.database.clone();
    // Shorter than the wait.
    bed.sql(&format!("ALTER DATABASE {database} SET statement_timeout = '1s'"));
    let mut writer = bed.connect();
    writer.batch_execute("BEGIN; INSERT INTO noise VALUES (1)").unwrap();
    gives_up(&mut bed, pid(&mut writer));
    writer.batch_execute("COMMIT").unwrap();
    bed.init();
}

/// A role that owns the outbox, and may do what `init` needs but not see what others do.
fn owner(bed: &mut Bed) -> String {
    let (name, database) = (format!("owner_{}", bed.database), bed.database.clone());
    bed.sql(&format!(
        "CREATE ROLE {name} LOGIN REPLICATION; GRANT CREATE ON DATABASE {database} TO {name}; ALTER TABLE outbox_event OWNER TO {name}"
    ));
    as_role(bed, &name);
    name
}

fn as_role(bed: &mut Bed, name: &str) {
    bed.settings.url = bed.postgres.url(&bed.database).replace("postgres@", &format!("{name}@"));
    bed.write_config();
}

fn c67_a_role_without_insight_waits_for_an_open_transaction_too() {
    let tables = format!("{OUTBOX}; CREATE TABLE noise (n int)");
    let mut bed = Bed::with(shared_postgres(), shared_kafka(), &tables, &[]);
    owner(&mut bed);
    let mut writer = bed.connect();
    writer.batch_execute("BEGIN; INSERT INTO noise VALUES (1)").unwrap();
    gives_up(&mut bed, pid(&mut writer));
    writer.batch_execute("COMMIT; BEGIN; INSERT INTO outbox_event (order_id, revision, event_type, payload) VALUES (1, 1, 'x', '{}')").unwrap();
    gives_up(&mut bed, pid(&mut writer));
    writer.batch_execute("ROLLBACK").unwrap();
    bed.init();
}

/// Reads what a running command says, until it says this.
fn says(child: &mut Child, text: &str) {
    let stderr = child.stderr.take().unwrap();
    let mut lines = BufReader::new(stderr);
    let mut seen = String::new();
    loop {
        let at = seen.len();
        assert!(lines.read_line(&mut seen).unwrap() > 0, "it ended and did not say {text:?}: {seen}");
        if seen[at..].contains(text) {
            break;
        }
    }
    // Keeps the pipe open.
    std::thread::spawn(move || lines.read_to_string(&mut seen));
}

fn c67_an_interrupt_leaves_nothing_behind() {
    let tables = format!("{OUTBOX}; CREATE TABLE noise (n int)");
    let mut bed = Bed::with(shared_postgres(), shared_kafka(), &tables, &[]);
    let mut writer = bed.connect();
    writer.batch_execute("BEGIN; INSERT INTO noise VALUES (1)").unwrap();
    let mut init = worker::spawn(&bed.config, &["init"]);
    says(&mut init, &format!("waiting for older transactions to end: PID {}", pid(&mut writer)));
    let interrupted =
        std::process::Command::new("kill").args(["-s", "INT", &init.id().to_string()]).status().unwrap();
    assert!(interrupted.success());
    assert_eq!(init.wait().unwrap().code(), Some(4));
    nothing_is_left(&mut bed);
    writer.batch_execute("COMMIT").unwrap();
    bed.init();
}

fn a_slot_made_by_others_is_taken_over_only_when_asked() {
    let mut bed = Bed::new();
    let (slot, publication) = (bed.slot.clone(), bed.publication.clone());
    let made = format!("SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')");
    bed.sql(&made);
    // Without the publication, what the slot holds could never be decoded.
    bed.mistakes(&["init", "--adopt-slot", &slot], &[&format!("publication {publication} does not")]);
    bed.sql(&format!("SELECT pg_drop_replication_slot('{slot}'); CREATE PUBLICATION {publication} FOR TABLE outbox_event WITH (publish = 'insert')"));
    bed.sql(&made);
    bed.mistakes(&["init"], &[&format!("slot {slot} exists"), &format!("--adopt-slot {slot}")]);
    bed.mistakes(&["init", "--adopt-slot", "another"], &["the configured slot is", &slot]);
    bed.insert(1, 3); // since the slot was made: must arrive
    bed.observe();
    let adopted = bed.run(&["init", "--adopt-slot", &slot]);
    assert_eq!(adopted.code, Some(0), "{}", adopted.stderr);
    let (confirmed, persisted) = bed.positions();
    assert_eq!(confirmed, persisted);
    let mut worker = bed.streaming();
    assert_eq!(bed.arrived().0.len(), 3);
    worker.stop();
}

/// `[[outbox]]` for tables with the order columns.
fn configure(bed: &mut Bed, tables: &[&str]) {
    let entry = |table: &&str| format!("[[outbox]]\ntable = '{table}'\ntopic = '{}'\n", bed.topic.name);
    bed.settings.outbox = tables.iter().map(entry).collect();
    bed.write_config();
}

fn insert_extra(client: &mut postgres::Client, key: i64) {
    let sql = "INSERT INTO extra (order_id, revision, event_type, payload) VALUES ($1, 1, 'Extra', '{}')";
    client.execute(sql, &[&key]).unwrap();
}

/// A worker that streams the order outbox, and a second table that is not configured yet.
fn bed_with_extra() -> Bed {
    let extra = OUTBOX.replace("outbox_event (", "extra (").replace("outbox_order_revision_key", "extra_key");
    let mut bed = Bed::with(shared_postgres(), shared_kafka(), &format!("{OUTBOX}; {extra}"), &[]);
    configure(&mut bed, &["outbox_event"]);
    bed.init();
    bed
}

fn a_table_is_added_without_losing_what_is_committed_meanwhile() {
    let mut bed = bed_with_extra();
    let mut old = bed.streaming();
    bed.insert(1, 1);
    bed.arrived();
    let mut writer = bed.connect();
    writer.batch_execute("BEGIN").unwrap();
    insert_extra(&mut writer, 100);
    configure(&mut bed, &["outbox_event", "extra"]);
    let mut init = worker::spawn(&bed.config, &["init"]);
    says(&mut init, &format!("PID {}", pid(&mut writer)));
    writer.batch_execute("COMMIT").unwrap();
    // The writer's row would never be streamed: that needs a decision.
    assert_eq!(init.wait().unwrap().code(), Some(2));
    bed.insert(1, 1);
    bed.arrived();
    let mut init = worker::spawn(&bed.config, &["init", "--from-now"]);
    // Writers that go on all the time: each row is either recorded or streamed.
    for key in 101..120 {
        insert_extra(&mut bed.client, key);
    }
    assert_eq!(init.wait().unwrap().code(), Some(0));
    for key in 120..125 {
        insert_extra(&mut bed.client, key);
    }
    bed.insert(1, 1);
    let said = old.refuses("publication");
    assert!(
        said.contains("table public.extra is published but not in this worker's configuration"),
        "{said}"
    );
    // What one configuration refuses is nothing to the other, although it stands in the row.
    crate::support::eventually("the refusal is in the row", || {
        bed.value::<bool>("SELECT refusal IS NOT NULL FROM outbox_tailer.position").then_some(())
    });
    old.stop();
    let mut new = bed.streaming();
    let (messages, _) = bed.arrived();
    new.stop();
    let recorded = "SELECT coalesce(array_agg(event_id), '{}') FROM outbox_tailer.not_streamed WHERE table_oid = 'extra'::regclass";
    let recorded: Vec<String> = bed.value(recorded);
    let streamed: Vec<String> = messages
        .iter()
        .filter(|m| m.header("eventType").as_deref() == Some("Extra"))
        .map(Message::id)
        .collect();
    let mut all: Vec<String> = bed.value("SELECT array_agg(event_id::text) FROM extra");
    let mut found = [recorded.clone(), streamed].concat();
    all.sort();
    found.sort();
    assert_eq!(found, all, "each row is either recorded or streamed, and no row is both");
    assert!(!recorded.is_empty());
    assert!(messages.iter().any(|m| m.key() == "124"));
}

fn a_table_is_removed_once_its_events_are_delivered() {
    let mut bed = bed_with_extra();
    configure(&mut bed, &["outbox_event", "extra"]);
    let added = bed.run(&["init"]);
    assert_eq!(added.code, Some(0), "{}", added.stderr);
    insert_extra(&mut bed.client, 1);
    configure(&mut bed, &["outbox_event"]);
    bed.mistakes(
        &["init"],
        &["table public.extra is to be removed", "1 of its events are not published yet"],
    );
    configure(&mut bed, &["outbox_event", "extra"]);
    let mut worker = bed.streaming();
    bed.arrived();
    bed.confirmed();
    configure(&mut bed, &["outbox_event"]);
    bed.mistakes(&["init"], &["table public.extra is to be removed", "in use"]);
    worker.stop();
    let removed = bed.run(&["init"]);
    assert_eq!(removed.code, Some(0), "{}", removed.stderr);
    assert!(removed.stdout.contains("removed \"public\".\"extra\" from publication"), "{}", removed.stdout);
    let members = format!(
        "SELECT array_agg(tablename::text) FROM pg_publication_tables WHERE pubname = '{}'",
        bed.publication
    );
    assert_eq!(bed.value::<Vec<String>>(&members), ["outbox_event"]);
    let mut worker = bed.streaming();
    insert_extra(&mut bed.client, 2);
    bed.insert(1, 1);
    assert_eq!(bed.arrived().0.len(), 2);
    worker.stop();
}

fn a_table_that_was_dropped_can_be_removed() {
    let mut bed = bed_with_extra();
    configure(&mut bed, &["outbox_event", "extra"]);
    assert_eq!(bed.run(&["init"]).code, Some(0));
    insert_extra(&mut bed.client, 1);
    bed.sql("DROP TABLE extra");
    configure(&mut bed, &["outbox_event"]);
    // Its event is still in the slot.
    bed.exempt(EVENTS, "an event is given up with its table");
    bed.mistakes(
        &["init"],
        &["table public.extra was dropped", "1 of its events are not published yet", "--start-over"],
    );
    // Nobody can publish it any more, except by a decision: going on behind it.
    let again = bed.run(&["init", "--start-over", "--from-now"]);
    assert_eq!(again.code, Some(0), "{}", again.stderr);
    let mut worker = bed.streaming();
    bed.insert(1, 1);
    bed.topic.wait_for_count(1);
    worker.stop();

    let mut bed = bed_with_extra();
    configure(&mut bed, &["outbox_event", "extra"]);
    assert_eq!(bed.run(&["init"]).code, Some(0));
    bed.sql("DROP TABLE extra");
    configure(&mut bed, &["outbox_event"]);
    let removed = bed.run(&["init"]);
    assert_eq!(removed.code, Some(0), "{}", removed.stderr);
    let mut worker = bed.streaming();
    bed.insert(1, 1);
    bed.arrived();
    worker.stop();
}

fn a_least_privileged_role_runs_the_worker() {
    let mut bed = Bed::new();
    owner(&mut bed);
    bed.init();
    let name = format!("tailer_{}", bed.database);
    let grants = [
        format!("USAGE ON SCHEMA outbox_tailer TO {name}"),
        format!("SELECT ON outbox_tailer.schema_version TO {name}"),
        format!("SELECT, UPDATE ON outbox_tailer.position TO {name}"),
        format!("SELECT ON outbox_tailer.audit TO {name}"),
    ];
    bed.sql(&format!("CREATE ROLE {name} LOGIN REPLICATION"));
    as_role(&mut bed, &name);
    // Each is needed, and without it the role is told at the start.
    for missing in 0..grants.len() {
        for (n, grant) in grants.iter().enumerate() {
            let statement = if n == missing {
                format!("REVOKE {}", grant.replace(" TO ", " FROM "))
            } else {
                format!("GRANT {grant}")
            };
            bed.sql(&statement);
        }
        bed.mistakes(&["run"], &["permission denied", "SQLSTATE 42501"]);
    }
    bed.sql(&format!("GRANT {}", grants[3]));
    // No SELECT on the outbox: the slot carries its rows.
    let mut worker = bed.streaming();
    bed.insert(1, 3);
    bed.arrived();
    bed.confirmed();
    // A refusal is recorded with the same privileges.
    bed.sql("ALTER TABLE outbox_event RENAME payload TO body");
    bed.sql("INSERT INTO outbox_event (order_id, revision, event_type, body) VALUES (2, 1, 'x', '{}')");
    worker.refuses("columns");
    crate::support::eventually("the refusal is recorded", || {
        bed.value::<bool>("SELECT refusal IS NOT NULL FROM outbox_tailer.position").then_some(())
    });
    worker.stop();
}

/// What `docker/compose.yaml` does, without the containers.
fn the_roles_of_the_container_stack_are_enough() {
    let server = server_with_passwords("18.6", &[]);
    server.start_again();
    let mut bed = Bed::with(Arc::new(server), shared_kafka(), "", &[]);
    let secrets = bed.config.parent().unwrap().to_owned();
    for name in ["shop", "tailer"] {
        std::fs::write(secrets.join(name), format!("of {name}\n")).unwrap();
    }
    let roles = std::fs::read_to_string(format!("{ROOT}/docker/roles.sql")).unwrap();
    let roles = roles
        .replace("\\i /migrations/", &format!("\\i {ROOT}/migrations/worker/"))
        .replace("/run/secrets", secrets.to_str().unwrap())
        .replace("DATABASE shop", &format!("DATABASE {}", bed.database));
    let script = secrets.join("roles.sql");
    std::fs::write(&script, roles).unwrap();
    let psql = Command::new(Postgres::programs().join("psql"))
        .args(["-X", "-v", "ON_ERROR_STOP=1", "-d", &bed.postgres.url(&bed.database), "-f"])
        .arg(&script)
        .output()
        .unwrap();
    assert!(psql.status.success(), "{}", String::from_utf8_lossy(&psql.stderr));
    let with_password = |bed: &mut Bed, name: &str| {
        bed.settings.postgres = format!("password_file = '{}'", secrets.join(name).display());
        as_role(bed, name);
    };
    with_password(&mut bed, "shop");
    bed.init_with(&["--sample"]);
    with_password(&mut bed, "tailer");
    let mut worker = bed.streaming();
    let readme = std::fs::read_to_string(format!("{ROOT}/README.md")).unwrap();
    let insert = readme.split("psql shop -c \"").nth(1).and_then(|rest| rest.split('"').next());
    bed.sql(insert.expect("README pays an order"));
    let (messages, _) = bed.arrived();
    assert_eq!((messages.len(), messages[0].key()), (1, "1".to_owned()));
    bed.confirmed();
    worker.stop();
}

fn a_newer_schema_version_is_refused() {
    let mut bed = Bed::new();
    bed.init();
    bed.sql("INSERT INTO outbox_tailer.schema_version (version) VALUES (99)");
    let before = bed.inventory();
    let mut worker = bed.start();
    let said = worker.refuses("schema");
    assert!(said.contains("version 99") && said.contains("install the newer outbox-tailer"), "{said}");
    worker.stop();
    for arguments in [&["init"][..], &["run", "--exit-on-refusal"]] {
        let ended = bed.run(arguments);
        assert_eq!(ended.code, Some(3), "{ended:#?}");
        assert!(ended.stderr.contains("version 99"), "{}", ended.stderr);
    }
    assert_eq!(bed.inventory(), before);
}

fn works_on(version: &str) {
    let server = Postgres::start_version(version, &[]);
    let mut bed = Bed::on(Arc::new(server), shared_kafka());
    bed.init();
    for _ in 0..2 {
        let mut worker = bed.streaming();
        bed.insert(1, 10);
        bed.insert(2, 10);
        assert_eq!(bed.arrived().1.repeats, 0);
        bed.confirmed();
        worker.stop();
        // Committed while no worker runs.
        bed.insert(1, 10);
    }
    let _worker: Worker = bed.streaming();
    assert_eq!(bed.arrived().1.repeats, 0);
}

fn postgresql_14_works() {
    works_on("14");
}

fn postgresql_15_works() {
    works_on("15");
}

fn postgresql_16_works() {
    works_on("16");
}

fn postgresql_17_works() {
    works_on("17");
}

/// The outbox pattern itself: the change and its event in one statement.
const PAY: &str = "WITH paid AS (
    UPDATE sales_order SET state = 'paid', revision = revision + 1
    WHERE order_id = $1 AND state = 'pending' RETURNING order_id, revision)
  INSERT INTO outbox_event (order_id, revision, event_type, payload)
  SELECT order_id, revision, 'OrderPaid', jsonb_build_object('orderId', order_id) FROM paid
  RETURNING event_id::text, revision";

fn a_paid_order_of_the_sample_has_its_event_in_the_same_transaction() {
    let mut bed = Bed::with(shared_postgres(), shared_kafka(), "", &[]);
    bed.init_with(&["--sample"]);
    let mut worker = bed.streaming();
    bed.sql("INSERT INTO sales_order (order_id, state) VALUES (1, 'pending'), (2, 'pending')");

    let [paid] = bed.client.query(PAY, &[&1_i64]).unwrap().try_into().unwrap();
    let (id, revision): (String, i64) = (paid.get(0), paid.get(1));
    assert_eq!(revision, 1);
    // It is paid already: no row returned is how the service learns it.
    assert!(bed.client.query(PAY, &[&1_i64]).unwrap().is_empty());
    assert!(bed.client.query(PAY, &[&3_i64]).unwrap().is_empty());

    let mut rolled_back = bed.client.transaction().unwrap();
    assert_eq!(rolled_back.query(PAY, &[&2_i64]).unwrap().len(), 1);
    rolled_back.rollback().unwrap();
    let states = "SELECT jsonb_object_agg(order_id, state || revision)::text FROM sales_order";
    assert_eq!(bed.value::<String>(states), r#"{"1": "paid1", "2": "pending0"}"#);
    assert_eq!(bed.value::<i64>("SELECT count(*) FROM outbox_event"), 1);

    let twice = bed.client.batch_execute(
        "INSERT INTO outbox_event (order_id, revision, event_type, payload) VALUES (1, 1, 'OrderPaid', '{}')",
    );
    let error = twice.unwrap_err();
    let error = error.as_db_error().unwrap();
    assert_eq!((error.code().code(), error.constraint()), ("23505", Some("outbox_order_revision_key")));

    // A later commit shows that nothing of the rolled-back one is still to come.
    bed.sql("UPDATE sales_order SET state = 'shipped', revision = 2 WHERE order_id = 1;
             INSERT INTO outbox_event (order_id, revision, event_type, payload) VALUES (1, 2, 'OrderShipped', '{}')");
    let (messages, _) = bed.arrived();
    let by_revision: BTreeMap<Option<String>, &Message> =
        messages.iter().map(|m| (m.header("revision"), m)).collect();
    assert_eq!(messages.len(), 2);
    let first = by_revision[&Some("1".to_owned())];
    assert_eq!(
        (first.id(), first.key(), first.value()),
        (id, "1".to_owned(), r#"{"orderId": 1}"#.to_owned())
    );
    worker.stop();
}
