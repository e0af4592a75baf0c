//! `run`: start check, session, and what follows from the end of each.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::sync::watch;
use tokio_postgres::Client;

use crate::config::{Config, TableConfig, Witness};
use crate::descriptor::{Descriptor, Difference};
use crate::error::{Error, Kind, Refusal, Result};
use crate::kafka::{self, Preflight, Producer};
use crate::position::{self, Keeper, publication_refusal};
use crate::postgres::{self, Sql, sql_error};
use crate::relay::line::{Bounds, Line};
use crate::relay::outbox::Mapping;
use crate::relay::router::{Limits, Route, Topic, TopicName};
use crate::relay::truth::Truth;
use crate::relay::{Lsn, Relay, Table};
use crate::session::{Outcome, Session};
use crate::source;
use crate::startcheck::{self, Facts, Held, NoStart, Slot, System};
use crate::witness::{self, Notary, Writer};

/// Far more than a start takes: a connection that leads nowhere must not hold it up for ever.
const START_TIMEOUT: Duration = Duration::from_secs(300);
const BACKOFF_MIN: Duration = Duration::from_millis(100);
/// How often a refused worker looks whether an operator has decided something.
const DECISION_POLL: Duration = Duration::from_secs(2);
/// An unchanged reason for waiting is logged again after this.
const REPEAT_REASON: Duration = Duration::from_secs(60);

/// Runs the worker until `stop` becomes true.
///
/// # Errors
/// A mistake found before the first session, or, with `exit_on_refusal`, a refusal.
pub async fn run(config: &Config, mut stop: watch::Receiver<bool>) -> Result<()> {
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        instance = config.worker.instance,
        slot = config.postgres.slot,
        publication = config.postgres.publication,
        kafka = config.kafka.brokers,
        "outbox-tailer starts"
    );
    if config.witness == Witness::None {
        tracing::warn!(
            "witness.kind is none: events that a failover or a restored copy has lost show only while this process runs"
        );
    }
    let mut memory = Memory::default();
    // From then on a mistake is waited out: nobody is there to read it.
    let mut settled = false;
    let mut backoff = BACKOFF_MIN;
    let mut told = Told::default();
    while !*stop.borrow() {
        let error = match attempt(config, &mut memory, &mut stop).await {
            Ok(Attempt::Stopped) => return Ok(()),
            Ok(Attempt::Ended(outcome)) => {
                settled = true;
                if outcome.advanced {
                    backoff = BACKOFF_MIN;
                }
                match outcome.result {
                    Ok(()) => {
                        if outcome.undelivered > 0 {
                            tracing::warn!(
                                undelivered = outcome.undelivered,
                                "stopped before Kafka acknowledged everything; the rest follows at the next start"
                            );
                        }
                        return Ok(());
                    }
                    Err(error) => error,
                }
            }
            Err(error) => error,
        };
        match error.kind {
            Kind::Mistake if !settled => return Err(error),
            Kind::Refusal(refusal) => {
                if config.worker.exit_on_refusal {
                    leave_word(config, refusal, &error, memory.decision).await;
                    return Err(error);
                }
                refused(config, refusal, &error, memory.decision, &mut stop).await;
                // While the operator's command is at work, slot and row may be missing.
                settled = true;
                told = Told::default();
                backoff = BACKOFF_MIN;
            }
            Kind::Mistake | Kind::Wait | Kind::Bug => {
                told.waiting(&error.line(), backoff);
                // Jitter, so that two workers do not knock in step.
                let pause = backoff.mul_f64(0.5 + fastrand::f64() / 2.0);
                backoff = (backoff * 2).min(config.worker.reconnect_max);
                tokio::select! {
                    _ = stop.changed() => {}
                    () = tokio::time::sleep(pause) => {}
                }
            }
        }
    }
    Ok(())
}

/// What outlives a session.
#[derive(Default)]
struct Memory {
    held: Option<Held>,
    /// The newest audit record when the last attempt began.
    decision: Option<i64>,
    /// The broker refused a batch: the next session finds the event that is at fault.
    one_by_one: bool,
}

enum Attempt {
    /// Asked to stop before the stream began.
    Stopped,
    Ended(Outcome),
}

