"""A picture that was named on a command line: its file's bytes, unchanged."""

from pathlib import Path

from keepsight.errors import InvalidArgumentError


def read_picture(path: Path, field: str) -> bytes:
    """`field`: where it was named."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidArgumentError(field, f"cannot read {path}: {error.strerror}") from error
