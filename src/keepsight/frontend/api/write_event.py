"""Encodes the events of a streamed answer (`text/event-stream`)."""

import msgspec

_encode = msgspec.json.Encoder().encode
# Line breaks of Unicode, which JSON need not escape. By the standard they end no line of an event stream, but many
# clients split lines as Python's `str.splitlines` does (httpx's `iter_lines`), and would cut an event there.
_BREAKS = {each.encode(): f"\\u{ord(each):04x}".encode() for each in "\x85\u2028\u2029"}


def write_event(event: msgspec.Struct, name: str | None = None) -> bytes:
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    body = _encode(event)
    for line_break, escaped in _BREAKS.items():
        body = body.replace(line_break, escaped)
    return b"%sdata: %s\n\n" % (head, body)
