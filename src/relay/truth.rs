//! The order of truth: broker acknowledged → position row committed → witness written → slot told.
//!
//! Each step may begin only with what the one before has finished. The position is written by one
//! statement at a time, and so is the witness.

use super::Lsn;
use super::progress::Position;

#[derive(Debug)]
pub struct Truth {
    persisted: Step,
    /// `None` without a witness.
    witnessed: Option<Step>,
}

#[derive(Debug, Clone, Copy)]
struct Step {
    done: Lsn,
    /// The last that was asked for; a write that failed may have been done all the same.
    asked: Lsn,
    writing: bool,
}

impl Step {
    fn at(lsn: Lsn) -> Self {
        Step { done: lsn, asked: lsn, writing: false }
    }

    fn begin(&mut self, lsn: Lsn) -> Lsn {
        self.writing = true;
        self.asked = lsn;
        lsn
    }

    fn end(&mut self, lsn: Lsn) {
        assert!(self.writing && lsn <= self.asked, "{lsn} was not asked for");
        self.writing = false;
        self.done = self.done.max(lsn);
    }
}

impl Truth {
    /// `persisted` is the row's position at the start; `witnessed` the witness's, which a crash may
    /// have left behind it, `None` without a witness.
    pub fn new(persisted: Lsn, witnessed: Option<Lsn>) -> Self {
        Truth { persisted: Step::at(persisted), witnessed: witnessed.map(|lsn| Step::at(lsn.min(persisted))) }
    }

    /// Whether there is something to persist and nobody is at it.
    pub fn may_persist(&self, acknowledged: Position) -> bool {
        !self.persisted.writing && acknowledged.lsn > self.persisted.done
    }

    pub fn persist(&mut self, acknowledged: Position) -> Position {
        self.persisted.begin(acknowledged.lsn);
        acknowledged
    }

    /// The row with this position is committed.
    pub fn persisted(&mut self, lsn: Lsn) {
        self.persisted.end(lsn);
    }

    /// Nothing was moved.
    pub fn not_persisted(&mut self) {
        self.persisted.writing = false;
    }

    /// What the witness is to be told now.
    pub fn witness(&mut self) -> Option<Lsn> {
        let step = self.witnessed.as_mut().filter(|step| !step.writing && step.done < self.persisted.done)?;
        Some(step.begin(self.persisted.done))
    }

    /// The witness has it, safe from a crash.
    pub fn witnessed(&mut self, lsn: Lsn) {
        if let Some(step) = &mut self.witnessed {
            step.end(lsn);
        }
    }

    /// The most that the slot may be told to have been flushed.
    pub fn tellable(&self) -> Lsn {
        self.witnessed.map_or(self.persisted.done, |step| step.done.min(self.persisted.done))
    }

    /// The row's position.
    pub fn position(&self) -> Lsn {
        self.persisted.done
    }

    /// The greatest position that may be in the row.
    pub fn requested(&self) -> Lsn {
        self.persisted.asked
    }

    /// Whether everything acknowledged has gone all the way to what may be told.
    pub fn is_settled(&self, acknowledged: Option<Position>) -> bool {
        !self.persisted.writing
            && acknowledged.is_none_or(|p| p.lsn <= self.persisted.done)
            && self.tellable() == self.persisted.done
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lsn(n: u64) -> Lsn {
        Lsn::from(n)
    }

    fn position(n: u64) -> Position {
        Position { lsn: lsn(n), events_end: lsn(n), commit_time_micros: None }
    }

    #[test]
    fn the_slot_is_told_only_what_the_row_and_the_witness_have() {
        let mut truth = Truth::new(lsn(10), Some(lsn(5)));
        assert_eq!(truth.tellable(), lsn(5), "the witness lags after a crash");
        assert_eq!(truth.witness(), Some(lsn(10)));
        truth.witnessed(lsn(10));
        assert_eq!(truth.tellable(), lsn(10));

        assert!(truth.may_persist(position(20)));
        truth.persist(position(20));
        assert!(!truth.may_persist(position(30)), "one write at a time");
        assert_eq!((truth.tellable(), truth.witness()), (lsn(10), None));
        truth.persisted(lsn(20));
        assert_eq!(truth.tellable(), lsn(10));
        assert_eq!(truth.witness(), Some(lsn(20)));
        assert_eq!(truth.witness(), None, "one write at a time");
        truth.witnessed(lsn(20));
        assert_eq!(truth.tellable(), lsn(20));
        assert!(truth.is_settled(Some(position(20))));
    }

    #[test]
    fn without_a_witness_the_row_is_enough() {
        let mut truth = Truth::new(lsn(10), None);
        truth.persist(position(20));
        truth.not_persisted();
        assert_eq!((truth.tellable(), truth.requested()), (lsn(10), lsn(20)));
        truth.persist(position(20));
        truth.persisted(lsn(20));
        assert_eq!((truth.tellable(), truth.witness()), (lsn(20), None));
    }

    #[test]
    fn a_witness_ahead_of_the_row_is_not_told_before_the_row_is_there() {
        assert_eq!(Truth::new(lsn(10), Some(lsn(50))).tellable(), lsn(10));
    }
}
