//! The pure core: WAL messages and acknowledgements in, records and confirmable positions out.
//!
//! No I/O, no clock, no tasks. One [`Relay`] lives as long as one `START_REPLICATION`: dropping it
//! drops everything in flight, so nothing of an earlier connection or producer can be mistaken for
//! something of this one.
//!
//! ```text
//! Wal, Keepalive ─▶ pgoutput ─▶ outbox ─▶ router ─▶ Publish(seq, record)
//!                      │ commit, keepalive             │
//!                      └───────▶ progress ◀────────────┘ Acked(seq)
//!                                   │
//!                                   ▼ confirmable position
//! ```

pub mod line;
pub mod outbox;
pub mod pgoutput;
pub mod progress;
pub mod router;
pub mod truth;

use std::collections::{BTreeMap, BTreeSet};

pub use postgres_types::PgLsn as Lsn;

use outbox::{BindError, Binding, Mapping};
use pgoutput::{Begin, DecodeError, Message, Relation, Tuple};
use progress::{InFlight, Position, Progress, Seq};
use router::{Record, Route, Unpublishable};

/// What the relay is told.
#[derive(Debug, Clone, Copy)]
pub enum Input<'a> {
    /// The payload of one XLogData message.
    Wal(&'a [u8]),
    /// A primary keepalive: the server has sent everything before `wal_end`.
    Keepalive { wal_end: Lsn },
    /// The broker has stored the event on all in-sync replicas.
    Acked(Seq),
    /// The producer has given an event up; whether the broker has it is unknown. From now on
    /// nothing is published, and no position at or after the event becomes confirmable.
    Failed(Seq),
}

/// What the relay asks for.
#[derive(Debug, PartialEq, Eq)]
pub enum Output<'a> {
    Publish {
        seq: Seq,
        record: Record<'a>,
    },
    /// An operator has decided to go past this event; it counts as delivered.
    Skipped(Place),
}

/// The tables this relay publishes, in the order of the configuration.
#[derive(Debug, Clone)]
pub struct Table {
    pub mapping: Mapping,
    pub route: Route,
}

/// Names a row of the stream: the same in every replay.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    pub commit_lsn: Lsn,
    /// Counts the outbox inserts of the transaction, from 0.
    pub ordinal: u64,
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}#{}", self.commit_lsn, self.ordinal)
    }
}

/// An event that can never be published as it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Poison {
    pub table: String,
    /// The event's id; its place in the WAL when that is NULL.
    pub event_id: String,
    pub key: Option<String>,
    pub place: Place,
    pub why: Unpublishable,
}

/// Why the stream cannot go on.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum RelayError {
    /// The server (or something between) broke the protocol.
    #[error("cannot decode the WAL stream in the transaction at {at}: {source}")]
    Decode { at: Lsn, source: DecodeError },
    #[error("the WAL stream is out of order: {0}")]
    Protocol(&'static str),
    #[error("{table}, transaction at {at}: {source}; change the column mapping, or change the table back")]
    Columns { table: String, at: Lsn, source: BindError },
    #[error(
        "{table} is now another table (OID {oid}, not {expected}): what was written to it before is not in the stream"
    )]
    Swapped { table: String, oid: u32, expected: u32 },
    #[error(
        "event {} of {}, key {}, transaction at {}, cannot be published: {}",
        .0.event_id, .0.table, .0.key.as_deref().unwrap_or("NULL"), .0.place.commit_lsn, .0.why
    )]
    Poison(Box<Poison>),
}

/// Counts of what came and made no record.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Ignored {
    pub updates: u64,
    pub deletes: u64,
    /// TRUNCATE messages (one may name several tables).
    pub truncates: u64,
    /// Inserts into tables that are not configured.
    pub other_tables: u64,
    pub logical_messages: u64,
    pub skipped: u64,
}

