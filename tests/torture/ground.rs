//! What is tortured: the servers, the worker, the load on them; and the faults.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use postgres::types::PgLsn;
use rdkafka::consumer::{BaseConsumer, Consumer as _};

use crate::figures::Figures;
use crate::load::{self, Load};
use crate::promotion;
use crate::support::bed::{self, Bed, Rule};
use crate::support::eventually;
use crate::support::oracle::{self, Message};
use crate::support::servers::{Kafka, Postgres};
use crate::support::worker::Worker;
use crate::watch::Watch;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// SIGKILL of the worker.
    Kill,
    /// Immediate stop of PostgreSQL.
    Postgres,
    /// SIGKILL of one broker of three.
    Broker,
    /// The standby becomes the primary.
    Promotion,
}

impl Kind {
    pub const ALL: [Kind; 4] = [Kind::Kill, Kind::Postgres, Kind::Broker, Kind::Promotion];

    pub fn name(self) -> &'static str {
        match self {
            Kind::Kill => "kills",
            Kind::Postgres => "pg",
            Kind::Broker => "broker",
            Kind::Promotion => "promotions",
        }
    }

    pub fn variable(self) -> &'static str {
        match self {
            Kind::Kill => "KILLS",
            Kind::Postgres => "PG",
            Kind::Broker => "BROKER",
            Kind::Promotion => "PROMOTIONS",
        }
    }

    /// As many as have a database and a topic in common.
    pub fn round(self) -> usize {
        match self {
            Kind::Kill => 200,
            Kind::Postgres => 100,
            Kind::Broker | Kind::Promotion => 20,
        }
    }
}

/// Without a message for so long the worker has not come back.
pub const LIMIT: Duration = Duration::from_secs(60);
/// A progress line.
const PROGRESS: Duration = Duration::from_secs(30);

pub struct Ground<'a> {
    pub bed: Bed,
    pub worker: Worker,
    pub standby: Option<Postgres>,
    pub random: fastrand::Rng,
    pub figures: &'a mut Figures,
    /// Ids of events that are in the topic and went with an old primary.
    pub phantoms: HashSet<String>,
    cluster: Vec<Arc<Kafka>>,
    /// A broker on its way back.
    returning: Option<JoinHandle<()>>,
    /// Ends before the servers do.
    load: Option<Load>,
    watch: Watch,
    last: Option<Fault>,
    /// Whether the worker had caught up since the last fault.
    steady: bool,
    /// Faults of all kinds, some before the last one is recovered from: they have no figures.
    mixed: bool,
    began: Instant,
}

struct Fault {
    kind: Kind,
    at: Instant,
    /// How many there were before.
    repeats: usize,
    /// Whether it hit a worker that had caught up.
    steady: bool,
}

impl<'a> Ground<'a> {
    pub fn new(
        cluster: Vec<Arc<Kafka>>,
        with_standby: bool,
        mixed: bool,
        mut random: fastrand::Rng,
        figures: &'a mut Figures,
    ) -> Self {
        let tables = format!(
            "CREATE TABLE sales_order (order_id bigint PRIMARY KEY, revision bigint NOT NULL DEFAULT 0);
             INSERT INTO sales_order SELECT generate_series(1, {}); {}",
            load::ORDERS,
            bed::OUTBOX
        );
        let settings = if with_standby { promotion::SETTINGS } else { &[] };
        let postgres = Arc::new(Postgres::start(settings));
        let mut bed = Bed::with(postgres, Arc::clone(&cluster[0]), &tables, &[]);
        bed.exempt(&[Rule::SlotForward], "a crash makes a slot forget what it had not saved yet");
        if with_standby {
            bed.init_with_failover();
        } else {
            bed.init();
        }
        let standby = with_standby.then(|| promotion::first_standby(&mut bed));
        let watch = Watch::start(&bed.topic);
        let load = Some(Load::start(&bed.sessions, &mut random));
        let worker = bed.streaming();
        let mut ground = Ground {
            bed,
            worker,
            standby,
            random,
            figures,
            phantoms: HashSet::new(),
            cluster,
            returning: None,
            load,
            watch,
            last: None,
            steady: false,
            mixed,
            began: Instant::now(),
        };
        if ground.standby.is_some() {
            ground.synchronise();
        }
        ground.watch.fault();
        ground.flows(true);
        ground.catches_up();
        ground
    }

    pub fn run(&mut self, faults: &[Kind]) {
        let mut told = Instant::now();
        for (number, kind) in faults.iter().enumerate() {
            match kind {
                Kind::Kill => self.kill(),
                Kind::Postgres => self.postgres(),
                Kind::Broker => self.broker(),
                Kind::Promotion => self.promotion(),
            }
            if told.elapsed() > PROGRESS {
                told = Instant::now();
                let seconds = self.began.elapsed().as_secs();
                eprintln!(
                    "{}/{} faults, {} events, {seconds} s",
                    number + 1,
                    faults.len(),
                    self.watch.events()
                );
            }
        }
    }

    fn kill(&mut self) {
        self.moment(400);
        self.worker.kill();
        self.fault(Kind::Kill);
        self.worker = self.bed.start();
        // Some die again while they start, or catch up.
        match self.random.u8(0..8) {
            0 => {}
            1 => self.recovers(false),
            _ => {
                self.recovers(false);
                self.catches_up();
            }
        }
    }

    fn postgres(&mut self) {
        self.moment(400);
        self.bed.postgres.stop("immediate");
        self.fault(Kind::Postgres);
        self.bed.postgres.start_again();
        self.bed.client = self.bed.connect();
        self.recovers(false);
        self.catches_up();
    }

