//! The promise checked for millions of messages, in a bit for each event and a few bytes for each key.
//!
//! The events are numbered from 0 in commit order, and everything follows from the number: event `n`
//! has the id `n` as a uuid, the key `n % keys` and the revision `n / keys + 1`.

/// What of event `n` an SQL expression over `n` and `keys` gives: `event_id, order_id, revision`.
pub const NUMBERED: &str = "lpad(to_hex(n), 32, '0')::uuid, n % keys, n / keys + 1";

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Events that are not there.
    pub lost: u64,
    /// First occurrences that came after a later event of their key, or in another partition than it.
    pub inverted: u64,
    /// Second and further occurrences.
    pub repeats: u64,
    /// Messages that are no event: unknown id, or a key or revision that is not the id's.
    pub foreign: u64,
}

impl Counts {
    /// Repeats are allowed.
    pub fn kept_the_promise(&self) -> bool {
        self.lost == 0 && self.inverted == 0 && self.foreign == 0
    }
}

pub struct Tally {
    events: u64,
    seen: Vec<u64>,
    /// For each key the last revision that came for the first time, and its partition.
    newest: Vec<(u64, i32)>,
    distinct: u64,
    counts: Counts,
}

impl Tally {
    pub fn new(events: u64, keys: u64) -> Self {
        Tally {
            events,
            seen: vec![0; events.div_ceil(64) as usize],
            newest: vec![(0, -1); keys as usize],
            distinct: 0,
            counts: Counts::default(),
        }
    }

    /// Takes the next message of a partition, and gives its number if it is an event of ours.
    pub fn take(&mut self, partition: i32, id: &[u8], key: &[u8], revision: &[u8]) -> Option<u64> {
        let keys = self.newest.len() as u64;
        let event = number_of(id).filter(|n| {
            *n < self.events && decimal(key) == Some(n % keys) && decimal(revision) == Some(n / keys + 1)
        });
        let Some(n) = event else {
            self.counts.foreign += 1;
            return None;
        };
        let (word, bit) = ((n / 64) as usize, 1 << (n % 64));
        if self.seen[word] & bit != 0 {
            self.counts.repeats += 1;
            return Some(n);
        }
        self.seen[word] |= bit;
        self.distinct += 1;
        let (newest, home) = &mut self.newest[(n % keys) as usize];
        let revision = n / keys + 1;
        if revision < *newest || (*home >= 0 && *home != partition) {
            self.counts.inverted += 1;
        }
        (*newest, *home) = (revision.max(*newest), partition);
        Some(n)
    }

    pub fn counts(&self) -> Counts {
        Counts { lost: self.events - self.distinct, ..self.counts }
    }
}

/// The uuid as a number.
fn number_of(id: &[u8]) -> Option<u64> {
    let digits = id.iter().filter(|b| **b != b'-');
    digits.into_iter().try_fold(0u64, |n, b| {
        let digit = char::from(*b).to_digit(16)?;
        (n >> 60 == 0).then_some(n << 4 | u64::from(digit))
    })
}

fn decimal(text: &[u8]) -> Option<u64> {
    std::str::from_utf8(text).ok()?.parse().ok()
}
