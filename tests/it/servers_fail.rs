//! The worker, PostgreSQL and Kafka die, hang, lose each other and come back.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::support::bed::{Bed, EVENTS, Load, Rule};
use crate::support::oracle::{self, Committed, Topic};
use crate::support::servers::{self, Kafka, Postgres};
use crate::support::worker::Worker;
use crate::support::{eventually, within};
use crate::tests;

tests![
    twenty_kills_at_random_moments_lose_and_invert_nothing,
    sigterm_while_idle_repeats_nothing,
    sigterm_under_load_loses_nothing,
    sigterm_while_kafka_is_down_ends_in_time_and_names_what_is_undelivered,
    a_second_signal_forces_the_exit,
    an_immediate_shutdown_of_postgresql_under_load_loses_nothing,
    sessions_that_the_server_ends_are_made_again,
    a_fast_shutdown_does_not_wait_for_an_idle_worker,
    a_fast_shutdown_does_not_wait_for_a_backlog,
    a_fast_shutdown_does_not_wait_while_kafka_is_down,
    an_outage_of_kafka_after_sigterm_is_waited_for,
    an_outage_of_kafka_after_sigkill_is_waited_for,
    a_frozen_kafka_is_waited_for,
    a_deleted_topic_is_waited_for_until_it_is_made_again,
    a_second_worker_waits_and_takes_over,
    a_frozen_worker_that_wakes_up_after_a_takeover_moves_and_inverts_nothing,
    a_read_only_default_does_not_stop_the_confirmation,
    synchronous_replication_to_anybody_is_no_deadlock,
    under_synchronous_replication_to_anybody_init_and_a_start_do_not_wait_for_themselves,
    a_change_of_the_publication_and_a_worker_that_wait_for_each_other_are_named,
    a_locked_position_row_holds_up_the_confirmation_only,
    a_revoked_privilege_on_the_position_is_waited_for,
    c56_a_small_producer_queue_and_a_late_kafka_hold_up_the_stream_only,
];

/// For shutdowns: far more than they take, far less than for ever.
const HANG: Duration = Duration::from_secs(30);
pub const RSS_LIMIT: u64 = 64 << 20;

fn own_postgres(settings: &[&str]) -> Bed {
    Bed::on(Arc::new(Postgres::start(settings)), servers::shared_kafka())
}

fn own_kafka() -> Bed {
    Bed::on(servers::shared_postgres(), Arc::new(Kafka::start(&[])))
}

pub fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).map_or(default, |text| text.parse().expect("a number"))
}

/// Everything has arrived and is confirmed; gives the number of repeats.
pub fn all_is_well(bed: &mut Bed) -> usize {
    let (_, verdict) = bed.arrived();
    bed.confirmed();
    verdict.repeats
}

pub fn flows(bed: &Bed, events: i64) {
    let before = bed.topic.count();
    eventually("events flow", || (bed.topic.count() >= before + events).then_some(()));
}

