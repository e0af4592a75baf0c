//! A database, a topic, a configuration file and a worker for one test.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet};
use std::fmt::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use outbox_tailer::relay::pgoutput::{self, Value};
use postgres::types::PgLsn;
use postgres::{Client, NoTls};

use super::oracle::{self, Committed, Event, Message, Topic, Verdict};
use super::servers::{self, Kafka, Postgres};
use super::worker::{self, Ended, Worker};

/// The slot of the test's own, independent of the worker's.
const OBSERVER: &str = "observer";

pub struct Bed {
    pub postgres: Arc<Postgres>,
    pub kafka: Arc<Kafka>,
    pub database: String,
    pub slot: String,
    pub publication: String,
    pub topic: Topic,
    /// What the worker is given; the oracle uses the broker's plain listener.
    pub brokers: String,
    /// The publication that the test's own slot is read with: the worker's, unless a test changes that one.
    pub observed: String,
    /// The superuser's session in the test's database.
    pub client: Client,
    pub config: PathBuf,
    pub settings: Settings,
    /// What the test's own sessions connect to, wherever the primary is.
    pub sessions: String,
    /// What was taken out of the test's own slot already.
    taken: Vec<Event>,
    /// Events that an operator's decision left unpublished: the verdict does not expect them.
    pub given_up: HashSet<String>,
    exempt: Vec<Rule>,
    /// Whether the test's own slot is there.
    observing: Cell<bool>,
    /// Runs from the first start of a worker.
    sampler: RefCell<Option<Sampler>>,
}

/// What is judged at the end of every test with a worker, unless the test's own fault makes it
/// meaningless: see [`Bed::exempt`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rule {
    /// The slot never confirms more than the position row says.
    SlotBehindPosition,
    /// The slot never goes back.
    SlotForward,
    /// The position never goes back.
    PositionForward,
    /// What the position has passed is in the topic.
    PositionBehindTopic,
    /// The topic holds nothing but committed events, and of each key the first ones, in commit order.
    Topic,
}

/// All that is about the events themselves.
pub const EVENTS: &[Rule] = &[Rule::PositionBehindTopic, Rule::Topic];
/// All that is about one slot and one row.
pub const POSITIONS: &[Rule] = &[Rule::SlotBehindPosition, Rule::SlotForward, Rule::PositionForward];

/// What goes into the configuration file, as lines of TOML.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    pub url: String,
    pub postgres: String,
    pub kafka: String,
    pub properties: String,
    pub witness: String,
    pub worker: String,
    /// Whole `[[outbox]]` tables; empty means the order outbox with the test's topic.
    pub outbox: String,
}

/// The default outbox of the sample domain without its orders: most tests want only events.
pub const OUTBOX: &str = "CREATE TABLE outbox_event (
    event_id uuid PRIMARY KEY DEFAULT gen_random_uuid(), order_id bigint NOT NULL, revision bigint NOT NULL CHECK (revision > 0),
    event_type text NOT NULL, payload jsonb NOT NULL, CONSTRAINT outbox_order_revision_key UNIQUE (order_id, revision))";

/// `$1` batch, `$2` number of events.
const MANY: &str = "INSERT INTO outbox_event (order_id, revision, event_type, payload)
    SELECT 1000000 + n % 1000, $1::bigint * 1000000 + n, 'OrderPaid', jsonb_build_object('n', n, 'note', repeat('x', 100))
    FROM generate_series(1, $2::bigint) n";

impl Bed {
    /// Shared servers, the order outbox, six partitions.
    pub fn new() -> Self {
        Self::on(servers::shared_postgres(), servers::shared_kafka())
    }

    pub fn on(postgres: Arc<Postgres>, kafka: Arc<Kafka>) -> Self {
        Self::with(postgres, kafka, OUTBOX, &[])
    }

