//! One `START_REPLICATION` lifetime, in one loop.
//!
//! ```text
//! stream ─▶ relay ─▶ producer            order of truth:
//!   ▲                   │ reports             broker acknowledged
//!   │ status            ▼                     → position row committed (keeper)
//!   └─ truth ◀─ notary ◀─ keeper ◀─ relay     → witness written (notary) → slot told (status)
//! ```
//!
//! The session owns line (with the relay), producer, keeper and stream: when it ends, everything in
//! flight ends with it, and the next one starts from the persisted position. What is decided is
//! decided in [`crate::relay::line`]; here is the I/O.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};

use crate::error::{Error, Kind, Refusal, Result};
use crate::kafka::{Producer, SendError};
use crate::position::{Keeper, Moved, publication_refusal};
use crate::relay::line::{DeliveryError, Fault, Line, Lost, Report, Status, Write};
use crate::relay::progress::Seq;
use crate::relay::router::{ID_HEADER, Record};
use crate::relay::{Lsn, Output, Poison, RelayError};
use crate::source::{Received, Stream};
use crate::witness::Notary;

/// Without an acknowledgement for so long the log says that Kafka is stuck.
const STUCK_AFTER: Duration = Duration::from_secs(15);
/// An unchanged reason why the position does not move is told again after this.
const REPEAT_BUSY: Duration = Duration::from_secs(60);
/// With more WAL than this to come, the stream is read in large steps.
const BEHIND_BYTES: u64 = 1 << 20;
const QUEUE_FULL_TIMEOUT: Duration = Duration::from_secs(5);

pub struct Session {
    pub line: Line,
    pub producer: Producer,
    /// Whether Kafka answers.
    pub kafka_answers: watch::Receiver<bool>,
    pub keeper: Keeper,
    /// `None` without a witness.
    pub notary: Option<Notary>,
    pub stream: Stream,
    /// How far the server's log was when it was last looked at.
    pub server_end: Lsn,
    pub tick_interval: Duration,
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
    began: Instant,
    published: u64,
    acked: u64,
    stuck: bool,
    /// When it was last said that the position does not move.
    busy_told: Option<Instant>,
    /// Why the session ends once it is over.
    why: Result<()>,
}

impl State {
    /// The line's time.
    fn now(&self) -> Duration {
        self.began.elapsed()
    }
}

impl Session {
    /// Runs until the stream fails, an event cannot be published, or `stop` becomes true.
    pub async fn run(mut self, stop: &mut watch::Receiver<bool>) -> Outcome {
        let now = Instant::now();
        let before = self.line.truth.position();
        let mut state =
            State { began: now, published: 0, acked: 0, stuck: false, busy_told: None, why: Ok(()) };
        let result = self.serve(&mut state, stop).await;
        let undelivered = self.line.relay.in_flight_events();
        if result.is_err() || undelivered > 0 {
            self.producer.purge();
        }
        let reads = self.stream.reads();
        self.stream.finish().await;
        let ignored = self.line.relay.ignored();
        tracing::info!(
            published = state.published,
            acknowledged = state.acked,
            undelivered,
            position = %self.line.truth.position(),
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
            persisted: self.line.truth.position(),
            requested: self.line.truth.requested(),
            result,
            advanced: self.line.truth.position() > before,
            undelivered,
            batch_refused: self.line.batch_refused,
        }
    }

