//! The persisted position: reading it, moving it, and what else its row remembers.
//!
//! The row moves by compare-and-swap on (epoch, confirmed LSN), and only while the publication is
//! what was accepted; the slot is told of an LSN only after the row with it is committed.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::Json;
use tokio_postgres::{Client, GenericClient, Statement};

use crate::config::Config;
use crate::descriptor::{DESCRIPTOR_SQL, Descriptor, Difference, IN_FLIGHT_SQL, table_parameters};
use crate::error::{Error, Refusal, Result};
use crate::postgres::{STATEMENT_TIMEOUT, Sql, sql_error};
use crate::relay::progress::Position;
use crate::relay::{Lsn, Place};
use crate::startcheck::{Persisted, System};

/// The newest migration this program knows.
pub const SCHEMA_VERSION: i32 = 1;

/// What the position row says.
#[derive(Debug, Clone)]
pub struct Row {
    pub system_identifier: String,
    pub timeline: u32,
    pub publication: String,
    pub descriptor: Descriptor,
    pub confirmed: Lsn,
    pub epoch: i64,
    /// Who took the slot for this epoch; `None` before the first.
    pub instance: Option<String>,
    pub kafka_cluster: Option<String>,
    pub partitions: BTreeMap<String, i32>,
    pub refusal: Option<Value>,
}

impl Row {
    /// What the start check wants to know.
    pub fn persisted(&self) -> Persisted<'_> {
        Persisted {
            system_identifier: &self.system_identifier,
            timeline: self.timeline,
            position: self.confirmed,
            epoch: self.epoch,
            instance: self.instance.as_deref().unwrap_or_default(),
        }
    }
}

/// Reads the row of a slot.
///
/// # Errors
/// A mistake when the worker's tables are not there, a refusal when a newer version made them.
pub async fn read(client: &Client, slot: &str) -> Result<Option<Row>> {
    check_schema_version(client).await?;
    let sql =
        "SELECT system_identifier, timeline, publication, descriptor, confirmed_lsn, epoch, kafka_cluster,
                      partitions, refusal, instance
               FROM outbox_tailer.position WHERE slot = $1";
    let row = client.query_opt(sql, &[&slot]).await.map_err(|e| sql_error("cannot read the position", e))?;
    row.map(|row| {
        let Json(descriptor) = row.try_get(3).map_err(unreadable)?;
        let Json(partitions) = row.try_get(7).map_err(unreadable)?;
        Ok(Row {
            system_identifier: row.get(0),
            timeline: u32::try_from(row.get::<_, i64>(1))
                .map_err(|_| Error::bug("the timeline in the position row"))?,
            publication: row.get(2),
            descriptor,
            confirmed: row.get(4),
            epoch: row.get(5),
            kafka_cluster: row.get(6),
            partitions,
            refusal: row.get(8),
            instance: row.get(9),
        })
    })
    .transpose()
}

/// Makes the row of a slot. `epoch`: greater than any that the witness knows.
///
/// # Errors
/// By SQLSTATE; also when there is one already.
pub async fn insert(
    client: &impl GenericClient,
    config: &Config,
    system: &System,
    descriptor: &Descriptor,
    confirmed: Lsn,
    epoch: i64,
) -> Result<()> {
    let sql = "INSERT INTO outbox_tailer.position
                 (slot, system_identifier, timeline, database, publication, descriptor, confirmed_lsn, epoch)
               VALUES ($1, $2, $3, current_database(), $4, $5, $6, $7)";
    let (settings, timeline) = (&config.postgres, i64::from(system.timeline));
    let identifier = &system.identifier;
    client
        .execute(
            sql,
            &[
                &settings.slot,
                identifier,
                &timeline,
                &settings.publication,
                &Json(descriptor),
                &confirmed,
                &epoch,
            ],
        )
        .await
        .map_err(|e| sql_error("cannot write the position row", e))?;
    Ok(())
}

fn unreadable(e: tokio_postgres::Error) -> Error {
    Error::refusal(Refusal::Schema, "the position row was not written by this version").because(e)
}

