//! Histories of any shape: transactions, foreign rows, keepalives, acknowledgements in any order,
//! failed deliveries, and a crash and replay anywhere, against a model so naive that it can be read.
//!
//! The broker model keeps a list per partition. A record reaches it when the producer chooses; a
//! crash or a failure cuts each partition's queue at any place. Acknowledgements come in order within
//! a partition and in any order across them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use outbox_tailer::relay::outbox::{ColumnName, Mapping};
use outbox_tailer::relay::router::{Limits, Route, Timestamp, Topic, TopicName};
use outbox_tailer::relay::{Input, Lsn, Output, Relay, RelayError, Table};
use proptest::prelude::*;
use proptest::sample::Index;

use crate::wire::{self, OTHER_OID, OUTBOX_OID};

const PARTITIONS: i32 = 3;

fn tables() -> Vec<Table> {
    let limits = Limits { topic: Some(1000), client: 1000, compressed: false };
    let topic = TopicName { name: "t".into(), partitions: PARTITIONS, limits };
    vec![Table {
        mapping: Mapping {
            schema: "public".into(),
            table: "outbox".into(),
            oid: OUTBOX_OID,
            id: ColumnName::new("id"),
            key: ColumnName::new("key"),
            payload: ColumnName::new("payload"),
            headers: vec![],
        },
        route: Route { topic: Topic::Fixed(topic), timestamp: Timestamp::Produce },
    }]
}

/// What the server streams, in order.
#[derive(Debug, Clone)]
enum Item {
    /// Inserts: `Some(key)` into the outbox, `None` into another table.
    Transaction(Vec<Option<u8>>),
    Keepalive,
}

/// What happens next.
#[derive(Debug, Clone)]
enum Step {
    /// The server sends one more message.
    Receive,
    /// The producer sends the front of one partition's queue.
    Send(Index),
    /// The broker acknowledges the oldest unacknowledged record of one partition.
    Ack(Index),
    /// The position is committed as far as the relay says.
    Persist,
    /// The process dies, or the connection; what is queued is lost.
    Crash,
    /// One record is given up by the producer; it may have reached the broker.
    Fail(Index, bool),
}

/// A message of the stream, with the LSN at which a restarted stream would skip it.
struct Sent {
    bytes: Option<Vec<u8>>,
    /// Replayed while this is greater than the start position.
    end_lsn: u64,
    keepalive: Option<u64>,
}

fn stream(history: &[Item]) -> (Vec<Sent>, Vec<(String, String, u64)>) {
    let (mut out, mut committed, mut lsn, mut id) = (Vec::new(), Vec::new(), 1000, 0);
    for item in history {
        match item {
            Item::Keepalive => out.push(Sent { bytes: None, end_lsn: lsn, keepalive: Some(lsn) }),
            Item::Transaction(inserts) => {
                let (commit_lsn, end_lsn) = (lsn + 50, lsn + 60);
                lsn = end_lsn;
                let mut push = |bytes| out.push(Sent { bytes: Some(bytes), end_lsn, keepalive: None });
                push(wire::begin(commit_lsn));
                // As pgoutput does after a restart, and may do any time.
                push(wire::relation(OUTBOX_OID, "outbox", &["id", "key", "payload"]));
                push(wire::relation(OTHER_OID, "other", &["id", "key"]));
                for insert in inserts {
                    match insert {
                        Some(key) => {
                            id += 1;
                            let (id, key) = (format!("e{id}"), format!("k{key}"));
                            push(wire::insert(OUTBOX_OID, &[Some(&id), Some(&key), None]));
                            committed.push((key, id, end_lsn));
                        }
                        None => push(wire::insert(OTHER_OID, &[Some("x"), Some("y")])),
                    }
                }
                push(wire::commit(commit_lsn, end_lsn));
            }
        }
    }
    (out, committed)
}

/// One run of the worker against the model.
struct World {
    stream: Vec<Sent>,
    committed: Vec<(String, String, u64)>,
    relay: Relay,
    /// Next message to receive.
    next: usize,
    start: u64,
    persisted: u64,
    /// Per partition: (seq, key, id) not yet sent.
    queues: Vec<VecDeque<(u64, String, String)>>,
    /// Per partition: sent, in the log, not yet acknowledged by this producer.
    unacked: Vec<VecDeque<u64>>,
    log: Vec<Vec<(String, String)>>,
    acked: BTreeSet<String>,
    names: BTreeMap<u64, String>,
    failed: bool,
}

