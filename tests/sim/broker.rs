//! Kafka and librdkafka as far as the session sees them: a log per partition, idempotent producers
//! with sequence numbers, and reports.
//!
//! What a partition has only on its leader can be lost with the leader; what is replicated can be
//! read and is acknowledged. A producer that the leader does not know may begin with any sequence
//! number (`ProducerAppendInfo.checkSequence`). librdkafka sends batches of a partition in order, up
//! to five at once, sends them again in order after an error that may pass, and gives up with the
//! first one that does not (`enable.gapless.guarantee`). Left out: after a local failure (the topic
//! is unknown for a while) it takes new records before the session has heard of the failure.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use fastrand::Rng;
use outbox_tailer::relay::line::{DeliveryError, Report};
use outbox_tailer::relay::progress::Seq;

use crate::server::Event;

pub const PARTITIONS: usize = 3;
/// `max.in.flight.requests.per.connection`.
const IN_FLIGHT: usize = 5;
/// `producer.id.expiration.ms`.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(24 * 3600);

#[derive(Default)]
pub struct Broker {
    pub partitions: [Partition; PARTITIONS],
    pub producers: Vec<Producer>,
    /// Ids of which some producer was told that they are stored.
    pub acked: Vec<u32>,
}

#[derive(Default)]
pub struct Partition {
    pub log: Vec<Event>,
    /// Replicated: everything before is visible and stays.
    pub high: usize,
    known: HashMap<usize, Known>,
}

/// What a leader knows of a producer.
#[derive(Default)]
struct Known {
    /// Base sequence, number of records, and end in the log of the batches; the last five count.
    batches: VecDeque<(u32, u32, usize)>,
    last: Duration,
}

/// One session's producer.
#[derive(Default)]
pub struct Producer {
    lanes: [Lane; PARTITIONS],
    reports: Vec<Report>,
    /// It has given up and takes nothing more.
    fatal: bool,
    /// It has given up some records only; takes nothing until somebody has looked at the reports.
    failed_locally: bool,
    /// Purged, or gone with its process: only what is on the wire can still arrive.
    gone: bool,
}

/// The queue of one partition.
#[derive(Default)]
struct Lane {
    queue: VecDeque<(Seq, Event)>,
    batches: VecDeque<Batch>,
    next_base: u32,
}

struct Batch {
    base: u32,
    records: Vec<(Seq, Event)>,
    state: State,
}

#[derive(Clone, Copy, PartialEq)]
enum State {
    Waiting,
    Sent,
    /// In the leader's log up to there.
    Appended(usize),
    Refused(Refused),
}

#[derive(Clone, Copy, PartialEq)]
enum Refused {
    ForNow,
    OutOfOrder,
    ForGood,
}

impl Broker {
    pub fn connect(&mut self) -> usize {
        self.producers.push(Producer::default());
        self.producers.len() - 1
    }

    /// # Errors
    /// When the producer has given up.
    pub fn send(&mut self, producer: usize, partition: usize, seq: Seq, event: Event) -> Result<(), ()> {
        let producer = &mut self.producers[producer];
        if producer.fatal || producer.gone || producer.failed_locally {
            return Err(());
        }
        producer.lanes[partition].queue.push_back((seq, event));
        Ok(())
    }

    pub fn has_reports(&self, producer: usize) -> bool {
        !self.producers[producer].reports.is_empty()
    }

    pub fn take_reports(&mut self, producer: usize) -> Vec<Report> {
        let producer = &mut self.producers[producer];
        producer.failed_locally = false;
        std::mem::take(&mut producer.reports)
    }

    /// Drops what is queued; what is on the wire may arrive, but nobody is told.
    pub fn purge(&mut self, producer: usize) {
        let producer = &mut self.producers[producer];
        producer.gone = true;
        for lane in &mut producer.lanes {
            lane.queue.clear();
            lane.batches.retain(|batch| batch.state == State::Sent);
        }
    }

    /// Everything goes on without a fault.
    pub fn heal(&mut self, now: Duration) {
        for producer in 0..self.producers.len() {
            for partition in 0..PARTITIONS {
                if self.producers[producer].lanes[partition].is_idle() {
                    continue;
                }
                self.form(producer, partition, 3);
                self.transmit(producer, partition);
                while self.receive(producer, partition, None, now) {}
                self.replicate(partition, usize::MAX);
                while self.respond(producer, partition) {}
            }
        }
    }