async fn attempt(config: &Config, memory: &mut Memory, stop: &mut watch::Receiver<bool>) -> Result<Attempt> {
    let session = tokio::select! {
        _ = stop.changed() => return Ok(Attempt::Stopped),
        prepared = tokio::time::timeout(START_TIMEOUT, prepare(config, memory)) => prepared.map_err(|_| {
            Error::wait(format!("a start has not come to its end in {} s", START_TIMEOUT.as_secs()))
        })??,
    };
    let outcome = session.run(stop).await;
    if let Some(held) = &mut memory.held {
        held.lsn = outcome.persisted;
        held.requested = Some(outcome.requested);
    }
    memory.one_by_one = outcome.batch_refused;
    Ok(Attempt::Ended(outcome))
}

/// Everything between nothing and a running stream.
async fn prepare(config: &Config, memory: &mut Memory) -> Result<Session> {
    // Beside all that PostgreSQL is asked: librdkafka takes the longest.
    let connecting = AbortOnDrop(tokio::spawn({
        let (kafka, worker, one_by_one) = (config.kafka.clone(), config.worker.clone(), memory.one_by_one);
        let topics = config.tables.iter().map(|t| t.topic.clone()).collect();
        async move { Producer::connect(&kafka, &worker, topics, one_by_one).await }
    }));
    let sql = postgres::connect(&config.postgres).await?;
    let slot_name = &config.postgres.slot;

    // Before the first look, so that no decision can fall between it and a refusal. What is wrong
    // with the worker's own tables is told below.
    let seen = memory.decision.unwrap_or(i64::MAX);
    if let Ok((last, started_over)) = position::last_decision(&sql.client, slot_name, seen).await {
        memory.decision = Some(last);
        if started_over {
            memory.held = None; // what we published belongs to a history that was given up
        }
    }

    // C before P: whatever is confirmed was persisted before.
    let slot = read_slot(&sql.client, slot_name).await?;
    let row = position::read(&sql.client, slot_name).await?;
    if let Some(record) = row.as_ref().and_then(|row| row.refusal.as_ref())
        && let Some(refusal) = position::standing_refusal(&sql.client, slot_name, record).await?
    {
        return Err(refusal);
    }
    let mut replication = source::Session::connect(&config.postgres, &sql.endpoint).await?;
    let system = replication.identify_system().await?;
    let history = replication.timeline_history(system.timeline).await?;
    let database = database(&sql.client).await?;
    let remembered: Vec<Held> = memory.held.iter().cloned().collect();
    let judge = |slot: Option<&Slot>, row: Option<&position::Row>, system: &System, held: &[Held]| {
        let row = row.map(position::Row::persisted);
        let (database, history) = (&database, &history);
        startcheck::judge(&Facts { slot_name, database, system, history, slot, row, held })
    };
    match judge(slot.as_ref(), row.as_ref(), &system, &remembered) {
        // The witness may know that it was us; it lies where the events are, and Kafka comes last.
        Err(NoStart::Ahead(_)) if config.witness != Witness::None => {}
        judged => {
            judged.map_err(Error::no_start)?;
        }
    }
    let row = row.as_ref().ok_or_else(|| Error::bug("the start check passed without a position row"))?;
    let accepted = check_publication(&sql, config, row.descriptor.clone(), &row.publication).await?;
    check_columns(&sql.client, &config.tables).await?;
    let skips = position::skips(&sql.client, slot_name).await?;

    let (producer, kafka) = connecting.result().await?;
    let placement = kafka::check_placement(row.kafka_cluster.as_deref(), &row.partitions, &kafka)?;
    if row.kafka_cluster.is_none() || placement.iter().any(|(topic, n)| row.partitions.get(topic) != Some(n))
    {
        position::record_kafka(&sql.client, slot_name, &kafka.cluster, &placement).await?;
    }
    let tables = tables(config, &accepted, &kafka, &placement, producer.max_message_bytes)?;
    let relay = Relay::new(tables, skips);

    let witness = witness::read(config, &system.identifier).await?;
    let held: Vec<Held> = remembered.iter().cloned().chain(witness.map(Held::from)).collect();
    // W before P, too: another worker may have moved all of them since the first look.
    let gone = || Error::wait("the position row is gone");
    let before = row.epoch;
    let row = &position::read(&sql.client, slot_name).await?.ok_or_else(gone)?;
    if row.epoch != before {
        // Also `init --accept-kafka`: what was placed by the counts of the first look must not start.
        return Err(Error::wait("the position row was taken or changed while we were starting"));
    }
    let system = replication.identify_system().await?;
    let start = judge(slot.as_ref(), Some(row), &system, &held).map_err(Error::no_start)?;
    if let Some((from, to)) = start.phantom {
        tracing::error!(
            phantom_from = %from,
            phantom_to = %to,
            "the promoted standby had not received WAL that was published already: events in ({from}, {to}] are in Kafka and no longer in the database"
        );
    }

    let sender_timeout = replication.wal_sender_timeout().await?;
    let walsender = replication.backend_pid;
    let stream = replication.start(slot_name, &config.postgres.publication, start.from).await?;
    // The slot is ours now, and nobody can move it any more: look again, in case somebody did.
    let mut ours = read_slot(&sql.client, slot_name).await?;
    if let Some(slot) = &mut ours {
        if slot.active_pid.is_some_and(|pid| pid != walsender) {
            return Err(Error::wait("the two sessions are on different servers"));
        }
        slot.active_pid = None;
    }
    let now = position::read(&sql.client, slot_name).await?;
    if now.is_none_or(|now| (now.epoch, now.confirmed) != (row.epoch, row.confirmed)) {
        return Err(Error::wait("another worker moved the position while we were starting"));
    }
    let confirmed = judge(ours.as_ref(), Some(row), &system, &held).map_err(Error::no_start)?.from;
    // Whoever had it before can move the position no more.
    let known = held.iter().map(|held| held.epoch).max().unwrap_or(0);
    // A host name and a process id may be those of another container.
    let instance = format!("{}/{:08x}", config.worker.instance, fastrand::u32(..));
    let epoch =
        position::take(&sql.client, slot_name, row, confirmed, known, system.timeline, &instance).await?;
    let record = witness::Record {
        slot: slot_name.clone(),
        system_identifier: system.identifier.clone(),
        timeline: system.timeline,
        history,
        position: confirmed,
        epoch,
        instance,
    };
    memory.held = Some(Held { requested: Some(confirmed), ..Held::from(record.clone()) });
    let notary = Writer::new(config)?.map(|writer| Notary::start(writer, record));
    let host = sql.endpoint.to_string();
    let (window_events, window_bytes) = kafka::window(&config.kafka, &config.worker);
    let keeper = Keeper::start(sql, config, epoch, confirmed, accepted).await?;
    tracing::info!(ready = true, host, position = %confirmed, epoch, timeline = system.timeline, "streaming");
    // Well below half of the time after which the server ends a silent connection.
    let status_interval = sender_timeout.map_or(STATUS_INTERVAL_MAX, |t| (t / 4).min(STATUS_INTERVAL_MAX));
    let bounds = Bounds {
        window_events,
        window_bytes,
        alone_over_bytes: producer.alone_over_bytes,
        knows_limits: producer.knows_limits,
        position_interval: config.worker.position_interval,
        idle_interval: config.worker.idle_interval,
        status_interval,
        // While it decodes a transaction that sends nothing, the server answers only after half of
        // its own time-out, and without one not at all.
        silence_timeout: config.postgres.silence_timeout.max(sender_timeout.unwrap_or(SILENCE_UNKNOWN)),
        shutdown_timeout: config.worker.shutdown_timeout,
    };
    Ok(Session {
        kafka_answers: producer.watch(config.tables[0].topic.clone()),
        // The witness is to know the new epoch before the slot is told anything.
        line: Line::new(relay, Truth::new(confirmed, notary.is_some().then_some(Lsn::from(0))), bounds),
        producer,
        keeper,
        notary,
        stream,
        server_end: system.wal_end,
        tick_interval: status_interval.min(TICK_INTERVAL_MAX),
    })
}

