"""Reads calls of tools out of an answer: text in, in any pieces; events out, as soon as they are certain.

An answer is calls from its beginning on, or a text to its end.  Its grammar saw to it that calls are written to their
ends, so that nothing is checked here: what is between two calls, and behind the last, says nothing.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from keepsight.frontend.prompt.call_text import (
    BEFORE_NAME,
    BEHIND_NAME,
    END_PATTERN,
    NAME_PATTERN,
    match_unfinished_opening,
)

_NAME = f"(?P<name>{NAME_PATTERN})"
# Arguments are an object.
_OPENING = re.compile(rf"{BEFORE_NAME}{_NAME}{BEHIND_NAME}(?=\{{)")
_NEXT_OPENING = re.compile(rf"{END_PATTERN}{_OPENING.pattern}")
_UNFINISHED = re.compile(match_unfinished_opening(_NAME))


@dataclass(frozen=True, slots=True)
class Said:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsSaid:
    """Of the call that was begun last."""

    text: str


Event = Said | CallBegun | ArgumentsSaid
State = Literal["undecided", "text", "arguments", "between"]


class CallParser:
    """Of one answer; `names` are of the functions that it may call.  Where there are none it is a text."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._state: State = "undecided" if names else "text"
        self._held = ""
        self._arguments = _JsonObject()

    @property
    def is_amid_arguments(self) -> bool:
        return self._state == "arguments"

    def push(self, text: str) -> list[Event]:
        self._held += text
        events = []
        while (event := self._find_next()) is not None:
            events.append(event)
        return events

    def read(self, text: str, *, is_last: bool) -> list[Event]:
        events = self.push(text)
        return events + self.finish() if is_last else events

    def finish(self) -> list[Event]:
        """Once no more comes: what has only begun like a call was none."""
        if self._state == "undecided":
            self._state = "text"
        return self.push("")

    def _find_next(self) -> Event | None:
        if self._state == "undecided":
            return self._find_beginning()
        if self._state == "between":
            return self._begin_call(_NEXT_OPENING)
        if not self._held:
            return None
        return Said(self._take(len(self._held))) if self._state == "text" else self._find_arguments()

    def _find_beginning(self) -> Event | None:
        if (begun := self._begin_call(_OPENING)) is not None:
            return begun
        if self._may_begin_call():
            return None
        self._state = "text"
        return self._find_next()

    def _begin_call(self, opening: re.Pattern[str]) -> CallBegun | None:
        found = opening.match(self._held)
        if found is None or found["name"] not in self._names:
            return None
        self._take(found.end())
        self._state, self._arguments = "arguments", _JsonObject()
        return CallBegun(found["name"])

    def _may_begin_call(self) -> bool:
        found = _UNFINISHED.fullmatch(self._held)
        if found is None or found["name"] is None:
            return found is not None
        if found.end("name") < len(self._held):
            return found["name"] in self._names
        return any(name.startswith(found["name"]) for name in self._names)

    def _find_arguments(self) -> ArgumentsSaid:
        end = self._arguments.find_end(self._held)
        if end is not None:
            self._state = "between"
        return ArgumentsSaid(self._take(len(self._held) if end is None else end))

    def _take(self, length: int) -> str:
        taken, self._held = self._held[:length], self._held[length:]
        return taken


class _JsonObject:
    """One that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_in_quotes = self._is_behind_backslash = False

    def find_end(self, piece: str) -> int | None:
        """Within `piece`, which follows those of earlier calls."""
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
                    return place + 1
        return None
