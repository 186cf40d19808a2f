"""Fetches media whose URL is their content (`data:`), and names a URL's scheme; what nothing fetches is refused."""

from keepsight.errors import InvalidArgumentError, UnsupportedFieldError
from keepsight.frontend.intake.read_data_url import read_data_url

# Length of the beginning in which a URL's colon is looked for.
_LONGEST_SCHEME = 20


def scheme_of(url: str) -> str | None:
    """Return the scheme in lower case, or None if this is no URL. The rest may be megabytes and is not examined."""
    scheme, colon, _ = url[:_LONGEST_SCHEME].partition(":")
    return scheme.lower() if colon and scheme == scheme.strip() else None


def fetch_data_url(url: str, field: str, max_bytes: int) -> bytes:
    """Return the content of a `data:` URL; one larger than `max_bytes` is refused before it is decoded."""
    scheme = scheme_of(url)
    if scheme is None:
        raise InvalidArgumentError(
            field, f"{_begin(url)} is not a URL; send a file as a data: URL, or to LLM as its bytes"
        )
    if scheme != "data":
        raise UnsupportedFieldError(field, f"{scheme}: URLs are not supported, send it as a data: URL")
    return read_data_url(url, field, max_bytes)


def _begin(url: str) -> str:
    return repr(url) if len(url) <= 80 else f"{url[:20]!r}..."
