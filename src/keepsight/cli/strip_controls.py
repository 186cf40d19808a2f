"""Removes control characters from what a model or a server says: a terminal must not obey them."""

_CONTROLS = {code: None for code in (*range(0x20), 0x7F, *range(0x80, 0xA0)) if chr(code) not in "\n\t"}


def strip_controls(text: str) -> str:
    return text.translate(_CONTROLS)
