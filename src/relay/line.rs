//! The decisions of one session: whether to read on, what a report means, when the position is
//! written, what the slot is told, and when the session is over.
//!
//! Time is what has passed since the session began. The session does the I/O and asks here what to
//! do; so does the simulator (`tests/sim`), with time and I/O of its own.

use std::time::Duration;

use super::progress::{Position, Seq};
use super::router::{Record, Unpublishable};
use super::truth::Truth;
use super::{Input, Lsn, Output, Poison, Relay, RelayError};

/// Foreign WAL below this is not worth a position write.
const IDLE_ADVANCE_BYTES: u64 = 64 << 10;
/// The same status is not sent more often: a server that shuts down asks in a tight loop.
const REPEAT_STATUS: Duration = Duration::from_millis(50);
/// Between two attempts to persist before the session ends.
const LAST_WRITES: Duration = Duration::from_millis(20);
/// Brokers forget an idle producer after a day (`producer.id.expiration.ms`): well before, a record
/// goes alone again, and what is not acknowledged is left to a new producer.
const PRODUCER_KNOWN: Duration = Duration::from_secs(3600);
/// Positions and acknowledged events kept behind an unacknowledged one, in windows.
const QUEUED_WINDOWS: usize = 4;

/// What a session keeps within.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    pub window_events: usize,
    pub window_bytes: usize,
    /// A larger record may be refused by the broker, which only it can tell when batches are
    /// compressed: it must be acknowledged before anything else is sent. Bytes of a batch of one.
    pub alone_over_bytes: usize,
    /// Whether the topics' size limits are known.
    pub knows_limits: bool,
    pub position_interval: Duration,
    pub idle_interval: Duration,
    pub status_interval: Duration,
    pub silence_timeout: Duration,
    pub shutdown_timeout: Duration,
}

/// What the broker has said of one event.
#[derive(Debug)]
pub enum Report {
    Acked(Seq),
    Failed { seq: Seq, why: Box<DeliveryError> },
}

#[derive(Debug)]
pub enum DeliveryError {
    /// The broker takes no record of this size (or the event cannot be valid for it).
    Rejected {
        /// For its size, or for that of its batch.
        size: bool,
        event_id: String,
        key: Option<String>,
        bytes: usize,
        reason: String,
    },
    /// Larger than the client's limit, and so not sent.
    TooLarge { event_id: String, key: String, bytes: usize },
    /// Anything that a new producer may get past.
    Other(String),
}

/// Why the line stops by itself.
#[derive(Debug)]
pub enum Fault {
    Event(Box<Poison>),
    /// A batch of several events was refused: which of them is at fault is not known.
    Batch(String),
    Delivery(String),
    /// A report for an event that is not in flight.
    Unknown(Seq),
}

/// Why the session ends although nothing has failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lost {
    /// The server has said nothing for so long, although asked.
    Silent(Duration),
    /// The oldest event was not acknowledged for so long.
    Stuck(Duration),
}

/// A standby status update.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Status {
    pub received: Lsn,
    pub flushed: Lsn,
    pub ask_reply: bool,
}

/// What is to be done about the position row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Write {
    Nothing,
    /// Look again then.
    At(Duration),
    Now(Position),
}

pub struct Line {
    pub relay: Relay,
    pub truth: Truth,
    /// The broker has refused a batch of several events: which of them is not known.
    pub batch_refused: bool,
    bounds: Bounds,
    received: Lsn,
    last_write: Duration,
    last_status: (Duration, Lsn),
    status_due: bool,
    last_heard: Duration,
    /// The oldest unacknowledged event, and since when it is that.
    oldest: (Seq, Duration),
    /// The last event sent, if it must be acknowledged before another one is sent. A broker takes any
    /// sequence number from a producer that it does not know yet in a partition (Kafka,
    /// `ProducerAppendInfo.checkSequence`), so a second batch could pass a first one that failed.
    alone: Option<Seq>,
    /// By topic and partition, when a record was last sent there: the broker knows this producer.
    known: Vec<(String, Vec<Option<Duration>>)>,
    /// A delivery has failed.
    failed: bool,
    /// Set once the session is to end after what is in flight.
    ending: Option<Ending>,
}

struct Ending {
    deadline: Duration,
    /// Whether to wait for acknowledgements; after a failed delivery none is to be expected.
    in_flight: bool,
}

