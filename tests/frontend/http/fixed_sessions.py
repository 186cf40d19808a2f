"""A session for each mechanism of the server that drawn ones reach by chance, if many are played."""

from collections.abc import Callable
from random import Random

from keepsight.frontend.http.direct_body_protocol import MAX_HEADERS, MAX_PIPELINED, MIN_DIRECT_BYTES
from keepsight.frontend.http.slow_client_limits import MAX_HEADER_BYTES
from tests.frontend.http.drawn_sessions import TRAILERS, UPGRADES, Asked, Invalid, Session, head_of

BODY = Random(0).randbytes(4 * MIN_DIRECT_BYTES)
# Of answers that neither the kernel's narrow buffers nor the server's hold.
LARGE = 120_000
# Some of `ClosingTransport`'s looks, at which a client that pauses must not be taken for one that has read everything.
PAUSE_SECONDS = 0.1


def _ask(
    name: str,
    *headers: str,
    body: bytes = b"",
    sent_body: bytes | None = None,
    size: int = 1,
    num_pieces: int = 0,
    mode: str = "collected",
    version: str = "1.1",
    expects: bool = False,
    answers_last: bool = False,
) -> Asked:
    length = [f"Content-Length: {len(body)}"] if sent_body is None else ["Transfer-Encoding: chunked"]
    path = f"/{mode}/{name}/{size}/{num_pieces}{'/close' * answers_last}"
    head = head_of(*length, *headers, first=f"POST {path} HTTP/{version}")
    closes = version == "1.0" or "Connection: close" in headers or answers_last
    return Asked(name, mode, "POST", body, head, body if sent_body is None else sent_body, size, expects, closes)


def _many(num_requests: int) -> list[Asked]:
    return [_ask(f"{number}") for number in range(num_requests)]


# Bodies


def body_read_directly() -> Session:
    return Session([_ask("direct", body=BODY), _ask("behind")], ending="keep")


