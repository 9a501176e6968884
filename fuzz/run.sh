#!/bin/sh
# Builds every fuzz target, makes its first inputs of the test vectors, and runs each for a bounded time, on stable Rust and
# without cargo-fuzz.
# usage: fuzz/run.sh [--each] SECONDS [TARGET...]
# SECONDS are shared among the targets; with --each, every one has as many.
# Exits non-zero on the first finding; the input that shows it is then in fuzz/artifacts/TARGET/.
set -eu

each=
if [ "${1-}" = --each ]; then
    each=yes
    shift
fi
case ${1-} in
'' | *[!0-9]*)
    echo "usage: $0 [--each] SECONDS [TARGET...]" >&2
    exit 64
    ;;
esac
seconds=$1
shift
cd "$(dirname "$0")"
if [ $# -eq 0 ]; then
    for file in fuzz_targets/*.rs; do
        set -- "$@" "$(basename "$file" .rs)"
    done
fi
for target in "$@"; do
    if ! grep -qx "name = \"$target\"" Cargo.toml; then
        echo "$0: fuzz_targets/$target.rs has no [[bin]] in fuzz/Cargo.toml" >&2
        exit 64
    fi
done
if [ -z "$each" ]; then
    seconds=$((seconds / $#))
fi
if [ "$seconds" -eq 0 ]; then
    echo "$0: less than a second for each of $# targets" >&2
    exit 64
fi

# Coverage as cargo-fuzz asks for it. Naming the target triple keeps the flags away from build scripts and macros.
triple=$(rustc -vV | sed -n 's/^host: //p')
RUSTFLAGS="-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
-Cllvm-args=-sanitizer-coverage-trace-compares --cfg fuzzing -Ccodegen-units=1"
export RUSTFLAGS
cargo build --locked --release --target "$triple"

for target in "$@"; do
    echo "== $target, $seconds s"
    mkdir -p "corpus/$target" "artifacts/$target"
    dictionary=
    if [ -f "$target.dict" ]; then
        dictionary="-dict=$target.dict"
    fi
    # shellcheck disable=SC2086 # an absent dictionary is no argument at all
    BULKHEAD_FUZZ_CORPUS="corpus/$target" "target/$triple/release/$target" -max_total_time="$seconds" -max_len=8192 \
        -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 -artifact_prefix="artifacts/$target/" $dictionary \
        "corpus/$target"
done
