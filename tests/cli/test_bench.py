import errno
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from keepsight.bench.report import Report
from keepsight.cli.main import main
from tests.cli.scripted_server import DONE, Script, answer, event, scripted_server
from tests.cli.test_chat import restore_sigint

QUICK = ("--requests", "2", "--warmup", "0", "--picture-size", "16x16")


def test_a_server_is_measured_and_two_reports_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    third = tmp_path / "third.json"
    with scripted_server(Script()) as script:
        for path, more in ((one, []), (other, []), (third, ["--max-tokens", "9"])):
            typed = ["--base-url", script.url, "--json", str(path), "--workload", "cold", *QUICK, *more]
            assert main(["bench", "serve", *typed]) == 0
    assert json.loads(one.read_text())["facts"]["model"] == "first"
    assert "| cold " in capsys.readouterr().out
    assert main(["bench", "compare", str(one), str(other), "--labels", "a,b"]) == 0
    output = capsys.readouterr().out
    assert "a better by" in output
    assert "DIFFERENT SETTINGS" not in output
    assert main(["bench", "compare", str(one), str(third)]) == 0
    assert "DIFFERENT SETTINGS: sampling {" in capsys.readouterr().out


def test_reports_without_common_workloads_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    with scripted_server(Script()) as script:
        for path, workload in ((one, "cold"), (other, "many-pictures")):
            typed = ["--base-url", script.url, "--json", str(path), "--workload", workload]
            assert main(["bench", "serve", *typed, *QUICK]) == 0
    capsys.readouterr()
    assert main(["bench", "compare", str(one), str(other)]) == 2
    output = capsys.readouterr()
    assert (output.out, output.err) == ("", f"keepsight bench: FILE: {one} and {other} have no workload in common\n")


def test_a_comparison_names_what_one_server_failed_and_whose_texts_are_of_a_guessed_length(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    refused = [b'data: {"error": "at most 2 pictures"}\n\n', DONE]
    workloads = ("many-pictures", "text-only")
    with scripted_server(Script()) as script:
        # The other refuses the probe, whose place is first, then the first workload.
        for path, answers in ((one, script.answers), (other, [refused, refused, answer("Hi")])):
            script.answers = answers
            main(["bench", "serve", "--base-url", script.url, "--json", str(path), "--workload", *workloads, *QUICK])
    capsys.readouterr()
    assert main(["bench", "compare", str(one), str(other)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("ONLY IN one: many-pictures (failed in the other: ")]
    assert [line for line in lines if line.startswith("DIFFERENT TEXTS, PERHAPS: ") and "a guess in" in line]


def test_requests_are_sent_at_a_rate(tmp_path: Path) -> None:
    report = tmp_path / "a.json"
    with scripted_server(Script()) as script:
        typed = ["--base-url", script.url, "--json", str(report), "--workload", "cold", "--request-rate", "50"]
        assert main(["bench", "serve", *typed, *QUICK]) == 0
    facts = Report.load(report).facts
    assert facts["request_rate"] == 50
    assert "concurrency" not in facts, "it applies only without a rate"


def test_a_workload_that_is_named_twice_is_measured_once() -> None:
    with scripted_server(Script()) as script:
        typed = ["--base-url", script.url, "--workload", "zipf", "zipf", "--reuse", "50", "50", "--pool", "1"]
        assert main(["bench", "serve", *typed, *QUICK]) == 0
    assert len(script.bodies) == 1 + 2, "its pool and its requests"


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        *(
            (["--request-rate", each], "to send all at once, set --concurrency")
            for each in ("0", "-1", "inf", "nan", "often")
        ),
        *((["--request-rate", "1", "--concurrency", each], "not allowed with") for each in ("1", "2")),
    ],
)
def test_an_impossible_rate_is_refused(typed: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "serve", *typed])
    assert message in capsys.readouterr().err


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


def test_a_workload_that_fails_is_named_and_the_rest_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = [b'data: {"error": "at most 2 pictures"}\n\n', DONE]
    with scripted_server(Script(answers=[refused, answer("Hello")])) as script:
        typed = ["--base-url", script.url, "--json", str(tmp_path / "r.json"), "--workload", "many-pictures", "cold"]
        assert main(["bench", "serve", *typed, *QUICK]) == 1
    output = capsys.readouterr().out
    assert "many-pictures: could not be measured: " in output
    assert "at most 2 pictures" in output
    assert list(json.loads((tmp_path / "r.json").read_text())["workloads"]) == ["cold"]


