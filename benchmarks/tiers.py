"""The cost of getting embeddings from a tier, compared to the necessary minimum; and what policies save.

    PYTHONPATH=. python benchmarks/tiers.py [--entries 24] [--rounds 10] [--folder DIR] [--accesses 60000]

Disk: an entry (27b: 2.75 MB), compared to a plain read of its file, from the disk itself (its pages dropped before) and
from the page cache; from there also into memory that is not in the CPU's cache, as when the content is kept.
Redis: `get` of an entry, compared to the same server's reply read from a raw socket, neither parsed nor checked, and to
as many bytes from a process that only sends them.  Needs `redis-server`.  All take turns, entry by entry.  Then the
share of seconds that each policy saves on each trace, with memory for 5 % of all entries, next to policies that know
the future.
"""

import argparse
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks.cache_traces import NUM_BYTES, TRACES
from benchmarks.in_turn import time_in_turn
from keepsight.tiers.disk_tier import DiskTier
from keepsight.tiers.entry_format import HEADER_BYTES
from keepsight.tiers.host_tier import HostTier
from keepsight.tiers.policies import POLICIES
from keepsight.tiers.redis_tier import RedisTier, _name
from keepsight.tiers.simulate import distinct_bytes, offline_bound, simulate, simulate_belady
from keepsight.tiers.tier import StoredArray, Tier
from keepsight.tiers.tiered_store import TieredStore
from tests.tiers.arrays import key_of
from tests.tiers.redis_servers import REAL, real_server

# More entries than the CPU's cache can hold.
NUM_KEPT = 32


