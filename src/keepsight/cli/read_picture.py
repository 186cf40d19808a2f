"""A picture that was named on a command line: its file's bytes, unchanged, once its header was looked at."""

from pathlib import Path

from PIL import ImageFile

from keepsight.errors import InvalidArgumentError
from keepsight.frontend.intake.open_picture import open_picture, refusing_damage


def read_picture(path: Path, field: str) -> bytes:
    """`field`: where it was named.  What is no picture is told under its path, before a model is loaded for it."""
    content = read_file(path, field)
    look_at_header(content, str(path))
    return content


def read_file(path: Path, field: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidArgumentError(field, f"cannot read {path}: {error.strerror}") from error


def look_at_header(content: bytes, name: str) -> ImageFile.ImageFile:
    with refusing_damage(name, len(content)):
        return open_picture(content, name)
