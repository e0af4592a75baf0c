//! `skip`: an operator decides to go past one event that cannot be published.

use serde_json::Value;

use crate::cli::SkipArgs;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::{position, postgres};

/// Leaves an audit record that lets the worker pass the event its refusal names, and no other.
///
/// # Errors
/// A mistake when the worker does not refuse this event.
pub async fn skip(config: &Config, args: &SkipArgs) -> Result<()> {
    let sql = postgres::connect(&config.postgres).await?;
    let slot = &config.postgres.slot;
    let row = position::read(&sql.client, slot).await?;
    let row = row.ok_or_else(|| {
        Error::mistake(format!("slot {slot} has no position row: run `outbox-tailer init`"))
    })?;
    let refusal = row.refusal.unwrap_or(Value::Null);
    if refusal["kind"] != "poison" {
        let doing = refusal["message"]
            .as_str()
            .map_or("it refuses nothing".to_owned(), |m| format!("it refuses: {m}"));
        return Err(Error::mistake(format!(
            "the worker of slot {slot} does not refuse event {}: {doing}",
            args.event_id
        )));
    }
    let mut detail = refusal["detail"].clone();
    if detail["event_id"] != args.event_id.as_str() {
        return Err(Error::mistake(format!(
            "the worker of slot {slot} refuses event {}, not {}",
            detail["event_id"].as_str().unwrap_or("?"),
            args.event_id
        )));
    }
    detail["reason"] = Value::from(args.reason.as_str());
    position::audit(&sql.client, slot, "skip", &detail).await?;
    println!(
        "event {} of {} (key {}) will be skipped; recorded in outbox_tailer.audit",
        args.event_id,
        detail["table"].as_str().unwrap_or("?"),
        detail["key"].as_str().unwrap_or("NULL")
    );
    Ok(())
}
