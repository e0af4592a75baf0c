//! A changed list of outbox tables.

use postgres_protocol::escape::escape_identifier;
use serde_json::json;
use tokio_postgres::GenericClient;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::Json;

use super::locks::{blocked, lock_command, lock_tables};
use super::{Init, qualified, record_not_streamed};
use crate::config::TableConfig;
use crate::descriptor::Descriptor;
use crate::error::{Error, Result};
use crate::position;
use crate::postgres::sql_error;

impl Init<'_> {
    /// Adds tables under a lock that no writer in flight can pass, in one transaction with the new
    /// description: a worker of the old configuration refuses from then on.
    pub(super) async fn add_tables(&mut self, row: &position::Row, added: &[TableConfig]) -> Result<()> {
        let names: Vec<String> = added.iter().map(qualified).collect();
        let alter = format!(
            "ALTER PUBLICATION {} ADD TABLE {}",
            escape_identifier(self.publication()),
            names.join(", ")
        );
        if self.args.dry_run {
            println!(
                "BEGIN;\n{};\n{alter};\n-- the ids of their rows, and the new description\nCOMMIT;",
                lock_command(added)
            );
            return Ok(());
        }
        if !self.args.from_now {
            self.refuse_existing_rows(&self.sql.client, added).await?;
        }
        let slot = self.slot_name().to_owned();
        let deadline = self.deadline();
        loop {
            let failed = |e| sql_error("cannot add the table to the publication", e);
            let transaction = self.sql.client.transaction().await.map_err(failed)?;
            if let Err(e) = lock_tables(&transaction, added).await {
                transaction.rollback().await.map_err(failed)?;
                blocked(&self.sql.client, added, deadline, e).await?;
                continue;
            }
            transaction.batch_execute("SET LOCAL statement_timeout = 0").await.map_err(failed)?;
            let before = position::describe(&transaction, self.config).await?;
            let all_tables = before.publication.as_ref().is_some_and(|p| p.all_tables);
            for table in added {
                let name = table.name();
                let member = before.table(&name).is_some_and(|t| t.member.is_some());
                if !member && !all_tables {
                    let alter = format!(
                        "ALTER PUBLICATION {} ADD TABLE {}",
                        escape_identifier(&self.config.postgres.publication),
                        qualified(table)
                    );
                    transaction.batch_execute(&alter).await.map_err(failed)?;
                }
            }
            let mut descriptor = position::describe(&transaction, self.config).await?;
            if let Some(problem) = descriptor.unsuitable(&self.config.postgres.publication) {
                return Err(Error::mistake(problem));
            }
            let mut existing = 0;
            for table in added {
                existing += record_not_streamed(&transaction, &slot, table, &descriptor).await?;
            }
            if existing > 0 && !self.args.from_now {
                return Err(Error::mistake(format!(
                    "{existing} rows are in the new tables and would never be streamed; --from-now accepts that and records their ids"
                )));
            }
            // Detached partitions stay known; tables that are being removed stay until they are.
            let mut leaves = row.descriptor.leaves.clone();
            leaves.extend(std::mem::take(&mut descriptor.leaves));
            descriptor.leaves = leaves;
            for (name, table) in &row.descriptor.tables {
                descriptor.tables.entry(name.clone()).or_insert_with(|| table.clone());
            }
            let detail = json!({ "tables": names, "rows_not_streamed": existing });
            store_descriptor(&transaction, &slot, &descriptor, "add-table", &detail).await?;
            transaction.commit().await.map_err(failed)?;
            println!("added {} to publication {}", names.join(", "), self.publication());
            return Ok(());
        }
    }

    /// Removes a table once nothing of it is left in the slot.
    pub(super) async fn remove_table(&mut self, name: &str) -> Result<()> {
        let slot = self.slot_name().to_owned();
        let publication = self.publication().to_owned();
        let row = position::read(&self.sql.client, &slot)
            .await?
            .ok_or_else(|| Error::bug("the position row went away"))?;
        let oid = row
            .descriptor
            .table(name)
            .map(|t| t.oid)
            .ok_or_else(|| Error::bug("the table is not described"))?;
        let sql = "SELECT n.nspname::text, c.relname::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = $1";
        let found = self
            .sql
            .client
            .query_opt(sql, &[&oid])
            .await
            .map_err(|e| sql_error("cannot read the catalogs", e))?;
        // A table that was dropped has left the publication, and nobody writes to it.
        let table = found
            .map(|found| format!("{}.{}", escape_identifier(found.get(0)), escape_identifier(found.get(1))));
        let lock = table.as_ref().map_or("SET LOCAL statement_timeout = 0".to_owned(), |table| format!(
            "SET LOCAL lock_timeout = '5s'; SET LOCAL statement_timeout = 0; LOCK TABLE {table} IN SHARE ROW EXCLUSIVE MODE"
        ));
        let alter = table.as_ref().map_or(String::new(), |table| {
            format!("ALTER PUBLICATION {} DROP TABLE {table}", escape_identifier(&publication))
        });
        if self.args.dry_run {
            println!("BEGIN;\n{lock};\n{alter};\n-- the new description\nCOMMIT;");
            return Ok(());
        }
        let failed = |e| sql_error(&format!("cannot remove table {name}"), e);
        let transaction = self.sql.client.transaction().await.map_err(failed)?;
        transaction.batch_execute(&lock).await.map_err(failed)?;
        // 'I', then the relation's OID (PostgreSQL manual, "Logical Replication Message Formats").
        let peek = "SELECT count(*) FROM pg_logical_slot_peek_binary_changes($1::text::name, NULL, NULL,
                      'proto_version', '1', 'publication_names', quote_ident($2))
                    WHERE get_byte(data, 0) = 73 AND substring(data FROM 2 FOR 4) = int4send($3::oid::bigint::int)";
        let left = transaction.query_one(peek, &[&slot, &publication, &oid]).await.map_err(|e| match e.code() {
            Some(&SqlState::OBJECT_IN_USE) => Error::mistake(format!(
                "table {name} is to be removed, and slot {slot} is in use: let the worker catch up, stop it, and run init again"
            )),
            _ => failed(e),
        })?;
        let left: i64 = left.get(0);
        if left > 0 && table.is_none() {
            return Err(Error::mistake(format!(
                "table {name} was dropped, and {left} of its events are not published yet, nor can they be: once they are taken care of, and what else is not streamed yet, run `outbox-tailer init --start-over --from-now`"
            )));
        }
        if left > 0 {
            return Err(Error::mistake(format!(
                "table {name} is to be removed, and {left} of its events are not published yet: start the worker with the old configuration until it has caught up"
            )));
        }
        transaction.batch_execute(&alter).await.map_err(failed)?;
        let mut descriptor = row.descriptor;
        descriptor.tables.remove(name);
        descriptor.leaves.retain(|leaf, _| !leaf.starts_with(&format!("{name}/")));
        store_descriptor(&transaction, &slot, &descriptor, "remove-table", &json!({ "table": name })).await?;
        transaction.commit().await.map_err(failed)?;
        println!("removed {} from publication {publication}", table.as_deref().unwrap_or(name));
        Ok(())
    }
}

async fn store_descriptor(
    client: &impl GenericClient,
    slot: &str,
    descriptor: &Descriptor,
    action: &str,
    detail: &serde_json::Value,
) -> Result<()> {
    let update = "UPDATE outbox_tailer.position SET descriptor = $2, updated_at = now() WHERE slot = $1";
    client
        .execute(update, &[&slot, &Json(descriptor)])
        .await
        .map_err(|e| sql_error("cannot record the new description", e))?;
    position::audit(client, slot, action, detail).await
}
