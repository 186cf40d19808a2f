"""A single download: follows and checks redirects, limits size and time, decompresses nothing.

Knows nothing of caches, and nothing of requests except their URLs. Every failure is raised as a UrlFault.
"""

import asyncio
import logging
import os
import ssl
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

import httpcore

from keepsight import __version__
from keepsight.authorities import report_unreadable_authorities
from keepsight.errors import MediaBusyError, MediaFetchError, MediaRefusedError, MediaTimeoutError, MediaTooLargeError
from keepsight.frontend.intake.connections import Connections
from keepsight.frontend.intake.http_caching import Freshness, Validators, find_header, read_freshness, read_validators
from keepsight.frontend.intake.network_guard import NetworkGuard
from keepsight.frontend.intake.web_url import UrlFault, WebUrl, parse_web_url

logger = logging.getLogger(__name__)
MAX_REDIRECTS = 3
REDIRECTS = frozenset({301, 302, 303, 307, 308})
PROXIES = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
# Servers send other words, too, such as "none" and "aws-chunked", with bytes as they are.
COMPRESSIONS = frozenset({"gzip", "x-gzip", "deflate", "br", "zstd", "compress", "x-compress"})
# Bytes received by all running downloads together.
MAX_IN_FLIGHT_BYTES = 2**30
# How many pieces (chunks, TLS records, packets) a body may come in: each takes time of the loop of all downloads.
MAX_SMALL_PIECES = 4096
BYTES_PER_FURTHER_PIECE = 256
# An `ssl.SSLError` is an OSError.
FAILURES = (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, OSError)
# Messages that replace the exceptions' own, which may contain addresses.
WORDS: Mapping[type[Exception], str] = {
    httpcore.ConnectError: "its server could not be reached",
    httpcore.ProtocolError: "its server violated HTTP, or closed the connection",
    httpcore.NetworkError: "its server closed the connection",
    httpcore.TimeoutException: "its server took too long",
    ssl.SSLError: "no TLS connection to its server could be set up",
}
HEADERS = [
    (b"User-Agent", f"keepsight/{__version__}".encode()),
    (b"Accept", b"image/*, */*;q=0.1"),
    # A few compressed bytes could expand to many.
    (b"Accept-Encoding", b"identity"),
]


@dataclass(frozen=True, slots=True)
class Fetched:
    # None if the version that the validators describe is still current.
    content: bytes | None
    validators: Validators
    freshness: Freshness


class UrlFetcher:
    """Belongs to the event loop in which it is first used. Uses no proxy, whatever the environment says."""

    def __init__(
        self,
        guard: NetworkGuard,
        max_bytes: int,
        timeout_seconds: float,
        ssl_context: ssl.SSLContext | None = None,
        max_in_flight_bytes: int = MAX_IN_FLIGHT_BYTES,
    ) -> None:
        """The timeout is for a whole download: host lookup, connecting, redirects and all bytes."""
        self._guard, self._max_bytes, self._timeout_seconds = guard, max_bytes, timeout_seconds
        self._max_in_flight_bytes, self._num_in_flight_bytes = max_in_flight_bytes, 0
        self._connections = Connections(guard, ssl_context or _trust_authorities())
        if set_ := [name for name in PROXIES if os.environ.get(name)]:
            logger.warning("%s: pictures' URLs are asked for without a proxy", ", ".join(set_))

    async def fetch(self, url: str, known: Validators | None = None) -> Fetched:
        """Download a URL. `known` has the validators of a version that the caller already holds."""
        try:
            async with asyncio.timeout(self._timeout_seconds):
                return await self._follow(parse_web_url(url), known)
        except TimeoutError as error:
            message = f"was not downloaded within {self._timeout_seconds:g} seconds"
            raise UrlFault(MediaTimeoutError, message) from error
        except FAILURES as error:
            raise _failure(_describe_error(error)) from error

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
        encoding = find_header(answer.headers, "content-encoding") or ""
        if not COMPRESSIONS.isdisjoint(each.strip().lower() for each in encoding.split(",")):
            raise _failure(f"its server sent it compressed ({encoding[:20]!r}), which was not requested")
        self._check_size(_announced_size(answer))
        content, num_pieces = bytearray(), 0
        try:
            async for piece in answer.aiter_stream():
                content += piece
                num_pieces += 1
                self._num_in_flight_bytes += len(piece)
                self._check_size(len(content))
                self._check_room()
                _check_pieces(num_pieces, len(content))
                await asyncio.sleep(0)  # thousands of pieces may come at once: other downloads go on in between
            return bytes(content)
        finally:
            self._num_in_flight_bytes -= len(content)

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise UrlFault(MediaTooLargeError, f"has more than the {self._max_bytes} bytes that a picture may have")

    def _check_room(self) -> None:
        if self._num_in_flight_bytes > self._max_in_flight_bytes:
            raise UrlFault(MediaBusyError, "was not downloaded: too much else is being downloaded; try again")


def _next_url(url: WebUrl, answer: httpcore.Response) -> WebUrl:
    location = find_header(answer.headers, "location")
    if location is None:
        raise _failure(f"its server answered {answer.status} without a Location")
    # Bytes beyond ASCII are sent back unchanged: most servers mean UTF-8, and the others recognize their own bytes.
    following = url.join(location.encode("latin-1").decode(errors="surrogateescape"))
    if url.scheme == "https" and following.scheme == "http":
        raise UrlFault(MediaRefusedError, "redirects from https: to http:, which is not followed")
    return following


def _check_pieces(num_pieces: int, num_bytes: int) -> None:
    if num_pieces > MAX_SMALL_PIECES + num_bytes // BYTES_PER_FURTHER_PIECE:
        raise _failure(f"its server sends it in pieces that are too small: {num_bytes} bytes in {num_pieces}")


def _announced_size(answer: httpcore.Response) -> int:
    length = find_header(answer.headers, "content-length") or ""
    return int(length) if length.isascii() and length.isdigit() and len(length) < 20 else 0


def _trust_authorities() -> ssl.SSLContext:
    """Return a TLS context that trusts certifi's authorities and the system's, or those that the environment names."""
    context = httpcore.default_ssl_context()
    context.load_default_certs()
    report_unreadable_authorities()
    return context


def _describe_error(error: BaseException) -> str:
    """Describe a failure. A certificate error is quoted, as at most it names the host that was asked for."""
    if isinstance(error.__context__, ssl.SSLCertVerificationError):
        return f"its server's certificate is not trusted: {error.__context__.verify_message}"
    words = next(
        (words for kind, words in WORDS.items() if isinstance(error, kind)), "because of a fault of this machine"
    )
    return f"could not be downloaded: {words} ({type(error).__name__})"


def _failure(message: str) -> UrlFault:
    return UrlFault(MediaFetchError, message)
