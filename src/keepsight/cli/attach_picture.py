"""What was typed after `/image`, `/video` or `/audio` becomes pictures, films or sounds of a message.

A file goes as a data URL of its own bytes, unchanged, so that the server knows it again in every later turn.  A web
address goes as it is: the server fetches it.
"""

import base64
import mimetypes
import shlex
from pathlib import Path
from typing import Any

from PIL import Image

from keepsight.cli.read_picture import look_at_header
from keepsight.errors import InvalidArgumentError

URL_STARTS = ("http://", "https://", "data:")


def attach(command: str, typed: str) -> list[dict[str, Any]]:
    """A path with spaces may be quoted, escaped as a shell would, or bare if it is the only one."""
    words = [typed] if _is_file(typed) else _split(typed)
    if not words:
        raise InvalidArgumentError(command, "needs a file or a web address")
    kind = f"{command.removeprefix('/')}_url"
    return [{"type": kind, kind: {"url": _to_url(command, word)}} for word in words]


def _split(typed: str) -> list[str]:
    try:
        return shlex.split(typed)
    except ValueError:
        return [typed]  # an apostrophe, not a quote


def _is_file(typed: str) -> bool:
    try:
        return Path(typed).expanduser().is_file()
    except (OSError, RuntimeError, ValueError):
        return False  # too long for a name, or the home of nobody


def _to_url(command: str, word: str) -> str:
    return word if word.lower().startswith(URL_STARTS) else _read_as_data_url(command, word)


def _read_as_data_url(command: str, name: str) -> str:
    try:
        content = Path(name).expanduser().read_bytes()
    except (OSError, RuntimeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidArgumentError(command, f"cannot read {name}: {reason}") from error
    is_picture = command == "/image"
    media_type = Image.MIME[look_at_header(content, name).format or ""] if is_picture else _guess_type(command, name)
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


def _guess_type(command: str, name: str) -> str:
    """By its name: what it is its server will find out."""
    kind = command.removeprefix("/")
    guessed = mimetypes.guess_type(name)[0] or ""
    return guessed if guessed.startswith(f"{kind}/") else f"{kind}/mp4"
