"""Downloads from a real local server that misbehaves like servers on the internet."""

import asyncio
import gzip
import socket
import ssl
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import h11
import pytest

from keepsight.errors import (
    MediaFetchError,
    MediaRefusedError,
    MediaTimeoutError,
    MediaTooLargeError,
    PictureError,
)
from keepsight.frontend.intake.fetch_url import PROXIES, Fetched, UrlFetcher
from keepsight.frontend.intake.http_caching import Freshness, Validators
from keepsight.frontend.intake.network_guard import Address, NetworkGuard, resolve_host
from keepsight.frontend.intake.web_url import UrlFault
from tests.frontend.picture_server import LOCAL, Asked, PictureServer, picture_server, response

# A self-signed certificate that only these tests trust.
CERTIFICATE = Path(__file__).parents[1] / "pictures_test.pem"
MAX_BYTES = 100_000
LONG = 20.0


@pytest.fixture
def server() -> Iterator[PictureServer]:
    with picture_server() as server:
        yield server


def guard_of(*addresses: str, asked: list[str] | None = None) -> NetworkGuard:
    """Return a guard that resolves every name to the given addresses, or by the system if there are none."""

    async def resolve(host: str, port: int) -> list[str]:
        if asked is not None:
            asked.append(host)
        return list(addresses) or await resolve_host(host, port)

    return NetworkGuard(allowed_networks=LOCAL, resolve=resolve)


def fetch(
    url: str,
    known: Validators | None = None,
    guard: NetworkGuard | None = None,
    seconds: float = LONG,
    tls: ssl.SSLContext | None = None,
) -> Fetched:
    async def run() -> Fetched:
        fetcher = UrlFetcher(guard or guard_of(), MAX_BYTES, seconds, tls or ssl.create_default_context())
        return await fetcher.fetch(url, known)

    return asyncio.run(run())


def fault_of(url: str, guard: NetworkGuard | None = None, seconds: float = LONG) -> PictureError:
    with pytest.raises(UrlFault) as caught:
        fetch(url, guard=guard, seconds=seconds)
    return caught.value.under("url")


def redirect_to(location: str, status: int = 302, **headers: str) -> bytes:
    return response(b"", status, Location=location, **headers)


# Responses ----------------------------------------------------------------------------------------------------


def test_the_body_comes_with_what_the_origin_says_of_keeping_it(server: PictureServer) -> None:
    url = server.serve("/a", response(b"picture", ETag='"1"', Last_Modified="today", Cache_Control="max-age=60"))
    assert fetch(url) == Fetched(b"picture", Validators(url, '"1"', "today"), Freshness(60))


def test_a_body_in_chunks_comes_whole(server: PictureServer) -> None:
    chunks = b"3\r\npic\r\n4\r\nture\r\n0\r\n\r\n"
    url = server.serve("/a", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks)
    assert fetch(url).content == b"picture"


@pytest.mark.parametrize("encoding", ["aws-chunked", "none", "UTF-8", "identity, identity"])
def test_an_encoding_that_compresses_nothing_is_no_fault(server: PictureServer, encoding: str) -> None:
    assert fetch(server.serve("/a", response(b"picture", Content_Encoding=encoding))).content == b"picture"


