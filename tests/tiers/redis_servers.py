"""Redis servers for tests: the real one if it is installed, and a fake one that can be told to misbehave."""

import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

# Where `tests/install_redis` unpacks it.
_UNPACKED = Path(__file__).parents[2] / ".venv" / "redis" / "redis-server"
REAL = shutil.which("redis-server") or (str(_UNPACKED) if _UNPACKED.exists() else None)


@contextmanager
def real_server(*options: str) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """Start a real server; yield its address and its process."""
    assert REAL is not None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "redis.sock"
        command = [REAL, "--port", "0", "--unixsocket", str(path), "--save", "", "--dir", folder, *options]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout
                for line in process.stdout:
                    if b"ready to accept connections" in line.lower():
                        break
                yield f"unix://{path}", process
            finally:
                process.kill()


class FakeServer:
    """Answers GET, SET, DEL, SCAN and STRLEN; `misbehave` may change each reply."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.password: bytes | None = None
        # Maps each reply to the one that is sent; None closes the connection.
        self.misbehave: Callable[[bytes], bytes | None] = lambda reply: reply
        self.is_silent = threading.Event()
        self.num_connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._connections: list[socket.socket] = []
        threading.Thread(target=self._accept_all, daemon=True).start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._listener.getsockname()[1]}"

    def send(self, content: bytes) -> None:
        """Send on the newest connection."""
        for connection in self._connections[-1:]:
            connection.sendall(content)

    def drop_all(self) -> None:
        """Close all connections, as a restart does."""
        connections, self._connections = self._connections, []
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.drop_all()

    def _accept_all(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._connections.append(connection)
                self.num_connections += 1
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError), connection, connection.makefile("rb") as stream:
            is_known = self.password is None
            while command := _read_command(stream):
                if command[0] == b"AUTH":
                    is_known = command[-1] == self.password
                    reply: bytes | None = b"+OK\r\n" if is_known else b"-WRONGPASS\r\n"
                else:
                    reply = self._answer(command) if is_known else b"-NOAUTH\r\n"
                    reply = self.misbehave(reply)
                if reply is None:
                    return
                if not self.is_silent.is_set():
                    connection.sendall(reply)

    def _answer(self, command: list[bytes]) -> bytes:
        name, *arguments = command
        if name == b"PING":
            return b"+PONG\r\n"
        if name == b"SET":
            self.values[arguments[0]] = arguments[1]
            return b"+OK\r\n"
        if name == b"GET":
            value = self.values.get(arguments[0])
            return b"$-1\r\n" if value is None else b"$%d\r\n%b\r\n" % (len(value), value)
        if name == b"DEL":
            return b":%d\r\n" % sum(self.values.pop(key, None) is not None for key in arguments)
        if name == b"STRLEN":
            return b":%d\r\n" % len(self.values.get(arguments[0], b""))
        if name == b"SCAN":
            names = b"".join(b"$%d\r\n%b\r\n" % (len(key), key) for key in self.values)
            return b"*2\r\n$1\r\n0\r\n*%d\r\n%b" % (len(self.values), names)
        return b"-ERR unknown command\r\n" if name != b"SELECT" else b"+OK\r\n"


def _read_command(stream: BinaryIO) -> list[bytes]:
    head = stream.readline()
    parts = []
    for _ in range(int(head[1:]) if head else 0):
        size = int(stream.readline()[1:])
        parts.append(stream.read(size + 2)[:-2])
    return parts
