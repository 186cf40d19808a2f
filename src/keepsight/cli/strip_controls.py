"""What a model or a server says, as it may be shown: a terminal must not obey it."""

_CONTROLS = {code: None for code in (*range(0x20), 0x7F, *range(0x80, 0xA0)) if chr(code) not in "\n\t"}


def strip_controls(text: str) -> str:
    return text.translate(_CONTROLS)