fn twenty_kills_at_random_moments_lose_and_invert_nothing() {
    let seed = number("OUTBOX_SEED", fastrand::u64(..));
    eprintln!("OUTBOX_SEED={seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let mut bed = Bed::new();
    // Events stay in flight for a while, so that kills find some.
    bed.settings.properties = "\"linger.ms\" = 20".to_owned();
    bed.write_config();
    bed.init();
    let load = Load::start(&bed, 3, Duration::from_millis(1));
    let kills = number("OUTBOX_KILLS", 20);
    for kill in 0..kills {
        let mut worker = bed.start();
        if kill % 4 != 0 {
            worker.streams();
        }
        std::thread::sleep(Duration::from_millis(random.u64(0..400))); // the random moment
        worker.kill();
    }
    load.stop();
    let mut worker = bed.streaming();
    let repeats = all_is_well(&mut bed);
    eprintln!("kills={kills} events={} lost=0 inverted=0 repeats={repeats}", bed.committed().events.len());
    assert!(repeats > 0, "no kill came while events were in flight");
    worker.stop();
}

fn sigterm_while_idle_repeats_nothing() {
    let mut bed = Bed::new();
    bed.init();
    for _ in 0..2 {
        let mut worker = bed.streaming();
        bed.insert(1, 20);
        bed.arrived();
        bed.confirmed();
        worker.stop();
    }
    let mut worker = bed.streaming();
    bed.insert(1, 1);
    assert_eq!(all_is_well(&mut bed), 0);
    worker.stop();
}

fn sigterm_under_load_loses_nothing() {
    let mut bed = Bed::new();
    bed.init();
    let load = Load::start(&bed, 3, Duration::from_millis(1));
    for _ in 0..3 {
        let mut worker = bed.streaming();
        flows(&bed, 200);
        worker.stop();
        assert!(worker.logged("stopped before").is_empty(), "Kafka was there to take it all");
    }
    load.stop();
    let mut worker = bed.streaming();
    all_is_well(&mut bed);
    worker.stop();
}

/// Waits until the server has sent everything that is committed to the worker.
pub fn sent(bed: &mut Bed) {
    let end = bed.committed().events.last().unwrap().end_lsn;
    let sql = format!(
        "SELECT coalesce((SELECT sent_lsn >= '0/0'::pg_lsn + {end} FROM pg_stat_replication JOIN pg_replication_slots
           ON active_pid = pid WHERE slot_name = '{}'), false)",
        bed.slot
    );
    eventually("the server has sent it", || bed.value::<bool>(&sql).then_some(()));
}

fn sigterm_while_kafka_is_down_ends_in_time_and_names_what_is_undelivered() {
    const SHUTDOWN: Duration = Duration::from_millis(1500);
    let mut bed = own_kafka();
    bed.settings.worker = format!("shutdown_timeout_ms = {}", SHUTDOWN.as_millis());
    bed.write_config();
    bed.init();
    let mut worker = bed.streaming();
    bed.insert(1, 10);
    bed.arrived();
    bed.confirmed();
    bed.kafka.stop("KILL");
    bed.insert(1, 100);
    sent(&mut bed);
    worker.signal("TERM");
    let status = worker.wait_for(SHUTDOWN + Duration::from_secs(5));
    assert_eq!(status.code(), Some(0), "{:#?}", worker.log());
    let said = worker.logged("stopped before Kafka acknowledged everything");
    assert_eq!(said.len(), 1, "{:#?}", worker.log());
    assert_eq!(said[0]["undelivered"], 100);
    let end = bed.committed().events.last().unwrap().end_lsn;
    assert!(bed.positions().1 < end, "what is undelivered is not persisted");
    bed.kafka.start_again();
    let mut worker = bed.streaming();
    all_is_well(&mut bed);
    worker.stop();
}

fn a_second_signal_forces_the_exit() {
    let mut bed = own_kafka();
    bed.settings.worker = "shutdown_timeout_ms = 600000".to_owned();
    bed.write_config();
    bed.init();
    let mut worker = bed.streaming();
    bed.kafka.stop("KILL");
    bed.insert(1, 100);
    sent(&mut bed);
    worker.signal("TERM");
    worker.says("stopping");
    worker.signal("INT");
    assert_eq!(worker.wait_for(HANG).code(), Some(5));
    bed.kafka.start_again();
    let mut worker = bed.streaming();
    bed.arrived();
    worker.stop();
}

fn an_immediate_shutdown_of_postgresql_under_load_loses_nothing() {
    let mut bed = own_postgres(&[]);
    bed.exempt(&[Rule::SlotForward], "a crash makes a slot forget what it had not saved yet");
    bed.init();
    let mut worker = bed.streaming();
    let load = Load::start(&bed, 3, Duration::from_millis(1));
    for round in 2..=4 {
        flows(&bed, 200);
        bed.postgres.stop("immediate");
        bed.postgres.start_again();
        worker.streams_again(round);
    }
    bed.client = bed.connect();
    flows(&bed, 100);
    load.stop();
    all_is_well(&mut bed);
    assert!(worker.logged("refused: ").is_empty());
    worker.stop();
}

