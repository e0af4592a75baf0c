#!/usr/bin/env bash
# make fuzz: libFuzzer on the targets of tests/fuzz, from fuzz/corpus and from what PostgreSQL sent.
#   scripts/fuzz.sh run [TARGET [SECONDS]]   every target in turn, a minute each
#   scripts/fuzz.sh keep [TARGET]            the least of all inputs that reaches as much, into fuzz/corpus
# What was found stays in .dev/fuzz, for the next run; fuzz/corpus/TARGET/found-* are kept as they are.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

command=${1:-run} target=${2:-} seconds=${3:-60}
core=(decode record relay) worker=(config documents stream)
targets=("${core[@]}" "${worker[@]}")
if [ -n "$target" ]; then
    if [[ " ${targets[*]} " != *" $target "* ]]; then echo "TARGET is one of: ${targets[*]}"; exit 2; fi
    targets=("$target")
fi

if ! command -v c++ >/dev/null; then echo "libFuzzer is built by a C++ compiler: install g++"; exit 2; fi
export PATH=$PWD/.dev/cargo-fuzz/bin:$PATH
if ! command -v cargo-fuzz >/dev/null; then
    CARGO_TARGET_DIR=target/cargo-fuzz cargo install --quiet --locked --root .dev/cargo-fuzz cargo-fuzz
fi
# The flags that instrument a program are unstable; the compiler is the project's own all the same.
export RUSTC_BOOTSTRAP=1

fuzz() { # target, directories and flags of libFuzzer...
    local name=$1 features=()
    shift
    if [[ " ${worker[*]} " == *" $name "* ]]; then features=(--features "$(scripts/cargo-features.sh)"); fi
    # Our code is free of `unsafe`; without a sanitizer more is tried in the same time.
    cargo fuzz run --sanitizer none --target-dir target/fuzz "${features[@]}" "$name" "$@"
}

seeds() {
    local features=()
    for name in "${targets[@]}"; do
        if [[ " ${worker[*]} " == *" $name "* ]]; then features=(--features "$(scripts/cargo-features.sh)"); fi
    done
    FUZZ_SEEDS=$PWD/.dev/fuzz/seeds cargo test --quiet --no-default-features "${features[@]}" --test fuzz \
        -- --ignored write_seeds >/dev/null
}

seeds
for name in "${targets[@]}"; do
    found=.dev/fuzz/$name corpus=fuzz/corpus/$name
    mkdir -p "$found" "$corpus"
    case $command in
        run)
            echo "== $name: $seconds s"
            fuzz "$name" "$found" "$corpus" ".dev/fuzz/seeds/$name" -- \
                -max_total_time="$seconds" -timeout=10 -rss_limit_mb=1024 -print_final_stats=1
            ;;
        keep)
            least=$(mktemp -d)
            fuzz "$name" "$least" "$corpus" "$found" ".dev/fuzz/seeds/$name" -- -set_cover_merge=1 -use_counters=0
            find "$corpus" -type f ! -name 'found-*' -delete
            cp "$least"/* "$corpus"
            rm -r "$least"
            ;;
        *) echo "run or keep"; exit 2 ;;
    esac
done
du -sh --apparent-size fuzz/corpus