    /// One thing happens, of those that need no fault.
    pub fn step(&mut self, rng: &mut Rng, now: Duration) {
        let Some((producer, partition)) = self.busy(rng) else { return };
        let first = rng.u8(..5);
        for what in first..first + 5 {
            let done = match what % 5 {
                0 => self.form(producer, partition, rng.usize(1..4)),
                1 => self.transmit(producer, partition),
                2 => self.receive(producer, partition, None, now),
                3 => self.replicate(partition, rng.usize(1..4)),
                _ => self.respond(producer, partition),
            };
            if done {
                return;
            }
        }
    }

    /// Queued records become a batch. This and what follows give whether there was something to do.
    fn form(&mut self, producer: usize, partition: usize, records: usize) -> bool {
        let producer = &mut self.producers[producer];
        let lane = &mut producer.lanes[partition];
        if producer.fatal || lane.queue.is_empty() || lane.batches.len() >= IN_FLIGHT {
            return false;
        }
        let records: Vec<_> = lane.queue.drain(..records.min(lane.queue.len())).collect();
        let base = lane.next_base;
        lane.next_base += records.len() as u32;
        lane.batches.push_back(Batch { base, records, state: State::Waiting });
        true
    }

    /// The first waiting batch goes out: after an error, once all after it are back.
    fn transmit(&mut self, producer: usize, partition: usize) -> bool {
        let producer = &mut self.producers[producer];
        let batches = &mut producer.lanes[partition].batches;
        let Some(first) = batches.iter().position(|b| b.state == State::Waiting) else { return false };
        let is_free = batches.iter().skip(first).all(|b| b.state == State::Waiting)
            && batches.iter().take(first).all(|b| !matches!(b.state, State::Refused(_)));
        if is_free && !producer.fatal {
            batches[first].state = State::Sent;
        }
        is_free && !producer.fatal
    }

    /// The leader takes the oldest batch on the wire, or refuses it.
    fn receive(&mut self, producer: usize, partition: usize, fault: Option<Refused>, now: Duration) -> bool {
        let id = producer;
        let producer = &mut self.producers[producer];
        let batches = &mut producer.lanes[partition].batches;
        let Some(at) = batches.iter().position(|b| b.state == State::Sent) else { return false };
        let batch = &mut batches[at];
        batch.state = match fault {
            Some(fault) => State::Refused(fault),
            None => self.partitions[partition].append(id, batch, now),
        };
        if producer.gone {
            batches.remove(at);
        }
        true
    }

    fn replicate(&mut self, partition: usize, records: usize) -> bool {
        let partition = &mut self.partitions[partition];
        let before = partition.high;
        partition.high = partition.high.saturating_add(records).min(partition.log.len());
        partition.high > before
    }

    /// The oldest answer arrives.
    fn respond(&mut self, producer: usize, partition: usize) -> bool {
        let high = self.partitions[partition].high;
        let producer = &mut self.producers[producer];
        let batches = &mut producer.lanes[partition].batches;
        // Answers come in the order of the requests; those before have been answered with an error.
        let Some(at) = batches.iter().position(|b| b.state != State::Waiting) else { return false };
        match batches[at].state {
            State::Appended(end) if end <= high => {
                let batch = batches.remove(at).expect("it is there");
                for (seq, event) in batch.records {
                    self.acked.push(event.id);
                    producer.reports.push(Report::Acked(seq));
                }
            }
            State::Refused(Refused::ForNow) => batches[at].state = State::Waiting,
            State::Refused(Refused::OutOfOrder) if at > 0 => batches[at].state = State::Waiting,
            State::Refused(_) => producer.give_up(partition),
            _ => return false,
        }
        true
    }

    /// Where there is something to do.
    fn busy(&self, rng: &mut Rng) -> Option<(usize, usize)> {
        let lanes = self.producers.iter().enumerate().flat_map(|(producer, of)| {
            of.lanes.iter().enumerate().map(move |(partition, lane)| (producer, partition, lane))
        });
        let busy: Vec<_> = lanes.filter(|(_, _, lane)| !lane.is_idle()).map(|(p, n, _)| (p, n)).collect();
        rng.choice(busy)
    }

