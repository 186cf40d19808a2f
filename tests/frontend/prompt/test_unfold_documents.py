"""A PDF is replaced by its pages, in order; everything else keeps its place."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from keepsight.errors import MediaTooLargeError, TooManyPicturesError
from keepsight.frontend.prompt import unfold_documents as module
from keepsight.frontend.prompt.read_messages import Conversation, DocumentPart, PicturePart, read_messages
from keepsight.frontend.prompt.unfold_documents import unfold_documents

BREAKPOINT = {"prompt_cache_breakpoint": {"mode": "explicit"}}
TWO_PAGES = {"type": "file", "file": {"file_data": "data:application/pdf;base64,AAAA", "filename": "a.pdf"}}
UNNAMED = {"type": "file", "file": {"file_data": "AAAA"}}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
IMAGE = {"type": "image", "image": ""}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def pages_of(part: DocumentPart) -> list[tuple[PicturePart, str]]:
    return [(PicturePart("first page", part.field), "one"), (PicturePart("second page", part.field), "<two>")]


def unfold(*contents: Any, check_count: Callable[[Sequence[PicturePart]], object] = len) -> Conversation:
    read = read_messages([{"role": "user", "content": content} for content in contents])
    return unfold_documents(read, pages_of, lambda text: text.replace("<", "< "), check_count)


def test_each_page_has_a_heading_a_picture_and_its_text() -> None:
    unfolded = unfold([text("What is it?"), TWO_PAGES])
    assert unfolded.messages[0]["content"] == [
        text("What is it?"),
        *(text("[a.pdf, page 1 of 2]\n"), IMAGE, text("\none\n")),
        *(text("[a.pdf, page 2 of 2]\n"), IMAGE, text("\n< two>\n")),
        text("[end of a.pdf]\n"),
    ]
    assert [each.source for each in unfolded.pictures] == ["first page", "second page"]
    assert not unfolded.has_documents


def test_one_without_a_name_is_the_document() -> None:
    texts = [part.get("text") for part in unfold([UNNAMED]).messages[0]["content"]]
    assert (texts[0], texts[-1]) == ("[page 1 of 2]\n", "[end of the document]\n")


def test_in_a_name_nothing_is_a_special_token_either() -> None:
    named = {"type": "file", "file": {"file_data": "AAAA", "filename": "<a>.pdf"}}
    texts = [part.get("text") for part in unfold([named]).messages[0]["content"]]
    assert (texts[0], texts[-1]) == ("[< a>.pdf, page 1 of 2]\n", "[end of < a>.pdf]\n")


def test_too_many_pages_are_refused_before_the_next_document_is_looked_at() -> None:
    counted = []

    def refuse(pictures: Sequence[PicturePart]) -> None:
        counted.append(len(pictures))
        if len(pictures) > 3:
            raise TooManyPicturesError("file", "too many")

    with pytest.raises(TooManyPicturesError):
        unfold([UNNAMED] * 5, check_count=refuse)
    assert counted == [2, 4]


def test_pictures_behind_the_last_document_are_counted_with_its_pages() -> None:
    counted = list[int]()
    unfold([UNNAMED, PICTURE, PICTURE], check_count=lambda pictures: counted.append(len(pictures)))
    assert counted == [2, 4]


def test_the_texts_of_all_documents_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CHARACTERS", 120)
    assert unfold([text("x" * 200), UNNAMED])
    with pytest.raises(MediaTooLargeError) as refused:
        unfold([UNNAMED, UNNAMED])
    assert refused.value.field == "messages[0].content[1].file.file_data"


def test_pictures_around_it_stay_in_their_order_and_texts_alone_as_they_were() -> None:
    unfolded = unfold("A text.", [PICTURE, TWO_PAGES, PICTURE])
    assert unfolded.messages[0]["content"] == "A text."
    url = PICTURE["image_url"]["url"]  # type: ignore[index]
    assert [each.source for each in unfolded.pictures] == [url, "first page", "second page", url]


def test_what_lies_before_a_breakpoint_lies_before_it() -> None:
    unfolded = unfold([PICTURE, TWO_PAGES | BREAKPOINT, text("And now?"), PICTURE])
    [breakpoint_] = unfolded.breakpoints
    before = unfolded.messages[0]["content"][: breakpoint_.num_parts]
    assert before[-1] == text("[end of a.pdf]\n")
    assert breakpoint_.num_pictures == 3
    assert [each.pin_seconds > 0 for each in unfolded.pictures] == [True, True, True, False]
