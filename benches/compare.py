#!/usr/bin/env python3
"""Bulkhead beside memcached and beside the bare disk, on one machine, in one run.

usage: benches/compare.py [hot|tail|cold|idle ...]     (default: all)
environment: ROUNDS (7), SECONDS (1), SERVER_CORE (0), CLIENT_CORE (1), MEMCACHED (memcached), WORK (a directory for pools,
below target/ by default), PRIORITY (a command in front of servers and clients, such as "chrt -f 1" on a shared machine)

hot   GET and SET of 64 KiB, 1 MiB, 8 MiB, whole values in RAM, against memcached -t 1: throughput and CPU seconds per GiB
tail  first octet of an 8 MiB value with its tail on disk against one wholly in RAM
cold  GET of 8 MiB values from disk against O_DIRECT reads of 8 MiB from the same pool file
idle  CPU of a daemon with 100 open connections

Both sides take turns in every round; figures are medians of rounds, ratios medians of the ratios of each round. Rounds
whose baseline is more than 30 % off its own median are dropped and counted. `pp` is the median 64-octet ping-pong over
loopback TCP in the same rounds. Needs Python 3, taskset, a release build, and memcached for `hot`.
"""
import json, mmap, os, random, re, shutil, signal, socket, statistics, subprocess, sys, tempfile, time, urllib.request

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
BINARY = os.path.join(ROOT, "target", "release", "bulkhead")
ROUNDS = int(os.environ.get("ROUNDS", 7))
SECONDS = float(os.environ.get("SECONDS", 1))
SERVER_CORE = os.environ.get("SERVER_CORE", "0")
CLIENT_CORE = os.environ.get("CLIENT_CORE", "1")
PRIORITY = os.environ.get("PRIORITY", "").split()
WORK = tempfile.mkdtemp(prefix="compare-", dir=os.environ.get("WORK", os.path.join(ROOT, "target")))
TICKS = os.sysconf("SC_CLK_TCK")
MIB = 1 << 20
running = []


class Server:
    def __init__(self, command, url, admin=None):
        self.process, self.url, self.admin = command, url, admin

    def cpu_seconds(self):
        fields = open(f"/proc/{self.process.pid}/stat").read().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def metric(self, name):
        text = urllib.request.urlopen(self.admin).read().decode()
        return sum(float(value) for value in re.findall(rf"^{name}(?:{{[^}}]*}})? ([0-9.e+]+)$", text, re.M))

    def stop(self):
        running.remove(self)
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()


def started(process, url, admin=None):
    server = Server(process, url, admin)
    running.append(server)
    return server


