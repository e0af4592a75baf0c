//! A consumer that is always there: when the first new message after a fault can be read, and how many
//! come again.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::support::oracle::{Reader, Topic};

pub struct Watch {
    stop: Arc<AtomicBool>,
    seen: Arc<Mutex<Seen>>,
    reader: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Seen {
    ids: HashSet<String>,
    repeats: usize,
    /// The last fault; a message that was produced later is from after it.
    fault_ms: i64,
    /// For each partition, when the first new message from after the fault was read.
    first: Vec<Option<Instant>>,
}

impl Watch {
    pub fn start(topic: &Topic) -> Self {
        let seen = Seen { first: vec![None; topic.partitions as usize], ..Seen::default() };
        let (stop, seen) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(seen)));
        let (stopped, sink, mut reader) = (Arc::clone(&stop), Arc::clone(&seen), Reader::new(topic));
        let reader = std::thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                reader.poll();
                let now = Instant::now();
                let mut seen = sink.lock().unwrap();
                for message in reader.messages.drain(..) {
                    if !seen.ids.insert(message.id()) {
                        seen.repeats += 1;
                    } else if message.timestamp_ms.is_some_and(|ms| ms > seen.fault_ms) {
                        seen.first[message.partition as usize].get_or_insert(now);
                    }
                }
            }
        });
        Watch { stop, seen, reader: Some(reader) }
    }

    /// A fault has happened, and what brings the messages back begins now.
    pub fn fault(&self) {
        let mut seen = self.seen.lock().unwrap();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
        seen.fault_ms = i64::try_from(now.as_millis()).unwrap();
        seen.first.fill(None);
    }

    /// When new messages of one partition, or of all, could be read again.
    pub fn recovered(&self, all: bool) -> Option<Instant> {
        let seen = self.seen.lock().unwrap();
        let there = seen.first.iter().flatten();
        let enough = if all { seen.first.len() } else { 1 };
        if there.clone().count() < enough {
            return None;
        }
        if all { there.max() } else { there.min() }.copied()
    }

    pub fn repeats(&self) -> usize {
        self.seen.lock().unwrap().repeats
    }

    /// How many different events were read.
    pub fn events(&self) -> usize {
        self.seen.lock().unwrap().ids.len()
    }

    pub fn has_all<'a>(&self, mut ids: impl Iterator<Item = &'a String>) -> bool {
        let seen = self.seen.lock().unwrap();
        ids.all(|id| seen.ids.contains(id))
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.reader.take().map(JoinHandle::join);
    }
}
