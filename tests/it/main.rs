//! End-to-end tests on real servers: PostgreSQL from `scripts/postgres.sh`, Kafka from
//! `scripts/kafka.sh`. A test that cannot run here is listed as ignored with the reason;
//! `OUTBOX_TESTS_MUST_RUN=1` turns that into a failure.

#[allow(dead_code)] // `tests/bench` and `tests/torture` use the rest
mod support;

mod access;
mod brokers;
mod clock;
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
    // Some need more than the servers.
    let unless = |reason: Option<String>| match (&missing, reason) {
        (None, Some(reason)) => {
            eprintln!("some tests are not run: {reason}");
            true
        }
        _ => missing.is_some(),
    };
    let groups: [(&str, &[Test], bool); 16] = [
        ("access", access::TESTS, unless(None)),
        ("brokers", brokers::TESTS, unless(None)),
        ("clock", clock::TESTS, unless(clock::missing())),
        ("disks", disks::TESTS, unless(disks::missing())),
        ("failovers", failovers::TESTS, unless(None)),
        ("kills", kills::TESTS, unless(None)),
        ("messages", messages::TESTS, unless(None)),
        ("mistakes", mistakes::TESTS, unless(None)),
        ("oracles", oracles::TESTS, unless(None)),
        ("refusals", refusals::TESTS, unless(None)),
        ("servers_fail", servers_fail::TESTS, unless(None)),
        ("setup", setup::TESTS, unless(None)),
        ("steady", steady::TESTS, unless(None)),
        ("transactions", transactions::TESTS, unless(None)),
        ("wires", wires::TESTS, unless(None)),
        ("witness", witness::TESTS, unless(None)),
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
