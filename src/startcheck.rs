//! The start check: may the stream start at the persisted position, judged from what the server,
//! the slot, the row and our own memory say. Pure; made at each connect and reconnect.
//!
//! C is the slot's confirmed flush LSN, P the row's position, W what we still know from before (this
//! process's memory, the witness). In normal life C ≤ W ≤ P whatever crashes between, because the
//! row is committed before the witness is written, and that before the slot is told.

use crate::relay::Lsn;

/// Answer to `IDENTIFY_SYSTEM`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct System {
    pub identifier: String,
    pub timeline: u32,
    pub wal_end: Lsn,
}

/// A position known from outside the database's own WAL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    pub system_identifier: String,
    pub timeline: u32,
    /// (timeline, LSN at which it was left), oldest first.
    pub history: Vec<(u32, Lsn)>,
    pub lsn: Lsn,
    /// The last position we asked for: its write may have been committed unseen. `None` where that
    /// is not known.
    pub requested: Option<Lsn>,
    pub epoch: i64,
    /// Who took the slot for that epoch.
    pub instance: String,
}

/// The position row.
#[derive(Debug, Clone, Copy)]
pub struct Persisted<'a> {
    pub system_identifier: &'a str,
    pub timeline: u32,
    pub position: Lsn,
    pub epoch: i64,
    pub instance: &'a str,
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
    pub row: Option<Persisted<'a>>,
    /// What this process and the witness know.
    pub held: &'a [Held],
}

/// Where to start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Start {
    /// The row's position, or the slot's where it was synchronised ahead of the row: the row is to
    /// follow, since what proves that the slot is right may be gone at the next start.
    pub from: Lsn,
    /// Events in this interval were published and are gone from the surviving database: a standby
    /// that had not received them was promoted.
    pub phantom: Option<(Lsn, Lsn)>,
}

/// Why the stream cannot start here.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoStart {
    /// `init` was not run.
    #[error("{0}")]
    NotSetUp(String),
    /// Another worker has the slot, or it is not ready.
    #[error("{0}")]
    NotYet(String),
    /// Events may be missing from the stream.
    #[error("{0}")]
    Gap(String),
    /// A gap too, unless something that was not asked yet knows that we confirmed so much.
    #[error("{0}")]
    Ahead(String),
    /// The position row was changed by another hand, which no later look would find again.
    #[error("{0}")]
    ByHand(String),
    /// Another server, a copy, or a history that does not hold what was published.
    #[error("{0}")]
    Identity(String),
}

