"""Totals in Prometheus' text format: https://prometheus.io/docs/instrumenting/exposition_formats/"""

from collections.abc import Iterable, Iterator, Mapping

from keepsight.observe.metric_values import Histogram, list_family
from keepsight.observe.totals import Family, Totals

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def write_prometheus(totals: Totals) -> str:
    return write_families(totals.families())


def write_families(families: Iterable[Family]) -> str:
    return "".join(f"{line}\n" for family in families for line in _write_family(family))


def _write_family(family: Family) -> Iterator[str]:
    # No meaning and no label value of ours contains a character that must be escaped.
    yield f"# HELP {family.name} {family.meaning}"
    yield f"# TYPE {family.name} {family.kind}"
    for metric in list_family(family):
        labels = _write_labels(metric.labels)
        if isinstance(metric, Histogram):
            for bound, count in metric.buckets.items():
                yield f"{family.name}_bucket{_write_labels({**metric.labels, 'le': bound})} {count}"
            yield f"{family.name}_sum{labels} {_write_number(metric.sum)}"
            yield f"{family.name}_count{labels} {metric.count}"
        else:
            yield f"{family.name}{labels} {_write_number(metric.value)}"


def _write_labels(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}" if labels else ""


def _write_number(number: float) -> str:
    return str(int(number)) if number.is_integer() else repr(number)
