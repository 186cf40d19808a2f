"""Draws what clients send over one connection each, valid and invalid, and knows what has to be answered."""

import hashlib
from dataclasses import dataclass, field
from random import Random

from keepsight.frontend.http.direct_body_protocol import MAX_HEADERS
from keepsight.frontend.http.slow_client_limits import MAX_HEADER_BYTES

# How the app answers: when it has read the body (in one of two ways), after a part of it, or before it.
MODES = ("collected", "received", "partly", "unread")
# Sizes of bodies and of answers: those that arrive with their head, those for which reading or writing pauses, those
# that are read directly.
SIZES = (0, 1, 50, 3000, 70_000, 300_000, 700_000)
WEIGHTS = (6, 6, 8, 4, 2, 1, 1)
# Of an answer that the kernel's buffers do not hold.
HUGE = 4_000_000
TRAILERS = (b"X-Sum: 1\r\n", b"Authorization: Bearer one\r\nX-Sum: y\r\n")
UPGRADES = (
    "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQ\r\n",
    "Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: dGhlIHNhbXBsZQ==\r\nSec-WebSocket-Version: 13\r\n",
)


@dataclass
class Asked:
    """A valid request. Its path tells the app what to answer, so that each answer belongs to one request only."""

    name: str
    mode: str
    method: str
    body: bytes
    head: bytes
    # The body as sent.
    sent_body: bytes
    size: int
    expects: bool
    closes: bool

    @property
    def is_old(self) -> bool:
        return b" HTTP/1.0\r\n" in self.head

    @property
    def is_early(self) -> bool:
        """Whether it may be answered before its body is complete."""
        return self.mode in ("partly", "unread")

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.body).hexdigest() if self.mode in ("collected", "received") else "unknown"


@dataclass
class Invalid:
    sent: bytes
    # h11 accepts it.
    is_disputed: bool = False
    # Its head is valid, so it may be answered before its body is seen.
    may_be_answered: Asked | None = None
    # Sent once that is being answered.
    rest: bytes = b""


@dataclass
class Session:
    asked: list[Asked] = field(default_factory=list)
    invalid: Invalid | None = None
    # Sends all its valid requests in one piece.
    is_at_once: bool = False
    # What it sends once its last request is being answered, and what needs no answer.
    behind: bytes = b""
    # What the client does when it has all answers: `finish` (waits for the end), `keep` (leaves), `drop` (resets); or
    # when it has sent everything, or in the middle: `fin`, `reset`, `leave`.
    ending: str = "finish"
    # Leaves once its first answer has begun.
    is_answered_first: bool = False
    # How many bytes it sends before it leaves.
    cut: int | None = None
    # The lengths of the pieces that it sends, again and again.
    pieces: tuple[int, ...] = (2**30,)
    pauses: bool = False
    # `eager`, `late` (when all is sent), or `bursts`.
    reading: str = "eager"
    # How long it pauses, once, when it has begun to read.
    pause_seconds: float = 0
    # Whether the kernel holds little of what either side sends.
    is_narrow: bool = False
    # Waits for `100 Continue`.
    is_patient: bool = False
    # Answers the end of TLS, before which the server does not close by itself at once.
    ends_tls: bool = False

    @property
    def is_judged_whole(self) -> bool:
        """Whether the client waits for all answers."""
        return self.ending in ("finish", "keep", "drop")


