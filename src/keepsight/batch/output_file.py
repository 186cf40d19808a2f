"""The file that a batch's answers are written to, each as it comes; after any end it can be continued."""

import json
import os
import shutil
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
        try:
            # The ids whose requests need not be asked again.
            self.answered = _keep_answers(path.resolve()) if is_resumed and path.is_file() else set[str]()
            self._file: BinaryIO = path.open("ab")
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


def _keep_answers(path: Path) -> set[str]:
    """Leave in the file only its answers, and return their ids: what failed, or was half written, is done again.

    A refusal counts as failed: a missing option of the command may be its cause, such as a key.
    """
    answered: set[str] = set()
    kept = path.with_name(f"{path.name}.kept")
    try:
        with path.open("rb") as old, kept.open("wb") as new:
            shutil.copymode(path, kept)
            for number, line in enumerate(old, 1):
                if (custom_id := _find_answered(line, f"line {number} of {path}")) is not None:
                    answered.add(custom_id)
                    new.write(line.rstrip() + b"\n")
            new.flush()
            os.fsync(new.fileno())
        kept.replace(path)
    finally:
        kept.unlink(missing_ok=True)
    return answered


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
