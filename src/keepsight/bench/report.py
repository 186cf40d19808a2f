"""A run of the benchmark as JSON or as a table, and a comparison of two runs.

Knows no server. A table is a list of rows of cells, printed as Markdown, which is readable in a terminal too.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from keepsight.bench.summary import Summary
from keepsight.errors import InvalidArgumentError

FORMAT = 2
# A fact that is there only if the number of words was not found from the server's tokens.
GUESS = "words_per_picture_is_a_guess"
# Facts that may differ: servers name a model differently, each run draws its own inputs, and the number of words
# depends on the server's tokens; that it is a guess is told in a line of its own.
MAY_DIFFER = frozenset({"model", "seed", "words_per_picture", GUESS})
Row = Sequence[str]


@dataclass(frozen=True, slots=True)
class Report:
    # What was measured and how, for human readers.
    facts: Mapping[str, Any]
    summaries: Mapping[str, Summary]
    # Why other workloads could not be measured.
    failures: Mapping[str, str] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        summaries = {name: asdict(summary) for name, summary in self.summaries.items()}
        content = {"format": FORMAT, "facts": self.facts, "workloads": summaries, "failures": self.failures}
        path.write_text(json.dumps(content, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> "Report":
        try:
            content = json.loads(path.read_text())
            if content["format"] != FORMAT:
                raise InvalidArgumentError(str(path), f"must have format {FORMAT}, not {content['format']}")
            summaries = {name: Summary.from_json(fields) for name, fields in content["workloads"].items()}
            # Reports of earlier versions have no failures.
            return cls(dict(content["facts"]), summaries, dict(content.get("failures", {})))
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise InvalidArgumentError(str(path), f"is not a report of keepsight bench: {error}") from error


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    of: Callable[[Summary], float | None]
    # True: less is better; False: more is better; None: neither.
    is_cost: bool | None
    form: str = ".1f"

    def show(self, summary: Summary) -> str:
        value = self.of(summary)
        return "-" if value is None else format(value, self.form)

    def advantage(self, one: Summary, other: Summary) -> float | None:
        """Return a ratio that is above 1 if `one` is better; None if the metric cannot be compared."""
        a, b = self.of(one), self.of(other)
        if self.is_cost is None or not a or not b:
            return None
        return b / a if self.is_cost else a / b


METRICS = (
    Metric("requests", lambda each: each.num_requests, None, ".0f"),
    Metric("errors", lambda each: each.num_errors, None, ".0f"),
    Metric("first token p50 ms", lambda each: each.first_token and each.first_token.p50, True),
    Metric("first token p95 ms", lambda each: each.first_token and each.first_token.p95, True),
    Metric("first token p99 ms", lambda each: each.first_token and each.first_token.p99, True),
    Metric("gap p50 ms", lambda each: each.gap and each.gap.p50, True, ".2f"),
    Metric("gap p95 ms", lambda each: each.gap and each.gap.p95, True, ".2f"),
    Metric("gap p99 ms", lambda each: each.gap and each.gap.p99, True, ".2f"),
    Metric("whole p50 ms", lambda each: each.whole and each.whole.p50, True),
    Metric("whole p95 ms", lambda each: each.whole and each.whole.p95, True),
    Metric("requests/s", lambda each: each.requests_per_second, False, ".2f"),
    Metric("tokens/s", lambda each: each.tokens_per_second, False),
    Metric("prompt tokens", lambda each: each.prompt_tokens, None, ".0f"),
    Metric("cached", lambda each: each.cached_share, None, ".0%"),
)


def table(summaries: Mapping[str, Summary]) -> list[Row]:
    rows: list[Row] = [["workload", *(metric.name for metric in METRICS)]]
    rows += [[name, *(metric.show(summary) for metric in METRICS)] for name, summary in summaries.items()]
    return rows


def comparison(one: Report, other: Report, labels: tuple[str, str]) -> list[Row]:
    """Return a table that compares the workloads that both reports have."""
    rows: list[Row] = [["workload", "measure", *labels, f"{labels[0]} better by"]]
    for name in [name for name in one.summaries if name in other.summaries]:
        for metric in METRICS:
            a, b = one.summaries[name], other.summaries[name]
            ratio = metric.advantage(a, b)
            rows.append([name, metric.name, metric.show(a), metric.show(b), "" if ratio is None else f"{ratio:.2f}"])
    return rows


def differences(one: Report, other: Report) -> list[str]:
    """Return the settings in which the two runs differ, and which a comparison therefore reflects, too."""
    names = dict.fromkeys((*one.facts, *other.facts))
    return [
        f"{name} {one.facts.get(name)} and {other.facts.get(name)}"
        for name in names
        if name not in MAY_DIFFER and one.facts.get(name) != other.facts.get(name)
    ]


def notes(one: Report, other: Report, labels: tuple[str, str]) -> list[str]:
    """Return what else a reader of the comparison must know, line by line."""
    lines = []
    if differing := differences(one, other):
        lines.append(f"DIFFERENT SETTINGS: {', '.join(differing)}")
    pairs = ((labels[0], one, other), (labels[1], other, one))
    if guessed := [label for label, report, _ in pairs if report.facts.get(GUESS)]:
        words = " and ".join(str(report.facts.get("words_per_picture")) for report in (one, other))
        lines.append(f"DIFFERENT TEXTS, PERHAPS: words_per_picture {words}, a guess in {', '.join(guessed)}")
    for label, report, opposite in pairs:
        if lone := [_with_reason(name, opposite) for name in report.summaries if name not in opposite.summaries]:
            lines.append(f"ONLY IN {label}: {', '.join(lone)}")
    return lines


def _with_reason(name: str, lacking: Report) -> str:
    return f"{name} (failed in the other: {lacking.failures[name]})" if name in lacking.failures else name


def to_markdown(rows: Sequence[Row]) -> str:
    # A label or a name may hold the sign that ends a cell.
    rows = [[cell.replace("|", r"\|") for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]

    def line(row: Row) -> str:
        # Names are left-aligned, numbers right-aligned.
        cells = [f"{cell:{'>' if column else '<'}{widths[column]}}" for column, cell in enumerate(row)]
        return f"| {' | '.join(cells)} |"

    rule = f"|{'|'.join('-' * (width + 2) for width in widths)}|"
    head, *body = map(line, rows)
    return "\n".join([head, rule, *body])
