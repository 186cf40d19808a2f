"""A connection to a server that speaks the Redis protocol (RESP 2): commands out, replies in.

Knows nothing of what is stored. Large values are neither joined nor copied on their way. Invariant: after any error
except a refusal by the server the connection is closed, as its position in the stream is unknown.
"""

import select
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from keepsight.errors import TierError
from keepsight.tiers.redis_address import RedisAddress

T = TypeVar("T")
# Part of a command; a tuple of buffers is one part, sent one after the other.
Part = bytes | memoryview | tuple[bytes, memoryview]
Reply = int | str | bytes | None | list["Reply"]

_MAX_LINE = 64 * 1024
_MAX_VALUE = 512 * 2**20
_MAX_REPLIES = 1_000_000
# Limit on nested replies; our commands get replies nested up to two deep.
_MAX_DEPTH = 8
# Limit on what is shown of a server's message.
_MAX_SHOWN = 300
# Parts of a command smaller than this are joined.
_SMALL = 64 * 1024
# Little, so that a large value's header is received with few of its bytes: these are copied once more.
_RECEIVED_AT_ONCE = 4096


class RefusedError(TierError):
    """An error reply: the server understood the command but did not carry it out."""


class WrongTypeError(RefusedError):
    """The stored value is not of the type that the command is for."""


