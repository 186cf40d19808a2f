"""A PDF's pages are named after its content, and it is inspected once."""

import threading
from typing import Any

import pytest

from keepsight.errors import InvalidArgumentError, UnreadablePictureError
from keepsight.frontend.identity import identify_document
from keepsight.frontend.identity.hash_media import hash_content
from keepsight.frontend.identity.identify_document import DocumentIdentifier
from keepsight.frontend.intake.read_document import Document, PageSource, ShownPage
from keepsight.frontend.pixels.make_pixels import Look
from keepsight.frontend.prepare_request import RequestPreparer
from keepsight.frontend.prompt.read_messages import DocumentPart, read_messages
from keepsight.media import Geometry
from keepsight.sampling_params import SamplingParams
from tests.drawn import ask, by_url, draw

PAGES = (ShownPage(Geometry(20, 30), "one"), ShownPage(Geometry(30, 20), "two"))


class Reader:
    def __init__(self) -> None:
        self.num_read = 0

    def __call__(self, look: Look) -> Document:
        self.num_read += 1
        if look.source == b"damaged":
            raise UnreadablePictureError(look.field, "is damaged")
        return PAGES


@pytest.fixture
def reader() -> Reader:
    return Reader()


@pytest.fixture
def identifier(reader: Reader) -> DocumentIdentifier:
    return DocumentIdentifier("blake3", reader)


def names_of(identifier: DocumentIdentifier, content: bytes, salt: str | None = None) -> list[str]:
    pages = identifier.pages_of(DocumentPart(content, "file"), salt)
    return [hash_content(page.source, "blake3") for page, _ in pages if isinstance(page.source, PageSource)]


def test_each_page_is_a_picture_of_its_size_with_its_text(identifier: DocumentIdentifier) -> None:
    pages = list(identifier.pages_of(DocumentPart(b"content", "messages[0].content[1].file"), None))
    assert [text for _, text in pages] == ["one", "two"]
    assert {page.field for page, _ in pages} == {"messages[0].content[1].file"}
    sources: list[Any] = [page.source for page, _ in pages]
    assert [(each.document, each.number, each.geometry) for each in sources] == [
        (b"content", 0, PAGES[0].geometry),
        (b"content", 1, PAGES[1].geometry),
    ]


def test_pages_are_called_the_same_each_time_and_no_two_alike(identifier: DocumentIdentifier) -> None:
    names = names_of(identifier, b"content")
    assert names == names_of(identifier, b"content")
    assert len({*names, *names_of(identifier, b"other content"), hash_content(b"content", "blake3")}) == 5


def test_what_another_version_draws_is_another_picture(
    identifier: DocumentIdentifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = names_of(identifier, b"content")
    monkeypatch.setattr(identify_document, "_version", lambda: "another")
    assert not {*names} & {*names_of(identifier, b"content")}


def test_it_is_looked_at_once_but_by_each_tenant(identifier: DocumentIdentifier, reader: Reader) -> None:
    asking = [threading.Thread(target=names_of, args=(identifier, b"content")) for _ in range(8)]
    for each in asking:
        each.start()
    for each in asking:
        each.join()
    assert reader.num_read == 1
    names_of(identifier, b"content", "a tenant")
    assert reader.num_read == 2


def test_one_that_is_refused_is_looked_at_again(identifier: DocumentIdentifier, reader: Reader) -> None:
    for _ in range(2):
        with pytest.raises(UnreadablePictureError):
            names_of(identifier, b"damaged")
    assert reader.num_read == 2


def test_a_source_that_is_no_file_is_refused(identifier: DocumentIdentifier) -> None:
    with pytest.raises(InvalidArgumentError, match="not list"):
        list(identifier.pages_of(DocumentPart([1], "file"), None))


def test_no_document_is_recognized_where_nobody_may_wait_though_it_was_shown_as_a_picture_before(
    preparer: RequestPreparer,
) -> None:
    """Only a worker can tell a document's pages."""
    picture = by_url(draw(43).picture)
    preparer.prepare_chat(read_messages(ask(picture)), SamplingParams())
    assert preparer.recognize(read_messages(ask(picture)), None) is not None
    file = {"type": "file", "file": {"file_data": picture["image_url"]["url"]}}
    assert preparer.recognize(read_messages(ask(file)), None) is None