pub struct Relay {
    tables: Vec<Table>,
    /// Rows an operator has decided to go past, with the id they had.
    skip: BTreeSet<(Place, String)>,
    relations: BTreeMap<u32, Known>,
    transaction: Option<Transaction>,
    progress: Progress,
    failed: bool,
    /// Greatest position noted; the stream must not go back.
    last_lsn: Lsn,
    events_end: Lsn,
    commit_time_micros: Option<i64>,
    ignored: Ignored,
}

/// A relation that the stream has described.
enum Known {
    Outbox { table: u16, binding: Result<Binding, BindError> },
    Swapped { table: u16 },
    Other,
}

struct Transaction {
    begin: Begin,
    inserts: u64,
}

impl Relay {
    pub fn new(tables: Vec<Table>, skip: BTreeSet<(Place, String)>) -> Self {
        Relay {
            tables,
            skip,
            relations: BTreeMap::new(),
            transaction: None,
            progress: Progress::new(),
            failed: false,
            last_lsn: Lsn::from(0),
            events_end: Lsn::from(0),
            commit_time_micros: None,
            ignored: Ignored::default(),
        }
    }

    /// Takes one input. Only [`Input::Wal`] can lead to an output, and to at most one.
    ///
    /// # Errors
    /// [`RelayError`], after which the relay is of no more use than for what it has in flight.
    ///
    /// # Panics
    /// When an acknowledgement names an event that is not in flight.
    pub fn handle<'a>(&'a mut self, input: Input<'a>) -> Result<Option<Output<'a>>, RelayError> {
        match input {
            Input::Wal(_) if self.failed => Ok(None),
            Input::Wal(bytes) => self.wal(bytes),
            Input::Keepalive { wal_end } => {
                // Inside a transaction the server may have sent part of it only.
                if self.transaction.is_none() && !self.failed {
                    self.position(wal_end);
                }
                Ok(None)
            }
            Input::Acked(seq) => {
                self.progress.acked(seq);
                Ok(None)
            }
            Input::Failed(_) => {
                self.failed = true;
                Ok(None)
            }
        }
    }

    /// The greatest place before which every event is acknowledged.
    pub fn confirmable(&self) -> Option<Position> {
        self.progress.confirmable()
    }

    /// Number of the oldest event that is not acknowledged, or of the next one.
    pub fn oldest(&self) -> Seq {
        self.progress.oldest()
    }

    /// Events and positions from the oldest unacknowledged event on.
    pub fn queued(&self) -> usize {
        self.progress.queued()
    }

    pub fn in_flight_events(&self) -> usize {
        self.progress.in_flight_events()
    }

    pub fn in_flight_bytes(&self) -> usize {
        self.progress.in_flight_bytes()
    }

    /// Names an event in flight that the producer or the broker has refused for good.
    pub fn poison(
        &self,
        seq: Seq,
        event_id: &str,
        key: Option<String>,
        why: Unpublishable,
    ) -> Option<Poison> {
        let event = self.progress.in_flight(seq)?;
        let table = name(&self.tables[usize::from(event.table)].mapping);
        Some(Poison { table, event_id: event_id.to_owned(), key, place: event.place, why })
    }

    pub fn ignored(&self) -> Ignored {
        self.ignored
    }

    fn wal<'a>(&'a mut self, bytes: &'a [u8]) -> Result<Option<Output<'a>>, RelayError> {
        let message =
            pgoutput::decode(bytes).map_err(|source| RelayError::Decode { at: self.at(), source })?;
        match message {
            Message::Insert { relation, new } => return self.insert(relation, &new),
            Message::Begin(begin) => {
                if self.transaction.replace(Transaction { begin, inserts: 0 }).is_some() {
                    return Err(RelayError::Protocol("Begin inside a transaction"));
                }
            }
            Message::Commit(commit) => {
                let Transaction { begin, inserts } =
                    self.transaction.take().ok_or(RelayError::Protocol("Commit without Begin"))?;
                if begin.commit_lsn != commit.commit_lsn || commit.end_lsn < commit.commit_lsn {
                    return Err(RelayError::Protocol("Commit does not fit its Begin"));
                }
                if inserts > 0 {
                    self.events_end = commit.end_lsn;
                    self.commit_time_micros = Some(commit.commit_time_micros);
                }
                self.position(commit.end_lsn);
            }
            Message::Relation(relation) => {
                let known = self.known(&relation);
                self.relations.insert(relation.oid, known);
            }
            Message::Update { .. } => self.ignored.updates += 1,
            Message::Delete { .. } => self.ignored.deletes += 1,
            Message::Truncate { .. } => self.ignored.truncates += 1,
            Message::Logical { .. } => self.ignored.logical_messages += 1,
            Message::Origin | Message::Type => {}
        }
        Ok(None)
    }