async fn check_schema_version(client: &Client) -> Result<()> {
    let sql = "SELECT max(version) FROM outbox_tailer.schema_version";
    let row = client
        .query_one(sql, &[])
        .await
        .map_err(|e| sql_error("cannot read outbox_tailer.schema_version", e))?;
    match row.get::<_, Option<i32>>(0) {
        Some(SCHEMA_VERSION) => Ok(()),
        Some(newer) if newer > SCHEMA_VERSION => Err(Error::refusal(
            Refusal::Schema,
            format!(
                "schema outbox_tailer has version {newer}, this program knows {SCHEMA_VERSION}: install the newer outbox-tailer"
            ),
        )),
        older => Err(Error::mistake(format!(
            "schema outbox_tailer has version {}, {SCHEMA_VERSION} is needed: run `outbox-tailer init`",
            older.unwrap_or(0)
        ))),
    }
}

/// Reads what the publication and the configured tables are now.
///
/// # Errors
/// By SQLSTATE.
pub async fn describe(client: &impl GenericClient, config: &Config) -> Result<Descriptor> {
    let (schemas, tables) = table_parameters(&config.tables);
    let sql = format!("SELECT {DESCRIPTOR_SQL}");
    let row = client
        .query_one(&sql, &[&config.postgres.publication, &schemas, &tables])
        .await
        .map_err(|e| sql_error("cannot read the publication", e))?;
    let Json(now) = row.try_get(0).map_err(|e| Error::bug("the descriptor").because(e))?;
    Ok(now)
}

/// Rows that an operator has decided to go past: place and event id.
///
/// # Errors
/// By SQLSTATE.
pub async fn skips(client: &Client, slot: &str) -> Result<BTreeSet<(Place, String)>> {
    let sql = "SELECT (detail->>'commit_lsn')::pg_lsn, (detail->>'ordinal')::bigint, detail->>'event_id'
               FROM outbox_tailer.audit WHERE slot = $1 AND action = 'skip'";
    let rows =
        client.query(sql, &[&slot]).await.map_err(|e| sql_error("cannot read the skipped events", e))?;
    let skip = |row: &tokio_postgres::Row| {
        let place = Place { commit_lsn: row.get(0), ordinal: row.get::<_, i64>(1).unsigned_abs() };
        (place, row.get(2))
    };
    Ok(rows.iter().map(skip).collect())
}

/// Takes the slot over: a worker of an older epoch can move the position no more.
///
/// The new epoch is greater than the row's and than `known`, which a lost primary may have issued.
/// Gives it. `confirmed` is the position from now on (see [`crate::startcheck::Start`]).
///
/// # Errors
/// A wait when another worker was faster.
pub async fn take(
    client: &Client,
    slot: &str,
    row: &Row,
    confirmed: Lsn,
    known: i64,
    timeline: u32,
    instance: &str,
) -> Result<i64> {
    let sql = "UPDATE outbox_tailer.position
               SET epoch = greatest(epoch, $5) + 1, instance = $3, timeline = $4, confirmed_lsn = $6,
                   refusal = NULL, updated_at = now()
               WHERE slot = $1 AND epoch = $2 AND confirmed_lsn = $7 RETURNING epoch";
    let timeline = i64::from(timeline);
    let taken = client
        .query_opt(sql, &[&slot, &row.epoch, &instance, &timeline, &known, &confirmed, &row.confirmed])
        .await
        .map_err(|e| sql_error("cannot take the position", e))?;
    let faster = || Error::wait("another worker took or moved the position at the same time");
    Ok(taken.ok_or_else(faster)?.get(0))
}

/// Records the Kafka cluster and the number of partitions over which keys are placed.
///
/// # Errors
/// By SQLSTATE.
pub async fn record_kafka(
    client: &Client,
    slot: &str,
    cluster: &str,
    partitions: &BTreeMap<String, i32>,
) -> Result<()> {
    let sql =
        "UPDATE outbox_tailer.position SET kafka_cluster = $2, partitions = partitions || $3 WHERE slot = $1";
    client
        .execute(sql, &[&slot, &cluster, &Json(partitions)])
        .await
        .map_err(|e| sql_error("cannot record the Kafka cluster", e))?;
    Ok(())
}

/// Leaves word of a refusal in the row, where operators and commands find it; not while another
/// worker streams, whose row it is. Gives whether it was written.
///
/// # Errors
/// By SQLSTATE.
pub async fn record_refusal(client: &Client, slot: &str, refusal: &Value) -> Result<bool> {
    let sql = "UPDATE outbox_tailer.position SET refusal = $2, updated_at = now() WHERE slot = $1
               AND NOT EXISTS (SELECT FROM pg_replication_slots WHERE slot_name = $1 AND active)";
    let written = client.execute(sql, &[&slot, refusal]).await;
    Ok(written.map_err(|e| sql_error("cannot record the refusal", e))? > 0)
}

