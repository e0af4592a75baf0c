//! Acknowledgements → the LSN that may be confirmed.
//!
//! One queue in WAL order with two kinds of entry: an event that Kafka has to acknowledge, and a
//! position (a commit's end LSN, or a keepalive's WAL end). A position may be confirmed when
//! nothing before it is left. Nothing else in the program makes a confirmable LSN.

use std::collections::VecDeque;

use super::{Lsn, Place};

/// Names one event within one session; never reused, never carried into another session.
pub type Seq = u64;

/// A place in the WAL before which every event is acknowledged by the broker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Position {
    pub lsn: Lsn,
    /// End of the last commit at or before `lsn` that held an outbox event; 0 before the first.
    /// What lies beyond is the WAL of others, and confirming it is not urgent.
    pub events_end: Lsn,
    /// Of that commit, in microseconds since 2000-01-01 UTC.
    pub commit_time_micros: Option<i64>,
}

/// What is remembered of an event until it is acknowledged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InFlight {
    /// Of key, value and headers.
    pub bytes: u32,
    pub place: Place,
    /// Index of its table.
    pub table: u16,
}

#[derive(Debug)]
enum Entry {
    Event { acked: bool, event: InFlight },
    Position(Position),
}

#[derive(Debug)]
pub struct Progress {
    /// Entry `i` of the queue has sequence number `front + i`.
    front: Seq,
    queue: VecDeque<Entry>,
    in_flight_events: usize,
    in_flight_bytes: usize,
    confirmable: Option<Position>,
}

impl Progress {
    pub fn new() -> Self {
        Progress {
            front: 0,
            queue: VecDeque::new(),
            in_flight_events: 0,
            in_flight_bytes: 0,
            confirmable: None,
        }
    }

    /// Notes an event that is about to be handed to the producer.
    pub fn publish(&mut self, event: InFlight) -> Seq {
        let seq = self.front + self.queue.len() as Seq;
        self.queue.push_back(Entry::Event { acked: false, event });
        self.in_flight_events += 1;
        self.in_flight_bytes += event.bytes as usize;
        seq
    }

    /// The event of that number, while it is in flight.
    pub fn in_flight(&self, seq: Seq) -> Option<InFlight> {
        match self.queue.get(self.index(seq)?)? {
            Entry::Event { acked: false, event } => Some(*event),
            _ => None,
        }
    }

    /// Notes a place that may be confirmed once everything before it is acknowledged.
    ///
    /// # Panics
    /// When positions go back: the WAL is read in order, so that would be a bug of ours.
    pub fn position(&mut self, position: Position) {
        let last = match self.queue.back() {
            Some(Entry::Position(last)) => Some(*last),
            Some(Entry::Event { .. }) => None,
            None => self.confirmable,
        };
        assert!(last.is_none_or(|last| position.lsn >= last.lsn), "position {} after {last:?}", position.lsn);
        match self.queue.back_mut() {
            None => self.confirmable = Some(position),
            Some(Entry::Position(last)) => *last = position,
            Some(Entry::Event { .. }) => self.queue.push_back(Entry::Position(position)),
        }
    }

    /// Notes the broker's acknowledgement of one event.
    ///
    /// # Panics
    /// When the event is unknown or acknowledged already: a count that is off by one could
    /// confirm what was never delivered.
    pub fn acked(&mut self, seq: Seq) {
        match self.index(seq).and_then(|i| self.queue.get_mut(i)) {
            Some(Entry::Event { acked: acked @ false, event }) => {
                *acked = true;
                self.in_flight_events -= 1;
                self.in_flight_bytes -= event.bytes as usize;
            }
            _ => panic!("acknowledgement of event {seq}, which is not in flight"),
        }
        while let Some(Entry::Event { acked: true, .. } | Entry::Position(_)) = self.queue.front() {
            if let Some(Entry::Position(position)) = self.queue.pop_front() {
                self.confirmable = Some(position);
            }
            self.front += 1;
        }
    }

    fn index(&self, seq: Seq) -> Option<usize> {
        usize::try_from(seq.checked_sub(self.front)?).ok()
    }

    /// The greatest place before which everything is acknowledged.
    pub fn confirmable(&self) -> Option<Position> {
        self.confirmable
    }

    /// Number of the oldest event that is not acknowledged, or of the next one.
    pub fn oldest(&self) -> Seq {
        self.front
    }

