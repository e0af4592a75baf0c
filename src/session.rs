//! One `START_REPLICATION` lifetime, in one loop.
//!
//! ```text
//! stream ─▶ relay ─▶ producer            order of truth:
//!   ▲                   │ reports             broker acknowledged
//!   │ status            ▼                     → position row committed (keeper)
//!   └─ truth ◀─ notary ◀─ keeper ◀─ relay     → witness written (notary) → slot told (status)
//! ```
//!
//! The session owns relay, producer, keeper and stream: when it ends, everything in flight ends
//! with it, and the next one starts from the persisted position.

use std::collections::HashMap;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};

use crate::config::Worker;
use crate::error::{Error, Kind, Refusal, Result};
use crate::kafka::{DeliveryError, Producer, Report, SendError};
use crate::position::{Keeper, Moved, publication_refusal};
use crate::relay::progress::Seq;
use crate::relay::router::{ID_HEADER, Record, Unpublishable};
use crate::relay::truth::Truth;
use crate::relay::{Input, Lsn, Output, Poison, Relay, RelayError};
use crate::source::{Received, Stream};
use crate::witness::Notary;

/// Foreign WAL below this is not worth a position write.
const IDLE_ADVANCE_BYTES: u64 = 64 << 10;
/// The same status is not sent more often: a server that shuts down asks in a tight loop.
const REPEAT_STATUS: Duration = Duration::from_millis(50);
/// Without an acknowledgement for so long the log says that Kafka is stuck.
const STUCK_AFTER: Duration = Duration::from_secs(15);
/// Between two attempts to persist before the session ends.
const LAST_WRITES: Duration = Duration::from_millis(20);
/// Brokers forget an idle producer after a day (`producer.id.expiration.ms`).
const PRODUCER_KNOWN: Duration = Duration::from_secs(3600);
/// Positions and acknowledged events kept behind an unacknowledged one, in windows.
const QUEUED_WINDOWS: usize = 4;
/// An unchanged reason why the position does not move is told again after this.
const REPEAT_BUSY: Duration = Duration::from_secs(60);
/// With more WAL than this to come, the stream is read in large steps.
const BEHIND_BYTES: u64 = 1 << 20;
const QUEUE_FULL_TIMEOUT: Duration = Duration::from_secs(5);

pub struct Session<'a> {
    pub worker: &'a Worker,
    pub window_events: usize,
    pub window_bytes: usize,
    pub relay: Relay,
    pub producer: Producer,
    pub keeper: Keeper,
    /// `None` without a witness.
    pub notary: Option<Notary>,
    pub stream: Stream,
    pub truth: Truth,
    /// How far the server's log was when it was last looked at.
    pub server_end: Lsn,
    pub status_interval: Duration,
    pub silence_timeout: Duration,
}

/// What a session leaves behind.
#[derive(Debug)]
pub struct Outcome {
    /// The last position that was committed.
    pub persisted: Lsn,
    /// The last position that was asked for.
    pub requested: Lsn,
    /// `Ok` after a graceful stop.
    pub result: Result<()>,
    /// Whether the position moved.
    pub advanced: bool,
    /// Events published and not acknowledged.
    pub undelivered: usize,
    /// The broker refused a batch of several events: which of them is not known.
    pub batch_refused: bool,
}

struct State {
    received: Lsn,
    published: u64,
    acked: u64,
    last_write: Instant,
    last_status: (Instant, Lsn),
    status_due: bool,
    last_heard: Instant,
    /// The oldest unacknowledged event, and since when it is that.
    oldest: (Seq, Instant),
    stuck: bool,
    /// When it was last said that the position does not move.
    busy_told: Option<Instant>,
    batch_refused: bool,
    /// The last event sent, if it must be acknowledged before another one is sent. A broker takes any
    /// sequence number from a producer that it does not know yet in a partition (Kafka,
    /// `ProducerAppendInfo.checkSequence`), so a second batch could pass a first one that failed.
    alone: Option<Seq>,
    /// By topic and partition, when a record was last sent there: the broker knows this producer.
    known: HashMap<String, HashMap<i32, Instant>>,
    /// A delivery has failed.
    failed: bool,
    /// Set once the session is to end after what is in flight.
    ending: Option<Ending>,
}

