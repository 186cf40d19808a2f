"""The current sum of the counters of all processes of a server, read from their pages without asking the processes.

The counters of a process that is gone still count; its gauges do not.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from struct import iter_unpack

from keepsight.observe.catalogue import (
    ALL,
    COMMON_GAUGES,
    GAUGES,
    METRICS,
    NUM_SLOTS,
    PREFIX,
    SLOTS,
    Kind,
    Labels,
    Slots,
    slot_of,
)
from keepsight.observe.counters import FOLDER, PAGE_BYTES, PID
from keepsight.observe.process_memory import resident_bytes, with_descendants

# The names that vLLM has for some metrics.
ALIASES = (
    ("keepsight_prefix_cache_queries_total", "Tokens looked up in the prefix cache.", PREFIX.queries[ALL]),
    ("keepsight_prefix_cache_hits_total", "Tokens found in the prefix cache.", PREFIX.hits[ALL]),
)
_BLOCKS, _BLOCKS_IN_USE = slot_of("kv_cache_blocks"), slot_of("kv_cache_blocks_in_use")


@dataclass(frozen=True, slots=True)
class Family:
    """One metric with the values of all its series; a histogram's series has several slots."""

    name: str
    kind: Kind
    meaning: str
    series: Mapping[Labels, Sequence[float]]


@dataclass(slots=True)
class Totals:
    numbers: list[float] = field(default_factory=lambda: [0.0] * NUM_SLOTS)
    # Resident memory by kind of process.
    memory: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of_pages(cls, pages: Iterable[tuple[str, Sequence[float]]]) -> "Totals":
        """Sum pages, each given with the kind of its process."""
        numbers, pids = [0.0] * NUM_SLOTS, defaultdict[str, set[int]](set)
        for kind, page in pages:
            is_alive = Path(f"/proc/{int(page[PID])}").exists()
            if is_alive:
                pids[kind].add(int(page[PID]))
            for slot in range(NUM_SLOTS):
                if slot in COMMON_GAUGES:
                    numbers[slot] = max(numbers[slot], page[slot] * is_alive)
                elif is_alive or slot not in GAUGES:
                    numbers[slot] += page[slot]
        return cls(numbers, _memory_of(pids))

    @classmethod
    def of_server(cls, run_directory: Path) -> "Totals":
        return cls.of_pages(_read_pages(run_directory))

    def set_gauges(self, gauges: Mapping[int, float]) -> "Totals":
        """Set the gauges of resources that all processes share, by slot; no process reports them itself."""
        for slot, value in gauges.items():
            self.numbers[slot] = float(value)
        return self

    def sum(self, slots: Slots) -> float:
        """Return the sum over all modalities."""
        return sum(self.numbers[slot] for slot in slots.values())

    def families(self) -> Iterator[Family]:
        for metric in METRICS:
            width = metric.slots_per_series
            starts = {labels: SLOTS[metric.name, labels] for labels in metric.series}
            series = {labels: self.numbers[start : start + width] for labels, start in starts.items()}
            yield Family(metric.name, metric.kind, metric.meaning, series)
        for name, meaning, slot in ALIASES:
            yield Family(name, "counter", meaning, {(): [self.numbers[slot]]})
        usage = self.numbers[_BLOCKS_IN_USE] / max(1.0, self.numbers[_BLOCKS])
        yield Family("keepsight_kv_cache_usage_perc", "gauge", "Share of KV blocks in use, 0 to 1.", {(): [usage]})
        yield Family(
            "keepsight_process_resident_memory_bytes",
            "gauge",
            "Memory of all processes of a kind; shared memory counts for each.",
            {(("process", kind),): [float(size)] for kind, size in self.memory.items()},
        )


def _read_pages(run_directory: Path) -> Iterator[tuple[str, list[float]]]:
    for path in sorted((run_directory / FOLDER).glob("*-*")):
        content = path.read_bytes()
        if len(content) == PAGE_BYTES:
            yield path.name.partition("-")[0], [number for (number,) in iter_unpack("d", content)]


def _memory_of(pids: Mapping[str, set[int]]) -> dict[str, int]:
    memory = {kind: sum(map(resident_bytes, kind_pids)) for kind, kind_pids in pids.items()}
    known = set[int]().union(*pids.values())
    workers = {pid for frontend in pids.get("frontend", ()) for pid in with_descendants(frontend)} - known
    return memory | ({"media_worker": sum(map(resident_bytes, workers))} if workers else {})
