//! The topic after a run: what arrived, and when. Topics of the benchmark take the broker's time of
//! appending, so that nobody has to read along while a contender runs.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::message::{BorrowedMessage, Headers as _, Message as _};
use rdkafka::{Offset, TopicPartitionList};

use crate::support::oracle::{self, Topic};
use crate::support::tally::Tally;

pub const PARTITIONS: i32 = 6;

/// Without a wait for more: a message can be read as soon as it is there.
pub fn consumer(brokers: &str, topic: &str) -> BaseConsumer {
    let consumer: BaseConsumer = ClientConfig::new()
        .set("bootstrap.servers", brokers)
        .set("group.id", "bench")
        .set("enable.auto.commit", "false")
        .set("fetch.min.bytes", "1")
        .set("fetch.wait.max.ms", "100")
        .create()
        .unwrap();
    let mut from = TopicPartitionList::new();
    for partition in 0..PARTITIONS {
        from.add_partition_offset(topic, partition, Offset::Beginning).unwrap();
    }
    consumer.assign(&from).unwrap();
    consumer
}

pub fn create_topic(brokers: &str, name: &str) -> Topic {
    let settings = [("message.timestamp.type", "LogAppendTime"), ("file.delete.delay.ms", "1000")];
    Topic::create(brokers, name, PARTITIONS, &settings)
}

/// Gives the number of the event.
pub fn take(tally: &mut Tally, message: &BorrowedMessage<'_>) -> Option<u64> {
    let header = |name| message.headers()?.iter().find(|h| h.key == name)?.value;
    tally.take(
        message.partition(),
        header("id").unwrap_or_default(),
        message.key().unwrap_or_default(),
        header("revision").unwrap_or_default(),
    )
}

/// Counts the messages of a topic while others work: one connection, and few questions.
pub struct Counter<'a> {
    consumer: BaseConsumer,
    topic: &'a Topic,
}

impl<'a> Counter<'a> {
    pub fn new(topic: &'a Topic) -> Self {
        Counter { consumer: oracle::consumer(&topic.brokers), topic }
    }

    /// `None` when the broker does not answer in time.
    pub fn count(&self) -> Option<u64> {
        let limit = Duration::from_secs(10);
        let end = |partition| {
            let (_, end) = self.consumer.fetch_watermarks(&self.topic.name, partition, limit).ok()?;
            u64::try_from(end).ok()
        };
        (0..self.topic.partitions).map(end).sum()
    }
}

/// How many messages were appended in each millisecond.
#[derive(Debug, Default)]
pub struct Arrivals(BTreeMap<i64, u64>);

impl Arrivals {
    /// Reads the whole topic into the tally.
    pub fn read(topic: &Topic, tally: &mut Tally) -> Self {
        let consumer = consumer(&topic.brokers, &topic.name);
        let mut arrivals = Arrivals::default();
        let mut open: u64 = topic.ends().iter().sum::<i64>().try_into().unwrap();
        let mut last_progress = Instant::now();
        while open > 0 {
            match consumer.poll(Duration::from_millis(100)) {
                Some(Ok(message)) => {
                    take(tally, &message);
                    let appended_ms = message.timestamp().to_millis().unwrap_or(0);
                    *arrivals.0.entry(appended_ms).or_default() += 1;
                    open -= 1;
                    last_progress = Instant::now();
                }
                // The oracle tells what is missing.
                _ if last_progress.elapsed() > Duration::from_secs(30) => break,
                _ => {}
            }
        }
        arrivals
    }

    /// When the `n`th message was appended, in milliseconds since 1970.
    pub fn nth_ms(&self, n: u64) -> Option<i64> {
        let mut count = 0;
        self.0.iter().find_map(|(ms, more)| {
            count += more;
            (count >= n).then_some(*ms)
        })
    }
}
