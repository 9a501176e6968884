#!/usr/bin/env bash
# Tries clients of the memcached world against a daemon of its own: tests/interop/run.sh [BINARY]
#
# BINARY is target/release/bulkhead, else target/debug/bulkhead, whichever is there. Python clients are installed into
# target/interop-venv, libmemcached's tools by apt where this runs as root; what cannot be had is SKIPPED with the reason.
# One line a stage: PASS, FAIL or SKIPPED. Exit status 1 if any stage failed, 2 if there is no daemon to try.
# Exact replies (probe.tsv) and the Rust client are tried by `cargo test --test e2e_clients`.
set -u
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
binary=${1:-}
for candidate in "$root/target/release/bulkhead" "$root/target/debug/bulkhead"; do
    [ -n "$binary" ] || { [ -x "$candidate" ] && binary=$candidate; }
done
[ -n "$binary" ] || { echo "no daemon: run \`cargo build --release\` first" >&2; exit 2; }

scratch=$(mktemp -d)
daemon=
cleanup() {
    [ -z "$daemon" ] || { kill "$daemon" && wait "$daemon"; } 2>/dev/null
    rm -rf "$scratch"
}
trap cleanup EXIT
trap 'exit 130' INT TERM

failures=0
# stage NAME COMMAND...: a stage passes if its command does; the end of what it said is the reason if not.
stage() {
    local name=$1
    shift
    if timeout 60 "$@" >"$scratch/stage.log" 2>&1 </dev/null; then
        echo "PASS    $name"
    else
        failures=$((failures + 1))
        echo "FAIL    $name: $(tail -n 3 "$scratch/stage.log" | tr '\n' ' ')"
    fi
}
skip() { echo "SKIPPED: $1: $2"; }

env -i PATH="$PATH" "$binary" serve --memcache 127.0.0.1:0 --native off --admin off --memory 64MiB --pool "$scratch/pool:512MiB" \
    >"$scratch/out" 2>"$scratch/log" &
daemon=$!
for _ in $(seq 100); do
    grep -q '^ready' "$scratch/out" && break
    kill -0 "$daemon" 2>/dev/null || break
    sleep 0.1
done
address=$(sed -n 's|^listening memcache://||p' "$scratch/out")
[ -n "$address" ] || { echo "the daemon did not start: $(tail -n 3 "$scratch/log")" >&2; exit 2; }
host=${address%:*}
port=${address##*:}

# Python clients, in the versions these scripts were written for.
venv=$root/target/interop-venv
python=$venv/bin/python
if [ ! -x "$python" ] && ! python3 -m venv "$venv" >"$scratch/venv.log" 2>&1; then
    rm -rf "$venv"
fi
for client in pymemcache==4.0.0 python-memcached==1.62 pylibmc==1.6.3 aiomcache==0.8.2; do
    name=${client%==*}
    if [ ! -x "$python" ]; then
        skip "$name" "no python3 with venv"
    elif ! "$python" -m pip show -qq "$name" 2>/dev/null \
        && ! timeout 60 "$python" -m pip install -q --only-binary :all: "$client" >"$scratch/pip.log" 2>&1; then
        skip "$name" "pip cannot install it: $(tail -n 1 "$scratch/pip.log")"
    else
        stage "$name" "$python" "$here/clients.py" "$name" "$address"
    fi
done

# libmemcached's tools.
if ! command -v memccapable >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    { timeout 60 apt-get install -qy libmemcached-tools || { apt-get update -q && apt-get install -qy libmemcached-tools; }; } \
        >"$scratch/apt.log" 2>&1 </dev/null
fi
servers=--servers=$address
large=$scratch/large
small=$scratch/small
head -c 8388608 /dev/urandom >"$large"
echo "a small value" >"$small"

# Each tool names keys after files.
copy() { memcflush "$servers" && memccp "$servers" "$large" "$small"; }
cat_back() { memccat "$servers" --file="$scratch/back" large && cmp "$large" "$scratch/back" && memccat "$servers" small | grep -qx "a small value"; }
stat_all() { memcstat "$servers" >"$scratch/stats" && grep -q "curr_items: [1-9]" "$scratch/stats" && grep -q "version: 1.6" "$scratch/stats"; }
exist() { memcexist "$servers" large && ! memcexist "$servers" nothing; }
touch_key() { memctouch "$servers" --expire=1000 large && ! memctouch "$servers" --expire=1000 nothing; }
remove() { memcrm "$servers" large && ! memcexist "$servers" large && memcexist "$servers" small; }
flush() { memcflush "$servers" && ! memcexist "$servers" small; }
load() { memcslap "$servers" --test=set --concurrency=4 --execute-number=200; }
capable() {
    memccapable -h "$host" -p "$port" -a 2>&1 | tee "$scratch/capable"
    [ "$(grep -c '\[pass\]' "$scratch/capable")" = 27 ] && grep -q "All tests passed" "$scratch/capable"
}
export -f copy cat_back stat_all exist touch_key remove flush load capable
export servers large small scratch host port

for pair in memcping:"memcping \"\$servers\"" memccp:copy memccat:cat_back memcstat:stat_all memcexist:exist \
    memctouch:touch_key memcrm:remove memcflush:flush memcslap:load memccapable:capable; do
    tool=${pair%%:*}
    if command -v "$tool" >/dev/null; then
        stage "$tool" bash -c "${pair#*:}"
    else
        skip "$tool" "package libmemcached-tools is not installed"
    fi
done
skip memcdump "it lists keys by \`stats cachedump\`, which this door does not answer"

# Whatever clients do, the daemon must live, and leave as asked.
if kill -TERM "$daemon" && wait "$daemon" && ! grep -q panicked "$scratch/log"; then
    echo "PASS    shutdown"
else
    failures=$((failures + 1))
    echo "FAIL    shutdown: $(tail -n 3 "$scratch/log" | tr '\n' ' ')"
fi
daemon=
[ "$failures" = 0 ] || { echo "$failures stages failed" >&2; exit 1; }