    pub fn with(
        postgres: Arc<Postgres>,
        kafka: Arc<Kafka>,
        tables: &str,
        topic_settings: &[(&str, &str)],
    ) -> Self {
        let name = unique();
        postgres.connect("postgres").batch_execute(&format!("CREATE DATABASE {name}")).unwrap();
        let topic = Topic::create(&kafka.brokers(), &name, 6, topic_settings);
        let mut client = postgres.connect(&name);
        client.batch_execute(tables).unwrap();
        let settings = Settings { url: postgres.url(&name), ..Settings::default() };
        let config = servers::folder("config").join("outbox-tailer.toml");
        let slot = format!("s_{name}");
        let brokers = kafka.brokers();
        let bed = Bed {
            sessions: postgres.url(&name),
            taken: Vec::new(),
            brokers,
            postgres,
            kafka,
            slot,
            publication: name.clone(),
            observed: name.clone(),
            database: name,
            topic,
            client,
            config,
            settings,
            given_up: HashSet::new(),
            exempt: Vec::new(),
            observing: Cell::new(false),
            sampler: RefCell::new(None),
        };
        bed.write_config();
        bed
    }

    /// Writes the configuration file from the settings.
    pub fn write_config(&self) {
        let s = &self.settings;
        let mut text = format!(
            "[postgres]\nurl = {:?}\nslot = {:?}\npublication = {:?}\n",
            s.url, self.slot, self.publication
        );
        writeln!(text, "{}\n[kafka]\nbrokers = {:?}\n{}", s.postgres, self.brokers, s.kafka).unwrap();
        writeln!(
            text,
            "[kafka.properties]\n{}\n[witness]\n{}\n[worker]\nreconnect_max_ms = 1000\n{}",
            s.properties, s.witness, s.worker
        )
        .unwrap();
        if s.outbox.is_empty() {
            writeln!(text, "[[outbox]]\ntable = 'public.outbox_event'\ntopic = {:?}", self.topic.name)
                .unwrap();
        } else {
            text.push_str(&s.outbox);
        }
        std::fs::write(&self.config, text).unwrap();
    }

    pub fn run(&self, arguments: &[&str]) -> Ended {
        worker::run(&self.config, arguments)
    }

    /// `init`, and a slot of the test's own at the same place.
    pub fn init(&mut self) {
        self.init_with(&[]);
    }

    pub fn init_with(&mut self, arguments: &[&str]) {
        let ended = self.run(&[&["init"], arguments].concat());
        assert_eq!(ended.code, Some(0), "init: {}", ended.stderr);
        self.observe();
    }

    /// Makes a slot of the test's own at the place where the worker's is.
    pub fn observe(&self) {
        let sql = "SELECT pg_copy_logical_replication_slot(slot_name, $2::text::name)
                   FROM pg_replication_slots WHERE slot_name = $1 AND database = current_database()";
        let Ok(mut client) = Client::connect(&self.postgres.url(&self.database), NoTls) else { return };
        let made = client.execute(sql, &[&self.slot, &self.observer()]).unwrap();
        self.observing.set(made > 0);
    }

    /// Like `init`; the test's own slot is kept on standbys, too. Nobody may write meanwhile.
    pub fn init_with_failover(&mut self) {
        let ended = self.run(&["init"]);
        assert_eq!(ended.code, Some(0), "init: {}", ended.stderr);
        let sql = "SELECT pg_create_logical_replication_slot($1::text::name, 'pgoutput', false, false, true)";
        self.client.execute(sql, &[&self.observer()]).unwrap();
        self.observing.set(true);
    }

    pub fn observer(&self) -> String {
        format!("{OBSERVER}_{}", self.database)
    }

    pub fn start(&self) -> Worker {
        self.start_with(&[])
    }

    /// Starts a worker with these arguments; from the first one on, the test is watched.
    pub fn start_with(&self, arguments: &[&str]) -> Worker {
        if !self.observing.get() && EVENTS.iter().any(|rule| !self.exempt.contains(rule)) {
            self.observe();
        }
        self.watch();
        Worker::start(&self.config, arguments)
    }

