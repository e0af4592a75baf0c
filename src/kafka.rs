//! The idempotent producer, its delivery reports, and what is asked of the brokers before a start.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use rdkafka::admin::{AdminClient, AdminOptions, ConfigResource, ResourceSpecifier};
use rdkafka::client::Client;
use rdkafka::client::DefaultClientContext;
use rdkafka::config::{ClientConfig, RDKafkaLogLevel};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{Header, Headers, Message, OwnedHeaders};
use rdkafka::producer::{
    BaseRecord, DeliveryResult, Producer as _, ProducerContext, PurgeConfig, ThreadedProducer,
};
use rdkafka::{ClientContext, Statistics};
use tokio::sync::{Notify, watch};

use crate::config::{Kafka, Worker};
use crate::error::{Error, Kind, Refusal, Result};
use crate::relay::line::{DeliveryError, Report};
use crate::relay::progress::Seq;
use crate::relay::router::{ID_HEADER, Record};

/// How long one question to the brokers may take.
const ASK_TIMEOUT: Duration = Duration::from_secs(5);
/// All of them, with the client's set-up and end.
const PREFLIGHT_TIMEOUT: Duration = Duration::from_secs(20);
/// How often a broker is asked whether it is there, and how often once none has answered.
const WATCH_INTERVAL: Duration = Duration::from_secs(10);
const WATCH_INTERVAL_SILENT: Duration = Duration::from_secs(1);

/// One session's producer. After a failed delivery it is dropped with everything in it and a new
/// one starts from the persisted position: a message is never sent again alone.
pub struct Producer {
    /// `Some` until it is dropped.
    inner: Option<Arc<ThreadedProducer<Reports>>>,
    reports: Arc<Queue>,
    /// librdkafka's `message.max.bytes` in force.
    pub max_message_bytes: usize,
    /// See [`crate::relay::line::Bounds`].
    pub alone_over_bytes: usize,
    /// Whether the topics' size limits are known.
    pub knows_limits: bool,
}

/// The window, in events and bytes, that fits librdkafka's queue: half of it, so that the queue is
/// never full for long.
pub fn window(kafka: &Kafka, worker: &Worker) -> (usize, usize) {
    let given = |name: &str| kafka.properties.get(name).and_then(|n| n.parse::<usize>().ok());
    let half =
        |window: usize, queue: Option<usize>| queue.map_or(window, |queue| window.min(queue / 2).max(1));
    let kbytes = given("queue.buffering.max.kbytes");
    (
        half(worker.window_events, given("queue.buffering.max.messages")),
        half(worker.window_bytes, kbytes.map(|kbytes| kbytes.saturating_mul(1024))),
    )
}

#[derive(Debug)]
pub enum SendError {
    /// librdkafka's queue is full for a moment; the same record must be sent again.
    QueueFull,
    /// Larger than librdkafka's `message.max.bytes`.
    TooLarge,
    Other(String),
}

/// Reports cross from librdkafka's poll thread to the session here.
#[derive(Default)]
struct Queue {
    reports: Mutex<Vec<Report>>,
    ready: Notify,
    /// The last thing librdkafka said, for a message about why nobody answers; from the first answer
    /// on it goes to the log instead.
    said: Mutex<Option<String>>,
}

impl Queue {
    fn asking() -> Arc<Self> {
        Arc::new(Queue { said: Mutex::new(Some(String::new())), ..Queue::default() })
    }

    fn said(&self) -> MutexGuard<'_, Option<String>> {
        self.said.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

struct Reports(Arc<Queue>);

impl ClientContext for Reports {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, message: &str) {
        match level {
            // It calls gapless "experimental" at every start.
            _ if facility == "CONFWARN" || self.0.said().is_some() => {
                tracing::debug!(?level, facility, message, "librdkafka");
            }
            RDKafkaLogLevel::Debug | RDKafkaLogLevel::Info | RDKafkaLogLevel::Notice => {
                tracing::debug!(facility, message, "librdkafka");
            }
            _ => tracing::warn!(facility, message, "librdkafka"),
        }
    }

    fn stats(&self, _: Statistics) {}

    fn error(&self, error: KafkaError, reason: &str) {
        match &mut *self.0.said() {
            // "All brokers are down" says less than what came before it.
            Some(said) if said.is_empty() || !reason.contains("brokers are down") => {
                reason.clone_into(said);
            }
            Some(_) => {}
            None => tracing::warn!(%error, reason, "Kafka"),
        }
    }
}

impl ProducerContext for Reports {
    type DeliveryOpaque = usize;

