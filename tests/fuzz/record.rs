//! A row of any relation, under any mapping, becomes the record that a slow and simple reading of the
//! documentation gives, or is refused by the name of what is wrong with it.

use std::collections::BTreeSet;

use arbitrary::{Result, Unstructured};
use outbox_tailer::relay::outbox::{BindError, ColumnName, Mapping};
use outbox_tailer::relay::router::{Limits, Record, Route, Timestamp, Topic, TopicName, Unpublishable};
use outbox_tailer::relay::{Input, Lsn, Output, Relay, RelayError, Table};

use crate::wire;

const OID: u32 = 7;
const TEXT: u32 = 25;
const BYTEA: u32 = 17;

struct Column {
    name: String,
    type_oid: u32,
}

pub fn check(bytes: &[u8]) {
    // What runs out of bytes goes on with zeros, so there is always a case.
    let _ = case(&mut Unstructured::new(bytes));
}

fn case(u: &mut Unstructured<'_>) -> Result<()> {
    let time: i64 = u.arbitrary()?;
    let timestamp = if u.arbitrary()? { Timestamp::Commit } else { Timestamp::Produce };
    let limits = Limits {
        topic: if u.arbitrary()? { Some(u.int_in_range(0..=10_000)?) } else { None },
        client: u.int_in_range(0..=10_000)?,
        compressed: u.arbitrary()?,
    };
    let partitions = u.int_in_range(1..=i32::MAX)?;
    let headers = (0..u.int_in_range(0..=3)?)
        .map(|i| Ok((format!("h{i}"), column_name(u)?)))
        .collect::<Result<Vec<_>>>()?;
    let mapping = Mapping {
        schema: "s".into(),
        table: "outbox".into(),
        oid: OID,
        id: column_name(u)?,
        key: column_name(u)?,
        payload: column_name(u)?,
        headers,
    };
    let columns = (0..u.int_in_range(0..=6)?)
        .map(|_| Ok(Column { name: name(u)?, type_oid: if u.ratio(1, 16)? { BYTEA } else { TEXT } }))
        .collect::<Result<Vec<_>>>()?;
    let width = if u.ratio(1, 16)? { u.int_in_range(0..=6)? } else { columns.len() };
    let row = (0..width).map(|_| value(u)).collect::<Result<Vec<_>>>()?;

    let topic = TopicName { name: "t".into(), partitions, limits };
    let route = Route { topic: Topic::Fixed(topic), timestamp };
    let mut relay = Relay::new(vec![Table { mapping: mapping.clone(), route }], BTreeSet::new());
    let mut begin = wire::begin(90);
    begin[9..17].copy_from_slice(&time.to_be_bytes());
    assert_eq!(relay.handle(Input::Wal(&begin)), Ok(None));
    assert_eq!(relay.handle(Input::Wal(&relation(&columns))), Ok(None));
    let insert = insert(&row);
    let outcome = relay.handle(Input::Wal(&insert));

    let expected = naive(&mapping, &columns, &row);
    let record = match (outcome, expected) {
        (Ok(Some(Output::Publish { seq: 0, record })), Expected::Record(wanted)) => {
            assert_eq!((record.topic, record.key, record.value), ("t", wanted.key, wanted.value));
            let headers: Vec<_> = record.headers.iter().map(|(name, value)| (*name, *value)).collect();
            assert_eq!(headers, wanted.headers);
            assert!((0..partitions).contains(&record.partition));
            match timestamp {
                Timestamp::Produce => assert_eq!(record.timestamp_ms, None),
                Timestamp::Commit => {
                    let ms = i128::from(time).div_euclid(1000) + 946_684_800_000;
                    assert_eq!(record.timestamp_ms.map(i128::from), Some(ms));
                }
            }
            let (batch, payload) = (batch(&record).len(), payload(&record));
            assert_eq!((record.batch_bytes, record.payload_bytes()), (batch, payload));
            assert!(payload <= limits.client, "too large for the client");
            assert!(limits.compressed || limits.topic.is_none_or(|limit| batch <= limit), "for the topic");
            Some(payload)
        }
        (Err(RelayError::Poison(poison)), Expected::Record(wanted)) => {
            let Unpublishable::TooLarge { bytes, limits: named } = &poison.why else { panic!("{poison:?}") };
            let (batch, payload) = (batch(&wanted).len(), payload(&wanted));
            assert_eq!((*bytes, *named), (batch, limits));
            let over_topic = limits.topic.is_some_and(|limit| batch > limit);
            assert!(payload > limits.client || (over_topic && !limits.compressed), "{poison:?}");
            assert_eq!(poison.event_id, String::from_utf8_lossy(wanted.headers[0].1.expect("an id")));
            None
        }
        (Err(RelayError::Poison(poison)), Expected::Unpublishable(why)) => {
            assert_eq!((poison.why, poison.place.commit_lsn, poison.place.ordinal), (why, Lsn::from(90), 0));
            None
        }
        (Err(RelayError::Columns { source, .. }), Expected::Unbound(why)) => {
            assert_eq!(source, why);
            None
        }
        (Err(RelayError::Protocol("Insert does not fit its Relation")), Expected::Misfit) => None,
        (outcome, _) => panic!("{outcome:?}"),
    };
    assert_eq!(relay.in_flight_events(), usize::from(record.is_some()));
    assert_eq!(relay.in_flight_bytes(), record.unwrap_or(0));
    Ok(())
}

