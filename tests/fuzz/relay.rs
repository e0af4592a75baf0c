//! Any sequence of WAL messages, keepalives, acknowledgements and failures, from a server that keeps
//! to the protocol or does not, against a list of what came.

use std::collections::BTreeSet;

use arbitrary::{Result, Unstructured};
use outbox_tailer::relay::outbox::{ColumnName, Mapping};
use outbox_tailer::relay::router::{Limits, Route, Timestamp, Topic, TopicName, Unpublishable};
use outbox_tailer::relay::{Input, Lsn, Output, Place, Relay, RelayError, Table};

use crate::wire::{self, OTHER_OID, OUTBOX_OID};

pub fn check(bytes: &[u8]) {
    let mut u = Unstructured::new(bytes);
    if let Ok(mut history) = History::new(&mut u) {
        while !u.is_empty() && history.step(&mut u).is_ok() {
            history.judge();
        }
        history.acknowledge_all();
    }
}

/// What the stream has brought, in order.
#[derive(Debug)]
enum Came {
    Event { seq: u64, bytes: usize, commit_lsn: u64, place: Place, acked: bool },
    End { lsn: u64 },
}

struct History {
    relay: Relay,
    /// Whether LSNs grow from message to message, as PostgreSQL's do.
    honest: bool,
    lsn: u64,
    greatest_end: u64,
    transaction: Option<(u64, u64)>,
    transactions: u64,
    described: bool,
    skip: BTreeSet<(u64, u64)>,
    list: Vec<Came>,
    failed: bool,
    /// The relay has given an error: it is told of no more WAL.
    over: bool,
    given_up: BTreeSet<u64>,
    confirmed: u64,
}

impl History {
    fn new(u: &mut Unstructured<'_>) -> Result<Self> {
        let honest = u.ratio(3, 4)?;
        // Transactions and ordinals; an honest server's LSNs are known beforehand.
        let skip: BTreeSet<(u64, u64)> = (0..u.int_in_range(0..=2)?)
            .map(|_| Ok((u.int_in_range(0..=3)?, u.int_in_range(0..=3)?)))
            .collect::<Result<_>>()?;
        let limits = Limits { topic: None, client: 200, compressed: false };
        let topic = TopicName { name: "t".into(), partitions: 3, limits };
        let table = Table {
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
        };
        let places = skip.iter().map(|(transaction, ordinal)| {
            let place = Place { commit_lsn: Lsn::from(commit_lsn(*transaction)), ordinal: *ordinal };
            (place, event_id(*transaction, *ordinal))
        });
        Ok(History {
            relay: Relay::new(vec![table], places.collect()),
            honest,
            lsn: 0,
            greatest_end: 0,
            transaction: None,
            transactions: 0,
            described: false,
            skip,
            list: Vec::new(),
            failed: false,
            over: false,
            given_up: BTreeSet::new(),
            confirmed: 0,
        })
    }

    fn step(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        match u.int_in_range(0..=15)? {
            0..=2 => self.acknowledge(u)?,
            3 if u.ratio(1, 4)? => self.fail(u)?,
            _ if self.over => self.acknowledge(u)?,
            4 | 5 => self.keepalive(u)?,
            6 => self.foreign(u)?,
            7 if u.ratio(1, 4)? => self.anything(u)?,
            8 if u.ratio(1, 4)? => self.out_of_order(u)?,
            _ => self.next(u)?,
        }
        Ok(())
    }

    /// The message that a server sends next.
    fn next(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        match self.transaction {
            None => self.begin(u),
            Some(_) if !self.described => {
                self.quiet(&wire::relation(OUTBOX_OID, "outbox", &["id", "key", "payload"]));
                self.quiet(&wire::relation(OTHER_OID, "other", &["id", "key"]));
                self.described = true;
                Ok(())
            }
            Some(_) if u.ratio(1, 3)? => self.commit(u),
            Some(_) => self.insert(u),
        }
    }

    fn begin(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        let commit_lsn = if self.honest { commit_lsn(self.transactions) } else { lsn(u)? };
        self.lsn = self.lsn.max(commit_lsn - 50);
        if self.quiet(&wire::begin(commit_lsn)) {
            self.transaction = Some((commit_lsn, 0));
        }
        Ok(())
    }