def embeddings(number: int) -> StoredArray:
    payload = np.random.default_rng(number).integers(0, 256, NUM_BYTES, np.uint8).data
    return StoredArray("bfloat16", (256, NUM_BYTES // 512), payload, 0.011)


def report(title: str, found: dict[str, list[float]], base: str) -> None:
    medians = {name: statistics.median(taken) * 1000 for name, taken in found.items()}
    for name, milliseconds in medians.items():
        print(f"{title:<22}{name:<22}{milliseconds:8.3f} ms {milliseconds / medians[base]:6.2f}x")


def measure_disk(folder: Path, entries: int, rounds: int) -> None:
    tier = DiskTier(folder, 2 * entries * NUM_BYTES)
    for number in range(entries):
        tier.put(key_of(number), embeddings(number))
    paths = [folder / "entries" / key_of(number) for number in range(entries)]
    os.sync()
    cached = ("page cache", lambda _: None, 0), ("page cache, kept", lambda _: None, NUM_KEPT)
    for title, prepare, num_kept in (("disk", drop_pages, 0), *cached):
        found: dict[str, list[float]] = {"plain read": [], "tier": []}
        kept: deque[object] = deque(maxlen=num_kept)
        for turn in range(rounds * entries):
            # So that neither reads what the other has just brought into the CPU's cache.
            plain, tiered = turn % entries, (turn + entries // 2) % entries
            ways: list[tuple[str, Path, Callable[[], object]]] = [
                ("plain read", paths[plain], paths[plain].read_bytes),
                ("tier", paths[tiered], lambda: tier.get(key_of(tiered))),  # noqa: B023
            ]
            for name, path, read in ways if turn % 2 else reversed(ways):
                prepare(path)
                began = time.perf_counter()
                content = read()
                found[name].append(time.perf_counter() - began)
                kept.append(content)
                del content
        report(title, found, "plain read")
    tier.close()


def drop_pages(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def measure_redis(entries: int, rounds: int) -> None:
    if REAL is None:
        print("redis: NOT MEASURED, redis-server is not installed")
        return
    with real_server("--port", str(port := free_port())) as (url, _):
        measure_get("unix", url, entries, rounds)
        measure_get("tcp", f"redis://127.0.0.1:{port}", entries, rounds)


def measure_get(kind: str, url: str, entries: int, rounds: int) -> None:
    tier = RedisTier(url)
    for number in range(entries):
        tier.put(key_of(number), embeddings(number))
    with raw_sender(kind) as receive, tier._reader.held() as connection:
        raw = connection._socket

        def raw_get(number: int) -> None:
            """Read the server's reply, neither parsed nor checked."""
            name = _name(key_of(number))
            raw.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name))
            fill(raw, HEADER_BYTES + NUM_BYTES + len(b"$%d\r\n\r\n" % (HEADER_BYTES + NUM_BYTES)))

        other = RedisTier(url)
        ways: dict[str, Callable[[int], object]] = {
            "raw GET": raw_get,
            "tier": lambda number: other.get(key_of(number)),
            "no Redis at all": lambda _: receive(),
        }
        found = time_in_turn(ways, [*range(entries)] * rounds)
        other.close()
    report(f"redis, {kind}", found, "raw GET")
    tier.close()


def fill(connection: socket.socket, num_bytes: int) -> None:
    target = np.empty(num_bytes, np.uint8).data
    num_read = 0
    while num_read < num_bytes:
        num_read += connection.recv_into(target[num_read:])


@contextmanager
def raw_sender(kind: str) -> Iterator[Callable[[], None]]:
    """Another process that sends the same number of bytes for each byte that it receives."""
    listener = socket.create_server(("127.0.0.1", 0)) if kind == "tcp" else socket.socket(socket.AF_UNIX)
    with tempfile.TemporaryDirectory() as folder:
        if kind == "unix":
            listener.bind(f"{folder}/raw")
            listener.listen()
        process = multiprocessing.get_context("fork").Process(target=send_all, args=(listener,))
        process.start()
        with socket.socket(listener.family) as connection:
            connection.connect(listener.getsockname())

            def receive() -> None:
                connection.sendall(b"?")
                fill(connection, NUM_BYTES)

            yield receive
        process.join()
        listener.close()


def send_all(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    content = bytes(NUM_BYTES)
    while connection.recv(1):
        connection.sendall(content)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def measure_callers(folder: Path, entries: int) -> None:
    """Measure how long storing and loading block the caller while the tiers are busy."""
    tiers: list[Tier] = [DiskTier(folder, entries * NUM_BYTES // 2)]
    store = TieredStore(HostTier(entries * NUM_BYTES // 4), tiers)
    arrays = [embeddings(number) for number in range(entries)]
    taken = []
    for turn in range(20):
        for number, array in enumerate(arrays):
            began = time.perf_counter()
            store.load(key_of(number), 0.011, lambda *_: None)
            if turn % 4 == 0:
                store.store(key_of(number), array)
            taken.append(time.perf_counter() - began)
            time.sleep(0.001)
    store.close()
    taken.sort()
    p50, p99, longest = (taken[int(share * (len(taken) - 1))] * 1e6 for share in (0.5, 0.99, 1.0))
    print(f"a caller is held: median {p50:.0f} us, p99 {p99:.0f} us, longest {longest:.0f} us of {len(taken)} calls")


def measure_policies(num_accesses: int) -> None:
    names = [*POLICIES, "belady", "bound"]
    print(f"\n{'saved at 5 %':<14}" + "".join(f"{name:>10}" for name in names))
    for trace_name, draw in TRACES.items():
        trace = draw(num_accesses)
        budget = distinct_bytes(trace) // 20
        shares = [simulate(trace, name, budget) for name in POLICIES]
        shares += [simulate_belady(trace, budget), offline_bound(trace, budget)]
        print(f"{trace_name:<14}" + "".join(f"{share:>10.3f}" for share in shares))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: the temporary one)")
    parser.add_argument("--accesses", type=int, default=60_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        measure_disk(Path(folder) / "reads", arguments.entries, arguments.rounds)
        measure_callers(Path(folder) / "callers", arguments.entries)
    measure_redis(arguments.entries, arguments.rounds)
    measure_policies(arguments.accesses)


if __name__ == "__main__":
    main()
