//! `demo`: the whole way on a sample database of its own. A producer pays orders, the worker tails
//! them, a consumer checks what arrives; database, slot and topic are removed again at the end.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use postgres_protocol::escape::escape_identifier;
use rdkafka::admin::{AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::message::{Headers, Message};
use rdkafka::mocking::MockCluster;
use rdkafka::producer::DefaultProducerContext;
use rdkafka::{Offset, TopicPartitionList};
use tokio::sync::{mpsc, watch};
use tokio_postgres::Client;
use uuid::Uuid;

use crate::cli::{Common, DemoArgs, InitArgs};
use crate::commands::{init, run};
use crate::config::{self, Config};
use crate::error::{Error, Result};
use crate::kafka;
use crate::postgres::{self, sql_error};

/// Database, slot and publication of the demo.
const NAME: &str = "outbox_tailer_demo";
const TOPIC: &str = "demo.outbox.event.order";
const PARTITIONS: i32 = 6;
/// Orders that are worked on at the same time.
const ORDERS: u64 = 40;
/// The demo has failed when nothing more arrives for so long.
const PATIENCE: Duration = Duration::from_secs(60);

/// An order goes to the next state together with the event that says so: one statement, one
/// transaction. No row comes back when the order is not in the state before.
const NEXT_STATE: &str = "
WITH changed AS (
  UPDATE sales_order SET state = $2, revision = revision + 1
  WHERE order_id = $1 AND state = $3
  RETURNING order_id, revision)
INSERT INTO outbox_event (order_id, revision, event_type, payload)
SELECT order_id, revision, $4, jsonb_build_object('orderId', order_id, 'revision', revision, 'state', $2::text)
FROM changed
RETURNING event_id, revision";

/// (from, to, event), in a circle.
const STATES: [(&str, &str, &str); 3] = [
    ("pending", "paid", "OrderPaid"),
    ("paid", "shipped", "OrderShipped"),
    ("shipped", "pending", "OrderRepeated"),
];

/// What the consumer saw of one message.
struct Seen {
    id: String,
    key: String,
    revision: u64,
    line: String,
}

/// # Errors
/// When an event is lost or out of order, or the servers are not to be had.
pub async fn demo(common: &Common, args: &DemoArgs, mut stop: watch::Receiver<bool>) -> Result<()> {
    let mut overrides = common.overrides();
    let mut file = config::load(common.config.as_deref(), config::environment(), &overrides);
    let mut mock: Option<MockCluster<'static, DefaultProducerContext>> = None;
    if file.is_err() && overrides.brokers.is_none() {
        let cluster =
            MockCluster::new(1).map_err(|e| Error::bug("cannot start the mock broker").because(e))?;
        overrides.brokers = Some(cluster.bootstrap_servers());
        file = config::load(common.config.as_deref(), config::environment(), &overrides);
        mock = Some(cluster);
    }
    let mut config = file?;
    match &mock {
        Some(cluster) => {
            // It has no admin protocol.
            let made = cluster.create_topic(TOPIC, PARTITIONS, 1);
            made.map_err(|e| Error::bug("cannot make the mock broker's topic").because(e))?;
            println!("broker: librdkafka's mock broker, inside this process (no Kafka was given)");
        }
        None => println!("broker: Kafka at {}", config.kafka.brokers),
    }
    config.kafka.knows_limits = mock.is_none();
    if mock.is_some() {
        config.witness = config::Witness::None; // its brokers end with this process
    }
    let server = postgres::connect(&config.postgres).await?;
    println!(
        "database: {NAME}, made for the demo, on PostgreSQL {} at {}",
        server.version / 10_000,
        server.endpoint
    );
    remove(&server.client).await?;
    server
        .client
        .batch_execute(&format!("CREATE DATABASE {NAME}"))
        .await
        .map_err(|e| sql_error("cannot make the demo's database", e))?;

    config.postgres.url.dbname(NAME);
    NAME.clone_into(&mut config.postgres.slot);
    NAME.clone_into(&mut config.postgres.publication);
    for table in &mut config.tables {
        TOPIC.clone_into(&mut table.topic);
    }
    if mock.is_none() {
        delete_topic(&config).await; // of a demo that was killed
        make_topic(&config).await?;
    }
    let result = show(&config, args, &mut stop).await;
    if mock.is_none() {
        delete_topic(&config).await;
    }
    remove(&server.client).await?;
    result
}

async fn show(config: &Config, args: &DemoArgs, stop: &mut watch::Receiver<bool>) -> Result<()> {
    init::init(config, &InitArgs { sample: true, from_now: true, wait: 30, ..InitArgs::default() }).await?;
    let sql = postgres::connect(&config.postgres).await?;
    let sampler = postgres::connect(&config.postgres).await?;
    let consumer = consume(config)?;

    let (stop_worker, worker_stopped) = watch::channel(false);
    let worker_config = config.clone();
    let worker = tokio::spawn(async move { run::run(&worker_config, worker_stopped).await });
    let (committed, events) = mpsc::unbounded_channel();
    let (stop_producer, producer_stopped) = watch::channel(false);
    let (limit, rate) = (args.events, args.rate);
    let producer =
        tokio::spawn(async move { produce(&sql.client, limit, rate, &committed, &producer_stopped).await });

    let mut audience = Audience::new(args.events, events, consumer);
    let watched = audience
        .watch(&sampler.client, stop, &stop_producer, || {
            worker.is_finished() || producer.is_finished() && limit.is_none()
        })
        .await;
    let _ = stop_producer.send(true);
    let _ = stop_worker.send(true);
    let produced = producer.await.map_err(|e| Error::bug("the demo's producer").because(e))?;
    let worked = worker.await.map_err(|e| Error::bug("the demo's worker").because(e))?;
    watched.and(produced).and(worked)?;
    audience.summary()
}

/// Pays, ships and repeats orders until there are enough events or it is told to stop.
async fn produce(
    client: &Client,
    limit: Option<u64>,
    rate: u32,
    committed: &mpsc::UnboundedSender<Uuid>,
    stop: &watch::Receiver<bool>,
) -> Result<()> {
    let failed = |e| sql_error("the demo's producer", e);
    client.batch_execute("SET search_path = public").await.map_err(failed)?;
    let orders = format!(
        "INSERT INTO sales_order (order_id, state) SELECT n, 'pending' FROM generate_series(1, {ORDERS}) n"
    );
    client.batch_execute(&orders).await.map_err(failed)?;
    let next = client.prepare(NEXT_STATE).await.map_err(failed)?;
    let started = Instant::now();
    let mut sent = 0;
    while limit.is_none_or(|limit| sent < limit) && !*stop.borrow() {
        let (from, to, event) = STATES[usize::try_from(sent / ORDERS).unwrap_or(0) % STATES.len()];
        let order = i64::try_from(1 + sent % ORDERS).unwrap_or(1);
        let row = client.query_one(&next, &[&order, &to, &from, &event]).await.map_err(failed)?;
        // The consumer may be faster than this line: the audience waits for both.
        let _ = committed.send(row.get(0));
        sent += 1;
        if rate > 0 {
            // Every tenth second ten times as fast, so that the lag goes up and down.
            let burst = started.elapsed().as_secs() % 10 == 9;
            let pause = Duration::from_secs(1) / rate / if burst { 10 } else { 1 };
            tokio::time::sleep(pause).await;
        }
    }
    Ok(())
}

/// Compares what was committed with what arrives.
struct Audience {
    expected: Option<u64>,
    events: mpsc::UnboundedReceiver<Uuid>,
    messages: mpsc::Receiver<Seen>,
    committed: HashSet<String>,
    seen: HashSet<String>,
    revisions: HashMap<String, u64>,
    repeats: u64,
    inverted: u64,
    last: Vec<String>,
}

impl Audience {
    fn new(
        expected: Option<u64>,
        events: mpsc::UnboundedReceiver<Uuid>,
        messages: mpsc::Receiver<Seen>,
    ) -> Self {
        Audience {
            expected,
            events,
            messages,
            committed: HashSet::new(),
            seen: HashSet::new(),
            revisions: HashMap::new(),
            repeats: 0,
            inverted: 0,
            last: Vec::new(),
        }
    }

    /// Prints a line a second until all has arrived, or until told to stop and all has arrived.
    async fn watch(
        &mut self,
        client: &Client,
        stop: &mut watch::Receiver<bool>,
        stop_producer: &watch::Sender<bool>,
        failed: impl Fn() -> bool,
    ) -> Result<()> {
        let mut second = tokio::time::interval(Duration::from_secs(1));
        let (mut before, mut last_progress) = (0, Instant::now());
        let mut stopping = false;
        loop {
            tokio::select! {
                Some(id) = self.events.recv() => drop(self.committed.insert(id.to_string())),
                Some(message) = self.messages.recv() => {
                    last_progress = Instant::now();
                    self.take(message);
                }
                _ = stop.changed(), if !stopping => {
                    stopping = true;
                    println!("stopping: the producer ends, the rest arrives");
                    let _ = stop_producer.send(true);
                    last_progress = Instant::now();
                }
                _ = second.tick() => {
                    self.print(client, self.seen.len() - before).await?;
                    before = self.seen.len();
                }
            }
            let all = self.seen.len() >= self.committed.len();
            let enough = self.expected.is_some_and(|n| self.seen.len() as u64 >= n)
                || stopping && self.events.is_closed() && self.events.is_empty();
            if all && enough {
                return Ok(());
            }
            if failed() && !stopping || last_progress.elapsed() > PATIENCE {
                return Ok(()); // the summary tells
            }
        }
    }

    fn take(&mut self, message: Seen) {
        if !self.seen.insert(message.id) {
            self.repeats += 1;
            return;
        }
        let newest = self.revisions.entry(message.key).or_insert(0);
        if message.revision <= *newest {
            self.inverted += 1;
        }
        *newest = message.revision;
        self.last.push(message.line);
    }

    async fn print(&mut self, client: &Client, per_second: usize) -> Result<()> {
        let sql = "SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), confirmed_flush_lsn)::bigint,
                          pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn)::bigint
                   FROM pg_replication_slots WHERE slot_name = $1";
        let lag = client.query_opt(sql, &[&NAME]).await.map_err(|e| sql_error("cannot read the slot", e))?;
        let kib = |i: usize| {
            lag.as_ref()
                .and_then(|row| row.get::<_, Option<i64>>(i))
                .map_or_else(|| "?".to_owned(), |bytes| format!("{:.1}", bytes.max(0) as f64 / 1024.0))
        };
        println!(
            "{per_second:>6} events/s   {:>8} published   slot lag {:>8} KiB unconfirmed, {:>8} KiB retained   {} repeats",
            self.seen.len(),
            kib(0),
            kib(1),
            self.repeats
        );
        let tail = self.last.len().saturating_sub(2);
        self.last.drain(..).skip(tail).for_each(|line| println!("         {line}"));
        Ok(())
    }

    fn summary(mut self) -> Result<()> {
        while let Ok(id) = self.events.try_recv() {
            self.committed.insert(id.to_string());
        }
        let lost = self.committed.difference(&self.seen).count();
        let invented = self.seen.difference(&self.committed).count();
        println!(
            "events={} published={} lost={lost} inverted={} repeats={}",
            self.committed.len(),
            self.seen.len(),
            self.inverted,
            self.repeats
        );
        let short = self.expected.is_some_and(|n| (self.committed.len() as u64) < n);
        if lost + invented > 0 || self.inverted > 0 || short {
            return Err(Error::bug(format!(
                "{lost} events were lost, {invented} invented, {} out of order",
                self.inverted
            )));
        }
        Ok(())
    }
}

