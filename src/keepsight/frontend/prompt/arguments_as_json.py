"""Arguments of a call as a JSON object. They are not looked at: as clients receive them, so the model writes them."""

import json
from collections.abc import Iterable, Sequence, Set

from keepsight.frontend.prompt.json_types import Allowance, ArgumentTypes, Schema


class ArgumentsAsJson:
    BEGIN = r"(?=\{)"

    def write(self, arguments: str) -> str:
        return arguments

    def find_types(self, schema: Schema, allowance: Allowance) -> ArgumentTypes:
        return {}

    def begin_reading(self, types: ArgumentTypes) -> "JsonReader":
        return JsonReader()

    def list_rules(self, schemas: Iterable[Schema]) -> Sequence[str]:
        return [f"args_{index}: %json {json.dumps(each)}" for index, each in enumerate(schemas)]

    def find_unenforced(self, schema: Schema) -> Set[str]:
        return set()  # llguidance itself refuses what it cannot enforce


class JsonReader:
    """Finds the end of a JSON object that comes in pieces."""

    def __init__(self) -> None:
        self.has_ended = False
        self._depth = 0
        self._is_in_quotes = self._is_behind_backslash = False

    def read(self, piece: str) -> tuple[str, int]:
        for place, character in enumerate(piece):
            if self._is_behind_backslash:
                self._is_behind_backslash = False
            elif character == "\\":
                self._is_behind_backslash = True
            elif character == '"':
                self._is_in_quotes = not self._is_in_quotes
            elif not self._is_in_quotes:
                self._depth += (character in "{[") - (character in "}]")
                if self._depth == 0:
                    self.has_ended = True
                    return piece[: place + 1], place + 1
        return piece, len(piece)

    def cut_off(self) -> str:
        return ""