/// The newest audit record of the slot, which changes when an operator decides something, and
/// whether a start-over is among the records after `since`.
///
/// # Errors
/// By SQLSTATE.
pub async fn last_decision(client: &Client, slot: &str, since: i64) -> Result<(i64, bool)> {
    let sql = "SELECT coalesce(max(id), 0), coalesce(bool_or(action = 'start-over' AND id > $2), false)
               FROM outbox_tailer.audit WHERE slot = $1";
    let row = client
        .query_one(sql, &[&slot, &since])
        .await
        .map_err(|e| sql_error("cannot read outbox_tailer.audit", e))?;
    Ok((row.get(0), row.get(1)))
}

/// Writes down what was decided.
///
/// # Errors
/// By SQLSTATE.
pub async fn audit(client: &impl GenericClient, slot: &str, action: &str, detail: &Value) -> Result<()> {
    let sql = "INSERT INTO outbox_tailer.audit (slot, action, detail) VALUES ($1, $2, $3)";
    client
        .execute(sql, &[&slot, &action, detail])
        .await
        .map_err(|e| sql_error("cannot write the audit record", e))?;
    Ok(())
}

/// Commits wait for our walsender (PostgreSQL manual, "synchronous_standby_names").
const STANDBY: &str = "synchronous_standby_names counts this worker as a standby, so commits wait until Kafka has \
     acknowledged what was committed before; name the standbys that are meant instead of '*'";
/// Whether it is so; it shows once the walsender has heard of a confirmed LSN.
const STANDBY_SQL: &str =
    "EXISTS (SELECT FROM pg_replication_slots s JOIN pg_stat_replication r ON r.pid = s.active_pid
     WHERE s.slot_name = $4 AND r.sync_state <> 'async')";

/// What became of one attempt to move the position.
#[derive(Debug)]
pub enum Moved {
    /// Committed; `wal_end` is how far the server's log was then.
    To { lsn: Lsn, wal_end: Lsn },
    /// Not now: the row is locked, or a change of the publication is under way. Nothing was moved.
    Busy(String),
}

/// Moves the position in a task of its own, so that a slow write never holds up the stream.
pub struct Keeper {
    pub requests: mpsc::Sender<Position>,
    pub results: mpsc::Receiver<Result<Moved>>,
}

impl Keeper {
    /// The task ends with the SQL session, with the first error, or when the keeper is dropped.
    ///
    /// # Errors
    /// When the statements cannot be prepared.
    pub async fn start(
        sql: Sql,
        config: &Config,
        epoch: i64,
        confirmed: Lsn,
        accepted: Descriptor,
    ) -> Result<Self> {
        let mut store = Store::new(sql, config, epoch, confirmed, accepted).await?;
        let (requests, mut wanted) = mpsc::channel::<Position>(1);
        let (done, results) = mpsc::channel(1);
        tokio::spawn(async move {
            loop {
                let result = tokio::select! {
                    ended = store.sql.closed() => Err(ended),
                    position = wanted.recv() => match position {
                        None => return,
                        Some(position) => store.advance(position).await,
                    },
                };
                let over = result.is_err();
                if done.send(result).await.is_err() || over {
                    return;
                }
            }
        });
        Ok(Keeper { requests, results })
    }
}

struct Store {
    sql: Sql,
    slot: String,
    publication: String,
    schemas: Vec<String>,
    tables: Vec<String>,
    epoch: i64,
    confirmed: Lsn,
    accepted: Descriptor,
    answer_timeout: Duration,
    /// Told once.
    is_standby: bool,
    in_flight: Statement,
    advance: Statement,
}

