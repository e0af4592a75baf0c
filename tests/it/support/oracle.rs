//! The topic as a plain consumer sees it, and the promise checked against what was committed.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::{Duration, Instant};

use rdkafka::admin::{
    AdminClient, AdminOptions, AlterConfig, NewPartitions, NewTopic, ResourceSpecifier, TopicReplication,
};
use rdkafka::client::DefaultClientContext;
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::message::{Headers, Message as _, Timestamp};
use rdkafka::types::RDKafkaErrorCode;
use rdkafka::{Offset, TopicPartitionList};

/// One message, byte for byte.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    pub partition: i32,
    pub offset: i64,
    pub key: Option<Vec<u8>>,
    pub value: Option<Vec<u8>>,
    pub headers: Vec<(String, Option<Vec<u8>>)>,
    pub timestamp_ms: Option<i64>,
}

impl Message {
    pub fn header(&self, name: &str) -> Option<String> {
        let value = self.headers.iter().find(|(n, _)| n == name)?.1.as_ref()?;
        Some(String::from_utf8_lossy(value).into_owned())
    }

    pub fn id(&self) -> String {
        self.header("id").expect("every message has an id")
    }

    pub fn key(&self) -> String {
        String::from_utf8_lossy(self.key.as_deref().expect("every message has a key")).into_owned()
    }

    pub fn value(&self) -> String {
        String::from_utf8_lossy(self.value.as_deref().expect("a value")).into_owned()
    }
}

pub struct Topic {
    pub brokers: String,
    pub name: String,
    pub partitions: i32,
}

impl Topic {
    pub fn create(brokers: &str, name: &str, partitions: i32, settings: &[(&str, &str)]) -> Self {
        let admin = admin(brokers);
        let mut topic = NewTopic::new(name, partitions, TopicReplication::Fixed(-1));
        for (key, value) in settings {
            topic = topic.set(key, value);
        }
        let made = futures_lite(admin.create_topics([&topic], &AdminOptions::new()));
        made.unwrap().into_iter().for_each(|result| drop(result.unwrap()));
        let topic = Topic { brokers: brokers.to_owned(), name: name.to_owned(), partitions };
        super::eventually("the topic is known", || {
            let consumer: BaseConsumer = consumer(brokers);
            let metadata = consumer.fetch_metadata(Some(name), Duration::from_secs(5)).ok()?;
            (metadata.topics()[0].partitions().len() == partitions as usize).then_some(())
        });
        topic
    }

    pub fn delete(&self) {
        let _ = futures_lite(admin(&self.brokers).delete_topics(&[&self.name], &AdminOptions::new()));
    }

    /// Adds partitions.
    pub fn grow(&mut self, partitions: i32) {
        let more = NewPartitions::new(&self.name, partitions as usize);
        let made = futures_lite(admin(&self.brokers).create_partitions([&more], &AdminOptions::new()));
        made.unwrap().into_iter().for_each(|result| drop(result.unwrap()));
        self.partitions = partitions;
        super::eventually("the topic has grown", || {
            let consumer: BaseConsumer = consumer(&self.brokers);
            let metadata = consumer.fetch_metadata(Some(&self.name), Duration::from_secs(5)).ok()?;
            (metadata.topics()[0].partitions().len() == partitions as usize).then_some(())
        });
    }

    /// Changes a setting of the topic.
    pub fn set(&self, name: &str, value: &str) {
        let change = AlterConfig::new(ResourceSpecifier::Topic(&self.name)).set(name, value);
        let made = futures_lite(admin(&self.brokers).alter_configs([&change], &AdminOptions::new()));
        made.unwrap().into_iter().for_each(|result| drop(result.unwrap()));
    }

    pub fn exists(&self) -> bool {
        let consumer: BaseConsumer = consumer(&self.brokers);
        let metadata = consumer.fetch_metadata(Some(&self.name), Duration::from_secs(5));
        metadata.is_ok_and(|m| m.topics().iter().any(|t| t.name() == self.name && !t.partitions().is_empty()))
    }

    /// The offset after the last message of each partition.
    pub fn ends(&self) -> Vec<i64> {
        // A broker that has just come back may not lead its partitions yet.
        super::eventually("every partition has a leader", || {
            let consumer: BaseConsumer = consumer(&self.brokers);
            let limit = Duration::from_secs(20);
            let end = |p| consumer.fetch_watermarks(&self.name, p, limit).ok().map(|(_, end)| end);
            (0..self.partitions).map(end).collect()
        })
    }

    /// How many messages are in the topic.
    pub fn count(&self) -> i64 {
        self.ends().iter().sum()
    }

    /// Everything that is in the topic now.
    pub fn read(&self) -> Vec<Message> {
        let mut reader = Reader::new(self);
        reader.read_to(&self.ends());
        reader.messages
    }

