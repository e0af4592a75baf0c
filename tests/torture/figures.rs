//! What was counted and measured, and the line that says it.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use crate::ground::Kind;
use crate::support::oracle::Findings;

#[derive(Default)]
pub struct Figures {
    pub events: usize,
    pub lost: usize,
    pub inverted: usize,
    pub invented: usize,
    /// Published, then gone with a primary whose standby was behind; and those of them that no worker named.
    pub phantoms: usize,
    pub unnamed: usize,
    /// Samples of the positions.
    pub samples: usize,
    /// What else was wrong, in words.
    pub broken: Vec<String>,
    pub of_kind: BTreeMap<Kind, OfKind>,
}

#[derive(Default)]
pub struct OfKind {
    pub faults: usize,
    /// Messages that came again, for each fault.
    pub repeats: Vec<usize>,
    /// From the restart to the first new message.
    pub recoveries: Vec<Duration>,
}

impl Figures {
    pub fn add(&mut self, events: usize, found: &Findings) {
        self.events += events;
        self.lost += found.lost.len();
        self.inverted += found.inverted.len();
        self.invented += found.invented.len();
        for (what, ids) in
            [("lost", &found.lost), ("inverted", &found.inverted), ("invented", &found.invented)]
        {
            if !ids.is_empty() {
                self.broken.push(format!(
                    "{what}: {} events, such as {:?}",
                    ids.len(),
                    &ids[..ids.len().min(3)]
                ));
            }
        }
    }

    pub fn kept_the_promise(&self) -> bool {
        self.broken.is_empty() && self.lost + self.inverted + self.invented == 0
    }

    pub fn verdict(&self) -> String {
        let Figures { events, lost, inverted, invented, samples, .. } = self;
        let broken = self.broken.len();
        format!(
            "events={events} lost={lost} inverted={inverted} invented={invented} samples={samples} broken={broken}"
        )
    }
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.verdict())?;
        if self.phantoms > 0 {
            write!(f, " phantoms={} unnamed={}", self.phantoms, self.unnamed)?;
        }
        for (kind, of) in &self.of_kind {
            let name = kind.name();
            write!(f, " {name}={}", of.faults)?;
            let repeats = sorted(&of.repeats);
            if let Some(most) = repeats.last() {
                write!(f, " {name}_repeats={}/{most}", at(&repeats, 50))?;
            }
            let ms = sorted(&of.recoveries.iter().map(Duration::as_millis).collect::<Vec<_>>());
            if let Some(most) = ms.last() {
                write!(f, " {name}_recovery_ms={}/{}/{most}", at(&ms, 50), at(&ms, 95))?;
            }
        }
        Ok(())
    }
}

fn sorted<T: Ord + Copy>(values: &[T]) -> Vec<T> {
    let mut values = values.to_vec();
    values.sort_unstable();
    values
}

/// What so many per cent do not exceed.
fn at<T: Copy>(sorted: &[T], per_cent: usize) -> T {
    sorted[(sorted.len() * per_cent).div_ceil(100).max(1) - 1]
}