def test_requests_reveal_nothing_about_the_client(server: PictureServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    fetch(server.serve("/a", response(b"picture", Set_Cookie="a=b")))
    [asked] = server.asked
    assert asked.headers.keys() == {"host", "user-agent", "accept", "accept-encoding", "connection"}
    assert asked.headers["accept-encoding"] == "identity"
    assert asked.headers["host"] == f"127.0.0.1:{server.port}"


def test_unchanged_content_is_not_sent_again(server: PictureServer) -> None:
    url = server.serve("/a", response(b"", 304, ETag='"1"', Cache_Control="max-age=5"))
    fetched = fetch(url, Validators(url, '"1"', "today"))
    assert (fetched.content, fetched.freshness) == (None, Freshness(5))
    assert server.asked[0].headers["if-none-match"] == '"1"'
    assert server.asked[0].headers["if-modified-since"] == "today"


def test_what_still_holds_keeps_the_validators_that_its_origin_does_not_say_again(server: PictureServer) -> None:
    url = server.serve("/a", response(b"", 304))
    known = Validators(url, '"1"', "today")
    assert fetch(url, known).validators == known
    server.serve("/a", response(b"", 304, ETag='"2"'))
    assert fetch(url, known).validators == Validators(url, '"2"', "today")


def test_not_modified_is_an_error_without_a_cached_copy(server: PictureServer) -> None:
    url = server.serve("/a", response(b"", 304))
    assert "answered 304" in fault_of(url).message


# Origin and redirects ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_followed(server: PictureServer, status: int) -> None:
    server.serve("/b/c", response(b"picture", ETag='"1"', Cache_Control="max-age=60"))
    url = server.serve("/a", redirect_to("b/c", status, Cache_Control="max-age=7"))
    # The redirect's own freshness counts too; the validators are those of the final URL.
    assert fetch(url) == Fetched(b"picture", Validators(server.url("/b/c"), '"1"', None), Freshness(7))


@pytest.mark.parametrize(
    ("path", "asked"), [("/äö", "/%C3%A4%C3%B6"), ("/\udcf8", "/%F8"), ("/my cat.png#x y", "/my%20cat.png")]
)
def test_the_place_of_a_redirect_may_have_characters_that_no_url_has(
    server: PictureServer, path: str, asked: str
) -> None:
    location = path.encode(errors="surrogateescape").decode("latin-1")
    server.serve(asked, response(b"picture"))
    assert fetch(server.serve("/a", redirect_to(location))).content == b"picture"


def test_validators_are_shown_only_to_the_place_that_gave_them(server: PictureServer) -> None:
    place = server.serve("/b", response(b"", 304))
    url = server.serve("/a", redirect_to(place))
    assert fetch(url, Validators(place, '"1"', None)).content is None
    assert ["if-none-match" in asked.headers for asked in server.asked] == [False, True]


def test_three_redirects_are_followed_and_no_more(server: PictureServer) -> None:
    server.serve("/0", response(b"picture"))
    for number in range(1, 5):
        server.serve(f"/{number}", redirect_to(f"/{number - 1}"))
    assert fetch(server.url("/3")).content == b"picture"
    assert "redirects more than 3 times" in fault_of(server.url("/4")).message
    server.serve("/loop", redirect_to("/loop"))
    assert "redirects more than 3 times" in fault_of(server.url("/loop")).message


class FirstAddressOnly(NetworkGuard):
    """Allows the test's own server, as if it were public, and nothing else on this machine."""

    num_judged = 0

    def _is_allowed(self, address: Address) -> bool:
        self.num_judged += 1
        return self.num_judged == 1 or super()._is_allowed(address)


@pytest.mark.parametrize(
    "location",
    [
        "http://169.254.169.254/latest/meta-data/",
        "http://[::1]:{port}/secret",
        "http://[::ffff:7f00:1]:{port}/secret",
        "http://localhost:{port}/secret",
        "http://2130706433:{port}/secret",
        "http://0x7f.1:{port}/secret",
        "file:///etc/passwd",
        "http://user@pictures.test:{port}/secret",
        "http://pictures.test:22/",
        "data:,secret",
        "http://a b/",
        "http://[",
        "//[::1]:{port}/secret",
    ],
)
def test_a_redirect_leads_nowhere_that_the_url_itself_could_not(server: PictureServer, location: str) -> None:
    server.serve("/secret", response(b"secret"))
    server.serve("/a", redirect_to(location.format(port=server.port)))
    error = fault_of(server.url("/a"), FirstAddressOnly())
    assert isinstance(error, MediaRefusedError)
    assert server.num_asked("/secret") == 0
    assert server.num_asked("/a") == 1


def test_a_redirect_leads_to_no_host_that_is_not_listed(server: PictureServer) -> None:
    server.serve("/secret", response(b"secret"))
    url = server.serve("/a", redirect_to(server.url("/secret", host="localhost")))
    error = fault_of(url, NetworkGuard(allowed_domains=[server.host], allowed_networks=LOCAL))
    assert isinstance(error, MediaRefusedError)
    assert "not among the hosts" in error.message
    assert server.num_asked("/secret") == 0


def test_a_name_that_changes_its_address_after_the_check_gains_nothing(server: PictureServer) -> None:
    server.serve("/a", response(b"picture"))
    answers = iter([["127.0.0.1"], ["169.254.169.254"]])

    async def resolve(_host: str, _port: int) -> list[str]:
        return next(answers)

    guard = NetworkGuard(allowed_networks=LOCAL, resolve=resolve)
    assert fetch(server.url("/a", "pictures.test"), guard=guard).content == b"picture"
    assert next(answers) == ["169.254.169.254"], "the name was looked up twice for one connection"
    assert server.asked[0].headers["host"] == f"pictures.test:{server.port}"


def test_each_redirect_is_followed_on_a_connection_that_was_checked_itself(server: PictureServer) -> None:
    asked: list[str] = []
    server.serve("/b", response(b"picture"))
    url = server.serve("/a", redirect_to("/b"))
    fetch(url, guard=guard_of(asked=asked))
    assert asked == ["127.0.0.1"] * 2


def test_the_next_address_is_tried_where_nobody_listens_at_the_first(server: PictureServer) -> None:
    server.serve("/a", response(b"picture"))
    guard = guard_of("127.0.0.2", "127.0.0.1")
    assert fetch(server.url("/a", "pictures.test"), guard=guard).content == b"picture"


@pytest.fixture
def tls_server() -> Iterator[PictureServer]:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(CERTIFICATE)
    with picture_server(context) as server:
        yield server


def trusting() -> ssl.SSLContext:
    return ssl.create_default_context(cafile=CERTIFICATE)


def test_authorities_of_the_environment_that_cannot_be_read_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "nowhere.pem"))
    UrlFetcher(guard_of(), MAX_BYTES, LONG)
    assert "SSL_CERT_FILE: no authorities can be read from " in caplog.text


