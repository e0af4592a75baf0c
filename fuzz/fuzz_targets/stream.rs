#![no_main]

#[path = "../../tests/fuzz/stream.rs"]
mod stream;

libfuzzer_sys::fuzz_target!(|input: &[u8]| stream::check(input));