    fn delivery(&self, result: &DeliveryResult<'_>, seq: usize) {
        let seq = seq as Seq;
        let report = match result {
            Ok(_) => Report::Acked(seq),
            Err((error, message)) => Report::Failed { seq, why: Box::new(delivery_error(error, message)) },
        };
        let mut reports = self.0.reports.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        reports.push(report);
        if reports.len() == 1 {
            self.0.ready.notify_one();
        }
    }
}

impl Drop for Producer {
    /// Destroying a client blocks, and must not hold up what else there is to do.
    fn drop(&mut self) {
        let inner = self.inner.take();
        tokio::task::spawn_blocking(move || drop(inner));
    }
}

fn delivery_error(error: &KafkaError, message: &impl Message) -> DeliveryError {
    use RDKafkaErrorCode::{InvalidRecord, InvalidTimestamp, MessageSizeTooLarge};
    match error.rdkafka_error_code() {
        Some(code @ (MessageSizeTooLarge | InvalidRecord | InvalidTimestamp)) => {
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            let id = message.headers().and_then(|h| h.iter().find(|h| h.key == ID_HEADER)?.value.map(text));
            DeliveryError::Rejected {
                size: code == MessageSizeTooLarge,
                event_id: id.unwrap_or_default(),
                key: message.key().map(text),
                bytes: message.payload().map_or(0, <[u8]>::len) + message.key().map_or(0, <[u8]>::len),
                reason: code.to_string(),
            }
        }
        _ => DeliveryError::Other(format!("Kafka did not take an event: {error}")),
    }
}

impl Producer {
    /// Builds the producer, and asks the brokers about the topics beside it.
    ///
    /// The producer comes first, with the limits that topics usually have, because librdkafka needs
    /// half a second for its producer id (it asks before a broker is connected, and again 500 ms
    /// later); for topics with other limits it is built again. `one_by_one`: each record is acknowledged
    /// before the next one is sent, to find the one that a broker refuses.
    ///
    /// # Errors
    /// As [`preflight`].
    pub async fn connect(
        kafka: &Kafka,
        worker: &Worker,
        topics: Vec<String>,
        one_by_one: bool,
    ) -> Result<(Self, Preflight)> {
        let usual = Limits { smallest: Some(USUAL_LIMIT_BYTES), largest: Some(USUAL_LIMIT_BYTES) };
        let mut config = producer_config(kafka, worker, usual)?;
        let mut reports = Queue::asking();
        let inner = config.create_with_context(Reports(Arc::clone(&reports))).map_err(property_error)?;
        let (mut inner, facts) = ask_brokers(inner, &reports, kafka, topics).await?;
        let limits = Limits::of(&facts.topics);
        let fitting = producer_config(kafka, worker, limits)?;
        if fitting.config_map() != config.config_map() {
            config = fitting;
            reports = Arc::default();
            let other = config.create_with_context(Reports(Arc::clone(&reports))).map_err(property_error)?;
            let unfit = std::mem::replace(&mut inner, other);
            tokio::task::spawn_blocking(move || drop(unfit));
        }
        *reports.said() = None;
        let max_message_bytes =
            config.get("message.max.bytes").and_then(|n| n.parse().ok()).unwrap_or(1_000_000);
        let alone_over_bytes = if one_by_one { 0 } else { limits.smallest.unwrap_or(1_000_000) };
        let knows_limits = limits.smallest.is_some();
        Ok((
            Producer {
                inner: Some(Arc::new(inner)),
                reports,
                max_message_bytes,
                alone_over_bytes,
                knows_limits,
            },
            facts,
        ))
    }

    fn inner(&self) -> &ThreadedProducer<Reports> {
        self.inner.as_ref().expect("there until it is dropped")
    }

    /// Hands a record to librdkafka, which copies it.
    ///
    /// # Errors
    /// See [`SendError`].
    pub fn send(&self, seq: Seq, record: &Record<'_>) -> Result<(), SendError> {
        let mut headers = OwnedHeaders::new_with_capacity(record.headers.len());
        for (key, value) in &record.headers {
            headers = headers.insert(Header { key, value: *value });
        }
        let mut base = BaseRecord::<[u8], [u8], usize>::with_opaque_to(record.topic, seq as usize)
            .partition(record.partition)
            .key(record.key)
            .headers(headers);
        if let Some(value) = record.value {
            base = base.payload(value);
        }
        if let Some(timestamp) = record.timestamp_ms {
            base = base.timestamp(timestamp);
        }
        self.inner().send(base).map_err(|(error, _)| match error.rdkafka_error_code() {
            Some(RDKafkaErrorCode::QueueFull) => SendError::QueueFull,
            Some(RDKafkaErrorCode::MessageSizeTooLarge) => SendError::TooLarge,
            _ => SendError::Other(match self.inner().client().fatal_error() {
                Some((code, reason)) => format!("{code}: {reason}"),
                None => error.to_string(),
            }),
        })
    }

