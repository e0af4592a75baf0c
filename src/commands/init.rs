//! `init`: publication, slot and position, in an order from which any kill can be resumed.
//!
//! 1. The publication, under a lock that no writer in flight can pass: a row inserted before the
//!    publication exists and committed after the slot's start would never be streamed.
//! 2. A *temporary* slot with an exported snapshot: exactly the rows in it are never streamed.
//! 3. One transaction in that snapshot: their ids, and the position row.
//! 4. The temporary slot is copied to the real one. A kill before this leaves no slot behind, and a
//!    position row without a slot that ever was.

mod fresh;
mod locks;
mod tables;

use std::collections::BTreeSet;
use std::time::Duration;

use postgres_protocol::escape::{escape_identifier, escape_literal};
use serde_json::json;
use tokio::time::{Instant, sleep};
use tokio_postgres::GenericClient;

use crate::cli::InitArgs;
use crate::commands::run::{check_columns, read_slot};
use crate::config::{self, Config, TableConfig};
use crate::descriptor::{Descriptor, Difference};
use crate::error::{Error, Kind, Result};
use crate::position::{self, SCHEMA_VERSION, publication_refusal};
use crate::postgres::{self, Sql, sql_error};
use crate::relay::Lsn;
use crate::startcheck::{Slot, System};
use crate::{kafka, source, witness};

/// Half a minute is what a cluster takes to elect a leader.
const WITNESS_TIMEOUT: Duration = Duration::from_secs(30);

mod migrations {
    pub mod worker {
        refinery::embed_migrations!("migrations/worker");
    }
    pub mod sample {
        refinery::embed_migrations!("migrations/sample");
    }
}

/// Makes what is missing, keeps what fits, refuses the rest; prints what it did.
///
/// # Errors
/// A mistake (nothing was changed), or a wait when locks or old transactions did not go away.
pub async fn init(config: &Config, args: &InitArgs) -> Result<()> {
    let sql = postgres::connect(&config.postgres).await?;
    let mut init = Init { config, args, sql, epoch: 0 };
    if !args.dry_run {
        init.wait_for_others().await?;
    }
    init.preconditions().await?;
    if args.sample {
        init.migrate_sample().await?;
    }
    check_columns(&init.sql.client, &config.tables).await?;
    check_table_kinds(&init.describe().await?)?;
    let known = init.has_schema().await?;
    let row = if known { position::read(&init.sql.client, init.slot_name()).await? } else { None };
    let slot = read_slot(&init.sql.client, init.slot_name()).await?;
    let complete = slot.is_some() || (row.is_some() && init.was_completed().await?);
    init.refuse_before_changes(row.as_ref(), slot.as_ref(), complete).await?;
    init.prepare_witness().await?;
    init.migrate().await?;
    if args.start_over {
        init.start_over(row.as_ref(), slot.as_ref()).await?;
        init.fresh().await?;
    } else {
        match (row, slot) {
            (Some(row), Some(_)) => init.keep(&row).await?,
            (None, Some(slot)) => init.adopt(&slot).await?,
            (row, None) => {
                if row.is_some() {
                    init.forget_unfinished().await?;
                }
                init.fresh().await?;
            }
        }
    }
    if args.accept_kafka {
        init.accept_kafka().await?;
    }
    Ok(())
}

struct Init<'a> {
    config: &'a Config,
    args: &'a InitArgs,
    sql: Sql,
    /// Of a row that is made: greater than any that the witness knows.
    epoch: i64,
}

