//! The clock on the wall jumps. By hand, because it takes libfaketime.

use std::time::Duration;

use crate::servers_fail::{all_is_well, flows};
use crate::support::bed::{Bed, Load};
use crate::support::worker::Worker;
use crate::tests;

tests![a_clock_that_jumps_by_an_hour_disturbs_nothing];

/// The path of libfaketime.
const LIBRARY: &str = "OUTBOX_FAKETIME";

/// Why these tests cannot run here.
pub fn missing() -> Option<String> {
    std::env::var_os(LIBRARY).is_none().then(|| format!("{LIBRARY} does not say where libfaketime is"))
}

fn a_clock_that_jumps_by_an_hour_disturbs_nothing() {
    let library = std::env::var(LIBRARY).unwrap();
    let mut bed = Bed::new();
    bed.init();
    let clock = bed.config.with_file_name("clock");
    let jump = |to: &str| std::fs::write(&clock, to).unwrap();
    jump("+0");
    // Only the wall clock: the kernel's monotonic one never jumps.
    let environment = [
        ("LD_PRELOAD", library.as_str()),
        ("FAKETIME_TIMESTAMP_FILE", clock.to_str().unwrap()),
        ("FAKETIME_NO_CACHE", "1"),
        ("FAKETIME_DONT_FAKE_MONOTONIC", "1"),
    ];
    let mut worker = Worker::start_in(&environment, &bed.config, &[]);
    worker.streams();
    let load = Load::start(&bed, 2, Duration::from_millis(2));
    for time in ["+3600", "-3600", "+0"] {
        flows(&bed, 200);
        jump(time);
    }
    flows(&bed, 200);
    load.stop();
    assert_eq!(all_is_well(&mut bed), 0);
    assert_eq!(worker.logged("streaming").len(), 1, "{:#?}", worker.log());
    let of_the_future = |ms: i64| ms > now_ms() + 3_000_000;
    let jumped = bed.topic.read().iter().any(|m| m.timestamp_ms.is_some_and(of_the_future));
    assert!(jumped, "the clock did not jump");
    worker.stop();
}

fn now_ms() -> i64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    i64::try_from(now.as_millis()).unwrap()
}
