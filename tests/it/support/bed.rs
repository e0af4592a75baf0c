//! A database, a topic, a configuration file and a worker for one test.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::JoinHandle;

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
}

/// What goes into the configuration file, as lines of TOML.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    pub url: String,
    pub postgres: String,
    pub kafka: String,
    pub properties: String,
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
            "[kafka.properties]\n{}\n[worker]\nreconnect_max_ms = 1000\n{}",
            s.properties, s.worker
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

    pub fn observe(&mut self) {
        let slot = self.observer();
        let sql = "SELECT pg_copy_logical_replication_slot($1::text::name, $2::text::name)";
        self.client.execute(sql, &[&self.slot, &slot]).unwrap();
    }

    fn observer(&self) -> String {
        format!("{OBSERVER}_{}", self.database)
    }

    pub fn start(&self) -> Worker {
        Worker::start(&self.config, &[])
    }

    /// A worker that streams already.
    pub fn streaming(&self) -> Worker {
        let mut worker = self.start();
        worker.streams();
        worker
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
    /// in columns of the configured names `event_id`/`id` and `order_id`/`aggregateid`.
    pub fn committed(&mut self) -> Committed {
        let sql = "SELECT data FROM pg_logical_slot_peek_binary_changes($1::text::name, NULL, NULL,
                     'proto_version', '1', 'publication_names', quote_ident($2))";
        let slot = self.observer();
        let rows = self.client.query(sql, &[&slot, &self.observed]).unwrap();
        let (mut events, mut columns) = (Vec::new(), std::collections::HashMap::new());
        let mut open: Vec<(String, String)> = Vec::new();
        for row in &rows {
            let data: &[u8] = row.get(0);
            match pgoutput::decode(data).unwrap() {
                pgoutput::Message::Relation(relation) => {
                    let find = |names: [&str; 2]| {
                        relation.columns.iter().position(|c| names.contains(&c.name.as_str()))
                    };
                    let places = find(["event_id", "id"]).zip(find(["order_id", "aggregateid"]));
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
                    events.extend(open.drain(..).map(|(key, id)| Event { key, id, end_lsn }));
                }
                _ => {}
            }
        }
        Committed { events }
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

impl Drop for Bed {
    fn drop(&mut self) {
        // The servers may be gone, by the test's own doing.
        if let Ok(mut client) = Client::connect(&self.postgres.url("postgres"), NoTls) {
            let _ = client.batch_execute(&format!(
                "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE database = '{0}' AND active;
                 SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = '{0}' AND NOT active;",
                self.database
            ));
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

/// Watches the order of truth from outside while a test runs: confirmed ≤ persisted ≤ what the
/// topic holds, read in this order.
pub struct Sampler {
    stop: Arc<AtomicBool>,
    taken: Arc<AtomicU32>,
    thread: JoinHandle<Vec<Sample>>,
}

struct Sample {
    confirmed: u64,
    persisted: u64,
    ends: Vec<i64>,
}

impl Sampler {
    pub fn start(bed: &Bed) -> Self {
        let (stop, taken) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU32::new(0)));
        let (stopped, count) = (Arc::clone(&stop), Arc::clone(&taken));
        let (url, slot) = (bed.postgres.url(&bed.database), bed.slot.clone());
        let topic = Topic {
            brokers: bed.topic.brokers.clone(),
            name: bed.topic.name.clone(),
            partitions: bed.topic.partitions,
        };
        let thread = std::thread::spawn(move || {
            let consumer: rdkafka::consumer::BaseConsumer = oracle::consumer(&topic.brokers);
            let mut client = None;
            let mut samples = Vec::new();
            while !stopped.load(Ordering::Relaxed) {
                if let Some(sample) = sample(&mut client, &url, &slot, &consumer, &topic) {
                    samples.push(sample);
                    count.fetch_add(1, Ordering::Relaxed);
                }
                std::thread::sleep(std::time::Duration::from_millis(10)); // the rate of sampling
            }
            samples
        });
        Sampler { stop, taken, thread }
    }

    /// Ends the watch and checks every sample against what was committed and where it arrived. Gives
    /// the positions the slot had confirmed.
    pub fn check(self, committed: &Committed, messages: &[Message]) -> Vec<u64> {
        let confirmed = self.check_across_crashes(committed, messages);
        for pair in confirmed.windows(2) {
            assert!(pair[0] <= pair[1], "the slot went back from {:X} to {:X}", pair[0], pair[1]);
        }
        confirmed
    }

    /// The same where PostgreSQL crashes: the slot may then forget what it had not saved yet.
    pub fn check_across_crashes(self, committed: &Committed, messages: &[Message]) -> Vec<u64> {
        super::eventually("ten samples are taken", || {
            (self.taken.load(Ordering::Relaxed) >= 10).then_some(())
        });
        self.stop.store(true, Ordering::Relaxed);
        let samples = self.thread.join().unwrap();
        let mut first = std::collections::HashMap::new();
        for message in messages {
            let place = (message.partition as usize, message.offset);
            first
                .entry(message.id())
                .and_modify(|p: &mut (usize, i64)| *p = (*p).min(place))
                .or_insert(place);
        }
        let mut events = committed.events.iter().peekable();
        let mut needed: Vec<(i64, &str)> = Vec::new();
        let mut last_persisted = 0;
        for sample in &samples {
            let (confirmed, persisted) = (sample.confirmed, sample.persisted);
            assert!(confirmed <= persisted, "confirmed {confirmed:X} > persisted {persisted:X}");
            assert!(persisted >= last_persisted, "the position went back to {persisted:X}");
            last_persisted = persisted;
            // For each partition the greatest offset that an event at or below the position has.
            while let Some(event) = events.next_if(|e| e.end_lsn <= persisted) {
                let (partition, offset) = first[&event.id];
                needed.resize(needed.len().max(partition + 1), (-1, ""));
                needed[partition] = needed[partition].max((offset, &event.id));
            }
            for ((offset, id), end) in needed.iter().zip(&sample.ends) {
                assert!(offset < end, "{persisted:X} was persisted before event {id} was in the topic");
            }
        }
        samples.iter().map(|s| s.confirmed).collect()
    }
}

fn sample(
    client: &mut Option<Client>,
    url: &str,
    slot: &str,
    consumer: &rdkafka::consumer::BaseConsumer,
    topic: &Topic,
) -> Option<Sample> {
    use rdkafka::consumer::Consumer as _;
    if client.is_none() {
        *client = Client::connect(url, NoTls).ok();
    }
    let session = client.as_mut()?;
    let confirmed = session
        .query_opt("SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = $1", &[&slot]);
    let persisted =
        session.query_opt("SELECT confirmed_lsn FROM outbox_tailer.position WHERE slot = $1", &[&slot]);
    let (Ok(Some(confirmed)), Ok(Some(persisted))) = (confirmed, persisted) else {
        *client = None; // the server may be restarting
        return None;
    };
    let limit = std::time::Duration::from_secs(5);
    let ends =
        (0..topic.partitions).map(|p| consumer.fetch_watermarks(&topic.name, p, limit).map(|(_, end)| end));
    Some(Sample {
        confirmed: confirmed.get::<_, PgLsn>(0).into(),
        persisted: persisted.get::<_, PgLsn>(0).into(),
        ends: ends.collect::<Result<_, _>>().ok()?,
    })
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
