"""`keepsight cache simulate` prints a row for each policy and a column for each size; others look into a disk tier."""

from pathlib import Path

import pytest

from benchmarks.cache_traces import zipf
from keepsight.cli.main import main
from keepsight.tiers.disk_tier import DiskTier
from keepsight.tiers.policies import POLICIES
from keepsight.tiers.trace import TraceRecorder
from tests.drawn import draw
from tests.tiers.arrays import array_of, key_of


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


# What is kept -------------------------------------------------------------------------------------------------


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """Three entries."""
    tier = DiskTier(tmp_path / "kept", 2**30)
    for number in range(3):
        assert tier.put(key_of(number), array_of(number))
    tier.close()
    return tmp_path / "kept"


def test_what_is_kept_is_counted_verified_and_cleared(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    disk = ["--disk", str(kept)]
    assert main(["cache", "inspect", *disk]) == 0
    assert main(["cache", "verify", *disk]) == 0
    damaged = kept / "entries" / key_of(1)
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    assert main(["cache", "verify", *disk]) == 1
    assert main(["cache", "clear", *disk]) == 0
    assert main(["cache", "inspect", *disk]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("3 embeddings, ")
    assert [line.split(",")[1] for line in lines[1:3]] == [
        " 0 were damaged and are removed",
        " 1 were damaged and are removed",
    ]
    assert lines[3:] == ["2 embeddings removed", "0 embeddings, 0.0 MiB"]


def test_looking_makes_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "inspect", "--disk", str(tmp_path / "none")]) == 0
    assert capsys.readouterr().out == "nothing is kept there\n"
    assert not (tmp_path / "none").exists()


def test_a_server_that_is_not_there_is_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "clear", "--remote", f"unix://{tmp_path}/none"]) == 2
    assert "--remote" in capsys.readouterr().err


def test_warmed_pictures_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "picture.png"
    draw(3).picture.save(picture)
    options = ["--encoder-disk-cache", str(tmp_path / "kept"), "--device", "cpu"]
    assert main(["cache", "warm", str(picture), *options]) == 0
    assert "disk: 1 embeddings" in capsys.readouterr().out
