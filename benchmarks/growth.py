"""The cost of a request apart from the model, with more clients, more cached entries and more pictures in it.

    PYTHONPATH=. python benchmarks/growth.py [--rounds 3] [--parts clients ...] [--json FILE] [--plot FILE]

Clients and pictures: a real `keepsight serve` on the demo checkpoint, with HTTP clients on the same machine.  Processor
time is counted by the kernel for each process, so that of the clients is excluded, though they lower the requests per
second.  The engine's time includes the model; its decisions are also measured by themselves, without a model
(`decisions.py`).  Cached entries: names without content, up to a million.  Points take turns, medians are printed.

The last column is the slope between the first and the last point on log-log axes: 0 is a constant cost, 1 a cost that
grows linearly; above 1 would be worse than linear.
"""

import argparse
import asyncio
import gc
import json
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.decisions import answer, make_request, make_scheduler, media_hash
from benchmarks.draw_growth import Panel, lay_out
from benchmarks.known_picture import PROGRAMS
from benchmarks.processes import processor_seconds
from keepsight.bench.address import Address
from keepsight.bench.ask import Server
from keepsight.bench.drawing import save
from keepsight.bench.measure import ONE_CLIENT, ClientLoad, measure
from keepsight.bench.report import to_markdown
from keepsight.bench.summary import summarize
from keepsight.bench.workloads import Workload, WorkloadOptions, draw_workload
from keepsight.frontend.pixels.pixel_cache import LocalCache
from keepsight.ipc.shared_store import SharedStore
from keepsight.observe.process_memory import with_descendants
from keepsight.pixels import held_bytes
from keepsight.requests import EngineRequest
from keepsight.scheduling.scheduler import Scheduler
from keepsight.tiers.host_tier import HostTier
from keepsight.tiers.policies import POLICIES
from keepsight.tiers.tier import StoredArray
from tests.real_server import real_server

CLIENTS, PICTURES = (1, 16, 64, 256), (1, 2, 4, 8, 16, 32)
ENTRIES = (1_000, 10_000, 100_000, 1_000_000)
# The limit where each entry is a file, which takes at least a page of memory.
MOST_FILES = 100_000
NUM_REQUESTS, NUM_TOKENS, PICTURE_SIZE = 64, 8, (448, 448)
PER_FILLING_REQUEST, BLOCK = 250, 16
RATE = "requests/s"
# Repeats an operation and returns its milliseconds of processor time.
Cost = Callable[[], float]
# A workload, and the number of clients that send it.
DrawnWorkload = tuple[Workload, int]


@dataclass(slots=True)
class Growth:
    """Costs by name and by the number of clients, pictures or entries; each is a list of measurements."""

    title: str
    unit: str
    # The counts are strings, as in the JSON file.
    found: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def note(self, name: str, number: int, value: float) -> None:
        self.found.setdefault(name, {}).setdefault(str(number), []).append(value)

    def medians(self) -> dict[str, dict[int, float]]:
        return {
            name: {int(number): statistics.median(values) for number, values in by_number.items()}
            for name, by_number in self.found.items()
        }

    def table(self) -> list[list[str]]:
        numbers = sorted({number for by_number in self.medians().values() for number in by_number})
        rows = [[f"{self.title}: {self.unit}", *(f"{number:,}" for number in numbers), "slope"]]
        for name, by_number in self.medians().items():
            cells = [f"{by_number[number]:.3g}" if number in by_number else "" for number in numbers]
            rows.append([name, *cells, f"{slope(by_number):.2f}"])
        return rows

    def panel(self) -> Panel:
        return Panel(
            f"{self.title}: {self.unit}", {n: by_number for n, by_number in self.medians().items() if n != RATE}
        )


PARTS = {
    "clients": ("clients", "ms of processor a request"),
    "pictures": ("pictures in a request", "ms of processor a request"),
    "entries": ("entries of each cache", "ms of processor a request"),
    "indexes": ("entries", "ms of processor to use one or to put one in"),
}


def slope(points: dict[int, float]) -> float:
    (low, first), *_, (high, last) = sorted(points.items())
    return math.log(last / first) / math.log(high / low)


def ms_each(work: Callable[[], object], count: int) -> float:
    gc.collect()
    began = time.process_time()
    work()
    return (time.process_time() - began) * 1e3 / count


# A real server -----------------------------------------------------------------------------------------------


