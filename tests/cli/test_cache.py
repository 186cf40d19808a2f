"""`keepsight cache simulate` prints a row for each policy and a column for each size."""

from pathlib import Path

import pytest

from benchmarks.cache_traces import zipf
from keepsight.cli.main import main
from keepsight.tiers.policies import POLICIES
from keepsight.tiers.trace import TraceRecorder


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    recorder = TraceRecorder(tmp_path / "trace.jsonl")
    for access in zipf(500):
        recorder.record(access.key, access.num_bytes, access.seconds)
    recorder.close()
    return tmp_path / "trace.jsonl"


@pytest.mark.parametrize("options", [[], ["--cache-gb", "0.1"]])
def test_every_policy_and_the_bounds_are_printed(
    trace: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    assert main(["cache", "simulate", str(trace), *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("500 uses of ")
    rows = {line.split()[0]: line.split()[1:] for line in lines[1:]}
    assert list(rows) == ["memory", *POLICIES, "belady", "bound"]
    shares = {name: [float(cell.rstrip("%")) for cell in cells] for name, cells in rows.items() if name != "memory"}
    assert all(len(cells) == 5 for cells in shares.values())
    assert all(cells == sorted(cells) for cells in shares.values())
    assert all(share <= bound for cells in shares.values() for share, bound in zip(cells, shares["bound"], strict=True))


@pytest.mark.parametrize("options", [["--cache-gb", "0"], ["--cache-gb", "nan"]])
def test_nonsense_is_refused(trace: Path, capsys: pytest.CaptureFixture[str], options: list[str]) -> None:
    assert main(["cache", "simulate", str(trace), *options]) == 2
    assert "--cache-gb" in capsys.readouterr().err


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x").write_text("hello\n")
    assert main(["cache", "simulate", str(tmp_path / "x")]) == 2
    assert "line 1" in capsys.readouterr().err
    (tmp_path / "x").write_text("")
    assert main(["cache", "simulate", str(tmp_path / "x")]) == 2
