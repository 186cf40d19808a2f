"""Metrics as values, in the types that vLLM's `LLM.get_metrics()` returns."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from keepsight.observe.catalogue import BOUNDS
from keepsight.observe.totals import Family, Totals


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Counter(Metric):
    value: float


@dataclass(frozen=True, slots=True)
class Gauge(Metric):
    value: float


@dataclass(frozen=True, slots=True)
class Histogram(Metric):
    count: int
    sum: float
    # Cumulative counts by upper bound.
    buckets: Mapping[str, int]


def list_metrics(totals: Totals) -> list[Metric]:
    return [metric for family in totals.families() for metric in list_family(family)]


def list_family(family: Family) -> Iterator[Counter | Gauge | Histogram]:
    for labels, numbers in family.series.items():
        if family.kind == "histogram":
            *counts, total = numbers
            cumulated = [int(count) for count in accumulate(counts)]
            buckets = dict(zip((*map(str, BOUNDS), "+Inf"), cumulated, strict=True))
            yield Histogram(family.name, dict(labels), cumulated[-1], total, buckets)
        else:
            kind = Counter if family.kind == "counter" else Gauge
            yield kind(family.name, dict(labels), numbers[0])
