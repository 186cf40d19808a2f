"""Finds the pages that replace a PDF: it is read once for all requests that send it, concurrently or later.

A page's name follows from the document's content and the version of the renderer, so a page that was seen before is
neither opened nor drawn.
"""

from collections.abc import Iterator
from functools import cache, partial
from importlib import metadata

from keepsight.errors import InvalidArgumentError
from keepsight.frontend.identity.hash_media import hash_content, hash_content_for_tenant, hash_values
from keepsight.frontend.identity.single_flight import SingleFlight
from keepsight.frontend.intake.read_document import Document, PageSource
from keepsight.frontend.pixels.make_pixels import DocumentLook, RunLook
from keepsight.frontend.prompt.read_messages import PicturePart
from keepsight.lru_cache import LruCache

# For what is known of documents, mostly their text: enough for some thousand papers.
MAX_KNOWN_BYTES = 64 * 2**20
# The approximate size of a page besides its text.
_BYTES_PER_PAGE = 256


class DocumentIdentifier:
    """Shared by all requests; may be used from several threads."""

    def __init__(self, algorithm: str, run_look: RunLook) -> None:
        self._algorithm, self._run_look = algorithm, run_look
        known = LruCache[str, Document](MAX_KNOWN_BYTES, _size_of)
        self._looks = SingleFlight(known.get_and_update, known.put_if_fits)

    def pages_of(self, part: PicturePart, cache_salt: str | None) -> Iterator[tuple[PicturePart, str]]:
        """Yield each page as a picture, and the text on it. `part` has been fetched."""
        content, field = part.source, part.field
        if not isinstance(content, bytes):
            raise InvalidArgumentError(field, f"must be a PDF's bytes or a URL, not {type(content).__name__}")
        name = hash_values(self._algorithm, content=hash_content(content, self._algorithm), drawn_by=_version())
        shown_as = hash_content_for_tenant(name, "document", cache_salt, self._algorithm)
        pages = self._looks.get_or_compute(shown_as, field, partial(self._run_look, DocumentLook(content, field)))
        for number, page in enumerate(pages):
            yield PicturePart(PageSource(content, name, number, page.geometry), field), page.text


@cache
def _version() -> str:
    """Return the version of pypdfium2; another one may draw pages or extract their text differently."""
    try:
        return metadata.version("pypdfium2")
    except metadata.PackageNotFoundError:
        return ""  # then no PDF is read


def _size_of(pages: Document) -> int:
    """Return an upper bound of the size in bytes; in text that is not ASCII, a character takes up to four."""
    return sum(_BYTES_PER_PAGE + (1 if page.text.isascii() else 4) * len(page.text) for page in pages)
