//! A primary and a standby that keeps the slots; the standby is promoted, and what was the primary comes
//! back as its standby.

use std::sync::Arc;

use postgres::types::PgLsn;

use crate::ground::{Ground, Kind};
use crate::support::bed::Bed;
use crate::support::oracle::Event;
use crate::support::servers::{self, Postgres};
use crate::support::worker::Worker;
use crate::support::{eventually, within};

/// Of both, since each is the other one in turn.
pub const SETTINGS: &[&str] =
    &["hot_standby_feedback=on", "primary_slot_name=standby", "sync_replication_slots=on"];
const ALARM: &str = "are in Kafka and no longer in the database";

/// The first one, not in step yet; from now on everybody looks for the primary among two servers.
pub fn first_standby(bed: &mut Bed) -> Postgres {
    let standby = make_standby(bed, servers::free_port());
    bed.settings.url = format!(
        "postgres://postgres@127.0.0.1:{},127.0.0.1:{}/{}",
        bed.postgres.port, standby.port, bed.database
    );
    bed.sessions = format!("{}?target_session_attrs=read-write", bed.settings.url);
    bed.write_config();
    standby
}

fn make_standby(bed: &mut Bed, port: u16) -> Postgres {
    bed.sql("SELECT pg_create_physical_replication_slot('standby', true)");
    let mut standby = Postgres::stopped_standby_of(&bed.postgres, SETTINGS);
    standby.port = port;
    standby.start_again();
    standby
}

impl Ground<'_> {
    /// Waits until the standby has the slots; then the server sends nothing that the standby has not got.
    pub fn synchronise(&mut self) {
        let standby = self.standby.as_ref().expect("there is a standby");
        let (bed, mut there) = (&mut self.bed, standby.connect("postgres"));
        let slots = [bed.slot.clone(), bed.observer()];
        within(crate::ground::LIMIT, "the slots are on the standby", &mut || {
            // It takes a slot once that needs nothing from before the standby was made.
            bed.take_committed();
            bed.sql("SELECT pg_log_standby_snapshot()");
            std::thread::sleep(std::time::Duration::from_millis(100)); // polls a condition
            let synced = "SELECT count(*) FROM pg_replication_slots
                          WHERE synced AND NOT temporary AND slot_name::text = ANY($1)";
            (there.query_one(synced, &[&&slots[..]]).unwrap().get::<_, i64>(0) == 2).then_some(())
        });
        self.bed.reload("SET synchronized_standby_slots = 'standby'");
    }

    /// Every second standby is behind when it is promoted; some workers die with the primary, the others
    /// find the new one by themselves.
    pub fn promotion(&mut self) {
        let promoted = self.figures.of_kind.get(&Kind::Promotion).map_or(0, |of| of.faults);
        let (lags, dies) = (promoted % 2 == 1, self.random.bool());
        let standby = self.standby.take().expect("there is a standby");
        if lags {
            self.fall_behind(&standby);
        }
        self.moment(400);
        self.bed.postgres.stop("immediate");
        let samples = self.bed.unwatch();
        self.figures.samples += samples.count();
        if dies {
            self.worker.kill();
        }
        let alarms = self.worker.logged(ALARM).len();
        let old = std::mem::replace(&mut self.bed.postgres, Arc::new(standby));
        let port = old.port;
        let mut committed = None;
        if lags {
            committed = Some(self.last_words(old));
            self.bed.postgres.start_again();
        }

        self.fault(Kind::Promotion);
        self.bed.client = self.bed.postgres.connect(&self.bed.database);
        self.bed.sql("SELECT pg_promote()");
        self.bed.reload("RESET synchronized_standby_slots");
        if dies {
            self.worker = Worker::start(&self.bed.config, &[]);
        }
        self.recovers(false);

        let committed = committed.unwrap_or_else(|| self.bed.take_committed());
        let messages = self.messages();
        self.bed.check_samples(&samples, &committed, &messages);
        // Of a standby in step nothing is exempt.
        if lags {
            let end = self.switch_point();
            let gone = self.bed.forget_past(end);
            let alarms = if dies { 0 } else { alarms };
            let there = messages.iter().map(|message| message.id()).collect();
            self.phantoms(gone, &there, samples.confirmed(), alarms);
        }
        self.bed.watch();
        self.standby = Some(make_standby(&mut self.bed, port));
        self.synchronise();
        self.catches_up();
    }

    /// The standby is away until the worker has confirmed what the standby does not have.
    fn fall_behind(&mut self, standby: &Postgres) {
        self.bed.reload("RESET synchronized_standby_slots");
        standby.stop("fast");
        let end: PgLsn = self.bed.value("SELECT pg_current_wal_flush_lsn()");
        eventually("the worker is ahead of the standby", || {
            (self.bed.positions().0 > end.into()).then_some(())
        });
    }

    /// Everything that a primary had committed when it stopped, read where neither worker nor load look.
    fn last_words(&mut self, primary: Arc<Postgres>) -> crate::support::oracle::Committed {
        let mut primary = Arc::into_inner(primary).expect("nobody else has it");
        primary.port = servers::free_port();
        primary.start_again();
        self.bed.client = primary.connect(&self.bed.database);
        let committed = self.bed.take_committed();
        primary.stop("immediate");
        committed
    }

    /// Where the new primary's history leaves that of the old one.
    fn switch_point(&mut self) -> u64 {
        let sql = "SELECT pg_read_file('pg_wal/' || lpad(to_hex(timeline_id), 8, '0') || '.history') FROM pg_control_checkpoint()";
        self.bed.sql("CHECKPOINT"); // for the control file to know the timeline
        let history: String = self.bed.value(sql);
        let last = history.lines().rev().find(|line| !line.trim().is_empty()).expect("a history");
        last.split_whitespace().nth(1).unwrap().parse::<PgLsn>().unwrap().into()
    }

    /// What went with the old primary is in the topic, in part, and the worker has said so: of all that
    /// the slot had confirmed it knows, of what it published in its last moments it may not.
    fn phantoms(
        &mut self,
        gone: Vec<Event>,
        there: &std::collections::HashSet<String>,
        confirmed: u64,
        alarms: usize,
    ) {
        let ids: Vec<&String> = gone.iter().map(|event| &event.id).collect();
        let sql = "SELECT count(*) FROM outbox_event WHERE event_id::text = ANY($1)";
        let left: i64 = self.bed.client.query_one(sql, &[&ids]).unwrap().get(0);
        assert_eq!(left, 0, "an event past the end of the old history is still in the table");
        let said = self.worker.logged(ALARM);
        assert!(said.len() > alarms, "events went with the old primary: {:#?}", self.worker.log());
        let lsn = |name: &str| u64::from(said[alarms][name].as_str().unwrap().parse::<PgLsn>().unwrap());
        let named = lsn("phantom_from") + 1..=lsn("phantom_to");
        for event in gone.iter().filter(|event| there.contains(&event.id)) {
            self.figures.phantoms += 1;
            if !named.contains(&event.end_lsn) {
                assert!(event.end_lsn > confirmed, "{:X} was confirmed, not in {named:X?}", event.end_lsn);
                self.figures.unnamed += 1;
            }
        }
        self.phantoms.extend(gone.into_iter().map(|event| event.id));
    }
}