    /// From now on positions and topic are sampled.
    pub fn watch(&self) {
        self.sampler.borrow_mut().get_or_insert_with(|| Sampler::start(self));
    }

    /// Ends the sampling, and gives what it saw to a test that judges it itself.
    pub fn unwatch(&mut self) -> Samples {
        Samples(self.sampler.take().map_or_else(Vec::new, Sampler::stop))
    }

    /// Takes rules out of the verdict; `_why`: what the test does that makes them meaningless.
    pub fn exempt(&mut self, rules: &[Rule], _why: &str) {
        self.exempt.extend(rules);
    }

    /// A worker that streams already.
    pub fn streaming(&self) -> Worker {
        let mut worker = self.start();
        worker.streams();
        worker
    }

    /// Goes on with another server that has the same database; the worker too, from its next start on.
    pub fn move_to(&mut self, server: Arc<Postgres>) {
        self.settings.url = server.url(&self.database);
        self.sessions.clone_from(&self.settings.url);
        self.write_config();
        self.postgres = server;
        self.client = self.postgres.connect(&self.database);
    }

    pub fn connect(&self) -> Client {
        Client::connect(&self.postgres.url(&self.database), NoTls).unwrap()
    }

    pub fn sql(&mut self, sql: &str) {
        self.client.batch_execute(sql).unwrap_or_else(|e| panic!("{sql}: {e:?}"));
    }

    pub fn value<T>(&mut self, sql: &str) -> T
    where
        T: for<'a> postgres::types::FromSql<'a>,
    {
        self.client.query_one(sql, &[]).unwrap_or_else(|e| panic!("{sql}: {e:?}")).get(0)
    }

    /// Publications, slots and the worker's own tables with their rows: what a mistake leaves alone.
    pub fn inventory(&mut self) -> Vec<String> {
        let made = "SELECT 'publication ' || pubname || ' ' || oid || ' ' || xmin FROM pg_publication
            UNION ALL SELECT 'slot ' || slot_name || ' ' || coalesce(plugin, '') || ' ' || coalesce(confirmed_flush_lsn::text, '')
                      FROM pg_replication_slots WHERE database = current_database() OR slot_name::text = $1
            UNION ALL SELECT 'relation ' || oid::regclass || ' ' || oid FROM pg_class WHERE relnamespace = to_regnamespace('outbox_tailer')
            UNION ALL SELECT 'schema ' || nspname FROM pg_namespace WHERE nspname = 'outbox_tailer' ORDER BY 1";
        let mut all: Vec<String> =
            self.client.query(made, &[&self.slot]).unwrap().iter().map(|r| r.get(0)).collect();
        if self.value("SELECT to_regclass('outbox_tailer.audit') IS NOT NULL") {
            let rows = "SELECT p::text FROM outbox_tailer.position p UNION ALL SELECT a::text FROM outbox_tailer.audit a
                        UNION ALL SELECT n::text FROM outbox_tailer.not_streamed n ORDER BY 1";
            all.extend(self.client.query(rows, &[]).unwrap().iter().map(|r| r.get::<_, String>(0)));
        }
        all
    }

    /// The command prints one line that says all this, ends with exit code 2 and has changed nothing.
    pub fn mistakes(&mut self, arguments: &[&str], says: &[&str]) -> Ended {
        let before = self.inventory();
        let ended = self.run(&[&["--log", "error"], arguments].concat());
        assert_eq!(ended.code, Some(2), "{arguments:?}: {ended:#?}");
        assert_eq!(ended.stderr.lines().count(), 1, "{arguments:?}: {}", ended.stderr);
        for text in says {
            assert!(ended.line().contains(text), "{arguments:?} does not say {text:?}: {}", ended.line());
        }
        assert_eq!(self.inventory(), before, "{arguments:?} changed something");
        ended
    }

