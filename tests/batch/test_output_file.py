"""Each answer is in the file as soon as it is there, and no answer is lost."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from keepsight.batch.batch_lines import answer_line, error_line
from keepsight.batch.output_file import OutputFile
from keepsight.errors import InvalidArgumentError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def test_a_line_is_in_the_file_at_once(path: Path) -> None:
    output = OutputFile(path, is_resumed=False)
    output.write(b"{}\n")
    assert path.read_bytes() == b"{}\n"
    output.close()


def test_answers_are_not_overwritten_but_an_empty_file_may_be_there(path: Path) -> None:
    path.touch()
    OutputFile(path, is_resumed=False).close()
    path.write_bytes(b"{}\n")
    with pytest.raises(InvalidArgumentError, match=r"^--output-file: .*out.jsonl exists: --resume keeps its answers"):
        OutputFile(path, is_resumed=False)
    assert path.read_bytes() == b"{}\n"


def test_resuming_keeps_answers_and_drops_what_is_to_be_done_again(path: Path) -> None:
    answers = [answer_line("good", 200, None, b"{}"), answer_line("fine", 200, None, b"{}")]
    failed = [answer_line("full", 503, None, b"{}"), answer_line("refused", 400, None, b"{}")]
    errors = [error_line(3, None, "invalid_json_line", ""), error_line(4, "unanswered", "no_answer", "")]
    half = answer_line("half", 200, None, b"{}")[:-1]
    path.write_bytes(b"".join([failed[0], answers[0], errors[0], answers[1], failed[1], errors[1], half]))
    output = OutputFile(path, is_resumed=True)
    output.write(b"{}\n")
    output.close()
    assert output.answered == {"good", "fine"}
    assert path.read_bytes() == b"".join([*answers, b"{}\n"])
    assert list(path.parent.iterdir()) == [path]


def test_what_is_not_there_yet_can_be_resumed(path: Path) -> None:
    output = OutputFile(path, is_resumed=True)
    output.close()
    assert output.answered == set()


def test_a_last_line_may_end_anywhere(path: Path) -> None:
    line = answer_line("a", 200, None, b"{}")
    for end in range(len(line)):
        path.write_bytes(line[:end])
        OutputFile(path, is_resumed=True).close()
        assert path.read_bytes() == b""


def test_whatever_other_servers_answer_is_kept(path: Path) -> None:
    lines = b"".join(
        answer_line(custom_id, 200, None, body)
        for custom_id, body in {"a": b'{"n": 1e999}', "b": rb'"\ud83d"', "c": b'{"n": -Infinity}'}.items()
    )
    path.write_bytes(lines)
    output = OutputFile(path, is_resumed=True)
    output.close()
    assert output.answered == {"a", "b", "c"}
    assert path.read_bytes() == lines


def test_a_line_without_an_end_that_another_program_wrote_gets_one(path: Path) -> None:
    path.write_bytes(b'{"id": "1", "custom_id": "a", "response": {"status_code": 200, "body": {}}, "error": null}')
    output = OutputFile(path, is_resumed=True)
    output.write(b"{}\n")
    output.close()
    assert output.answered == {"a"}
    assert path.read_bytes().endswith(b"null}\n{}\n")


def test_only_those_who_could_read_the_answers_can_still_once_it_is_resumed(path: Path) -> None:
    path.write_bytes(answer_line("a", 200, None, b"{}"))
    path.chmod(0o600)
    OutputFile(path, is_resumed=True).close()
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("is_resumed", [False, True])
def test_answers_may_go_to_a_pipe(is_resumed: bool) -> None:
    reader, writer = os.pipe()
    output = OutputFile(Path(f"/dev/fd/{writer}"), is_resumed)
    output.write(b"{}\n")
    output.close()
    assert os.read(reader, 100) == b"{}\n"
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("content", [b"{}\n", b"a,b\n", b'{"custom_id": "a", "method": "POST"}\n', b'{"a": 1}'])
def test_another_file_is_not_resumed_and_stays_as_it_is(content: bytes, path: Path) -> None:
    path.write_bytes(answer_line("a", 200, None, b"{}") + content)
    before = path.read_bytes()
    with pytest.raises(InvalidArgumentError, match=r"^--output-file: line 2 of .* is no answer of a batch: "):
        OutputFile(path, is_resumed=True)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^--output-file: cannot write .*: No such file or directory"):
        OutputFile(tmp_path / "missing" / "out.jsonl", is_resumed=False)


def test_the_file_behind_a_link_is_resumed(path: Path) -> None:
    path.write_bytes(answer_line("a", 200, None, b"{}"))
    link = path.with_name("link")
    link.symlink_to(path)
    OutputFile(link, is_resumed=True).close()
    assert link.is_symlink()


@pytest.mark.parametrize("is_first_resumed", [False, True])
@pytest.mark.parametrize("is_second_resumed", [False, True])
def test_a_file_that_another_run_writes_is_refused_until_that_ends(
    is_first_resumed: bool, is_second_resumed: bool, path: Path
) -> None:
    answer = answer_line("a", 200, None, b"{}")
    if is_first_resumed:
        path.write_bytes(answer)
    first = OutputFile(path, is_first_resumed)
    if not is_first_resumed:
        first.write(answer)
    with pytest.raises(InvalidArgumentError, match=r"^--output-file: another run writes to .*out.jsonl"):
        OutputFile(path, is_second_resumed)
    assert path.read_bytes() == answer
    assert list(path.parent.iterdir()) == [path]
    first.close()
    second = OutputFile(path, is_resumed=True)
    assert second.answered == {"a"}
    second.close()


def test_a_run_that_opened_the_file_just_before_another_replaced_it_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replace(*_: object) -> None:
        path.with_name("new").write_bytes(b"")
        path.with_name("new").replace(path)

    monkeypatch.setattr(fcntl, "flock", replace)
    with pytest.raises(InvalidArgumentError, match="another run writes"):
        OutputFile(path, is_resumed=False)


def test_a_run_that_was_killed_keeps_nobody_out(path: Path) -> None:
    program = "import sys, pathlib, time; from keepsight.batch.output_file import OutputFile\n"
    program += "output = OutputFile(pathlib.Path(sys.argv[1]), False); print(); sys.stdout.flush(); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", program, path], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(InvalidArgumentError, match="another run writes"):
            OutputFile(path, is_resumed=True)
        process.send_signal(signal.SIGKILL)
    OutputFile(path, is_resumed=True).close()


def test_a_file_system_without_locks_can_be_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    OutputFile(path, is_resumed=False).close()


def test_several_runs_may_write_to_what_is_no_file() -> None:
    first, second = (OutputFile(Path(os.devnull), is_resumed=False) for _ in range(2))
    first.close()
    second.close()
