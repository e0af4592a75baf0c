//! The witness: a small record outside the database that says how far this slot has been published.
//!
//! The position row lives in the WAL that it describes, so whatever survives a failover or a
//! restore holds a row that fits it, and only something outside can show that published events are
//! gone. The record is written after the row is committed and before the slot is told.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rdkafka::admin::{AdminOptions, NewTopic, TopicReplication};
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::Message;
use rdkafka::producer::{FutureProducer, FutureRecord};
use rdkafka::{ClientContext, Offset, TopicPartitionList};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use crate::config::{Config, Kafka, Witness as Settings};
use crate::error::{Error, Refusal, Result};
use crate::kafka;
use crate::relay::Lsn;
use crate::startcheck::Held;

const ASK_TIMEOUT: Duration = Duration::from_secs(5);
/// How many of the topic's last records are looked through first; then ten times as many.
const TAIL_RECORDS: i64 = 1_000;

/// What the witness holds of one slot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    pub slot: String,
    pub system_identifier: String,
    pub timeline: u32,
    /// (timeline, LSN at which it was left), oldest first.
    #[serde(with = "switches")]
    pub history: Vec<(u32, Lsn)>,
    /// Everything at or below is acknowledged, and was in the position row.
    #[serde(with = "text")]
    pub position: Lsn,
    pub epoch: i64,
    /// Who took the slot for that epoch, as in the position row.
    pub instance: String,
}

impl Record {
    /// A copy of a database has the identity of the original, and so meets its record.
    fn key(slot: &str, system_identifier: &str) -> String {
        format!("{system_identifier}/{slot}")
    }

    /// Of two records the greater one counts: one of a worker that was held up, written after another
    /// worker has taken the slot, would take the witness back.
    fn rank(&self) -> (i64, u32, Lsn) {
        (self.epoch, self.timeline, self.position)
    }

    fn parse(bytes: &[u8]) -> Option<Record> {
        serde_json::from_slice(bytes).ok()
    }
}

/// Which of two records of a slot counts: the greater one; what cannot be read, only while nothing
/// readable follows, so that somebody hears of it.
pub fn greater(one: Option<Vec<u8>>, next: Vec<u8>) -> Vec<u8> {
    let rank = |bytes: &[u8]| Record::parse(bytes).map(|record| record.rank());
    match one {
        Some(one) if rank(&next).is_some() && rank(&one) > rank(&next) => one,
        _ => next,
    }
}

impl From<Record> for Held {
    fn from(record: Record) -> Self {
        Held {
            system_identifier: record.system_identifier,
            timeline: record.timeline,
            history: record.history,
            lsn: record.position,
            requested: None,
            epoch: record.epoch,
            instance: record.instance,
        }
    }
}

