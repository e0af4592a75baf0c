#![no_main]

#[path = "../../tests/fuzz/decode.rs"]
mod decode;

libfuzzer_sys::fuzz_target!(|input: &[u8]| decode::check(input));
