"""Splits a text that may begin with a thought into the thought and the answer, in whatever pieces it comes.

Only a tag's token is a tag: one that is merely spelled out, as in a thought about tags, is text, both to the engine's
guides and here. Only newlines, which may be next to a tag, and incomplete tags are held back.
"""

from typing import Literal

from keepsight.frontend.prompt.thought_text import Thought

# In this order: the opening tag may still come; it came; the closing tag came, or no opening tag can come any more.
State = Literal["undecided", "thought", "answer"]


class ThoughtSplitter:
    """Splits the text of one answer."""

    def __init__(self, thought: Thought) -> None:
        self._form = thought.form
        self.state: State = "thought" if thought.is_open else "undecided"
        self._held = ""
        self._is_behind_tag = thought.is_open and not thought.has_words
        # Tags whose tokens have come. Their text may come later: the `TextStreamer` before us holds back text that may
        # begin a stop string.
        self._tags = set[str]()

    def push(self, text: str, tag: str = "", *, is_last: bool = False) -> tuple[str, str]:
        """Return what is certain of the thought, and of the answer. `tag`: the tag that the token is, if it is one."""
        self._held += text
        self._tags.add(tag)
        if self.state == "undecided":
            self._decide(is_last)
        thought = self._take_thought(is_last) if self.state == "thought" else ""
        return thought, self._take(len(self._held)) if self.state == "answer" else ""

    def _decide(self, is_last: bool) -> None:
        begun, opening = self._held.lstrip(), self._form.opening
        may_open = opening in self._tags
        if may_open and begun.startswith(opening):
            self._held = begun.removeprefix(opening)
            self.state, self._is_behind_tag = "thought", True
        elif is_last or (begun and not (may_open and opening.startswith(begun))):
            self.state = "answer"

    def _take_thought(self, is_last: bool) -> str:
        if self._form.closing not in self._tags:
            return self._take(len(self._held if is_last else self._held.rstrip("\n")))
        end = self._held.find(self._form.closing)
        if end < 0:
            return self._take(len(self._held) if is_last else 0)
        thought = self._take(end).rstrip("\n")
        self._held = self._held.removeprefix(self._form.closing)
        self.state, self._is_behind_tag = "answer", True
        return thought

    def _take(self, length: int) -> str:
        taken, self._held = self._held[:length], self._held[length:]
        if self._is_behind_tag:
            taken = taken.lstrip("\n")
            self._is_behind_tag = not taken
        return taken
