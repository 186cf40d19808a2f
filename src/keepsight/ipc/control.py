"""Messages between a server's supervisor and its processes: lines of JSON over one socket for each process.

The socket is the process's standard input. It closes when the supervisor dies, however that happens, and a process
whose supervisor is gone ends at once: nothing is ever left running.
"""

import logging
import os
import socket
import threading
import time
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
from keepsight.ipc.server_log import begin_log

logger = logging.getLogger(__name__)
# Exit statuses: a user's mistake, the same as argparse's; an engine that failed while it owed answers, to requests that
# may be the cause; a process whose supervisor is gone.
MISTAKEN, FAILED_AT_WORK, ORPHANED = 2, 3, 70
_CHUNK_BYTES = 65536
# Pause between two signs of life.
SIGN_SECONDS = 5.0
# Far more than the options of any command line: a process with so much to read is beyond hope.
MAX_UNSENT_BYTES = 64 * 2**20


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The process cannot start. `message` tells the user why."""

    message: str


# To a process -------------------------------------------------------------------------------------------------


class StartEngine(msgspec.Struct, frozen=True, tag=True):
    # The options of `Config`.
    options: dict[str, Any]
    run_directory: str
    pixel_mode: PixelMode
    # Where frontends will connect to it.
    endpoint: str
    # The checkpoint's files, as they were when the server started.
    files: Files
    # The longest that one of its steps may take, or that it may be silent; 0: no limit; None: what suits the device.
    watchdog_seconds: float | None
    # The program that the server was started with: `identify_program`.
    program: str
    # Its rank among the engines that do the same work and share the machine, and their number.
    rank: int = 0
    num_engines: int = 1


class StartFrontend(msgspec.Struct, frozen=True, tag=True):
    options: dict[str, Any]
    run_directory: str
    pixel_mode: PixelMode
    frontend_id: str
    model_name: str
    # As in `StartEngine`.
    files: Files
    program: str
    # The socket to accept on.
    listener_fd: int
    # Its rank among the frontends, their number, and the number of engines that they use.
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


class EngineSilent(msgspec.Struct, frozen=True, tag=True):
    """It has given no sign of life for long, but its process is there."""

    rank: int = 0


class EngineHeard(msgspec.Struct, frozen=True, tag=True):
    """It is silent no more."""

    rank: int = 0


class GiveUp(msgspec.Struct, frozen=True, tag=True):
    """No engine will come any more: requests that wait for one must fail."""

    reason: str


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Take nothing new, finish what runs, then exit."""


ToProcess = (
    StartEngine | StartFrontend | EngineReady | EngineLost | EngineSilent | EngineHeard | FrontendLost | GiveUp | Drain
)

# From a process -----------------------------------------------------------------------------------------------


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine takes requests, or the frontend accepts connections."""


class Alive(msgspec.Struct, frozen=True, tag=True):
    """A sign of life. After the first one comes the next every few seconds, unless the process stands still."""

    # The process is to be replaced once it has been silent for so long; 0: however long.
    max_silent_seconds: float


FromProcess = Ready | Failed | Alive

_from_process: msgspec.json.Decoder[FromProcess] = msgspec.json.Decoder(FromProcess)
_to_process: msgspec.json.Decoder[ToProcess] = msgspec.json.Decoder(ToProcess)


class SupervisorEnd:
    """The supervisor's end. Never waits: what does not fit into the socket is kept until `try_flush` can send it."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self._unread = b""
        self._unsent = bytearray()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def try_send(self, message: ToProcess) -> bool:
        """Send a message, or keep it; return False if the process can no longer receive it."""
        self._unsent += msgspec.json.encode(message) + b"\n"
        return self.try_flush()

    def try_flush(self) -> bool:
        """Send what the socket takes of what was kept; return False if the process can no longer receive it."""
        try:
            while self._unsent:
                del self._unsent[: self.connection.send(self._unsent)]
        except BlockingIOError:
            return len(self._unsent) <= MAX_UNSENT_BYTES
        except OSError:
            return False
        return True

    def take(self) -> tuple[list[FromProcess], bool]:
        """Return the messages that have come, and whether more may come."""
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
    """The process's end. Once it is made, the process ends when the supervisor is gone, whatever it is doing."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._arrived = SimpleQueue[ToProcess]()
        self._start_thread(self._read)

    @classmethod
    def of_standard_input(cls) -> "ProcessEnd":
        """Take over standard input. Processes started by this one get an empty one, and do not inherit the socket."""
        connection = socket.socket(fileno=os.dup(0))
        with Path(os.devnull).open("rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        return cls(connection)

    def receive(self) -> ToProcess:
        return self._arrived.get()

    def listen(self, act: Callable[[ToProcess], None]) -> None:
        """Act on messages on a thread, for the rest of the process's life."""
        self._start_thread(self._follow, act)

    def give_signs_of_life(self, max_silent_seconds: float) -> None:
        """Tell the supervisor now and again, for the rest of the process's life, that it does not stand still.

        From a thread of its own, which waits for no work and no other lock than the interpreter's.
        """
        self.send(sign := Alive(max_silent_seconds))
        self._start_thread(self._go_on_giving, sign)

    def send(self, message: FromProcess) -> None:
        with suppress(OSError):  # the supervisor is gone, and this process soon will be
            self._connection.sendall(msgspec.json.encode(message) + b"\n")

    def _start_thread(self, target: Callable[..., None], *arguments: object) -> None:
        threading.Thread(target=target, args=arguments, name="control", daemon=True).start()

    def _read(self) -> None:
        try:
            for line in self._connection.makefile("rb"):
                self._arrived.put(_to_process.decode(line))
        except msgspec.MsgspecError as error:
            logger.error("a message of the supervisor cannot be read (%s): was Keepsight changed while it ran?", error)
            os._exit(1)
        finally:
            os._exit(ORPHANED)

    def _follow(self, act: Callable[[ToProcess], None]) -> None:
        while True:
            message = self.receive()
            try:
                act(message)
            except Exception:
                # A process that follows no more messages would do harm; a new one will do better.
                logger.exception("%s could not be followed", message)
                os._exit(1)

    def _go_on_giving(self, sign: Alive) -> None:
        while True:
            time.sleep(SIGN_SECONDS)
            self.send(sign)


def run_process(main: Callable[[ProcessEnd], int]) -> int:
    """Run `main` and return the exit status. A user's mistake is reported to the supervisor, in one line."""
    begin_log()
    # The format does not use these fields, and looking them up takes a quarter of the time of a log line.
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    control = ProcessEnd.of_standard_input()
    try:
        return main(control)
    except KeepsightError as error:
        control.send(Failed(str(error)))
        return MISTAKEN