    /// Inserts events of one key in one transaction, going on from its last revision.
    pub fn insert(&mut self, key: i64, events: i64) {
        let sql = "INSERT INTO outbox_event (order_id, revision, event_type, payload)
                   SELECT $1, coalesce((SELECT max(revision) FROM outbox_event WHERE order_id = $1), 0) + n, 'OrderPaid',
                          jsonb_build_object('n', n) FROM generate_series(1, $2::bigint) n";
        self.client.execute(sql, &[&key, &events]).unwrap();
    }

    /// Inserts events over a thousand keys of their own in one transaction; `batch` tells calls apart.
    pub fn insert_many(&mut self, batch: i64, events: i64) {
        self.client.execute(MANY, &[&batch, &events]).unwrap();
    }

    /// The same, in transactions of `size` events each.
    pub fn insert_in_transactions(&mut self, batch: i64, events: i64, size: i64) {
        self.sql("SET synchronous_commit = off");
        let insert = MANY
            .replace("$1", &batch.to_string())
            .replace("generate_series(1, $2::bigint)", "generate_series(i, i + size - 1)");
        self.sql(&format!(
            "DO $do$ DECLARE size bigint := {size}; BEGIN
               FOR i IN 1..{events} BY {size} LOOP {insert}; COMMIT; END LOOP; END $do$"
        ));
        self.sql("RESET synchronous_commit");
    }

    /// Everything committed since `init`, in commit order, from the test's own slot. Needs id and key
    /// in columns of the names below.
    pub fn committed(&mut self) -> Committed {
        let sql = "SELECT data FROM pg_logical_slot_peek_binary_changes($1::text::name, NULL, NULL,
                     'proto_version', '1', 'publication_names', quote_ident($2))";
        let slot = self.observer();
        let rows = self.client.query(sql, &[&slot, &self.observed]).unwrap();
        let (mut events, mut columns) = (self.taken.clone(), std::collections::HashMap::new());
        // A crash or a failover may put the slot back.
        let taken = events.last().map_or(0, |event| event.end_lsn);
        let mut open: Vec<(String, String)> = Vec::new();
        for row in &rows {
            let data: &[u8] = row.get(0);
            match pgoutput::decode(data).unwrap() {
                pgoutput::Message::Relation(relation) => {
                    let find = |names: &[&str]| {
                        relation.columns.iter().position(|c| names.contains(&c.name.as_str()))
                    };
                    let keys = ["order_id", "aggregateid", "clé", "'quoted'"];
                    let places = find(&["event_id", "id"]).zip(find(&keys));
                    columns.insert(relation.oid, places);
                }
                pgoutput::Message::Insert { relation, new } => {
                    let Some((id, key)) = columns[&relation] else { continue };
                    let values: Vec<_> = new.values().collect();
                    let text = |at: usize| match values[at] {
                        Value::Text(text) => String::from_utf8(text.to_vec()).unwrap(),
                        Value::Null => String::new(),
                    };
                    open.push((text(key), text(id)));
                }
                pgoutput::Message::Commit(commit) => {
                    let end_lsn = commit.end_lsn.into();
                    let open = open.drain(..).filter(|_| end_lsn > taken);
                    events.extend(open.map(|(key, id)| Event { key, id, end_lsn }));
                }
                _ => {}
            }
        }
        Committed { events }
    }

    /// The same, and moves the test's own slot past it.
    pub fn take_committed(&mut self) -> Committed {
        let committed = self.committed();
        self.taken.clone_from(&committed.events);
        if let Some(last) = committed.events.last() {
            let sql = "SELECT pg_replication_slot_advance($1::text::name, $2)";
            self.client.execute(sql, &[&self.observer(), &PgLsn::from(last.end_lsn)]).unwrap();
        }
        committed
    }

    /// After a failover: what was committed past `end` went with the old server. Gives it.
    pub fn forget_past(&mut self, end: u64) -> Vec<Event> {
        let survived = self.taken.partition_point(|event| event.end_lsn <= end);
        self.taken.split_off(survived)
    }

    /// Waits until all that is committed has arrived, and checks the promise.
    pub fn arrived(&mut self) -> (Vec<Message>, Verdict) {
        let committed = self.committed();
        let messages = self.topic.wait_for(committed.ids());
        let verdict = oracle::check(&committed, &messages);
        (messages, verdict)
    }

    /// (confirmed by the slot, persisted in the row), confirmed first.
    pub fn positions(&mut self) -> (u64, u64) {
        positions(&mut self.client, &self.slot)
    }

    /// Gives the test's own slot a publication that no test touches: it sees what the worker's has missed.
    pub fn observe_apart(&mut self) {
        self.observed = format!("{}_observed", self.database);
        let make =
            format!("CREATE PUBLICATION {} FOR TABLE outbox_event WITH (publish = 'insert')", self.observed);
        self.sql(&make);
    }

    /// Ends the server processes of the worker: `walsender`, or `client backend` for its SQL session.
    pub fn terminate(&mut self, backend_type: &str) {
        let sql = format!(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
             WHERE application_name = 'outbox-tailer' AND datname = current_database() AND backend_type = '{backend_type}'"
        );
        assert!(self.value::<i64>(&sql) > 0, "no {backend_type} of the worker");
    }

    /// Changes a setting of the test's own server while it runs.
    pub fn reload(&mut self, change: &str) {
        self.sql(&format!("ALTER SYSTEM {change}"));
        self.sql("SELECT pg_reload_conf()");
    }

    /// Waits until the slot has confirmed everything that is committed now.
    pub fn confirmed(&mut self) {
        let committed = self.committed();
        let last = committed.events.last().expect("something was committed").end_lsn;
        super::eventually("the slot is confirmed past the last commit", || {
            (self.positions().0 >= last).then_some(())
        });
    }
}