/// Reads the topic in a thread of its own, from where it ends now.
fn consume(config: &Config) -> Result<mpsc::Receiver<Seen>> {
    let failed = |e| Error::wait("the demo's consumer").because(e);
    let mut client = ClientConfig::new();
    for (name, value) in &config.kafka.properties {
        client.set(name, value);
    }
    if let Some(password) = config.kafka.sasl_password()? {
        client.set("sasl.password", password.reveal());
    }
    client
        .set("bootstrap.servers", &config.kafka.brokers)
        .set("group.id", NAME)
        .set("enable.auto.commit", "false");
    let consumer: BaseConsumer<DefaultConsumer> =
        client.create_with_context(DefaultConsumer).map_err(failed)?;
    let mut from = TopicPartitionList::new();
    for partition in 0..PARTITIONS {
        from.add_partition_offset(TOPIC, partition, Offset::Beginning).map_err(failed)?;
    }
    consumer.assign(&from).map_err(failed)?;
    let (sender, receiver) = mpsc::channel(1024);
    std::thread::spawn(move || {
        while !sender.is_closed() {
            let Some(Ok(message)) = consumer.poll(Duration::from_millis(100)) else { continue };
            let header = |name: &str| {
                let value = message.headers()?.iter().find(|h| h.key == name)?.value?;
                Some(String::from_utf8_lossy(value).into_owned())
            };
            let text = |bytes: Option<&[u8]>| String::from_utf8_lossy(bytes.unwrap_or_default()).into_owned();
            let key = text(message.key());
            let line = format!(
                "{TOPIC}[{}]@{}  key {key}  {}  {}",
                message.partition(),
                message.offset(),
                header("eventType").unwrap_or_default(),
                text(message.payload())
            );
            let seen = Seen {
                id: header("id").unwrap_or_default(),
                revision: header("revision").and_then(|r| r.parse().ok()).unwrap_or(0),
                key,
                line,
            };
            if sender.blocking_send(seen).is_err() {
                return;
            }
        }
    });
    Ok(receiver)
}