def bulkhead(memory, pool="9GiB"):
    pool_dir = tempfile.mkdtemp(prefix="pool-", dir=WORK)
    os.rmdir(pool_dir)
    command = [*PRIORITY, "taskset", "-c", SERVER_CORE, BINARY, "serve", "--memcache", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--native", "off",
               "--memory", memory, "--lanes", "1", "--pool", f"{pool_dir}:{pool}", "--log-level", "warn"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    urls = {}
    for line in process.stdout:
        if line.startswith("listening "):
            url = line.split()[1]
            urls["admin" if url.startswith("http") else "door"] = url
        if line == "ready\n":
            break
    server = started(process, urls["door"], urls["admin"])
    server.pool = pool_dir
    return server


def memcached():
    program = shutil.which(os.environ.get("MEMCACHED", "memcached"))
    if not program:
        sys.exit("hot needs memcached (apt install memcached), or MEMCACHED=path")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    user = ["-u", "root"] if os.getuid() == 0 else []
    process = subprocess.Popen([*PRIORITY, "taskset", "-c", SERVER_CORE, program, *user, "-t", "1", "-m", "4096", "-I", "128m",
                                "-l", "127.0.0.1", "-p", str(port)])
    time.sleep(0.5)
    version = subprocess.run([program, "-V"], capture_output=True, text=True).stdout.strip()
    server = started(process, f"memcache://127.0.0.1:{port}")
    server.version = version
    return server


def bench(server, *arguments):
    before = server.cpu_seconds()
    run = subprocess.run([*PRIORITY, "taskset", "-c", CLIENT_CORE, BINARY, "bench", "--server", server.url, "--json", *arguments],
                         capture_output=True, text=True)
    after = server.cpu_seconds()
    if run.returncode:
        sys.exit(f"bench {' '.join(arguments)}: {run.stdout} {run.stderr}")
    result = json.loads(run.stdout)
    result["cpu_per_gib"] = (after - before) / max(result["bytes"] / 2**30, 1e-9)
    return result


def lasting(seconds):
    return f"{round(1000 * seconds)}ms"


def median(values):
    return statistics.median(values)


def kept(rounds, baseline):
    middle = median([baseline(each) for each in rounds])
    good = [each for each in rounds if abs(baseline(each) - middle) <= 0.3 * middle]
    return good, len(rounds) - len(good)


def hot():
    ours, theirs = bulkhead("4GiB"), memcached()
    print(f"## Hot values against {theirs.version}, one server core, {ROUNDS} rounds of {SECONDS:g} s")
    print("| op | size | conns x depth | Bulkhead MiB/s | memcached MiB/s | ratio | CPU s/GiB | memcached | ratio | "
          "p50 us | memcached | pp us | dropped |")
    print("|---|---|---|---|---|---|---|---|---|---|---|---|---|")
    for op in ("get", "set"):
        for size, connections, depth, keys in (("64KiB", 4, 4, 1000), ("1MiB", 4, 2, 256), ("8MiB", 4, 2, 64)):
            common = ["--op", op, "--size", size, "--connections", str(connections), "--depth", str(depth), "--keys",
                      str(keys)]
            for server in (ours, theirs):
                bench(server, *common, "--seconds", "300ms")
            rounds = []
            for number in range(ROUNDS):
                order = (ours, theirs) if number % 2 else (theirs, ours)
                extra = ["--no-load"] if op == "get" else []
                pair = {server: bench(server, *common, *extra, "--seconds", lasting(SECONDS)) for server in order}
                rounds.append((pair[ours], pair[theirs]))
            rounds, dropped = kept(rounds, lambda pair: pair[1]["bytes_per_second"])
            rate = lambda side: median([pair[side]["bytes_per_second"] / MIB for pair in rounds])
            cpu = lambda side: median([pair[side]["cpu_per_gib"] for pair in rounds])
            p50 = lambda side: median([pair[side]["p50_us"] for pair in rounds])
            ratio = median([pair[0]["bytes_per_second"] / pair[1]["bytes_per_second"] for pair in rounds])
            cpu_ratio = median([pair[0]["cpu_per_gib"] / pair[1]["cpu_per_gib"] for pair in rounds])
            ping = median([side["pingpong_64_p50_us"] for pair in rounds for side in pair])
            print(f"| {op} | {size} | {connections} x {depth} | {rate(0):.0f} | {rate(1):.0f} | **{ratio:.2f}** | "
                  f"{cpu(0):.3f} | {cpu(1):.3f} | **{cpu_ratio:.2f}** | {p50(0):.0f} | {p50(1):.0f} | {ping:.1f} | "
                  f"{dropped} |", flush=True)
    ours.stop()
    theirs.stop()


def tail():
    in_ram, on_disk = bulkhead("4GiB"), bulkhead("256MiB")
    print(f"## First octet of 8 MiB, depth 1, {ROUNDS} rounds of {SECONDS:g} s")
    common = ["--op", "get", "--size", "8MiB", "--connections", "1", "--depth", "1", "--keys", "128"]
    for server in (in_ram, on_disk):
        bench(server, *common, "--seconds", "300ms")
    rounds = []
    for number in range(ROUNDS):
        before = on_disk.metric("bulkhead_disk_reads_total")
        order = (in_ram, on_disk) if number % 2 else (on_disk, in_ram)
        pair = {server: bench(server, *common, "--no-load", "--seconds", lasting(SECONDS)) for server in order}
        reads = on_disk.metric("bulkhead_disk_reads_total") - before
        rounds.append((pair[on_disk], pair[in_ram], reads / max(pair[on_disk]["operations"], 1)))
    rounds, dropped = kept(rounds, lambda pair: pair[1]["ttfb_p50_us"])
    ratio = median([pair[0]["ttfb_p50_us"] / pair[1]["ttfb_p50_us"] for pair in rounds])
    print("| tail on disk, p50 us | wholly in RAM, p50 us | ratio | disk reads per GET | pp us | dropped |")
    print("|---|---|---|---|---|---|")
    print(f"| {median([pair[0]['ttfb_p50_us'] for pair in rounds]):.0f} | "
          f"{median([pair[1]['ttfb_p50_us'] for pair in rounds]):.0f} | **{ratio:.2f}** | "
          f"{median([pair[2] for pair in rounds]):.1f} of 32 pieces | "
          f"{median([side['pingpong_64_p50_us'] for pair in rounds for side in pair[:2]]):.1f} | {dropped} |", flush=True)
    in_ram.stop()
    on_disk.stop()


def direct_reads(path, seconds):
    """O_DIRECT reads of 8 MiB at random places of the file: octets a second."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    size = os.fstat(descriptor).st_size
    buffer = mmap.mmap(-1, 8 * MIB)
    start, octets = time.monotonic(), 0
    while time.monotonic() - start < seconds:
        octets += os.preadv(descriptor, [buffer], random.randrange(size // (8 * MIB)) * 8 * MIB)
    os.close(descriptor)
    return octets / (time.monotonic() - start)


def cold():
    # An arena this small and so many values: nothing but heads is in RAM, and most heads are not either.
    server = bulkhead("32MiB", "6GiB")
    print(f"## Cold GET of 8 MiB on one connection, {ROUNDS} rounds of {2 * SECONDS:g} s")
    print("| requests in flight | GET MiB/s | O_DIRECT reads MiB/s | ratio | pp us | dropped |")
    print("|---|---|---|---|---|---|")
    common = ["--op", "get", "--size", "8MiB", "--connections", "1", "--keys", "512"]
    bench(server, *common, "--seconds", "300ms")
    path = os.path.join(server.pool, "extents-0000.bulkhead")
    for depth in (1, 4):
        rounds = []
        for number in range(ROUNDS):
            reads = lambda: direct_reads(path, 2 * SECONDS)
            get = lambda: bench(server, *common, "--depth", str(depth), "--no-load", "--seconds", lasting(2 * SECONDS))
            pair = (get(), reads()) if number % 2 else tuple(reversed((reads(), get())))
            rounds.append(pair)
        rounds, dropped = kept(rounds, lambda pair: pair[1])
        ratio = median([pair[0]["bytes_per_second"] / pair[1] for pair in rounds])
        print(f"| {depth} | {median([pair[0]['bytes_per_second'] / MIB for pair in rounds]):.0f} | "
              f"{median([pair[1] / MIB for pair in rounds]):.0f} | **{ratio:.2f}** | "
              f"{median([pair[0]['pingpong_64_p50_us'] for pair in rounds]):.1f} | {dropped} |", flush=True)
    server.stop()


def idle():
    server = bulkhead("256MiB", "1GiB")
    host, port = server.url.removeprefix("memcache://").split(":")
    peers = []
    for number in range(100):
        peer = socket.create_connection((host, int(port)))
        peer.sendall(b"version\r\n")
        peer.recv(100)
        peers.append(peer)
    time.sleep(2)
    before, start = server.cpu_seconds(), time.monotonic()
    time.sleep(20)
    share = (server.cpu_seconds() - before) / (time.monotonic() - start)
    print(f"## Idle with 100 connections for 20 s\n{100 * share:.2f} % of a core", flush=True)
    server.stop()


def main():
    wanted = sys.argv[1:] or ["hot", "tail", "cold", "idle"]
    known = {"hot": hot, "tail": tail, "cold": cold, "idle": idle}
    for name in wanted:
        if name not in known:
            sys.exit(__doc__)
    try:
        for name in wanted:
            known[name]()
    finally:
        for server in list(running):
            server.process.kill()
        shutil.rmtree(WORK, ignore_errors=True)


main()
