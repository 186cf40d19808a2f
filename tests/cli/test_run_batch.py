"""`keepsight run-batch`: each line of a file is answered once, whatever ends the command or an engine in the middle."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from keepsight.cli.main import main
from tests.batch.made_up_lines import to_line
from tests.cli.scripted_server import Script, scripted_server
from tests.drawn import ask, by_url, draw
from tests.place import FLAGS
from tests.real_server import COMMAND, END_SECONDS
from tests.wait_until import wait_until

NUM_LONG = 60


class Files:
    def __init__(self, folder: Path) -> None:
        self.requests, self.answers, self.log = folder / "in.jsonl", folder / "out.jsonl", folder / "log"
        self.names = ("-i", str(self.requests), "-o", str(self.answers))

    def read(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.answers.read_bytes().splitlines()]

    @contextmanager
    def running(self, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
        command = [*COMMAND, "run-batch", *self.names, *flags]
        with (
            self.log.open("w") as log,
            subprocess.Popen(command, stderr=log) as process,
        ):
            try:
                yield process
            finally:
                process.kill()

    def wait_for(self, num_lines: int, process: subprocess.Popen[bytes]) -> None:
        def is_written() -> bool:
            assert process.poll() is None, self.log.read_text()
            return self.answers.exists() and self.answers.read_bytes().count(b"\n") >= num_lines

        wait_until(is_written)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def to_body(messages: Sequence[Any], **options: Any) -> dict[str, Any]:
    return {"model": "keepsight-demo", "messages": messages, "temperature": 0, **options}


def long_lines() -> list[bytes]:
    return [
        to_line(f"long-{number}", body=to_body(ask(f"Hello {number}"), max_tokens=100, ignore_eos=True))
        for number in range(NUM_LONG)
    ]


def test_pictures_vectors_and_bad_lines_are_done_although_the_engine_dies(files: Files, tmp_path: Path) -> None:
    drawn = draw(7)
    drawn.picture.save(tmp_path / "x.png")
    by_file = {"type": "image_url", "image_url": {"url": (tmp_path / "x.png").as_uri()}}
    of_picture = {
        name: to_line(name, body=to_body(ask(part, drawn.questions[0].text)))
        for name, part in {"url": by_url(drawn.picture), "again": by_url(drawn.picture), "file": by_file}.items()
    }
    others = [
        to_line("vector", url="/v1/embeddings", body={"model": "keepsight-demo", "input": "Hello"}),
        to_line("text", url="/v1/completions", body={"model": "keepsight-demo", "prompt": "Hello", "max_tokens": 2}),
        to_line("items", url="/v1/responses", body={"model": "keepsight-demo", "input": "Hello"}),
        to_line("blocks", url="/v1/messages", body=to_body(ask("Hello"), max_tokens=2)),
    ]
    bad = [to_line("unknown", body=to_body(ask("Hello"), model="none")), b"nonsense\n", to_line("url")]
    files.requests.write_bytes(b"".join([*long_lines(), *of_picture.values(), *others, *bad]))
    with files.running(*FLAGS, "--allowed-local-media-path", str(tmp_path), "--concurrency", "3") as process:
        files.wait_for(3, process)
        found = re.search(r"engine-1 \(pid (\d+)\) is ready", files.log.read_text())
        assert found
        os.kill(int(found[1]), signal.SIGKILL)
        process.wait(END_SECONDS)
    assert process.returncode == 0
    assert "another is started" in files.log.read_text()
    num_answered = NUM_LONG + len(of_picture) + len(others)
    summary = f"{files.answers}: {num_answered + 1} answered (200: {num_answered}, 404: 1), 2 with an error"
    assert summary in files.log.read_text().splitlines()
    answered = {each["custom_id"]: each["response"] for each in files.read() if each["response"]}
    assert len(answered) == num_answered + 1
    said = {name: answered[name]["body"]["choices"][0]["message"]["content"] for name in of_picture}
    assert said == dict.fromkeys(of_picture, drawn.questions[0].answer)
    assert len(answered["vector"]["body"]["data"][0]["embedding"]) > 1
    assert answered["unknown"]["body"]["error"]["code"] == "model_not_found"
    assert re.fullmatch("[0-9a-f]{32}", answered["unknown"]["request_id"])
    errors = {(each["custom_id"], each["error"]["code"]) for each in files.read() if each["error"]}
    assert errors == {(None, "invalid_json_line"), ("url", "duplicate_custom_id")}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_what_was_answered_before_the_end_is_not_asked_again(number: signal.Signals, files: Files) -> None:
    files.requests.write_bytes(b"".join(long_lines()))
    with files.running(*FLAGS, "--concurrency", "2") as process:
        files.wait_for(2, process)
        process.send_signal(number)
        process.wait(END_SECONDS)
    assert process.returncode == {signal.SIGKILL: -9, signal.SIGINT: 130, signal.SIGTERM: 1}[number]
    first = files.read()
    assert 2 <= len(first) < NUM_LONG
    assert {each["response"]["status_code"] for each in first} == {200}
    if number == signal.SIGKILL:
        with files.answers.open("ab") as answers:
            answers.write(b'{"id":"batch_req_0","custom_id":"lo')  # as if it had been killed while it wrote
    else:
        assert f"{len(first)} answered (200: {len(first)}); --resume does the rest\n" in files.log.read_text()
        assert "Traceback" not in files.log.read_text()
    with files.running(*FLAGS, "--resume") as process:
        assert process.wait(END_SECONDS) == 0, files.log.read_text()
    both = files.read()
    assert both[: len(first)] == first
    assert sorted(each["custom_id"] for each in both) == sorted(f"long-{number}" for number in range(NUM_LONG))


def test_a_running_server_can_be_asked(
    files: Files, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    files.requests.write_bytes(to_line("a") + to_line("b", body={"text": "x" * 2**20}))
    with scripted_server(Script(answers=[[b"{}"]])) as script:
        assert main(["run-batch", *files.names, "--base-url", script.url, "--max-body-mb", "0.5"]) == 0
    assert script.authorizations == ["Bearer secret"]
    assert {each["custom_id"] for each in files.read()} == {"a", None}
    assert capsys.readouterr() == ("", f"{files.answers}: 1 answered (200: 1), 1 with an error\n")


def test_only_answers_are_in_a_file_that_is_the_standard_output(files: Files) -> None:
    files.requests.write_bytes(to_line("a") + to_line("b"))
    with scripted_server(Script(answers=[[b"{}"]])) as script, files.answers.open("wb") as stdout:
        names = ["-i", str(files.requests), "-o", "/dev/stdout", "--base-url", script.url]
        subprocess.run([*COMMAND, "run-batch", *names], stdout=stdout, check=True, timeout=END_SECONDS)
    assert {each["custom_id"] for each in files.read()} == {"a", "b"}


def test_requests_may_come_from_a_pipe(files: Files) -> None:
    reader, writer = os.pipe()
    os.write(writer, to_line("a"))
    os.close(writer)
    with scripted_server(Script(answers=[[b"{}"]])) as script:
        flags = ["-i", f"/dev/fd/{reader}", "-o", str(files.answers), "--base-url", script.url]
        assert main(["run-batch", *flags]) == 0
    os.close(reader)
    assert [each["custom_id"] for each in files.read()] == ["a"]


@pytest.mark.parametrize(("is_own", "number"), [(True, signal.SIGTERM), (True, signal.SIGINT), (False, signal.SIGINT)])
def test_a_pipe_from_which_nothing_comes_keeps_nobody_from_ending_the_run(
    is_own: bool, number: signal.Signals, files: Files
) -> None:
    os.mkfifo(files.requests)
    with scripted_server(Script(answers=[[b"{}"]])) as script:
        names = FLAGS if is_own else ("--base-url", script.url)
        with files.running(*names) as process, files.requests.open("wb", buffering=0) as writer:
            writer.write(to_line("a") + b"half a li")
            files.wait_for(1, process)
            process.send_signal(number)
            process.wait(END_SECONDS)
    assert process.returncode == (130 if number == signal.SIGINT else 1)
    assert [each["custom_id"] for each in files.read()] == ["a"]
    assert "; --resume does the rest\n" in files.log.read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--concurrency", "0"], "--concurrency: must be at least 1, not 0"),
        (["-i", "/no/such"], "--input-file: cannot read /no/such: No such file or directory"),
        (["-o", "/no/such"], "--output-file: cannot write /no/such: No such file or directory"),
        (["-o", __file__], "exists: --resume keeps its answers and asks for the others"),
        (["-o", __file__, "--resume"], "is no answer of a batch"),
        (["--model", "/m", "--base-url", "http://a/v1"], "--model: cannot be given with --base-url"),
        (["--quantization", "int8", "--base-url", "http://a/v1"], "--quantization: cannot be given with --base-url"),
        (["--api-key", "k"], "--api-key: is that of a running server"),
        (["--base-url", "a"], "--base-url: must be like http://127.0.0.1:8000/v1, not 'a'"),
        (["--model", "/no/such"], "/no/such"),
    ],
)
def test_a_usage_error_is_one_line_and_status_2(
    flags: list[str], message: str, files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    files.requests.touch()
    assert main(["run-batch", *files.names, *flags]) == 2
    said = capsys.readouterr()
    [line] = said.err.splitlines()
    assert line.startswith("keepsight run-batch: ")
    assert said.out == ""
    assert message in line
