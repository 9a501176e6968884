"""One Python client of memcached against a daemon that is there: clients.py NAME HOST:PORT

Exit status 0 if the client got back what it put in, through every command it has.
"""

import asyncio
import os
import sys

LENS = [0, 100, 1 << 20, 8 << 20]


def same(found, wanted, what):
    if found != wanted:
        show = lambda value: repr(value if not isinstance(value, (bytes, str)) or len(value) < 100 else value[:100])
        raise SystemExit(f"{what}: found {show(found)}, wanted {show(wanted)}")


def values():
    return [(f"value-{length}", os.urandom(length)) for length in LENS]


def pymemcache(host, port):
    from pymemcache.client.base import Client
    from pymemcache.exceptions import MemcacheClientError, MemcacheServerError, MemcacheUnknownCommandError

    for noreply in (False, True):
        client = Client((host, port), default_noreply=noreply, timeout=20, no_delay=True)
        client.flush_all()
        for key, value in values():
            same(client.get(key), None, f"{key} before set")
            same(client.set(key, value, flags=7), True, f"set {key}")
            same(client.get(key), value, f"get {key}")
            same(client.add(key, b"other"), noreply, f"add {key}")
            found, version = client.gets(key)
            same(found, value, f"gets {key}")
            same(client.cas(key, value + b"!", version, noreply=False), True, f"cas {key}")
            same(client.cas(key, b"late", version, noreply=False), False, f"cas {key} with an old version")
            client.append(key, b"end")
            client.prepend(key, b"start")
            same(client.get(key), b"start" + value + b"!end", f"get {key} with both ends")
            client.replace(key, value)
            same(client.touch(key, 1000), True, f"touch {key}")
        same({key: len(value) for key, value in client.get_many([key for key, _ in values()] + ["nothing"]).items()},
             {key: len(value) for key, value in values()}, "get_many")
        client.set_many({f"many-{index}": str(index).encode() for index in range(500)})
        same(client.get_many([f"many-{index}" for index in range(500)]),
             {f"many-{index}": str(index).encode() for index in range(500)}, "500 keys")
        client.set("counter", b"40", noreply=False)
        same(client.incr("counter", 2, noreply=False), 42, "incr")
        same(client.decr("counter", 50, noreply=False), 0, "decr")
        same(client.incr("nothing", 1, noreply=False), None, "incr of nothing")
        same(client.delete("counter"), True, "delete")
        same(client.get("counter"), None, "get after delete")
        client.set("soon", b"x", expire=-1, noreply=False)
        same(client.get("soon"), None, "get of what is expired")
        same(client.stats()[b"curr_items"] >= 500 + len(LENS), True, "stats")
        same(client.stats("settings")[b"cas_enabled"], b"yes", "stats settings")
        same(client.version()[:4], b"1.6.", "version")
        client.set("text", b"x", noreply=False)
        try:
            client.incr("text", 1, noreply=False)
            same("no error", "an error", "incr of text")
        except MemcacheClientError:
            pass
        same(client.get("text"), b"x", "get after an error")
        client.flush_all(noreply=False)
        same(client.get_many([key for key, _ in values()]), {}, "get after flush_all")
        client.quit()


def python_memcached(host, port):
    import memcache

    client = memcache.Client([f"{host}:{port}"], server_max_value_length=64 << 20, socket_timeout=20, cache_cas=True)
    same(client.flush_all(), None, "flush_all")
    for key, value in values():
        same(client.get(key), None, f"{key} before set")
        same(bool(client.set(key, value)), True, f"set {key}")
        same(client.get(key), value, f"get {key}")
        same(bool(client.add(key, b"other")), False, f"add {key}")
        same(client.gets(key), value, f"gets {key}")
        same(bool(client.cas(key, value + b"!")), True, f"cas {key}")
        same(client.get(key), value + b"!", f"get {key} after cas")
        same(bool(client.append(key, b"end")), True, f"append {key}")
        same(bool(client.prepend(key, b"start")), True, f"prepend {key}")
        same(client.get(key), b"start" + value + b"!end", f"get {key} with both ends")
        same(bool(client.touch(key, 1000)), True, f"touch {key}")
    same(bool(client.replace("nothing", b"x")), False, "replace of nothing")
    same(client.set_multi({f"many-{index}": index for index in range(500)}), [], "set_multi")
    same(client.get_multi([f"many-{index}" for index in range(500)]), {f"many-{index}": index for index in range(500)},
         "get_multi, with flags that tell the type")
    client.set("counter", 40)
    same(client.incr("counter", 2), 42, "incr")
    same(client.decr("counter", 50), 0, "decr")
    same(client.delete("counter"), 1, "delete")
    same(client.get("counter"), None, "get after delete")
    same(len(client.get_stats()), 1, "get_stats")
    client.flush_all()
    same(client.get("many-1"), None, "get after flush_all")
    client.disconnect_all()


