"""A recorded trace can be read back, and recording never blocks the server."""

import threading
from pathlib import Path

import pytest

from keepsight.errors import InvalidArgumentError
from keepsight.tiers import trace as trace_module
from keepsight.tiers.trace import Access, TraceRecorder, read_trace


def test_a_recorded_trace_is_read_back(tmp_path: Path) -> None:
    path, times = tmp_path / "trace", iter([1.5, 2.5, 3.5])
    for keys in (["a", "b"], ["a"]):
        recorder = TraceRecorder(path)
        for key in keys:
            recorder.record(Access(next(times), key, 10, 0.25))
        recorder.close()
    assert list(read_trace(path)) == [
        Access(1.5, "a", 10, 0.25),
        Access(2.5, "b", 10, 0.25),
        Access(3.5, "a", 10, 0.25),
    ]
    assert path.read_text().splitlines()[0] == '{"time":1.5,"hash":"a","bytes":10,"seconds":0.25}'


def test_a_last_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text('{"time":1,"hash":"a","bytes":1,"seconds":1}\n{"time":1,"ha')
    assert len(list(read_trace(path))) == 1


@pytest.mark.parametrize(
    "line", ["x", "{}", '{"time":1,"hash":"a","bytes":-1,"seconds":1}', '{"time":1,"hash":"a","bytes":1,"seconds":-1}']
)
def test_an_invalid_trace_is_refused_with_the_line_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace"
    path.write_text('{"time":1,"hash":"a","bytes":1,"seconds":1}\n' + line + "\n")
    with pytest.raises(InvalidArgumentError, match="line 2"):
        list(read_trace(path))
    with pytest.raises(InvalidArgumentError, match="cannot be read"):
        list(read_trace(tmp_path / "other"))


def test_hanging_writes_do_not_block_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_module, "_MAX_WAITING", 10)
    recorder, may_write = TraceRecorder(tmp_path / "trace"), threading.Event()
    file = recorder._file

    class Hanging:
        def write(self, line: bytes) -> int:
            assert may_write.wait(20)
            return file.write(line)

        flush, close = file.flush, file.close

    recorder._file = Hanging()  # type: ignore[assignment]
    for number in range(100):
        recorder.record(Access(0, str(number), 1, 1))
    assert recorder.num_left_out >= 89
    may_write.set()
    recorder.close()
    assert len(list(read_trace(tmp_path / "trace"))) == 100 - recorder.num_left_out


def test_failed_writes_are_logged_once_and_counted_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    recorder = TraceRecorder(Path("/dev/full"))
    for number in range(3):
        recorder.record(Access(0, str(number), 1, 1))
    recorder.close()
    messages = [each.getMessage() for each in caplog.records]
    assert messages == [
        "the trace cannot be written: [Errno 28] No space left on device",
        "3 uses are missing from the trace",
    ]


def test_a_partial_line_is_ended_once_the_disk_has_room(tmp_path: Path) -> None:
    recorder, rooms = TraceRecorder(tmp_path / "trace"), iter([1000, 30, 0, 1000])
    file = recorder._file

    class Filling:
        def write(self, line: bytes) -> int:
            if not (room := next(rooms)):
                raise OSError(28, "No space left on device")
            return file.write(line[:room])

        close = file.close

    recorder._file = Filling()  # type: ignore[assignment]
    for key in ("a", "b", "c", "d"):
        recorder.record(Access(0, key, 1, 1))
    recorder.close()
    assert [access.key for access in read_trace(tmp_path / "trace")] == ["a", "b", "d"]
    assert recorder.num_left_out == 1
