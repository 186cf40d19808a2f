"""A text that may begin with a thought becomes the thought and the answer, in whatever pieces it comes.

Held back is only what may yet be a tag, or a newline beside one.
"""

from typing import Literal

from keepsight.frontend.prompt.thought_text import Thought

# Before a first tag, where it can still come; behind it; behind the second, or where no first one came.
State = Literal["undecided", "thought", "answer"]


class ThoughtSplitter:
    """Of one answer."""

    def __init__(self, thought: Thought) -> None:
        self._form = thought.form
        self.state: State = "thought" if thought.is_open else "undecided"
        self._held = ""
        self._is_behind_tag = thought.is_open and not thought.has_words

    def push(self, text: str, *, is_last: bool = False) -> tuple[str, str]:
        """What is certain of the thought, and of the answer."""
        self._held += text
        if self.state == "undecided":
            self._decide(is_last)
        thought = self._take_thought(is_last) if self.state == "thought" else ""
        return thought, self._take(len(self._held)) if self.state == "answer" else ""

    def _decide(self, is_last: bool) -> None:
        begun, opening = self._held.lstrip(), self._form.opening
        if begun.startswith(opening):
            self._held = begun.removeprefix(opening)
            self.state, self._is_behind_tag = "thought", True
        elif is_last or not opening.startswith(begun):
            self.state = "answer"

    def _take_thought(self, is_last: bool) -> str:
        end = self._held.find(self._form.closing)
        if end < 0:
            return self._take(len(self._held) if is_last else self._count_certain())
        thought = self._take(end).rstrip("\n")
        self._held = self._held.removeprefix(self._form.closing)
        self.state, self._is_behind_tag = "answer", True
        return thought

    def _count_certain(self) -> int:
        lengths = range(len(self._form.closing) - 1, 0, -1)
        begun = next((length for length in lengths if self._held.endswith(self._form.closing[:length])), 0)
        return len(self._held[: len(self._held) - begun].rstrip("\n"))

    def _take(self, length: int) -> str:
        taken, self._held = self._held[:length], self._held[length:]
        if self._is_behind_tag:
            taken = taken.lstrip("\n")
            self._is_behind_tag = not taken
        return taken
