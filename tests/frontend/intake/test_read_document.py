"""The pages and text of a PDF, and the errors for those that cannot be shown."""

import random
import sys
from contextlib import suppress

import pytest

from keepsight.errors import PictureError, PictureTooLargeError, UnreadablePictureError, UnsupportedPictureError
from keepsight.frontend.intake import read_document as module
from keepsight.frontend.intake.open_document import PAGE_SIDE
from keepsight.frontend.intake.read_document import ShownPage, check_document, read_document
from keepsight.media import Geometry
from tests.frontend.sample_documents import Page, stream, write_pdf

ENCRYPTED = f"/Encrypt << /Filter /Standard /V 1 /R 2 /O ({'o' * 32}) /U ({'u' * 32}) /P -4 >> /ID [<00><00>]"


def test_each_page_s_size_and_text_are_told() -> None:
    pdf = write_pdf(Page(["A report", "(of two lines)"]), Page(size=(400, 100)), Page(["turned"], more="/Rotate 90"))
    assert read_document(pdf, "file") == (
        ShownPage(Geometry(1109, PAGE_SIDE), "A report\n(of two lines)"),
        ShownPage(Geometry(PAGE_SIDE, 392), ""),
        ShownPage(Geometry(PAGE_SIDE, 1109), "turned"),
    )


@pytest.mark.parametrize("size", [(1, 14400), (14400, 1), (0.01, 0.01), (1568, 1568), (333.3, 777.7)])
def test_the_longer_side_of_any_page_is_as_long(size: tuple[float, float]) -> None:
    [page] = read_document(write_pdf(Page(size=size)), "file")
    assert max(page.geometry.width, page.geometry.height) == PAGE_SIDE
    check_document((page,), "file")


def test_what_cannot_be_shown_is_left_out_of_a_text() -> None:
    [page] = read_document(write_pdf(Page(["a\x07b"])), "file")
    assert page.text == "ab"


@pytest.mark.parametrize(
    ("character", "read"), [("\xa0", " "), ("\u3000", " "), ("\u200c", "\u200c"), ("\u202e", ""), ("\uf0b7", "")]
)
def test_words_that_another_space_parts_stay_parted(character: str, read: str) -> None:
    font = "/Resources << /Font << /F1 << /Type /Font /Subtype /Type1 /BaseFont /Helvetica /ToUnicode 6 0 R >> >> >>"
    codes = f"begincmap 1 beginbfchar <41> <{ord(character):04x}> endbfchar endcmap"
    [page] = read_document(write_pdf(Page(["10Akm"], more=font), more=[stream(codes)]), "file")
    assert page.text == f"10{read}km"


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (b"", UnreadablePictureError, "the PDF has 0 bytes"),
        (b"\x89PNG\r\n\x1a\n", UnreadablePictureError, r"a picture\? \(send it as one\)"),
        (b"%PDF-1.7 and nothing else", UnreadablePictureError, "damaged or truncated"),
        (write_pdf(), UnreadablePictureError, "damaged or truncated"),
        (write_pdf(Page(more="/CropBox [2000 2000 2100 2100]")), UnreadablePictureError, "no visible area"),
        (write_pdf(Page(["secret"]), trailer=ENCRYPTED), UnsupportedPictureError, "a password"),
    ],
)
def test_what_is_none_is_refused_by_its_field(data: bytes, error: type[PictureError], message: str) -> None:
    with pytest.raises(error, match=message) as refused:
        read_document(data, "messages[0].content[1].file.file_data")
    assert refused.value.field == "messages[0].content[1].file.file_data"


def test_one_with_too_many_pages_or_too_much_text_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    pdf = write_pdf(*[Page(["word"])] * 3)
    monkeypatch.setattr(module, "MAX_PAGES", 2)
    with pytest.raises(PictureTooLargeError, match="3 pages, at most 2"):
        read_document(pdf, "file")
    monkeypatch.setattr(module, "MAX_PAGES", 3)
    monkeypatch.setattr(module, "MAX_TEXT_BYTES", 11)
    with pytest.raises(PictureTooLargeError, match="11 bytes of text"):
        read_document(pdf, "file")


@pytest.mark.parametrize(
    "pages",
    [
        (),
        (ShownPage(Geometry(0, PAGE_SIDE), ""),),
        (ShownPage(Geometry(1, PAGE_SIDE + 1), ""),),
        (ShownPage(Geometry(1, 1), "x" * (module.MAX_TEXT_BYTES + 1)),),
        (ShownPage(Geometry(1, 1), ""),) * (module.MAX_PAGES + 1),
    ],
)
def test_what_no_pdf_can_be_is_not_believed(pages: tuple[ShownPage, ...]) -> None:
    with pytest.raises(PictureError):
        check_document(pages, "file")


def test_without_its_library_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pypdfium2", None)
    with pytest.raises(UnsupportedPictureError, match=r"pip install 'keepsight\[pdf\]'"):
        read_document(write_pdf(Page()), "file")


@pytest.mark.parametrize("seed", range(4))
def test_a_damaged_one_is_read_or_refused_in_our_own_words(seed: int) -> None:
    chosen, pdf = random.Random(seed), write_pdf(Page(["A report"]), Page(["of two pages"], more="/Rotate 90"))
    for _ in range(100):
        damaged = bytearray(pdf)
        for _ in range(chosen.randint(1, 8)):
            damaged[chosen.randrange(len(damaged))] = chosen.randrange(256)
        with suppress(PictureError):
            check_document(read_document(bytes(damaged[: chosen.randint(1, len(pdf))]), "file"), "file")
