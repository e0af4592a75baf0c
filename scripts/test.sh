#!/usr/bin/env bash
# make test: format, lints, docs, the pure core by itself, and everything on real servers.
# Each suite has a budget in minutes; being over it is said, not failed (a busy machine is no bug).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

suite() { # name, budget in minutes, command...
    local name=$1 budget=$2 began=$SECONDS
    shift 2
    echo "== $name"
    "$@"
    local took=$((SECONDS - began))
    echo "== $name: $took s"
    if [ "$took" -gt $((budget * 60)) ]; then echo "== $name is over its budget of $budget min"; fi
}

fetch() {
    for version in 18.6 14 15 16 17; do scripts/postgres.sh fetch "$version" >/dev/null; done
    local status=0
    scripts/kafka.sh fetch >/dev/null || status=$?
    case $status in
        0) export OUTBOX_TESTS_MUST_RUN=1 ;; # nothing may be skipped where Kafka is to be had
        3) echo "no Kafka here: the tests that need it will be listed as ignored" ;;
        *) exit "$status" ;;
    esac
}

core_stands_alone() {
    local heavy
    heavy=$(cargo tree --no-default-features --edges normal,dev,build --prefix none | grep -E '^(tokio|rdkafka)' || true)
    if [ -n "$heavy" ]; then echo "the core depends on: $heavy"; exit 1; fi
    cargo test --quiet --no-default-features
}

features=$(scripts/cargo-features.sh),real-servers
suite "fetch servers" 3 fetch
suite "format" 1 cargo fmt --check
suite "lints" 5 cargo clippy --quiet --all-targets --features "$features" -- -D warnings
suite "docs" 2 env RUSTDOCFLAGS="-D warnings" cargo doc --quiet --no-deps --features "$features"
suite "core alone" 3 core_stands_alone
suite "mutants of the core" 3 scripts/mutants.sh
suite "unit tests" 3 cargo test --quiet --lib --bins --features "$features"
suite "what the fuzzer found" 1 cargo test --quiet --test fuzz --features "$features"
suite "containers" 1 cargo test --quiet --test docker --features "$features"
suite "real servers" 15 cargo test --test it --features "$features"
suite "torture" 4 env KILLS=50 PG=10 BROKER=10 PROMOTIONS=3 cargo test --quiet --test torture --features "$features"
suite "the benchmark still works" 2 cargo test --quiet --bench bench --features "$features"