mod text {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub fn serialize<S: Serializer>(lsn: &super::Lsn, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(lsn)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<super::Lsn, D::Error> {
        String::deserialize(from)?.parse().map_err(|_| D::Error::custom("no LSN"))
    }
}

mod switches {
    use serde::ser::SerializeSeq;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub fn serialize<S: Serializer>(history: &[(u32, super::Lsn)], to: S) -> Result<S::Ok, S::Error> {
        let mut list = to.serialize_seq(Some(history.len()))?;
        for (timeline, lsn) in history {
            list.serialize_element(&(timeline, lsn.to_string()))?;
        }
        list.end()
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<(u32, super::Lsn)>, D::Error> {
        let list = Vec::<(u32, String)>::deserialize(from)?;
        let parse = |(timeline, lsn): (u32, String)| Some((timeline, lsn.parse().ok()?));
        list.into_iter().map(parse).collect::<Option<_>>().ok_or_else(|| D::Error::custom("no LSN"))
    }
}

/// Reads the record of a slot; `None` where there is no witness, or none of this slot yet.
///
/// # Errors
/// A wait when it cannot be asked, a refusal when what is there cannot be read.
pub async fn read(config: &Config, system_identifier: &str) -> Result<Option<Record>> {
    let slot = &config.postgres.slot;
    let bytes = match &config.witness {
        Settings::None => None,
        Settings::File(path) => read_file(path)?,
        Settings::Kafka { topic } => {
            let (kafka, topic) = (config.kafka.clone(), topic.clone());
            let key = Record::key(slot, system_identifier);
            tokio::task::spawn_blocking(move || read_topic(&kafka, &topic, &key))
                .await
                .map_err(|e| Error::bug("reading the witness").because(e))??
        }
    };
    let Some(bytes) = bytes else { return Ok(None) };
    let record: Record = serde_json::from_slice(&bytes).map_err(|e| {
        Error::refusal(Refusal::Identity, format!("the witness of slot {slot} cannot be read")).because(e)
    })?;
    // A file that another slot's worker writes.
    if record.slot != *slot {
        return Err(Error::mistake(format!(
            "the witness is that of slot {}, not of {slot}: each worker needs a file of its own",
            record.slot
        )));
    }
    Ok((record.system_identifier == system_identifier).then_some(record))
}

/// Makes sure that the witness can be written; for `init`. Gives what was made.
///
/// # Errors
/// A wait when Kafka does not answer, a mistake when it does not let us.
pub async fn prepare(config: &Config) -> Result<Option<String>> {
    let topic = match &config.witness {
        Settings::Kafka { topic } => topic,
        Settings::None => return Ok(None),
        Settings::File(path) => {
            let beside = beside(path, &config.postgres.slot);
            let tried = std::fs::File::create(&beside).and_then(|_| std::fs::remove_file(&beside));
            return tried
                .map(|()| None)
                .map_err(|e| unavailable(&format!("{} cannot be written", path.display()), e));
        }
    };
    let admin = kafka::admin(&config.kafka)?;
    let made = async {
        // The broker's own replication factor; one partition, because one reader reads it all.
        let new = NewTopic::new(topic, 1, TopicReplication::Fixed(-1))
            .set("cleanup.policy", "compact")
            .set("segment.bytes", "1048576")
            .set("min.cleanable.dirty.ratio", "0.1");
        let options = AdminOptions::new().request_timeout(Some(ASK_TIMEOUT));
        let unanswered = |e| Error::wait(format!("Kafka does not make topic {topic}, the witness")).because(e);
        let results = admin.create_topics([&new], &options).await.map_err(unanswered)?;
        match results.into_iter().next() {
            Some(Ok(_)) => {
                become_known(&config.kafka, topic).await?;
                Ok(Some(format!("made topic {topic}, the witness")))
            }
            Some(Err((_, RDKafkaErrorCode::TopicAlreadyExists))) => {
                become_known(&config.kafka, topic).await?; // another `init` may have made it just now
                Ok(None)
            }
            Some(Err((_, code))) => Err(Error::mistake(format!(
                "Kafka does not make topic {topic}, the witness: {code}; make it by hand (one partition, cleanup.policy=compact), or set witness.kind"
            ))),
            None => Err(Error::bug("no answer to CreateTopics")),
        }
    }
    .await;
    tokio::task::spawn_blocking(move || drop(admin));
    made
}

/// A topic is made before every broker knows it.
async fn become_known(kafka: &Kafka, topic: &str) -> Result<()> {
    let mut tries = 0;
    while let Err(e) = kafka::preflight(kafka, vec![topic.to_owned()]).await {
        tries += 1;
        if tries == 50 {
            return Err(e);
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    Ok(())
}

fn unavailable(what: &str, e: impl std::error::Error + Send + Sync + 'static) -> Error {
    Error::wait(format!("the witness {what}")).because(e)
}

fn read_file(path: &Path) -> Result<Option<Vec<u8>>> {
    match std::fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(unavailable(&format!("{} cannot be read", path.display()), e)),
    }
}

type Reader = BaseConsumer<Quiet>;

/// Each error comes as a result, too.
struct Quiet;

impl ClientContext for Quiet {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, message: &str) {
        tracing::debug!(?level, facility, message, "librdkafka");
    }

    fn error(&self, error: KafkaError, reason: &str) {
        tracing::debug!(%error, reason, "Kafka");
    }
}

impl ConsumerContext for Quiet {}

/// The record of the key in the topic's only partition.
fn read_topic(kafka: &Kafka, topic: &str, key: &str) -> Result<Option<Vec<u8>>> {
    let mut config = kafka::client_config(kafka)?;
    for (name, value) in &kafka.properties {
        config.set(name, value);
    }
    config.set("group.id", "outbox-tailer-witness").set("enable.auto.commit", "false");
    config.set("enable.partition.eof", "true").set("isolation.level", "read_uncommitted");
    let failed = |e: KafkaError| unavailable(&format!("topic {topic} cannot be read"), e);
    let consumer: Reader = config.create_with_context(Quiet).map_err(failed)?;
    let (low, high) = match consumer.fetch_watermarks(topic, 0, ASK_TIMEOUT) {
        Ok(marks) => marks,
        Err(e)
            if e.rdkafka_error_code() == Some(RDKafkaErrorCode::UnknownPartition)
                || e.rdkafka_error_code() == Some(RDKafkaErrorCode::UnknownTopicOrPartition)
                || e.rdkafka_error_code() == Some(RDKafkaErrorCode::UnknownTopic) =>
        {
            return Err(Error::wait(format!(
                "topic {topic}, the witness, does not exist: run `outbox-tailer init`, or set witness.kind"
            )));
        }
        Err(e) => return Err(failed(e)),
    };
    let mut from = high;
    let mut tail = TAIL_RECORDS;
    while from > low {
        let end = from;
        from = (high - tail).max(low);
        tail = tail.saturating_mul(10);
        if let Some(found) = scan(&consumer, topic, key, from, end).map_err(failed)? {
            return Ok(found);
        }
    }
    Ok(None)
}

/// The record of the key that counts (`Some(None)`: deleted by a tombstone) at offsets `from..end`. The topic's compaction keeps the last one, but
/// only of closed segments; by then whoever has the slot has written again.
fn scan(
    consumer: &Reader,
    topic: &str,
    key: &str,
    from: i64,
    end: i64,
) -> Result<Option<Option<Vec<u8>>>, KafkaError> {
    let mut at = TopicPartitionList::new();
    at.add_partition_offset(topic, 0, Offset::Offset(from))?;
    consumer.assign(&at)?;
    let mut found: Option<Option<Vec<u8>>> = None;
    let mut silent = 0;
    loop {
        match consumer.poll(ASK_TIMEOUT) {
            None if silent < 3 => silent += 1,
            None => return Err(KafkaError::MessageConsumption(RDKafkaErrorCode::OperationTimedOut)),
            Some(Err(KafkaError::PartitionEOF(_))) => return Ok(found),
            Some(Err(e)) => return Err(e),
            Some(Ok(message)) if message.offset() >= end => return Ok(found),
            Some(Ok(message)) => {
                silent = 0;
                if message.key() == Some(key.as_bytes()) {
                    let next = message.payload().map(<[u8]>::to_vec);
                    found = Some(next.map(|next| greater(found.flatten(), next)));
                }
                if message.offset() + 1 >= end {
                    return Ok(found);
                }
            }
        }
    }
}

/// Writes one record, safe from a crash when it returns.
///
/// # Errors
/// A wait.
pub async fn write(writer: &Writer, record: &Record) -> Result<()> {
    let bytes = serde_json::to_vec(record).map_err(|e| Error::bug("the witness").because(e))?;
    match writer {
        Writer::File(path) => {
            let there = read_file(path)?.and_then(|there| serde_json::from_slice::<Record>(&there).ok());
            let key = |record: &Record| Record::key(&record.slot, &record.system_identifier);
            if there.is_some_and(|there| key(&there) == key(record) && there.rank() > record.rank()) {
                return Err(Error::wait("another worker has written the witness"));
            }
            let (path, shown) = (path.clone(), path.display().to_string());
            let beside = beside(&path, &record.slot);
            let written = tokio::task::spawn_blocking(move || write_file(&path, &beside, &bytes)).await;
            let written = written.map_err(|e| Error::bug("writing the witness").because(e))?;
            written.map_err(|e| unavailable(&format!("{shown} cannot be written"), e))
        }
        Writer::Kafka { producer, topic } => {
            let key = Record::key(&record.slot, &record.system_identifier);
            let message = FutureRecord::to(topic).partition(0).key(&key).payload(&bytes);
            let sent = producer.send(message, Duration::ZERO).await;
            sent.map(drop).map_err(|(e, _)| unavailable(&format!("topic {topic} cannot be written"), e))
        }
    }
}

/// New content under the old name, and on disk before it counts (POSIX rename, fsync of the folder).
fn write_file(path: &Path, beside: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let mut file = std::fs::File::create(beside)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    std::fs::rename(beside, path)?;
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    std::fs::File::open(folder)?.sync_all()
}

/// Each worker's own, whatever their files are called.
fn beside(path: &Path, slot: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{slot}.new"));
    PathBuf::from(name)
}

/// Where records are written.
#[derive(Clone)]
pub enum Writer {
    File(PathBuf),
    Kafka { producer: FutureProducer, topic: String },
}

impl Writer {
    /// `None` without a witness.
    ///
    /// # Errors
    /// A mistake for a property that librdkafka refuses.
    pub fn new(config: &Config) -> Result<Option<Self>> {
        Ok(match &config.witness {
            Settings::None => None,
            Settings::File(path) => Some(Writer::File(path.clone())),
            Settings::Kafka { topic } => {
                let mut client = kafka::client_config(&config.kafka)?;
                for (name, value) in &config.kafka.properties {
                    client.set(name, value);
                }
                // One record at a time, small, at once.
                client.set("acks", "all").set("linger.ms", "0").set("compression.type", "none");
                let producer = client.create().map_err(kafka::property_error)?;
                Some(Writer::Kafka { producer, topic: topic.clone() })
            }
        })
    }
}

/// Writes the witness in a task of its own, one record after the other.
pub struct Notary {
    pub requests: mpsc::Sender<Lsn>,
    pub results: mpsc::Receiver<Result<Lsn>>,
}

impl Notary {
    /// The task ends with the first error, or when the notary is dropped. `record` gives all but the
    /// position.
    pub fn start(writer: Writer, mut record: Record) -> Self {
        let (requests, mut wanted) = mpsc::channel::<Lsn>(1);
        let (done, results) = mpsc::channel(1);
        tokio::spawn(async move {
            while let Some(lsn) = wanted.recv().await {
                record.position = lsn;
                let written = tokio::select! {
                    written = write(&writer, &record) => written.map(|()| lsn),
                    () = done.closed() => return,
                };
                let over = written.is_err();
                if done.send(written).await.is_err() || over {
                    break;
                }
            }
            tokio::task::spawn_blocking(move || drop(writer)); // destroying a client blocks
        });
        Notary { requests, results }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_read_as_it_was_written() {
        let record = Record {
            slot: "s".into(),
            system_identifier: "7".into(),
            timeline: 3,
            history: vec![(1, "0/16B3748".parse().unwrap()), (2, "1/0".parse().unwrap())],
            position: "2/A".parse().unwrap(),
            epoch: 5,
            instance: "host:1".into(),
        };
        let json = serde_json::to_string(&record).unwrap();
        assert!(json.contains(r#""history":[[1,"0/16B3748"],[2,"1/0"]],"position":"2/A""#), "{json}");
        assert_eq!(serde_json::from_str::<Record>(&json).unwrap(), record);
    }
}