    fn insert(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        let Some((commit_lsn, ordinal)) = self.transaction else { return Ok(()) };
        let (id, key) = (event_id(self.transactions, ordinal), format!("k{}", u.int_in_range(0..=3)?));
        let large = "x".repeat(200);
        let (id_value, key_value, payload, poisonous) = match u.int_in_range(0..=63)? {
            0 => (None, Some(key.as_str()), None, true),
            1 => (Some(id.as_str()), None, None, true),
            2 => (Some(id.as_str()), Some(key.as_str()), Some(large.as_str()), true),
            n if n % 2 == 0 => (Some(id.as_str()), Some(key.as_str()), None, false),
            _ => (Some(id.as_str()), Some(key.as_str()), Some("payload"), false),
        };
        let insert = wire::insert(OUTBOX_OID, &[id_value, key_value, payload]);
        let place = Place { commit_lsn: Lsn::from(commit_lsn), ordinal };
        let skipped = self.skip.contains(&(self.transactions, ordinal))
            && commit_lsn == self::commit_lsn(self.transactions)
            && id_value.is_some();
        let outcome = self.relay.handle(Input::Wal(&insert));
        if self.failed {
            assert_eq!(outcome, Ok(None));
            return Ok(());
        }
        match outcome {
            Ok(Some(Output::Skipped(at))) => assert!(skipped && at == place, "{at} is skipped"),
            Ok(Some(Output::Publish { seq, record })) => {
                assert!(!skipped && !poisonous, "{place} is published");
                assert_eq!((record.key, record.value), (key.as_bytes(), payload.map(str::as_bytes)));
                assert_eq!(record.headers.first().and_then(|header| header.1), Some(id.as_bytes()));
                let bytes = record.payload_bytes();
                self.list.push(Came::Event { seq, bytes, commit_lsn, place, acked: false });
            }
            Err(RelayError::Poison(poison)) => {
                assert!(!skipped && poisonous && poison.place == place, "{poison:?}");
                self.over = true;
            }
            other => panic!("{other:?}"),
        }
        self.transaction = Some((commit_lsn, ordinal + 1));
        Ok(())
    }

    fn commit(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        let Some((commit_lsn, _)) = self.transaction else { return Ok(()) };
        let end =
            if self.honest { commit_lsn + 10 } else { commit_lsn.saturating_add(u.int_in_range(0..=300)?) };
        self.lsn = self.lsn.max(end);
        if self.quiet(&wire::commit(commit_lsn, end)) {
            self.transaction = None;
            self.transactions += 1;
            self.end(end);
        }
        Ok(())
    }

    fn keepalive(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        // An honest one may repeat an older position, and stands within a transaction, too.
        let wal_end =
            if self.honest { self.lsn.saturating_sub(u.int_in_range(0..=2)? * 30) } else { lsn(u)? };
        assert_eq!(self.relay.handle(Input::Keepalive { wal_end: Lsn::from(wal_end) }), Ok(None));
        if self.transaction.is_none() && !self.failed {
            self.end(wal_end);
        }
        Ok(())
    }

    /// What is no event: rows of another table, and what only counts.
    fn foreign(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        let update = [&b"U"[..], &OUTBOX_OID.to_be_bytes(), b"N\0\x01u"].concat();
        let truncate = [&b"T"[..], &1u32.to_be_bytes(), b"\0", &OUTBOX_OID.to_be_bytes()].concat();
        let logical = [&b"M\0"[..], &0u64.to_be_bytes(), b"\0\0\0\0\0"].concat();
        let row = wire::insert(OTHER_OID, &[Some("x"), None]);
        let choices = [update, truncate, logical, row];
        let row_allowed = self.transaction.is_some() && self.described;
        let choice = u.choose_index(if row_allowed { 4 } else { 3 })?;
        self.quiet(&choices[choice]);
        Ok(())
    }

    /// Bytes of no meaning; none of them is taken for an event.
    fn anything(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        let len = u.int_in_range(0..=40)?.min(u.len());
        // Not in the stream's own tables and transactions, whose state the model keeps.
        let mut bytes = u.bytes(len)?.to_vec();
        if let Some(first) = bytes.first_mut()
            && b"BCIR".contains(first)
        {
            *first = b'?';
        }
        match self.relay.handle(Input::Wal(&bytes)) {
            Ok(None) => {}
            Err(RelayError::Decode { .. }) if !self.failed => self.over = true,
            other => panic!("{other:?}"),
        }
        Ok(())
    }

    /// Messages where they may not stand.
    fn out_of_order(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        let bytes = match (self.transaction, u.arbitrary()?) {
            (None, true) => wire::commit(1, 2),
            (None, false) => wire::insert(OUTBOX_OID, &[Some("i"), Some("k"), None]),
            (Some((commit_lsn, _)), true) => wire::commit(commit_lsn.wrapping_add(1), u64::MAX),
            (Some(_), false) => wire::begin(lsn(u)?),
        };
        match self.relay.handle(Input::Wal(&bytes)) {
            Ok(None) if self.failed => {}
            Err(RelayError::Protocol(_)) if !self.failed => self.over = true,
            other => panic!("{other:?}"),
        }
        Ok(())
    }

