#![no_main]

#[path = "../../tests/fuzz/record.rs"]
mod record;
#[allow(dead_code)] // this one needs a part of it
#[path = "../../tests/core/wire.rs"]
mod wire;

libfuzzer_sys::fuzz_target!(|input: &[u8]| record::check(input));