    fn insert<'a>(&'a mut self, relation: u32, row: &Tuple<'a>) -> Result<Option<Output<'a>>, RelayError> {
        let transaction =
            self.transaction.as_mut().ok_or(RelayError::Protocol("Insert outside a transaction"))?;
        let at = transaction.begin.commit_lsn;
        let known =
            self.relations.get(&relation).ok_or(RelayError::Protocol("Insert before its Relation"))?;
        let (table_index, binding) = match known {
            Known::Other => {
                self.ignored.other_tables += 1;
                return Ok(None);
            }
            Known::Swapped { table } => {
                let mapping = &self.tables[usize::from(*table)].mapping;
                return Err(RelayError::Swapped {
                    table: name(mapping),
                    oid: relation,
                    expected: mapping.oid,
                });
            }
            Known::Outbox { table, binding } => (*table, binding),
        };
        let table = &self.tables[usize::from(table_index)];
        let binding = binding.as_ref().map_err(|source| RelayError::Columns {
            table: name(&table.mapping),
            at,
            source: source.clone(),
        })?;
        let event = binding
            .event(&table.mapping, row)
            .ok_or(RelayError::Protocol("Insert does not fit its Relation"))?;
        let place = Place { commit_lsn: at, ordinal: transaction.inserts };
        transaction.inserts += 1;
        let (id, key) = (event.id, event.key);
        let poison = |why| Poison {
            table: name(&table.mapping),
            event_id: event_id(id, place),
            key: key.map(lossy),
            place,
            why,
        };
        if !self.skip.is_empty() && self.skip.contains(&(place, event_id(id, place))) {
            self.ignored.skipped += 1;
            return Ok(Some(Output::Skipped(place)));
        }
        let record = router::route(&table.route, event, transaction.begin.commit_time_micros)
            .map_err(|why| RelayError::Poison(Box::new(poison(why))))?;
        let bytes = record.payload_bytes().try_into().unwrap_or(u32::MAX);
        let seq = self.progress.publish(InFlight { bytes, place, table: table_index });
        Ok(Some(Output::Publish { seq, record }))
    }

    fn known(&self, relation: &Relation) -> Known {
        let same_name = |m: &Mapping| m.schema == relation.schema && m.table == relation.name;
        let find =
            |wanted: &dyn Fn(&Mapping) -> bool| (0u16..).zip(&self.tables).find(|(_, t)| wanted(&t.mapping));
        if let Some((index, table)) = find(&|m| m.oid == relation.oid) {
            Known::Outbox { table: index, binding: Binding::new(&table.mapping, relation) }
        } else if let Some((table, _)) = find(&same_name) {
            Known::Swapped { table }
        } else {
            Known::Other
        }
    }

    /// A keepalive may repeat an earlier WAL end or trail the last commit.
    fn position(&mut self, lsn: Lsn) {
        if lsn > self.last_lsn {
            self.last_lsn = lsn;
            let (events_end, commit_time_micros) = (self.events_end, self.commit_time_micros);
            self.progress.position(Position { lsn, events_end, commit_time_micros });
        }
    }

    /// Where the stream is, for messages.
    fn at(&self) -> Lsn {
        self.transaction.as_ref().map_or(self.last_lsn, |t| t.begin.commit_lsn)
    }
}

fn name(mapping: &Mapping) -> String {
    format!("{}.{}", mapping.schema, mapping.table)
}

fn event_id(id: Option<&[u8]>, place: Place) -> String {
    id.map_or_else(|| place.to_string(), lossy)
}

fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