    /// Whether Kafka answers, asked now and then for as long as the producer lives: a broker that
    /// freezes while nothing is in flight shows in no other way.
    pub fn watch(&self, topic: String) -> watch::Receiver<bool> {
        let (told, answers) = watch::channel(true);
        let producer = self.inner.as_ref().map(Arc::downgrade).unwrap_or_default();
        tokio::spawn(async move {
            let mut interval = WATCH_INTERVAL;
            loop {
                tokio::time::sleep(interval).await;
                let Some(producer) = producer.upgrade() else { return };
                let topic = topic.clone();
                let asked = tokio::task::spawn_blocking(move || {
                    producer.client().fetch_metadata(Some(&topic), ASK_TIMEOUT).is_ok()
                });
                let answered = asked.await.unwrap_or(false);
                told.send_if_modified(|before| std::mem::replace(before, answered) != answered);
                interval = if answered { WATCH_INTERVAL } else { WATCH_INTERVAL_SILENT };
            }
        });
        answers
    }

    /// Waits until there are reports; cancel-safe.
    pub async fn reported(&self) {
        self.reports.ready.notified().await;
    }

    /// Takes all reports that are there, in the order in which they came.
    pub fn take_reports(&self, into: &mut Vec<Report>) {
        let mut reports = self.reports.reports.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        into.append(&mut reports);
    }

    /// Stops sending: drops what is queued and forgets what is in flight.
    pub fn purge(&self) {
        self.inner().purge(PurgeConfig::default().queue().inflight());
    }
}

/// `max.message.bytes` of a topic whose broker has the default.
const USUAL_LIMIT_BYTES: usize = 1_048_588;

/// The least and the greatest `max.message.bytes` of the topics, as far as they are known.
#[derive(Clone, Copy)]
struct Limits {
    smallest: Option<usize>,
    largest: Option<usize>,
}

impl Limits {
    fn of(topics: &BTreeMap<String, TopicFacts>) -> Self {
        let known = || topics.values().filter_map(|t| t.max_message_bytes);
        Limits { smallest: known().min(), largest: known().max() }
    }
}

fn producer_config(kafka: &Kafka, worker: &Worker, limits: Limits) -> Result<ClientConfig> {
    let mut config = client_config(kafka)?;
    defaults(&mut config, worker, limits);
    for (name, value) in &kafka.properties {
        config.set(name, value);
    }
    if let (Some(limit), Some(given)) = (limits.smallest, kafka.properties.get("batch.size"))
        && given.parse::<usize>().is_ok_and(|given| given > limit)
    {
        config.set("batch.size", limit.to_string()); // a batch over the limit fails as a whole
    }
    fixed(&mut config);
    Ok(config)
}

/// What every client of ours begins with.
///
/// # Errors
/// When the password file cannot be read.
pub fn client_config(kafka: &Kafka) -> Result<ClientConfig> {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", &kafka.brokers).set("client.id", "outbox-tailer");
    config.set("socket.keepalive.enable", "true").set("allow.auto.create.topics", "false");
    // A client whose linger.ms is larger than this would not be made at all.
    config.set("message.timeout.ms", "0");
    // Reconnect quickly at first, so that a broker's restart costs little.
    config.set("reconnect.backoff.ms", "50").set("reconnect.backoff.max.ms", "2000");
    if let Some(password) = kafka.sasl_password()? {
        config.set("sasl.password", password.reveal());
    }
    config.set_log_level(RDKafkaLogLevel::Warning);
    Ok(config)
}

/// What the operator may change.
fn defaults(config: &mut ClientConfig, worker: &Worker, limits: Limits) {
    let largest = limits.largest.unwrap_or(1_000_000).max(1_000_000);
    config
        .set("linger.ms", "0")
        // Room for the key and headers beside the value that the broker's limit is about.
        .set("message.max.bytes", (largest + 4096).min(1_000_000_000).to_string())
        .set("batch.size", limits.smallest.unwrap_or(1_000_000).min(1_000_000).to_string())
        // The window bounds what is in flight; reports may lag behind it.
        .set(
            "queue.buffering.max.messages",
            worker.window_events.saturating_mul(2).clamp(1000, 2_000_000).to_string(),
        )
        .set(
            "queue.buffering.max.kbytes",
            (worker.window_bytes / 1024 * 2 + 1_048_576).min(2_097_151).to_string(),
        )
        .set("max.in.flight.requests.per.connection", "5");
}

