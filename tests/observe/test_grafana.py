"""The Grafana dashboard uses only metrics that are served."""

import json
import re
from pathlib import Path

from keepsight.observe.totals import Family, Totals

DASHBOARD = json.loads((Path(__file__).parents[2] / "docs" / "grafana.json").read_text())
EXPRESSIONS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]


def served() -> dict[str, set[str]]:
    """Return label names by series name; memory has one series per process, of which one is enough."""
    totals = Totals(memory={"engine": 1})
    return {name: labels for family in totals.families() for name, labels in _series_of(family)}


def _series_of(family: Family) -> list[tuple[str, set[str]]]:
    labels = {name for each in family.series for name, _ in each}
    if family.kind != "histogram":
        return [(family.name, labels)]
    return [
        (f"{family.name}_bucket", {*labels, "le"}),
        (f"{family.name}_sum", labels),
        (f"{family.name}_count", labels),
    ]


def test_every_queried_metric_is_served() -> None:
    queried = {name for each in EXPRESSIONS for name in re.findall(r"keepsight_\w+", each)}
    assert len(queried) > 20
    assert queried <= served().keys()


def test_panels_sum_over_the_chosen_servers() -> None:
    [chosen] = DASHBOARD["templating"]["list"]
    assert set(re.findall(r"keepsight_\w+", chosen["definition"])) <= served().keys()
    for expression in EXPRESSIONS:
        series = re.findall(r"keepsight_\w+(\{instance=~\"\$instance\")?", expression)
        assert all(series), expression
        assert "sum" in expression, "else each server would be a line of the same name"


def test_every_label_grouped_by_exists() -> None:
    for expression in EXPRESSIONS:
        labels = set[str]().union(*(served()[name] for name in re.findall(r"keepsight_\w+", expression)))
        for group in re.findall(r"by \(([^)]*)\)", expression):
            assert set(group.split(", ")) <= labels, expression


def test_the_documentation_names_every_metric() -> None:
    documented = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    assert [family.name for family in Totals().families() if f"`{family.name}`" not in documented] == []