impl Store {
    async fn new(
        sql: Sql,
        config: &Config,
        epoch: i64,
        confirmed: Lsn,
        accepted: Descriptor,
    ) -> Result<Self> {
        // Descriptor and position in one statement, so under one snapshot: if the comparison holds,
        // nothing visible has changed, and `in_flight` before it excludes what is not visible yet.
        let advance = format!(
            "WITH now AS MATERIALIZED (SELECT {DESCRIPTOR_SQL} AS descriptor),
             moved AS (
               UPDATE outbox_tailer.position p
               SET confirmed_lsn = $7, committed_at = coalesce($8, p.committed_at), updated_at = now()
               FROM now
               WHERE p.slot = $4 AND p.epoch = $5 AND p.confirmed_lsn = $6
                 AND p.descriptor - 'leaves' = now.descriptor - 'leaves'
                 AND (p.descriptor->'leaves') @> (now.descriptor->'leaves')
               RETURNING 1)
             SELECT EXISTS (SELECT FROM moved), now.descriptor, p.epoch, p.confirmed_lsn, p.descriptor, {STANDBY_SQL},
                    pg_current_wal_flush_lsn()
             FROM now LEFT JOIN outbox_tailer.position p ON p.slot = $4"
        );
        let prepared = |e| sql_error("cannot prepare the position statements", e);
        let (schemas, tables) = table_parameters(&config.tables);
        Ok(Store {
            in_flight: sql.client.prepare(IN_FLIGHT_SQL).await.map_err(prepared)?,
            advance: sql.client.prepare(&advance).await.map_err(prepared)?,
            sql,
            slot: config.postgres.slot.clone(),
            publication: config.postgres.publication.clone(),
            schemas,
            tables,
            epoch,
            confirmed,
            accepted,
            answer_timeout: STATEMENT_TIMEOUT + config.postgres.silence_timeout,
            is_standby: false,
        })
    }

    async fn advance(&mut self, position: Position) -> Result<Moved> {
        match self.try_advance(position).await {
            Err(AdvanceError::Sql(e)) if is_busy(&e) => {
                Ok(Moved::Busy(sql_error("the position row is locked", e).line()))
            }
            Err(AdvanceError::Sql(e)) => Err(sql_error("cannot move the position", e)),
            Err(AdvanceError::Other(e)) => Err(e),
            Ok(moved) => Ok(moved),
        }
    }

    async fn try_advance(&mut self, position: Position) -> Result<Moved, AdvanceError> {
        let committed_at = position.commit_time_micros.map(system_time);
        for _ in 0..3 {
            let client = &self.sql.client;
            let described: [&(dyn tokio_postgres::types::ToSql + Sync); 3] =
                [&self.publication, &self.schemas, &self.tables];
            if self.answered(client.query_one(&self.in_flight, &described)).await?.get(0) {
                let mut why = format!("a change of publication {} is under way", self.publication);
                if self.is_standby {
                    why.push_str(" (if it waits for synchronous replication, it waits for this worker and this worker for it)");
                }
                return Ok(Moved::Busy(why));
            }
            let [publication, schemas, tables] = described;
            let parameters: [&(dyn tokio_postgres::types::ToSql + Sync); 8] = [
                publication,
                schemas,
                tables,
                &self.slot,
                &self.epoch,
                &self.confirmed,
                &position.lsn,
                &committed_at,
            ];
            let row = self.answered(client.query_one(&self.advance, &parameters)).await?;
            let was_standby = std::mem::replace(&mut self.is_standby, row.get(5));
            if self.is_standby && !was_standby {
                tracing::warn!("{STANDBY}");
            }
            if row.get(0) {
                self.confirmed = position.lsn;
                return Ok(Moved::To { lsn: position.lsn, wal_end: row.get(6) });
            }
            let Json(now): Json<Descriptor> = row.try_get(1)?;
            let (epoch, confirmed): (Option<i64>, Option<Lsn>) = (row.get(2), row.get(3));
            let accepted: Option<Json<Descriptor>> = row.try_get(4)?;
            self.explain(&now, epoch, confirmed, accepted.map(|Json(d)| d)).await?;
        }
        Ok(Moved::Busy("what is accepted changed at every look".to_owned()))
    }

    /// A session that says nothing, not even that the statement took too long, is given up: the stream
    /// may live on while this connection leads nowhere.
    async fn answered<T>(
        &self,
        query: impl Future<Output = Result<T, tokio_postgres::Error>>,
    ) -> Result<T, AdvanceError> {
        let silent = |_| {
            let limit = self.answer_timeout.as_secs();
            Error::wait(format!("PostgreSQL has not answered for {limit} s, asked to move the position"))
        };
        Ok(tokio::time::timeout(self.answer_timeout, query).await.map_err(silent)??)
    }