def processor_ms(server: int) -> dict[str, float]:
    """Return the processor time of each kind of process, to a hundredth of a second, ended threads included."""
    total = dict.fromkeys(PROGRAMS.values(), 0.0)
    for pid in with_descendants(server):
        program = Path(f"/proc/{pid}/cmdline").read_text()
        for name, kind in PROGRAMS.items():
            if f".{name}\0" in program:
                total[kind] += processor_seconds(pid) * 1e3
    return total


async def ask_server(growth: Growth, number: int, server: Server, pid: int, drawn: DrawnWorkload) -> None:
    workload, num_clients = drawn
    await measure(server, Workload(workload.before, ()), ONE_CLIENT, lambda _: None)
    before = processor_ms(pid)
    summary = summarize(await measure(server, Workload((), workload.timed), ClientLoad(num_clients), lambda _: None))
    after = processor_ms(pid)
    assert summary.first_error is None, summary.first_error
    growth.note(RATE, number, summary.requests_per_second)
    for kind, name in {"frontend": "frontend", "engine": "engine, the model included"}.items():
        growth.note(name, number, (after[kind] - before[kind]) / summary.num_requests)


def grow_on_server(
    growth: Growth, numbers: Sequence[int], draw: Callable[[int, int], DrawnWorkload], rounds: int
) -> None:
    sampling = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    with real_server("--device=auto", "--log-requests") as process:
        server = Server(Address.parse(f"{process.url}/v1"), "keepsight-demo", None, sampling)
        for turn in range(rounds):
            for number in numbers:
                asyncio.run(ask_server(growth, number, server, process.pid, draw(number, 1000 * number + turn)))


def ask_by_clients(num_clients: int, seed: int) -> DrawnWorkload:
    options = WorkloadOptions(seed, num_requests=max(NUM_REQUESTS, 2 * num_clients), picture_size=PICTURE_SIZE)
    return draw_workload("same-picture-new-prompt", options), num_clients


def ask_by_pictures(num_pictures: int, seed: int) -> DrawnWorkload:
    options = WorkloadOptions(
        seed, num_requests=NUM_REQUESTS, picture_size=PICTURE_SIZE, pictures_per_request=num_pictures
    )
    return draw_workload("many-pictures", options), 1


# The engine's decisions ---------------------------------------------------------------------------------------


def decide(scheduler: Scheduler, batches: Iterable[Sequence[EngineRequest]], count: int) -> float:
    """Return the milliseconds per request."""
    return ms_each(lambda: [answer(scheduler, batch) for batch in batches], count)


