"""How a model writes what it thinks before it answers: between two tags, the first of which a prompt may have written.

Which tags they are the chat template shows; whether an answer can begin with a thought, the end of the prompt.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ThoughtForm:
    """Newlines beside the tags belong to them, as templates write them and take them off again."""

    opening: str
    closing: str

    @property
    def tags(self) -> tuple[str, str]:
        return self.opening, self.closing


# Qwen's, DeepSeek's and most others'.
TAGS = ThoughtForm("<think>", "</think>")


@dataclass(frozen=True, slots=True)
class Thought:
    """That an answer may begin with."""

    form: ThoughtForm
    # The prompt has opened it, and the answer is in it from its first word on.
    is_open: bool
    # And has words of it: newlines behind them are no tag's.
    has_words: bool = False


def find_thought(form: ThoughtForm, prompt: str, begun: str = "") -> Thought | None:
    """`begun`: what the prompt has of the answer already, whose beginning is not to come any more."""
    if begun.strip():
        return _find_begun(form, begun.lstrip())
    written = prompt.rstrip()
    if written.endswith(form.closing):
        return None
    return Thought(form, is_open=written.endswith(form.opening))


def _find_begun(form: ThoughtForm, begun: str) -> Thought | None:
    """A tag that stands elsewhere is only spoken of."""
    if not begun.startswith(form.opening) or form.closing in begun:
        return None
    return Thought(form, is_open=True, has_words=begun.strip() != form.opening)