impl World {
    fn new(history: &[Item]) -> Self {
        let (stream, committed) = stream(history);
        let partitions = PARTITIONS as usize;
        World {
            stream,
            committed,
            relay: Relay::new(tables(), BTreeSet::new()),
            next: 0,
            start: 0,
            persisted: 0,
            queues: vec![VecDeque::new(); partitions],
            unacked: vec![VecDeque::new(); partitions],
            log: vec![Vec::new(); partitions],
            acked: BTreeSet::new(),
            names: BTreeMap::new(),
            failed: false,
        }
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Receive => self.receive(),
            Step::Send(which) => self.send(which.index(PARTITIONS as usize)),
            Step::Ack(which) => self.ack(which.index(PARTITIONS as usize)),
            Step::Persist => self.persist(),
            Step::Crash => self.restart(),
            Step::Fail(which, arrived) => self.fail(which.index(PARTITIONS as usize), *arrived),
        }
        self.check_confirmable();
    }

    fn receive(&mut self) {
        // The server does not send again what the start position covers.
        while self
            .stream
            .get(self.next)
            .is_some_and(|sent| sent.keepalive.is_none() && sent.end_lsn <= self.start)
        {
            self.next += 1;
        }
        let Some(sent) = self.stream.get(self.next) else { return };
        self.next += 1;
        let input = match (&sent.bytes, sent.keepalive) {
            (Some(bytes), _) => Input::Wal(bytes),
            (None, Some(wal_end)) => Input::Keepalive { wal_end: Lsn::from(wal_end) },
            (None, None) => unreachable!(),
        };
        if let Some(Output::Publish { seq, record }) = self.relay.handle(input).unwrap() {
            let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
            let id = text(record.headers[0].1.unwrap());
            self.names.insert(seq, id.clone());
            self.queues[record.partition as usize].push_back((seq, text(record.key), id));
        }
    }

    fn send(&mut self, partition: usize) {
        if self.failed {
            return; // the session purges the producer
        }
        if let Some((seq, key, id)) = self.queues[partition].pop_front() {
            self.log[partition].push((key, id));
            self.unacked[partition].push_back(seq);
        }
    }

    fn ack(&mut self, partition: usize) {
        if let Some(seq) = self.unacked[partition].pop_front() {
            self.relay.handle(Input::Acked(seq)).unwrap();
            self.acked.insert(self.names[&seq].clone());
        }
    }

    /// Only the first failure may have arrived: librdkafka is gapless, nothing follows it.
    fn fail(&mut self, partition: usize, arrived: bool) {
        if self.failed {
            return;
        }
        if let Some((seq, key, id)) = self.queues[partition].pop_front() {
            if arrived {
                self.log[partition].push((key, id));
            }
            self.relay.handle(Input::Failed(seq)).unwrap();
            self.failed = true;
        }
    }

    fn persist(&mut self) {
        if let Some(position) = self.relay.confirmable() {
            self.persisted = self.persisted.max(position.lsn.into());
        }
    }

    fn restart(&mut self) {
        self.relay = Relay::new(tables(), BTreeSet::new());
        (self.next, self.start, self.failed) = (0, self.persisted, false);
        self.queues.iter_mut().for_each(VecDeque::clear);
        self.unacked.iter_mut().for_each(VecDeque::clear);
        self.names.clear();
    }

    /// No LSN may be confirmed before every event committed at or below it is acknowledged.
    fn check_confirmable(&self) {
        let Some(position) = self.relay.confirmable() else { return };
        let lsn: u64 = position.lsn.into();
        assert!(self.stream.iter().any(|sent| sent.end_lsn == lsn), "{lsn} is no end of a commit");
        for (_, id, end_lsn) in &self.committed {
            assert!(
                *end_lsn > lsn || self.acked.contains(id),
                "{lsn} is confirmable, {id} (end {end_lsn}) is not acknowledged"
            );
        }
    }

    fn finish(&mut self) {
        if self.failed {
            self.restart();
        }
        // Receiving twice the stream's length passes over what the start covers.
        for _ in 0..self.stream.len() {
            self.receive();
        }
        for partition in 0..PARTITIONS as usize {
            while !self.queues[partition].is_empty() {
                self.send(partition);
            }
            while !self.unacked[partition].is_empty() {
                self.ack(partition);
            }
        }
        self.check_confirmable();
        self.persist();
        let last = self.committed.last().map_or(0, |(_, _, end_lsn)| *end_lsn);
        assert!(self.persisted >= last, "everything is acknowledged, and {} < {last}", self.persisted);
        assert_eq!(self.relay.in_flight_events(), 0);
        assert_eq!(self.relay.in_flight_bytes(), 0);
        self.check_order();
    }

    /// For each key, first occurrences in the log are the commit order, and nothing else is there.
    fn check_order(&self) {
        let mut wanted: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (key, id, _) in &self.committed {
            wanted.entry(key).or_default().push(id);
        }
        let mut found: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (key, id) in self.log.iter().flatten() {
            let ids = found.entry(key).or_default();
            if !ids.contains(&id.as_str()) {
                ids.push(id);
            }
        }
        assert_eq!(found, wanted);
    }
}