impl Bed {
    /// The positions that the slot had confirmed in every sample so far.
    pub fn sampled(&self) -> Vec<u64> {
        let sampler = self.sampler.borrow();
        let samples = sampler.as_ref().expect("a worker was started").samples.lock().unwrap();
        samples.iter().map(|sample| sample.confirmed).collect()
    }

    /// Judges what was sampled while the test ran, and what the topic holds at its end.
    fn verdict(&mut self, samples: &[Sample]) {
        self.check_positions(samples);
        let holds = |rule| !self.exempt.contains(&rule);
        let (persisted, topic) = (holds(Rule::PositionBehindTopic), holds(Rule::Topic));
        if samples.is_empty() || !(persisted || topic) {
            return;
        }
        // Committed last: a worker that still runs may publish meanwhile.
        let messages = self.topic.read();
        self.client = self.connect(); // the test may have left it in a transaction, or without a server
        let mut committed = self.committed();
        committed.events.retain(|event| !self.given_up.contains(&event.id));
        if persisted {
            check_persisted(samples, &committed, &messages);
        }
        if topic {
            oracle::check_so_far(&committed, &messages);
        }
    }

    /// The order of truth in every sample, by what was committed and what the topic holds in the end.
    pub fn check_samples(&self, samples: &Samples, committed: &Committed, messages: &[Message]) {
        self.check_positions(&samples.0);
        check_persisted(&samples.0, committed, messages);
    }

