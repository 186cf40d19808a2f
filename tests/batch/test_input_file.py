"""Lines are read as they come, and nobody waits for them for longer than the batch lasts."""

import io
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepsight.batch.input_file import InputFile


@pytest.fixture
def pipe() -> Iterator[tuple[Path, int]]:
    """One that can be read by its path, and the descriptor to write to."""
    reader, writer = os.pipe()
    yield Path(f"/dev/fd/{reader}"), writer
    os.close(reader)
    os.close(writer)


def test_a_file_is_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"a\n" * 10_000 + b"b")
    with io.BufferedReader(InputFile(path)) as file:
        assert list(file) == [b"a\n"] * 10_000 + [b"b"]


def test_a_line_that_comes_late_is_waited_for(pipe: tuple[Path, int]) -> None:
    path, writer = pipe
    with io.BufferedReader(InputFile(path)) as file:
        late = threading.Timer(0.5, os.write, (writer, b"a\n"))
        late.start()
        assert file.readline() == b"a\n"
        late.join()


def test_a_pipe_ends_with_the_batch_also_in_the_middle_of_a_line(pipe: tuple[Path, int]) -> None:
    path, writer = pipe
    os.write(writer, b"a\nb")
    raw = InputFile(path)
    with io.BufferedReader(raw) as file:
        assert file.readline() == b"a\n"
        over = threading.Event()
        raw.is_over = over.is_set
        ending = threading.Timer(0.1, over.set)
        ending.start()
        assert file.readline() == b"b"
        assert file.readline() == b""
        ending.join()