/// # Errors
/// See [`NoStart`]; the text names the positions.
pub fn judge(facts: &Facts<'_>) -> Result<Start, NoStart> {
    let name = facts.slot_name;
    let (slot, row) = match (facts.slot, facts.row) {
        (None, None) => {
            return Err(NoStart::NotSetUp(format!(
                "neither slot {name} nor its position row exists in database {}: run `outbox-tailer init`",
                facts.database
            )));
        }
        (Some(_), None) => {
            return Err(NoStart::Gap(format!(
                "slot {name} exists but has no position row: it was not made by `outbox-tailer init`, or the row was deleted; to take it over as it is, run `outbox-tailer init --adopt-slot {name}`"
            )));
        }
        (None, Some(row)) => {
            return Err(NoStart::Gap(format!(
                "slot {name} is gone, events after {} that were not streamed yet can only come from the table: once they are taken care of, run `outbox-tailer init --start-over --from-now`",
                row.position
            )));
        }
        (Some(slot), Some(row)) => (slot, row),
    };
    if let Some(problem) = slot.unsuitable(name, facts.database) {
        return Err(problem);
    }
    if let Some(pid) = slot.active_pid {
        return Err(NoStart::NotYet(format!(
            "slot {name} is in use by another worker (active for PID {pid})"
        )));
    }
    let identity = |what: String| Err(NoStart::Identity(what));
    if row.system_identifier != facts.system.identifier {
        return identity(format!(
            "this server has system identifier {}, the position row was made on {}: another server, or a major upgrade",
            facts.system.identifier, row.system_identifier
        ));
    }
    // The row's own timeline only tells that the server is not older than it.
    if row.timeline > facts.system.timeline {
        return identity(format!(
            "this server is on timeline {}, the position row is from timeline {}",
            facts.system.timeline, row.timeline
        ));
    }
    let position = row.position;
    let changed = |limit: &str| {
        Err(NoStart::ByHand(format!(
            "the position row of slot {name} says {position}, which {limit}: it was changed by another hand, and events before it may not be published; once they are taken care of, run `outbox-tailer init --start-over --from-now`"
        )))
    };
    if position > facts.system.wal_end {
        return changed(&format!("is beyond the end of the server's WAL, {}", facts.system.wal_end));
    }
    let mut phantom: Option<(Lsn, Lsn)> = None;
    let mut proven = None;
    for held in facts.held {
        if let Some(requested) = held.requested
            && (held.epoch, &*held.instance) == (row.epoch, row.instance)
            && position > requested
        {
            return changed(&format!("is more than we have asked for, {requested}"));
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
        // Two standbys can both become timeline 2.
        let left = |(timeline, _): &&(u32, Lsn)| facts.history.iter().find(|(t, _)| t == timeline);
        if let Some((timeline, was)) = held.history.iter().find(|h| left(h).is_some_and(|now| now.1 != h.1)) {
            return identity(format!(
                "this server left timeline {timeline} elsewhere than at {was}, where the one we published from left it: another standby was promoted"
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
            if *switch < held.lsn && phantom.is_none_or(|(_, to)| to < held.lsn) {
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
        } else if row.epoch < held.epoch || (row.epoch == held.epoch && row.instance != held.instance) {
            return identity(format!(
                "epoch {} was taken by {} on a copy of this database: this is the original or another clone, and one of them must not publish",
                held.epoch, held.instance
            ));
        }
        proven = proven.max(Some(survives));
    }
    let confirmed = slot.confirmed.ok_or_else(|| NoStart::NotYet(format!("slot {name} is not ready yet")))?;
    // After a failover the slot may have been synchronised before the row: fine where we know that
    // we confirmed so much ourselves.
    if confirmed > position && proven.is_none_or(|proven| proven < confirmed) {
        return Err(NoStart::Ahead(format!(
            "slot {name} is confirmed up to {confirmed}, the position is {position}: somebody advanced the slot or made it anew, and events in ({position}, {confirmed}] may never be streamed; once they are taken care of, run `outbox-tailer init --start-over --from-now`"
        )));
    }
    Ok(Start { from: position.max(confirmed), phantom })
}

impl Slot {
    fn unsuitable(&self, name: &str, database: &str) -> Option<NoStart> {
        if let Some(what) = self.wrong_kind(name, database) {
            return Some(NoStart::Gap(what));
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

    pub fn lost(&self, name: &str) -> Option<NoStart> {
        let lost = self.wal_status.as_deref() == Some("lost");
        (lost || self.invalidation_reason.is_some()).then(|| {
            NoStart::Gap(format!(
                    "slot {name} is lost ({}): the server has removed WAL that was not streamed yet; once the events in it are taken care of, run `outbox-tailer init --start-over --from-now`",
                    self.invalidation_reason.as_deref().unwrap_or("it fell behind max_slot_wal_keep_size")
                ))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lsn(n: u64) -> Lsn {
        Lsn::from(n)
    }

    struct World {
        system: System,
        history: Vec<(u32, Lsn)>,
        slot: Option<Slot>,
        row: Option<Persisted<'static>>,
        held: Vec<Held>,
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
            row: Some(Persisted {
                system_identifier: "7",
                timeline: 1,
                position: lsn(100),
                epoch: 5,
                instance: "a",
            }),
            held: vec![Held {
                system_identifier: "7".into(),
                timeline: 1,
                history: vec![],
                lsn: lsn(100),
                requested: Some(lsn(110)),
                epoch: 5,
                instance: "a".into(),
            }],
        }
    }

    impl World {
        fn row(&mut self) -> &mut Persisted<'static> {
            self.row.as_mut().unwrap()
        }
    }

    fn judged(edit: impl FnOnce(&mut World)) -> Result<Start, NoStart> {
        let mut w = world();
        edit(&mut w);
        judge(&Facts {
            slot_name: "s",
            database: "db",
            system: &w.system,
            history: &w.history,
            slot: w.slot.as_ref(),
            row: w.row,
            held: &w.held,
        })
    }

    fn starts(edit: impl FnOnce(&mut World), from: u64, phantom: Option<(u64, u64)>) {
        let start = judged(edit).expect("should start");
        assert_eq!(start, Start { from: lsn(from), phantom: phantom.map(|(a, b)| (lsn(a), lsn(b))) });
    }

    fn refuses(edit: impl FnOnce(&mut World), kind: fn(String) -> NoStart, says: &str) {
        let error = judged(edit).expect_err("should not start");
        assert_eq!(error, kind(error.to_string()));
        assert!(error.to_string().contains(says), "{error} does not say {says:?}");
    }

    const GAP: fn(String) -> NoStart = NoStart::Gap;
    const BY_HAND: fn(String) -> NoStart = NoStart::ByHand;
    const IDENTITY: fn(String) -> NoStart = NoStart::Identity;

    #[test]
    fn the_stream_starts_at_the_persisted_position() {
        starts(|_| {}, 100, None);
        starts(|w| w.held.clear(), 100, None);
        // A crash of the server forgets confirmations that were not checkpointed.
        starts(|w| w.slot.as_mut().unwrap().confirmed = Some(lsn(40)), 100, None);
        // A write whose answer we did not get.
        starts(|w| w.row().position = lsn(110), 110, None);
        // Another worker moved on while we were away.
        starts(|w| (w.row().position, w.row().epoch) = (lsn(150), 6), 150, None);
        // The same, and the witness knows it.
        let other = |w: &mut World| {
            (w.row().position, w.row().epoch, w.row().instance) = (lsn(150), 6, "b");
            let witness =
                Held { lsn: lsn(140), requested: None, epoch: 6, instance: "b".into(), ..w.held[0].clone() };
            w.held.push(witness);
        };
        starts(other, 150, None);
        // A crash between the row and the witness.
        let behind = |w: &mut World| {
            w.held[0].requested = None;
            (w.row().position, w.row().epoch, w.row().instance) = (lsn(120), 6, "b");
        };
        starts(behind, 120, None);
    }

    #[test]
    fn a_position_that_another_hand_has_raised_is_refused() {
        refuses(|w| w.row().position = lsn(111), BY_HAND, "more than we have asked for");
        refuses(
            |w| {
                w.held.clear();
                w.row().position = lsn(201);
            },
            BY_HAND,
            "beyond the end of the server's WAL",
        );
    }

    #[test]
    fn a_slot_or_a_row_alone_is_refused_and_neither_is_a_mistake() {
        refuses(|w| (w.slot, w.row) = (None, None), NoStart::NotSetUp, "init");
        refuses(|w| w.row = None, GAP, "no position row");
        refuses(|w| w.slot = None, GAP, "slot s is gone");
    }

    #[test]
    fn a_slot_ahead_of_the_position_is_a_gap_that_names_both() {
        let advance = |w: &mut World| w.slot.as_mut().unwrap().confirmed = Some(lsn(0x1_0000_0000));
        refuses(advance, NoStart::Ahead, "(0/64, 1/0]");
        refuses(|w| (advance(w), w.held.clear()).0, NoStart::Ahead, "(0/64, 1/0]");
    }

    #[test]
    fn a_slot_that_is_lost_busy_or_of_another_kind_is_told_apart() {
        let slot = |edit: fn(&mut Slot)| move |w: &mut World| edit(w.slot.as_mut().unwrap());
        refuses(slot(|s| s.wal_status = Some("lost".into())), GAP, "is lost");
        refuses(slot(|s| s.invalidation_reason = Some("idle_timeout".into())), GAP, "idle_timeout");
        refuses(slot(|s| s.active_pid = Some(42)), NoStart::NotYet, "PID 42");
        refuses(slot(|s| s.plugin = Some("test_decoding".into())), GAP, "test_decoding");
        refuses(slot(|s| s.slot_type = "physical".into()), GAP, "physical");
        refuses(slot(|s| s.database = Some("other".into())), GAP, "database other");
        refuses(slot(|s| s.two_phase = true), GAP, "two_phase");
    }

    #[test]
    fn another_server_and_restored_copies_are_refused() {
        refuses(|w| w.system.identifier = "8".into(), IDENTITY, "system identifier 8");
        refuses(|w| w.held[0].lsn = lsn(120), IDENTITY, "restored or older copy");
        refuses(
            |w| (w.held[0].lsn, w.system.wal_end) = (lsn(100), lsn(99)),
            BY_HAND,
            "beyond the end of the server's WAL, 0/63",
        );
        refuses(|w| w.held[0].timeline = 2, IDENTITY, "older copy");
        refuses(|w| w.row().timeline = 3, IDENTITY, "timeline 3");
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
            w.row().position = lsn(70);
            w.slot.as_mut().unwrap().confirmed = Some(lsn(60));
        };
        starts(lagging, 70, Some((80, 100)));
    }

    #[test]
    fn a_slot_synchronised_ahead_of_the_row_is_fine_only_below_what_we_know() {
        let synced = |confirmed| {
            move |w: &mut World| {
                promoted(w, 95);
                w.row().position = lsn(70);
                w.slot.as_mut().unwrap().confirmed = Some(lsn(confirmed));
            }
        };
        starts(synced(90), 90, Some((95, 100)));
        refuses(synced(97), NoStart::Ahead, "may never be streamed");
    }

    #[test]
    fn a_clone_and_its_original_are_told_apart_by_the_epoch() {
        refuses(|w| w.row().epoch = 4, IDENTITY, "epoch 5 was taken by a on a copy");
        refuses(|w| w.row().instance = "b", IDENTITY, "epoch 5 was taken by a on a copy");
    }

    #[test]
    fn another_standby_on_the_same_timeline_is_refused() {
        let other = |w: &mut World| {
            promoted(w, 90);
            w.held[0].timeline = 2;
            w.held[0].history = vec![(1, lsn(95))];
        };
        refuses(other, IDENTITY, "left timeline 1 elsewhere than at 0/5F");
    }

    #[test]
    fn a_timeline_that_does_not_descend_from_ours_is_refused() {
        let fork = |w: &mut World| {
            w.system.timeline = 3;
            w.history = vec![(1, lsn(50))];
            w.held[0].timeline = 2;
        };
        refuses(fork, IDENTITY, "does not come from timeline 2");
    }
}
