"""Minimal PDFs."""

from collections.abc import Sequence
from typing import NamedTuple

A4 = (595, 842)


class Page(NamedTuple):
    lines: Sequence[str] = ()
    # In points, 72 per inch.
    size: tuple[float, float] = A4
    # Further entries of the page's dictionary.
    more: str = ""


def write_pdf(*pages: Page, more: Sequence[str] = (), trailer: str = "") -> bytes:
    """Write a PDF. `more`: further objects; the first of them has number 4 + 2 * pages."""
    first = 4
    kids = " ".join(f"{first + 2 * index} 0 R" for index in range(len(pages)))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R /AcroForm << /Fields [] >> >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for index, page in enumerate(pages):
        width, height = page.size
        entries = f"/Resources << /Font << /F1 3 0 R >> >> /Contents {first + 2 * index + 1} 0 R {page.more}"
        objects.append(f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 {width:g} {height:g}] {entries} >>")
        objects.append(stream(" ".join(_draw(line, height - 60 - 30 * place) for place, line in enumerate(page.lines))))
    return _with_places([*objects, *more], trailer)


def stream(content: str, more: str = "") -> str:
    return f"<< /Length {len(content)} {more} >>\nstream\n{content}\nendstream"


def _draw(line: str, top: float) -> str:
    escaped = line.replace("\\", r"\\").replace("(", r"\(").replace(")", r"\)")
    return f"BT /F1 20 Tf 50 {top:g} Td ({escaped}) Tj ET"


def _with_places(objects: Sequence[str], trailer: str) -> bytes:
    written, places = b"%PDF-1.4\n", []
    for number, each in enumerate(objects, start=1):
        places.append(len(written))
        written += f"{number} 0 obj\n{each}\nendobj\n".encode("latin-1")
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    size = len(objects) + 1
    end = f"xref\n0 {size}\n0000000000 65535 f \n{table}trailer\n<< /Size {size} /Root 1 0 R {trailer} >>\n"
    return written + f"{end}startxref\n{len(written)}\n%%EOF\n".encode("latin-1")