    /// A fault of some kind, at some producer or partition.
    pub fn fault(&mut self, rng: &mut Rng, now: Duration) {
        let Some((producer, partition)) = self.busy(rng) else { return };
        match rng.u8(..12) {
            0..5 => {
                let _ = self.receive(producer, partition, Some(Refused::ForNow), now);
            }
            5..8 => self.lose_connections(Some(producer), partition, rng, now),
            8 | 9 => self.lose_leader(partition, rng, now),
            10 if rng.u8(..) < 100 => {
                let _ = self.receive(producer, partition, Some(Refused::ForGood), now);
            }
            10 => self.lose_patience(producer, partition),
            _ => self.fail_locally(producer, partition),
        }
    }

    /// Requests on the wire arrive or not, answers do not.
    fn lose_connections(&mut self, only: Option<usize>, partition: usize, rng: &mut Rng, now: Duration) {
        for producer in 0..self.producers.len() {
            if only.is_some_and(|only| only != producer) {
                continue;
            }
            for _ in 0..rng.usize(..=IN_FLIGHT) {
                self.receive(producer, partition, None, now);
            }
            let producer = &mut self.producers[producer];
            let lane = &mut producer.lanes[partition];
            if producer.gone {
                lane.batches.clear();
            }
            lane.batches.iter_mut().for_each(|batch| batch.state = State::Waiting);
        }
    }

    /// Another replica leads, without what was not replicated.
    fn lose_leader(&mut self, partition: usize, rng: &mut Rng, now: Duration) {
        self.lose_connections(None, partition, rng, now);
        let partition = &mut self.partitions[partition];
        let high = partition.high;
        partition.log.truncate(high);
        for known in partition.known.values_mut() {
            known.batches.retain(|(_, _, end)| *end <= high);
        }
        partition.known.retain(|_, known| !known.batches.is_empty());
    }

    /// The producer reports the first batch as failed, whatever became of it.
    fn lose_patience(&mut self, producer: usize, partition: usize) {
        let producer = &mut self.producers[producer];
        if !producer.gone && !producer.lanes[partition].batches.is_empty() {
            producer.give_up(partition);
        }
    }

    /// What was never sent is given up; the producer itself goes on.
    fn fail_locally(&mut self, producer: usize, partition: usize) {
        let producer = &mut self.producers[producer];
        let lane = &mut producer.lanes[partition];
        if lane.batches.is_empty() && !lane.queue.is_empty() {
            producer.failed_locally = true;
            producer.reports.extend(lane.queue.drain(..).map(|(seq, _)| failed(seq)));
        }
    }

    /// Brokers forget a producer that was idle for a day; nothing stays on the wire for so long.
    pub fn forget(&mut self, now: Duration) {
        for producer in self.producers.iter_mut().filter(|producer| producer.gone) {
            producer.lanes.iter_mut().for_each(|lane| lane.batches.clear());
        }
        for partition in &mut self.partitions {
            partition.known.retain(|_, known| now < known.last + FORGOTTEN_AFTER);
        }
    }
}

impl Partition {
    fn append(&mut self, producer: usize, batch: &Batch, now: Duration) -> State {
        let count = batch.records.len() as u32;
        if let Some(known) = self.known.get(&producer) {
            let same = known.batches.iter().rev().take(IN_FLIGHT).find(|b| (b.0, b.1) == (batch.base, count));
            if let Some((_, _, end)) = same {
                return State::Appended(*end);
            }
            if known.batches.back().is_some_and(|(base, count, _)| base + count != batch.base) {
                return State::Refused(Refused::OutOfOrder);
            }
        }
        self.log.extend(batch.records.iter().map(|(_, event)| *event));
        let known = self.known.entry(producer).or_default();
        known.batches.push_back((batch.base, count, self.log.len()));
        known.last = now;
        State::Appended(self.log.len())
    }
}

impl Producer {
    /// Fails the partition's first batch, and with it everything that is not acknowledged.
    fn give_up(&mut self, partition: usize) {
        self.fatal = true;
        for at in 0..PARTITIONS {
            let lane = &mut self.lanes[(partition + at) % PARTITIONS];
            for batch in &mut lane.batches {
                self.reports.extend(batch.records.iter().map(|(seq, _)| failed(*seq)));
            }
            self.reports.extend(lane.queue.drain(..).map(|(seq, _)| failed(seq)));
            // On the wire it may arrive; nobody is told a second time.
            lane.batches.retain(|batch| batch.state == State::Sent);
        }
        self.gone = true;
    }
}

impl Lane {
    fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.batches.is_empty()
    }
}

fn failed(seq: Seq) -> Report {
    Report::Failed { seq, why: Box::new(DeliveryError::Other("the broker does not take it".to_owned())) }
}
