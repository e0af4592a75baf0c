#!/usr/bin/env bash
# make torture: builds the worker as it is released, then kills it and its servers under load.
#   KILLS=n PG=n BROKER=n PROMOTIONS=n   so many faults of each kind; of several kinds, a quarter of them mixed
#   SEED=n                               repeats the random choices of an earlier run
#   ROWS=n                               instead: one transaction of n rows, and the memory that it takes
#   BACKLOG=n                            instead: n rows committed while Kafka is down, and the same
#   AS_MB=n                              the worker gets no more address space than this
# Ends with 1 when anything was lost, inverted or invented, or a position ran ahead.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

features=$(scripts/cargo-features.sh)
work=${CARGO_TARGET_DIR:-$PWD/target}/torture
mkdir -p "$work"
if [ -z "${OUTBOX_TAILER_PROGRAM:-}" ]; then
    cargo build --quiet --release --features "$features"
    # A copy: the build of the tests makes a worker of its own.
    cp "$(dirname "$work")/release/outbox-tailer" "$work/outbox-tailer"
    OUTBOX_TAILER_PROGRAM=$work/outbox-tailer
fi
if [ -n "${AS_MB:-}" ]; then
    printf '#!/bin/sh\nulimit -v %d\nexec %q "$@"\n' "$((AS_MB * 1024))" "$OUTBOX_TAILER_PROGRAM" >"$work/limited"
    chmod +x "$work/limited"
    OUTBOX_TAILER_PROGRAM=$work/limited
fi
export OUTBOX_TAILER_PROGRAM
cargo test --quiet --test torture --features "$features,real-servers"
