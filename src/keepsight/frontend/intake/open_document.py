"""Opens the bytes of a PDF with pypdfium2, without drawing, and decides how large its pages are drawn.

PDFium is not thread-safe, so only one PDF is open at a time.
"""

import math
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from types import ModuleType
from typing import TYPE_CHECKING

from keepsight.errors import UnreadablePictureError, UnsupportedPictureError
from keepsight.frontend.intake.open_picture import hint_for_text, translating_parser_errors

if TYPE_CHECKING:
    from pypdfium2 import PdfDocument, PdfPage

# Pixels of a page's longer side, whatever its printed size: the letters of a full page are legible.
PAGE_SIDE = 1568
# Some files begin with bytes that a mail program or a printer driver put before the PDF.
_MAX_BYTES_BEFORE = 1024
# PDFium's error code for a PDF that needs a password.
_ENCRYPTED = 4

_alone = threading.Lock()


def may_be_a_document(data: bytes) -> bool:
    """Return whether this can be read as a PDF. Files of other kinds may contain the same bytes by chance."""
    return b"%PDF-" in data[:_MAX_BYTES_BEFORE]


@contextmanager
def open_document(data: bytes, field: str) -> Iterator["PdfDocument"]:
    """Open a PDF, including the contents of its filled-in forms."""
    pdfium = _import_pdfium(field)
    if not data:
        raise UnreadablePictureError(field, "the PDF has 0 bytes")
    if not may_be_a_document(data):
        hint = hint_for_text(data) or ": a picture? (send it as one)"
        raise UnreadablePictureError(field, f"{len(data)} bytes that are not a PDF{hint}")
    with _alone, translating_parser_errors(field, len(data), "PDF"), closing(_open(pdfium, data, field)) as document:
        document.init_forms()
        yield document


def scale_of(page: "PdfPage", field: str) -> float:
    """Return the scale for a page, slightly reduced, or the longer side might be rounded up to one pixel more."""
    longer = max(page.get_size())
    if not longer > 0:
        raise UnreadablePictureError(field, "a PDF with a page that has no visible area")
    return math.nextafter(PAGE_SIDE / longer, 0)


def _open(pdfium: ModuleType, data: bytes, field: str) -> "PdfDocument":
    try:
        document: PdfDocument = pdfium.PdfDocument(data)
    except pdfium.PdfiumError as error:
        if error.err_code == _ENCRYPTED:
            raise UnsupportedPictureError(field, "a PDF that needs a password; send it without one") from error
        raise
    return document


def _import_pdfium(field: str) -> ModuleType:
    try:
        import pypdfium2
    except ImportError as error:
        message = "PDFs cannot be read here, as pypdfium2 is missing: pip install 'keepsight[pdf]'"
        raise UnsupportedPictureError(field, message) from error
    module: ModuleType = pypdfium2
    return module