def test_a_proxy_that_is_set_and_not_used_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
    UrlFetcher(guard_of(), MAX_BYTES, LONG)
    assert not caplog.messages
    monkeypatch.setenv("HTTPS_PROXY", "http://user:secret@10.0.0.1")
    UrlFetcher(guard_of(), MAX_BYTES, LONG)
    assert caplog.messages == ["HTTPS_PROXY: pictures' URLs are asked for without a proxy"]


def test_a_certificate_must_be_of_the_name_whatever_the_address(tls_server: PictureServer) -> None:
    tls_server.serve("/a", response(b"picture"))
    guard = guard_of("127.0.0.1")
    assert fetch(tls_server.url("/a", "pictures.test"), guard=guard, tls=trusting()).content == b"picture"
    with pytest.raises(UrlFault, match=r"certificate is not trusted: .*'others\.test'"):
        fetch(tls_server.url("/a", "others.test"), guard=guard, tls=trusting())
    with pytest.raises(UrlFault, match="certificate is not trusted: self-signed"):
        fetch(tls_server.url("/a", "pictures.test"), guard=guard)
    assert len(tls_server.asked) == 1


def test_a_redirect_from_https_to_http_is_refused(tls_server: PictureServer, server: PictureServer) -> None:
    server.serve("/b", response(b"picture"))
    tls_server.serve("/a", redirect_to(server.url("/b")))
    with pytest.raises(UrlFault, match="redirects from https: to http:"):
        fetch(tls_server.url("/a", "pictures.test"), guard=guard_of("127.0.0.1"), tls=trusting())
    assert not server.asked


# Limits of size and time --------------------------------------------------------------------------------------


def test_a_body_that_is_announced_too_large_is_not_read(server: PictureServer) -> None:
    async def announce(_asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 104857600\r\n\r\n")  # The body is never sent.

    error = fault_of(server.serve("/a", announce))
    assert isinstance(error, MediaTooLargeError)
    assert (error.status, "100000" in error.message) == (413, True)


def test_a_body_without_end_is_read_no_further_than_the_limit(server: PictureServer) -> None:
    num_written = 0

    async def pour(_asked: Asked, writer: asyncio.StreamWriter) -> None:
        nonlocal num_written
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"10000\r\n" + bytes(0x10000) + b"\r\n")
            await writer.drain()
            num_written += 0x10000

    assert isinstance(fault_of(server.serve("/a", pour)), MediaTooLargeError)
    assert num_written < 50 * MAX_BYTES, "the sockets' buffers are all that may come beyond the limit"