    fn check_positions(&self, samples: &[Sample]) {
        let holds = |rule| !self.exempt.contains(&rule);
        for Sample { confirmed, persisted, .. } in samples {
            let behind = confirmed <= persisted || !holds(Rule::SlotBehindPosition);
            assert!(behind, "confirmed {confirmed:X} > persisted {persisted:X}");
        }
        for pair in samples.windows(2) {
            let [(c0, p0), (c1, p1)] = [&pair[0], &pair[1]].map(|s| (s.confirmed, s.persisted));
            assert!(c0 <= c1 || !holds(Rule::SlotForward), "the slot went back from {c0:X} to {c1:X}");
            assert!(
                p0 <= p1 || !holds(Rule::PositionForward),
                "the position went back from {p0:X} to {p1:X}"
            );
        }
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        let samples = self.sampler.take().map(Sampler::stop);
        let verdict = match samples {
            Some(samples) if !std::thread::panicking() => {
                catch_unwind(AssertUnwindSafe(|| self.verdict(&samples)))
            }
            _ => Ok(()),
        };
        // The servers may be gone, by the test's own doing.
        if let Ok(mut client) = Client::connect(&self.postgres.url("postgres"), NoTls) {
            let _ = client.batch_execute(&format!(
                "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE database = '{0}' AND active;
                 SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = '{0}' AND NOT active;",
                self.database
            ));
        }
        if let Err(found) = verdict {
            resume_unwind(found);
        }
    }
}

pub fn unique() -> String {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    format!("t{}_{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed))
}

fn positions(client: &mut Client, slot: &str) -> (u64, u64) {
    let confirmed = "SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = $1";
    let persisted = "SELECT confirmed_lsn FROM outbox_tailer.position WHERE slot = $1";
    let confirmed = client.query_one(confirmed, &[&slot]).unwrap().get::<_, PgLsn>(0).into();
    (confirmed, client.query_one(persisted, &[&slot]).unwrap().get::<_, PgLsn>(0).into())
}

/// What was seen from outside while a test ran.
pub struct Samples(Vec<Sample>);

impl Samples {
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// The greatest position that the slot was seen to have confirmed.
    pub fn confirmed(&self) -> u64 {
        self.0.iter().map(|sample| sample.confirmed).max().unwrap_or(0)
    }
}

/// Watches the order of truth from outside while a test runs: confirmed ≤ persisted ≤ what the
/// topic holds, read in this order. A server that cannot be reached is asked again.
struct Sampler {
    stop: Arc<AtomicBool>,
    samples: Arc<Mutex<Vec<Sample>>>,
    thread: JoinHandle<()>,
}

struct Sample {
    confirmed: u64,
    persisted: u64,
    /// The offset after the last message of each partition; `None` when Kafka did not answer.
    ends: Option<Vec<i64>>,
}

impl Sampler {
    fn start(bed: &Bed) -> Self {
        let (stop, samples) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Vec::new())));
        let (stopped, sink) = (Arc::clone(&stop), Arc::clone(&samples));
        let (url, slot) = (bed.sessions.clone(), bed.slot.clone());
        let ends = oracle::Ends::new(&bed.topic);
        let thread = std::thread::spawn(move || {
            let mut client = None;
            loop {
                let last = stopped.load(Ordering::Relaxed);
                if let Some((confirmed, persisted)) = sample(&mut client, &url, &slot) {
                    let ends = ends.now();
                    sink.lock().unwrap().push(Sample { confirmed, persisted, ends });
                }
                if last {
                    return;
                }
                std::thread::sleep(Duration::from_millis(50)); // the rate of sampling
            }
        });
        Sampler { stop, samples, thread }
    }

    /// After one more sample.
    fn stop(self) -> Vec<Sample> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap();
        std::mem::take(&mut self.samples.lock().unwrap())
    }
}

fn sample(client: &mut Option<Client>, url: &str, slot: &str) -> Option<(u64, u64)> {
    if client.is_none() {
        *client = Client::connect(url, NoTls).ok();
    }
    let session = client.as_mut()?;
    let confirmed = session
        .query_opt("SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = $1", &[&slot]);
    let persisted =
        session.query_opt("SELECT confirmed_lsn FROM outbox_tailer.position WHERE slot = $1", &[&slot]);
    let (Ok(confirmed), Ok(persisted)) = (confirmed, persisted) else {
        *client = None; // the server may be restarting
        return None;
    };
    // Either is missing when a test or `init` takes it away.
    let lsn = |row: postgres::Row| row.get::<_, Option<PgLsn>>(0).map(u64::from);
    Some((confirmed.and_then(lsn)?, persisted.and_then(lsn)?))
}

