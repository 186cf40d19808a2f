"""Parses tool calls out of an answer: text goes in, split anywhere; events come out as soon as they are certain.

An answer is text, or calls, which in some forms may follow text.  The grammar of the answer ensures that calls are
complete, so nothing is checked here: text between two calls, and after the last, has no meaning.
"""

import functools
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from keepsight.frontend.prompt.call_text import BARE, NAME_PATTERN, CallForm


@dataclass(frozen=True, slots=True)
class AnswerText:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsText:
    """A piece of the arguments of the call that was begun last."""

    text: str


Event = AnswerText | CallBegun | ArgumentsText
# Before the first call, while one can still come; text to the end; inside the arguments of a call; after a call.
State = Literal["undecided", "text", "arguments", "between"]


@dataclass(frozen=True, slots=True)
class _Patterns:
    """`unfinished` matches the end of a text that may still grow into an opening."""

    opening: re.Pattern[str]
    unfinished: re.Pattern[str]
    next_opening: re.Pattern[str]

    @classmethod
    @functools.cache
    def of(cls, form: CallForm) -> "_Patterns":
        name, start = f"(?P<name>{NAME_PATTERN})", "" if form.can_follow_text else r"\A"
        # Arguments are a JSON object.
        opening = rf"{form.before_name}{name}{form.behind_name}(?=\{{)"
        unfinished = rf"{start}(?:{form.match_unfinished_opening(name)})\Z"
        return cls(*map(re.compile, (start + opening, unfinished, rf"\A{form.end}{opening}")))


class CallParser:
    """Parser of one answer.  `names`: the functions that it may call; if there are none, the answer is text."""

    def __init__(self, names: Collection[str], form: CallForm = BARE) -> None:
        self._names, self._form, self._patterns = names, form, _Patterns.of(form)
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
        """End the input: what only began like a call is text."""
        if self._state == "undecided":
            self._state = "text"
        return self.push("")

    def _find_next(self) -> Event | None:
        if self._state == "undecided":
            return self._find_beginning()
        if self._state == "between":
            return self._begin_call(self._patterns.next_opening)
        if not self._held:
            return None
        return AnswerText(self._take(len(self._held))) if self._state == "text" else self._find_arguments()

    def _find_beginning(self) -> Event | None:
        """Return the beginning of the first call, or text that is certain not to be part of one."""
        if (begun := self._begin_call(self._patterns.opening)) is not None:
            return begun
        num_certain = self._find_where_call_may_begin()
        if num_certain == 0:
            return None
        if not self._form.can_follow_text:
            self._state = "text"
        return AnswerText(self._take(num_certain))

    def _begin_call(self, opening: re.Pattern[str]) -> Event | None:
        """Begin the next call that opens; if text stands before it, return that first."""
        begun = next((each for each in self._search(opening) if each["name"] in self._names), None)
        if begun is None:
            return None
        if begun.start():
            return AnswerText(self._take(begun.start()))
        self._take(begun.end())
        self._state, self._arguments = "arguments", _JsonObject()
        return CallBegun(begun["name"])

    def _find_where_call_may_begin(self) -> int:
        begun = filter(self._may_have_name, self._search(self._patterns.unfinished))
        return next((each.start() for each in begun), len(self._held))

    def _search(self, pattern: re.Pattern[str]) -> Iterator[re.Match[str]]:
        """Yield all matches, overlapping ones too: one that is no call may contain the beginning of one that is."""
        found = pattern.search(self._held)
        while found is not None:
            yield found
            is_last = found.start() == len(self._held)
            found = None if is_last else pattern.search(self._held, found.start() + 1)

    def _may_have_name(self, begun: re.Match[str]) -> bool:
        if begun["name"] is None:
            return True
        if begun.end("name") < len(self._held):
            return begun["name"] in self._names
        return any(name.startswith(begun["name"]) for name in self._names)

    def _find_arguments(self) -> ArgumentsText:
        end = self._arguments.find_end(self._held)
        if end is not None:
            self._state = "between"
        return ArgumentsText(self._take(len(self._held) if end is None else end))

    def _take(self, length: int) -> str:
        taken, self._held = self._held[:length], self._held[length:]
        return taken


class _JsonObject:
    """Finds the end of a JSON object that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_in_quotes = self._is_behind_backslash = False

    def find_end(self, piece: str) -> int | None:
        """Return where in `piece` the object ends, if it does; `piece` follows those of earlier calls."""
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
