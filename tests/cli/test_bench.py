import json
from pathlib import Path

import pytest

from keepsight.cli.main import main
from tests.cli.scripted_server import Script, scripted_server

QUICK = ("--requests", "2", "--warmup", "0", "--picture-size", "16x16")


def test_a_server_is_measured_and_two_reports_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    with scripted_server(Script()) as script:
        for path in (one, other):
            assert (
                main(["bench", "serve", "--base-url", script.url, "--json", str(path), "--workload", "cold", *QUICK])
                == 0
            )
    assert json.loads(one.read_text())["facts"]["model"] == "first"
    assert "| cold " in capsys.readouterr().out
    assert main(["bench", "compare", str(one), str(other), "--labels", "a,b"]) == 0
    assert "a better by" in capsys.readouterr().out


def test_seeds_differ_unless_they_are_given(tmp_path: Path) -> None:
    def seed_of(name: str, *more: str) -> int:
        path = tmp_path / name
        main(["bench", "serve", "--base-url", script.url, "--json", str(path), "--workload", "cold", *QUICK, *more])
        return int(json.loads(path.read_text())["facts"]["seed"])

    with scripted_server(Script()) as script:
        assert seed_of("a") != seed_of("b")
        assert seed_of("c", "--seed", "5") == 5


def test_failed_requests_make_the_command_fail(capsys: pytest.CaptureFixture[str]) -> None:
    with scripted_server(Script(status=500, refusal=b"no")) as script:
        assert main(["bench", "serve", "--base-url", script.url, "--model", "m", "--workload", "cold", *QUICK]) == 1
    assert "cold: 2 failed; the first: 500: no" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["serve", "--requests", "0"], "--requests"),
        (["serve", "--warmup", "-1"], "--warmup"),
        (["serve", "--plot", "a.jpg"], "--plot"),
        (["serve", "--workload", "restart"], "--restart-command"),
        (["serve", "--base-url", "nowhere", "--model", "m"], "--base-url"),
        (["compare", "missing.json", "missing.json"], "missing.json"),
        (["compare", "a.json", "b.json", "--labels", "one"], "--labels"),
    ],
)
def test_mistakes_are_told_by_the_flag_s_name(typed: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *typed]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("typed", [["--picture-size", "big"], ["--picture-size", "0x5"], ["--reuse", "101"]])
def test_what_is_no_size_or_percent_is_refused(typed: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "serve", *typed])
    assert "must be" in capsys.readouterr().err