def pylibmc(host, port):
    import pylibmc

    # Not its `_noreply`: with it libmemcached spins for ever in flush_all, with memcached as well.
    for behaviors in ({}, {"cas": True, "tcp_nodelay": True}):
        client = pylibmc.Client([f"{host}:{port}"], binary=False, behaviors=behaviors)
        client.flush_all()
        for key, value in values():
            same(client.get(key), None, f"{key} before set")
            same(client.set(key, value), True, f"set {key}")
            same(client.get(key), value, f"get {key}")
            same(client.add(key, b"other"), False, f"add {key}")
            same(client.append(key, b"end"), True, f"append {key}")
            same(client.prepend(key, b"start"), True, f"prepend {key}")
            same(client.get(key), b"start" + value + b"end", f"get {key} with both ends")
            same(client.touch(key, 1000), True, f"touch {key}")
            if "cas" in behaviors:
                found, version = client.gets(key)
                same(client.cas(key, b"new", version), True, f"cas {key}")
                same(client.cas(key, b"late", version), False, f"cas {key} with an old version")
        many = {f"many-{index}": index for index in range(500)}
        same(client.set_multi(many), [], "set_multi")
        same(client.get_multi(list(many)), many, "get_multi")
        client.set("counter", 40)
        same(client.incr("counter", 2), 42, "incr")
        same(client.decr("counter", 50), 0, "decr")
        same(client.delete("counter"), True, "delete")
        same(client.get("counter"), None, "get after delete")
        same(int(client.get_stats()[0][1]["curr_items"]) >= 500 + len(LENS), True, "stats")
        client.flush_all()
        same(client.get_multi(list(many)), {}, "get after flush_all")
        client.disconnect_all()


async def aiomcache(host, port):
    import aiomcache

    client = aiomcache.Client(host, port, pool_size=4)
    same(await client.flush_all(), None, "flush_all")
    for name, value in values():
        key = name.encode()
        same(await client.get(key), None, f"{name} before set")
        same(await client.set(key, value), True, f"set {name}")
        same(await client.get(key), value, f"get {name}")
        same(await client.add(key, b"other"), False, f"add {name}")
        found, version = await client.gets(key)
        same(found, value, f"gets {name}")
        same(await client.cas(key, value + b"!", version), True, f"cas {name}")
        same(await client.cas(key, b"late", version), False, f"cas {name} with an old version")
        same(await client.append(key, b"end"), True, f"append {name}")
        same(await client.prepend(key, b"start"), True, f"prepend {name}")
        same(await client.get(key), b"start" + value + b"!end", f"get {name} with both ends")
        same(await client.touch(key, 1000), True, f"touch {name}")
    await asyncio.gather(*(client.set(b"many-%d" % index, b"%d" % index) for index in range(200)))
    same(await client.multi_get(*(b"many-%d" % index for index in range(200))),
         tuple(b"%d" % index for index in range(200)), "200 keys set at once")
    await client.set(b"counter", b"40")
    same(await client.incr(b"counter", 2), 42, "incr")
    same(await client.decr(b"counter", 50), 0, "decr")
    same(await client.delete(b"counter"), True, "delete")
    same(await client.delete(b"counter"), False, "delete of nothing")
    same(int((await client.stats())[b"curr_items"]) >= 200 + len(LENS), True, "stats")
    same((await client.version())[:4], b"1.6.", "version")
    await client.flush_all()
    same(await client.get(b"many-1"), None, "get after flush_all")
    await client.close()


def main():
    name, address = sys.argv[1:]
    host, port = address.rsplit(":", 1)
    run = {"pymemcache": pymemcache, "python-memcached": python_memcached, "pylibmc": pylibmc, "aiomcache": aiomcache}[name]
    done = run(host, int(port))
    if asyncio.iscoroutine(done):
        asyncio.run(done)


main()
