//! `make torture`: under a steady load the worker, PostgreSQL and Kafka are killed again and again and
//! standbys are promoted, and the promise is checked to the last event. See `Plan` for what can be asked
//! for; run by `cargo test` it is a few faults of each kind.

mod figures;
mod ground;
mod load;
mod promotion;
mod rows;
#[path = "../it/support/mod.rs"]
#[allow(dead_code)] // the tests use the rest
mod support;
mod watch;

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::Arc;

use figures::Figures;
use ground::{Ground, Kind};
use support::servers::{self, Kafka};

/// What was asked for, in the environment.
struct Plan {
    /// `KILLS`, `PG`, `BROKER`, `PROMOTIONS`: so many of each kind.
    faults: Vec<(Kind, usize)>,
    /// Every random choice follows from it.
    seed: u64,
    /// `ROWS`: instead, one transaction of so many rows, and how much memory the worker takes.
    rows: Option<u64>,
    /// `BACKLOG`: instead, so many rows committed while Kafka is down.
    backlog: Option<u64>,
}

impl Plan {
    fn from_environment() -> Self {
        let number = |name: &str| {
            let text = std::env::var(name).ok().filter(|text| !text.is_empty())?;
            Some(text.parse::<u64>().unwrap_or_else(|_| panic!("{name}={text}: not a number")))
        };
        let asked: Vec<Option<u64>> = Kind::ALL.iter().map(|kind| number(kind.variable())).collect();
        let some = asked.iter().any(Option::is_some);
        let count = |asked: &Option<u64>| asked.unwrap_or(if some { 0 } else { 2 }) as usize;
        Plan {
            faults: Kind::ALL.into_iter().zip(asked.iter().map(count)).collect(),
            seed: number("SEED").unwrap_or_else(|| fastrand::u64(..)),
            rows: number("ROWS"),
            backlog: number("BACKLOG"),
        }
    }

    /// Each kind by itself, which gives the figures, then a quarter of all in random order.
    fn rounds(&self, random: &mut fastrand::Rng) -> Vec<Round> {
        let several = self.faults.iter().filter(|(_, count)| *count > 0).count() > 1;
        let (mut rounds, mut mixed) = (Vec::new(), Vec::new());
        for &(kind, count) in &self.faults {
            let apart = if several { count / 4 } else { 0 };
            mixed.extend(std::iter::repeat_n(kind, apart));
            let alone = vec![kind; count - apart];
            let round = |faults: &[Kind]| Round { name: kind.name(), faults: faults.to_vec() };
            rounds.extend(alone.chunks(kind.round()).map(round));
        }
        random.shuffle(&mut mixed);
        rounds.extend(mixed.chunks(40).map(|faults| Round { name: MIXED, faults: faults.to_vec() }));
        rounds
    }
}

const MIXED: &str = "mixed";

/// One database, one topic, one verdict.
struct Round {
    name: &'static str,
    faults: Vec<Kind>,
}

fn main() -> ExitCode {
    let plan = Plan::from_environment();
    if let Some(reason) = servers::missing() {
        eprintln!("not run: {reason}");
        return match std::env::var_os("OUTBOX_TESTS_MUST_RUN") {
            Some(_) => ExitCode::FAILURE,
            None => ExitCode::SUCCESS,
        };
    }
    let mut figures = Figures::default();
    let kept = catch_unwind(AssertUnwindSafe(|| {
        match (plan.rows, plan.backlog) {
            (Some(rows), _) => rows::one_transaction(rows),
            (None, Some(rows)) => rows::backlog(rows),
            (None, None) => return torture(&plan, &mut figures),
        };
        true
    }));
    servers::stop_shared();
    if kept.unwrap_or(false) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn torture(plan: &Plan, figures: &mut Figures) -> bool {
    eprintln!("SEED={}", plan.seed);
    let mut random = fastrand::Rng::with_seed(plan.seed);
    let rounds = plan.rounds(&mut random);
    let cluster: Vec<Arc<Kafka>> = Kafka::cluster(&[]);
    for (number, round) in rounds.iter().enumerate() {
        let ran = catch_unwind(AssertUnwindSafe(|| {
            let promotes = round.faults.contains(&Kind::Promotion);
            let mixed = round.name == MIXED;
            let mut ground = Ground::new(cluster.clone(), promotes, mixed, random.fork(), figures);
            ground.run(&round.faults);
            ground.finish();
        }));
        if let Err(why) = ran {
            figures.broken.push(words(&*why));
        }
        eprintln!(
            "round {}/{}: {} x {}: {}",
            number + 1,
            rounds.len(),
            round.faults.len(),
            round.name,
            figures.verdict()
        );
        if !figures.kept_the_promise() {
            break;
        }
    }
    for why in &figures.broken {
        eprintln!("{why}");
    }
    println!("seed={} {figures}", plan.seed);
    figures.kept_the_promise()
}

/// What a panic said.
fn words(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("a panic without words").to_owned()
}
