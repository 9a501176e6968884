#!/usr/bin/env python3
"""Bulkhead beside memcached and beside the bare disk, on one machine, in one run.

usage: benches/compare.py [hot|tail|cold|native|short|rpc|nfs|idle ...]     (default: all of these)
       tests/rdma-vm/run benches/compare.py rdma                   (in the VM with RDMA devices)
       tests/rdma-vm/run --nfs benches/compare.py knfsd            (and with the kernel's NFS server)
environment: ROUNDS (7), SECONDS (1), SERVER_CORE (0), CLIENT_CORE (1), MEMCACHED (memcached), WORK (a directory for pools,
below target/ by default), PRIORITY (a command in front of servers and clients, such as "chrt -f 1" on a shared machine),
BINARY (target/release/bulkhead). rdma: WINDOWS ("4x256KiB 4x1MiB"), DEVICES ("rxe0 siw0"); both cores for everybody unless
told otherwise. knfsd: WAYS ("rxe siw iwarp tcp")

hot     GET and SET of 64 KiB, 1 MiB, 8 MiB, whole values in RAM, against memcached -t 1: throughput and CPU seconds per GiB
tail    first octet of an 8 MiB value with its tail on disk against one wholly in RAM, on both doors
cold    GET of 8 MiB values from disk against O_DIRECT reads of 8 MiB from the same pool file
native  GET over iWARP, CRC off and on, against one bare TCP stream; one connection against four
short   GET of 100 octets against a blocking TCP ping-pong of 64
rpc     RPC over iWARP: GET of 1 MiB against the native door of the same daemon; 64 values of 64 KiB in one call against 64 calls;
        NULL against the ping-pong; 64 calls at once with 64 credits against one credit
nfs     READ and WRITE of files of 1 MiB and 16 MiB over TCP against GET and SET of the same by the memcache door of the same daemon,
        and one bare TCP stream; NULL against the ping-pong
idle    CPU of a daemon with 100 open connections, on both doors
rdma    GET of 1 MiB over each RDMA device of the VM against ib_write_bw -s 262144 on the same device
knfsd   READ of a file of 16 MiB that Linux has mounted from Bulkhead against the same from the kernel's own server on tmpfs, over rxe, siw,
        siw opposite our iWARP, and TCP: past the page cache in one call, and through it as cp reads, with nothing in it

Both sides take turns in every round; figures are medians of rounds, ratios medians of the ratios of each round. Rounds
whose baseline is more than 30 % off its own median are dropped and counted. `pp` is the median 64-octet ping-pong over
loopback TCP in the same rounds. Needs Python 3, taskset, a release build, and memcached for `hot`.
"""
import glob, json, mmap, os, random, re, shutil, signal, socket, statistics, subprocess, sys, tempfile, time
import urllib.request

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
BINARY = os.environ.get("BINARY", os.path.join(ROOT, "target", "release", "bulkhead"))
ROUNDS = int(os.environ.get("ROUNDS", 7))
SECONDS = float(os.environ.get("SECONDS", 1))
SERVER_CORE = os.environ.get("SERVER_CORE", "0")
CLIENT_CORE = os.environ.get("CLIENT_CORE", "1")
PRIORITY = os.environ.get("PRIORITY", "").split()
WORK = tempfile.mkdtemp(prefix="compare-", dir=os.environ.get("WORK", os.path.join(ROOT, "target")))
TICKS = os.sysconf("SC_CLK_TCK")
MIB = 1 << 20
SCHEMES = {"http": "admin", "native": "native", "rpc": "rpc", "nfs": "nfs"}
running = []
# Those of the VM are none of a daemon's settings.
for name in [name for name in os.environ if name.startswith("BULKHEAD_")]:
    del os.environ[name]


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