def grow_decisions_by_clients(growth: Growth, rounds: int) -> None:
    for turn in range(rounds):
        for clients in CLIENTS:
            scheduler = make_scheduler(4096, 2**16, clients, 2048)
            num_batches = max(4, 256 // clients)
            batches = [
                [make_request(f"{turn} {batch} {i}", 64, [media_hash(i)], NUM_TOKENS) for i in range(clients)]
                for batch in range(num_batches + 1)
            ]
            answer(scheduler, batches.pop())
            growth.note("the engine's decisions", clients, decide(scheduler, batches, num_batches * clients))


def grow_decisions_by_pictures(growth: Growth, rounds: int) -> None:
    for turn in range(rounds):
        for pictures in PICTURES:
            scheduler = make_scheduler(4096, 2**16, 4, 2048)
            names = [media_hash(each) for each in range(pictures)]
            requests = [make_request(f"{turn} {i}", (pictures + 2) * 16, names, NUM_TOKENS) for i in range(201)]
            answer(scheduler, [requests.pop()])
            growth.note("the engine's decisions", pictures, decide(scheduler, [[each] for each in requests], 200))


def full_scheduler(num_entries: int) -> Scheduler:
    """Return a scheduler whose encoder cache and prefix cache are full with so many pictures and blocks."""
    scheduler = make_scheduler(num_entries, num_entries, 4, 2 * PER_FILLING_REQUEST * BLOCK)
    for number in range(num_entries // PER_FILLING_REQUEST):
        names = [media_hash(f"{number} {each}") for each in range(PER_FILLING_REQUEST)]
        answer(scheduler, [make_request(f"fill {number}", PER_FILLING_REQUEST * BLOCK, names, 1)])
    assert scheduler.media.encoder_cache.num_entries == num_entries
    return scheduler


def grow_decisions_by_entries(growth: Growth, entries: Sequence[int], rounds: int) -> None:
    for number in entries:
        scheduler, last = full_scheduler(number), number // PER_FILLING_REQUEST - 1
        for turn in range(rounds):
            known = [media_hash(f"{last} {each}") for each in range(200)]
            for name, pictures in {"known": known, "new": [media_hash(f"new {turn} {i}") for i in range(200)]}.items():
                requests = [
                    [make_request(f"{name} {turn} {i}", 256, [each], NUM_TOKENS)] for i, each in enumerate(pictures)
                ]
                growth.note(f"engine: a {name} picture, a new prompt", number, decide(scheduler, requests, 200))


# Indexes of caches --------------------------------------------------------------------------------------------


def alternate(names: Sequence[str], num_held: int, put: Callable[[str], object], get: Callable[[str], object]) -> Cost:
    """Use one of the held names for each new one that is put in, which evicts another."""
    new, held = names[num_held:], names[num_held // 2 : num_held]

    def work() -> float:
        chosen = held[:: max(1, len(held) // len(new))]

        def turns() -> None:
            for used, added in zip(chosen, new, strict=False):
                get(used)
                put(added)

        return ms_each(turns, 2 * min(len(chosen), len(new)))

    return work


def grow_indexes(growth: Growth, entries: Sequence[int], rounds: int) -> None:
    for number in entries:
        for turn in range(rounds):
            num_new = min(5_000, number // 2)
            names = [media_hash(f"{turn} {each}") for each in range(number + num_new)]
            growth.note("processor cache of one process", number, local_cache(names, number)())
            if number <= MOST_FILES:
                growth.note("processor cache of all processes", number, shared_store(names, number))
            for policy in POLICIES:
                growth.note(f"host memory, policy {policy}", number, host_tier(names, number, policy)())


def local_cache(names: Sequence[str], num_held: int) -> Cost:
    pixel = np.zeros((1, 1, 3), np.uint8)
    cache = LocalCache(num_held * held_bytes(pixel))
    for name in names[:num_held]:
        cache.put(name, pixel)
    return alternate(names, num_held, lambda name: cache.put(name, pixel), cache.get_and_update)


def shared_store(names: Sequence[str], num_held: int) -> float:
    pixel = np.zeros((1, 1, 3), np.uint8)
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        store = SharedStore(folder, num_held * 4096)
        for name in names[:num_held]:
            store.put(name, pixel)
        return alternate(names, num_held, lambda name: store.put(name, pixel), store.touch)()
    finally:
        shutil.rmtree(folder)


def host_tier(names: Sequence[str], num_held: int, policy: str) -> Cost:
    array = StoredArray("uint8", (8,), memoryview(bytes(8)), 0.01)
    tier = HostTier(num_held * array.num_bytes, policy)
    for name in names[:num_held]:
        tier.put(name, array)
    return alternate(names, num_held, lambda name: tier.put(name, array), tier.get)


# The report ---------------------------------------------------------------------------------------------------


def measure_part(part: str, growth: Growth, entries: Sequence[int], rounds: int) -> None:
    if part == "clients":
        grow_on_server(growth, CLIENTS, ask_by_clients, rounds)
        grow_decisions_by_clients(growth, rounds)
    elif part == "pictures":
        grow_on_server(growth, PICTURES, ask_by_pictures, rounds)
        grow_decisions_by_pictures(growth, rounds)
    elif part == "entries":
        grow_decisions_by_entries(growth, entries, rounds)
    else:
        grow_indexes(growth, entries, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--most", type=int, default=ENTRIES[-1], help="cached entries (default: %(default)d)")
    parser.add_argument("--json", type=Path, help="what was found, kept beside what other runs found of other parts")
    parser.add_argument("--plot", type=Path, help="draw it; .svg or .png")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS), help="to be measured (default: all)")
    arguments = parser.parse_args()
    entries = [number for number in ENTRIES if number <= arguments.most]
    growths: dict[str, Growth] = {}
    if arguments.json is not None and arguments.json.exists():
        growths = {part: Growth(**fields) for part, fields in json.loads(arguments.json.read_text()).items()}
    for part in arguments.parts:
        growths[part] = Growth(*PARTS[part])
        measure_part(part, growths[part], entries, arguments.rounds)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps({name: asdict(each) for name, each in growths.items()}) + "\n")
    ordered = [growths[part] for part in PARTS if part in growths]
    for growth in ordered:
        print("\n" + to_markdown(growth.table()))
    if arguments.plot is not None:
        save(lay_out([growth.panel() for growth in ordered]), arguments.plot)


if __name__ == "__main__":
    main()