/// Keeps librdkafka's log out of the picture.
struct DefaultConsumer;
impl rdkafka::ClientContext for DefaultConsumer {
    fn log(&self, _: rdkafka::config::RDKafkaLogLevel, _: &str, _: &str) {}
    fn error(&self, _: rdkafka::error::KafkaError, _: &str) {}
}
impl rdkafka::consumer::ConsumerContext for DefaultConsumer {}

async fn make_topic(config: &Config) -> Result<()> {
    let admin: rdkafka::admin::AdminClient<DefaultClientContext> = kafka::admin(&config.kafka)?;
    let options = AdminOptions::new()
        .operation_timeout(Some(Duration::from_secs(20)))
        .request_timeout(Some(Duration::from_secs(20)));
    let topic = NewTopic::new(TOPIC, PARTITIONS, TopicReplication::Fixed(-1));
    let made = admin
        .create_topics([&topic], &options)
        .await
        .map_err(|e| Error::wait("cannot make the demo's topic").because(e))?;
    match made.into_iter().next() {
        Some(Err((name, code))) => Err(Error::wait(format!("cannot make topic {name}: {code}"))),
        _ => Ok(()),
    }
}

async fn delete_topic(config: &Config) {
    if let Ok(admin) = kafka::admin(&config.kafka) {
        let _ = admin.delete_topics(&[TOPIC], &AdminOptions::new()).await;
    }
}

/// Removes database and slot of this or of an earlier demo.
async fn remove(client: &Client) -> Result<()> {
    let failed = |e| sql_error("cannot remove the demo's database", e);
    let slot =
        "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = $1 AND active";
    client.execute(slot, &[&NAME]).await.map_err(failed)?;
    let deadline = Instant::now() + Duration::from_secs(10);
    while let Err(e) = client
        .execute(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = $1",
            &[&NAME],
        )
        .await
    {
        if Instant::now() > deadline {
            return Err(failed(e));
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let drop = format!("DROP DATABASE IF EXISTS {} WITH (FORCE)", escape_identifier(NAME));
    client.batch_execute(&drop).await.map_err(failed)
}
