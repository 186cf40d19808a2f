"""Totals in Prometheus' text format: https://prometheus.io/docs/instrumenting/exposition_formats/"""

from collections.abc import Iterator, Sequence
from itertools import accumulate

from keepsight.observe.catalogue import BOUNDS, Labels
from keepsight.observe.totals import Family, Totals

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def write_prometheus(totals: Totals) -> str:
    return "".join(f"{line}\n" for family in totals.families() for line in _write_family(family))


def _write_family(family: Family) -> Iterator[str]:
    # Neither our meanings nor our label values hold anything that would have to be escaped.
    yield f"# HELP {family.name} {family.meaning}"
    yield f"# TYPE {family.name} {family.kind}"
    for labels, numbers in family.series.items():
        if family.kind == "histogram":
            yield from _write_histogram(family.name, labels, numbers)
        else:
            yield f"{family.name}{_write_labels(labels)} {_write_number(numbers[0])}"


def _write_histogram(name: str, labels: Labels, numbers: Sequence[float]) -> Iterator[str]:
    *counts, total = numbers
    cumulated = list(accumulate(counts))
    for bound, count in zip((*map(str, BOUNDS), "+Inf"), cumulated, strict=True):
        yield f"{name}_bucket{_write_labels((*labels, ('le', bound)))} {_write_number(count)}"
    yield f"{name}_sum{_write_labels(labels)} {_write_number(total)}"
    yield f"{name}_count{_write_labels(labels)} {_write_number(cumulated[-1])}"


def _write_labels(labels: Labels) -> str:
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels) + "}" if labels else ""


def _write_number(number: float) -> str:
    return str(int(number)) if number.is_integer() else repr(number)
