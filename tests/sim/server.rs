//! A PostgreSQL server as far as the worker sees it: committed transactions in the order of their
//! commits, the slot, its walsender, and the position row.

use std::collections::{BTreeSet, VecDeque};
use std::rc::Rc;

use fastrand::Rng;
use outbox_tailer::relay::Lsn;
use outbox_tailer::relay::line::Status;
use outbox_tailer::startcheck::{self, Persisted, System};

use crate::wire::{self, OTHER_OID, OUTBOX_OID};

/// Room that a commit record takes, and after it the next record begins.
const COMMIT_BYTES: u64 = 40;

/// One row of the outbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event {
    pub id: u32,
    pub key: u8,
}

#[derive(Debug)]
pub struct Transaction {
    pub commit_lsn: u64,
    pub end_lsn: u64,
    /// With the LSN of each; `None` is a row of another published table.
    pub rows: Vec<(u64, Option<Event>)>,
}

impl Transaction {
    pub fn events(&self) -> impl Iterator<Item = Event> {
        self.rows.iter().filter_map(|(_, event)| *event)
    }
}

#[derive(Debug, Clone)]
pub struct Slot {
    pub confirmed: u64,
    /// What a crash goes back to: confirmations are saved now and then only.
    pub saved: u64,
    /// The connection whose walsender has it.
    pub active: Option<usize>,
}

#[derive(Debug, Clone)]
pub struct Row {
    pub timeline: u32,
    pub position: u64,
    pub epoch: i64,
    pub instance: String,
}

#[derive(Clone)]
pub struct Server {
    pub timeline: u32,
    pub history: Vec<(u32, Lsn)>,
    /// End of the WAL.
    pub end: u64,
    pub open: Vec<Vec<(u64, Option<Event>)>>,
    pub committed: Vec<Rc<Transaction>>,
    pub slot: Option<Slot>,
    pub row: Row,
    /// Changes when every connection of before is gone.
    pub incarnation: u32,
    /// Version 14 streams a Begin and a Commit for a transaction without a published row.
    pub streams_empty: bool,
}

impl Server {
    /// As `init` leaves it.
    pub fn new(streams_empty: bool) -> Self {
        let start = 1000;
        Server {
            timeline: 1,
            history: vec![],
            end: start,
            open: vec![],
            committed: vec![],
            slot: Some(Slot { confirmed: start, saved: start, active: None }),
            row: Row { timeline: 1, position: start, epoch: 0, instance: String::new() },
            incarnation: 0,
            streams_empty,
        }
    }

    pub fn insert(&mut self, transaction: usize, event: Option<Event>) {
        self.open[transaction].push((self.end, event));
        self.end += 50;
    }

    pub fn commit(&mut self, transaction: usize) {
        let rows = self.open.swap_remove(transaction);
        self.commit_rows(rows);
    }

    fn commit_rows(&mut self, rows: Vec<(u64, Option<Event>)>) {
        let commit_lsn = self.end;
        self.end += COMMIT_BYTES;
        self.committed.push(Rc::new(Transaction { commit_lsn, end_lsn: self.end, rows }));
    }

    /// The one statement that moves the position: compare-and-swap on epoch and old LSN.
    pub fn advance(&mut self, epoch: i64, from: u64, to: u64) -> bool {
        let moves = self.row.epoch == epoch && self.row.position == from;
        if moves {
            self.row.position = to;
            self.end += 100;
            self.commit_rows(vec![]);
        }
        moves
    }

    /// Power is back: what was not saved is gone.
    pub fn restart(&mut self, rewinds: bool) {
        self.open.clear();
        self.incarnation += 1;
        if let Some(slot) = &mut self.slot {
            slot.active = None;
            if rewinds {
                slot.confirmed = slot.saved;
            }
            slot.saved = slot.confirmed;
        }
    }

    /// A standby that had replayed so much becomes the primary.
    pub fn promote(&mut self, incarnation: u32) {
        self.history.push((self.timeline, Lsn::from(self.end)));
        self.timeline += 1;
        self.end += 100;
        self.restart(false);
        self.incarnation = incarnation;
    }

    pub fn system(&self) -> System {
        System { identifier: "7".to_owned(), timeline: self.timeline, wal_end: Lsn::from(self.end) }
    }

    pub fn slot_facts(&self) -> Option<startcheck::Slot> {
        let slot = self.slot.as_ref()?;
        Some(startcheck::Slot {
            plugin: Some("pgoutput".to_owned()),
            slot_type: "logical".to_owned(),
            database: Some("db".to_owned()),
            temporary: false,
            two_phase: false,
            active_pid: slot.active.map(|_| 1),
            wal_status: Some("reserved".to_owned()),
            invalidation_reason: None,
            confirmed: Some(Lsn::from(slot.confirmed)),
        })
    }

    /// The last transaction with an outbox row.
    pub fn last_event_end(&self) -> u64 {
        let with_event = self.committed.iter().rev().find(|t| t.events().next().is_some());
        with_event.map_or(0, |t| t.end_lsn)
    }
}

impl Row {
    pub fn facts(&self) -> Persisted<'_> {
        Persisted {
            system_identifier: "7",
            timeline: self.timeline,
            position: Lsn::from(self.position),
            epoch: self.epoch,
            instance: &self.instance,
        }
    }
}

