#![no_main]

#[path = "../../tests/fuzz/config.rs"]
mod config;

libfuzzer_sys::fuzz_target!(|input: &[u8]| config::check(input));