/// A task that ends with whoever waits for it.
struct AbortOnDrop<T>(tokio::task::JoinHandle<Result<T>>);

impl<T> AbortOnDrop<T> {
    async fn result(mut self) -> Result<T> {
        (&mut self.0).await.map_err(|e| Error::bug("a task ended without a word").because(e))?
    }
}

impl<T> Drop for AbortOnDrop<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

const STATUS_INTERVAL_MAX: Duration = Duration::from_secs(10);
const TICK_INTERVAL_MAX: Duration = Duration::from_secs(1);
/// With `wal_sender_timeout = 0`.
const SILENCE_UNKNOWN: Duration = Duration::from_secs(600);

async fn database(client: &Client) -> Result<String> {
    let row = client.query_one("SELECT current_database()::text", &[]).await;
    Ok(row.map_err(|e| sql_error("cannot read the database's name", e))?.get(0))
}

/// The slot's row; reads columns by name, so that it works on all versions.
///
/// # Errors
/// By SQLSTATE.
pub async fn read_slot(client: &Client, slot: &str) -> Result<Option<Slot>> {
    let sql = "SELECT plugin::text, slot_type, database::text, temporary, two_phase, active_pid, wal_status,
                      to_jsonb(s)->>'invalidation_reason', confirmed_flush_lsn
               FROM pg_replication_slots s WHERE slot_name = $1";
    let row = client.query_opt(sql, &[&slot]).await.map_err(|e| sql_error("cannot read the slot", e))?;
    Ok(row.map(|row| Slot {
        plugin: row.get(0),
        slot_type: row.get(1),
        database: row.get(2),
        temporary: row.get(3),
        two_phase: row.get(4),
        active_pid: row.get(5),
        wal_status: row.get(6),
        invalidation_reason: row.get(7),
        confirmed: row.get(8),
    }))
}

