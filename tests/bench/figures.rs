//! What is written down of a run, and how rounds become one figure.

use serde::Serialize;

/// One line of `results.json`. What a contender does not have is null.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Figure {
    pub experiment: String,
    pub contender: String,
    pub transport: String,
    pub workload: String,
    pub events: u64,
    pub rounds: usize,
    /// From the moment the contender has the slot to its last event.
    pub events_per_s: Option<f64>,
    pub events_per_s_of_each_round: Vec<f64>,
    /// Of the same round; the median of these.
    pub ratio_to_floor: Option<f64>,
    pub ratio_to_debezium: Option<f64>,
    pub first_100_000_events_per_s: Option<f64>,
    /// Start of the process until it has the slot.
    pub slot_after_ms: Option<f64>,
    /// User and system time of the contender's process, its start included.
    pub cpu_us_per_event: Option<f64>,
    pub walsender_cpu_us_per_event: Option<f64>,
    pub broker_cpu_us_per_event: Option<f64>,
    pub rss_peak_bytes: Option<u64>,
    pub lost: Option<u64>,
    pub inverted: Option<u64>,
    pub repeats: Option<u64>,
    /// Messages that are no event of ours.
    pub foreign: Option<u64>,
    pub rate_per_s: Option<f64>,
    pub p50_ms: Option<f64>,
    pub p99_ms: Option<f64>,
    pub max_ms: Option<f64>,
    /// Why it does not count.
    pub failed: Option<String>,
}

impl Figure {
    pub fn key(&self) -> String {
        format!("{}/{}/{}/{}", self.experiment, self.transport, self.workload, self.contender)
    }

    /// The median of each number; of what must be 0, and of memory, the worst.
    pub fn of_rounds(rounds: &[Figure]) -> Figure {
        let numbers = |get: fn(&Figure) -> Option<f64>| -> Option<f64> {
            median(&rounds.iter().filter_map(get).collect::<Vec<_>>())
        };
        let worst = |get: fn(&Figure) -> Option<u64>| rounds.iter().filter_map(get).max();
        Figure {
            rounds: rounds.len(),
            events_per_s: numbers(|f| f.events_per_s),
            events_per_s_of_each_round: rounds.iter().filter_map(|f| f.events_per_s).collect(),
            ratio_to_floor: numbers(|f| f.ratio_to_floor),
            ratio_to_debezium: numbers(|f| f.ratio_to_debezium),
            first_100_000_events_per_s: numbers(|f| f.first_100_000_events_per_s),
            slot_after_ms: numbers(|f| f.slot_after_ms),
            cpu_us_per_event: numbers(|f| f.cpu_us_per_event),
            walsender_cpu_us_per_event: numbers(|f| f.walsender_cpu_us_per_event),
            broker_cpu_us_per_event: numbers(|f| f.broker_cpu_us_per_event),
            rss_peak_bytes: worst(|f| f.rss_peak_bytes),
            lost: worst(|f| f.lost),
            inverted: worst(|f| f.inverted),
            repeats: worst(|f| f.repeats),
            foreign: worst(|f| f.foreign),
            rate_per_s: numbers(|f| f.rate_per_s),
            p50_ms: numbers(|f| f.p50_ms),
            p99_ms: numbers(|f| f.p99_ms),
            max_ms: numbers(|f| f.max_ms),
            failed: rounds.iter().find_map(|f| f.failed.clone()),
            ..rounds[0].clone()
        }
    }
}

pub fn median(numbers: &[f64]) -> Option<f64> {
    let mut sorted = numbers.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        n if n % 2 == 1 => Some(sorted[middle]),
        _ => Some(f64::midpoint(sorted[middle - 1], sorted[middle])),
    }
}
