//! The first set-up, where neither slot nor position is there.

use std::time::Duration;

use postgres_protocol::escape::{escape_identifier, escape_literal};
use serde_json::json;
use tokio::time::{Instant, sleep};
use tokio_postgres::types::PgLsn;
use tokio_postgres::{Client, IsolationLevel};

use super::locks::{blocked, lock_command, lock_tables};
use super::{Init, make_row, qualified, record_not_streamed};
use crate::commands::run::read_slot;
use crate::error::{Error, Result};
use crate::postgres::sql_error;
use crate::{position, source};

impl Init<'_> {
    /// Publication, slot and position, where none of slot and position is there.
    pub(super) async fn fresh(&mut self) -> Result<()> {
        let made_publication = self.make_publication().await?;
        if self.args.dry_run {
            println!("-- on a replication connection:");
            println!("{};", self.create_slot_command("<temporary>"));
            println!("-- in its snapshot: the ids of the rows that are never streamed, and the position row");
            println!(
                "SELECT pg_copy_logical_replication_slot('<temporary>', {});",
                escape_literal(self.slot_name())
            );
            if self.wants_failover() {
                println!("{};", self.failover_command());
            }
            return Ok(());
        }
        let made = self.make_slot_and_position().await;
        let slot_is_there = || async { Ok(read_slot(&self.sql.client, self.slot_name()).await?.is_some()) };
        if made.is_err() && made_publication && !slot_is_there().await? {
            // Leave nothing half made behind.
            let drop = format!("DROP PUBLICATION IF EXISTS {}", escape_identifier(self.publication()));
            self.execute(&self.sql.client, "cannot drop the publication again", &drop).await?;
        }
        made
    }

    /// Gives whether it was made now.
    async fn make_publication(&mut self) -> Result<bool> {
        let now = self.describe().await?;
        if now.publication.is_some() {
            if let Some(problem) = now.unsuitable(self.publication()) {
                return Err(Error::mistake(problem));
            }
            println!("kept publication {}", self.publication());
            if let Some(excess) = now.excess() {
                println!("note: {excess}; what is not needed is ignored and counted");
            }
            return Ok(false);
        }
        let tables: Vec<String> = self.config.tables.iter().map(qualified).collect();
        let create = format!(
            "CREATE PUBLICATION {} FOR TABLE {} WITH (publish = 'insert', publish_via_partition_root = true)",
            escape_identifier(self.publication()),
            tables.join(", ")
        );
        if self.args.dry_run {
            println!("BEGIN;\n{};\n{create};\nCOMMIT;", lock_command(&self.config.tables));
            return Ok(false);
        }
        let deadline = self.deadline();
        loop {
            let transaction =
                self.sql.client.transaction().await.map_err(|e| sql_error("cannot begin", e))?;
            match lock_tables(&transaction, &self.config.tables).await {
                Ok(()) => {
                    let what = format!("cannot make publication {}", self.config.postgres.publication);
                    transaction.batch_execute(&create).await.map_err(|e| sql_error(&what, e))?;
                    transaction.commit().await.map_err(|e| sql_error(&what, e))?;
                    println!("made publication {} for {}", self.publication(), tables.join(", "));
                    return Ok(true);
                }
                Err(e) => {
                    transaction.rollback().await.map_err(|e| sql_error("cannot roll back", e))?;
                    blocked(&self.sql.client, &self.config.tables, deadline, e).await?;
                }
            }
        }
    }

    fn create_slot_command(&self, name: &str) -> String {
        let name = escape_identifier(name);
        if self.sql.version >= 150_000 {
            format!("CREATE_REPLICATION_SLOT {name} TEMPORARY LOGICAL pgoutput (SNAPSHOT 'export')")
        } else {
            format!("CREATE_REPLICATION_SLOT {name} TEMPORARY LOGICAL pgoutput EXPORT_SNAPSHOT")
        }
    }

    pub(super) fn wants_failover(&self) -> bool {
        self.sql.version >= 170_000 && self.config.postgres.failover != Some(false)
    }

    pub(super) fn failover_command(&self) -> String {
        format!("ALTER_REPLICATION_SLOT {} (FAILOVER true)", escape_identifier(self.slot_name()))
    }

    async fn make_slot_and_position(&mut self) -> Result<()> {
        let mut replication = source::Session::connect(&self.config.postgres, &self.sql.endpoint).await?;
        let system = replication.identify_system().await?;
        let history = replication.timeline_history(system.timeline).await?;
        // Two `init` in two databases at once must not disturb each other.
        let temporary = format!("outbox_tailer_init_{:016x}", fastrand::u64(..));
        let created = self.create_slot(&mut replication, &temporary).await?;
        let field = |i: usize| created.get(i).cloned().flatten();
        let unexpected = || Error::bug("an unexpected answer to CREATE_REPLICATION_SLOT");
        let point: PgLsn = field(1).and_then(|lsn| lsn.parse().ok()).ok_or_else(unexpected)?;
        let snapshot = field(2).ok_or_else(unexpected)?;

        let slot = self.slot_name().to_owned();
        let failed = |e| sql_error("cannot write the position row", e);
        let transaction = self.sql.client.build_transaction().isolation_level(IsolationLevel::RepeatableRead);
        let transaction = transaction.start().await.map_err(failed)?;
        let in_snapshot = format!(
            "SET TRANSACTION SNAPSHOT {}; SET LOCAL statement_timeout = 0",
            escape_literal(&snapshot)
        );
        transaction.batch_execute(&in_snapshot).await.map_err(failed)?;
        let descriptor = position::describe(&transaction, self.config).await?;
        if let Some(problem) = descriptor.unsuitable(&self.config.postgres.publication) {
            return Err(Error::mistake(problem));
        }
        let mut existing = 0;
        for table in &self.config.tables {
            existing += record_not_streamed(&transaction, &slot, table, &descriptor).await?;
        }
        if existing > 0 && !self.args.from_now {
            return Err(Error::mistake(format!(
                "{existing} rows were committed to the outbox just before the slot's start and would never be streamed; --from-now accepts that and records their ids"
            )));
        }
        make_row(self.config, &transaction, &system, history, &descriptor, point, self.epoch).await?;
        position::audit(
            &transaction,
            &slot,
            "init",
            &json!({ "lsn": point.to_string(), "rows_not_streamed": existing }),
        )
        .await?;
        transaction.commit().await.map_err(failed)?;

        let copy = "SELECT pg_copy_logical_replication_slot($1::text::name, $2::text::name, false)";
        self.sql
            .client
            .execute(copy, &[&temporary, &slot])
            .await
            .map_err(|e| sql_error(&format!("cannot make slot {slot}"), e))?;
        if self.wants_failover() {
            let command = self.failover_command();
            replication.query("does not mark the slot for failover", &command).await?;
        }
        // By itself it would go a moment after our end only.
        let drop = format!("DROP_REPLICATION_SLOT {}", escape_identifier(&temporary));
        replication.query("does not drop the temporary slot", &drop).await?;
        position::audit(&self.sql.client, &slot, "init-done", &json!({ "lsn": point.to_string() })).await?;
        println!("made slot {slot}, position {point}");
        if existing > 0 {
            println!(
                "{existing} rows that are in the outbox already will not be published (recorded in outbox_tailer.not_streamed)"
            );
        }
        Ok(())
    }

    /// `CREATE_REPLICATION_SLOT` waits for every transaction that was open when it began.
    async fn create_slot(
        &self,
        replication: &mut source::Session,
        name: &str,
    ) -> Result<Vec<Option<String>>> {
        let command = self.create_slot_command(name);
        let walsender = replication.backend_pid;
        let deadline = self.deadline();
        let mut told = String::new();
        let what = format!("does not make slot {}", self.slot_name());
        let mut creating = std::pin::pin!(replication.query(&what, &command));
        loop {
            let give_up = tokio::select! {
                rows = &mut creating => {
                    return rows?.into_iter().next().ok_or_else(|| Error::bug("no answer to CREATE_REPLICATION_SLOT"));
                }
                _ = tokio::signal::ctrl_c() => Some("interrupted".to_owned()),
                () = sleep(Duration::from_secs(1)) => {
                    let blockers = old_transactions(&self.sql.client).await?;
                    if blockers != told && !blockers.is_empty() {
                        eprintln!("waiting for older transactions to end: {blockers}");
                        told.clone_from(&blockers);
                    }
                    (Instant::now() >= deadline).then(|| format!("given up after {} s, waiting for {told}", self.args.wait))
                }
            };
            if let Some(why) = give_up {
                // It waits for a transaction and would not notice that we are gone; its slot goes with it.
                let end = "SELECT pg_terminate_backend($1, 5000)";
                self.sql
                    .client
                    .execute(end, &[&walsender])
                    .await
                    .map_err(|e| sql_error("cannot end the walsender", e))?;
                return Err(Error::wait(format!("slot {} was not made: {why}", self.slot_name())));
            }
        }
    }
}

async fn old_transactions(client: &Client) -> Result<String> {
    // A role without pg_read_all_stats sees of others that they are there, and nothing else.
    let sql = "SELECT 'PID ' || pid || coalesce(' (' || usename || ', ' || state || ', open for '
                      || date_trunc('second', clock_timestamp() - xact_start) || ')', '')
               FROM pg_stat_activity WHERE backend_xid IS NOT NULL AND pid <> pg_backend_pid()
               UNION ALL
               SELECT 'prepared transaction ' || quote_literal(gid) || ' (of ' || prepared || ')' FROM pg_prepared_xacts";
    let rows = client.query(sql, &[]).await.map_err(|e| sql_error("cannot read pg_stat_activity", e))?;
    Ok(rows.iter().map(|row| row.get::<_, String>(0)).collect::<Vec<_>>().join(", "))
}
