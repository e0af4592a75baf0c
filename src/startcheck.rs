//! The start check: may the stream start at the persisted position, judged from what the server,
//! the slot, the row and our own memory say. Pure; made at each connect and reconnect.
//!
//! C is the slot's confirmed flush LSN, P the row's position, W what we still know from before
//! (this process's memory; an external witness has its place in [`Held`]). In normal life
//! C ≤ W ≤ P whatever crashes between, because the row is committed before the slot is told.

use crate::error::{Error, Refusal, Result};
use crate::relay::Lsn;
use crate::source::System;

/// A position known from outside the database's own WAL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    pub system_identifier: String,
    pub timeline: u32,
    pub lsn: Lsn,
    /// The last position we asked for: its write may have been committed unseen.
    pub requested: Lsn,
    /// Ours, while nobody else has taken the slot.
    pub epoch: i64,
}

/// The slot's row in `pg_replication_slots`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slot {
    pub plugin: Option<String>,
    pub slot_type: String,
    pub database: Option<String>,
    pub temporary: bool,
    pub two_phase: bool,
    pub active_pid: Option<i32>,
    pub wal_status: Option<String>,
    pub invalidation_reason: Option<String>,
    pub confirmed: Option<Lsn>,
}

/// What is compared.
#[derive(Debug, Clone)]
pub struct Facts<'a> {
    pub slot_name: &'a str,
    pub database: &'a str,
    pub system: &'a System,
    /// (timeline, LSN at which it was left), oldest first.
    pub history: &'a [(u32, Lsn)],
    pub slot: Option<&'a Slot>,
    /// (system identifier, timeline, position, epoch) of the row.
    pub row: Option<(&'a str, u32, Lsn, i64)>,
    pub held: Option<&'a Held>,
}

/// Where to start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Start {
    pub from: Lsn,
    /// Events in this interval were published and are gone from the surviving database: a standby
    /// that had not received them was promoted.
    pub phantom: Option<(Lsn, Lsn)>,
}

/// # Errors
/// A mistake when `init` was not run, a wait while another worker has the slot, else a refusal that
/// names the positions.
pub fn judge(facts: &Facts<'_>) -> Result<Start> {
    let name = facts.slot_name;
    let (slot, (identifier, row_timeline, position, epoch)) = match (facts.slot, facts.row) {
        (None, None) => {
            return Err(Error::mistake(format!(
                "neither slot {name} nor its position row exists in database {}: run `outbox-tailer init`",
                facts.database
            )));
        }
        (Some(_), None) => {
            return Err(Error::refusal(
                Refusal::Gap,
                format!(
                    "slot {name} exists but has no position row: it was not made by `outbox-tailer init`, or the row was deleted; to take it over as it is, run `outbox-tailer init --adopt-slot {name}`"
                ),
            ));
        }
        (None, Some((_, _, position, _))) => {
            return Err(Error::refusal(
                Refusal::Gap,
                format!(
                    "slot {name} is gone, events after {position} that were not streamed yet can only come from the table: once they are taken care of, run `outbox-tailer init --start-over --from-now`"
                ),
            ));
        }
        (Some(slot), Some(row)) => (slot, row),
    };
    if let Some(problem) = slot.unsuitable(name, facts.database) {
        return Err(problem);
    }
    if let Some(pid) = slot.active_pid {
        return Err(Error::wait(format!("slot {name} is in use by another worker (active for PID {pid})")));
    }
    let identity = |what: String| Err(Error::refusal(Refusal::Identity, what));
    if identifier != facts.system.identifier {
        return identity(format!(
            "this server has system identifier {}, the position row was made on {identifier}: another server, or a major upgrade",
            facts.system.identifier
        ));
    }
    // The row's own timeline only tells that the server is not older than it.
    if row_timeline > facts.system.timeline {
        return identity(format!(
            "this server is on timeline {}, the position row is from timeline {row_timeline}",
            facts.system.timeline
        ));
    }
    let changed = |limit: &str| {
        Err(Error::refusal(
            Refusal::Gap,
            format!(
                "the position row of slot {name} says {position}, which {limit}: it was changed by another hand, and events before it may not be published; once they are taken care of, run `outbox-tailer init --start-over --from-now`"
            ),
        ))
    };
    if position > facts.system.wal_end {
        return changed(&format!("is beyond the end of the server's WAL, {}", facts.system.wal_end));
    }
    let mut phantom = None;
    let mut proven = None;
    if let Some(held) = facts.held {
        if held.epoch == epoch && position > held.requested {
            return changed(&format!("is more than we have asked for, {}", held.requested));
        }
        if held.system_identifier != facts.system.identifier {
            return identity(format!(
                "this server has system identifier {}, the one we published from has {}",
                facts.system.identifier, held.system_identifier
            ));
        }
        if held.timeline > facts.system.timeline {
            return identity(format!(
                "this server is on timeline {}, we have published from timeline {}: an older copy",
                facts.system.timeline, held.timeline
            ));
        }
        let mut survives = held.lsn;
        if held.timeline < facts.system.timeline {
            let Some((_, switch)) = facts.history.iter().find(|(timeline, _)| *timeline == held.timeline)
            else {
                return identity(format!(
                    "this server's timeline {} does not come from timeline {}, on which we have published",
                    facts.system.timeline, held.timeline
                ));
            };
            if *switch < held.lsn {
                phantom = Some((*switch, held.lsn));
            }
            let left =
                facts.history.iter().filter(|(timeline, _)| *timeline >= held.timeline).map(|(_, lsn)| *lsn);
            survives = left.fold(survives, Lsn::min);
        } else if position < held.lsn {
            return identity(format!(
                "the position row says {position}, but we have published up to {}: the database is a restored or older copy",
                held.lsn
            ));
        }
        proven = Some(survives);
    }
    let confirmed = slot.confirmed.ok_or_else(|| Error::wait(format!("slot {name} is not ready yet")))?;
    // After a failover the slot may have been synchronised before the row: fine where we know that
    // we confirmed so much ourselves.
    if confirmed > position && proven.is_none_or(|proven| proven < confirmed) {
        return Err(Error::refusal(
            Refusal::Gap,
            format!(
                "slot {name} is confirmed up to {confirmed}, the position is {position}: somebody advanced the slot or made it anew, and events in ({position}, {confirmed}] may never be streamed; once they are taken care of, run `outbox-tailer init --start-over --from-now`"
            ),
        ));
    }
    Ok(Start { from: position, phantom })
}