async fn check_publication(
    sql: &Sql,
    config: &Config,
    mut accepted: Descriptor,
    recorded: &str,
) -> Result<Descriptor> {
    let publication = &config.postgres.publication;
    if recorded != publication {
        return Err(Error::mistake(format!(
            "postgres.publication is {publication}, slot {} was set up with {recorded}",
            config.postgres.slot
        )));
    }
    let now = position::describe(&sql.client, config).await?;
    match accepted.difference(&now, publication) {
        Difference::Changed(what) => return Err(publication_refusal(&what)),
        Difference::NewLeaves(leaves) => {
            let failed = |e| sql_error("cannot record the new partitions", e);
            position::accept_leaves(&sql.client, &config.postgres.slot, &leaves).await.map_err(failed)?;
            accepted.leaves.extend(leaves);
        }
        Difference::None => {}
    }
    if let Some(excess) = now.excess() {
        tracing::warn!(publication, "{excess}; what is not needed is ignored and counted");
    }
    Ok(accepted)
}

/// Every configured column must be there, and have a type whose text can be published.
///
/// # Errors
/// A mistake that names table and column.
pub async fn check_columns(client: &Client, tables: &[TableConfig]) -> Result<()> {
    let sql = "WITH RECURSIVE base AS (
                 SELECT a.attname::text AS name, a.atttypid AS type FROM pg_attribute a
                 JOIN pg_class c ON c.oid = a.attrelid JOIN pg_namespace n ON n.oid = c.relnamespace
                 WHERE n.nspname = $1 AND c.relname = $2 AND a.attnum > 0 AND NOT a.attisdropped
                   AND a.attgenerated = '' -- pgoutput leaves generated columns out
                 UNION ALL
                 SELECT base.name, t.typbasetype FROM base JOIN pg_type t ON t.oid = base.type AND t.typtype = 'd')
               SELECT base.name, format_type(t.oid, NULL) FROM base JOIN pg_type t ON t.oid = base.type AND t.typtype <> 'd'";
    for table in tables {
        let rows = client
            .query(sql, &[&table.schema, &table.table])
            .await
            .map_err(|e| sql_error("cannot read the columns", e))?;
        let types: BTreeMap<String, String> = rows.iter().map(|row| (row.get(0), row.get(1))).collect();
        if types.is_empty() {
            return Err(Error::mistake(format!("table {} does not exist", table.name())));
        }
        for column in table.columns() {
            let Some(found) = column.0.iter().find(|name| types.contains_key(*name)) else {
                let known: Vec<&str> = types.keys().map(String::as_str).collect();
                return Err(Error::mistake(format!(
                    "table {} has no column {column} that can be streamed (it has {})",
                    table.name(),
                    known.join(", ")
                )));
            };
            if types[found] == "bytea" {
                return Err(Error::mistake(format!(
                    "column {found:?} of table {} is bytea, which cannot be published yet; text, numbers, uuid, json and jsonb can",
                    table.name()
                )));
            }
        }
    }
    Ok(())
}