def content_of(name: str, digest: str, size: int) -> bytes:
    unit = f"{name} {digest}\n".encode()
    return (unit * (size // len(unit) + 1))[:size]


def draw_session(rng: Random) -> Session:
    session = Session()
    num_requests = rng.choice((1, 1, 2, 3, 5, 45 if rng.random() < 0.1 else 4))
    # Few large things in long sessions.
    weights = WEIGHTS if num_requests < 10 else (1, 1, 1, 0, 0, 0, 0)
    for number in range(num_requests):
        session.asked.append(_draw_request(rng, f"{rng.getrandbits(48):x}-{number}", weights))
        if session.asked[-1].closes:
            break
    last = session.asked[-1]
    if not last.closes and rng.random() < 0.35:
        session.invalid = _draw_invalid(rng)
    session.ending = rng.choice(("finish", "finish", "finish", "fin", "reset", "leave"))
    if session.ending == "finish" and session.invalid is None and not last.closes:
        session.ending = rng.choice(("keep", "drop"))
    total = sum(len(each.head) + len(each.sent_body) for each in session.asked)
    if not session.is_judged_whole:
        session.is_answered_first = rng.random() < 0.2
        session.cut = None if session.is_answered_first else rng.randrange(1 + total)
    total += len(session.invalid.sent) if session.invalid is not None else 0
    # Not too many pieces.
    longest = max(rng.choice((1, 2, 14, 200, 3000, 2**17, 2**31)), total // 500)
    session.pieces = tuple(rng.randint((longest + 2) // 3, longest) for _ in range(rng.randint(1, 5)))
    session.pauses = rng.random() < 0.5
    session.reading = rng.choice(("eager", "eager", "bursts", "late"))
    session.is_patient = session.reading != "late" and rng.random() < 0.5
    session.pause_seconds = rng.choice((0, 0, 0, 0.1, 1.2 if rng.random() < 0.03 else 0))
    session.is_narrow, session.ends_tls = rng.random() < 0.3, rng.random() < 0.5
    most = 5000 if session.is_narrow else 100_000
    if session.reading == "late" and sum(each.size for each in session.asked) > most:
        session.reading = "bursts"  # or both sides would wait for the other to read
    return session


def _draw_request(rng: Random, name: str, weights: tuple[int, ...]) -> Asked:
    method = rng.choice(("GET", "HEAD", "POST", "POST", "POST", "PUT", "OPTIONS"))
    has_body = method in ("POST", "PUT") or rng.random() < 0.1
    body = rng.randbytes(rng.choices(SIZES, weights)[0]) if has_body else b""
    if rng.random() < 0.1:
        body = (b"GET /other HTTP/1.1\r\nHost: x\r\n\r\n" * (len(body) // 30))[: len(body)]
    size, mode = rng.choices(SIZES, weights)[0], rng.choice(MODES)
    if size == SIZES[-1] and rng.random() < 0.5:
        size = HUGE
    is_old = rng.random() < 0.05
    closes = is_old or rng.random() < 0.1
    is_chunked = has_body and not is_old and rng.random() < 0.5
    expects = has_body and not is_old and rng.random() < 0.15
    # `close`: the app asks for the end of the connection.
    answers_last = rng.random() < 0.05
    closes = closes or answers_last
    path = f"/{mode}/{name}/{size}/{rng.choice((0, 0, 1, 4, 30))}{'/close' * answers_last}"
    if rng.random() < 0.1:
        path = "http://x" + path
    path += rng.choice(("", "", "?a=b", "?%ff%00=" + "x" * rng.choice((1, 5000))))
    lines = [
        "Host: x\r\n",
        *(f"X-{each}: {'v' * rng.choice((0, 5, 300))}\r\n" for each in range(rng.choice((0, 3, 30)))),
    ]
    if is_chunked:
        lines.append(rng.choice(("Transfer-Encoding: chunked\r\n", "transfer-encoding:Chunked \r\n")))
    elif has_body:
        lines.append(f"Content-Length: {len(body)}\r\n")
    if expects:
        lines.append(rng.choice(("Expect: 100-continue\r\n", "expect: 100-Continue\r\n")))
    if closes and not answers_last:
        lines.append("" if is_old and rng.random() < 0.5 else "Connection: close\r\n")
    elif rng.random() < 0.1:
        lines.append(rng.choice(UPGRADES))
    rng.shuffle(lines)
    empty_line = "\r\n" * (rng.random() < 0.05)
    head = f"{empty_line}{method} {path} HTTP/1.{0 if is_old else 1}\r\n{''.join(lines)}\r\n".encode()
    return Asked(name, mode, method, body, head, _chunked(rng, body) if is_chunked else body, size, expects, closes)


def _chunked(rng: Random, body: bytes) -> bytes:
    sent, longest = bytearray(), max(rng.choice((20, 5000, 400_000)), len(body) // 500)
    while body:
        length = rng.randint(1, longest)
        piece, body = body[:length], body[length:]
        number = rng.choice((f"{len(piece):x}", f"{len(piece):X}", f"000{len(piece):x}"))
        sent += number.encode() + rng.choice((b"", b"", b";a=b", b';a="b"')) + b"\r\n" + piece + b"\r\n"
    trailers = rng.choice((b"", b"", *TRAILERS))
    return bytes(sent) + b"0\r\n" + trailers + b"\r\n"


def head_of(*lines: str, first: str = "POST /collected/invalid/1/0 HTTP/1.1") -> bytes:
    return "\r\n".join([first, "Host: x", *lines, "", ""]).encode("latin-1")


def _draw_invalid(rng: Random) -> Invalid:
    refused = [
        b"no request\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\r\n\r\n",
        head_of("no colon"),
        head_of("X : y"),
        head_of("X: a\0b"),
        head_of("Content-Length: 5", "Content-Length: 6") + b"hello!",
        head_of("Content-Length: -1"),
        head_of("Content-Length: 1x") + b"a",
        head_of("Content-Length: 99999999999999999999999"),
        head_of(first="GET /a b HTTP/1.1"),
    ]
    disputed = [
        head_of("X: a", " folded"),
        head_of("Content-Length: 5", "Transfer-Encoding: chunked") + b"0\r\n\r\n",
        head_of("Transfer-Encoding: gzip"),
        head_of("X: " + "a" * (MAX_HEADER_BYTES + 1)),
        head_of(first="POST /collected/invalid/1/0 HTTP/7.7"),
        head_of(first="CONNECT x:1 HTTP/1.1"),
        head_of(*["a:"] * (MAX_HEADERS + 1)),
        b"GET /unread/invalid/1/0 HTTP/1.1\nHost: x\n\n",
        "GET /unread/\xff/1/0 HTTP/1.1\r\nHost: x\r\n\r\n".encode("latin-1"),
    ]
    kind = rng.random()
    junk = rng.choice((b"", b"", rng.randbytes(300), head_of() * 3))
    if kind < 0.5:
        return Invalid(rng.choice(refused) + junk)
    if kind < 0.7:
        return Invalid(rng.choice(disputed), is_disputed=True)
    asked = _draw_request(rng, "broken", (0, 0, 1, 1, 1, 1, 0))
    asked.method, asked.closes, asked.expects = "POST", False, False
    asked.head = head_of(
        "Transfer-Encoding: chunked", first=f"POST /{asked.mode}/broken/{asked.size}/{rng.choice((0, 30))} HTTP/1.1"
    )
    broken = rng.choice((b"xyz\r\n", b"5\r\nhelloXX\r\n", b"-1\r\n", b"f" * 30 + b"\r\n", b"2\r\nab\r\n 3\r\nabc\r\n"))
    before = rng.choice((b"", b"3\r\nabc\r\n"))
    return Invalid(asked.head + before + broken + junk, may_be_answered=asked)
