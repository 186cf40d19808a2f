"""Parses tool calls out of an answer: text goes in, split anywhere; events come out as soon as they are certain.

An answer is text, or calls, which in some forms may follow text. The grammar of the answer ensures that calls are
complete, so nothing is checked here: text between two calls, and after the last, has no meaning.
"""

import functools
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from keepsight.frontend.prompt.call_text import BARE, NAME_PATTERN, CallForm
from keepsight.frontend.prompt.json_types import ArgumentTypes


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
NO_TYPES: Mapping[str, ArgumentTypes] = {}
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
        opening = f"{form.pattern_before_name}{name}{form.pattern_behind_name}{form.arguments.BEGIN}"
        unfinished = rf"{start}(?:{form.match_unfinished_opening(name)})\Z"
        return cls(*map(re.compile, (start + opening, unfinished, rf"\A{form.pattern_of_end}{opening}")))


class CallParser:
    """Parser of one answer. `names`: the functions that it may call; if there are none, the answer is text.

    `types`: what is known of their parameters.
    """

    def __init__(
        self, names: Collection[str], form: CallForm = BARE, types: Mapping[str, ArgumentTypes] = NO_TYPES
    ) -> None:
        self._names, self._form, self._patterns, self._types = names, form, _Patterns.of(form), types
        self._state: State = "undecided" if names else "text"
        self._held = ""
        self._arguments = form.arguments.begin_reading({})

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
        """End the input: what only began like a call is text, and arguments that have not ended are cut off."""
        if self._state == "undecided":
            self._state = "text"
        last = self._arguments.cut_off() if self._state == "arguments" else ""
        return [ArgumentsText(last)] if last else self.push("")

    def _find_next(self) -> Event | None:
        if self._state == "undecided":
            return self._find_beginning()
        if self._state == "between":
            return self._begin_call(self._patterns.next_opening)
        if not self._held:
            return None
        return AnswerText(self._take(len(self._held))) if self._state == "text" else self._read_arguments()

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
        types = self._types.get(begun["name"], {})
        self._state, self._arguments = "arguments", self._form.arguments.begin_reading(types)
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

    def _read_arguments(self) -> ArgumentsText | None:
        text, length = self._arguments.read(self._held)
        self._take(length)
        if self._arguments.has_ended:
            self._state = "between"
        return ArgumentsText(text) if text else None

    def _take(self, length: int) -> str:
        taken, self._held = self._held[:length], self._held[length:]
        return taken
