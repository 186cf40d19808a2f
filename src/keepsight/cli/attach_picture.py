"""What was typed after `/image`, `/video`, `/audio` or `/file` becomes pictures, films, sounds or PDFs of a message.

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
    return [_to_part(command, word) for word in words]


def _to_part(command: str, word: str) -> dict[str, Any]:
    is_address = word.lower().startswith(URL_STARTS)
    url = word if is_address else _read_as_data_url(command, word)
    if command == "/file":
        named = {"file_data": url, "filename": Path(word).name}
        return {"type": "file", "file": {"file_url": url} if is_address else named}
    kind = f"{command.removeprefix('/')}_url"
    return {"type": kind, kind: {"url": url}}


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


def _read_as_data_url(command: str, name: str) -> str:
    try:
        content = Path(name).expanduser().read_bytes()
    except (OSError, RuntimeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidArgumentError(command, f"cannot read {name}: {reason}") from error
    return f"data:{_type_of(command, name, content)};base64,{base64.b64encode(content).decode()}"


def _type_of(command: str, name: str, content: bytes) -> str:
    """Of what is no picture by its name: what it is its server will find out."""
    if command == "/image":
        return Image.MIME[look_at_header(content, name).format or ""]
    if command == "/file":
        return "application/pdf"
    kind = command.removeprefix("/")
    guessed = mimetypes.guess_type(name)[0] or ""
    return guessed if guessed.startswith(f"{kind}/") else f"{kind}/mp4"