pub enum Message {
    Wal { lsn: u64, bytes: Vec<u8> },
    Keepalive { wal_end: u64, reply_requested: bool },
}

/// One replication connection, with the walsender at the other end.
pub struct Connection {
    pub server: usize,
    /// Sent, and not read yet.
    pub socket: VecDeque<Message>,
    /// On their way to the server.
    pub statuses: VecDeque<Status>,
    /// The server is gone from it: what is in the socket can still be read.
    pub closed: bool,
    /// The client is gone from it; the server may not know yet.
    pub abandoned: bool,
    /// Nothing passes any more, and nobody is told.
    pub black_hole: bool,
    /// Where the stream began.
    pub start: u64,
    /// What may be confirmed by this connection: ends of commits and keepalives between them.
    pub confirmable: BTreeSet<u64>,
    /// The most that was sent.
    sent: u64,
    /// The next transaction to send, and what is left to send of the one being sent.
    next: usize,
    rest: VecDeque<Message>,
    described: bool,
}

impl Connection {
    /// `START_REPLICATION`: at what is requested or what is confirmed, whichever is greater.
    pub fn start(server: &Server, index: usize, requested: u64) -> Self {
        let start = server.slot.as_ref().map_or(requested, |slot| slot.confirmed.max(requested));
        Connection {
            server: index,
            socket: VecDeque::new(),
            statuses: VecDeque::new(),
            closed: false,
            abandoned: false,
            black_hole: false,
            start,
            confirmable: BTreeSet::new(),
            sent: start,
            next: server.committed.partition_point(|t| t.commit_lsn < start),
            rest: VecDeque::new(),
            described: false,
        }
    }

    /// The walsender puts one more message into the socket, if it has one.
    pub fn send(&mut self, server: &Server, rng: &mut Rng) {
        if self.closed || self.black_hole {
            return;
        }
        let reply_requested = rng.u8(..) < 40;
        if !self.rest.is_empty() {
            // Inside a transaction: only the end of the WAL that was read is known, not that all
            // before it was sent (the protocol's own words: the current end of WAL on the server).
            if rng.u8(..) < 25 {
                let wal_end = rng.u64(self.sent..=server.end);
                self.socket.push_back(Message::Keepalive { wal_end, reply_requested });
            }
            self.socket.extend(self.rest.pop_front());
            return;
        }
        while let Some(transaction) = server.committed.get(self.next)
            && transaction.rows.is_empty()
            && !server.streams_empty
        {
            self.next += 1;
            self.sent = self.sent.max(transaction.end_lsn);
        }
        let transaction = server.committed.get(self.next);
        // What lies between commits is read without sending anything.
        let read_to = transaction.map_or(server.end, |t| t.commit_lsn);
        if rng.u8(..) < 50 || (transaction.is_none() && self.sent < read_to) {
            self.sent = rng.u64(self.sent..=read_to).max(self.sent);
            if transaction.is_none() && rng.bool() {
                self.sent = read_to;
            }
            self.confirmable.insert(self.sent);
            self.socket.push_back(Message::Keepalive { wal_end: self.sent, reply_requested });
        } else if let Some(transaction) = transaction {
            self.rest = messages(transaction, !self.described);
            self.described = true;
            self.next += 1;
            self.sent = transaction.end_lsn;
            self.confirmable.insert(transaction.end_lsn);
            self.socket.extend(self.rest.pop_front());
        }
    }

    /// The server takes note of one status. Gives what the slot is confirmed up to by it.
    pub fn hear(&mut self, server: &mut Server, rng: &mut Rng) -> Option<u64> {
        let status = self.statuses.pop_front()?;
        let slot = server.slot.as_mut()?;
        let flushed = u64::from(status.flushed);
        if flushed <= slot.confirmed {
            return None;
        }
        slot.confirmed = flushed;
        if rng.u8(..) < 80 {
            slot.saved = flushed; // the restart point moved, too
        }
        Some(flushed)
    }
}

fn messages(transaction: &Transaction, describe: bool) -> VecDeque<Message> {
    let (commit_lsn, end_lsn) = (transaction.commit_lsn, transaction.end_lsn);
    let first = transaction.rows.first().map_or(commit_lsn, |(lsn, _)| *lsn);
    let mut messages = VecDeque::from([Message::Wal { lsn: first, bytes: wire::begin(commit_lsn) }]);
    if describe {
        let outbox = wire::relation(OUTBOX_OID, "outbox", &["id", "key", "payload"]);
        let other = wire::relation(OTHER_OID, "other", &["id", "key"]);
        messages.extend([outbox, other].map(|bytes| Message::Wal { lsn: first, bytes }));
    }
    for (lsn, event) in &transaction.rows {
        let bytes = match event {
            Some(Event { id, key }) => {
                wire::insert(OUTBOX_OID, &[Some(&id.to_string()), Some(&key.to_string()), None])
            }
            None => wire::insert(OTHER_OID, &[Some("x"), Some("y")]),
        };
        messages.push_back(Message::Wal { lsn: *lsn, bytes });
    }
    messages.push_back(Message::Wal { lsn: end_lsn, bytes: wire::commit(commit_lsn, end_lsn) });
    messages
}