impl Line {
    pub fn new(relay: Relay, truth: Truth, bounds: Bounds) -> Self {
        Line {
            received: truth.position(),
            relay,
            truth,
            batch_refused: false,
            bounds,
            last_write: Duration::ZERO,
            last_status: (Duration::ZERO, Lsn::from(0)),
            status_due: true,
            last_heard: Duration::ZERO,
            oldest: (0, Duration::ZERO),
            alone: None,
            known: Vec::new(),
            failed: false,
            ending: None,
        }
    }

    pub fn received(&self) -> Lsn {
        self.received
    }

    /// Whether more of the stream may be decoded.
    pub fn has_room(&self) -> bool {
        let events = self.relay.in_flight_events();
        (events == 0 || self.alone.is_none())
            && events < self.bounds.window_events
            && self.relay.queued() < self.bounds.window_events.saturating_mul(QUEUED_WINDOWS)
            && self.relay.in_flight_bytes() < self.bounds.window_bytes
    }

    /// Whether to wait for more of the stream.
    pub fn reads(&mut self, now: Duration) -> bool {
        let reading = self.ending.is_none() && self.has_room();
        if !reading {
            self.last_heard = now; // silence of our own making
        }
        reading
    }

    pub fn heard(&mut self, now: Duration) {
        self.last_heard = now;
    }

