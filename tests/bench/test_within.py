from pathlib import Path

import pytest

from keepsight.bench import workloads
from keepsight.cli.main import main
from tests.random_checkpoint import make_text_only_checkpoint


def test_an_offline_batch_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ("--picture-size", "64x64", "--requests", "3", "--max-tokens", "2", "--pool", "2")
    assert main(["bench", "offline", "--workload", "same-picture-same-prompt", *shape]) == 0
    output = capsys.readouterr().out
    assert output.startswith("3 requests (")
    assert " 3 pictures (" in output
    assert " 6 output tokens (" in output


def test_each_part_has_a_cost_and_the_cost_of_a_copy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "parts", "--runs", "1", "--picture-size", "640x480"]) == 0
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in capsys.readouterr().out.splitlines()]
    costs = {name: [float(each) for each in numbers] for name, *numbers in rows[2:]}
    assert list(costs)[1:4] == ["decode", "resize", "processor cache, hit"]
    assert costs["decode"][1] == pytest.approx(640 * 480 * 3 / 1e6, abs=0.01)
    assert costs["encode"][0] > costs["processor cache, hit"][0]


@pytest.mark.parametrize("command", ["offline", "parts"])
def test_usage_errors_are_reported_before_anything_is_loaded(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    flag = {"offline": "--requests", "parts": "--runs"}[command]
    assert main(["bench", command, flag, "0"]) == 2
    assert f"{flag}: must be at least 1" in capsys.readouterr().err


def test_pictures_that_would_be_refused_are_not_drawn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(workloads, "photograph")
    shape = ("--picture-size", "100x90", "--max-image-pixels", "8999")
    assert main(["bench", "offline", "--workload", "cold", *shape]) == 2
    line = "keepsight bench: --picture-size: 100 x 90 pixels are 9000, at most 8999 are allowed\n"
    assert capsys.readouterr().err == line
    assert main(["bench", "offline", "--workload", "text-only", "--requests", "1", "--max-tokens", "1", *shape]) == 0


@pytest.mark.parametrize("command", ["offline", "parts"])
def test_a_folder_that_is_not_a_checkpoint_is_reported(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", command, "--model", str(tmp_path)]) == 2
    assert capsys.readouterr().err.endswith("config.json: is missing, so its folder is not a checkpoint\n")


def test_a_text_only_model_has_no_picture_path_to_measure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_text_only_checkpoint(tmp_path)
    assert main(["bench", "parts", "--model", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"keepsight bench: {tmp_path}: takes no pictures, so there is nothing to measure\n"
    )
