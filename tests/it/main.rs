//! End-to-end tests on real servers: PostgreSQL from `scripts/postgres.sh`, Kafka from
//! `scripts/kafka.sh`. A test that cannot run here is listed as ignored with the reason;
//! `OUTBOX_TESTS_MUST_RUN=1` turns that into a failure.

mod support;

mod brokers;
mod kills;
mod messages;
mod mistakes;
mod oracles;
mod refusals;
mod servers_fail;
mod setup;
mod steady;
mod transactions;
mod wires;
mod witness;

use libtest_mimic::{Arguments, Trial};

/// A named test; the name is a sentence.
pub type Test = (&'static str, fn());

/// `tests![a, b]`: the functions under their own names.
#[macro_export]
macro_rules! tests {
    ($($name:ident),* $(,)?) => {
        pub const TESTS: &[$crate::Test] = &[$((stringify!($name), $name)),*];
    };
}

fn main() {
    let mut arguments = Arguments::from_args();
    // Two cores; a test mostly waits.
    arguments.test_threads.get_or_insert(3);
    let missing = support::servers::missing();
    if let Some(reason) = &missing {
        eprintln!("the tests on real servers are not run: {reason}");
        assert!(std::env::var_os("OUTBOX_TESTS_MUST_RUN").is_none(), "they must run here");
    }
    let groups: [(&str, &[Test]); 12] = [
        ("kills", kills::TESTS),
        ("wires", wires::TESTS),
        ("brokers", brokers::TESTS),
        ("messages", messages::TESTS),
        ("mistakes", mistakes::TESTS),
        ("oracles", oracles::TESTS),
        ("refusals", refusals::TESTS),
        ("servers_fail", servers_fail::TESTS),
        ("setup", setup::TESTS),
        ("steady", steady::TESTS),
        ("transactions", transactions::TESTS),
        ("witness", witness::TESTS),
    ];
    let trials = groups
        .into_iter()
        .flat_map(|(group, tests)| {
            tests.iter().map(move |(name, test)| {
                let test = *test;
                let run = move || {
                    test();
                    Ok(())
                };
                Trial::test(format!("{group}::{name}"), run)
            })
        })
        .map(|trial| trial.with_ignored_flag(missing.is_some()))
        .collect();
    let conclusion = libtest_mimic::run(&arguments, trials);
    support::servers::stop_shared();
    conclusion.exit();
}
