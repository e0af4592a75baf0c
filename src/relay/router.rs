//! [`OutboxEvent`] → [`Record`]: topic, partition, key, value, headers, as Debezium's outbox event
//! router makes them (with the string converter for key and value).

use super::outbox::OutboxEvent;

/// Where the events of one outbox table go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Route {
    pub topic: Topic,
    pub timestamp: Timestamp,
}

/// How the topic of an event is chosen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Topic {
    Fixed(TopicName),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TopicName {
    pub name: String,
    /// The recorded count: placement stays when the topic grows.
    pub partitions: i32,
    pub limits: Limits,
}

/// How large a record may be, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// The topic's `max.message.bytes`, for a batch as the broker gets it; `None` where its
    /// configuration may not be read.
    pub topic: Option<usize>,
    /// librdkafka's `message.max.bytes`.
    pub client: usize,
    /// Batches are compressed: only the broker can tell whether one fits the topic.
    pub compressed: bool,
}

impl std::fmt::Display for Limits {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.topic {
            Some(topic) => write!(f, "the topic's max.message.bytes is {topic}")?,
            None => write!(f, "the topic's max.message.bytes is not known")?,
        }
        write!(f, ", the client's message.max.bytes is {}", self.client)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Timestamp {
    /// The time of producing, as Debezium does.
    #[default]
    Produce,
    /// The time of the commit, by the database server's clock.
    Commit,
}

/// What goes to Kafka, borrowed from the WAL message and the mapping.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record<'a> {
    pub topic: &'a str,
    pub partition: i32,
    pub key: &'a [u8],
    /// `None`: SQL NULL, which becomes a null value (a tombstone on a compacted topic).
    pub value: Option<&'a [u8]>,
    /// `id` first. A SQL NULL is a header with a null value, as Debezium's.
    pub headers: Vec<(&'a str, Option<&'a [u8]>)>,
    /// Milliseconds since 1970-01-01 UTC; `None` leaves it to the producer.
    pub timestamp_ms: Option<i64>,
    /// Size of a batch that holds only this record: what a broker compares with the topic's
    /// `max.message.bytes` (Kafka protocol, record batch version 2).
    pub batch_bytes: usize,
}

/// Why an event can never be published as it is.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unpublishable {
    #[error("its id is NULL")]
    NullId,
    #[error("its key is NULL, and without a key there is no order to keep")]
    NullKey,
    #[error("the record takes {bytes} bytes, {limits}")]
    TooLarge { bytes: usize, limits: Limits },
    #[error("the broker refuses its {bytes} bytes of key and value: {reason}")]
    Rejected { bytes: usize, reason: String },
}

/// Name of the header that carries the event id.
pub const ID_HEADER: &str = "id";

/// # Errors
/// [`Unpublishable`], which only an operator's decision gets past.
pub fn route<'a>(
    route: &'a Route,
    event: OutboxEvent<'a>,
    commit_time_micros: i64,
) -> Result<Record<'a>, Unpublishable> {
    let id = event.id.ok_or(Unpublishable::NullId)?;
    let key = event.key.ok_or(Unpublishable::NullKey)?;
    let Topic::Fixed(topic) = &route.topic;
    let mut headers = event.headers;
    headers.insert(0, (ID_HEADER, Some(id)));
    let mut record = Record {
        topic: &topic.name,
        partition: partition(key, topic.partitions),
        key,
        value: event.payload,
        headers,
        timestamp_ms: match route.timestamp {
            Timestamp::Produce => None,
            Timestamp::Commit => Some(unix_ms(commit_time_micros)),
        },
        batch_bytes: 0,
    };
    let limits = topic.limits;
    let bytes = record.count_batch_bytes();
    record.batch_bytes = bytes;
    let over_topic = !limits.compressed && limits.topic.is_some_and(|limit| bytes > limit);
    if over_topic || record.payload_bytes() > limits.client {
        return Err(Unpublishable::TooLarge { bytes, limits });
    }
    Ok(record)
}

