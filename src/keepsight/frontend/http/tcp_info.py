"""What the kernel tells of a TCP connection: most of it from Linux's `struct tcp_info`, and unknown elsewhere.

A transport that has lost its connection has no socket any more, and may not have told its protocol yet.
"""

import fcntl
import socket
import sys
import termios

# States: reset, and ended by the client.
_LEFT = (7, 8)
# The place of the number of bytes that the client has acknowledged.
_ACKNOWLEDGED = slice(120, 128)


def has_left(connection: socket.socket | None) -> bool:
    return _read(connection)[0] in _LEFT


def count_acknowledged(connection: socket.socket | None) -> int:
    """Return how many bytes the client's kernel has acknowledged since it connected; 0 if unknown."""
    return int.from_bytes(_read(connection)[_ACKNOWLEDGED], sys.byteorder)


def count_unacknowledged(connection: socket.socket | None) -> int:
    """Return how many bytes the kernel holds for the client."""
    if connection is None:
        return 0
    return int.from_bytes(fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)


def _read(connection: socket.socket | None) -> bytes:
    length = _ACKNOWLEDGED.stop
    if connection is None or not hasattr(socket, "TCP_INFO"):
        return bytes(length)
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, length).ljust(length, b"\0")