/// What the position has passed was in the topic when it was sampled.
fn check_persisted(samples: &[Sample], committed: &Committed, messages: &[Message]) {
    let mut first: HashMap<String, (usize, i64)> = HashMap::new();
    for message in messages {
        let place = (message.partition as usize, message.offset);
        first.entry(message.id()).and_modify(|p| *p = (*p).min(place)).or_insert(place);
    }
    let mut events = committed.events.iter().peekable();
    // For each partition the greatest offset that an event at or below the position has.
    let mut needed: Vec<(i64, &str)> = Vec::new();
    for Sample { persisted, ends, .. } in samples {
        while let Some(event) = events.next_if(|e| e.end_lsn <= *persisted) {
            let Some(&(partition, offset)) = first.get(&event.id) else {
                panic!("{persisted:X} was persisted, and event {} is not in the topic", event.id)
            };
            needed.resize(needed.len().max(partition + 1), (-1, ""));
            needed[partition] = needed[partition].max((offset, &event.id));
        }
        for ((offset, id), end) in needed.iter().zip(ends.iter().flatten()) {
            assert!(offset < end, "{persisted:X} was persisted before event {id} was in the topic");
        }
    }
}

/// Writers that commit transactions of mixed shape until told to stop.
pub struct Load {
    stop: Arc<AtomicBool>,
    writers: Vec<JoinHandle<u64>>,
}

impl Load {
    /// Each writer has keys of its own; some transactions are long, some roll back to a savepoint,
    /// some roll back as a whole.
    pub fn start(bed: &Bed, writers: i64, pause: std::time::Duration) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let writer = |number: i64| {
            let (stop, url) = (Arc::clone(&stop), bed.postgres.url(&bed.database));
            std::thread::spawn(move || {
                let mut client = None;
                let (mut commits, mut revision) = (0, 0);
                while !stop.load(Ordering::Relaxed) {
                    if client.is_none() {
                        client = Client::connect(&url, NoTls).ok();
                    }
                    match client.as_mut().map(|c| transaction(c, number, &mut revision)) {
                        Some(Ok(())) => commits += 1,
                        _ => client = None, // the server may be restarting
                    }
                    std::thread::sleep(pause); // the rate of the load
                }
                commits
            })
        };
        let writers = (0..writers).map(writer).collect();
        Load { stop, writers }
    }

    /// Gives the number of transactions that were seen to commit.
    pub fn stop(self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        self.writers.into_iter().map(|w| w.join().unwrap()).sum()
    }
}

fn transaction(client: &mut Client, writer: i64, revision: &mut i64) -> Result<(), postgres::Error> {
    *revision += 10; // each transaction has ten numbers to itself, so that none is used twice
    let (base, kind) = (*revision, *revision / 10 % 7);
    let key = writer * 100 + base / 10 % 5;
    let mut t = client.transaction()?;
    let insert = "INSERT INTO outbox_event (order_id, revision, event_type, payload) VALUES ($1, $2, 'OrderPaid', $3::text::jsonb)";
    let payload = format!(r#"{{"writer": {writer}, "revision": {base}}}"#);
    t.execute(insert, &[&key, &base, &payload])?;
    match kind {
        0 => {
            for n in 1..6 {
                t.execute(insert, &[&key, &(base + n), &payload])?;
            }
        }
        1 => {
            let mut savepoint = t.transaction()?;
            savepoint.execute(insert, &[&key, &(base + 1), &payload])?;
            savepoint.rollback()?;
            t.execute(insert, &[&key, &(base + 2), &payload])?;
        }
        2 => return t.rollback(),
        _ => {}
    }
    t.commit()
}