fn sessions_that_the_server_ends_are_made_again() {
    let mut bed = Bed::new();
    bed.init();
    let mut worker = bed.streaming();
    let load = Load::start(&bed, 3, Duration::from_millis(1));
    for (round, kind) in (2..).zip(["walsender", "client backend", "walsender", "client backend"]) {
        flows(&bed, 100);
        bed.terminate(kind);
        worker.streams_again(round);
    }
    load.stop();
    all_is_well(&mut bed);
    worker.stop();
}

/// Stops PostgreSQL as its operator would, and starts it again.
fn fast_restart(bed: &mut Bed, worker: &mut Worker) {
    let asked = Instant::now();
    bed.postgres.stop("fast");
    assert!(asked.elapsed() < HANG, "the shutdown took {:?}", asked.elapsed());
    bed.postgres.start_again();
    bed.client = bed.connect();
    assert!(worker.logged("refused: ").is_empty(), "{:#?}", worker.log());
}

fn a_fast_shutdown_does_not_wait_for_an_idle_worker() {
    let mut bed = own_postgres(&[]);
    bed.init();
    let mut worker = bed.streaming();
    bed.insert(1, 10);
    bed.arrived();
    bed.confirmed();
    fast_restart(&mut bed, &mut worker);
    worker.streams_again(2);
    bed.insert(1, 10);
    assert_eq!(all_is_well(&mut bed), 0);
    worker.stop();
}

fn a_fast_shutdown_does_not_wait_for_a_backlog() {
    let mut bed = own_postgres(&[]);
    // Slow enough for the shutdown to come in the middle.
    bed.settings.properties = "\"linger.ms\" = 50".to_owned();
    bed.settings.worker = "window_events = 200".to_owned();
    bed.write_config();
    bed.init();
    bed.insert_in_transactions(1, 20_000, 10);
    let mut worker = bed.streaming();
    eventually("some of it is in Kafka", || (bed.topic.count() > 1000).then_some(()));
    fast_restart(&mut bed, &mut worker);
    assert!(bed.topic.count() < 20_000, "the shutdown came after the backlog");
    all_is_well(&mut bed);
    worker.stop();
}

fn a_fast_shutdown_does_not_wait_while_kafka_is_down() {
    let mut bed = Bed::on(Arc::new(Postgres::start(&[])), Arc::new(Kafka::start(&[])));
    bed.init();
    let mut worker = bed.streaming();
    bed.insert(1, 10);
    bed.arrived();
    bed.kafka.stop("KILL");
    bed.insert(1, 1000);
    sent(&mut bed);
    fast_restart(&mut bed, &mut worker);
    bed.kafka.start_again();
    all_is_well(&mut bed);
    worker.stop();
}

fn an_outage_of_kafka_after_sigterm_is_waited_for() {
    outage("TERM");
}

fn an_outage_of_kafka_after_sigkill_is_waited_for() {
    outage("KILL");
}

/// Kafka is away for longer than every time-out in force.
fn outage(signal: &str) {
    let outage = Duration::from_secs(number("OUTBOX_OUTAGE_S", 8));
    let postgres = Postgres::start(&["wal_sender_timeout=3s"]);
    let mut bed = Bed::on(Arc::new(postgres), Arc::new(Kafka::start(&[])));
    bed.settings.properties =
        "\"socket.timeout.ms\" = 2000\n\"topic.metadata.propagation.max.ms\" = 2000".to_owned();
    bed.write_config();
    bed.init();
    let mut worker = bed.streaming();
    let load = Load::start(&bed, 2, Duration::from_millis(2));
    flows(&bed, 200);
    bed.kafka.stop(signal);
    let stopped = Instant::now();
    bed.insert_in_transactions(1, 100_000, 1000);
    std::thread::sleep(outage.saturating_sub(stopped.elapsed())); // the outage
    bed.kafka.start_again();
    let back = Instant::now();
    load.stop();
    let repeats = all_is_well(&mut bed);
    let caught_up = back.elapsed();
    let peak = worker.peak_rss_bytes();
    eprintln!(
        "outage_s={} signal={signal} events={} lost=0 inverted=0 repeats={repeats} caught_up_s={} peak_kb={}",
        outage.as_secs(),
        bed.committed().events.len(),
        caught_up.as_secs(),
        peak >> 10
    );
    assert!(peak < RSS_LIMIT, "the worker took {peak} bytes");
    let log = bed.postgres.log();
    assert!(!log.contains("replication timeout"), "{log}");
    worker.stop();
}

