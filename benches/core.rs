//! Time and allocations of each stage of the core: `cargo bench --no-default-features --bench core`.
//! A column is a thousand events.

mod stages;

use divan::counter::ItemsCount;
use divan::{AllocProfiler, Bencher};
use stages::{EVENTS, STAGES};

#[global_allocator]
static ALLOCATIONS: AllocProfiler = AllocProfiler::system();

fn main() {
    divan::main();
}

#[divan::bench(args = STAGES.map(|(name, _)| name))]
fn stage(bencher: Bencher<'_, '_>, name: &str) {
    let (_, stage) = STAGES.iter().find(|(known, _)| *known == name).unwrap();
    let mut bencher = Some(bencher.counter(ItemsCount::new(EVENTS)));
    stage(&mut |round| bencher.take().unwrap().bench_local(round));
}