/// What the promise rests on (librdkafka, CONFIGURATION.md).
fn fixed(config: &mut ClientConfig) {
    config
        .set("acks", "all")
        .set("enable.idempotence", "true")
        // Without it librdkafka goes on after a permanent failure, and a replay inverts a key.
        .set("enable.gapless.guarantee", "true")
        // Never give a message up because of time: the stream waits, and says so.
        .set("message.timeout.ms", "0");
}

/// What the brokers say about a topic.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TopicFacts {
    pub partitions: i32,
    /// `max.message.bytes`; `None` where its configuration may not be read.
    pub max_message_bytes: Option<usize>,
}

#[derive(Debug)]
pub struct Preflight {
    pub cluster: String,
    pub topics: BTreeMap<String, TopicFacts>,
}

/// Asks the brokers for the cluster id and the topics.
///
/// # Errors
/// A wait when no broker answers, a topic is missing or may not be seen; a mistake for a property
/// that librdkafka refuses.
pub async fn preflight(kafka: &Kafka, topics: Vec<String>) -> Result<Preflight> {
    let mut config = client_config(kafka)?;
    for (name, value) in &kafka.properties {
        config.set(name, value);
    }
    let reports = Queue::asking();
    let client = config.create_with_context(Reports(Arc::clone(&reports))).map_err(property_error)?;
    let (client, facts) = ask_brokers(client, &reports, kafka, topics).await?;
    tokio::task::spawn_blocking(move || drop(client));
    Ok(facts)
}

/// Gives the client back, because librdkafka's metadata calls block, and so does destroying a client.
async fn ask_brokers(
    client: ThreadedProducer<Reports>,
    reports: &Arc<Queue>,
    kafka: &Kafka,
    mut topics: Vec<String>,
) -> Result<(ThreadedProducer<Reports>, Preflight)> {
    // Tables may share a topic; brokers refuse a request that names one twice.
    topics.sort_unstable();
    topics.dedup();
    let (brokers, names, reports) = (kafka.brokers.clone(), topics.clone(), Arc::clone(reports));
    let asked = tokio::task::spawn_blocking(move || {
        let answer = ask(client.client(), &brokers, &names, &reports);
        answer.map(|answer| (client, answer))
    });
    let hangs = |_| Error::wait(format!("no answer from Kafka at {}", kafka.brokers));
    let asked = async {
        let asked = tokio::time::timeout(PREFLIGHT_TIMEOUT, asked).await.map_err(hangs)?;
        asked.map_err(|e| Error::bug("the Kafka preflight").because(e))?
    };
    let limits =
        async { if kafka.knows_limits { describe(kafka, &topics).await } else { Ok(BTreeMap::new()) } };
    let (asked, limits) = tokio::join!(asked, limits);
    // What is wrong with the topics says more than why their limits are not known.
    let ((client, (cluster, partitions)), limits) = (asked?, limits?);
    let topics = partitions
        .into_iter()
        .map(|(name, partitions)| {
            let max_message_bytes = limits.get(&name).copied();
            (name, TopicFacts { partitions, max_message_bytes })
        })
        .collect();
    Ok((client, Preflight { cluster, topics }))
}

fn ask(
    client: &Client<Reports>,
    brokers: &str,
    topics: &[String],
    reports: &Queue,
) -> Result<(String, BTreeMap<String, i32>)> {
    let unreachable = |what: &str, e: KafkaError| {
        let detail = match reports.said().as_deref() {
            None | Some("") => String::new(),
            Some(said) => format!(" ({said})"),
        };
        Error::wait(format!("no answer from Kafka at {brokers}, {what}{detail}")).because(e)
    };
    let mut partitions = BTreeMap::new();
    for topic in topics {
        let metadata = client
            .fetch_metadata(Some(topic), ASK_TIMEOUT)
            .map_err(|e| unreachable("asked for its topics", e))?;
        let found = metadata.topics().iter().find(|t| t.name() == topic);
        let error = found.and_then(|t| t.error()).map(RDKafkaErrorCode::from);
        match (found, error) {
            (Some(found), None) if !found.partitions().is_empty() => {
                let count = i32::try_from(found.partitions().len()).unwrap_or(i32::MAX);
                partitions.insert(topic.clone(), count);
            }
            (_, Some(RDKafkaErrorCode::TopicAuthorizationFailed)) => {
                return Err(Error::wait(format!(
                    "Kafka does not let this user see topic {topic} (Describe and Write are needed)"
                )));
            }
            (_, Some(error)) if error != RDKafkaErrorCode::UnknownTopicOrPartition => {
                return Err(Error::wait(format!("topic {topic}: {error}")));
            }
            _ => {
                return Err(Error::wait(format!(
                    "topic {topic} does not exist on Kafka at {brokers}; create it, it is not created here"
                )));
            }
        }
    }
    let cluster = client
        .fetch_cluster_id(ASK_TIMEOUT)
        .ok_or_else(|| Error::wait(format!("Kafka at {brokers} does not tell its cluster id")))?;
    Ok((cluster, partitions))
}

