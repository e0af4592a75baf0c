#![no_main]

#[path = "../../tests/fuzz/documents.rs"]
mod documents;

libfuzzer_sys::fuzz_target!(|input: &[u8]| documents::check(input));