impl Init<'_> {
    fn slot_name(&self) -> &str {
        &self.config.postgres.slot
    }

    fn publication(&self) -> &str {
        &self.config.postgres.publication
    }

    fn deadline(&self) -> Instant {
        Instant::now() + Duration::from_secs(self.args.wait)
    }

    /// Runs a statement, or prints it in a dry run.
    async fn execute(&self, client: &impl GenericClient, what: &str, statement: &str) -> Result<()> {
        if self.args.dry_run {
            println!("{statement};");
            return Ok(());
        }
        client.batch_execute(statement).await.map_err(|e| sql_error(what, e))
    }

    async fn describe(&self) -> Result<Descriptor> {
        position::describe(&self.sql.client, self.config).await
    }

    /// Two at once would take each other's halves for somebody's leavings. The lock goes with the
    /// session.
    async fn wait_for_others(&self) -> Result<()> {
        let (began, deadline) = (Instant::now(), self.deadline());
        let mut told = false;
        loop {
            let sql = "SELECT pg_try_advisory_lock(hashtextextended('outbox-tailer init', 0))";
            let row = self.sql.client.query_one(sql, &[]).await;
            if row.map_err(|e| sql_error("cannot lock out another init", e))?.get(0) {
                return Ok(());
            }
            if Instant::now() >= deadline {
                return Err(Error::wait("another `outbox-tailer init` is at work in this database"));
            }
            // One that has just ended may still be listed for a moment.
            if !told && began.elapsed() > Duration::from_secs(1) {
                eprintln!("waiting for another `outbox-tailer init` in this database");
                told = true;
            }
            sleep(Duration::from_millis(200)).await;
        }
    }

    /// Everything that would make a later step fail, in one message.
    async fn preconditions(&self) -> Result<()> {
        let version = self.sql.version;
        let sql = "SELECT current_setting('wal_level'),
                          current_setting('max_replication_slots')::bigint, (SELECT count(*) FROM pg_replication_slots),
                          EXISTS (SELECT FROM pg_replication_slots WHERE slot_name = $1),
                          current_setting('max_wal_senders')::bigint";
        let row = self.sql.client.query_one(sql, &[&self.slot_name()]).await;
        let row = row.map_err(|e| sql_error("cannot read the server's settings", e))?;
        let (wal_level, slots_max, slots, exists, senders_max): (String, i64, i64, bool, i64) =
            (row.get(0), row.get(1), row.get(2), row.get(3), row.get(4));
        let mut problems = Vec::new();
        if wal_level != "logical" {
            problems.push(format!("wal_level is {wal_level}, logical is needed (ALTER SYSTEM SET wal_level = 'logical', then restart the server)"));
        }
        // The slot, and a temporary one while it is made.
        if !exists && slots + 2 > slots_max {
            problems.push(format!("max_replication_slots is {slots_max} and {slots} are taken, {} are needed (ALTER SYSTEM SET max_replication_slots, then restart the server)", slots + 2));
        }
        if senders_max == 0 {
            problems.push("max_wal_senders is 0, at least 1 is needed (ALTER SYSTEM SET max_wal_senders, then restart the server)".to_owned());
        }
        if self.config.postgres.failover == Some(true) && version < 170_000 {
            problems.push(format!("postgres.failover needs PostgreSQL 17, this is {}", version / 10_000));
        }
        if problems.is_empty() {
            // The only sure way to know whether this role may replicate.
            source::Session::connect(&self.config.postgres, &self.sql.endpoint).await?;
            return Ok(());
        }
        Err(Error::mistake(problems.join("; ")))
    }

    async fn has_schema(&self) -> Result<bool> {
        let sql = "SELECT to_regclass('outbox_tailer.schema_version') IS NOT NULL";
        let row = self
            .sql
            .client
            .query_one(sql, &[])
            .await
            .map_err(|e| sql_error("cannot read the catalogs", e))?;
        Ok(row.get(0))
    }

    /// Whether the slot of the position row has ever been there.
    async fn was_completed(&self) -> Result<bool> {
        let sql = "SELECT EXISTS (SELECT FROM outbox_tailer.audit a WHERE a.slot = $1 AND a.action IN ('init-done', 'adopt-slot')
                     AND a.id > coalesce((SELECT max(id) FROM outbox_tailer.audit WHERE slot = $1 AND action = 'init'), 0))";
        let row = self
            .sql
            .client
            .query_one(sql, &[&self.slot_name()])
            .await
            .map_err(|e| sql_error("cannot read outbox_tailer.audit", e))?;
        Ok(row.get(0))
    }

    /// Everything that is wrong is found before anything is changed.
    async fn refuse_before_changes(
        &self,
        row: Option<&position::Row>,
        slot: Option<&Slot>,
        complete: bool,
    ) -> Result<()> {
        let name = self.slot_name();
        if let Some(adopted) = &self.args.adopt_slot {
            if adopted != name {
                return Err(Error::mistake(format!(
                    "--adopt-slot {adopted}: the configured slot is {name}; set postgres.slot or --slot to {adopted}"
                )));
            }
            if slot.is_none() {
                return Err(Error::mistake(format!("--adopt-slot {adopted}: there is no such slot")));
            }
        }
        if let Some(slot) = slot {
            let database = self.sql.client.query_one("SELECT current_database()::text", &[]).await;
            let database: String =
                database.map_err(|e| sql_error("cannot read the database's name", e))?.get(0);
            if let Some(what) = slot.wrong_kind(name, &database) {
                return Err(Error::mistake(format!("{what}; choose another name for postgres.slot")));
            }
            if !self.args.start_over {
                if let Some(lost) = slot.lost(name) {
                    return Err(Error::no_start(lost));
                }
                if row.is_none() && self.args.adopt_slot.is_none() {
                    return Err(Error::mistake(format!(
                        "slot {name} exists and was not made by `outbox-tailer init`; to take it over at the position it has confirmed, add --adopt-slot {name}"
                    )));
                }
            }
            if let Some(pid) = slot.active_pid
                && (self.args.start_over || row.is_none())
            {
                return Err(Error::mistake(format!(
                    "slot {name} is in use (PID {pid}): stop what uses it first"
                )));
            }
        }
        if self.args.start_over {
            if row.is_none() && slot.is_none() {
                return Err(Error::mistake(format!(
                    "--start-over: there is neither slot {name} nor a position row to start over from"
                )));
            }
        } else if slot.is_none() && row.is_some() && complete {
            return Err(Error::mistake(format!(
                "slot {name} is gone, its position row is there: what was not streamed yet never will be; once those events are taken care of, add --start-over --from-now"
            )));
        }
        let now = self.describe().await?;
        match (&now.publication, row) {
            // A start-over accepts the publication as it is, like the first start.
            (Some(_), row) if row.is_none() || self.args.start_over => {
                if let Some(problem) = now.unsuitable(self.publication()) {
                    return Err(Error::mistake(format!(
                        "{problem}; this publication was not made here and is left alone"
                    )));
                }
            }
            (None, None) if slot.is_some() => {
                return Err(Error::mistake(format!(
                    "slot {name} exists but publication {} does not: decoding would miss it for everything before it is made",
                    self.publication()
                )));
            }
            _ => {}
        }
        let fresh = slot.is_none() || self.args.start_over;
        if fresh && !self.args.from_now {
            self.refuse_existing_rows(&self.sql.client, &self.config.tables).await?;
        }
        Ok(())
    }

    async fn refuse_existing_rows(&self, client: &impl GenericClient, tables: &[TableConfig]) -> Result<()> {
        for table in tables {
            let sql = format!("SELECT EXISTS (SELECT FROM {})", qualified(table));
            let row =
                client.query_one(&sql, &[]).await.map_err(|e| sql_error("cannot look into the outbox", e))?;
            if row.get(0) {
                return Err(Error::mistake(format!(
                    "table {} holds rows that the slot will never stream; --from-now leaves them unpublished and records their ids; otherwise have them delivered by what has delivered them so far, delete them, and run init again",
                    table.name()
                )));
            }
        }
        Ok(())
    }

    async fn migrate(&mut self) -> Result<()> {
        if self.has_schema().await? {
            let sql = "SELECT coalesce(max(version), 0) FROM outbox_tailer.schema_version";
            let row = self
                .sql
                .client
                .query_one(sql, &[])
                .await
                .map_err(|e| sql_error("cannot read the schema version", e))?;
            if row.get::<_, i32>(0) >= SCHEMA_VERSION {
                return Ok(()); // also when a DBA applied the files by hand
            }
        }
        if self.args.dry_run {
            migrations::worker::migrations::runner()
                .get_migrations()
                .iter()
                .filter_map(|m| m.sql())
                .for_each(|sql| println!("{sql}"));
            return Ok(());
        }
        let what = "cannot make schema outbox_tailer";
        self.execute(&self.sql.client, what, "CREATE SCHEMA IF NOT EXISTS outbox_tailer").await?;
        let mut runner = migrations::worker::migrations::runner();
        runner.set_migration_table_name("outbox_tailer.migration");
        runner.run_async(&mut self.sql.client).await.map_err(|e| Error::mistake(what).because(e))?;
        println!("made schema outbox_tailer, version {SCHEMA_VERSION}");
        Ok(())
    }

    async fn migrate_sample(&mut self) -> Result<()> {
        let mut runner = migrations::sample::migrations::runner();
        if self.args.dry_run {
            runner.get_migrations().iter().filter_map(|m| m.sql()).for_each(|sql| println!("{sql}"));
            return Ok(());
        }
        let what = "cannot make the sample tables";
        self.execute(&self.sql.client, what, "SET search_path = public").await?;
        runner.set_migration_table_name("sample_migration");
        runner.run_async(&mut self.sql.client).await.map_err(|e| Error::mistake(what).because(e))?;
        self.execute(&self.sql.client, what, "SET search_path = pg_catalog").await?;
        println!("made the sample tables sales_order and outbox_event");
        Ok(())
    }

    /// Before anything is given up: the witness can be written, and of what an earlier life of this
    /// slot has left there nothing will be held against this one.
    async fn prepare_witness(&mut self) -> Result<()> {
        if self.args.dry_run {
            if let config::Witness::Kafka { topic } = &self.config.witness {
                println!("-- Kafka topic {topic}, the witness, where it is missing");
            }
            return Ok(());
        }
        if let Some(made) = witness::prepare(self.config).await? {
            println!("{made}");
        }
        let mut replication = source::Session::connect(&self.config.postgres, &self.sql.endpoint).await?;
        let system = replication.identify_system().await?;
        let earlier = match witness::read(self.config, &system.identifier).await {
            Err(e) if self.args.start_over && matches!(e.kind, Kind::Refusal(_)) => {
                println!("{}; it is written anew", e.line());
                None
            }
            earlier => earlier?,
        };
        self.epoch = earlier.map_or(0, |record| record.epoch + 1);
        Ok(())
    }

    /// Removes what an `init` that was killed before it had made the slot has left.
    async fn forget_unfinished(&self) -> Result<()> {
        println!("an earlier init did not finish; starting again");
        let slot = escape_literal(self.slot_name());
        let delete = format!(
            "DELETE FROM outbox_tailer.position WHERE slot = {slot};
             DELETE FROM outbox_tailer.not_streamed WHERE slot = {slot}"
        );
        self.execute(&self.sql.client, "cannot remove the unfinished position row", &delete).await
    }

    /// Slot first, row last: a kill between leaves what only a start-over accepts.
    async fn start_over(&self, row: Option<&position::Row>, slot: Option<&Slot>) -> Result<()> {
        let name = escape_literal(self.slot_name());
        let was = row.map(|row| row.confirmed.to_string());
        let confirmed = slot.and_then(|slot| slot.confirmed).map(|lsn| lsn.to_string());
        let detail = json!({ "position": was, "slot_confirmed": confirmed }).to_string();
        let audit = format!(
            "INSERT INTO outbox_tailer.audit (slot, action, detail) VALUES ({name}, 'start-over', {})",
            escape_literal(&detail)
        );
        self.execute(&self.sql.client, "cannot write the audit record", &audit).await?;
        if slot.is_some() {
            let drop = format!("SELECT pg_drop_replication_slot({name})");
            self.execute(&self.sql.client, "cannot drop the slot", &drop).await?;
        }
        let forget = format!("DELETE FROM outbox_tailer.position WHERE slot = {name}");
        self.execute(&self.sql.client, "cannot forget the position", &forget).await?;
        println!(
            "starting over: events after {} that were not streamed yet never will be",
            was.as_deref().unwrap_or("the slot's start")
        );
        Ok(())
    }

    /// Takes an existing slot as it is.
    async fn adopt(&mut self, slot: &Slot) -> Result<()> {
        let name = self.slot_name().to_owned();
        let confirmed = slot
            .confirmed
            .ok_or_else(|| Error::mistake(format!("slot {name} has no confirmed position yet")))?;
        let mut replication = source::Session::connect(&self.config.postgres, &self.sql.endpoint).await?;
        let system = replication.identify_system().await?;
        let history = replication.timeline_history(system.timeline).await?;
        if self.args.dry_run {
            println!("-- position row for slot {name} at {confirmed}");
            return Ok(());
        }
        let failed = |e| sql_error("cannot write the position row", e);
        let transaction = self.sql.client.transaction().await.map_err(failed)?;
        let descriptor = position::describe(&transaction, self.config).await?;
        if let Some(problem) = descriptor.unsuitable(&self.config.postgres.publication) {
            return Err(Error::mistake(problem));
        }
        make_row(self.config, &transaction, &system, history, &descriptor, confirmed, self.epoch).await?;
        position::audit(
            &transaction,
            &name,
            "adopt-slot",
            &json!({ "confirmed_lsn": confirmed.to_string() }),
        )
        .await?;
        transaction.commit().await.map_err(failed)?;
        println!("adopted slot {name} at {confirmed}, publication {}", self.publication());
        let young = "SELECT EXISTS (SELECT FROM pg_publication p LEFT JOIN pg_publication_rel r ON r.prpubid = p.oid, pg_replication_slots s
                     WHERE p.pubname = $1 AND s.slot_name = $2
                       AND least(age(p.xmin), age(r.xmin)) <= age(s.catalog_xmin))";
        let row = self.sql.client.query_one(young, &[&self.publication(), &name]).await;
        if row.map_err(|e| sql_error("cannot compare publication and slot", e))?.get(0) {
            println!(
                "note: publication {} may have been made or changed after {confirmed}; rows committed between are not in the stream",
                self.publication()
            );
        }
        Ok(())
    }

    /// Everything is there: keep it, and follow a changed list of tables.
    async fn keep(&mut self, row: &position::Row) -> Result<()> {
        if row.publication != self.publication() {
            return Err(Error::mistake(format!(
                "slot {} was set up with publication {}, postgres.publication is {}",
                self.slot_name(),
                row.publication,
                self.publication()
            )));
        }
        let configured: BTreeSet<String> = self.config.tables.iter().map(TableConfig::name).collect();
        let accepted: BTreeSet<String> = row.descriptor.tables.keys().cloned().collect();
        let added: Vec<TableConfig> =
            self.config.tables.iter().filter(|t| !accepted.contains(&t.name())).cloned().collect();
        let removed: Vec<String> = accepted.difference(&configured).cloned().collect();
        let mut now = self.describe().await?;
        // Compare what both know.
        let mut common = row.descriptor.clone();
        common.tables.retain(|name, _| configured.contains(name));
        now.tables.retain(|name, _| accepted.contains(name));
        if let Difference::Changed(what) = common.difference(&now, self.publication()) {
            return Err(publication_refusal(&what));
        }
        if !added.is_empty() {
            self.add_tables(row, &added).await?;
        }
        for name in &removed {
            self.remove_table(name).await?;
        }
        if added.is_empty() && removed.is_empty() {
            println!(
                "kept publication {}, slot {}, position {}",
                self.publication(),
                self.slot_name(),
                row.confirmed
            );
        }
        if !self.args.dry_run && !self.was_completed().await? {
            // Killed between the slot and this record, perhaps before the slot was marked.
            if self.wants_failover() {
                let mut replication =
                    source::Session::connect(&self.config.postgres, &self.sql.endpoint).await?;
                replication.query("does not mark the slot for failover", &self.failover_command()).await?;
            }
            position::audit(&self.sql.client, self.slot_name(), "init-done", &json!({})).await?;
        }
        Ok(())
    }

    async fn accept_kafka(&self) -> Result<()> {
        let topics = self.config.tables.iter().map(|t| t.topic.clone()).collect();
        let now = kafka::preflight(&self.config.kafka, topics).await?;
        let partitions = now.topics.iter().map(|(name, facts)| (name.clone(), facts.partitions)).collect();
        if self.args.dry_run {
            println!("-- record Kafka cluster {} and partitions {partitions:?}", now.cluster);
            return Ok(());
        }
        if read_slot(&self.sql.client, self.slot_name()).await?.is_some_and(|slot| slot.active_pid.is_some())
        {
            return Err(Error::mistake(format!(
                "--accept-kafka: slot {} is in use: stop the worker first, it places keys by the recorded counts",
                self.slot_name()
            )));
        }
        position::record_kafka(&self.sql.client, self.slot_name(), &now.cluster, &partitions).await?;
        // A worker that has read the old counts and not started yet must read them again.
        let epoch = "UPDATE outbox_tailer.position SET epoch = epoch + 1 WHERE slot = $1";
        let failed = |e| sql_error("cannot raise the epoch", e);
        self.sql.client.execute(epoch, &[&self.slot_name()]).await.map_err(failed)?;
        let detail = json!({ "cluster": now.cluster, "partitions": partitions });
        position::audit(&self.sql.client, self.slot_name(), "accept-kafka", &detail).await?;
        println!("recorded Kafka cluster {} with {partitions:?}", now.cluster);
        Ok(())
    }
}

