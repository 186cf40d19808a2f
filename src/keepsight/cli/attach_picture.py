"""Turns what was typed after `/image`, `/video`, `/audio` or `/file` into content parts of a message.

A file is sent as a data URL of its unchanged bytes, so that the server recognizes it in every later turn. A web
address is sent as it is; the server fetches it.
"""

import base64
import mimetypes
import shlex
from pathlib import Path
from typing import Any

from PIL import Image

from keepsight.cli.read_picture import check_header
from keepsight.errors import InvalidArgumentError

URL_STARTS = ("http://", "https://", "data:")


def attach(command: str, typed: str) -> list[dict[str, Any]]:
    """Return a part for each path or URL. A path with spaces may be quoted, shell-escaped, or bare if it is alone."""
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
        return False  # too long for a name, or the home of an unknown user


def _read_as_data_url(command: str, name: str) -> str:
    try:
        content = Path(name).expanduser().read_bytes()
    except (OSError, RuntimeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidArgumentError(command, f"cannot read {name}: {reason}") from error
    return f"data:{_type_of(command, name, content)};base64,{base64.b64encode(content).decode()}"


def _type_of(command: str, name: str, content: bytes) -> str:
    """Return a MIME type: a picture's from its header, others' from the name; the server detects the actual type."""
    if command == "/image":
        return Image.MIME[check_header(content, name).format or ""]
    if command == "/file":
        return "application/pdf"
    kind = command.removeprefix("/")
    guessed = mimetypes.guess_type(name)[0] or ""
    return guessed if guessed.startswith(f"{kind}/") else f"{kind}/mp4"
