"""Encodes the events of a streamed answer (`text/event-stream`)."""

import msgspec

_encode = msgspec.json.Encoder().encode


def write_event(event: msgspec.Struct, name: str | None = None) -> bytes:
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return b"%sdata: %s\n\n" % (head, _encode(event))