    /// Waits until so many messages are there, and gives everything read, by partition and offset.
    pub fn wait_for_count(&self, count: usize) -> Vec<Message> {
        let mut reader = Reader::new(self);
        super::eventually(&format!("{count} messages are in {}", self.name), || {
            reader.poll();
            (reader.messages.len() >= count).then_some(())
        });
        reader.read_to(&self.ends());
        reader.messages.sort_by_key(|m| (m.partition, m.offset));
        reader.messages
    }

    /// Waits until every id is there, and gives everything read.
    pub fn wait_for<'a>(&self, ids: impl IntoIterator<Item = &'a String>) -> Vec<Message> {
        self.wait_for_within(ids, Duration::from_secs(120))
    }

    pub fn wait_for_within<'a>(
        &self,
        ids: impl IntoIterator<Item = &'a String>,
        limit: Duration,
    ) -> Vec<Message> {
        let mut open: HashSet<String> = ids.into_iter().cloned().collect();
        let mut reader = Reader::new(self);
        let deadline = Instant::now() + limit;
        let mut seen = 0;
        while !open.is_empty() {
            let some: Vec<_> = open.iter().take(3).collect();
            assert!(Instant::now() < deadline, "{} ids are not in the topic, such as {some:?}", open.len());
            reader.poll();
            for message in &reader.messages[seen..] {
                open.remove(&message.id());
            }
            seen = reader.messages.len();
        }
        reader.read_to(&self.ends());
        reader.messages
    }
}

/// Asks for the offset after the last message of each partition, in one request.
pub struct Ends {
    consumer: BaseConsumer,
    partitions: TopicPartitionList,
}

impl Ends {
    pub fn new(topic: &Topic) -> Self {
        let mut partitions = TopicPartitionList::new();
        for partition in 0..topic.partitions {
            partitions.add_partition_offset(&topic.name, partition, Offset::End).unwrap();
        }
        Ends { consumer: consumer(&topic.brokers), partitions }
    }

    /// `None` when Kafka does not answer.
    pub fn now(&self) -> Option<Vec<i64>> {
        let found = self.consumer.offsets_for_times(self.partitions.clone(), Duration::from_secs(2)).ok()?;
        found.elements().iter().map(|partition| partition.offset().to_raw().filter(|end| *end >= 0)).collect()
    }
}

/// Reads a topic from its beginning.
pub struct Reader {
    consumer: BaseConsumer,
    pub messages: Vec<Message>,
    next: Vec<i64>,
}

impl Reader {
    pub fn new(topic: &Topic) -> Self {
        let consumer: BaseConsumer = consumer(&topic.brokers);
        let mut from = TopicPartitionList::new();
        for partition in 0..topic.partitions {
            from.add_partition_offset(&topic.name, partition, Offset::Beginning).unwrap();
        }
        consumer.assign(&from).unwrap();
        Reader { consumer, messages: Vec::new(), next: vec![0; topic.partitions as usize] }
    }

    pub fn poll(&mut self) {
        match self.consumer.poll(Duration::from_millis(100)) {
            None => {}
            Some(Err(e)) => {
                let fatal = e.rdkafka_error_code() == Some(RDKafkaErrorCode::Fatal);
                assert!(!fatal, "the consumer: {e}");
            }
            Some(Ok(message)) => {
                let headers = message.headers().map_or_else(Vec::new, |headers| {
                    headers.iter().map(|h| (h.key.to_owned(), h.value.map(<[u8]>::to_vec))).collect()
                });
                self.next[message.partition() as usize] = message.offset() + 1;
                self.messages.push(Message {
                    partition: message.partition(),
                    offset: message.offset(),
                    key: message.key().map(<[u8]>::to_vec),
                    value: message.payload().map(<[u8]>::to_vec),
                    headers,
                    timestamp_ms: match message.timestamp() {
                        Timestamp::CreateTime(ms) => Some(ms),
                        _ => None,
                    },
                });
            }
        }
    }

    fn read_to(&mut self, ends: &[i64]) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while self.next.iter().zip(ends).any(|(next, end)| next < end) {
            assert!(
                Instant::now() < deadline,
                "the consumer does not reach {ends:?}, it is at {:?}",
                self.next
            );
            self.poll();
        }
    }
}

/// Partitions that the broker at this port leads; `None` when nobody says, or one has no leader.
pub fn led_by(topic: &Topic, port: u16) -> Option<Vec<i32>> {
    let consumer: BaseConsumer = consumer(&topic.brokers);
    let metadata = consumer.fetch_metadata(Some(&topic.name), Duration::from_secs(5)).ok()?;
    let broker = metadata.brokers().iter().find(|b| b.port() == i32::from(port)).map(|b| b.id());
    let partitions = metadata.topics()[0].partitions();
    let led = partitions.iter().filter(|p| Some(p.leader()) == broker).map(|p| p.id()).collect();
    partitions.iter().all(|p| p.leader() >= 0).then_some(led)
}

/// How many replicas of the topic's worst partition are in sync; `None` when nobody says.
pub fn replicas_in_sync(topic: &Topic) -> Option<usize> {
    let consumer: BaseConsumer = consumer(&topic.brokers);
    let metadata = consumer.fetch_metadata(Some(&topic.name), Duration::from_secs(5)).ok()?;
    metadata.topics()[0].partitions().iter().map(|p| p.isr().len()).min()
}