fn a_frozen_kafka_is_waited_for() {
    let postgres = Postgres::start(&["wal_sender_timeout=2s"]);
    let mut bed = Bed::on(Arc::new(postgres), Arc::new(Kafka::start(&[])));
    bed.settings.properties = "\"socket.timeout.ms\" = 2000".to_owned();
    bed.write_config();
    bed.init();
    let mut worker = bed.streaming();
    let load = Load::start(&bed, 2, Duration::from_millis(2));
    flows(&bed, 200);
    bed.kafka.signal("STOP");
    std::thread::sleep(Duration::from_secs(6)); // longer than both time-outs
    bed.kafka.signal("CONT");
    flows(&bed, 200);
    load.stop();
    all_is_well(&mut bed);
    let log = bed.postgres.log();
    assert!(!log.contains("replication timeout"), "{log}");
    worker.stop();
}

fn a_deleted_topic_is_waited_for_until_it_is_made_again() {
    let mut bed = Bed::new();
    bed.exempt(EVENTS, "what was in the topic goes with it");
    bed.settings.properties = "\"topic.metadata.propagation.max.ms\" = 2000".to_owned();
    bed.write_config();
    bed.init();
    let mut worker = bed.streaming();
    bed.insert(1, 50);
    bed.arrived();
    bed.confirmed();
    let (confirmed, _) = bed.positions();
    bed.topic.delete();
    eventually("the topic is gone", || (!bed.topic.exists()).then_some(()));
    bed.insert(1, 50);
    let said = worker.says("does not exist");
    assert_eq!(said["ready"], false);
    let after =
        Committed { events: bed.committed().events.into_iter().filter(|e| e.end_lsn > confirmed).collect() };
    assert_eq!(after.events.len(), 50);
    assert!(bed.positions().0 < after.events[0].end_lsn);
    bed.topic = Topic::create(&bed.topic.brokers, &bed.topic.name, 6, &[]);
    worker.streams_again(2);
    let messages = bed.topic.wait_for(after.ids());
    oracle::check(&after, &messages);
    bed.confirmed();
    worker.stop();
}

fn a_second_worker_waits_and_takes_over() {
    let mut bed = Bed::new();
    bed.init();
    let load = Load::start(&bed, 2, Duration::from_millis(2));
    let mut active = bed.streaming();
    for round in 0..4 {
        let mut waiting = bed.start();
        let said = waiting.says("in use by another worker");
        assert_eq!(said["ready"], false);
        let sql = format!("SELECT active_pid FROM pg_replication_slots WHERE slot_name = '{}'", bed.slot);
        let pid: i32 = bed.value(&sql);
        assert!(said["message"].as_str().unwrap().contains(&format!("PID {pid}")), "{said}");
        flows(&bed, 100);
        assert!(waiting.logged("streaming").is_empty());
        if round % 2 == 0 {
            active.kill()
        } else {
            active.stop()
        }
        waiting.streams();
        flows(&bed, 100);
        active = waiting;
    }
    load.stop();
    all_is_well(&mut bed);
    active.stop();
}

