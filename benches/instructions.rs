//! Instructions of each stage of the core per event, counted by valgrind's callgrind: the same on a
//! busy machine as on a quiet one. `make bench-instructions`.
//!
//! The count of eleven rounds less the count of one, so that the set-up does not count.

mod stages;

use std::path::Path;
use std::process::{Command, ExitCode};

use stages::{EVENTS, STAGES};

/// What was counted when the file was last written; more than this much above it fails.
const RECORD: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/instructions.txt");
const TOLERANCE: f64 = 1.05;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, name, rounds] = &arguments[..] {
        let (_, stage) = STAGES.iter().find(|(known, _)| known == name).unwrap();
        let rounds: u32 = rounds.parse().unwrap();
        stage(&mut |round| (0..rounds).for_each(|_| round()));
        return ExitCode::SUCCESS;
    }
    if Command::new("valgrind").arg("--version").output().is_err() {
        eprintln!("no instruction counts here: valgrind is not installed");
        return ExitCode::FAILURE;
    }
    let recorded = std::fs::read_to_string(RECORD).unwrap_or_default();
    let (mut counted, mut failed) = (String::new(), false);
    for (name, _) in STAGES {
        let per_event = (instructions(name, 11) - instructions(name, 1)) as f64 / (10 * EVENTS) as f64;
        let before = recorded.lines().find_map(|l| l.strip_prefix(name)?.trim().parse::<f64>().ok());
        let more = before.is_some_and(|before| per_event > before * TOLERANCE);
        let before = before.map_or_else(String::new, |before| format!("  recorded {before:.1}"));
        println!("{name:<10} {per_event:8.1}{before}{}", if more { "  MORE" } else { "" });
        counted += &format!("{name} {per_event:.1}\n");
        failed |= more;
    }
    if std::env::var_os("RECORD").is_some_and(|v| !v.is_empty()) || !Path::new(RECORD).exists() {
        std::fs::write(RECORD, counted).unwrap();
        failed = false;
    }
    if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

fn instructions(stage: &str, rounds: u32) -> u64 {
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .arg(std::env::current_exe().unwrap())
        .args([stage, &rounds.to_string()])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    let collected = text.lines().find_map(|l| l.split_once("Collected :"));
    collected.unwrap_or_else(|| panic!("{text}")).1.trim().parse().unwrap()
}
