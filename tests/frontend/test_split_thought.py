"""The thought is the text between the tokens of its tags; the rest is the answer."""

import re
from collections.abc import Iterable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepsight.frontend.prompt.thought_text import TAGS, Thought
from keepsight.frontend.split_thought import ThoughtSplitter

OPENING, CLOSING = ("<think>", "<think>"), ("</think>", "</think>")
fragments = st.sampled_from(["<think>", "</think>", "<", "</", "think", ">", "\n", " ", "<tool_call>"])
texts = st.lists(fragments | st.text(max_size=3), max_size=8).map("".join)


def split(tokens: Iterable[tuple[str, str]], is_open: bool) -> tuple[str, str]:
    """Split tokens, each given as its text and the tag that it is (or an empty string)."""
    splitter = ThoughtSplitter(Thought(TAGS, is_open))
    pieces = [splitter.push(*token) for token in tokens] + [splitter.push("", is_last=True)]
    return "".join(thought for thought, _ in pieces), "".join(answer for _, answer in pieces)


def spell(text: str) -> list[tuple[str, str]]:
    return [(character, "") for character in text]


def read(text: str) -> Iterator[tuple[str, str]]:
    """Split a text like a tokenizer that has a token for each tag."""
    return ((piece, piece if piece.endswith("think>") else "") for piece in re.split("(</?think>)", text))


@given(texts, texts, st.booleans())
def test_only_tag_tokens_delimit_a_thought_not_text_like_them(thought: str, answer: str, is_open: bool) -> None:
    opened = [] if is_open else [("\n", ""), OPENING]
    for behind in (spell(answer), [OPENING, *spell(answer), CLOSING]):
        rest = "".join(text for text, _ in behind)
        assert split([*opened, *spell(thought), CLOSING, *behind], is_open) == (thought.strip("\n"), rest.lstrip("\n"))
    assert split([*opened, *spell(thought)], is_open) == (thought.lstrip("\n"), "")
    assert split(spell(thought), is_open=False) == ("", thought)


@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
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
def test_a_thought_ends_with_its_tag_and_can_only_begin_an_answer(
    text: str, is_open: bool, expected: tuple[str, str]
) -> None:
    assert split(read(text), is_open) == expected


def test_newlines_after_words_in_the_prompt_are_part_of_the_thought() -> None:
    splitter = ThoughtSplitter(Thought(TAGS, is_open=True, has_words=True))
    assert splitter.push("\nIt is red.\n") == ("\nIt is red.", "")
    assert splitter.push("</think>", "</think>") == ("", "")


def test_text_is_sent_as_soon_as_it_is_certain() -> None:
    splitter = ThoughtSplitter(Thought(TAGS, is_open=True))
    assert splitter.push("Let me < 5 </think>") == ("Let me < 5 </think>", "")
    assert splitter.push(".\n\n") == (".", "")
    assert splitter.push("or") == ("\n\nor", "")
    assert splitter.push("</think>", "</think>") == ("", "")
    assert splitter.push("\nRed") == ("", "Red")


def test_the_text_of_a_tag_may_come_with_later_tokens() -> None:
    pieces = [("", "<think>"), ("<thi", ""), ("nk>Hm", ""), ("", "</think>"), ("</", ""), ("think>Red", "")]
    assert split(pieces, is_open=False) == ("Hm", "Red")