fn a_frozen_worker_that_wakes_up_after_a_takeover_moves_and_inverts_nothing() {
    let mut bed = Bed::new();
    // Much in flight, so that the frozen one has something to say when it wakes up.
    bed.settings.properties = "\"linger.ms\" = 20".to_owned();
    bed.write_config();
    bed.init();
    let load = Load::start(&bed, 4, Duration::ZERO);
    let mut first = bed.streaming();
    for _ in 0..3 {
        flows(&bed, 200);
        first.signal("STOP");
        bed.terminate("walsender");
        let second = bed.streaming();
        flows(&bed, 200);
        let epoch: i64 = bed.value("SELECT epoch FROM outbox_tailer.position");
        first.signal("CONT");
        first.says("waiting: ");
        flows(&bed, 200);
        assert_eq!(bed.value::<i64>("SELECT epoch FROM outbox_tailer.position"), epoch);
        assert_eq!(first.logged("streaming").len(), 1);
        assert!(second.logged("waiting").iter().all(|l| l["message"].as_str().unwrap().contains("in use")));
        first.kill();
        first = second;
    }
    load.stop();
    all_is_well(&mut bed);
    first.stop();
}

fn a_read_only_default_does_not_stop_the_confirmation() {
    let mut bed = own_postgres(&[]);
    bed.init();
    let mut worker = bed.streaming();
    bed.reload("SET default_transaction_read_only = on");
    eventually("the setting is in force", || {
        let setting = bed.connect().query_one("SHOW default_transaction_read_only", &[]).unwrap();
        (setting.get::<_, String>(0) == "on").then_some(())
    });
    bed.sql("SET default_transaction_read_only = off");
    bed.insert(1, 20);
    bed.arrived();
    bed.confirmed();
    // And for sessions that begin while it is on.
    bed.terminate("client backend");
    worker.streams_again(2);
    bed.insert(1, 20);
    all_is_well(&mut bed);
    worker.stop();
}

fn synchronous_replication_to_anybody_is_no_deadlock() {
    let mut bed = own_postgres(&[]);
    bed.init();
    let mut worker = bed.streaming();
    bed.reload("SET synchronous_standby_names = '*'");
    eventually("the setting is in force", || {
        let sync = "SELECT coalesce((SELECT sync_state = 'sync' FROM pg_stat_replication), false)";
        bed.value::<bool>(sync).then_some(())
    });
    // This commit waits for a standby, and the worker is one: its confirmation releases it.
    for _ in 0..5 {
        let asked = Instant::now();
        bed.sql("SET statement_timeout = '30s'");
        bed.insert(1, 10);
        assert!(asked.elapsed() < Duration::from_secs(20), "the commit waited for {:?}", asked.elapsed());
    }
    bed.sql("SET synchronous_commit = local");
    bed.insert(1, 10);
    all_is_well(&mut bed);
    bed.reload("RESET synchronous_standby_names");
    worker.stop();
}

fn under_synchronous_replication_to_anybody_init_and_a_start_do_not_wait_for_themselves() {
    let mut bed = Bed::on(Arc::new(Postgres::start(&[])), servers::shared_kafka());
    bed.sql("SET synchronous_commit = local");
    bed.reload("SET synchronous_standby_names = '*'");
    bed.init();
    let mut worker = bed.streaming();
    bed.sql("SET synchronous_commit = on; SET statement_timeout = '30s'");
    bed.insert(1, 10); // would be cancelled
    bed.insert(1, 10);
    worker.says("counts this worker as a standby");
    all_is_well(&mut bed);
    bed.sql("SET synchronous_commit = local");
    worker.stop();
    bed.reload("RESET synchronous_standby_names");
}

/// The change waits for our confirmation, and we wait until we can see it: nobody but the operator
/// can end that without risking events.
fn a_change_of_the_publication_and_a_worker_that_wait_for_each_other_are_named() {
    let mut bed = Bed::on(Arc::new(Postgres::start(&[])), servers::shared_kafka());
    bed.settings.worker = "idle_interval_ms = 50".to_owned();
    bed.write_config();
    bed.init();
    let mut worker = bed.streaming();
    bed.sql("SET synchronous_commit = local");
    bed.insert(1, 10);
    bed.confirmed();
    bed.reload("SET synchronous_standby_names = '*'");
    eventually("the setting is in force", || {
        let sync = "SELECT coalesce((SELECT sync_state = 'sync' FROM pg_stat_replication), false)";
        bed.value::<bool>(sync).then_some(())
    });
    bed.insert(1, 10);
    worker.says("counts this worker as a standby");
    let (mut changing, publication) = (bed.connect(), bed.publication.clone());
    let change = std::thread::spawn(move || {
        changing.batch_execute(&format!("ALTER PUBLICATION {publication} SET (publish = 'update')")).unwrap();
    });
    let waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'";
    eventually("the change waits", || (bed.value::<i64>(waits) == 1).then_some(()));
    bed.sql("CREATE TABLE noise AS SELECT repeat('x', 900) FROM generate_series(1, 2000)");
    let said = worker.says("a change of publication");
    let said = said["message"].as_str().unwrap();
    assert!(said.contains("waits for this worker"), "{said}");
    assert_eq!(worker.logged("counts this worker as a standby").len(), 1);
    bed.reload("RESET synchronous_standby_names");
    change.join().unwrap();
    worker.refuses("publication");
}