    async fn serve(&mut self, state: &mut State, stop: &mut watch::Receiver<bool>) -> Result<()> {
        let mut ticks = interval(self.tick_interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut reports = Vec::new();
        loop {
            self.take_reports(state, &mut reports);
            if !self.line.is_ending()
                && let Err(error) = self.publish_buffered(state).await
            {
                match error.kind {
                    // What is in flight before a refused event may still be delivered and confirmed.
                    Kind::Refusal(_) => {
                        state.why = Err(error);
                        self.line.end(state.now(), true);
                    }
                    _ => return Err(error),
                }
            }
            let write_at = self.request_write(state).await;
            if let Some(notary) = &self.notary
                && let Some(lsn) = self.line.truth.witness()
            {
                // The notary is idle, so this does not wait; if it has ended, its result says why.
                let _ = notary.requests.send(lsn).await;
            }
            let due = self.line.due_status(state.now());
            self.status(due).await?;
            if self.line.is_over(state.now()) {
                let last = self.line.status(state.now(), false);
                self.status(last).await?;
                return std::mem::replace(&mut state.why, Ok(()));
            }
            let reading = self.line.reads(state.now());
            let behind =
                u64::from(self.server_end).saturating_sub(self.line.received().into()) > BEHIND_BYTES;
            tokio::select! {
                biased;
                _ = stop.changed(), if !self.line.is_ending() => {
                    tracing::info!(in_flight = self.line.relay.in_flight_events(), "stopping: waiting for what is in flight");
                    self.line.end(state.now(), true);
                }
                result = self.keeper.results.recv() => {
                    let result = result.unwrap_or_else(|| Err(Error::bug("the position task ended without a word")))?;
                    match result {
                        Moved::To { lsn, wal_end } => {
                            self.line.persisted(lsn, state.now());
                            self.server_end = wal_end;
                            state.busy_told = None;
                        }
                        Moved::Busy(why) => {
                            self.line.not_persisted(state.now());
                            if state.busy_told.is_none_or(|at| at.elapsed() > REPEAT_BUSY) {
                                tracing::warn!(position = %self.line.truth.position(), "the position does not move: {why}");
                                state.busy_told = Some(Instant::now());
                            }
                        }
                    }
                }
                result = written(&mut self.notary) => {
                    self.line.witnessed(result?);
                }
                // A reader that is behind looks by itself, often enough: to be woken costs more than to look.
                () = self.producer.reported(), if !(behind && reading) => {}
                Ok(()) = self.kafka_answers.changed() => {
                    if *self.kafka_answers.borrow_and_update() {
                        tracing::info!(ready = !state.stuck, "Kafka answers again");
                    } else {
                        tracing::warn!(ready = false, "Kafka does not answer");
                    }
                }
                _ = ticks.tick() => self.tick(state).await?,
                () = sleep_until(write_at.unwrap_or_else(Instant::now)), if write_at.is_some() => {}
                filled = self.stream.fill(behind), if reading => {
                    filled?;
                    self.line.heard(state.now());
                }
            }
        }
    }

    /// Decodes what is in the buffer and hands it to the producer, as far as the window allows.
    async fn publish_buffered(&mut self, state: &mut State) -> Result<()> {
        let now = state.now();
        while self.line.has_room() {
            let Some(received) = self.stream.take()? else { return Ok(()) };
            match received {
                Received::Wal { lsn, data } => match self.line.wal(lsn, &data, now).map_err(stopped)? {
                    Some(Output::Publish { seq, record }) => {
                        match hand_over(&self.producer, seq, &record).await {
                            Ok(()) => state.published += 1,
                            Err(why) => {
                                self.report(state, Report::Failed { seq, why: Box::new(why) }, now);
                                return Ok(());
                            }
                        }
                    }
                    Some(Output::Skipped(place)) => {
                        tracing::warn!(%place, "event skipped, as an operator decided");
                    }
                    None => {}
                },
                Received::Keepalive { wal_end, reply_requested } => {
                    self.line.keepalive(wal_end, reply_requested).map_err(stopped)?;
                }
                Received::Notice { rows_skipped: true, text } => {
                    return Err(publication_refusal(&format!("the server skips rows: {text}")));
                }
                Received::Notice { text, .. } => tracing::warn!("PostgreSQL says: {text}"),
            }
        }
        Ok(())
    }

    fn take_reports(&mut self, state: &mut State, reports: &mut Vec<Report>) {
        self.producer.take_reports(reports);
        let now = state.now();
        for report in reports.drain(..) {
            self.report(state, report, now);
        }
    }

    /// After a failed delivery nothing else is sent.
    fn report(&mut self, state: &mut State, report: Report, now: Duration) {
        if let Report::Acked(_) = report {
            state.acked += 1;
        }
        if let Err(fault) = self.line.report(report, now) {
            self.producer.purge();
            state.why = Err(fault_error(fault));
        }
    }

    /// Asks the keeper to move the position when it is time; gives the time at which to look again.
    async fn request_write(&mut self, state: &State) -> Option<Instant> {
        match self.line.write(state.now()) {
            Write::Nothing => None,
            Write::At(due) => Some(state.began + due),
            Write::Now(position) => {
                // The keeper is idle, so this does not wait; if it has ended, its result says why.
                let _ = self.keeper.requests.send(position).await;
                None
            }
        }
    }

    async fn status(&mut self, status: Option<Status>) -> Result<()> {
        let Some(Status { received, flushed, ask_reply }) = status else { return Ok(()) };
        self.stream.status(received, flushed, ask_reply).await
    }

    async fn tick(&mut self, state: &mut State) -> Result<()> {
        let status = self.line.tick(state.now()).map_err(|lost| match lost {
            Lost::Silent(silent) => {
                let silent = silent.as_secs();
                Error::wait(format!("PostgreSQL has said nothing for {silent} s, although asked"))
            }
            Lost::Stuck(stuck) => {
                let stuck = stuck.as_secs();
                Error::wait(format!("Kafka has not acknowledged the oldest event for {stuck} s"))
            }
        })?;
        self.status(status).await?;
        let is_stuck = self.line.stuck(state.now()) >= STUCK_AFTER;
        let was_stuck = std::mem::replace(&mut state.stuck, is_stuck);
        if was_stuck && !is_stuck {
            tracing::info!(ready = *self.kafka_answers.borrow(), "Kafka acknowledges again");
        }
        if is_stuck && !was_stuck {
            tracing::warn!(
                ready = false,
                in_flight = self.line.relay.in_flight_events(),
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

/// Gives one record to librdkafka. Its queue is twice the window, so it can be full only until it
/// has freed what it has reported.
async fn hand_over(producer: &Producer, seq: Seq, record: &Record<'_>) -> Result<(), DeliveryError> {
    let mut full_since = None;
    loop {
        match producer.send(seq, record) {
            Ok(()) => return Ok(()),
            Err(SendError::QueueFull) => {
                if full_since.get_or_insert_with(Instant::now).elapsed() > QUEUE_FULL_TIMEOUT {
                    return Err(DeliveryError::Other("librdkafka's queue stays full".to_owned()));
                }
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            Err(SendError::TooLarge) => {
                let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
                let id =
                    record.headers.iter().find(|(name, _)| *name == ID_HEADER).and_then(|(_, value)| *value);
                let event_id = text(id.unwrap_or_default());
                return Err(DeliveryError::TooLarge {
                    event_id,
                    key: text(record.key),
                    bytes: record.payload_bytes(),
                });
            }
            Err(SendError::Other(why)) => {
                return Err(DeliveryError::Other(format!("Kafka's producer gave up: {why}")));
            }
        }
    }
}

fn fault_error(fault: Fault) -> Error {
    match fault {
        Fault::Event(poison) => stopped(RelayError::Poison(poison)),
        Fault::Batch(reason) => Error::wait(format!("the broker refused a batch: {reason}")),
        Fault::Delivery(why) => Error::wait(why),
        Fault::Unknown(seq) => Error::bug(format!("a report for event {seq}, which is not in flight")),
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
