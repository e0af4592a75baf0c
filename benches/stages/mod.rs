//! The stages of the core, each over the same thousand events of 330 bytes in single-event
//! transactions. A stage sets itself up and hands one round over its events to whoever measures.

use std::collections::BTreeSet;
use std::hint::black_box;

use outbox_tailer::relay::outbox::{Binding, ColumnName, Mapping};
use outbox_tailer::relay::pgoutput::{self, Message, Tuple};
use outbox_tailer::relay::progress::{InFlight, Position, Progress};
use outbox_tailer::relay::router::{self, Limits, Route, Timestamp, Topic, TopicName};
use outbox_tailer::relay::{Input, Lsn, Output, Place, Relay, Table};

#[path = "../../tests/core/wire.rs"]
#[allow(dead_code)] // the tests use the rest
mod wire;

/// In one round.
pub const EVENTS: u64 = 1_000;

pub type Measure<'a> = &'a mut dyn FnMut(&mut dyn FnMut());
pub type Stage = (&'static str, fn(Measure<'_>));

pub const STAGES: [Stage; 5] =
    [("decode", decode), ("map", map), ("route", route), ("progress", progress), ("relay", relay)];

/// Bytes → message.
fn decode(measure: Measure<'_>) {
    let inserts = inserts();
    measure(&mut || {
        for bytes in &inserts {
            black_box(pgoutput::decode(black_box(bytes)).unwrap());
        }
    });
}

/// Message → event.
fn map(measure: Measure<'_>) {
    let (table, inserts) = (table(), inserts());
    let (binding, tuples) = (binding(&table), tuples(&inserts));
    measure(&mut || {
        for tuple in &tuples {
            black_box(binding.event(&table.mapping, black_box(tuple)).unwrap());
        }
    });
}

/// Message → event → record: a record takes its event's headers over.
fn route(measure: Measure<'_>) {
    let (table, inserts) = (table(), inserts());
    let (binding, tuples) = (binding(&table), tuples(&inserts));
    measure(&mut || {
        for tuple in &tuples {
            let event = binding.event(&table.mapping, black_box(tuple)).unwrap();
            black_box(router::route(&table.route, black_box(event), 0).unwrap());
        }
    });
}

/// Acknowledgements → position.
fn progress(measure: Measure<'_>) {
    let mut progress = Progress::new();
    let place = Place { commit_lsn: Lsn::from(1), ordinal: 0 };
    let position = Position { lsn: Lsn::from(2), events_end: Lsn::from(2), commit_time_micros: Some(0) };
    let mut published = Vec::new();
    measure(&mut || {
        for _ in 0..EVENTS {
            published.push(progress.publish(InFlight { bytes: 330, place, table: 0 }));
            progress.position(position);
        }
        published.drain(..).for_each(|seq| progress.acked(seq));
        black_box(progress.confirmable());
    });
}

/// All of it: bytes and acknowledgements → records and position.
fn relay(measure: Measure<'_>) {
    let (begin, commit, inserts) = (wire::begin(1), wire::commit(1, 2), inserts());
    let mut relay = Relay::new(vec![table()], BTreeSet::new());
    relay.handle(Input::Wal(&relation())).unwrap();
    let mut published = Vec::new();
    measure(&mut || {
        for insert in &inserts {
            relay.handle(Input::Wal(black_box(&begin))).unwrap();
            match black_box(relay.handle(Input::Wal(black_box(insert))).unwrap()) {
                Some(Output::Publish { seq, .. }) => published.push(seq),
                other => panic!("{other:?}"),
            }
            relay.handle(Input::Wal(black_box(&commit))).unwrap();
        }
        for seq in published.drain(..) {
            relay.handle(Input::Acked(seq)).unwrap();
        }
        black_box(relay.confirmable());
    });
}

fn table() -> Table {
    let limits = Limits { topic: Some(1_048_588), client: 1_000_000, compressed: false };
    let topic = TopicName { name: "outbox.event.order".into(), partitions: 6, limits };
    let header = |name: &str, column| (name.to_owned(), ColumnName::new(column));
    Table {
        mapping: Mapping {
            schema: "public".into(),
            table: "outbox_event".into(),
            oid: wire::OUTBOX_OID,
            id: ColumnName::new("event_id"),
            key: ColumnName::new("order_id"),
            payload: ColumnName::new("payload"),
            headers: vec![header("eventType", "event_type"), header("revision", "revision")],
        },
        route: Route { topic: Topic::Fixed(topic), timestamp: Timestamp::Produce },
    }
}

fn relation() -> Vec<u8> {
    let columns = ["event_id", "order_id", "revision", "event_type", "payload"];
    wire::relation(wire::OUTBOX_OID, "outbox_event", &columns)
}

fn inserts() -> Vec<Vec<u8>> {
    let insert = |n: u64| {
        let (id, key, revision) = (format!("00000000-0000-0000-0000-{n:012x}"), n % 100, n / 100 + 1);
        let payload = format!(r#"{{"note": "{}", "orderId": {key}}}"#, "x".repeat(180));
        let values: [&str; 5] = [&id, &key.to_string(), &revision.to_string(), "OrderPaid", &payload];
        wire::insert(wire::OUTBOX_OID, &values.map(Some))
    };
    (0..EVENTS).map(insert).collect()
}

fn tuples(inserts: &[Vec<u8>]) -> Vec<Tuple<'_>> {
    let tuple = |bytes| match pgoutput::decode(bytes).unwrap() {
        Message::Insert { new, .. } => new,
        other => panic!("{other:?}"),
    };
    inserts.iter().map(|bytes| tuple(bytes)).collect()
}

fn binding(table: &Table) -> Binding {
    match pgoutput::decode(&relation()).unwrap() {
        Message::Relation(relation) => Binding::new(&table.mapping, &relation).unwrap(),
        other => panic!("{other:?}"),
    }
}
