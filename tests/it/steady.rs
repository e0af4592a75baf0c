//! The stream in normal life, and starts and stops of the worker.

use std::time::Duration;

use crate::support::bed::{Bed, Load, Sampler};
use crate::tests;

tests![a_steady_stream_keeps_every_promise];

fn a_steady_stream_keeps_every_promise() {
    let mut bed = Bed::new();
    bed.init();
    let mut worker = bed.streaming();
    let sampler = Sampler::start(&bed);
    let load = Load::start(&bed, 4, Duration::from_millis(2));
    crate::support::eventually("some hundred events are committed", || {
        (bed.value::<i64>("SELECT count(*) FROM outbox_event") > 1000).then_some(())
    });
    load.stop();
    let (messages, verdict) = bed.arrived();
    assert_eq!(verdict.repeats, 0);
    bed.confirmed();
    sampler.check(&bed.committed(), &messages);
    worker.stop();
}