def test_all_that_is_coming_at_once_has_a_limit_and_what_has_come_does_not_count(server: PictureServer) -> None:
    has_begun = asyncio.Event()

    async def begin(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + bytes(900))
        while not asked.has_left() and not has_begun.is_set():
            await asyncio.sleep(0.005)
        writer.write(bytes(100))

    first, second = server.serve("/first", begin), server.serve("/second", response(bytes(500)))

    async def run() -> None:
        fetcher = UrlFetcher(guard_of(), MAX_BYTES, LONG, ssl.create_default_context(), max_in_flight_bytes=1200)
        for _ in range(3):
            assert (await fetcher.fetch(second)).content == bytes(500)
        slow = asyncio.create_task(fetcher.fetch(first))
        while not fetcher._num_in_flight_bytes:
            await asyncio.sleep(0.005)
        with pytest.raises(UrlFault, match="too much else") as caught:
            await fetcher.fetch(second)
        assert (caught.value.under("url").status, caught.value.under("url").code) == (429, "media_busy")
        has_begun.set()
        assert (await slow).content == bytes(1000)
        assert (await fetcher.fetch(second)).content == bytes(500)

    asyncio.run(run())


async def _pour(request: Asked, writer: asyncio.StreamWriter, head: bytes, piece: bytes) -> None:
    writer.write(head)
    while not request.has_left():
        writer.write(piece * 1000)
        await writer.drain()


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
DEAR = {
    "tiny pieces": (partial(_pour, head=CHUNKED, piece=b"1\r\nx\r\n"), "in pieces that are too small"),
    "interim answers": (partial(_pour, head=b"", piece=b"HTTP/1.1 103 E\r\n\r\n"), "too much before the picture"),
}