impl State {
    /// Whether the broker may not know this producer in the record's partition.
    fn is_first(&mut self, record: &Record<'_>, now: Instant) -> bool {
        if !self.known.contains_key(record.topic) {
            self.known.insert(record.topic.to_owned(), HashMap::new());
        }
        let last = self.known.get_mut(record.topic).and_then(|p| p.insert(record.partition, now));
        last.is_none_or(|last| now - last > PRODUCER_KNOWN)
    }
}

struct Ending {
    deadline: Instant,
    why: Result<()>,
    /// Whether to wait for acknowledgements; after a failed delivery none is to be expected.
    in_flight: bool,
}

impl Session<'_> {
    /// Runs until the stream fails, an event cannot be published, or `stop` becomes true.
    pub async fn run(mut self, stop: &mut watch::Receiver<bool>) -> Outcome {
        let now = Instant::now();
        let before = self.truth.position();
        let mut state = State {
            received: before,
            published: 0,
            acked: 0,
            last_write: now,
            last_status: (now, Lsn::from(0)),
            status_due: true,
            last_heard: now,
            oldest: (0, now),
            stuck: false,
            busy_told: None,
            batch_refused: false,
            alone: None,
            known: HashMap::new(),
            failed: false,
            ending: None,
        };
        let result = self.serve(&mut state, stop).await;
        let undelivered = self.relay.in_flight_events();
        if result.is_err() || undelivered > 0 {
            self.producer.purge();
        }
        let reads = self.stream.reads();
        self.stream.finish().await;
        let ignored = self.relay.ignored();
        tracing::info!(
            published = state.published,
            acknowledged = state.acked,
            undelivered,
            position = %self.truth.position(),
            ignored_updates = ignored.updates,
            ignored_deletes = ignored.deletes,
            ignored_truncates = ignored.truncates,
            ignored_other_tables = ignored.other_tables,
            skipped = ignored.skipped,
            reads = reads.all,
            reads_with_the_window_shut = reads.gathered,
            "session ended"
        );
        Outcome {
            persisted: self.truth.position(),
            requested: self.truth.requested(),
            result,
            advanced: self.truth.position() > before,
            undelivered,
            batch_refused: state.batch_refused,
        }
    }

    async fn serve(&mut self, state: &mut State, stop: &mut watch::Receiver<bool>) -> Result<()> {
        let mut ticks = interval(self.status_interval.min(Duration::from_secs(1)));
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut reports = Vec::new();
        loop {
            if state.ending.is_none()
                && let Err(error) = self.publish_buffered(state).await
            {
                match error.kind {
                    // What is in flight before a refused event may still be delivered and confirmed.
                    Kind::Refusal(_) => self.end(state, Err(error), true),
                    _ => return Err(error),
                }
            }
            let write_at = self.request_write(state).await?;
            if let Some(notary) = &self.notary
                && let Some(lsn) = self.truth.witness()
            {
                // The notary is idle, so this does not wait; if it has ended, its result says why.
                let _ = notary.requests.send(lsn).await;
            }
            if state.status_due {
                self.status(state, false).await?;
            }
            if let Some(ending) = &mut state.ending {
                let waits = ending.in_flight && self.relay.in_flight_events() > 0;
                let drained = !waits && self.truth.is_settled(self.relay.confirmable());
                if drained || Instant::now() >= ending.deadline {
                    let why = std::mem::replace(&mut ending.why, Ok(()));
                    self.status(state, false).await?;
                    return why;
                }
            }
            let reading = state.ending.is_none() && self.has_room(state);
            let behind = u64::from(self.server_end).saturating_sub(state.received.into()) > BEHIND_BYTES;
            if !reading {
                state.last_heard = Instant::now(); // silence of our own making
            }
            tokio::select! {
                biased;
                _ = stop.changed(), if state.ending.is_none() => {
                    tracing::info!(in_flight = self.relay.in_flight_events(), "stopping: waiting for what is in flight");
                    self.end(state, Ok(()), true);
                }
                result = self.keeper.results.recv() => {
                    let result = result.unwrap_or_else(|| Err(Error::bug("the position task ended without a word")))?;
                    state.last_write = Instant::now();
                    match result {
                        Moved::To { lsn, wal_end } => {
                            self.truth.persisted(lsn);
                            self.server_end = wal_end;
                            state.status_due |= self.notary.is_none();
                            state.busy_told = None;
                        }
                        Moved::Busy(why) => {
                            self.truth.not_persisted();
                            if state.busy_told.is_none_or(|at| at.elapsed() > REPEAT_BUSY) {
                                tracing::warn!(position = %self.truth.position(), "the position does not move: {why}");
                                state.busy_told = Some(Instant::now());
                            }
                        }
                    }
                }
                result = written(&mut self.notary) => {
                    self.truth.witnessed(result?);
                    state.status_due = true;
                }
                () = self.producer.reported() => {
                    self.producer.take_reports(&mut reports);
                    for report in reports.drain(..) {
                        self.report(state, report)?;
                    }
                }
                _ = ticks.tick() => self.tick(state).await?,
                () = sleep_until(write_at.unwrap_or_else(Instant::now)), if write_at.is_some() => {}
                filled = self.stream.fill(behind), if reading => {
                    filled?;
                    state.last_heard = Instant::now();
                }
            }
        }
    }

    fn has_room(&self, state: &State) -> bool {
        let events = self.relay.in_flight_events();
        (events == 0 || state.alone.is_none())
            && events < self.window_events
            && self.relay.queued() < self.window_events.saturating_mul(QUEUED_WINDOWS)
            && self.relay.in_flight_bytes() < self.window_bytes
    }

    /// Stops reading; what is in flight, if that is to be waited for, and the position of what is
    /// acknowledged get until the deadline.
    fn end(&self, state: &mut State, why: Result<()>, in_flight: bool) {
        let deadline = Instant::now() + self.worker.shutdown_timeout;
        state.ending = Some(Ending { deadline, why, in_flight });
    }

    /// After a failed delivery: nothing else is sent.
    fn stop_the_line(&self, state: &mut State, why: Error) {
        self.producer.purge();
        self.end(state, Err(why), false);
    }

    /// Decodes what is in the buffer and hands it to the producer, as far as the window allows.
    async fn publish_buffered(&mut self, state: &mut State) -> Result<()> {
        let now = Instant::now();
        while self.has_room(state) {
            let Some(received) = self.stream.take()? else { return Ok(()) };
            match received {
                Received::Wal { lsn, data } => {
                    state.received = state.received.max(lsn);
                    let Some(output) = self.relay.handle(Input::Wal(&data)).map_err(stopped)? else {
                        continue;
                    };
                    match output {
                        Output::Publish { seq, record } => {
                            let first = state.is_first(&record, now);
                            let alone = first || record.batch_bytes() > self.producer.alone_over_bytes;
                            match hand_over(&self.producer, seq, &record).await {
                                Ok(()) => {
                                    state.alone = alone.then_some(seq);
                                    state.published += 1;
                                }
                                Err(refused) => {
                                    let error = match refused {
                                        Refused::Producer(error) => error,
                                        Refused::TooLarge { event_id, key, bytes } => {
                                            let reason = "larger than message.max.bytes".to_owned();
                                            let why = Unpublishable::Rejected { bytes, reason };
                                            self.poison(seq, &event_id, Some(key), why)
                                        }
                                    };
                                    self.relay.handle(Input::Failed(seq)).map_err(stopped)?;
                                    state.failed = true;
                                    self.stop_the_line(state, error);
                                    return Ok(());
                                }
                            }
                        }
                        Output::Skipped(place) => {
                            tracing::warn!(%place, "event skipped, as an operator decided");
                        }
                    }
                }
                Received::Keepalive { wal_end, reply_requested } => {
                    state.received = state.received.max(wal_end);
                    self.relay.handle(Input::Keepalive { wal_end }).map_err(stopped)?;
                    state.status_due |= reply_requested;
                }
                Received::Notice { rows_skipped: true, text } => {
                    return Err(publication_refusal(&format!("the server skips rows: {text}")));
                }
                Received::Notice { text, .. } => tracing::warn!("PostgreSQL says: {text}"),
            }
        }
        Ok(())
    }

    fn report(&mut self, state: &mut State, report: Report) -> Result<()> {
        match report {
            Report::Acked(seq) => {
                self.relay.handle(Input::Acked(seq)).map_err(stopped)?;
                state.acked += 1;
                Ok(())
            }
            Report::Failed { seq, why } => {
                let error = match why {
                    // A batch of several fails as a whole, and of some reasons the broker does not say
                    // whose they are; only an event that was alone is at fault.
                    DeliveryError::Rejected { size, reason, .. } if state.alone != Some(seq) => {
                        // A limit that was lowered is known at the next start.
                        state.batch_refused |= !(size && self.producer.knows_limits);
                        Error::wait(format!("the broker refused a batch: {reason}"))
                    }
                    DeliveryError::Rejected { event_id, key, bytes, reason, .. } => {
                        self.poison(seq, &event_id, key, Unpublishable::Rejected { bytes, reason })
                    }
                    DeliveryError::Other(why) => Error::wait(format!("Kafka did not take an event: {why}")),
                };
                self.relay.handle(Input::Failed(seq)).map_err(stopped)?;
                // The first failure is the cause, the others follow from it.
                if !state.failed {
                    state.failed = true;
                    self.stop_the_line(state, error);
                }
                Ok(())
            }
        }
    }

    fn poison(&self, seq: Seq, event_id: &str, key: Option<String>, why: Unpublishable) -> Error {
        match self.relay.poison(seq, event_id, key, why) {
            Some(poison) => stopped(RelayError::Poison(Box::new(poison))),
            None => Error::bug(format!("a report for event {seq}, which is not in flight")),
        }
    }

    /// Asks the keeper to move the position when there is something to move to and it is time; gives
    /// the time at which to look again.
    async fn request_write(&mut self, state: &mut State) -> Result<Option<Instant>> {
        let Some(position) = self.relay.confirmable() else { return Ok(None) };
        if !self.truth.may_persist(position) {
            return Ok(None);
        }
        let persisted = self.truth.position();
        let ahead = u64::from(position.lsn) - u64::from(persisted);
        let due = if state.ending.is_some() {
            state.last_write + self.worker.position_interval.min(LAST_WRITES)
        } else if position.events_end > persisted {
            state.last_write + self.worker.position_interval
        } else if ahead >= IDLE_ADVANCE_BYTES {
            state.last_write + self.worker.idle_interval
        } else {
            return Ok(None);
        };
        if Instant::now() < due {
            return Ok(Some(due));
        }
        // The keeper is idle, so this does not wait; if it has ended, its result says why.
        let _ = self.keeper.requests.send(self.truth.persist(position)).await;
        Ok(None)
    }

    async fn status(&mut self, state: &mut State, ask_reply: bool) -> Result<()> {
        let now = Instant::now();
        let (at, told) = state.last_status;
        let tellable = self.truth.tellable();
        if told == tellable && now < at + REPEAT_STATUS && !ask_reply {
            return Ok(()); // stays due
        }
        state.status_due = false;
        state.last_status = (now, tellable);
        self.stream.status(state.received, tellable, ask_reply).await
    }

    async fn tick(&mut self, state: &mut State) -> Result<()> {
        let now = Instant::now();
        let silent = now - state.last_heard;
        if silent >= self.silence_timeout {
            return Err(Error::wait(format!(
                "PostgreSQL has said nothing for {} s, although asked",
                silent.as_secs()
            )));
        }
        let ask = silent >= self.silence_timeout / 2;
        if ask || now >= state.last_status.0 + self.status_interval {
            self.status(state, ask).await?;
        }
        let waits = self.relay.in_flight_events();
        if waits == 0 || self.relay.oldest() != state.oldest.0 {
            state.oldest = (self.relay.oldest(), now);
            if std::mem::take(&mut state.stuck) {
                tracing::info!(ready = true, "Kafka acknowledges again");
            }
        }
        if !state.stuck && now - state.oldest.1 >= STUCK_AFTER {
            state.stuck = true;
            tracing::warn!(
                ready = false,
                in_flight = waits,
                "Kafka does not acknowledge the oldest event since {} s; nothing is confirmed, WAL is kept",
                STUCK_AFTER.as_secs()
            );
        }
        Ok(())
    }
}