pub fn consumer<C>(brokers: &str) -> C
where
    C: rdkafka::config::FromClientConfig,
{
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", brokers).set("group.id", "oracle").set("enable.auto.commit", "false");
    config
        .set("socket.timeout.ms", "5000")
        .set("fetch.wait.max.ms", "50")
        .set("reconnect.backoff.max.ms", "500");
    config.set("fetch.error.backoff.ms", "50").set_log_level(rdkafka::config::RDKafkaLogLevel::Emerg);
    config.create().unwrap()
}

fn admin(brokers: &str) -> AdminClient<DefaultClientContext> {
    ClientConfig::new().set("bootstrap.servers", brokers).create().unwrap()
}

/// Blocks on one future.
fn futures_lite<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

/// One committed row, as a slot of the test's own streams it.
#[derive(Debug, Clone)]
pub struct Event {
    pub key: String,
    pub id: String,
    /// End of its commit.
    pub end_lsn: u64,
}

/// What was committed, in commit order.
#[derive(Debug, Clone, Default)]
pub struct Committed {
    pub events: Vec<Event>,
}

impl Committed {
    pub fn ids(&self) -> impl Iterator<Item = &String> {
        self.events.iter().map(|event| &event.id)
    }
}

/// What the check found beside violations, which it panics on.
#[derive(Debug)]
pub struct Verdict {
    pub repeats: usize,
}

/// The promise: every committed id is there, no other, and for each key the first occurrences are
/// in commit order.
pub fn check(committed: &Committed, messages: &[Message]) -> Verdict {
    let found = judge(committed, messages);
    found.assert_so_far();
    let lost = &found.lost;
    assert!(lost.is_empty(), "{} events were lost, such as {:?}", lost.len(), &lost[..lost.len().min(3)]);
    Verdict { repeats: found.repeats }
}

/// What must hold at every moment: no id is there that was not committed, and for each key the first
/// occurrences are the first that were committed, in that order. Gives the number of repeats.
pub fn check_so_far(committed: &Committed, messages: &[Message]) -> usize {
    let found = judge(committed, messages);
    found.assert_so_far();
    found.repeats
}

/// The topic against what was committed, as event ids.
#[derive(Debug, Default)]
pub struct Findings {
    /// Committed and not there; before the end these may still come, unless they are skipped.
    pub lost: Vec<String>,
    /// Not there, although a later event of their key is.
    pub skipped: Vec<String>,
    /// There for the first time after a later event of their key, or in another partition than it.
    pub inverted: Vec<String>,
    /// There and never committed, or under a key that is not theirs.
    pub invented: Vec<String>,
    /// Second and further occurrences.
    pub repeats: usize,
}

impl Findings {
    fn assert_so_far(&self) {
        for (what, ids) in [
            ("were never committed", &self.invented),
            ("are out of order or in another partition", &self.inverted),
            ("are not there, but later ones of their keys are", &self.skipped),
        ] {
            assert!(ids.is_empty(), "{} events {what}, such as {:?}", ids.len(), &ids[..ids.len().min(3)]);
        }
    }
}

pub fn judge(committed: &Committed, messages: &[Message]) -> Findings {
    let mut found = Findings::default();
    let mut wanted: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    let mut places: HashMap<&str, (&str, usize)> = HashMap::new();
    for event in &committed.events {
        let of_key = wanted.entry(&event.key).or_default();
        let before = places.insert(&event.id, (&event.key, of_key.len()));
        assert!(before.is_none(), "id {} was committed twice", event.id);
        of_key.push(&event.id);
    }
    let mut sorted: Vec<&Message> = messages.iter().collect();
    sorted.sort_by_key(|m| (m.partition, m.offset));
    let mut seen: HashSet<&str> = HashSet::new();
    // For each key the place after the furthest event so far, and the partition of its first.
    let mut reached: HashMap<&str, (usize, i32)> = HashMap::new();
    for message in sorted {
        let id = message.id();
        let Some((&known, &(key, place))) = places.get_key_value(id.as_str()) else {
            found.invented.push(id);
            continue;
        };
        if message.key() != key {
            found.invented.push(id);
            continue;
        }
        let (next, home) = reached.entry(key).or_insert((0, message.partition));
        let (is_first, moved) = (seen.insert(known), *home != message.partition);
        found.repeats += usize::from(!is_first);
        if moved || (is_first && place < *next) {
            found.inverted.push(id);
        }
        *next = (*next).max(place + 1);
    }
    for (key, ids) in &wanted {
        let next = reached.get(key).map_or(0, |(next, _)| *next);
        for (place, id) in ids.iter().enumerate().filter(|(_, id)| !seen.contains(*id)) {
            found.lost.push((*id).to_owned());
            if place < next {
                found.skipped.push((*id).to_owned());
            }
        }
    }
    found
}
