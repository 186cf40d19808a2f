"""One download: redirects followed and checked, size and time limited, nothing unpacked.

Knows nothing of caches, and of requests no more than their URLs.  Whatever goes wrong is a UrlFault.
"""

import asyncio
import ssl
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

import httpcore

from keepsight import __version__
from keepsight.errors import MediaBusyError, MediaFetchError, MediaRefusedError, MediaTimeoutError, MediaTooLargeError
from keepsight.frontend.intake.connections import Connections
from keepsight.frontend.intake.http_caching import Freshness, Validators, find_header, read_freshness, read_validators
from keepsight.frontend.intake.network_guard import NetworkGuard
from keepsight.frontend.intake.web_url import UrlFault, WebUrl, parse_web_url

MAX_REDIRECTS = 3
REDIRECTS = frozenset({301, 302, 303, 307, 308})
# Of all downloads together, while they come.
MAX_COMING_BYTES = 2**30
FAILURES = (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, ssl.SSLError, OSError)
# Said in place of their own words, which may have addresses in them.
WORDS: Mapping[type[Exception], str] = {
    httpcore.ConnectError: "its server could not be reached",
    httpcore.ProtocolError: "its server answered otherwise than HTTP says, or broke off",
    httpcore.NetworkError: "its server broke off",
    httpcore.TimeoutException: "its server took too long",
    ssl.SSLError: "its server and this one found no way to speak in secret",
}
HEADERS = [
    (b"User-Agent", f"keepsight/{__version__}".encode()),
    (b"Accept", b"image/*, */*;q=0.1"),
    # A few bytes could be unpacked into many.
    (b"Accept-Encoding", b"identity"),
]


@dataclass(frozen=True, slots=True)
class Fetched:
    # None: what the validators describe still holds.
    content: bytes | None
    validators: Validators
    freshness: Freshness


class UrlFetcher:
    """Belongs to the event loop in which it is first used.  Asks no proxy, whatever the environment says."""

    def __init__(
        self,
        guard: NetworkGuard,
        max_bytes: int,
        timeout_seconds: float,
        ssl_context: ssl.SSLContext | None = None,
        max_coming_bytes: int = MAX_COMING_BYTES,
    ) -> None:
        """The timeout is of a whole download: looking up the host, connecting, redirects and all bytes."""
        self._guard, self._max_bytes, self._timeout_seconds = guard, max_bytes, timeout_seconds
        self._max_coming_bytes, self._num_coming_bytes = max_coming_bytes, 0
        self._connections = Connections(guard, ssl_context or _trust_authorities())

    async def fetch(self, url: str, known: Validators | None = None) -> Fetched:
        """`known`: of a version that the caller holds, and would rather not download again."""
        try:
            async with asyncio.timeout(self._timeout_seconds):
                return await self._follow(parse_web_url(url), known)
        except TimeoutError as error:
            message = f"was not downloaded within {self._timeout_seconds:g} seconds"
            raise UrlFault(MediaTimeoutError, message) from error
        except FAILURES as error:
            raise _failure(_tell(error)) from error

    async def close(self) -> None:
        await self._connections.close()

    async def _follow(self, url: WebUrl, known: Validators | None) -> Fetched:
        way = Freshness(float("inf"))
        for _ in range(MAX_REDIRECTS + 1):
            self._guard.check_url(url)
            held = known if known is not None and known.url == str(url) else None
            async with self._ask(url, held) as answer:
                way = way.at_most(read_freshness(answer.headers))
                if answer.status not in REDIRECTS:
                    content, validators = await self._read(answer, held), read_validators(answer.headers, str(url))
                    if content is None and held is not None:
                        validators = held.updated_by(validators)
                    return Fetched(content, validators, way)
                url = _next_url(url, answer)
        raise _failure(f"redirects more than {MAX_REDIRECTS} times")

    def _ask(self, url: WebUrl, held: Validators | None) -> AbstractAsyncContextManager[httpcore.Response]:
        headers = [(b"Host", url.authority.encode()), *HEADERS, *(held.as_headers() if held else ())]
        target = httpcore.URL(
            scheme=url.scheme.encode(), host=url.host.encode(), port=url.port, target=url.target.encode()
        )
        return self._connections.ask(target, headers)

    async def _read(self, answer: httpcore.Response, held: Validators | None) -> bytes | None:
        if answer.status == 304 and held is not None:
            return None
        if answer.status != 200:
            raise _failure(f"its server answered {answer.status}, not 200")
        encoding = find_header(answer.headers, "content-encoding") or "identity"
        if encoding.lower() != "identity":
            raise _failure(f"its server sent it compressed ({encoding[:20]!r}), which was not asked for")
        self._check_size(_announced_size(answer))
        content = bytearray()
        try:
            async for chunk in answer.aiter_stream():
                content += chunk
                self._num_coming_bytes += len(chunk)
                self._check_size(len(content))
                self._check_room()
            return bytes(content)
        finally:
            self._num_coming_bytes -= len(content)

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise UrlFault(MediaTooLargeError, f"has more than the {self._max_bytes} bytes that a picture may have")

    def _check_room(self) -> None:
        if self._num_coming_bytes > self._max_coming_bytes:
            raise UrlFault(MediaBusyError, "was not downloaded, as too much else is being downloaded; try again")


def _next_url(url: WebUrl, answer: httpcore.Response) -> WebUrl:
    location = find_header(answer.headers, "location")
    if location is None:
        raise _failure(f"its server answered {answer.status} without saying where to look")
    # Bytes beyond ASCII go on as they came: most servers mean UTF-8, and those that do not know them again.
    following = url.join(location.encode("latin-1").decode(errors="surrogateescape"))
    if url.scheme == "https" and following.scheme == "http":
        raise UrlFault(MediaRefusedError, "redirects from https: to http:, which is not followed")
    return following


def _announced_size(answer: httpcore.Response) -> int:
    length = find_header(answer.headers, "content-length") or ""
    return int(length) if length.isascii() and length.isdigit() and len(length) < 20 else 0


def _trust_authorities() -> ssl.SSLContext:
    """Those that come with the package, and the system's own, which SSL_CERT_FILE may name."""
    context = httpcore.default_ssl_context()
    context.load_default_certs()
    return context


def _tell(error: BaseException) -> str:
    """Of a certificate what is wrong in its own words, which at most name the host that was asked."""
    if isinstance(error.__context__, ssl.SSLCertVerificationError):
        return f"its server's certificate is not trusted: {error.__context__.verify_message}"
    words = next((words for kind, words in WORDS.items() if isinstance(error, kind)), "for a fault of this machine")
    return f"could not be downloaded: {words} ({type(error).__name__})"


def _failure(message: str) -> UrlFault:
    return UrlFault(MediaFetchError, message)
