"""How a model writes its thoughts before it answers: between two tags, the first of which may be in the prompt.

The chat template shows which tags they are; the end of the prompt shows whether an answer can begin with a thought.
"""

from dataclasses import dataclass
from typing import NamedTuple


class ThoughtForm(NamedTuple):
    """The tags around a thought. Newlines next to them belong to them, as templates write them and strip them again."""

    opening: str
    closing: str


# Used by Qwen, DeepSeek and most others.
TAGS = ThoughtForm("<think>", "</think>")


@dataclass(frozen=True, slots=True)
class Thought:
    """A thought that an answer may begin with."""

    form: ThoughtForm
    # The prompt has opened it, so the answer is inside it from its first word on.
    is_open: bool
    # The prompt also has words of it, so newlines after them do not belong to the tag.
    has_words: bool = False


def find_thought(form: ThoughtForm, prompt: str, begun: str = "") -> Thought | None:
    """Return the thought that the answer may begin with, if any. `begun`: the part of the answer already in the prompt,
    which the model will not write again.
    """
    if begun.strip():
        return _find_begun(form, begun.lstrip())
    written = prompt.rstrip()
    if written.endswith(form.closing):
        return None
    return Thought(form, is_open=written.endswith(form.opening))


def _find_begun(form: ThoughtForm, begun: str) -> Thought | None:
    """Find a thought that the begun answer is still in. A tag that is not at its beginning is only mentioned there."""
    if not begun.startswith(form.opening) or form.closing in begun:
        return None
    return Thought(form, is_open=True, has_words=begun.strip() != form.opening)