fn item() -> impl Strategy<Value = Item> {
    let insert = prop_oneof![4 => (0u8..5).prop_map(Some), 1 => Just(None)];
    prop_oneof![
        4 => prop::collection::vec(insert, 0..5).prop_map(Item::Transaction),
        1 => Just(Item::Keepalive),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => Just(Step::Receive),
        4 => any::<Index>().prop_map(Step::Send),
        4 => any::<Index>().prop_map(Step::Ack),
        2 => Just(Step::Persist),
        1 => Just(Step::Crash),
        1 => (any::<Index>(), any::<bool>()).prop_map(|(which, arrived)| Step::Fail(which, arrived)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(10_000))]
    #[test]
    fn nothing_is_lost_invented_inverted_or_confirmed_too_early(
        history in prop::collection::vec(item(), 1..10),
        steps in prop::collection::vec(step(), 0..120),
    ) {
        let mut world = World::new(&history);
        for step in &steps {
            world.step(step);
        }
        world.finish();
    }
}

/// Feeds messages to a relay and gives the last result.
fn feed(relay: &mut Relay, messages: &[Vec<u8>]) -> Result<(), RelayError> {
    messages.iter().try_for_each(|bytes| relay.handle(Input::Wal(bytes)).map(drop))
}

fn relay() -> Relay {
    Relay::new(tables(), BTreeSet::new())
}

fn outbox() -> Vec<u8> {
    wire::relation(OUTBOX_OID, "outbox", &["id", "key", "payload"])
}

#[test]
fn a_keepalive_inside_a_transaction_is_no_position() {
    let mut relay = relay();
    feed(&mut relay, &[wire::begin(50), outbox()]).unwrap();
    relay.handle(Input::Keepalive { wal_end: Lsn::from(70) }).unwrap();
    assert_eq!(relay.confirmable(), None);
    feed(&mut relay, &[wire::commit(50, 60)]).unwrap();
    assert_eq!(relay.confirmable().map(|p| p.lsn), Some(Lsn::from(60)));
}

#[test]
fn after_a_failed_delivery_nothing_is_published_and_only_what_came_before_is_confirmable() {
    let mut relay = relay();
    let row = |id| wire::insert(OUTBOX_OID, &[Some(id), Some("k"), None]);
    feed(&mut relay, &[wire::begin(10), outbox(), row("a"), wire::commit(10, 20)]).unwrap();
    feed(&mut relay, &[wire::begin(50), outbox(), row("b"), wire::commit(50, 60)]).unwrap();
    relay.handle(Input::Failed(2)).unwrap();
    feed(&mut relay, &[wire::begin(70), row("c"), wire::commit(70, 80)]).unwrap();
    relay.handle(Input::Keepalive { wal_end: Lsn::from(90) }).unwrap();
    assert_eq!(relay.confirmable(), None);
    relay.handle(Input::Acked(0)).unwrap();
    assert_eq!(relay.confirmable().map(|p| p.lsn), Some(Lsn::from(20)));
    assert_eq!(relay.in_flight_events(), 1);
}

