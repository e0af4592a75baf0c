//! What is written down of a run, and how rounds become one figure.

use serde::Serialize;

use crate::support::tally::Counts;

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
    pub cpu_ratio_to_walsender: Option<f64>,
    pub cpu_ratio_to_debezium: Option<f64>,
    pub walsender_cpu_us_per_event: Option<f64>,
    pub broker_cpu_us_per_event: Option<f64>,
    pub rss_peak_bytes: Option<u64>,
    pub lost: Option<u64>,
    pub inverted: Option<u64>,
    pub repeats: Option<u64>,
    /// Messages that are no event of ours.
    pub foreign: Option<u64>,
    /// Commits per second while latency was measured.
    pub rate_per_s: Option<f64>,
    /// Latency: COMMIT has returned to the writer, until a consumer has the message. Start-up: the
    /// process is started, until a consumer has its first message.
    pub p50_ms: Option<f64>,
    pub p99_ms: Option<f64>,
    pub max_ms: Option<f64>,
    /// The same from the moment the INSERT was sent.
    pub p50_from_send_ms: Option<f64>,
    pub p99_from_send_ms: Option<f64>,
    /// Why it does not count.
    pub failed: Option<String>,
}

impl Figure {
    pub fn new(experiment: &str, contender: &str, transport: &str, workload: &str) -> Self {
        Figure {
            experiment: experiment.to_owned(),
            contender: contender.to_owned(),
            transport: transport.to_owned(),
            workload: workload.to_owned(),
            ..Figure::default()
        }
    }

    /// The first reason stays.
    pub fn fail(&mut self, why: &str) {
        self.failed.get_or_insert_with(|| why.to_owned());
    }

    pub fn count(&mut self, counts: Counts) {
        self.lost = Some(counts.lost);
        self.inverted = Some(counts.inverted);
        self.repeats = Some(counts.repeats);
        self.foreign = Some(counts.foreign);
        if !counts.kept_the_promise() {
            self.fail(&format!("{counts:?}"));
        }
    }

    /// Sets the ratios to what drained the same in the same round, and to its own walsender.
    pub fn compare(&mut self, round: &[Figure]) {
        let other = |contender: &str, transport: &str| {
            let same = |f: &&Figure| {
                f.contender == contender && f.transport == transport && f.workload == self.workload
            };
            round.iter().find(same)
        };
        let ratio = |mine: Option<f64>, other: Option<f64>| Some(mine? / other?);
        let floor = other("pg_recvlogical", &self.transport).and_then(|f| f.events_per_s);
        let debezium = other("debezium", "tcp");
        self.ratio_to_floor = ratio(self.events_per_s, floor);
        self.ratio_to_debezium = ratio(self.events_per_s, debezium.and_then(|f| f.events_per_s));
        self.cpu_ratio_to_debezium = ratio(self.cpu_us_per_event, debezium.and_then(|f| f.cpu_us_per_event));
        self.cpu_ratio_to_walsender = ratio(self.cpu_us_per_event, self.walsender_cpu_us_per_event);
    }

    /// One line for who watches.
    pub fn line(&self) -> String {
        let mut line = format!("{:<44}", self.key());
        let mut add = |what: &str, number: Option<f64>, unit: &str| {
            if let Some(number) = number {
                let digits = if number < 100.0 { 2 } else { 0 };
                line.push_str(&format!("  {what}{number:.digits$}{unit}"));
            }
        };
        add("", self.events_per_s, " events/s");
        add("", self.ratio_to_floor, " × floor");
        add("cpu ", self.cpu_us_per_event, " µs");
        add("walsender ", self.walsender_cpu_us_per_event, " µs");
        add("broker ", self.broker_cpu_us_per_event, " µs");
        add("", self.rss_peak_bytes.map(|b| b as f64 / 1e6), " MB");
        add("p50 ", self.p50_ms, " ms");
        add("p99 ", self.p99_ms, " ms");
        add("max ", self.max_ms, " ms");
        if let Some(why) = &self.failed {
            line.push_str(&format!("  FAILED: {why}"));
        }
        line
    }

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
            cpu_ratio_to_walsender: numbers(|f| f.cpu_ratio_to_walsender),
            cpu_ratio_to_debezium: numbers(|f| f.cpu_ratio_to_debezium),
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
            p50_from_send_ms: numbers(|f| f.p50_from_send_ms),
            p99_from_send_ms: numbers(|f| f.p99_from_send_ms),
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