    /// Events and positions from the oldest unacknowledged event on: what memory is taken for.
    pub fn queued(&self) -> usize {
        self.queue.len()
    }

    pub fn in_flight_events(&self) -> usize {
        self.in_flight_events
    }

    pub fn in_flight_bytes(&self) -> usize {
        self.in_flight_bytes
    }
}

impl Default for Progress {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn at(lsn: u64) -> Position {
        Position { lsn: Lsn::from(lsn), events_end: Lsn::from(0), commit_time_micros: None }
    }

    fn event(bytes: u32) -> InFlight {
        InFlight { bytes, place: Place { commit_lsn: Lsn::from(0), ordinal: 0 }, table: 0 }
    }

    #[test]
    fn a_position_waits_for_every_event_before_it() {
        let mut p = Progress::new();
        let (a, b) = (p.publish(event(1)), p.publish(event(2)));
        p.position(at(10));
        p.acked(b);
        assert_eq!(p.confirmable(), None);
        p.acked(a);
        assert_eq!(p.confirmable(), Some(at(10)));
        assert_eq!((p.in_flight_events(), p.in_flight_bytes()), (0, 0));
    }

    #[test]
    fn a_position_with_nothing_in_flight_is_confirmable_at_once() {
        let mut p = Progress::new();
        p.position(at(10));
        assert_eq!(p.confirmable(), Some(at(10)));
    }

    #[test]
    fn what_waits_behind_an_unacknowledged_event_is_counted() {
        let mut p = Progress::new();
        let oldest = p.publish(event(1));
        for lsn in 1..10 {
            let seq = p.publish(event(1));
            p.position(at(lsn));
            p.acked(seq);
        }
        assert_eq!((p.in_flight_events(), p.queued(), p.oldest()), (1, 19, oldest));
        p.acked(oldest);
        assert_eq!((p.queued(), p.confirmable()), (0, Some(at(9))));
    }

    #[test]
    #[should_panic(expected = "not in flight")]
    fn an_acknowledgement_that_comes_twice_is_a_bug() {
        let mut p = Progress::new();
        let (a, _b) = (p.publish(event(1)), p.publish(event(1)));
        p.acked(a);
        p.acked(a);
    }

    #[test]
    #[should_panic(expected = "after")]
    fn a_position_that_goes_back_is_a_bug() {
        let mut p = Progress::new();
        p.position(at(10));
        p.position(at(9));
    }

    #[derive(Debug, Clone)]
    enum Op {
        Publish,
        Position(u64),
        /// Acknowledges one of those in flight, chosen by the number.
        Ack(prop::sample::Index),
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(10_000))]
        /// Any order of events, positions and acknowledgements agrees with a list scanned from
        /// the start each time.
        #[test]
        fn the_queue_agrees_with_a_naive_model(ops in prop::collection::vec(prop_oneof![
            3 => Just(Op::Publish),
            2 => (0u64..3).prop_map(Op::Position),
            4 => any::<prop::sample::Index>().prop_map(Op::Ack),
        ], 0..120)) {
            let mut progress = Progress::new();
            let mut model: Vec<Result<(Seq, bool), Position>> = Vec::new();
            let mut lsn = 0;
            for op in ops {
                match op {
                    Op::Publish => model.push(Ok((progress.publish(event(3)), false))),
                    Op::Position(step) => {
                        lsn += step;
                        progress.position(at(lsn));
                        model.push(Err(at(lsn)));
                    }
                    Op::Ack(index) => {
                        let mut open: Vec<_> = model.iter_mut().filter_map(|e| e.as_mut().ok()).filter(|e| !e.1).collect();
                        if !open.is_empty() {
                            let chosen = index.index(open.len());
                            open[chosen].1 = true;
                            progress.acked(open[chosen].0);
                        }
                    }
                }
                let prefix = model.iter().take_while(|e| !matches!(e, Ok((_, false))));
                let expected = prefix.filter_map(|e| e.err_position()).last();
                prop_assert_eq!(progress.confirmable(), expected);
                let open = model.iter().filter(|e| matches!(e, Ok((_, false)))).count();
                prop_assert_eq!(progress.in_flight_events(), open);
                prop_assert_eq!(progress.in_flight_bytes(), open * 3);
            }
        }
    }

    trait ErrPosition {
        fn err_position(&self) -> Option<Position>;
    }
    impl ErrPosition for Result<(Seq, bool), Position> {
        fn err_position(&self) -> Option<Position> {
            self.err()
        }
    }
}
