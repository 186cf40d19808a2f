"""Reads a PDF: how large each of its pages is drawn, and what text is on it.

Draws nothing: a page is drawn only when its pixels are needed.
"""

import math
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from keepsight.errors import PictureTooLargeError, UnreadablePictureError
from keepsight.frontend.intake.open_document import PAGE_SIDE, open_document, scale_of
from keepsight.media import Geometry

if TYPE_CHECKING:
    from pypdfium2 import PdfPage

# More than any model reads at once.
MAX_PAGES, MAX_TEXT_BYTES = 1000, 2 * 2**20
# PDFium's character for a hyphen at the end of a line.
_HYPHEN = "\ufffe"
# Kept although not printable; includes the joiners and non-joiners of Persian and Hindi letters.
_KEPT = "\n\t\u200c\u200d"


@dataclass(frozen=True, slots=True)
class ShownPage:
    # In pixels.
    geometry: Geometry
    text: str


# The pages of a PDF.
Document = tuple[ShownPage, ...]


@dataclass(frozen=True, slots=True)
class PageSource:
    """A page of a PDF, which is drawn when its pixels are needed."""

    document: bytes
    # The name of the document's content.
    name: str
    # Counted from 0.
    number: int
    geometry: Geometry


def read_document(data: bytes, field: str) -> Document:
    """Return the pages; refuse a PDF that cannot be served. `field` is the caller's name for it."""
    with open_document(data, field) as document:
        _check_num_pages(len(document), field)
        pages: list[ShownPage] = []
        left = MAX_TEXT_BYTES
        for number in range(len(document)):
            with closing(document[number]) as page:
                pages.append(ShownPage(_measure(page, field), _read_text(page)))
            left -= len(pages[-1].text.encode())
            if left < 0:
                raise PictureTooLargeError(field, f"a PDF with more than {MAX_TEXT_BYTES} bytes of text")
    return tuple(pages)


def check_document(pages: Document, field: str) -> None:
    """Check the pages of a PDF, which may come from a media worker."""
    _check_num_pages(len(pages), field)
    sides = (side for page in pages for side in (page.geometry.width, page.geometry.height))
    num_bytes = sum(len(page.text.encode()) for page in pages)
    if not all(1 <= side <= PAGE_SIDE for side in sides) or num_bytes > MAX_TEXT_BYTES:
        raise UnreadablePictureError(field, "a PDF with impossible page sizes or text")


def _check_num_pages(num_pages: int, field: str) -> None:
    if num_pages < 1:
        raise UnreadablePictureError(field, "a PDF without pages")
    if num_pages > MAX_PAGES:
        message = f"a PDF of {num_pages} pages, at most {MAX_PAGES} are read; send those that are asked about"
        raise PictureTooLargeError(field, message)


def _measure(page: "PdfPage", field: str) -> Geometry:
    """Return the size in pixels, rounded as PDFium does."""
    scale = scale_of(page, field)
    width, height = (math.ceil(side * scale) for side in page.get_size())
    return Geometry(max(1, width), max(1, height))


def _read_text(page: "PdfPage") -> str:
    with closing(page.get_textpage()) as written:
        text = written.get_text_bounded().replace("\r\n", "\n").replace(_HYPHEN, "-")
    return "".join(map(_plain, text)).strip()


def _plain(character: str) -> str:
    """Drop invisible characters, which may hide text; joiners are part of words, and other spaces separate them."""
    if character.isprintable() or character in _KEPT:
        return character
    return " " if character.isspace() else ""