def bulkhead(memory, pool="9GiB", native=False, door="native+iwarp://127.0.0.1:0?crc=off", rpc=None, nfs=None, settings={}):
    pool_dir = tempfile.mkdtemp(prefix="pool-", dir=WORK)
    os.rmdir(pool_dir)
    command = [*PRIORITY, "taskset", "-c", SERVER_CORE, BINARY, "serve", "--memcache", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--native", door if native else "off",
               "--memory", memory, "--lanes", "1", "--pool", f"{pool_dir}:{pool}", "--log-level", "warn", *(["--rpc", rpc] if rpc else []),
               *(["--nfs-tcp", nfs, "--nfs-allow", f"{nfs.rsplit(':', 1)[0]}/32"] if nfs else [])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | settings)
    urls = {}
    for line in process.stdout:
        if line.startswith("listening "):
            url = line.split()[1]
            urls[next((name for scheme, name in SCHEMES.items() if url.startswith(scheme)), "door")] = url
        if line == "ready\n":
            break
    server = started(process, urls["native" if native else "door"], urls["admin"])
    server.pool, server.rpc, server.nfs = pool_dir, urls.get("rpc"), urls.get("nfs", "").removeprefix("nfs+tcp://")
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


def bench(server, *arguments, url=None):
    before = server.cpu_seconds()
    run = subprocess.run([*PRIORITY, "taskset", "-c", CLIENT_CORE, BINARY, "bench", "--server", url or server.url, "--json", *arguments],
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
    print(f"## First octet of 8 MiB, depth 1, {ROUNDS} rounds of {SECONDS:g} s")
    print("| door | tail on disk, p50 us | wholly in RAM, p50 us | ratio | disk reads per GET | pp us | dropped |")
    print("|---|---|---|---|---|---|---|")
    for native in (False, True):
        tail_of(native)


def tail_of(native):
    in_ram, on_disk = bulkhead("4GiB", native=native), bulkhead("256MiB", native=native)
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
    print(f"| {'native, CRC off' if native else 'memcache'} | {median([pair[0]['ttfb_p50_us'] for pair in rounds]):.0f} | "
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


def program(name):
    """The newest build of a program of benches/."""
    built = glob.glob(os.path.join(ROOT, "target", "release", "deps", f"{name}-*"))
    built = [path for path in built if os.access(path, os.X_OK) and not path.endswith(".d")]
    if not built:
        sys.exit("want: cargo build --release --benches")
    return max(built, key=os.path.getmtime)


class BareTcp:
    """The other end of bare TCP, on the server's core."""

    def __init__(self):
        self.process = subprocess.Popen([*PRIORITY, "taskset", "-c", SERVER_CORE, program("tcp"), "serve"],
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.port = self.process.stdout.readline().strip()

    def run(self, what, seconds):
        run = subprocess.run([*PRIORITY, "taskset", "-c", CLIENT_CORE, program("tcp"), what, self.port, str(seconds)],
                             capture_output=True, text=True, check=True)
        return float(run.stdout or 0)

    def stop(self):
        self.process.stdin.close()
        self.process.wait()


def native():
    tcp, server = BareTcp(), bulkhead("4GiB", native=True)
    off = server.url
    on = off.removesuffix("?crc=off")
    print(f"## GET over iWARP against one bare TCP stream, both pinned alike, {ROUNDS} rounds of {SECONDS:g} s")
    print("| size | depth | TCP stream MiB/s | CRC off | ratio | CRC on | ratio | 4 connections, CRC off | one of four | messages per GET | pp us | dropped |")
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    for size, depth, keys in (("256KiB", 16, 512), ("1MiB", 8, 256), ("8MiB", 4, 64)):
        common = ["--op", "get", "--size", size, "--keys", str(keys)]
        one, four = ["--connections", "1", "--depth", str(depth)], ["--connections", "4", "--depth", str(depth)]
        bench(server, *common, *one, "--seconds", "300ms")
        time_each = lasting(SECONDS)
        ways = {
            "tcp": lambda: {"bytes_per_second": tcp.run("stream", SECONDS), "ping": tcp.run("ping", 0.1)},
            "off": lambda: bench(server, *common, *one, "--no-load", "--seconds", time_each),
            "on": lambda: bench(server, *common, *one, "--no-load", "--seconds", time_each, url=on),
            "four": lambda: bench(server, *common, *four, "--no-load", "--seconds", time_each),
        }
        rounds = []
        for number in range(ROUNDS):
            names = list(ways)
            order = names[number % 4:] + names[:number % 4]
            before = server.metric("bulkhead_connection_messages_total")
            each = {name: ways[name]() for name in order}
            each["messages"] = server.metric("bulkhead_connection_messages_total") - before
            rounds.append({name: each[name] for name in [*names, "messages"]})
        rounds, dropped = kept(rounds, lambda each: each["tcp"]["bytes_per_second"])
        rate = lambda name: median([each[name]["bytes_per_second"] / MIB for each in rounds])
        ratio = lambda one, other: median([each[one]["bytes_per_second"] / each[other]["bytes_per_second"] for each in rounds])
        operations = lambda each: sum(each[name]["operations"] for name in ("off", "on", "four"))
        messages = median([each["messages"] / operations(each) for each in rounds])
        ping = median([each["tcp"]["ping"] for each in rounds])
        print(f"| {size} | {depth} | {rate('tcp'):.0f} | {rate('off'):.0f} | **{ratio('off', 'tcp'):.2f}** | {rate('on'):.0f} | "
              f"**{ratio('on', 'tcp'):.2f}** | {rate('four'):.0f} | **{ratio('off', 'four'):.2f}** | {messages:.1f} | {ping:.1f} | "
              f"{dropped} |", flush=True)
    server.stop()
    tcp.stop()


def short():
    tcp, server, text = BareTcp(), bulkhead("256MiB", native=True), bulkhead("256MiB")
    print(f"## GET of 100 octets, one at a time, against a blocking TCP ping-pong of 64, {ROUNDS} rounds of {SECONDS / 2:g} s")
    print("| GET p50 us | ping-pong p50 us | ratio | GET p50 us over memcache | dropped |")
    print("|---|---|---|---|---|")
    common = ["--op", "get", "--size", "100", "--keys", "100", "--connections", "1", "--depth", "1"]
    for each in (server, text):
        bench(each, *common, "--seconds", "300ms")
    rounds = []
    for number in range(ROUNDS):
        ways = [lambda: bench(server, *common, "--no-load", "--seconds", lasting(SECONDS / 2))["p50_us"],
                lambda: tcp.run("ping", SECONDS / 2),
                lambda: bench(text, *common, "--no-load", "--seconds", lasting(SECONDS / 2))["p50_us"]]
        order = [(number + step) % 3 for step in range(3)]
        each = {index: ways[index]() for index in order}
        rounds.append((each[0], each[1], each[2]))
    rounds, dropped = kept(rounds, lambda each: each[1])
    print(f"| {median([each[0] for each in rounds]):.1f} | {median([each[1] for each in rounds]):.1f} | "
          f"**{median([each[0] / each[1] for each in rounds]):.2f}** | {median([each[2] for each in rounds]):.1f} | {dropped} |", flush=True)
    text.stop()
    server.stop()
    tcp.stop()


def rpc_program(*arguments):
    run = subprocess.run([*PRIORITY, "taskset", "-c", CLIENT_CORE, program("rpc"), *map(str, arguments)], capture_output=True, text=True, check=True)
    return float(run.stdout or 0)


def taken_in_turn(ways):
    """Every way once in every round, each round beginning with another."""
    names, rounds = list(ways), []
    for number in range(ROUNDS):
        at = number % len(names)
        rounds.append({name: ways[name]() for name in names[at:] + names[:at]})
    return rounds


def rpc():
    server = bulkhead("1GiB", "2GiB", native=True, rpc="rpc+iwarp://127.0.0.1:0?crc=off", settings={"BULKHEAD_RPC__CREDITS": "64"})
    seconds = lasting(SECONDS)
    ping = lambda rounds: median([side["pingpong_64_p50_us"] for each in rounds for side in each.values()])
    print(f"## GET of 1 MiB by RPC against the native door of the same daemon, one connection, CRC off, {ROUNDS} rounds of {SECONDS:g} s")
    print("| depth | RPC MiB/s | native MiB/s | ratio | p50 us | native | pp us | dropped |")
    print("|---|---|---|---|---|---|---|---|")
    for depth in (1, 8):
        common = ["--op", "get", "--size", "1MiB", "--connections", "1", "--depth", str(depth), "--keys", "64"]
        bench(server, *common, "--seconds", "300ms")
        ways = {"rpc": lambda: bench(server, *common, "--no-load", "--seconds", seconds, url=server.rpc),
                "native": lambda: bench(server, *common, "--no-load", "--seconds", seconds)}
        rounds, dropped = kept(taken_in_turn(ways), lambda each: each["native"]["bytes_per_second"])
        rate = lambda way: median([each[way]["bytes_per_second"] / MIB for each in rounds])
        p50 = lambda way: median([each[way]["p50_us"] for each in rounds])
        ratio = median([each["rpc"]["bytes_per_second"] / each["native"]["bytes_per_second"] for each in rounds])
        print(f"| {depth} | {rate('rpc'):.0f} | {rate('native'):.0f} | **{ratio:.2f}** | {p50('rpc'):.0f} | {p50('native'):.0f} | "
              f"{ping(rounds):.1f} | {dropped} |", flush=True)
    print(f"## 64 values of 64 KiB: one call for all against a call each, one call at a time, {ROUNDS} rounds of {SECONDS:g} s")
    print("| one call MiB/s | 64 calls MiB/s | ratio | pp us | dropped |")
    print("|---|---|---|---|---|")
    common = ["--op", "get", "--size", "64KiB", "--connections", "1", "--keys", "64"]
    bench(server, *common, "--seconds", "300ms")
    ways = {"batch": lambda: bench(server, *common, "--batch", "64", "--no-load", "--seconds", seconds, url=server.rpc),
            "single": lambda: bench(server, *common, "--depth", "1", "--no-load", "--seconds", seconds, url=server.rpc)}
    rounds, dropped = kept(taken_in_turn(ways), lambda each: each["single"]["bytes_per_second"])
    rate = lambda way: median([each[way]["bytes_per_second"] / MIB for each in rounds])
    ratio = median([each["batch"]["bytes_per_second"] / each["single"]["bytes_per_second"] for each in rounds])
    print(f"| {rate('batch'):.0f} | {rate('single'):.0f} | **{ratio:.2f}** | {ping(rounds):.1f} | {dropped} |", flush=True)
    tcp = BareTcp()
    print(f"## NULL, and 64 calls for 64 KiB at once, {ROUNDS} rounds of {SECONDS:g} s")
    print("| NULL p50 us | ping-pong p50 us | ratio | 64 credits MiB/s | one credit MiB/s | ratio | dropped |")
    print("|---|---|---|---|---|---|---|")
    rpc_program("load", server.rpc, 64, 65536)
    get = lambda credits: rpc_program("get", server.rpc, SECONDS, 65536, 64, credits) / MIB
    ways = {"null": lambda: rpc_program("null", server.rpc, SECONDS / 2), "ping": lambda: tcp.run("ping", SECONDS / 2),
            "many": lambda: get(64), "one": lambda: get(1)}
    rounds, dropped = kept(taken_in_turn(ways), lambda each: each["ping"])
    middle = lambda figure: median([figure(each) for each in rounds])
    print(f"| {middle(lambda each: each['null']):.1f} | {middle(lambda each: each['ping']):.1f} | "
          f"**{middle(lambda each: each['null'] / each['ping']):.2f}** | {middle(lambda each: each['many']):.0f} | "
          f"{middle(lambda each: each['one']):.0f} | **{middle(lambda each: each['many'] / each['one']):.2f}** | {dropped} |", flush=True)
    tcp.stop()
    server.stop()


def nfs_program(*arguments):
    run = subprocess.run([*PRIORITY, "taskset", "-c", CLIENT_CORE, program("nfs"), *map(str, arguments)], capture_output=True, text=True, check=True)
    return float(run.stdout or 0)


def nfs():
    tcp, server = BareTcp(), bulkhead("2GiB", "4GiB", nfs="127.0.0.1:0")
    print(f"## Files over NFS and values over memcache, one connection each, against one bare TCP stream, {ROUNDS} rounds of {SECONDS:g} s")
    print("| size | in flight | TCP stream MiB/s | READ MiB/s | GET MiB/s | READ / GET | READ / stream | WRITE MiB/s | SET MiB/s | WRITE / SET | pp us | dropped |")
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    for size, count, depth in (("1MiB", 64, 1), ("1MiB", 64, 8), ("16MiB", 16, 8)):
        octets = int(size.removesuffix("MiB")) * MIB
        # A value in flight is one call of NFS, or as many as it has MiB.
        common = ["--size", size, "--keys", str(count), "--connections", "1", "--depth", str(max(1, depth * MIB // octets))]
        nfs_program("load", server.nfs, count, octets)
        bench(server, "--op", "get", *common, "--seconds", "300ms")
        files = lambda what: nfs_program(what, server.nfs, SECONDS, count, octets, depth)
        values = lambda op: bench(server, "--op", op, *common, "--no-load", "--seconds", lasting(SECONDS))["bytes_per_second"]
        ways = {"tcp": lambda: tcp.run("stream", SECONDS), "read": lambda: files("read"), "get": lambda: values("get"),
                "write": lambda: files("write"), "set": lambda: values("set"), "ping": lambda: tcp.run("ping", 0.1)}
        rounds, dropped = kept(taken_in_turn(ways), lambda each: each["tcp"])
        rate = lambda way: median([each[way] / MIB for each in rounds])
        ratio = lambda one, other: median([each[one] / each[other] for each in rounds])
        print(f"| {size} | {depth} | {rate('tcp'):.0f} | {rate('read'):.0f} | {rate('get'):.0f} | **{ratio('read', 'get'):.2f}** | "
              f"**{ratio('read', 'tcp'):.2f}** | {rate('write'):.0f} | {rate('set'):.0f} | **{ratio('write', 'set'):.2f}** | "
              f"{median([each['ping'] for each in rounds]):.1f} | {dropped} |", flush=True)
    print(f"## NULL against the ping-pong, {ROUNDS} rounds of {SECONDS / 2:g} s")
    print("| NULL p50 us | ping-pong p50 us | ratio | dropped |")
    print("|---|---|---|---|")
    ways = {"null": lambda: nfs_program("null", server.nfs, SECONDS / 2), "ping": lambda: tcp.run("ping", SECONDS / 2)}
    rounds, dropped = kept(taken_in_turn(ways), lambda each: each["ping"])
    print(f"| {median([each['null'] for each in rounds]):.1f} | {median([each['ping'] for each in rounds]):.1f} | "
          f"**{median([each['null'] / each['ping'] for each in rounds]):.2f}** | {dropped} |", flush=True)
    server.stop()
    tcp.stop()


def idle():
    print("## Idle with 100 connections for 20 s")
    for door in (False, True):
        server = bulkhead("256MiB", "1GiB", native=door)
        peers = subprocess.Popen([program("idle"), server.url, "100"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert peers.stdout.readline() == "open\n"
        time.sleep(2)
        before, start = server.cpu_seconds(), time.monotonic()
        time.sleep(20)
        share = (server.cpu_seconds() - before) / (time.monotonic() - start)
        print(f"{'native' if door else 'memcache'}: {100 * share:.2f} % of a core", flush=True)
        peers.stdin.close()
        peers.wait()
        server.stop()


# Devices of tests/rdma-vm and their addresses.
RDMA_DEVICES = (("rxe0", "10.99.0.1"), ("siw0", "10.98.0.1"))
PERFTEST_PORT = "18516"


def perftest(program, device, address, *arguments):
    """One run of a program of perftest, both ends on this machine: the words of its line of figures."""
    common = [program, "-R", "-F", "-d", device, "-p", PERFTEST_PORT, *arguments]
    # Who writes has the core of our daemon, which writes too.
    serve = subprocess.Popen([*PRIORITY, "taskset", "-c", CLIENT_CORE, *common], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while PERFTEST_PORT not in subprocess.run(["rdma", "resource", "show", "cm_id"], capture_output=True, text=True).stdout:
        if time.monotonic() > deadline or serve.poll() is not None:
            sys.exit(f"{program} does not listen")
        time.sleep(0.1)
    run = subprocess.run([*PRIORITY, "taskset", "-c", SERVER_CORE, *common, address], capture_output=True, text=True, timeout=120)
    serve.wait(60)
    figures = [line.split() for line in run.stdout.splitlines() if re.match(r" *[0-9]+ +[0-9]+ +[0-9.]+ ", line)]
    if run.returncode or len(figures) != 1:
        sys.exit(f"{program}: {run.stdout} {run.stderr}")
    return figures[0]


def rdma():
    # siw binds the thread that sends for a queue pair to a processor, and a pinned program may share it or not: nobody is
    # pinned, so that the scheduler serves both alike.
    global SERVER_CORE, CLIENT_CORE
    SERVER_CORE, CLIENT_CORE = os.environ.get("SERVER_CORE", "0,1"), os.environ.get("CLIENT_CORE", "0,1")
    windows = os.environ.get("WINDOWS", "4x256KiB 4x1MiB").split()
    print(f"## Native GET of 1 MiB from RAM, one connection, 8 in flight, against ib_write_bw -s 262144, {ROUNDS} rounds of {SECONDS:g} s")
    print("| device | windows | ib_write_bw MiB/s | GET MiB/s | ratio | ib_send_lat -s 64 us | TCP ping-pong of 64 us | dropped |")
    print("|---|---|---|---|---|---|---|---|")
    wanted = os.environ.get("DEVICES", "rxe0 siw0").split()
    for device, address in RDMA_DEVICES:
        if device not in wanted:
            continue
        door = f"native+verbs://{address}:0"
        servers = {}
        for window in windows:
            number, size = window.split("x")
            settings = {"BULKHEAD_NATIVE__WINDOWS": number, "BULKHEAD_NATIVE__WINDOW": size}
            servers[window] = bulkhead("64MiB", "256MiB", native=True, door=door, settings=settings)
        common = ["--op", "get", "--size", "1MiB", "--keys", "16", "--connections", "1", "--depth", "8"]
        get = lambda window, *more: bench(servers[window], *common, "--windows", *window.split("x")[:1], "--window", window.split("x")[1], *more)
        for window in windows:
            get(window, "--seconds", "300ms")
        write = lambda count: float(perftest("ib_write_bw", device, address, "-s", "262144", "-n", str(count))[3])
        # As many Writes as take so many seconds.
        count = max(32, round(write(256) * 4 * SECONDS))
        ways = {"raw": lambda: write(count), "ping": lambda: float(perftest("ib_send_lat", device, address, "-s", "64", "-n", "200")[4])}
        for window in windows:
            ways[window] = lambda window=window: get(window, "--no-load", "--seconds", lasting(SECONDS))
        rounds = []
        for number in range(ROUNDS):
            names = list(ways)
            order = names[number % len(names):] + names[:number % len(names)]
            rounds.append({name: ways[name]() for name in order})
            shown = {name: each["bytes_per_second"] / MIB if name in windows else each for name, each in rounds[-1].items()}
            print(f"{device}: {', '.join(f'{name} {each:.1f}' for name, each in shown.items())}", file=sys.stderr, flush=True)
        rounds, dropped = kept(rounds, lambda each: each["raw"])
        middle = lambda figure: median([figure(each) for each in rounds])
        for window in windows:
            rate = lambda each: each[window]["bytes_per_second"] / MIB
            print(f"| {device} | {window} | {middle(lambda each: each['raw']):.0f} | {middle(rate):.0f} | "
                  f"**{middle(lambda each: rate(each) / each['raw']):.2f}** | {middle(lambda each: each['ping']):.0f} | "
                  f" {middle(lambda each: each[window]['pingpong_64_p50_us']):.0f} | {dropped} |", flush=True)
        for server in servers.values():
            server.stop()


# Name, address, door of ours, how Linux mounts.
NFS_WAYS = (("rxe", "10.99.0.1", "rpc+verbs", "rdma"), ("siw", "10.98.0.1", "rpc+verbs", "rdma"),
            ("iwarp", "10.98.0.1", "rpc+iwarp", "rdma"), ("tcp", "10.98.0.1", "nfs+tcp", "tcp"))
NFS_BYTES = 16 * MIB


def mounted(source, options):
    path = tempfile.mkdtemp(prefix="mount-", dir="/mnt")
    subprocess.run(["mount", "-t", "nfs", "-o", f"vers=3,nolock,{options}", source, path], check=True)
    return path


def read_past_the_cache(path, seconds, buffer):
    """MiB/s of reads of the whole file, each one call that Linux makes into as many READs as it takes."""
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    count, begun = 0, time.perf_counter()
    while (taken := time.perf_counter() - begun) < seconds or not count:
        if os.preadv(file, [buffer], 0) != NFS_BYTES:
            sys.exit(f"{path} is too short")
        count += 1
    os.close(file)
    return count * NFS_BYTES / MIB / taken


def read_as_cp(path, buffer):
    """MiB/s of one read from the first octet to the last, in pieces, none of which is in the cache."""
    file = os.open(path, os.O_RDONLY)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    piece, begun = memoryview(buffer)[:MIB], time.perf_counter()
    while os.readv(file, [piece]):
        pass
    taken = time.perf_counter() - begun
    os.close(file)
    return NFS_BYTES / MIB / taken


def knfsd():
    global SERVER_CORE, CLIENT_CORE
    SERVER_CORE, CLIENT_CORE = os.environ.get("SERVER_CORE", "0,1"), os.environ.get("CLIENT_CORE", "0,1")
    subprocess.run(["modprobe", "-a", "nfs", "nfsv3", "rpcrdma"], check=True)
    print(f"## NFS READ of 16 MiB against the kernel's server on tmpfs, {ROUNDS} rounds of {SECONDS:g} s")
    print("| over | knfsd MiB/s | Bulkhead MiB/s | ratio | knfsd, as cp | Bulkhead | ratio | TCP ping-pong of 64 us | dropped |")
    print("|---|---|---|---|---|---|---|---|---|")
    wanted = os.environ.get("WAYS", "rxe siw iwarp tcp").split()
    buffer = mmap.mmap(-1, NFS_BYTES)
    content = random.randbytes(NFS_BYTES)
    for name, address, door, carrier in NFS_WAYS:
        if name not in wanted:
            continue
        ours = bulkhead("256MiB", "512MiB", rpc=None if carrier == "tcp" else f"{door}://{address}:0", nfs=f"{address}:0")
        mount_port = ours.nfs.rsplit(":", 1)[1]
        port = mount_port if carrier == "tcp" else int(re.search(r":(\d+)", ours.rpc.split("://")[1])[1])
        paths = {"ours": mounted(f"{address}:/", f"proto={carrier},port={port},mountport={mount_port},mountproto=tcp"),
                 "theirs": mounted(f"{address}:/srv/nfs", "proto=rdma,port=20049" if carrier == "rdma" else "proto=tcp")}
        files = {}
        for side, path in paths.items():
            files[side] = f"{path}/sixteen-{os.getpid()}"
            with open(files[side], "wb") as file:
                file.write(content)
            read_past_the_cache(files[side], 0.3, buffer)
            if buffer[:] != content:
                sys.exit(f"{files[side]} is not what was written")
        rounds = []
        for number in range(ROUNDS):
            order = ("ours", "theirs") if number % 2 else ("theirs", "ours")
            each = {side: (read_past_the_cache(files[side], SECONDS, buffer),
                           median([read_as_cp(files[side], buffer) for _ in range(5)])) for side in order}
            each["pp"] = bench(ours, "--op", "get", "--size", "64B", "--keys", "1", "--seconds", "50ms")["pingpong_64_p50_us"]
            rounds.append(each)
            print(f"{name}: {each}", file=sys.stderr, flush=True)
        rounds, dropped = kept(rounds, lambda each: each["theirs"][0])
        middle = lambda figure: median([figure(each) for each in rounds])
        shown = [f"{middle(lambda each: each['theirs'][way]):.0f} | {middle(lambda each: each['ours'][way]):.0f} | "
                 f"**{middle(lambda each: each['ours'][way] / each['theirs'][way]):.2f}**" for way in (0, 1)]
        print(f"| {name} | {shown[0]} | {shown[1]} | {middle(lambda each: each['pp']):.0f} | {dropped} |", flush=True)
        os.remove(files["theirs"])
        for path in paths.values():
            subprocess.run(["umount", path], check=True)
            os.rmdir(path)
        ours.stop()


def main():
    known = {"hot": hot, "tail": tail, "cold": cold, "native": native, "short": short, "rpc": rpc, "nfs": nfs, "idle": idle}
    wanted = sys.argv[1:] or list(known)
    # Needs devices that few machines have.
    known |= {"rdma": rdma, "knfsd": knfsd}
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
