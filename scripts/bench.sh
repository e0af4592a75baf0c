#!/usr/bin/env bash
# make bench: builds the worker as it is released, then runs the benchmark against it.
#   QUICK=1      200,000 events and one round of each
#   ONLY=paths   only these, such as drain/tcp/single or drain/*/batched/outbox-tailer or latency
#   EVENTS=n     events of a backlog (2,000,000); ROUNDS=n (3)
# Writes target/bench/results.json, benchmarks.md and charts. Ends with 1 when a run lost anything.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

features=$(scripts/cargo-features.sh)
target=${CARGO_TARGET_DIR:-$PWD/target}
cargo build --quiet --release --features "$features"
# A copy: the build of the benchmark makes a worker of its own, which unwinds, in the same place.
mkdir -p "$target/bench"
cp "$target/release/outbox-tailer" "$target/bench/outbox-tailer"
export OUTBOX_TAILER_PROGRAM=$target/bench/outbox-tailer
cargo bench --quiet --bench bench --features "$features,real-servers"