/// Binds the configured tables to what the publication holds and to their topics.
fn tables(
    config: &Config,
    accepted: &Descriptor,
    kafka: &Preflight,
    placement: &BTreeMap<String, i32>,
    client_limit_bytes: usize,
) -> Result<Vec<Table>> {
    let bind = |table: &TableConfig| {
        let oid = accepted.table(&table.name())?.oid;
        let topic = TopicName {
            name: table.topic.clone(),
            partitions: *placement.get(&table.topic)?,
            limits: Limits {
                topic: kafka.topics.get(&table.topic)?.max_message_bytes,
                client: client_limit_bytes,
                compressed: config.kafka.compresses(),
            },
        };
        Some(Table {
            mapping: Mapping {
                schema: table.schema.clone(),
                table: table.table.clone(),
                oid,
                id: table.id.clone(),
                key: table.key.clone(),
                payload: table.payload.clone(),
                headers: table.headers.clone(),
            },
            route: Route { topic: Topic::Fixed(topic), timestamp: table.timestamp },
        })
    };
    let missing = |table: &TableConfig| Error::bug(format!("table {} is not described", table.name()));
    config.tables.iter().map(|table| bind(table).ok_or_else(|| missing(table))).collect()
}

/// Stays up and not ready until an operator's command has left a new audit record.
async fn refused(
    config: &Config,
    refusal: Refusal,
    error: &Error,
    mut seen: Option<i64>,
    stop: &mut watch::Receiver<bool>,
) {
    tracing::error!(ready = false, refusal = refusal.name(), detail = %error.detail, "refused: {}", error.line());
    let mut told = false;
    while !*stop.borrow() {
        match decision(config, refusal, error, seen, &mut told).await {
            Ok(last) if seen.is_some_and(|seen| seen != last) => {
                tracing::info!("an operator has decided; checking again");
                return;
            }
            Ok(last) => seen = Some(last),
            Err(e) => tracing::debug!("cannot look for an operator's decision: {}", e.line()),
        }
        tokio::select! {
            _ = stop.changed() => {}
            () = tokio::time::sleep(DECISION_POLL) => {}
        }
    }
}

/// The newest decision of an operator.
async fn decision(
    config: &Config,
    refusal: Refusal,
    error: &Error,
    seen: Option<i64>,
    told: &mut bool,
) -> Result<i64> {
    let sql = postgres::connect(&config.postgres).await?;
    let (last, _) = position::last_decision(&sql.client, &config.postgres.slot, i64::MAX).await?;
    // A row that a newer version has made is not for us to write.
    if !*told && refusal != Refusal::Schema {
        let record = position::refusal_record(refusal, error, seen);
        *told = position::record_refusal(&sql.client, &config.postgres.slot, &record).await?;
    }
    Ok(last)
}

/// Records the refusal for the operator's commands; the log has it anyway.
async fn leave_word(config: &Config, refusal: Refusal, error: &Error, seen: Option<i64>) {
    if let Err(e) = decision(config, refusal, error, seen, &mut false).await {
        tracing::warn!("cannot record the refusal: {}", e.line());
    }
}

/// Logs why the worker waits: at once when the reason changes, else once a minute.
#[derive(Default)]
struct Told {
    reason: String,
    at: Option<std::time::Instant>,
}

impl Told {
    fn waiting(&mut self, reason: &str, retry_in: Duration) {
        let repeated = self.reason == reason && self.at.is_some_and(|at| at.elapsed() < REPEAT_REASON);
        if !repeated {
            tracing::warn!(ready = false, retry_ms = retry_in.as_millis(), "waiting: {reason}");
            self.reason = reason.to_owned();
            self.at = Some(std::time::Instant::now());
        }
    }
}