    fn broker(&mut self) {
        self.replicated();
        self.moment(400);
        let broker = Arc::clone(&self.cluster[self.random.usize(0..self.cluster.len())]);
        broker.signal("KILL");
        self.fault(Kind::Broker);
        self.returning = Some(std::thread::spawn(move || {
            broker.stop("KILL");
            broker.start_again();
        }));
        // In the midst of others the next fault comes while it is away.
        if !self.mixed {
            self.recovers(true);
            self.catches_up();
        }
    }

    /// Waits until every broker is back and has everything.
    fn replicated(&mut self) {
        if let Some(returning) = self.returning.take() {
            returning.join().expect("the broker starts again");
        }
        let topic = &self.bed.topic;
        let consumer: BaseConsumer = oracle::consumer(&topic.brokers);
        eventually("every replica is in sync", || {
            let metadata = consumer.fetch_metadata(None, Duration::from_secs(5)).ok()?;
            let mut partitions = metadata.topics().iter().flat_map(|topic| topic.partitions());
            partitions.all(|p| p.isr().len() == p.replicas().len() && p.leader() >= 0).then_some(())
        });
    }

    pub fn moment(&mut self, within_ms: u64) {
        std::thread::sleep(Duration::from_millis(self.random.u64(0..within_ms))); // the random moment
    }

    /// It has happened; what ends it begins now.
    pub fn fault(&mut self, kind: Kind) {
        self.figures.of_kind.entry(kind).or_default().faults += 1;
        self.count_repeats();
        self.watch.fault();
        self.last = Some(Fault {
            kind,
            at: Instant::now(),
            repeats: self.watch.repeats(),
            steady: std::mem::take(&mut self.steady),
        });
    }

    /// What came again since the last fault is its doing, if it was recovered from and the only one.
    fn count_repeats(&mut self) {
        let Some(fault) = self.last.take() else { return };
        if self.watch.recovered(false).is_some() && fault.steady && !self.mixed {
            let repeats = self.watch.repeats() - fault.repeats;
            self.figures.of_kind.entry(fault.kind).or_default().repeats.push(repeats);
        }
    }

    /// Waits until new messages can be read, of one partition or of all.
    pub fn recovers(&mut self, all: bool) {
        let at = self.flows(all);
        if let Some(fault) = &self.last
            && !self.mixed
        {
            let recoveries = &mut self.figures.of_kind.entry(fault.kind).or_default().recoveries;
            recoveries.push(at.saturating_duration_since(fault.at));
        }
    }

    /// Waits until everything that is committed now has been published and is behind the position.
    pub fn catches_up(&mut self) {
        let end: PgLsn = self.bed.value("SELECT pg_current_wal_flush_lsn()");
        eventually("the worker catches up", || (self.bed.positions().1 >= end.into()).then_some(()));
        self.steady = true;
    }

    fn flows(&mut self, all: bool) -> Instant {
        let deadline = Instant::now() + LIMIT;
        loop {
            if let Some(at) = self.watch.recovered(all) {
                return at;
            }
            let ended = self.worker.has_ended();
            let log = || self.worker.log().split_off(self.worker.log().len().saturating_sub(5));
            assert!(ended.is_none(), "the worker ended with {ended:?}: {:#?}", log());
            assert!(Instant::now() < deadline, "no new message within {LIMIT:?}: {:#?}", log());
            std::thread::sleep(Duration::from_millis(1)); // polls a condition
        }
    }

    /// What a consumer has, without what a lost primary took with it.
    pub fn messages(&self) -> Vec<Message> {
        let mut messages = self.bed.topic.read();
        messages.retain(|message| !self.phantoms.contains(&message.id()));
        messages
    }

    /// The load ends, everything arrives, and all of it is judged.
    pub fn finish(mut self) {
        self.replicated();
        drop(self.load.take());
        self.bed.client = self.bed.connect();
        let committed = self.bed.committed();
        self.arrived(&committed);
        self.count_repeats();
        let last = committed.events.last().map_or(0, |event| event.end_lsn);
        eventually("everything is confirmed", || (self.bed.positions().0 >= last).then_some(()));
        let samples = self.bed.unwatch();
        let messages = self.messages();
        self.figures.samples += samples.count();
        self.figures.add(committed.events.len(), &oracle::judge(&committed, &messages));
        self.agrees_with_the_table(&committed);
        self.bed.check_samples(&samples, &committed, &messages);
        assert!(self.worker.logged("refused: ").is_empty(), "{:#?}", self.worker.log());
        self.worker.stop();
    }

    /// Waits until the consumer has it all; what does not come is lost, as the verdict will say.
    fn arrived(&mut self, committed: &oracle::Committed) {
        let mut progress = (0, Instant::now());
        while !self.watch.has_all(committed.ids()) && progress.1.elapsed() < LIMIT / 2 {
            let events = self.watch.events();
            if events > progress.0 {
                progress = (events, Instant::now());
            }
            std::thread::sleep(Duration::from_millis(20)); // polls a condition
        }
    }

    /// The test's own slot is a logical slot, too: the table knows better.
    fn agrees_with_the_table(&mut self, committed: &oracle::Committed) {
        let sql = "SELECT order_id::text, array_agg(event_id::text ORDER BY revision),
                          count(*) = max(revision) FROM outbox_event GROUP BY 1";
        let rows = self.bed.client.query(sql, &[]).unwrap();
        let table: BTreeMap<String, Vec<String>> = rows.iter().map(|row| (row.get(0), row.get(1))).collect();
        assert!(rows.iter().all(|row| row.get(2)), "an order's revisions have a gap");
        let mut slot: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for event in &committed.events {
            slot.entry(event.key.clone()).or_default().push(event.id.clone());
        }
        assert!(table == slot, "the test's own slot and the table disagree");
    }
}
