//! The lock on the outbox tables that no writer in flight can pass.

use std::time::Duration;

use tokio::time::{Instant, sleep};
use tokio_postgres::error::SqlState;
use tokio_postgres::{Client, GenericClient};

use super::qualified;
use crate::config::TableConfig;
use crate::descriptor::table_parameters;
use crate::error::{Error, Result};
use crate::postgres::sql_error;

pub fn lock_command(tables: &[TableConfig]) -> String {
    let names: Vec<String> = tables.iter().map(qualified).collect();
    format!("LOCK TABLE {} IN SHARE ROW EXCLUSIVE MODE", names.join(", "))
}

pub async fn lock_tables(
    client: &impl GenericClient,
    tables: &[TableConfig],
) -> Result<(), tokio_postgres::Error> {
    // Below deadlock_timeout (1 s): writers queue behind a waiting lock no longer than that.
    client.batch_execute(&format!("SET LOCAL lock_timeout = '800ms'; {}", lock_command(tables))).await
}

/// Names who holds the lock and waits a little; an error when it was no lock, or time is up.
pub async fn blocked(
    client: &Client,
    tables: &[TableConfig],
    deadline: Instant,
    e: tokio_postgres::Error,
) -> Result<()> {
    if e.code() != Some(&SqlState::LOCK_NOT_AVAILABLE) {
        return Err(sql_error("cannot lock the outbox table", e));
    }
    let (schemas, names) = table_parameters(tables);
    let sql = "SELECT DISTINCT coalesce('PID ' || l.pid, 'a prepared transaction') || coalesce(' (' || a.usename || ', ' || a.state || ', open for '
                 || date_trunc('second', clock_timestamp() - a.xact_start) || ')', '')
               FROM unnest($1::text[], $2::text[]) AS w(schema, name)
               JOIN pg_namespace n ON n.nspname = w.schema JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = w.name
               JOIN pg_locks l ON l.locktype = 'relation' AND l.relation = c.oid AND l.granted AND l.mode NOT IN ('AccessShareLock', 'RowShareLock')
               LEFT JOIN pg_stat_activity a ON a.pid = l.pid WHERE l.pid IS DISTINCT FROM pg_backend_pid()";
    let rows =
        client.query(sql, &[&schemas, &names]).await.map_err(|e| sql_error("cannot read pg_locks", e))?;
    let holders: Vec<String> = rows.iter().map(|row| row.get(0)).collect();
    let holders = if holders.is_empty() { "a writer".to_owned() } else { holders.join(", ") };
    if Instant::now() >= deadline {
        return Err(Error::wait(format!(
            "the outbox table could not be locked, {holders} holds it; neither publication nor slot was changed"
        )));
    }
    eprintln!("waiting for the outbox table, held by {holders}");
    sleep(Duration::from_millis(500)).await;
    Ok(())
}
