"""What a server's supervisor and its processes tell one another: lines of JSON over one socket for each process.

The socket is the process's standard input.  It closes when the supervisor dies, however that happens, and a process
whose supervisor is gone ends at once: nothing is ever left running.
"""

import logging
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec

from keepsight.api_settings import ApiSettings
from keepsight.checkpoint_folder import Files
from keepsight.errors import KeepsightError
from keepsight.ipc.pixel_mode import PixelMode

logger = logging.getLogger(__name__)
# All processes of a server write into one log.
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# Exit statuses: a mistake of the user's, as argparse has it; a process whose supervisor is gone.
MISTAKEN, ORPHANED = 2, 70
_CHUNK_BYTES = 65536


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The process cannot start, and the user is to be told why in these words."""

    message: str


# To a process -------------------------------------------------------------------------------------------------


class StartEngine(msgspec.Struct, frozen=True, tag=True):
    # Of `Config`.
    options: dict[str, Any]
    run_directory: str
    pixel_mode: PixelMode
    # Where frontends will find it.
    endpoint: str
    # The checkpoint's, as they were when the server started.
    files: Files
    # Which of how many that do the same work and share the machine.
    rank: int = 0
    num_engines: int = 1


class StartFrontend(msgspec.Struct, frozen=True, tag=True):
    options: dict[str, Any]
    run_directory: str
    pixel_mode: PixelMode
    frontend_id: str
    model_name: str
    # As above.
    files: Files
    # The socket to accept on.
    listener_fd: int
    # Which of how many, and how many engines they ask.
    rank: int = 0
    num_frontends: int = 1
    num_engines: int = 1
    api: ApiSettings = ApiSettings()


class EngineReady(msgspec.Struct, frozen=True, tag=True):
    endpoint: str
    rank: int = 0


class EngineLost(msgspec.Struct, frozen=True, tag=True):
    rank: int = 0


class FrontendLost(msgspec.Struct, frozen=True, tag=True):
    frontend_id: str


class GiveUp(msgspec.Struct, frozen=True, tag=True):
    """No engine will come any more: whoever waits for one is to be told."""

    reason: str


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Take nothing new, finish what runs, end."""


ToProcess = StartEngine | StartFrontend | EngineReady | EngineLost | FrontendLost | GiveUp | Drain

# From a process -----------------------------------------------------------------------------------------------


class Ready(msgspec.Struct, frozen=True, tag=True):
    """An engine takes requests; a frontend accepts connections."""


FromProcess = Ready | Failed

_from_process: msgspec.json.Decoder[FromProcess] = msgspec.json.Decoder(FromProcess)
_to_process: msgspec.json.Decoder[ToProcess] = msgspec.json.Decoder(ToProcess)


class SupervisorEnd:
    """Never waits: what a process has not read fits into the socket, or the process is beyond hope."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self._unread = b""

    def try_tell(self, message: ToProcess) -> bool:
        """False if the process cannot hear it any more."""
        line = msgspec.json.encode(message) + b"\n"
        try:
            return self.connection.send(line) == len(line)
        except OSError:
            return False

    def take(self) -> tuple[list[FromProcess], bool]:
        """What has come, and whether more may."""
        is_open = self._read()
        *lines, self._unread = self._unread.split(b"\n")
        return [_from_process.decode(line) for line in lines], is_open

    def _read(self) -> bool:
        try:
            while chunk := self.connection.recv(_CHUNK_BYTES):
                self._unread += chunk
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def close(self) -> None:
        self.connection.close()


class ProcessEnd:
    """From its making on the process ends when the supervisor is gone, whatever it is at."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._arrived = SimpleQueue[ToProcess]()
        self._start_thread(self._read)

    @classmethod
    def of_standard_input(cls) -> "ProcessEnd":
        """Processes started by this one get an empty standard input, and no hold on the socket."""
        connection = socket.socket(fileno=os.dup(0))
        with Path(os.devnull).open("rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        return cls(connection)

    def receive(self) -> ToProcess:
        return self._arrived.get()

    def listen(self, act: Callable[[ToProcess], None]) -> None:
        """On a thread, for the rest of the process's life."""
        self._start_thread(self._follow, act)

    def tell(self, message: FromProcess) -> None:
        with suppress(OSError):  # the supervisor is gone, and soon this process is
            self._connection.sendall(msgspec.json.encode(message) + b"\n")

    def _start_thread(self, target: Callable[..., None], *arguments: object) -> None:
        threading.Thread(target=target, args=arguments, name="control", daemon=True).start()

    def _read(self) -> None:
        try:
            for line in self._connection.makefile("rb"):
                self._arrived.put(_to_process.decode(line))
        finally:
            os._exit(ORPHANED)

    def _follow(self, act: Callable[[ToProcess], None]) -> None:
        while True:
            message = self.receive()
            try:
                act(message)
            except Exception:
                # Deaf to the next messages it would do harm; another process will do better.
                logger.exception("%s could not be followed", message)
                os._exit(1)


def run_process(main: Callable[[ProcessEnd], int]) -> int:
    """The exit status.  What the user got wrong is told to the supervisor, in one line."""
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    # Which the format does not name, and which to look up takes a quarter of a line's time.
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    control = ProcessEnd.of_standard_input()
    try:
        return main(control)
    except KeepsightError as error:
        control.tell(Failed(str(error)))
        return MISTAKEN
