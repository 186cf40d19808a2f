"""How a call of a tool is written in a text: in the form that Google documents for Gemma 3, which has no tokens for it.

What a model is told, what it may answer and what is read out of its answer are all made of this.
"""

import json

MAX_NAME_LENGTH = 128
# OpenAI's characters, and the dot of MCP's names.  None of them is escaped in JSON.
NAME_PATTERN = rf"[a-zA-Z0-9_.-]{{1,{MAX_NAME_LENGTH}}}"
WHITE_SPACE = r"[ \n\t]{0,24}"
# Left to itself a model may put JSON between two of these.
_FENCES = rf"{WHITE_SPACE}(?:```[a-z_]{{0,16}}{WHITE_SPACE}){{0,2}}"
# Patterns, each of one character or of a run.
_TO_NAME = (r"\{", WHITE_SPACE, *'"name"', WHITE_SPACE, ":", WHITE_SPACE, '"')
_TO_ARGUMENTS = ('"', WHITE_SPACE, ",", WHITE_SPACE, *'"parameters"', WHITE_SPACE, ":", WHITE_SPACE)
# How a model may begin a call by itself.  What has gone as far as the name's end is no other JSON.
BEFORE_NAME = "".join((_FENCES, *_TO_NAME))
NAME_END = _TO_ARGUMENTS[0]
BEHIND_NAME = "".join(_TO_ARGUMENTS)
END_PATTERN = rf"{WHITE_SPACE}\}}"
TAIL_PATTERN = rf"{WHITE_SPACE}(?:```{WHITE_SPACE})?"


def write_opening(name: str) -> str:
    """All that is before the arguments."""
    return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "parameters": '


def write_call(name: str, arguments: str) -> str:
    return f"{write_opening(name)}{arguments}}}"


def match_unfinished_opening(name: str) -> str:
    """Of every beginning of `BEFORE_NAME`, a name and `BEHIND_NAME`, and of the whole."""
    rest = ""
    for pattern in reversed((*_TO_NAME, name, *_TO_ARGUMENTS)):
        rest = f"(?:{pattern}{rest})?"
    return f"{_FENCES}(?:`{{1,2}}|{rest})"
