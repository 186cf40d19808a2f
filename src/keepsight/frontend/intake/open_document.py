"""The bytes of a PDF behind pypdfium2's interface, opened but not drawn, and how large its pages are drawn.

PDFium knows no threads, so whoever has one open has it for himself.
"""

import math
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from types import ModuleType
from typing import TYPE_CHECKING

from keepsight.errors import UnreadablePictureError, UnsupportedPictureError
from keepsight.frontend.intake.open_picture import TEXT_HINT, looks_like_text, refusing_damage

if TYPE_CHECKING:
    from pypdfium2 import PdfDocument, PdfPage

# Pixels of a page's longer side, however large it would be printed: letters of a full page can be read.
PAGE_SIDE = 1568
# Some begin with what a mail or a printer has put before them.
_MAX_BYTES_BEFORE = 1024
# PDFium's, of what wants another password than none.
_ENCRYPTED = 4

_alone = threading.Lock()


def looks_like_a_document(data: bytes) -> bool:
    """To whoever was not told that it is one."""
    return data.startswith(b"%PDF-")


@contextmanager
def open_document(data: bytes, field: str) -> Iterator["PdfDocument"]:
    """With the forms that are filled in."""
    pdfium = _import_pdfium(field)
    if b"%PDF-" not in data[:_MAX_BYTES_BEFORE]:
        hint = TEXT_HINT if looks_like_text(data) else ": a picture? (image_url)"
        raise UnreadablePictureError(field, f"{len(data)} bytes that are no PDF{hint}")
    with _alone, refusing_damage(field, len(data), "PDF"), closing(_open(pdfium, data, field)) as document:
        document.init_forms()
        yield document


def scale_of(page: "PdfPage", field: str) -> float:
    """Slightly less, or the longer side might be rounded up to one pixel more."""
    longer = max(page.get_size())
    if not longer > 0:
        raise UnreadablePictureError(field, "a PDF with a page of which nothing would be seen")
    return math.nextafter(PAGE_SIDE / longer, 0)


def _open(pdfium: ModuleType, data: bytes, field: str) -> "PdfDocument":
    try:
        document: PdfDocument = pdfium.PdfDocument(data)
    except pdfium.PdfiumError as error:
        if error.err_code == _ENCRYPTED:
            raise UnsupportedPictureError(field, "a PDF that asks for a password; send it without one") from error
        raise
    return document


def _import_pdfium(field: str) -> ModuleType:
    try:
        import pypdfium2
    except ImportError as error:
        message = "PDFs are not read here, as pypdfium2 is missing: pip install 'keepsight[pdf]'"
        raise UnsupportedPictureError(field, message) from error
    module: ModuleType = pypdfium2
    return module
