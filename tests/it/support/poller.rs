//! The reference poller: the outbox pattern by its own protocol. It locks an order that has pending
//! events, publishes the first of them, waits for the acknowledgement, marks the event and commits.
//! Several at once never work on the same order, so each order's events stay in order.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

use postgres::{Client, NoTls};
use rdkafka::ClientContext;
use rdkafka::config::ClientConfig;
use rdkafka::error::KafkaError;
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{BaseRecord, DeliveryResult, ProducerContext, ThreadedProducer};

/// The sample domain with what a poller needs beside it.
pub const TABLES: &str = "
CREATE TABLE sales_order (
    order_id bigint PRIMARY KEY, state text NOT NULL DEFAULT 'pending', revision bigint NOT NULL DEFAULT 0);
CREATE TABLE outbox_event (
    event_id uuid PRIMARY KEY DEFAULT gen_random_uuid(), order_id bigint NOT NULL REFERENCES sales_order, revision bigint NOT NULL,
    event_type text NOT NULL, payload jsonb NOT NULL, published_at timestamptz, UNIQUE (order_id, revision));
CREATE INDEX outbox_pending ON outbox_event (order_id, revision) WHERE published_at IS NULL";

const LOCK_ORDER: &str = "SELECT o.order_id FROM outbox_event e JOIN sales_order o USING (order_id)
    WHERE e.published_at IS NULL ORDER BY e.order_id, e.revision LIMIT 1 FOR UPDATE OF o SKIP LOCKED";
const FIRST_PENDING: &str =
    "SELECT event_id::text, revision::text, event_type, payload::text FROM outbox_event
    WHERE order_id = $1 AND published_at IS NULL ORDER BY outbox_event.revision LIMIT 1";
const MARK: &str = "UPDATE outbox_event SET published_at = now() WHERE event_id = $1::text::uuid";

/// How long to wait when nothing is pending.
const IDLE: Duration = Duration::from_millis(50);

/// Runs until it is stopped or dropped.
pub struct Poller {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Poller {
    pub fn start(url: &str, brokers: &str, topic: &str, at_once: usize) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let producer: ThreadedProducer<Acknowledge> = ClientConfig::new()
            .set("bootstrap.servers", brokers)
            .set("acks", "all")
            .set("enable.idempotence", "true")
            .set("linger.ms", "0")
            .create_with_context(Acknowledge)
            .unwrap();
        let producer = Arc::new(producer);
        let poll = |_| {
            let (producer, stop) = (Arc::clone(&producer), Arc::clone(&stop));
            let (url, topic) = (url.to_owned(), topic.to_owned());
            std::thread::spawn(move || {
                let mut client = Client::connect(&url, NoTls).unwrap();
                while !stop.load(Ordering::Relaxed) {
                    if !publish_next(&mut client, &producer, &topic) {
                        std::thread::sleep(IDLE);
                    }
                }
            })
        };
        let threads = (0..at_once).map(poll).collect();
        Poller { stop, threads }
    }

    /// Whatever was begun is finished.
    pub fn stop(self) {
        self.stop.store(true, Ordering::Relaxed);
        self.threads.into_iter().for_each(|thread| thread.join().unwrap());
    }
}

/// One transaction; `false` when nothing was pending that nobody else is at.
fn publish_next(client: &mut Client, producer: &ThreadedProducer<Acknowledge>, topic: &str) -> bool {
    let mut transaction = client.transaction().unwrap();
    let Some(order) = transaction.query_opt(LOCK_ORDER, &[]).unwrap() else { return false };
    let order: i64 = order.get(0);
    // Somebody may have published the last one between snapshot and lock.
    let Some(event) = transaction.query_opt(FIRST_PENDING, &[&order]).unwrap() else { return true };
    let [id, revision, event_type, payload] = [0, 1, 2, 3].map(|column| event.get::<_, String>(column));
    let headers = [("id", &id), ("eventType", &event_type), ("revision", &revision)]
        .into_iter()
        .fold(OwnedHeaders::new(), |all, (key, value)| all.insert(Header { key, value: Some(value) }));
    let (acknowledge, acknowledged) = mpsc::channel();
    let key = order.to_string();
    let record = BaseRecord::with_opaque_to(topic, Box::new(acknowledge)).key(&key).payload(&payload);
    producer.send(record.headers(headers)).map_err(|(e, _)| e).unwrap();
    acknowledged.recv().unwrap().unwrap();
    transaction.execute(MARK, &[&id]).unwrap();
    transaction.commit().unwrap();
    true
}

/// Tells whoever waits for the delivery.
struct Acknowledge;

impl ClientContext for Acknowledge {}

impl ProducerContext for Acknowledge {
    type DeliveryOpaque = Box<mpsc::Sender<Result<(), KafkaError>>>;

    fn delivery(&self, result: &DeliveryResult<'_>, acknowledge: Self::DeliveryOpaque) {
        let _ = acknowledge.send(result.as_ref().map(drop).map_err(|(e, _)| e.clone()));
    }
}
