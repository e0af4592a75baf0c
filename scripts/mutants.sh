#!/usr/bin/env bash
# Tests the simulator: each patch in tests/sim/mutants breaks one rule that the promise rests on, and
# the simulator must find it. A patch that no longer applies fails, too.
#   scripts/mutants.sh [NAME...]      SEEDS=n histories each at most
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
export CARGO_TARGET_DIR=$PWD/target/mutants SEEDS=${SEEDS:-10000} VIOLATIONS=1 RUST_BACKTRACE=0
build=(cargo test --quiet --no-default-features --test sim)
survived=()

patches=(tests/sim/mutants/*.patch)
if [ $# -gt 0 ]; then patches=("${@/#/tests/sim/mutants/}") && patches=("${patches[@]/%/.patch}"); fi
for patch in "${patches[@]}"; do
    name=$(basename "$patch" .patch)
    rm -rf "${copy:?}"/*
    cp -r Cargo.toml Cargo.lock src tests benches "$copy"
    if ! (cd "$copy" && git apply -) <"$patch"; then echo "mutant $name: the patch no longer applies"; exit 1; fi
    if ! (cd "$copy" && "${build[@]}" --no-run); then echo "mutant $name: does not build"; exit 1; fi
    first=$(sed -n 's/^SEED=//p' "$patch")
    if output=$(cd "$copy" && SEED=${first:-1} "${build[@]}" -- --nocapture every_history 2>&1); then
        echo "mutant $name: SURVIVED $SEEDS seeds"
        survived+=("$name")
    else
        echo "mutant $name: $(grep -m1 -o 'seed [0-9]*: .*' <<<"$output" | cut -c1-160)"
    fi
done
if [ ${#survived[@]} -gt 0 ]; then echo "survived: ${survived[*]}"; exit 1; fi
echo "mutants: ${#patches[@]} caught"
