"""The file that a batch's answers are written to, each as it comes; after any end it can be continued.

Invariant: one run at a time writes to a file. The kernel releases its lock when the process ends, however that happens.
"""

import fcntl
import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from keepsight.batch.batch_lines import LINE_START
from keepsight.errors import InvalidArgumentError

FLAG = "--output-file"


class _Response(msgspec.Struct):
    status_code: int


class _Written(msgspec.Struct):
    custom_id: str | None
    response: _Response | None
    error: Any


class OutputFile:
    def __init__(self, path: Path, is_resumed: bool) -> None:
        """Open the file; its answers stay if `is_resumed`, otherwise there must be none."""
        # The ids whose requests need not be asked again.
        self.answered = set[str]()
        try:
            self._file: BinaryIO = _open_alone(path)
            if is_resumed and path.is_file():
                with self._file:  # locked until its successor is in its place
                    self.answered, self._file = _keep_answers(path.resolve())
        except OSError as error:
            raise InvalidArgumentError(FLAG, f"cannot write {path}: {error.strerror or error}") from error
        if not is_resumed and os.fstat(self._file.fileno()).st_size:
            self.close()
            raise InvalidArgumentError(FLAG, f"{path} exists: --resume keeps its answers and asks for the others")

    def write(self, line: bytes) -> None:
        self._file.write(line)
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _open_alone(path: Path) -> BinaryIO:
    file = path.open("ab")
    try:
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            _lock(file)
            if not os.path.samestat(os.fstat(file.fileno()), path.stat()):  # another run has just replaced it
                raise BlockingIOError
    except BlockingIOError:
        file.close()
        reason = f"another run writes to {path}: wait for its end, or name another file"
        raise InvalidArgumentError(FLAG, reason) from None
    return file


def _lock(file: BinaryIO) -> None:
    """Raise BlockingIOError if another run has the lock. Some file systems have no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        pass


def _keep_answers(path: Path) -> tuple[set[str], BinaryIO]:
    """Leave in the file only its answers, and return their ids, and the file, to be continued.

    What failed, or was half written, is done again. A refusal counts as failed: a missing option of the command may be
    its cause, such as a key.
    """
    answered: set[str] = set()
    kept = path.with_name(f"{path.name}.kept")
    new = kept.open("wb")
    try:
        shutil.copymode(path, kept)
        _lock(new)
        with path.open("rb") as old:
            for number, line in enumerate(old, 1):
                if (custom_id := _find_answered(line, f"line {number} of {path}")) is not None:
                    answered.add(custom_id)
                    new.write(line.rstrip() + b"\n")
        new.flush()
        os.fsync(new.fileno())
        kept.replace(path)
    except BaseException:
        new.close()
        raise
    finally:
        kept.unlink(missing_ok=True)
    return answered, new


def _find_answered(line: bytes, name: str) -> str | None:
    if not line.endswith(b"\n") and LINE_START.startswith(line[: len(LINE_START)]):  # the writer was killed
        return None
    try:
        # Also what is no strict JSON, such as half of a surrogate pair in an answer.
        written = msgspec.convert(json.loads(line), _Written)
    except (msgspec.MsgspecError, ValueError) as error:
        raise InvalidArgumentError(FLAG, f"{name} is no answer of a batch: {error}") from error
    is_answered = written.response is not None and 200 <= written.response.status_code < 300
    return written.custom_id if is_answered else None