def test_a_guessed_text_length_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with scripted_server(Script(answers=[[event("Hi"), DONE]])) as script:
        assert main(["bench", "serve", "--base-url", script.url, "--workload", "text-only", *QUICK]) == 0
    assert "words_per_picture is a guess: the server does not report how many tokens" in capsys.readouterr().out


def test_control_characters_of_a_measured_server_do_not_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    refused = [b'data: {"error": "\\u001b[2Jred"}\n\n', DONE]
    script = Script(answers=[refused], models={"data": [{"id": "\x1b[2Jfirst"}]})
    with scripted_server(script):
        main(["bench", "serve", "--base-url", script.url, "--workload", "cold", *QUICK])
    output = capsys.readouterr().out
    assert "[2Jred" in output
    assert "[2Jfirst" in output
    assert "\x1b" not in output


def test_complete_measurements_survive_ctrl_c(tmp_path: Path) -> None:
    report = tmp_path / "r.json"
    with scripted_server(Script(answers=[answer("Hi"), answer("Hi"), [event("Once")]], is_endless=True)) as script:
        typed = ["--base-url", script.url, "--json", str(report), "--workload", "cold", "zipf", *QUICK]
        command = [sys.executable, "-m", "keepsight", "bench", "serve", *typed]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=restore_sigint
        ) as process:
            while len(script.bodies) < 3:
                time.sleep(0.01)
                assert process.poll() is None
            process.send_signal(signal.SIGINT)
            output, complained = process.communicate(timeout=60)
    assert (process.returncode, complained) == (130, "")
    assert "| cold " in output
    assert list(json.loads(report.read_text())["workloads"]) == ["cold"]


def test_ctrl_c_does_not_wait_for_drawing() -> None:
    with scripted_server(Script()) as script:
        many = ["--requests", "1000000", "--picture-size", "64x64"]
        typed = ["--base-url", script.url, "--workload", "cold", *many]
        command = [sys.executable, "-m", "keepsight", "bench", "serve", *typed]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=restore_sigint
        ) as process:
            while not script.authorizations:  # the first request asks for the model's name
                time.sleep(0.01)
                assert process.poll() is None
            time.sleep(1)
            process.send_signal(signal.SIGINT)
            try:
                _, complained = process.communicate(timeout=20)
            finally:
                process.kill()
    assert (process.returncode, complained) == (130, b"")


@pytest.mark.parametrize(("flag", "name"), [("--json", "r.json"), ("--plot", "r.svg")])
def test_a_file_that_cannot_be_written_is_reported_before_anything_is_measured(
    flag: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with scripted_server(Script()) as script:
        typed = ["--base-url", script.url, "--workload", "cold", flag, str(tmp_path / "none" / name)]
        assert main(["bench", "serve", *typed, *QUICK]) == 2
        assert not script.bodies
    assert f"{flag}: cannot write {tmp_path / 'none' / name}: No such file" in capsys.readouterr().err


def test_measurements_are_printed_even_if_their_file_becomes_unwritable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_report: Report, _path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Report, "save", fail)
    with scripted_server(Script()) as script:
        typed = ["--base-url", script.url, "--workload", "cold", "--json", str(tmp_path / "r.json")]
        assert main(["bench", "serve", *typed, *QUICK]) == 2
    output = capsys.readouterr()
    assert "| cold " in output.out
    assert output.err.splitlines() == [
        f"keepsight bench: --json: cannot write {tmp_path / 'r.json'}: No space left on device"
    ]


def test_a_run_without_measurements_keeps_the_last_report(tmp_path: Path) -> None:
    report = tmp_path / "r.json"
    report.write_text("of yesterday")
    with scripted_server(Script(status=500, refusal=b"no")) as script:
        typed = ["--base-url", script.url, "--model", "m", "--json", str(report), "--workload", "many-pictures"]
        assert main(["bench", "serve", *typed, *QUICK]) == 1
    assert report.read_text() == "of yesterday"


@pytest.mark.parametrize(
    ("typed", "message"),
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
def test_usage_errors_name_the_flag(typed: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *typed]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("typed", [["--picture-size", "big"], ["--picture-size", "0x5"], ["--reuse", "101"]])
def test_an_invalid_size_or_percentage_is_refused(typed: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "serve", *typed])
    assert "must be" in capsys.readouterr().err
