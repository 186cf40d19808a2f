"""The greetings that a frontend and an engine exchange before anything else.

    frontend: Hello     engine: Welcome, or a refusal: the frontend is not, or no longer, connected

The first two frames of a Hello and all of a refusal keep one form forever, so that two versions of this program can
still say why they are incompatible.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from keepsight.errors import HandshakeError, WireError
from keepsight.ipc.codec import UNREADABLE, Frame

# Must go up with every change of a greeting, or of what codec.py writes, including the message types.
PROTOCOL_VERSION = 15
_VERSION = b"%d" % PROTOCOL_VERSION
HELLO, WELCOME, REFUSED = b"H", b"W", b"X"
MAX_GREETING_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class Hello:
    frontend_id: str


@dataclass(frozen=True, slots=True)
class Welcome:
    """An engine's properties that its frontends need."""

    max_model_len: int
    # Whether the engine wants pixels of media that it is not known to hold before it asks for them. It does not if it
    # may find the media in a tier that is older than itself.
    accepts_unrequested_pixels: bool = True


G = TypeVar("G", Hello, Welcome)


def encode_hello(hello: Hello) -> list[Frame]:
    return [HELLO, _VERSION, msgspec.msgpack.encode(hello)]


def encode_welcome(welcome: Welcome) -> list[Frame]:
    return [WELCOME, _VERSION, msgspec.msgpack.encode(welcome)]


def encode_refusal(reason: str) -> list[Frame]:
    return [REFUSED, reason.encode("utf-8", "backslashreplace")]


def decode_hello(frames: Sequence[Frame]) -> Hello:
    """Decode a Hello. Raises HandshakeError on another version, WireError if it is no greeting."""
    hello = _decode_greeting(frames, Hello)
    if not hello.frontend_id:
        raise WireError("a frontend without a name")
    return hello


def decode_answer(frames: Sequence[Frame]) -> Welcome:
    """Decode the engine's answer to a Hello. Raises HandshakeError if it is a refusal."""
    if len(frames) == 2 and frames[0] == REFUSED:
        raise HandshakeError(bytes(frames[1]).decode("utf-8", "replace"))
    return _decode_greeting(frames, Welcome)


def _decode_greeting(frames: Sequence[Frame], type_: type[G]) -> G:
    kind, speaker, listener = (HELLO, "frontend", "engine") if type_ is Hello else (WELCOME, "engine", "frontend")
    if len(frames) < 2 or frames[0] != kind:
        raise WireError("the handshake must come first")
    if frames[1] != _VERSION:
        version = bytes(frames[1][:20]).decode("ascii", "backslashreplace")
        raise HandshakeError(
            f"the {speaker} speaks version {version} of the protocol, the {listener} {PROTOCOL_VERSION}"
        )
    if len(frames) != 3 or len(frames[2]) > MAX_GREETING_BYTES:
        raise WireError("not a greeting")
    try:
        return msgspec.msgpack.decode(frames[2], type=type_)
    except UNREADABLE as error:
        raise WireError(f"not a greeting: {error}") from error