    /// Takes the payload of one XLogData message; a record that is asked for must be sent now.
    ///
    /// # Errors
    /// As [`Relay::handle`].
    pub fn wal<'a>(
        &'a mut self,
        lsn: Lsn,
        data: &'a [u8],
        now: Duration,
    ) -> Result<Option<Output<'a>>, RelayError> {
        self.received = self.received.max(lsn);
        let output = self.relay.handle(Input::Wal(data))?;
        if let Some(Output::Publish { seq, record }) = &output {
            let alone =
                is_first(&mut self.known, record, now) || record.batch_bytes > self.bounds.alone_over_bytes;
            self.alone = alone.then_some(*seq);
        }
        Ok(output)
    }

    /// # Errors
    /// As [`Relay::handle`].
    pub fn keepalive(&mut self, wal_end: Lsn, reply_requested: bool) -> Result<(), RelayError> {
        self.received = self.received.max(wal_end);
        self.relay.handle(Input::Keepalive { wal_end })?;
        self.status_due |= reply_requested;
        Ok(())
    }

    /// Takes what the broker said of an event, or that the producer did not take it.
    ///
    /// After a failed delivery nothing else is sent: the line stops, and the producer is to be purged.
    ///
    /// # Errors
    /// Why the line stops.
    pub fn report(&mut self, report: Report, now: Duration) -> Result<(), Fault> {
        let (seq, why) = match report {
            Report::Acked(seq) => {
                let _ = self.relay.handle(Input::Acked(seq));
                return Ok(());
            }
            Report::Failed { seq, why } => (seq, why),
        };
        let fault = match *why {
            // A batch of several fails as a whole, and of some reasons the broker does not say whose
            // they are; only an event that was alone is at fault.
            DeliveryError::Rejected { size, reason, .. } if self.alone != Some(seq) => {
                // A limit that was lowered is known at the next start.
                self.batch_refused |= !(size && self.bounds.knows_limits);
                Fault::Batch(reason)
            }
            DeliveryError::Rejected { event_id, key, bytes, reason, .. } => {
                self.poison(seq, &event_id, key, Unpublishable::Rejected { bytes, reason })
            }
            DeliveryError::TooLarge { event_id, key, bytes } => {
                let reason = "larger than message.max.bytes".to_owned();
                self.poison(seq, &event_id, Some(key), Unpublishable::Rejected { bytes, reason })
            }
            DeliveryError::Other(why) => Fault::Delivery(why),
        };
        let _ = self.relay.handle(Input::Failed(seq));
        // The first failure is the cause, the others follow from it.
        if std::mem::replace(&mut self.failed, true) {
            return Ok(());
        }
        self.end(now, false);
        Err(fault)
    }

    fn poison(&self, seq: Seq, event_id: &str, key: Option<String>, why: Unpublishable) -> Fault {
        let poison = self.relay.poison(seq, event_id, key, why);
        poison.map_or(Fault::Unknown(seq), |poison| Fault::Event(Box::new(poison)))
    }

    /// Stops reading; what is in flight, if that is to be waited for, and the position of what is
    /// acknowledged get until the deadline.
    pub fn end(&mut self, now: Duration, in_flight: bool) {
        self.ending = Some(Ending { deadline: now + self.bounds.shutdown_timeout, in_flight });
    }

    pub fn is_ending(&self) -> bool {
        self.ending.is_some()
    }

    /// Whether there is nothing left to wait for, or no time to.
    pub fn is_over(&self, now: Duration) -> bool {
        self.ending.as_ref().is_some_and(|ending| {
            let waits = ending.in_flight && self.relay.in_flight_events() > 0;
            let drained = !waits && self.truth.is_settled(self.relay.confirmable());
            drained || now >= ending.deadline
        })
    }

    /// Whether there is something to move the position to, and it is time.
    pub fn write(&mut self, now: Duration) -> Write {
        let Some(position) = self.relay.confirmable() else { return Write::Nothing };
        if !self.truth.may_persist(position) {
            return Write::Nothing;
        }
        let persisted = self.truth.position();
        let ahead = u64::from(position.lsn) - u64::from(persisted);
        let due = if self.ending.is_some() {
            self.last_write + self.bounds.position_interval.min(LAST_WRITES)
        } else if position.events_end > persisted {
            self.last_write + self.bounds.position_interval
        } else if ahead >= IDLE_ADVANCE_BYTES {
            self.last_write + self.bounds.idle_interval
        } else {
            return Write::Nothing;
        };
        if now < due {
            return Write::At(due);
        }
        Write::Now(self.truth.persist(position))
    }

    /// The row with this position is committed.
    pub fn persisted(&mut self, lsn: Lsn, now: Duration) {
        self.last_write = now;
        self.truth.persisted(lsn);
        self.status_due |= self.truth.tellable() > self.last_status.1;
    }

    /// The row did not move.
    pub fn not_persisted(&mut self, now: Duration) {
        self.last_write = now;
        self.truth.not_persisted();
    }

    /// The witness has it, safe from a crash.
    pub fn witnessed(&mut self, lsn: Lsn) {
        self.truth.witnessed(lsn);
        self.status_due = true;
    }

    /// The status to send if one is due.
    pub fn due_status(&mut self, now: Duration) -> Option<Status> {
        if self.status_due { self.status(now, false) } else { None }
    }

    /// The status to send, unless the same was sent a moment ago: then it stays due.
    pub fn status(&mut self, now: Duration, ask_reply: bool) -> Option<Status> {
        let (at, told) = self.last_status;
        let flushed = self.truth.tellable();
        if told == flushed && now < at + REPEAT_STATUS && !ask_reply {
            return None;
        }
        self.status_due = false;
        self.last_status = (now, flushed);
        Some(Status { received: self.received, flushed, ask_reply })
    }

    /// The status to send now and then, and when the server is silent.
    ///
    /// # Errors
    /// See [`Lost`].
    pub fn tick(&mut self, now: Duration) -> Result<Option<Status>, Lost> {
        let silent = now - self.last_heard;
        if silent >= self.bounds.silence_timeout {
            return Err(Lost::Silent(silent));
        }
        let oldest = self.relay.oldest();
        if self.relay.in_flight_events() == 0 || oldest != self.oldest.0 {
            self.oldest = (oldest, now);
        }
        if self.stuck(now) >= PRODUCER_KNOWN {
            return Err(Lost::Stuck(self.stuck(now)));
        }
        let ask = silent >= self.bounds.silence_timeout / 2;
        let due = ask || now >= self.last_status.0 + self.bounds.status_interval;
        Ok(if due { self.status(now, ask) } else { None })
    }

    /// Since when the oldest event was not acknowledged, as of the last tick.
    pub fn stuck(&self, now: Duration) -> Duration {
        now - self.oldest.1
    }
}

/// Whether the broker may not know this producer in the record's partition.
fn is_first(known: &mut Vec<(String, Vec<Option<Duration>>)>, record: &Record<'_>, now: Duration) -> bool {
    let at = known.iter().position(|(topic, _)| topic == record.topic).unwrap_or_else(|| {
        known.push((record.topic.to_owned(), Vec::new()));
        known.len() - 1
    });
    let (partitions, partition) = (&mut known[at].1, record.partition as usize);
    if partitions.len() <= partition {
        partitions.resize(partition + 1, None);
    }
    let last = partitions[partition].replace(now);
    last.is_none_or(|last| now - last > PRODUCER_KNOWN)
}
