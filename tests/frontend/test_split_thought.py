"""A thought and its answer are the same, in whatever pieces their text comes."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepsight.frontend.prompt.thought_text import TAGS, Thought
from keepsight.frontend.split_thought import ThoughtSplitter

fragments = st.sampled_from(["<think>", "</think>", "<", "</", "think", ">", "\n", " ", "<tool_call>"])
texts = st.lists(fragments | st.text(max_size=3), max_size=8).map("".join)


def split(pieces: Sequence[str], is_open: bool) -> tuple[str, str]:
    splitter = ThoughtSplitter(Thought(TAGS, is_open))
    said = [splitter.push(piece) for piece in pieces] + [splitter.push("", is_last=True)]
    return "".join(thought for thought, _ in said), "".join(answer for _, answer in said)


@given(texts, st.booleans(), st.lists(st.integers(0, 1000)))
def test_any_pieces_of_a_text_say_the_same(text: str, is_open: bool, places: list[int]) -> None:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    pieces = [text[start:end] for start, end in pairwise(edges)]
    whole = split([text], is_open)
    assert split(pieces, is_open) == split(list(text), is_open) == whole
    if is_open or text.lstrip().startswith("<think>"):
        inner, closing, behind = (text if is_open else text.lstrip().removeprefix("<think>")).partition("</think>")
        assert whole == ((inner.strip("\n"), behind.lstrip("\n")) if closing else (inner.lstrip("\n"), ""))
    else:
        assert whole == ("", text)


@pytest.mark.parametrize(
    ("text", "is_open", "said"),
    [
        ("Let me see.\n</think>\n\nRed.", True, ("Let me see.", "Red.")),
        ("\n</think>\n\nRed.", True, ("", "Red.")),
        ("Let me", True, ("Let me", "")),
        ("<think>\nLet me see.\n</think>\n\nRed.", False, ("Let me see.", "Red.")),
        ("\n<think>Hm</think>Red </think>", False, ("Hm", "Red </think>")),
        ("Red <think>Hm</think>", False, ("", "Red <think>Hm</think>")),
        ("<thin", False, ("", "<thin")),
        ("Hm </thin", True, ("Hm </thin", "")),
    ],
)
def test_a_thought_ends_with_its_tag_and_only_an_answer_s_beginning_is_one(
    text: str, is_open: bool, said: tuple[str, str]
) -> None:
    assert split([text], is_open) == split(list(text), is_open) == said


def test_newlines_behind_words_of_the_prompt_are_part_of_the_thought() -> None:
    splitter = ThoughtSplitter(Thought(TAGS, is_open=True, has_words=True))
    assert splitter.push("\nIt is red.\n</think>\nRed", is_last=True) == ("\nIt is red.", "Red")


def test_what_is_certain_is_told_at_once() -> None:
    splitter = ThoughtSplitter(Thought(TAGS, is_open=True))
    assert splitter.push("Let me < 5 </thought") == ("Let me < 5 </thought", "")
    assert splitter.push(".\n\n</th") == (".", "")
    assert splitter.push("ree") == ("\n\n</three", "")
    assert splitter.push("</think>\nRed") == ("", "Red")