/// The next result of the notary; never without one.
async fn written(notary: &mut Option<Notary>) -> Result<Lsn> {
    match notary {
        None => std::future::pending().await,
        Some(notary) => {
            let gone = || Err(Error::bug("the witness task ended without a word"));
            notary.results.recv().await.unwrap_or_else(gone)
        }
    }
}

enum Refused {
    TooLarge { event_id: String, key: String, bytes: usize },
    Producer(Error),
}

/// Gives one record to librdkafka. Its queue is twice the window, so it can be full only until it
/// has freed what it has reported.
async fn hand_over(producer: &Producer, seq: Seq, record: &Record<'_>) -> Result<(), Refused> {
    let deadline = Instant::now() + QUEUE_FULL_TIMEOUT;
    loop {
        match producer.send(seq, record) {
            Ok(()) => return Ok(()),
            Err(SendError::QueueFull) if Instant::now() < deadline => {
                tokio::time::sleep(Duration::from_millis(1)).await
            }
            Err(SendError::QueueFull) => {
                return Err(Refused::Producer(Error::wait("librdkafka's queue stays full")));
            }
            Err(SendError::TooLarge) => {
                let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
                let id =
                    record.headers.iter().find(|(name, _)| *name == ID_HEADER).and_then(|(_, value)| *value);
                let event_id = text(id.unwrap_or_default());
                return Err(Refused::TooLarge {
                    event_id,
                    key: text(record.key),
                    bytes: record.payload_bytes(),
                });
            }
            Err(SendError::Other(why)) => {
                return Err(Refused::Producer(Error::wait(format!("Kafka's producer gave up: {why}"))));
            }
        }
    }
}

/// An error of the core, by what the operator can do about it.
fn stopped(error: RelayError) -> Error {
    let text = error.to_string();
    match error {
        RelayError::Decode { .. } | RelayError::Protocol(_) => Error::wait(text),
        RelayError::Columns { .. } => Error::refusal(Refusal::Columns, text),
        RelayError::Swapped { .. } => Error::refusal(Refusal::Publication, text),
        RelayError::Poison(poison) => {
            let text = format!(
                "{text}; nothing after it is published; to go past it: outbox-tailer skip {}",
                poison.event_id
            );
            Error::refusal(Refusal::Poison, text).with_detail(poison_detail(&poison))
        }
    }
}

fn poison_detail(poison: &Poison) -> serde_json::Value {
    serde_json::json!({
        "event_id": poison.event_id,
        "table": poison.table,
        "key": poison.key,
        "commit_lsn": poison.place.commit_lsn.to_string(),
        "ordinal": poison.place.ordinal,
        "why": poison.why.to_string(),
    })
}