    fn acknowledge(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        let open: Vec<usize> = self.open().collect();
        if open.is_empty() {
            return Ok(());
        }
        let at = open[u.choose_index(open.len())?];
        self.acknowledge_one(at);
        Ok(())
    }

    fn acknowledge_one(&mut self, at: usize) {
        let Came::Event { seq, acked, .. } = &mut self.list[at] else { unreachable!("open gives events") };
        assert_eq!(self.relay.handle(Input::Acked(*seq)), Ok(None));
        *acked = true;
    }

    fn fail(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        let open: Vec<usize> = self.open().collect();
        if open.is_empty() {
            return Ok(());
        }
        let Came::Event { seq, .. } = &self.list[open[u.choose_index(open.len())?]] else { return Ok(()) };
        assert_eq!(self.relay.handle(Input::Failed(*seq)), Ok(None));
        self.given_up.insert(*seq);
        self.failed = true;
        Ok(())
    }

    /// Events that may still be acknowledged.
    fn open(&self) -> impl Iterator<Item = usize> + '_ {
        self.list.iter().enumerate().filter_map(|(at, came)| match came {
            Came::Event { seq, acked: false, .. } if !self.given_up.contains(seq) => Some(at),
            _ => None,
        })
    }

    /// Hands a message over that makes no output; whether it was taken note of.
    fn quiet(&mut self, bytes: &[u8]) -> bool {
        assert_eq!(self.relay.handle(Input::Wal(bytes)), Ok(None));
        !self.failed
    }

    /// A place that may be confirmed once all before it is acknowledged.
    fn end(&mut self, lsn: u64) {
        if lsn > self.greatest_end {
            self.greatest_end = lsn;
            self.list.push(Came::End { lsn });
        }
    }

    fn judge(&mut self) {
        let before = self.list.iter().take_while(|came| !matches!(came, Came::Event { acked: false, .. }));
        let ends = before.filter_map(|came| match came {
            Came::End { lsn } => Some(*lsn),
            Came::Event { .. } => None,
        });
        let expected = ends.last();
        let confirmable = self.relay.confirmable().map(|position| u64::from(position.lsn));
        assert_eq!(confirmable, expected, "{:?}", self.list);
        assert!(confirmable.unwrap_or(0) >= self.confirmed, "it goes back from {}", self.confirmed);
        self.confirmed = confirmable.unwrap_or(0);

        let (mut events, mut bytes, mut last) = (0, 0, None);
        for came in &self.list {
            let Came::Event { seq, bytes: size, commit_lsn, place, acked } = came else { continue };
            assert!(last.is_none_or(|last| last < *seq), "{seq} after {last:?}");
            last = Some(*seq);
            let told = self.relay.poison(*seq, "id", None, Unpublishable::NullKey);
            assert_eq!(told.map(|poison| poison.place), (!acked).then_some(*place));
            if !acked {
                (events, bytes) = (events + 1, bytes + size);
                assert!(self.relay.oldest() <= *seq);
                // Said without the list: its transaction ends behind what may be confirmed.
                assert!(!self.honest || self.confirmed < *commit_lsn, "{} passes {seq}", self.confirmed);
            }
        }
        assert_eq!((self.relay.in_flight_events(), self.relay.in_flight_bytes()), (events, bytes));
        assert!(self.relay.queued() >= events);
    }

    /// With everything acknowledged, everything that came can be confirmed.
    fn acknowledge_all(&mut self) {
        let open: Vec<usize> = self.open().collect();
        for at in open.into_iter().rev() {
            self.acknowledge_one(at);
            self.judge();
        }
        if self.given_up.is_empty() {
            assert_eq!(self.confirmed, self.greatest_end);
            assert_eq!((self.relay.queued(), self.relay.in_flight_bytes()), (0, 0));
        }
    }
}

fn commit_lsn(transaction: u64) -> u64 {
    1_000 + 100 * transaction
}

fn event_id(transaction: u64, ordinal: u64) -> String {
    format!("e{transaction}.{ordinal}")
}

/// Few, so that they collide, and the last one.
fn lsn(u: &mut Unstructured<'_>) -> Result<u64> {
    Ok(match u.int_in_range(0..=7)? {
        0 => u64::MAX,
        n => 700 + 100 * n,
    })
}