/// Writes the position row and, before that is committed, the witness.
async fn make_row(
    config: &Config,
    transaction: &impl GenericClient,
    system: &System,
    history: Vec<(u32, Lsn)>,
    descriptor: &Descriptor,
    position: Lsn,
    epoch: i64,
) -> Result<()> {
    position::insert(transaction, config, system, descriptor, position, epoch).await?;
    let Some(writer) = witness::Writer::new(config)? else { return Ok(()) };
    let record = witness::Record {
        slot: config.postgres.slot.clone(),
        system_identifier: system.identifier.clone(),
        timeline: system.timeline,
        history,
        position,
        epoch,
        instance: String::new(),
    };
    let written = tokio::time::timeout(WITNESS_TIMEOUT, witness::write(&writer, &record)).await;
    tokio::task::spawn_blocking(move || drop(writer));
    written.map_err(|_| Error::wait("the witness cannot be written: Kafka does not acknowledge it"))?
}

fn qualified(table: &TableConfig) -> String {
    format!("{}.{}", escape_identifier(&table.schema), escape_identifier(&table.table))
}

fn check_table_kinds(now: &Descriptor) -> Result<()> {
    let problem = now.tables.iter().find_map(|(name, table)| table.as_ref()?.unsuitable(name));
    problem.map_or(Ok(()), |problem| Err(Error::mistake(problem)))
}

/// Records the ids of the rows that the transaction sees; gives their number.
async fn record_not_streamed(
    client: &impl GenericClient,
    slot: &str,
    table: &TableConfig,
    descriptor: &Descriptor,
) -> Result<u64> {
    let oid = descriptor
        .table(&table.name())
        .map(|t| t.oid)
        .ok_or_else(|| Error::bug("the table is not described"))?;
    let sql = "SELECT a.attname::text FROM pg_attribute a WHERE a.attrelid = $1 AND a.attname = ANY($2) AND NOT a.attisdropped
               ORDER BY array_position($2, a.attname::text) LIMIT 1";
    let failed = |e| sql_error("cannot record the rows that are never streamed", e);
    let column = client.query_one(sql, &[&oid, &table.id.0]).await.map_err(failed)?;
    let id = escape_identifier(column.get(0));
    let insert = format!(
        "INSERT INTO outbox_tailer.not_streamed (slot, table_oid, event_id)
         SELECT $1, $2, {id}::text FROM {} WHERE {id} IS NOT NULL ON CONFLICT DO NOTHING",
        qualified(table)
    );
    client.execute(&insert, &[&slot, &oid]).await.map_err(failed)
}