    /// Why the row did not move. Returns only when trying again makes sense.
    async fn explain(
        &mut self,
        now: &Descriptor,
        epoch: Option<i64>,
        confirmed: Option<Lsn>,
        accepted: Option<Descriptor>,
    ) -> Result<(), AdvanceError> {
        let (Some(epoch), Some(confirmed), Some(accepted)) = (epoch, confirmed, accepted) else {
            return Err(Error::refusal(
                Refusal::Gap,
                format!("the position row of slot {} was deleted", self.slot),
            )
            .into());
        };
        if epoch != self.epoch {
            return Err(Error::wait(format!(
                "another worker has taken slot {} (epoch {epoch}, ours was {})",
                self.slot, self.epoch
            ))
            .into());
        }
        if confirmed != self.confirmed {
            return Err(Error::lasting(
                Refusal::Gap,
                format!(
                    "the position of slot {} was changed from {} to {confirmed} by another hand",
                    self.slot, self.confirmed
                ),
            )
            .into());
        }
        self.accepted = accepted;
        match self.accepted.difference(now, &self.publication) {
            Difference::None => Ok(()), // it was changed and accepted between the two looks
            Difference::Changed(what) => Err(publication_refusal(&what).into()),
            Difference::NewLeaves(leaves) => {
                accept_leaves(&self.sql.client, &self.slot, &leaves).await?;
                Ok(())
            }
        }
    }
}

enum AdvanceError {
    Sql(tokio_postgres::Error),
    Other(Error),
}

impl From<tokio_postgres::Error> for AdvanceError {
    fn from(e: tokio_postgres::Error) -> Self {
        AdvanceError::Sql(e)
    }
}

impl From<Error> for AdvanceError {
    fn from(e: Error) -> Self {
        AdvanceError::Other(e)
    }
}

fn is_busy(e: &tokio_postgres::Error) -> bool {
    let busy = [SqlState::LOCK_NOT_AVAILABLE, SqlState::QUERY_CANCELED, SqlState::T_R_DEADLOCK_DETECTED];
    e.code().is_some_and(|code| busy.contains(code))
}

/// Adds newly seen partitions to what is accepted.
///
/// # Errors
/// By SQLSTATE.
pub async fn accept_leaves(
    client: &Client,
    slot: &str,
    leaves: &BTreeMap<String, crate::descriptor::Leaf>,
) -> Result<(), tokio_postgres::Error> {
    let sql = "UPDATE outbox_tailer.position
               SET descriptor = jsonb_set(descriptor, '{leaves}', $2 || (descriptor->'leaves')) WHERE slot = $1";
    client.execute(sql, &[&slot, &Json(leaves)]).await?;
    tracing::info!(partitions = ?leaves.keys().collect::<Vec<_>>(), "new partitions, whose rows are in the stream from now on");
    Ok(())
}

pub fn publication_refusal(what: &str) -> Error {
    Error::refusal(
        Refusal::Publication,
        format!(
            "{what}: rows written meanwhile may be missing from the stream, and putting it right does not bring them back"
        ),
    )
}

/// Microseconds since 2000-01-01 → time.
fn system_time(postgres_micros: i64) -> std::time::SystemTime {
    const POSTGRES_EPOCH: Duration = Duration::from_secs(946_684_800);
    let epoch = std::time::UNIX_EPOCH + POSTGRES_EPOCH;
    let offset = Duration::from_micros(postgres_micros.unsigned_abs());
    if postgres_micros >= 0 { epoch + offset } else { epoch - offset }
}

/// What the position row keeps of a refusal. `decision`: the newest audit record when it was made.
pub fn refusal_record(refusal: Refusal, error: &Error, decision: Option<i64>) -> Value {
    json!({ "kind": refusal.name(), "message": error.line(), "detail": error.detail, "decision": decision })
}

/// The refusal that an earlier process has left in the row and that nothing but a start-over clears.
///
/// # Errors
/// By SQLSTATE.
pub async fn standing_refusal(client: &Client, slot: &str, record: &Value) -> Result<Option<Error>> {
    if record["detail"]["lasting"] != true {
        return Ok(None);
    }
    let Some(decision) = record["decision"].as_i64() else { return Ok(None) };
    // The record may have been written beside a start-over.
    let (_, started_over) = last_decision(client, slot, decision).await?;
    let message = record["message"].as_str().unwrap_or_default();
    Ok((!started_over).then(|| Error::lasting(Refusal::Gap, message)))
}
