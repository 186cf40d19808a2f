"""A page has the size that was announced, and shows everything that would be printed."""

import numpy as np
import pytest

from keepsight.errors import UnreadablePictureError
from keepsight.frontend.intake.read_document import read_document
from keepsight.frontend.pixels.render_page import render_page
from keepsight.requests import Pixels
from tests.frontend.sample_documents import Page, stream, write_pdf

WIDGET = (
    "<< /Type /Annot /Subtype /Widget /FT /Tx /T (name) /V (Filled) /Rect [50 50 250 90] /AP << /N 7 0 R >> /F 4 >>"
)
STAMP = "<< /Type /Annot /Subtype /Stamp /Rect [50 50 250 90] /AP << /N 7 0 R >> /F 4 >>"


def render(pdf: bytes) -> list[Pixels]:
    return [render_page(pdf, number, "file") for number in range(len(read_document(pdf, "file")))]


def colours(pixels: Pixels) -> set[tuple[int, ...]]:
    return set(map(tuple, np.unique(pixels.reshape(-1, 3), axis=0).tolist()))


def test_pages_are_as_large_as_was_told() -> None:
    pdf = write_pdf(Page(), Page(more="/Rotate 270"), Page(size=(333.3, 777.7)), Page(size=(14400, 1)))
    shapes = [(each.geometry.height, each.geometry.width, 3) for each in read_document(pdf, "file")]
    assert [each.shape for each in render(pdf)] == shapes


def test_what_nothing_is_drawn_on_is_white_and_text_is_black() -> None:
    empty, written = render(write_pdf(Page(), Page(["A report"])))
    assert colours(empty) == {(255, 255, 255)}
    assert (0, 0, 0) in colours(written)
    assert all(red == green == blue for red, green, blue in colours(written))


def test_red_is_red() -> None:
    red = stream("1 0 0 rg 0 0 595 842 re f")
    [pixels] = render(write_pdf(Page(more="/Contents 6 0 R"), more=[red]))
    assert (255, 0, 0) in colours(pixels)


@pytest.mark.parametrize("annotation", [WIDGET, STAMP])
def test_what_is_filled_in_and_what_is_stamped_on_is_shown(annotation: str) -> None:
    filled = stream("0 0 1 rg 0 0 200 40 re f", "/Type /XObject /Subtype /Form /BBox [0 0 200 40]")
    [pixels] = render(write_pdf(Page(more="/Annots [6 0 R]"), more=[annotation, filled]))
    assert (0, 0, 255) in colours(pixels)


def test_a_page_that_there_is_not_is_a_damaged_document() -> None:
    with pytest.raises(UnreadablePictureError):
        render_page(write_pdf(Page()), 1, "file")