/// `max.message.bytes` of each topic; unknown where describing configurations is denied.
///
/// # Errors
/// A wait when the broker does not answer: without the limits a batch of small records could be
/// larger than the topic takes.
async fn describe(kafka: &Kafka, topics: &[String]) -> Result<BTreeMap<String, usize>> {
    let admin = admin(kafka)?;
    let resources: Vec<ResourceSpecifier<'_>> = topics.iter().map(|t| ResourceSpecifier::Topic(t)).collect();
    let options = AdminOptions::new().request_timeout(Some(ASK_TIMEOUT));
    let failed = |e| {
        Error::wait(format!("no answer from Kafka at {}, asked for its topics' size limits", kafka.brokers))
            .because(e)
    };
    let described = admin.describe_configs(&resources, &options).await;
    tokio::task::spawn_blocking(move || drop(admin));
    let described = described.map_err(failed)?;
    let limit = |resource: &ConfigResource| resource.get("max.message.bytes")?.value.as_ref()?.parse().ok();
    let mut limits = BTreeMap::new();
    for (topic, result) in topics.iter().zip(described) {
        match result {
            Ok(resource) => drop(limit(&resource).map(|limit| limits.insert(topic.clone(), limit))),
            Err(e) => tracing::warn!(topic, error = %e, "cannot read the topic's size limit"),
        }
    }
    Ok(limits)
}

pub fn property_error(e: KafkaError) -> Error {
    let text = match &e {
        // Without the value, which may be a secret.
        KafkaError::ClientConfig(_, reason, name, _) => {
            format!("kafka.properties: {name}: {}", reason.trim())
        }
        other => format!("kafka: {other}"),
    };
    Error::new(Kind::Mistake, text)
}

/// What a changed cluster or topic means for the recorded placement of keys.
///
/// # Errors
/// A refusal for another cluster or for a topic with fewer partitions than recorded.
pub fn check_placement(
    recorded_cluster: Option<&str>,
    recorded: &BTreeMap<String, i32>,
    now: &Preflight,
) -> Result<BTreeMap<String, i32>> {
    let clear = "run `outbox-tailer init --accept-kafka` if this is meant";
    if let Some(cluster) = recorded_cluster
        && cluster != now.cluster
    {
        return Err(Error::refusal(
            Refusal::Kafka,
            format!("this is Kafka cluster {}, the events went to {cluster}: {clear}", now.cluster),
        ));
    }
    let mut placement = BTreeMap::new();
    for (topic, facts) in &now.topics {
        let partitions = match recorded.get(topic) {
            Some(&recorded) if recorded > facts.partitions => {
                return Err(Error::refusal(
                    Refusal::Kafka,
                    format!(
                        "topic {topic} has {} partitions, keys are placed over {recorded} (was it made anew?): {clear}",
                        facts.partitions
                    ),
                ));
            }
            Some(&recorded) => {
                if recorded < facts.partitions {
                    tracing::warn!(
                        topic,
                        partitions = facts.partitions,
                        recorded,
                        "the topic has grown; keys stay where they are, over the recorded count"
                    );
                }
                recorded
            }
            None => facts.partitions,
        };
        placement.insert(topic.clone(), partitions);
    }
    Ok(placement)
}

/// For commands and the demo: an admin client with the operator's settings.
///
/// # Errors
/// A mistake for a property that librdkafka refuses.
pub fn admin(kafka: &Kafka) -> Result<AdminClient<DefaultClientContext>> {
    let mut config = client_config(kafka)?;
    for (name, value) in &kafka.properties {
        config.set(name, value);
    }
    config.create().map_err(property_error)
}
