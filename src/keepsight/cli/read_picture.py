"""Reads a picture named on the command line: its file's bytes, unchanged, after its header was checked."""

from pathlib import Path

from PIL import ImageFile

from keepsight.errors import InvalidArgumentError
from keepsight.frontend.intake.open_picture import open_picture, translating_parser_errors


def read_picture(path: Path, field: str) -> bytes:
    """Read a picture named by `field`. An invalid one is reported by its path, before a model is loaded for it."""
    content = read_file(path, field)
    check_header(content, str(path))
    return content


def read_file(path: Path, field: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidArgumentError(field, f"cannot read {path}: {error.strerror}") from error


def check_header(content: bytes, name: str) -> ImageFile.ImageFile:
    with translating_parser_errors(name, len(content)):
        return open_picture(content, name)