#[test]
fn no_event_is_published_after_a_failed_one() {
    let mut relay = relay();
    feed(&mut relay, &[wire::begin(50), outbox(), wire::insert(OUTBOX_OID, &[Some("a"), Some("k"), None])])
        .unwrap();
    relay.handle(Input::Failed(0)).unwrap();
    let next = wire::insert(OUTBOX_OID, &[Some("b"), Some("k"), None]);
    assert_eq!(relay.handle(Input::Wal(&next)).unwrap(), None);
    relay.handle(Input::Keepalive { wal_end: Lsn::from(70) }).unwrap();
    assert_eq!(relay.confirmable(), None);
}

#[test]
fn a_table_is_known_by_its_oid_through_a_rename_and_a_swapped_one_is_refused() {
    let mut relay = relay();
    let renamed = wire::relation(OUTBOX_OID, "outbox_old", &["payload", "key", "id"]);
    feed(&mut relay, &[wire::begin(50), renamed]).unwrap();
    let row = wire::insert(OUTBOX_OID, &[Some("p"), Some("k"), Some("a")]);
    let Some(Output::Publish { record, .. }) = relay.handle(Input::Wal(&row)).unwrap() else {
        panic!("not published")
    };
    assert_eq!((record.key, record.value), (&b"k"[..], Some(&b"p"[..])));
    let swapped = wire::relation(OTHER_OID, "outbox", &["id", "key", "payload"]);
    feed(&mut relay, &[swapped]).unwrap();
    let row = wire::insert(OTHER_OID, &[Some("a"), Some("k"), None]);
    assert!(matches!(relay.handle(Input::Wal(&row)), Err(RelayError::Swapped { expected: OUTBOX_OID, .. })));
}

#[test]
fn a_missing_column_a_null_key_and_a_large_record_stop_the_stream_and_name_the_event() {
    let check = |columns: &[&str], row: &[Option<&str>], says: &[&str]| {
        let mut relay = relay();
        let messages =
            [wire::begin(50), wire::relation(OUTBOX_OID, "outbox", columns), wire::insert(OUTBOX_OID, row)];
        let text = feed(&mut relay, &messages).expect_err("should stop").to_string();
        for part in says {
            assert!(text.contains(part), "{text:?} does not say {part:?}");
        }
        assert_eq!(relay.confirmable(), None);
    };
    check(&["id", "key"], &[Some("a"), Some("k")], &["public.outbox", "0/32", "no column \"payload\""]);
    check(&["id", "key", "payload"], &[Some("a"), None, None], &["event a", "public.outbox", "key is NULL"]);
    check(&["id", "key", "payload"], &[None, Some("k"), None], &["event 0/32#0", "id is NULL"]);
    let large = "x".repeat(1000);
    let says = ["event a", "key k", "10", "max.message.bytes is 1000", "message.max.bytes is 1000"];
    check(&["id", "key", "payload"], &[Some("a"), Some("k"), Some(&large)], &says);
}

#[test]
fn messages_out_of_turn_are_errors() {
    let row = wire::insert(OUTBOX_OID, &[Some("a"), Some("k"), None]);
    for messages in [
        vec![row.clone()],
        vec![wire::begin(50), row.clone()],
        vec![wire::begin(50), wire::begin(60)],
        vec![wire::commit(50, 60)],
        vec![wire::begin(50), wire::commit(51, 60)],
        vec![wire::begin(50), outbox(), wire::insert(OUTBOX_OID, &[Some("a")])],
    ] {
        assert!(matches!(feed(&mut relay(), &messages), Err(RelayError::Protocol(_))), "{messages:?}");
    }
}

#[test]
fn an_event_that_an_operator_skips_counts_as_delivered() {
    let place = outbox_tailer::relay::Place { commit_lsn: Lsn::from(50), ordinal: 1 };
    let mut relay = Relay::new(tables(), BTreeSet::from([(place, "b".to_owned())]));
    feed(&mut relay, &[wire::begin(50), outbox()]).unwrap();
    let row = |id: &str| wire::insert(OUTBOX_OID, &[Some(id), Some("k"), None]);
    assert!(matches!(relay.handle(Input::Wal(&row("a"))).unwrap(), Some(Output::Publish { .. })));
    assert_eq!(relay.handle(Input::Wal(&row("b"))).unwrap(), Some(Output::Skipped(place)));
    feed(&mut relay, &[wire::commit(50, 60)]).unwrap();
    relay.handle(Input::Acked(0)).unwrap();
    assert_eq!(relay.confirmable().map(|p| p.lsn), Some(Lsn::from(60)));
    assert_eq!(relay.ignored().skipped, 1);
}
