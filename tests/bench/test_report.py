from dataclasses import replace
from pathlib import Path

import pytest

from keepsight.bench.ask import Answer
from keepsight.bench.measure import Measurement
from keepsight.bench.report import GUESS, Report, comparison, differences, notes, table, to_markdown
from keepsight.bench.summary import summarize
from keepsight.errors import InvalidArgumentError


def report(first_token: float, *names: str) -> Report:
    summary = summarize(Measurement([Answer(1.0, [first_token, 1.0], "ab", 2, 100, 50)], 1.0))
    return Report({"model": "m"}, dict.fromkeys(names, summary))


def test_a_ratio_above_one_means_that_the_first_is_better() -> None:
    rows = comparison(report(0.1, "cold", "zipf"), report(0.2, "cold", "restart"), ("ours", "theirs"))
    assert rows[0] == ["workload", "measure", "ours", "theirs", "ours better by"]
    assert rows[1:3] == [["cold", "requests", "1", "1", ""], ["cold", "errors", "0", "0", ""]]
    assert rows[3] == ["cold", "first token p50 ms", "100.0", "200.0", "2.00"]
    assert {row[0] for row in rows[1:]} == {"cold"}, "the only workload of both"
    assert ["cold", "cached", "50%", "50%", ""] in rows


def test_differing_settings_are_reported_but_not_facts_of_each_run() -> None:
    one = Report({"model": "a", "seed": 1, "words_per_picture": 90, "concurrency": 1, "num_turns": 4}, {})
    other = Report({"model": "b", "seed": 2, "words_per_picture": 80, "concurrency": 8, "num_turns": 4}, {})
    assert differences(one, other) == ["concurrency 1 and 8"]
    assert differences(one, Report({}, {})) == ["concurrency 1 and None", "num_turns 4 and None"]
    assert differences(one, one) == []


def test_texts_of_a_guessed_length_are_not_compared_without_a_word() -> None:
    found, guessed = Report({"words_per_picture": 5}, {}), Report({"words_per_picture": 256, GUESS: True}, {})
    line = "DIFFERENT TEXTS, PERHAPS: words_per_picture"
    assert notes(found, guessed, ("a", "b")) == [f"{line} 5 and 256, a guess in b"]
    assert notes(guessed, guessed, ("a", "b")) == [f"{line} 256 and 256, a guess in a, b"]
    assert notes(found, found, ("a", "b")) == []


def test_workloads_of_only_one_report_are_named_with_the_reason_if_they_failed() -> None:
    one, other = report(0.1, "cold", "zipf-80", "restart"), report(0.1, "cold", "zipf-50")
    failing = Report(other.facts, other.summaries, {"zipf-80": "500: no"})
    assert notes(one, failing, ("a", "b")) == [
        "ONLY IN a: zipf-80 (failed in the other: 500: no), restart",
        "ONLY IN b: zipf-50",
    ]


def test_a_bar_in_a_label_does_not_end_its_cell() -> None:
    head, rule, *_ = to_markdown(comparison(report(0.1, "cold"), report(0.1, "cold"), ("a|b", "c"))).splitlines()
    assert r" a\|b |" in head
    assert len(head) == len(rule)


def test_a_table_is_aligned_markdown() -> None:
    lines = to_markdown(table(report(0.1, "cold", "same-picture-same-prompt").summaries)).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[2].startswith("| cold ")
    assert set(lines[1]) == {"|", "-"}


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ('"requests_per_second": 1.0', "requests_per_second"),
        ('"p50": 100.0', "p50"),
        ('"prompt_tokens": 100', "prompt_tokens"),
    ],
)
def test_a_report_whose_number_is_a_text_is_refused(tmp_path: Path, written: str, name: str) -> None:
    path = tmp_path / "c.json"
    report(0.1, "cold").save(path)
    assert written in path.read_text()
    path.write_text(path.read_text().replace(written, f'"{name}": "x"'))
    with pytest.raises(InvalidArgumentError, match=rf"c\.json.*{name} is 'x', not a number"):
        Report.load(path)


def test_a_saved_report_is_read_back(tmp_path: Path) -> None:
    saved = replace(report(0.1, "cold"), failures={"zipf-80": "500: no"})
    saved.save(tmp_path / "a.json")
    assert Report.load(tmp_path / "a.json") == saved


@pytest.mark.parametrize(
    "content",
    [
        *("", "null", "{}", "[]", '{"format": 1}', '{"format": 2, "facts": {}, "workloads": {"a": {}}}'),
        *('{"format": 2, "facts": [1], "workloads": {}}', '{"format": 2, "facts": 5, "workloads": {}}'),
        '{"format": 2, "facts": {}, "workloads": {}, "failures": 5}',
        *('{"format": 2, "facts": {}, "workloads": []}', '{"format": 2, "facts": {}, "workloads": null}'),
    ],
)
def test_any_other_file_is_refused_by_name(tmp_path: Path, content: str) -> None:
    (tmp_path / "b.json").write_text(content)
    with pytest.raises(InvalidArgumentError, match=r"b\.json"):
        Report.load(tmp_path / "b.json")


def test_a_report_of_a_version_that_kept_no_failures_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"format": 2, "facts": {}, "workloads": {}}')
    assert Report.load(tmp_path / "a.json") == Report({}, {})
