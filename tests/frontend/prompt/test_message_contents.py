from collections.abc import Iterable
from typing import Any

import pytest

from keepsight.frontend.prompt.message_contents import Content, join_all, join_texts


def test_contents_are_joined_with_nothing_between_them_where_one_is_empty() -> None:
    part, empty = {"type": "text", "text": "b"}, {"type": "text", "text": ""}
    assert join_all(("", "b")) == "b"
    assert join_all(([empty], [part])) == [part]
    assert join_all(("b", [])) == "b"
    assert join_all(("", [])) == []
    assert join_all(([{"type": "image"}], "b")) == [{"type": "image"}, part]
    assert join_all(("a", [part, part])) == [{"type": "text", "text": "a\n\nb"}, part]


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


class CountingSeparator(str):
    """Counts the characters of all texts that it joins."""

    num_written = 0

    def join(self, texts: Iterable[str]) -> str:
        text = super().join(texts)
        self.num_written += len(text)
        return text


@pytest.mark.parametrize("kind", ["texts", "parts", "both"])
def test_many_contents_are_joined_without_copying_a_text_again_for_each(kind: str) -> None:
    contents: list[Content] = ["ab", [text_part("ab")]] * 500
    contents = contents if kind == "both" else contents[kind == "parts" :: 2] * 2
    between = CountingSeparator(", ")
    joined = join_all(contents, between)
    [text] = [joined] if isinstance(joined, str) else [part["text"] for part in joined]
    assert text == ", ".join(["ab"] * 1000)
    assert between.num_written == len(text)


def test_of_many_contents_only_adjacent_texts_become_one() -> None:
    image = {"type": "image"}
    contents: list[Content] = ["", "a", [], [text_part("b"), text_part("c")], [image, image], [text_part("")], "d"]
    texts = [text_part("a, b"), text_part("c")]
    assert join_all(contents, ", ") == [*texts, image, image, text_part("d")]


def test_the_texts_of_parts_are_lines_but_for_empty_ones() -> None:
    parts = [{"type": "text", "text": text} for text in ("", "a", "", "b\n")]
    assert join_texts([*parts, {"type": "image", "image": ""}]) == "a\nb\n"
    assert join_texts(" a") == " a"
