//! `make bench`: every contender drains the same log, in turn, several times; then latency and start-up.
//! Writes `target/bench/results.json`, `benchmarks.md` and charts.
//!
//! Run by `cargo test` it is the check that it still works: a small backlog, two contenders.

mod arrivals;
mod backlog;
mod contenders;
mod drain;
mod figures;
mod processes;
#[path = "../it/support/mod.rs"]
#[allow(dead_code)] // the tests use the rest
mod support;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::process::ExitCode;

use backlog::{Backlog, Workload};
use contenders::{Contender, Transport};
use figures::Figure;
use support::servers::{self, Kafka};

/// What was asked for.
struct Plan {
    rounds: usize,
    /// Of the workloads with small events.
    events: u64,
    /// Paths such as `drain/tcp/single/outbox-tailer`; a path selects what begins with it, `*` is any part.
    only: Vec<String>,
    output: PathBuf,
}

impl Plan {
    fn from_environment() -> Self {
        let number = |name| std::env::var(name).ok().filter(|v| !v.is_empty()).map(|v| v.parse().expect(name));
        let quick = number("QUICK").is_some_and(|n| n != 0);
        let only = std::env::var("ONLY").unwrap_or_default();
        let root = PathBuf::from(servers::ROOT);
        // `cargo bench` says so; `cargo test` runs the check.
        if std::env::args().all(|a| a != "--bench") {
            return Plan {
                rounds: 1,
                events: 5_000,
                only: vec!["drain/tcp/single".to_owned()],
                output: root.join("target/bench/check"),
            };
        }
        Plan {
            rounds: number("ROUNDS").unwrap_or(if quick { 1 } else { 3 }) as usize,
            events: number("EVENTS").unwrap_or(if quick { 200_000 } else { 2_000_000 }),
            only: only.split_whitespace().map(str::to_owned).collect(),
            output: root.join("target/bench"),
        }
    }

    fn wants(&self, path: &str) -> bool {
        let matches = |only: &String| {
            let mut parts = path.split('/');
            only.split('/').all(|wanted| parts.next().is_none_or(|part| wanted == "*" || wanted == part))
        };
        self.only.is_empty() || self.only.iter().any(matches)
    }

    fn workloads(&self) -> Vec<Workload> {
        let events = self.events;
        let small = |name, says, transaction_events| Workload { name, says, events, transaction_events, fill_bytes: 180 };
        vec![
            small("single", "single-event transactions", 1),
            small("batched", "transactions of 1,000", 1_000),
            Workload {
                name: "large",
                says: "10 KB, single-event transactions",
                events: events / 20,
                transaction_events: 1,
                fill_bytes: 10_000,
            },
            small("one", "one transaction", events),
        ]
    }
}

fn main() -> ExitCode {
    if let Some(reason) = servers::missing() {
        eprintln!("no benchmark here: {reason}");
        return ExitCode::FAILURE;
    }
    let plan = Plan::from_environment();
    std::fs::create_dir_all(&plan.output).unwrap();
    let kafka = Kafka::start(&[]);
    let mut figures = Vec::new();
    for workload in plan.workloads() {
        let runs: Vec<(Transport, Contender)> = [Transport::Tcp, Transport::Unix]
            .into_iter()
            .flat_map(|t| [Contender::Floor, Contender::Tailer].map(|c| (t, c)))
            .filter(|(t, c)| plan.wants(&format!("drain/{}/{}/{}", t.name(), workload.name, c.name())))
            .collect();
        if runs.is_empty() {
            continue;
        }
        let mut backlog = Backlog::load(backlog::server(), workload);
        let mut rounds: Vec<Vec<Figure>> = vec![Vec::new(); runs.len()];
        for _ in 0..plan.rounds {
            for ((transport, contender), done) in runs.iter().zip(&mut rounds) {
                let figure = attempt(|| drain::drain(*contender, *transport, &mut backlog, &kafka));
                println!("{} {:.0?}/s {figure:?}", figure.key(), figure.events_per_s);
                done.push(figure);
            }
        }
        figures.extend(rounds.iter().map(|r| Figure::of_rounds(r)));
        write(&plan, &figures);
    }
    println!("{}", contenders::versions());
    println!("{}", processes::machine());
    let failed = figures.iter().filter(|f| f.failed.is_some()).count();
    if failed > 0 {
        eprintln!("{failed} figures do not count");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

/// A run that fails must not take the others with it.
fn attempt(run: impl FnOnce() -> Figure) -> Figure {
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let failed = text.or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()));
        Figure { failed: Some(failed.unwrap_or_else(|| "panic".to_owned())), ..Figure::default() }
    })
}

fn write(plan: &Plan, figures: &[Figure]) {
    let json = serde_json::to_string_pretty(figures).unwrap();
    std::fs::write(plan.output.join("results.json"), json).unwrap();
}