def client_leaves_in_a_body_read_directly() -> Session:
    return Session([_ask("direct", body=BODY)], ending="reset", cut=len(BODY) // 2)


def body_awaited_with_100_continue() -> Session:
    asked = _ask("expects", "Expect: 100-continue", body=BODY[:70_000], expects=True)
    return Session([asked], ending="keep", is_patient=True)


def trailers() -> Session:
    chunked = b"5\r\nhello\r\n0\r\n" + TRAILERS[1] + b"\r\n"
    asked = [_ask(mode, body=b"hello", sent_body=chunked, mode=mode) for mode in ("collected", "received")]
    return Session(asked, is_at_once=True, ending="keep")


def upgrade_with_a_body() -> Session:
    upgrade = [_ask(f"{number}", UPGRADES[number].strip(), body=BODY[:50]) for number in range(2)]
    return Session([*upgrade, _ask("behind")], is_at_once=True, ending="keep")


# Pipelining


def more_requests_at_once_than_may_wait() -> Session:
    return Session(_many(2 * MAX_PIPELINED), is_at_once=True, ending="keep")


def refusal_behind_answers() -> Session:
    asked = [_ask("large", size=LARGE, num_pieces=30), _ask("small")]
    invalid = Invalid(head_of("no colon") + head_of())
    return Session(asked, invalid, is_narrow=True, pause_seconds=PAUSE_SECONDS)


def refusal_of_what_waits() -> Session:
    """Of a request with a valid head, behind an answer."""
    invalid = Invalid(head_of("Transfer-Encoding: chunked") + b"xyz\r\n")
    return Session([_ask("large", size=LARGE)], invalid, is_narrow=True, pause_seconds=PAUSE_SECONDS)


def client_leaves_while_requests_wait() -> Session:
    return Session([_ask("held", mode="held"), *_many(3)], ending="leave")


def client_resets_while_many_requests_wait() -> Session:
    return Session([_ask("held", mode="held"), *_many(2 * MAX_PIPELINED)], is_at_once=True, ending="reset")


def client_ends_while_a_body_waits() -> Session:
    return Session([_ask("held", mode="held"), _ask("waits", body=BODY[:300_000])], ending="fin")


# Ends


def old_client() -> Session:
    """Of HTTP/1.0, for which the connection ends the answer."""
    return Session([_ask("old", version="1.0", size=70_000, num_pieces=4)])


def last_answer_read_slowly() -> Session:
    asked = _ask("slow", "Connection: close", size=LARGE)
    return Session([asked], is_narrow=True, pause_seconds=PAUSE_SECONDS, ends_tls=True)


def last_stream_read_slowly() -> Session:
    asked = _ask("stream", "Connection: close", size=LARGE, num_pieces=4)
    return Session([asked], is_narrow=True, pause_seconds=PAUSE_SECONDS)


def huge_last_answer() -> Session:
    return Session([_ask("huge", "Connection: close", size=3_000_000)], reading="bursts")


def end_asked_for_by_the_app() -> Session:
    return Session([_ask("last", size=LARGE, answers_last=True)], is_narrow=True)


def empty_line_behind_the_last_request() -> Session:
    asked = _ask("last", "Connection: close", size=LARGE, num_pieces=30)
    return Session([asked], behind=b"\r\n", is_narrow=True, pause_seconds=PAUSE_SECONDS)


def answer_before_the_body() -> Session:
    """To a client that does not read before it has sent everything."""
    asked = _ask("early", "Connection: close", body=3 * BODY, mode="unread")
    return Session([asked], reading="late", pieces=(200_000,))


def request_behind_the_last_answer() -> Session:
    """It is sent once the connection's last request was answered, before that was complete."""
    early = _ask("early", "Connection: close", body=b"hello", mode="unread")
    return Session([], Invalid(early.head, may_be_answered=early, rest=early.body + head_of()))


def client_resets_when_idle() -> Session:
    return Session(_many(1), ending="drop")


def client_resets_among_answers() -> Session:
    """Each iteration of the server's event loop answers one, even the one in which it sees the reset."""
    asked = [_ask(f"{number}", size=0, mode="unread") for number in range(400)]
    return Session(asked, is_at_once=True, ending="reset", is_answered_first=True)


# Refusals


def body_broken_within_its_answer() -> Session:
    early = _ask("early", sent_body=b"", size=LARGE, num_pieces=30, mode="partly")
    invalid = Invalid(early.head + b"3\r\nabc\r\n", may_be_answered=early, rest=b"xyz\r\n" + head_of())
    return Session(_many(1), invalid, is_narrow=True, pause_seconds=PAUSE_SECONDS)


def body_broken_before_its_answer() -> Session:
    """The refusal waits for the client to read, so an answer behind it would be read."""
    early = _ask("early", sent_body=b"", mode="unread")
    asked = [_ask("large", size=60_000)]
    return Session(asked, Invalid(early.head + b"xyz\r\n"), is_narrow=True, pause_seconds=PAUSE_SECONDS)


def too_many_headers() -> Session:
    return Session(_many(1), Invalid(head_of(*["a:"] * (MAX_HEADERS + 1)), is_disputed=True))


def too_long_headers() -> Session:
    return Session(_many(1), Invalid(head_of("X: " + "a" * MAX_HEADER_BYTES), is_disputed=True))


def too_long_headers_in_pieces() -> Session:
    """They never end. What the server reads together with the request before them it does not count, but all else."""
    invalid = Invalid(head_of("X: " + "a" * 10 * MAX_HEADER_BYTES)[:-4], is_disputed=True)
    return Session(_many(1), invalid, pieces=(MAX_HEADER_BYTES // 2,))


def proxy_wanted() -> Session:
    return Session(_many(1), Invalid(head_of(first="CONNECT x:1 HTTP/1.1"), is_disputed=True))


FIXED: tuple[Callable[[], Session], ...] = (
    last_answer_read_slowly,
    last_stream_read_slowly,
    refusal_behind_answers,
    refusal_of_what_waits,
    body_broken_within_its_answer,
    body_broken_before_its_answer,
    huge_last_answer,
    answer_before_the_body,
    body_read_directly,
    client_leaves_in_a_body_read_directly,
    body_awaited_with_100_continue,
    trailers,
    upgrade_with_a_body,
    more_requests_at_once_than_may_wait,
    old_client,
    end_asked_for_by_the_app,
    empty_line_behind_the_last_request,
    request_behind_the_last_answer,
    client_resets_when_idle,
    client_resets_among_answers,
    client_leaves_while_requests_wait,
    client_resets_while_many_requests_wait,
    client_ends_while_a_body_waits,
    too_many_headers,
    too_long_headers,
    too_long_headers_in_pieces,
    proxy_wanted,
)
