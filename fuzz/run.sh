#!/bin/sh
# Builds every fuzz target and runs each for a bounded time, on stable Rust and without cargo-fuzz.
# usage: fuzz/run.sh SECONDS [TARGET...]
# Exits non-zero on the first finding; the input that shows it is then in fuzz/artifacts/TARGET/.
set -eu

if [ $# -lt 1 ]; then
    echo "usage: $0 SECONDS [TARGET...]" >&2
    exit 64
fi
seconds=$1
shift
cd "$(dirname "$0")"
if [ $# -eq 0 ]; then
    for file in fuzz_targets/*.rs; do
        set -- "$@" "$(basename "$file" .rs)"
    done
fi

# Coverage as cargo-fuzz asks for it. Naming the target triple keeps the flags away from build scripts and macros.
triple=$(rustc -vV | sed -n 's/^host: //p')
RUSTFLAGS="-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
-Cllvm-args=-sanitizer-coverage-trace-compares --cfg fuzzing -Ccodegen-units=1"
export RUSTFLAGS
cargo build --locked --release --target "$triple"

for target in "$@"; do
    mkdir -p "corpus/$target" "artifacts/$target"
    dictionary=
    if [ -f "$target.dict" ]; then
        dictionary="-dict=$target.dict"
    fi
    # shellcheck disable=SC2086 # an absent dictionary is no argument at all
    "target/$triple/release/$target" -max_total_time="$seconds" -max_len=8192 -timeout=10 -rss_limit_mb=2048 \
        -artifact_prefix="artifacts/$target/" $dictionary "corpus/$target"
done