impl Slot {
    fn unsuitable(&self, name: &str, database: &str) -> Option<Error> {
        if let Some(what) = self.wrong_kind(name, database) {
            return Some(Error::refusal(Refusal::Gap, what));
        }
        self.lost(name)
    }

    /// Why this is no slot of ours; `None` when it is of the right kind.
    pub fn wrong_kind(&self, name: &str, database: &str) -> Option<String> {
        if self.slot_type != "logical" {
            return Some(format!("slot {name} is a {} slot, a logical one is needed", self.slot_type));
        }
        if self.plugin.as_deref() != Some("pgoutput") {
            return Some(format!(
                "slot {name} uses plugin {}, pgoutput is needed",
                self.plugin.as_deref().unwrap_or("none")
            ));
        }
        if self.database.as_deref() != Some(database) {
            return Some(format!(
                "slot {name} belongs to database {}, not {database}",
                self.database.as_deref().unwrap_or("none")
            ));
        }
        if self.temporary {
            return Some(format!("slot {name} is a temporary slot of another session"));
        }
        if self.two_phase {
            return Some(format!(
                "slot {name} decodes prepared transactions (two_phase), which is not supported"
            ));
        }
        None
    }

    pub fn lost(&self, name: &str) -> Option<Error> {
        let lost = self.wal_status.as_deref() == Some("lost");
        (lost || self.invalidation_reason.is_some()).then(|| {
            Error::refusal(
                Refusal::Gap,
                format!(
                    "slot {name} is lost ({}): the server has removed WAL that was not streamed yet; once the events in it are taken care of, run `outbox-tailer init --start-over --from-now`",
                    self.invalidation_reason.as_deref().unwrap_or("it fell behind max_slot_wal_keep_size")
                ),
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;

    fn lsn(n: u64) -> Lsn {
        Lsn::from(n)
    }

    struct World {
        system: System,
        history: Vec<(u32, Lsn)>,
        slot: Option<Slot>,
        row: Option<(&'static str, u32, Lsn, i64)>,
        held: Option<Held>,
    }

    /// C = 100, P = 100, W = 100 on timeline 1, WAL end 200.
    fn world() -> World {
        World {
            system: System { identifier: "7".into(), timeline: 1, wal_end: lsn(200) },
            history: vec![],
            slot: Some(Slot {
                plugin: Some("pgoutput".into()),
                slot_type: "logical".into(),
                database: Some("db".into()),
                temporary: false,
                two_phase: false,
                active_pid: None,
                wal_status: Some("reserved".into()),
                invalidation_reason: None,
                confirmed: Some(lsn(100)),
            }),
            row: Some(("7", 1, lsn(100), 5)),
            held: Some(Held {
                system_identifier: "7".into(),
                timeline: 1,
                lsn: lsn(100),
                requested: lsn(110),
                epoch: 5,
            }),
        }
    }

    fn judged(edit: impl FnOnce(&mut World)) -> Result<Start> {
        let mut w = world();
        edit(&mut w);
        judge(&Facts {
            slot_name: "s",
            database: "db",
            system: &w.system,
            history: &w.history,
            slot: w.slot.as_ref(),
            row: w.row,
            held: w.held.as_ref(),
        })
    }

    fn starts(edit: impl FnOnce(&mut World), from: u64, phantom: Option<(u64, u64)>) {
        let start = judged(edit).expect("should start");
        assert_eq!(start, Start { from: lsn(from), phantom: phantom.map(|(a, b)| (lsn(a), lsn(b))) });
    }

    fn refuses(edit: impl FnOnce(&mut World), kind: Kind, says: &str) {
        let error = judged(edit).expect_err("should not start");
        assert_eq!(error.kind, kind, "{error}");
        assert!(error.line().contains(says), "{error} does not say {says:?}");
    }

    const GAP: Kind = Kind::Refusal(Refusal::Gap);
    const IDENTITY: Kind = Kind::Refusal(Refusal::Identity);

    #[test]
    fn the_stream_starts_at_the_persisted_position() {
        starts(|_| {}, 100, None);
        starts(|w| w.held = None, 100, None);
        // A crash of the server forgets confirmations that were not checkpointed.
        starts(|w| w.slot.as_mut().unwrap().confirmed = Some(lsn(40)), 100, None);
        // A write whose answer we did not get.
        starts(|w| w.row.as_mut().unwrap().2 = lsn(110), 110, None);
        // Another worker moved on while we were away.
        starts(|w| w.row = Some(("7", 1, lsn(150), 6)), 150, None);
    }

    #[test]
    fn a_position_that_another_hand_has_raised_is_refused() {
        refuses(|w| w.row.as_mut().unwrap().2 = lsn(111), GAP, "more than we have asked for");
        refuses(
            |w| (w.held, w.row.as_mut().unwrap().2) = (None, lsn(201)),
            GAP,
            "beyond the end of the server's WAL",
        );
    }

    #[test]
    fn a_slot_or_a_row_alone_is_refused_and_neither_is_a_mistake() {
        refuses(|w| (w.slot, w.row) = (None, None), Kind::Mistake, "init");
        refuses(|w| w.row = None, GAP, "no position row");
        refuses(|w| w.slot = None, GAP, "slot s is gone");
    }

    #[test]
    fn a_slot_ahead_of_the_position_is_a_gap_that_names_both() {
        let advance = |w: &mut World| w.slot.as_mut().unwrap().confirmed = Some(lsn(0x1_0000_0000));
        refuses(advance, GAP, "(0/64, 1/0]");
        refuses(|w| (advance(w), w.held = None).0, GAP, "(0/64, 1/0]");
    }

    #[test]
    fn a_slot_that_is_lost_busy_or_of_another_kind_is_told_apart() {
        let slot = |edit: fn(&mut Slot)| move |w: &mut World| edit(w.slot.as_mut().unwrap());
        refuses(slot(|s| s.wal_status = Some("lost".into())), GAP, "is lost");
        refuses(slot(|s| s.invalidation_reason = Some("idle_timeout".into())), GAP, "idle_timeout");
        refuses(slot(|s| s.active_pid = Some(42)), Kind::Wait, "PID 42");
        refuses(slot(|s| s.plugin = Some("test_decoding".into())), GAP, "test_decoding");
        refuses(slot(|s| s.slot_type = "physical".into()), GAP, "physical");
        refuses(slot(|s| s.database = Some("other".into())), GAP, "database other");
        refuses(slot(|s| s.two_phase = true), GAP, "two_phase");
    }

    #[test]
    fn another_server_and_restored_copies_are_refused() {
        refuses(|w| w.system.identifier = "8".into(), IDENTITY, "system identifier 8");
        refuses(|w| w.held.as_mut().unwrap().lsn = lsn(120), IDENTITY, "restored or older copy");
        refuses(
            |w| (w.held.as_mut().unwrap().lsn, w.system.wal_end) = (lsn(100), lsn(99)),
            GAP,
            "beyond the end of the server's WAL, 0/63",
        );
        refuses(|w| w.held.as_mut().unwrap().timeline = 2, IDENTITY, "older copy");
        refuses(|w| w.row.as_mut().unwrap().1 = 3, IDENTITY, "timeline 3");
    }

    /// Timeline 2, left timeline 1 at `switch`.
    fn promoted(w: &mut World, switch: u64) {
        w.system.timeline = 2;
        w.history = vec![(1, lsn(switch))];
    }

    #[test]
    fn a_promotion_that_lost_nothing_goes_on() {
        starts(|w| promoted(w, 110), 100, None);
    }

    #[test]
    fn a_promotion_of_a_lagging_standby_names_the_phantom_interval() {
        let lagging = |w: &mut World| {
            promoted(w, 80);
            w.row.as_mut().unwrap().2 = lsn(70);
            w.slot.as_mut().unwrap().confirmed = Some(lsn(60));
        };
        starts(lagging, 70, Some((80, 100)));
    }

    #[test]
    fn a_slot_synchronised_ahead_of_the_row_is_fine_only_below_what_we_know() {
        let synced = |confirmed| {
            move |w: &mut World| {
                promoted(w, 95);
                w.row.as_mut().unwrap().2 = lsn(70);
                w.slot.as_mut().unwrap().confirmed = Some(lsn(confirmed));
            }
        };
        starts(synced(90), 70, Some((95, 100)));
        refuses(synced(97), GAP, "may never be streamed");
    }

    #[test]
    fn a_timeline_that_does_not_descend_from_ours_is_refused() {
        let fork = |w: &mut World| {
            w.system.timeline = 3;
            w.history = vec![(1, lsn(50))];
            w.held.as_mut().unwrap().timeline = 2;
        };
        refuses(fork, IDENTITY, "does not come from timeline 2");
    }
}