fn a_locked_position_row_holds_up_the_confirmation_only() {
    let mut bed = Bed::new();
    bed.init();
    let mut worker = bed.streaming();
    bed.insert(1, 10);
    bed.arrived();
    bed.confirmed();
    let before = bed.positions();
    let mut other = bed.connect();
    let mut lock = other.transaction().unwrap();
    lock.execute("SELECT FROM outbox_tailer.position FOR UPDATE", &[]).unwrap();
    bed.insert(1, 100);
    bed.arrived();
    worker.says("the position does not move");
    assert_eq!(bed.positions(), before);
    bed.insert(1, 100);
    bed.arrived();
    lock.rollback().unwrap();
    assert_eq!(all_is_well(&mut bed), 0);
    worker.stop();
}

fn a_revoked_privilege_on_the_position_is_waited_for() {
    let mut bed = Bed::new();
    bed.init();
    let role = format!("worker_{}", bed.database);
    bed.sql(&format!(
        "CREATE ROLE {role} LOGIN REPLICATION; GRANT USAGE ON SCHEMA outbox_tailer TO {role};
         GRANT SELECT, INSERT, UPDATE ON ALL TABLES IN SCHEMA outbox_tailer TO {role};
         GRANT USAGE ON ALL SEQUENCES IN SCHEMA outbox_tailer TO {role}"
    ));
    bed.settings.url = bed.settings.url.replace("postgres@", &format!("{role}@"));
    bed.write_config();
    let mut worker = bed.streaming();
    bed.insert(1, 10);
    bed.arrived();
    bed.confirmed();
    let before = bed.positions();
    bed.sql(&format!("REVOKE UPDATE ON outbox_tailer.position FROM {role}"));
    bed.insert(1, 100);
    bed.arrived();
    let said = worker.says("permission denied");
    assert_eq!(said["ready"], false);
    assert_eq!(bed.positions(), before);
    bed.sql(&format!("GRANT UPDATE ON outbox_tailer.position TO {role}"));
    bed.insert(1, 10);
    all_is_well(&mut bed);
    worker.stop();
    bed.sql(&format!("DROP OWNED BY {role}; DROP ROLE {role}"));
}

fn c56_a_small_producer_queue_and_a_late_kafka_hold_up_the_stream_only() {
    let mut bed = own_kafka();
    bed.settings.properties = "\"queue.buffering.max.messages\" = 1000".to_owned();
    bed.write_config();
    bed.init();
    bed.insert_in_transactions(1, 100_000, 100);
    bed.kafka.stop("KILL");
    let mut worker = bed.start();
    worker.says("no answer from Kafka");
    worker.signal("TERM");
    assert_eq!(worker.wait_for(HANG).code(), Some(0));

    let mut worker = bed.start();
    worker.says("no answer from Kafka");
    bed.kafka.start_again();
    worker.streams();
    // Away once more, with the queue full.
    within(HANG, "some of it arrives", &mut || (bed.topic.count() > 1000).then_some(()));
    bed.kafka.stop("KILL");
    bed.kafka.start_again();
    all_is_well(&mut bed);
    assert!(worker.peak_rss_bytes() < RSS_LIMIT);
    worker.stop();
}