class RespConnection:
    """Used by one thread at a time."""

    def __init__(self, address: RedisAddress, timeout: float) -> None:
        """Connect and log in. Raises OSError or TierError."""
        # `_patience` is the timeout set on the socket.
        self._timeout = self._patience = timeout
        self._deadline = time.monotonic() + timeout
        self._buffer = b""
        self._socket = _connect(address, timeout)
        self._hangup = select.poll()
        self._hangup.register(self._socket, select.POLLRDHUP)
        try:
            if address.password is not None:
                user = [] if address.user is None else [address.user.encode()]
                self.run([b"AUTH", *user, address.password.encode()])
            if address.database:
                self.run([b"SELECT", str(address.database).encode()])
        except BaseException:
            self.close()
            raise

    def run(self, command: Sequence[Part]) -> Reply:
        return self.exchange([command], self.read_reply)

    def run_all(self, commands: Sequence[Sequence[Part]]) -> list[Reply]:
        return self.exchange(commands, lambda: [self.read_reply() for _ in commands])

    def exchange(self, commands: Sequence[Sequence[Part]], read: Callable[[], T]) -> T:
        """Send all commands at once, then read the replies, all within the timeout."""
        self._deadline = time.monotonic() + self._timeout
        try:
            self._send([buffer for command in commands for buffer in _frames(command)])
            return read()
        except RefusedError:
            raise
        except BaseException:
            self.close()
            raise

    @property
    def is_closed_there(self) -> bool:
        """True if the server, or something between, has closed the connection since the last reply."""
        return bool(self._hangup.poll(0))

    def close(self) -> None:
        self._socket.close()

    # Reading, within an exchange ------------------------------------------------------------------------------

    def read_reply(self, depth: int = 0) -> Reply:
        """Read one reply. `depth` is the number of replies it is nested in."""
        kind, rest = self._read_head()
        if kind == b"+":
            return rest.decode("utf-8", "replace")
        if kind == b":":
            return _number(rest)
        size = _size(rest, _MAX_REPLIES if kind == b"*" else _MAX_VALUE)
        if size is None:
            return None
        if kind == b"$":
            return self._read_value(size)
        if depth >= _MAX_DEPTH:
            raise TierError("not the Redis protocol")
        return [self.read_reply(depth + 1) for _ in range(size)]

    def read_size(self) -> int | None:
        """Return the size of a value, which `read_into` reads next and `end_value` ends; None if there is no value."""
        kind, rest = self._read_head()
        if kind != b"$":
            raise TierError(f"reply {kind!r} instead of a value")
        return _size(rest, _MAX_VALUE)

    def read_into(self, target: memoryview) -> int:
        """Fill all of `target`: checking each piece first would keep the server waiting, as its buffers are small."""
        num_read = min(len(target), len(self._buffer))
        target[:num_read] = self._buffer[:num_read]
        self._buffer = self._buffer[num_read:]
        while num_read < len(target):
            self._limit_wait()
            num_read += _some(self._socket.recv_into(target[num_read:]))
        return num_read

    def end_value(self) -> None:
        while len(self._buffer) < 2:
            self._receive()
        if self._buffer[:2] != b"\r\n":
            raise TierError("a value does not end where it should")
        self._buffer = self._buffer[2:]

    def _read_head(self) -> tuple[bytes, bytes]:
        while (end := self._buffer.find(b"\r\n")) < 0:
            if len(self._buffer) > _MAX_LINE:
                raise TierError("not the Redis protocol")
            self._receive()
        line, self._buffer = self._buffer[:end], self._buffer[end + 2 :]
        if line[:1] == b"-":
            refusal = WrongTypeError if line.startswith(b"-WRONGTYPE") else RefusedError
            raise refusal(_shown(line[1:]))
        if line[:1] not in (b"+", b":", b"$", b"*"):
            raise TierError("not the Redis protocol")
        return line[:1], line[1:]

    def _read_value(self, size: int) -> bytes:
        while len(self._buffer) < size:
            self._receive()
        value, self._buffer = self._buffer[:size], self._buffer[size:]
        self.end_value()
        return value

    def _receive(self) -> None:
        self._limit_wait()
        received = self._socket.recv(_RECEIVED_AT_ONCE)
        _some(len(received))
        self._buffer += received

    # Writing --------------------------------------------------------------------------------------------------

    def _send(self, buffers: list[memoryview]) -> None:
        while buffers:
            self._limit_wait()
            sent = self._send_some(buffers)
            while buffers and sent >= len(buffers[0]):
                sent -= len(buffers.pop(0))
            if sent:
                buffers[0] = buffers[0][sent:]

    def _send_some(self, buffers: list[memoryview]) -> int:
        if isinstance(self._socket, ssl.SSLSocket):
            return self._socket.send(buffers[0])
        return self._socket.sendmsg(buffers[:64])

    def _limit_wait(self) -> None:
        """Limit the next wait to the time left, however little a slow server sends at a time."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the server takes too long")
        # Setting it is a system call, as expensive as receiving data: with a fast server it is set only once.
        if not left <= self._patience <= left + self._timeout / 10:
            self._patience = left
            self._socket.settimeout(left)


def _connect(address: RedisAddress, timeout: float) -> socket.socket:
    if address.path is not None:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(timeout)
            connection.connect(address.path)
        except BaseException:
            connection.close()
            raise
        return connection
    connection = socket.create_connection((address.host, address.port), timeout)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not address.is_tls:
        return connection
    return ssl.create_default_context().wrap_socket(connection, server_hostname=address.host)


def _shown(message: bytes) -> str:
    """Return a server's message as it may be logged: without the arguments that it repeats, such as a password."""
    text = message.partition(b", with args beginning with")[0][:_MAX_SHOWN].decode("utf-8", "replace")
    return "".join(each if each.isprintable() else "?" for each in text)


def _some(num_received: int) -> int:
    if not num_received:
        raise ConnectionResetError("the server closed the connection")
    return num_received


def _frames(command: Sequence[Part]) -> list[memoryview]:
    """Return the buffers of a command: small parts joined, large ones as they are."""
    frames: list[memoryview] = []
    small = bytearray(b"*%d\r\n" % len(command))
    for part in command:
        buffers = part if isinstance(part, tuple) else (part,)
        small += b"$%d\r\n" % sum(map(len, buffers))
        for buffer in buffers:
            if len(buffer) < _SMALL:
                small += buffer
            else:
                frames += [memoryview(bytes(small)), memoryview(buffer)]
                small = bytearray()
        small += b"\r\n"
    return [*frames, memoryview(bytes(small))]


def _number(text: bytes) -> int:
    try:
        return int(text)
    except ValueError:
        raise TierError("not the Redis protocol") from None


def _size(text: bytes, limit: int) -> int | None:
    """Return a size from a reply; None if it says that there is no value."""
    size = _number(text)
    if not -1 <= size <= limit:
        raise TierError(f"a reply of {size} parts")
    return None if size < 0 else size