enum Expected<'a> {
    Record(Record<'a>),
    Unpublishable(Unpublishable),
    Unbound(BindError),
    Misfit,
}

fn naive<'a>(mapping: &'a Mapping, columns: &[Column], row: &'a [Option<Vec<u8>>]) -> Expected<'a> {
    let find = |wanted: &ColumnName| {
        let at = wanted.0.iter().find_map(|name| columns.iter().position(|column| column.name == *name));
        match at {
            None => Err(BindError::NoColumn(wanted.clone())),
            Some(at) if columns[at].type_oid == BYTEA => Err(BindError::Bytea(columns[at].name.clone())),
            Some(at) => Ok(at),
        }
    };
    let mut found = Vec::new();
    let fixed = [&mapping.id, &mapping.key, &mapping.payload];
    for wanted in fixed.into_iter().chain(mapping.headers.iter().map(|(_, column)| column)) {
        match find(wanted) {
            Ok(at) => found.push(at),
            Err(why) => return Expected::Unbound(why),
        }
    }
    if row.len() != columns.len() {
        return Expected::Misfit;
    }
    let value = |at: usize| row[at].as_deref();
    let (id, key) = (value(found[0]), value(found[1]));
    let (Some(id), Some(key)) = (id, key) else {
        return Expected::Unpublishable(match id {
            None => Unpublishable::NullId,
            Some(_) => Unpublishable::NullKey,
        });
    };
    let more = mapping.headers.iter().zip(&found[3..]).map(|((name, _), at)| (name.as_str(), value(*at)));
    Expected::Record(Record {
        topic: "t",
        partition: 0,
        key,
        value: value(found[2]),
        headers: [("id", Some(id))].into_iter().chain(more).collect(),
        timestamp_ms: None,
        batch_bytes: 0, // counted by `batch`
    })
}

/// Kafka protocol, "Record Batch", version 2: the bytes of a batch of one.
fn batch(record: &Record<'_>) -> Vec<u8> {
    let mut body = vec![0, 0, 0]; // attributes, timestamp delta, offset delta
    field(&mut body, Some(record.key));
    field(&mut body, record.value);
    varint(&mut body, record.headers.len() as i64);
    for (name, value) in &record.headers {
        field(&mut body, Some(name.as_bytes()));
        field(&mut body, *value);
    }
    let mut batch = vec![0; 61];
    varint(&mut batch, body.len() as i64);
    batch.extend(body);
    batch
}

fn field(out: &mut Vec<u8>, bytes: Option<&[u8]>) {
    varint(out, bytes.map_or(-1, |bytes| bytes.len() as i64));
    out.extend(bytes.unwrap_or_default());
}

fn varint(out: &mut Vec<u8>, value: i64) {
    let mut zigzag = ((value << 1) ^ (value >> 63)) as u64;
    while zigzag >= 0x80 {
        out.push(zigzag as u8 | 0x80);
        zigzag >>= 7;
    }
    out.push(zigzag as u8);
}

fn payload(record: &Record<'_>) -> usize {
    let headers = record.headers.iter().flat_map(|(name, value)| [Some(name.as_bytes()), *value]);
    [Some(record.key), record.value].into_iter().chain(headers).flatten().flatten().count()
}

/// One of a few, so that names meet.
fn name(u: &mut Unstructured<'_>) -> Result<String> {
    Ok(["id", "key", "payload", "type", "", "é表"][u.choose_index(6)?].to_owned())
}

fn column_name(u: &mut Unstructured<'_>) -> Result<ColumnName> {
    let several = u.int_in_range(1..=3)?;
    Ok(ColumnName((0..several).map(|_| name(u)).collect::<Result<_>>()?))
}

/// Short ones of any bytes, and long ones around the lengths at which a varint grows.
fn value(u: &mut Unstructured<'_>) -> Result<Option<Vec<u8>>> {
    Ok(match u.int_in_range(0..=7)? {
        0 => None,
        1 => Some(vec![b'x'; u.int_in_range(0..=300)?]),
        2 => Some(vec![b'x'; u.int_in_range(8_180..=8_200)?]),
        _ => {
            let len = u.int_in_range(0..=12)?;
            Some(u.bytes(len.min(u.len()))?.to_vec())
        }
    })
}

fn relation(columns: &[Column]) -> Vec<u8> {
    let mut bytes = [&b"R"[..], &OID.to_be_bytes(), b"s\0outbox\0d"].concat();
    bytes.extend((columns.len() as u16).to_be_bytes());
    for column in columns {
        bytes.extend([&b"\0"[..], column.name.as_bytes(), b"\0"].concat());
        bytes.extend([column.type_oid.to_be_bytes(), (-1i32).to_be_bytes()].concat());
    }
    bytes
}

fn insert(row: &[Option<Vec<u8>>]) -> Vec<u8> {
    let mut bytes = [&b"I"[..], &OID.to_be_bytes(), b"N", &(row.len() as u16).to_be_bytes()].concat();
    for value in row {
        match value {
            None => bytes.push(b'n'),
            Some(text) => bytes.extend([&b"t"[..], &(text.len() as u32).to_be_bytes(), text].concat()),
        }
    }
    bytes
}
