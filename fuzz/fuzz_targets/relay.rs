#![no_main]

#[path = "../../tests/fuzz/relay.rs"]
mod relay;
#[allow(dead_code)] // this one needs a part of it
#[path = "../../tests/core/wire.rs"]
mod wire;

libfuzzer_sys::fuzz_target!(|input: &[u8]| relay::check(input));
