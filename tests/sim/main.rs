//! The simulator: the real core, and models of all it talks to, under every fault that the models
//! know, in virtual time. One seed is one history.
//!
//! ```text
//! make sim SEEDS=1000000 SEED=1      any number of histories
//! make sim SEEDS=1 SEED=4711 TRACE=1 one again, step by step
//! ```

mod broker;
mod server;
#[path = "../core/wire.rs"]
mod wire;
mod worker;
mod world;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use world::{Ended, Foreign, World};

thread_local! {
    static LAST_PANIC: RefCell<String> = const { RefCell::new(String::new()) };
}

#[derive(Default)]
struct Totals {
    steps: u64,
    events: u64,
    repeats: u64,
    sessions: u64,
    foreign: BTreeMap<Foreign, (u64, u64)>,
    violations: Vec<(u64, String)>,
}

fn variable(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(default)
}

fn history(seed: u64, trace: bool) -> Result<Ended, String> {
    let world = World::new(seed, trace);
    catch_unwind(AssertUnwindSafe(|| world.run())).map_err(|_| LAST_PANIC.with_borrow(String::clone))
}

#[test]
fn every_history_keeps_the_promise() {
    let (seeds, first, trace) = (variable("SEEDS", 10_000), variable("SEED", 1), variable("TRACE", 0) > 0);
    let enough = variable("VIOLATIONS", 20);
    std::panic::set_hook(Box::new(|info| LAST_PANIC.set(info.to_string())));
    let (next, totals, began) = (AtomicU64::new(first), Mutex::new(Totals::default()), Instant::now());
    let threads = if trace { 1 } else { std::thread::available_parallelism().map_or(1, usize::from) };
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= first + seeds {
                        return;
                    }
                    let ended = history(seed, trace);
                    let mut totals = totals.lock().unwrap();
                    match ended {
                        Ok(ended) => {
                            totals.steps += ended.steps;
                            totals.events += ended.events;
                            totals.repeats += ended.repeats;
                            totals.sessions += ended.sessions;
                            if let Some(foreign) = ended.foreign {
                                let counts = totals.foreign.entry(foreign).or_default();
                                counts.0 += 1;
                                counts.1 += u64::from(ended.refused);
                            }
                        }
                        Err(why) => totals.violations.push((seed, why)),
                    }
                    if totals.violations.len() as u64 >= enough {
                        return;
                    }
                }
            });
        }
    });
    drop(std::panic::take_hook());
    let mut totals = totals.into_inner().unwrap();
    totals.violations.sort();
    let took = began.elapsed().as_secs_f64();
    println!(
        "sim: seeds={seeds} first={first} steps={} events={} repeats={} sessions={} seeds_per_second={:.0} violations={}",
        totals.steps,
        totals.events,
        totals.repeats,
        totals.sessions,
        seeds as f64 / took,
        totals.violations.len()
    );
    for (foreign, (histories, refused)) in &totals.foreign {
        println!("sim: {foreign:?}: {histories} histories, {refused} refused");
    }
    for (seed, why) in &totals.violations {
        println!("sim: seed {seed}: {}", why.replace('\n', " "));
        println!("sim:   again: make sim SEEDS=1 SEED={seed} TRACE=1");
    }
    assert!(totals.violations.is_empty());
}
