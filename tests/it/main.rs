//! End-to-end tests on real servers: PostgreSQL from `scripts/postgres.sh`, Kafka from
//! `scripts/kafka.sh`. A test that cannot run here is listed as ignored with the reason;
//! `OUTBOX_TESTS_MUST_RUN=1` turns that into a failure.

mod support;

mod access;
mod brokers;
mod disks;
mod failovers;
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
    let no_disks = missing.clone().or_else(|| disks::missing().map(str::to_owned));
    if let (None, Some(reason)) = (&missing, &no_disks) {
        eprintln!("the tests on full disks are not run: {reason}");
    }
    let groups: [(&str, &[Test], bool); 15] = [
        ("access", access::TESTS, missing.is_some()),
        ("brokers", brokers::TESTS, missing.is_some()),
        ("disks", disks::TESTS, no_disks.is_some()),
        ("failovers", failovers::TESTS, missing.is_some()),
        ("kills", kills::TESTS, missing.is_some()),
        ("messages", messages::TESTS, missing.is_some()),
        ("mistakes", mistakes::TESTS, missing.is_some()),
        ("oracles", oracles::TESTS, missing.is_some()),
        ("refusals", refusals::TESTS, missing.is_some()),
        ("servers_fail", servers_fail::TESTS, missing.is_some()),
        ("setup", setup::TESTS, missing.is_some()),
        ("steady", steady::TESTS, missing.is_some()),
        ("transactions", transactions::TESTS, missing.is_some()),
        ("wires", wires::TESTS, missing.is_some()),
        ("witness", witness::TESTS, missing.is_some()),
    ];
    let trials = groups
        .into_iter()
        .flat_map(|(group, tests, ignored)| {
            tests.iter().map(move |(name, test)| {
                let test = *test;
                let run = move || {
                    test();
                    Ok(())
                };
                Trial::test(format!("{group}::{name}"), run).with_ignored_flag(ignored)
            })
        })
        .collect();
    let conclusion = libtest_mimic::run(&arguments, trials);
    support::servers::stop_shared();
    conclusion.exit();
}