@pytest.mark.parametrize("name", DEAR)
def test_a_download_is_given_up_once_it_has_taken_too_many_steps(
    server: PictureServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_steps, next_event = 0, h11.Connection.next_event

    def count(connection: h11.Connection) -> object:
        nonlocal num_steps
        num_steps += 1
        return next_event(connection)

    monkeypatch.setattr(h11.Connection, "next_event", count)
    answer, message = DEAR[name]
    error = fault_of(server.serve("/a", answer))
    assert isinstance(error, MediaFetchError)
    assert message in error.message
    assert num_steps < 10_000


@pytest.mark.parametrize("name", DEAR)
def test_other_downloads_go_on_while_one_takes_many_steps(
    server: PictureServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_steps, most_steps, next_event = 0, 0, h11.Connection.next_event

    def count(connection: h11.Connection) -> object:
        nonlocal num_steps
        num_steps += 1
        return next_event(connection)

    async def stand_by() -> None:
        nonlocal num_steps, most_steps
        while True:
            most_steps, num_steps = max(most_steps, num_steps), 0
            await asyncio.sleep(0)

    async def run() -> None:
        bystander = asyncio.create_task(stand_by())
        fetcher = UrlFetcher(guard_of(), MAX_BYTES, LONG, ssl.create_default_context())
        with pytest.raises(UrlFault):
            await fetcher.fetch(url)
        bystander.cancel()

    monkeypatch.setattr(h11.Connection, "next_event", count)
    url = server.serve("/a", DEAR[name][0])
    asyncio.run(run())
    assert most_steps < 300


def test_a_body_may_come_in_many_small_pieces(server: PictureServer) -> None:
    chunks = b"1\r\na\r\n" * 4000 + b"200\r\n" + bytes(512) + b"\r\n0\r\n\r\n"
    assert fetch(server.serve("/a", CHUNKED + chunks)).content == b"a" * 4000 + bytes(512)


@pytest.mark.parametrize("num_bytes", [MAX_BYTES, MAX_BYTES + 1])
def test_the_limit_is_exact(server: PictureServer, num_bytes: int) -> None:
    url = server.serve("/a", response(bytes(num_bytes)))
    if num_bytes <= MAX_BYTES:
        assert fetch(url).content == bytes(num_bytes)
    else:
        assert isinstance(fault_of(url), MediaTooLargeError)


@pytest.mark.parametrize("stage", ["before the answer", "in its head", "in its body", "between redirects"])
def test_a_server_that_drips_is_left_when_the_time_is_over(server: PictureServer, stage: str) -> None:
    async def drip(_asked: Asked, writer: asyncio.StreamWriter) -> None:
        if stage == "in its head":
            writer.write(b"HTTP/1.1 200 OK\r\nA: ")
        elif stage == "in its body":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        while True:
            await asyncio.sleep(0.01)
            writer.write(b"" if stage == "before the answer" else b"a")
            await writer.drain()

    url = server.serve("/a", drip)
    if stage == "between redirects":
        url = server.serve("/b", redirect_to("/a"))
    error = fault_of(url, seconds=0.2)
    assert isinstance(error, MediaTimeoutError)
    assert "within 0.2 seconds" in error.message


def test_a_host_that_is_never_found_is_given_up_too() -> None:
    async def resolve(_host: str, _port: int) -> list[str]:
        await asyncio.Event().wait()
        raise AssertionError

    assert isinstance(fault_of("http://pictures.test/", NetworkGuard(resolve=resolve), 0.05), MediaTimeoutError)


# Connections --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rest", [response(b"the first picture's second answer"), b"more than was announced"])
def test_what_comes_after_an_answer_is_not_taken_for_that_of_the_next_url(server: PictureServer, rest: bytes) -> None:
    first, second = server.serve("/1", response(b"one") + rest), server.serve("/2", response(b"two"))

    async def run() -> list[bytes | None]:
        fetcher = UrlFetcher(guard_of(), MAX_BYTES, LONG, ssl.create_default_context())
        return [(await fetcher.fetch(url)).content for url in (first, second)]

    assert asyncio.run(run()) == [b"one", b"two"]


def test_a_server_that_leaves_an_idle_connection_fails_no_download(server: PictureServer) -> None:
    used = set[int]()

    async def answer_once(_asked: Asked, writer: asyncio.StreamWriter) -> None:
        if id(writer) in used:
            writer.close()
        used.add(id(writer))
        held.append(writer)  # so that no other gets its id
        writer.write(response(b"picture"))

    held: list[asyncio.StreamWriter] = []
    url = server.serve("/a", answer_once)

    async def run() -> None:
        fetcher = UrlFetcher(guard_of(), MAX_BYTES, LONG, ssl.create_default_context())
        for _ in range(4):
            assert (await fetcher.fetch(url)).content == b"picture"

    asyncio.run(run())


# Invalid responses --------------------------------------------------------------------------------------------


BROKEN = {
    "404": (response(b"no", 404), "answered 404"),
    "500": (response(b"", 500), "answered 500"),
    "204": (response(b"", 204), "answered 204"),
    "206": (response(b"part", 206), "answered 206"),
    "packed": (response(gzip.compress(bytes(50_000_000)), Content_Encoding="gzip"), "compressed ('gzip')"),
    "packed twice": (response(b"a", Content_Encoding="br, gzip"), "compressed"),
    "packed and more": (response(b"a", Content_Encoding="aws-chunked,GZIP"), "compressed"),
    "no HTTP": (b"SSH-2.0-OpenSSH\r\n\r\n", "its server violated HTTP"),
    "a redirect to nowhere": (response(b"", 302), "without a Location"),
    "a head without end": (b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 50_000, "could not be downloaded"),
    "two lengths": (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", "could not be downloaded"),
    "no number": (b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\nab", "could not be downloaded"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_an_invalid_response_is_a_client_error(server: PictureServer, name: str) -> None:
    answer, message = BROKEN[name]
    error = fault_of(server.serve("/a", answer))
    assert isinstance(error, MediaFetchError)
    assert message in error.message
    assert (error.field, error.status) == ("url", 400)


@pytest.mark.parametrize("head", ["Content-Length: 1000", "Transfer-Encoding: chunked"])
def test_a_body_that_ends_too_soon_is_no_picture(server: PictureServer, head: str) -> None:
    async def break_off(_asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 200 OK\r\n{head}\r\n\r\n".encode() + b"10\r\nabc")
        writer.close()

    assert "or closed the connection (RemoteProtocolError)" in fault_of(server.serve("/a", break_off)).message


def test_nobody_listening_is_told_without_the_address() -> None:
    error = fault_of("http://pictures.test:9/", guard_of("127.0.0.1"))
    assert isinstance(error, MediaFetchError | MediaRefusedError)
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))  # nobody else can listen there meanwhile
        error = fault_of(f"http://pictures.test:{unheard.getsockname()[1]}/", guard_of("127.0.0.1"))
    assert error.message == "could not be downloaded: its server could not be reached (ConnectError)"
