//! What `make fuzz` runs, on what it has found so far and on what PostgreSQL sent: a target is a
//! function of any bytes that panics when something does not hold. `fuzz/` gives the same functions
//! to libFuzzer.

#[cfg(feature = "worker")]
mod config;
mod decode;
#[cfg(feature = "worker")]
mod documents;
mod record;
mod relay;
mod seeds;
#[cfg(feature = "worker")]
mod stream;
#[path = "../core/wire.rs"]
mod wire;

use std::path::Path;

type Target = (&'static str, fn(&[u8]), fn() -> Vec<Vec<u8>>);

const TARGETS: &[Target] = &[
    ("decode", decode::check, seeds::messages),
    ("record", record::check, seeds::none),
    ("relay", relay::check, seeds::none),
    #[cfg(feature = "worker")]
    ("config", config::check, seeds::configurations),
    #[cfg(feature = "worker")]
    ("documents", documents::check, seeds::documents),
    #[cfg(feature = "worker")]
    ("stream", stream::check, seeds::streams),
];

#[test]
fn everything_found_so_far_still_holds() {
    for (name, check, seeds) in TARGETS {
        let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(name);
        let mut paths: Vec<_> =
            std::fs::read_dir(&corpus).expect("a corpus").map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        assert!(!paths.is_empty(), "no corpus for {name}");
        for path in paths {
            let input = std::fs::read(&path).unwrap();
            if std::panic::catch_unwind(|| check(&input)).is_err() {
                panic!("target {name} fails on {}", path.display());
            }
        }
        for (i, input) in seeds().iter().enumerate() {
            if std::panic::catch_unwind(|| check(input)).is_err() {
                panic!("target {name} fails on its seed {i}: {input:?}");
            }
        }
    }
}

/// Writes what the fuzzer starts from beside the corpus.
#[test]
#[ignore = "scripts/fuzz.sh runs it, with FUZZ_SEEDS"]
fn write_seeds() {
    let folder = std::path::PathBuf::from(std::env::var_os("FUZZ_SEEDS").expect("FUZZ_SEEDS"));
    for (name, _, seeds) in TARGETS {
        std::fs::create_dir_all(folder.join(name)).unwrap();
        for (i, input) in seeds().iter().enumerate() {
            std::fs::write(folder.join(name).join(format!("seed-{i:04}")), input).unwrap();
        }
    }
}
