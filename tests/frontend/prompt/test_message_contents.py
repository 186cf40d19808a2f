from keepsight.frontend.prompt.message_contents import join_contents, join_texts


def test_contents_are_joined_with_nothing_between_them_where_one_is_empty() -> None:
    part, empty = {"type": "text", "text": "b"}, {"type": "text", "text": ""}
    assert join_contents("", "b") == "b"
    assert join_contents([empty], [part]) == [part]
    assert join_contents([{"type": "image"}], "b") == [{"type": "image"}, part]
    assert join_contents("a", [part, part]) == [{"type": "text", "text": "a\n\nb"}, part]


def test_the_texts_of_parts_are_lines_but_for_empty_ones() -> None:
    parts = [{"type": "text", "text": text} for text in ("", "a", "", "b\n")]
    assert join_texts([*parts, {"type": "image", "image": ""}]) == "a\nb\n"
    assert join_texts(" a") == " a"