impl Record<'_> {
    fn count_batch_bytes(&self) -> usize {
        const BATCH_HEADER: usize = 61;
        let field = |bytes: Option<&[u8]>| {
            let len = bytes.map_or(-1, |b| b.len() as i64);
            varint_bytes(len) + bytes.map_or(0, <[u8]>::len)
        };
        let headers = varint_bytes(self.headers.len() as i64)
            + self
                .headers
                .iter()
                .map(|(name, value)| field(Some(name.as_bytes())) + field(*value))
                .sum::<usize>();
        // Attributes, timestamp delta and offset delta take a byte each in a batch of one.
        let body = 3 + field(Some(self.key)) + field(self.value) + headers;
        BATCH_HEADER + varint_bytes(body as i64) + body
    }

    /// Bytes of key, value and headers: what the window counts.
    pub fn payload_bytes(&self) -> usize {
        let headers = self.headers.iter().map(|(name, value)| name.len() + value.map_or(0, <[u8]>::len));
        self.key.len() + self.value.map_or(0, <[u8]>::len) + headers.sum::<usize>()
    }
}

/// Length of a zigzag varint.
fn varint_bytes(value: i64) -> usize {
    let zigzag = ((value << 1) ^ (value >> 63)) as u64;
    (64 - (zigzag | 1).leading_zeros() as usize).div_ceil(7)
}

/// Microseconds since 2000-01-01 → milliseconds since 1970-01-01, rounded down.
pub fn unix_ms(postgres_micros: i64) -> i64 {
    const POSTGRES_EPOCH_UNIX_MS: i64 = 946_684_800_000;
    postgres_micros.div_euclid(1000).saturating_add(POSTGRES_EPOCH_UNIX_MS)
}

/// The partition that Java's default partitioner, and so Debezium, gives a key.
pub fn partition(key: &[u8], partitions: i32) -> i32 {
    (murmur2(key) & 0x7fff_ffff) % partitions
}

/// MurmurHash2 with Kafka's seed, over signed arithmetic as `Utils.murmur2` of the Java client
/// does it; the golden vectors in `tests/golden/murmur2.txt` come from there.
pub fn murmur2(data: &[u8]) -> i32 {
    const M: u32 = 0x5bd1_e995;
    let mut h = 0x9747_b28c_u32 ^ data.len() as u32;
    let mut chunks = data.chunks_exact(4);
    for chunk in &mut chunks {
        let mut k = u32::from_le_bytes(chunk.try_into().expect("four bytes")).wrapping_mul(M);
        k ^= k >> 24;
        h = h.wrapping_mul(M) ^ k.wrapping_mul(M);
    }
    let rest = chunks.remainder();
    if !rest.is_empty() {
        let tail = rest.iter().rev().fold(0, |tail, &b| tail << 8 | u32::from(b));
        h = (h ^ tail).wrapping_mul(M);
    }
    h ^= h >> 13;
    h = h.wrapping_mul(M);
    (h ^ h >> 15) as i32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partitions_are_those_of_the_java_client() {
        let golden = include_str!("../../tests/golden/murmur2.txt");
        let mut checked = 0;
        for line in golden.lines().filter(|l| !l.starts_with('#') && !l.is_empty()) {
            let fields: Vec<&str> = line.split(' ').collect();
            let hex = fields[0].trim_matches('-');
            let key: Vec<u8> =
                (0..hex.len()).step_by(2).map(|i| u8::from_str_radix(&hex[i..i + 2], 16).unwrap()).collect();
            assert_eq!(murmur2(&key).to_string(), fields[1], "murmur2 of {}", fields[0]);
            for (partitions, expected) in [1, 3, 6, 12, 97].into_iter().zip(&fields[2..]) {
                assert_eq!(
                    partition(&key, partitions).to_string(),
                    *expected,
                    "{} of {partitions}",
                    fields[0]
                );
            }
            checked += 1;
        }
        assert!(checked > 200, "only {checked} vectors");
    }

    #[test]
    fn commit_times_count_from_the_year_2000() {
        assert_eq!(unix_ms(0), 946_684_800_000);
        assert_eq!(unix_ms(606_776_779_000_000), 1_553_461_579_000);
        assert_eq!(unix_ms(-1), 946_684_799_999);
    }

    #[test]
    fn the_batch_size_counts_every_byte() {
        let record = Record {
            topic: "t",
            partition: 0,
            key: b"1",
            value: Some(&[0; 100]),
            headers: vec![("id", Some(b"x")), ("n", None)],
            timestamp_ms: None,
            batch_bytes: 0,
        };
        // 61 + length(2) + 3 + key(1+1) + value(2+100) + count(1) + id(1+2+1+1) + n(1+1+1)
        assert_eq!(record.count_batch_bytes(), 61 + 2 + 3 + 2 + 102 + 1 + 5 + 3);
    }
}
