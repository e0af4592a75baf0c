//! Servers, the worker as a process, the oracles, and a bed that puts them together. A `mod.rs`, so that
//! `tests/bench` can use it, too.

pub mod bed;
pub mod interceptor;
pub mod oracle;
pub mod poller;
pub mod proxy;
pub mod servers;
pub mod tally;
pub mod worker;

use std::time::{Duration, Instant};

/// Waits for a condition; panics with `what` when it does not come.
pub fn eventually<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    within(Duration::from_secs(60), what, &mut condition)
}

pub fn within<T>(limit: Duration, what: &str, condition: &mut dyn FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(value) = condition() {
            return value;
        }
        assert!(Instant::now() < deadline, "not within {limit:?}: {what}");
        std::thread::sleep(Duration::from_millis(20)); // polls a condition
    }
}

/// Runs on every drop, also of a failing test.
pub struct Defer<F: FnMut()>(pub F);

impl<F: FnMut()> Drop for Defer<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}
