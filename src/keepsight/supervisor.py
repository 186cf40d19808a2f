"""Start the processes of one server, watch them, restart those that die, and end them in order.

Knows nothing of models, requests or HTTP: it holds the listening socket of the frontends, and tells each process what
happens to the others. It sleeps until a signal or a message comes, or for some seconds. Invariant: `_children` are the
processes that were started and not yet reaped, and when `run` ends there are none.
"""

import enum
import logging
import os
import selectors
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from keepsight.api_settings import ApiSettings
from keepsight.checkpoint_folder import Files
from keepsight.child_process import ChildProcess
from keepsight.errors import ServerStartError
from keepsight.ipc.control import (
    Alive,
    Drain,
    EngineHeard,
    EngineLost,
    EngineReady,
    EngineSilent,
    Failed,
    FromProcess,
    FrontendLost,
    GiveUp,
    Ready,
    StartEngine,
    StartFrontend,
    ToProcess,
)
from keepsight.ipc.pixel_mode import PixelMode
from keepsight.ipc.start_folder import start_folder
from keepsight.ipc.take_signals import INTERRUPTED
from keepsight.observe.catalogue import RESTARTED, slot_of
from keepsight.observe.counters import Counters
from keepsight.program_identity import PYTHON
from keepsight.silence import LOOK_SECONDS, Silence

logger = logging.getLogger(__name__)
ENGINE = (*PYTHON, "-m", "keepsight.engine.engine_process")
FRONTEND = (*PYTHON, "-m", "keepsight.frontend.frontend_process")
# Once the server has run, give up on the engine or frontend of one rank after this many failed starts in a row.
MAX_FAILED_STARTS = 3
SILENT = slot_of("engine_silent_seconds")
READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
# Time for telling callers that there will be no answer, and for an engine that has nothing left to do.
GOODBYE_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    # Options of `Config`.
    options: dict[str, Any]
    model_name: str
    # The checkpoint's files, listed before any process reads them.
    files: Files
    run_directory: Path
    pixel_mode: PixelMode
    num_frontends: int
    # Engines that do the same work, each with a part of the machine.
    num_engines: int
    api: ApiSettings
    # Time for running answers to finish when the server is asked to end.
    shutdown_seconds: float
    # As in `StartEngine`.
    program: str
    watchdog_seconds: float | None


class _Stage(enum.IntEnum):
    """The stages of a server's life; it never goes back."""

    STARTING = 0
    SERVING = 1
    DRAINING = 2
    GIVING_UP = 3
    KILLING = 4


class Supervisor:
    def __init__(
        self,
        settings: ServerSettings,
        listener: socket.socket,
        signals: socket.socket,
        engine_command: Sequence[str] = ENGINE,
        frontend_command: Sequence[str] = FRONTEND,
        on_serving: Callable[[], None] = lambda: None,
    ) -> None:
        """`listener` is closed when the server begins to end; `signals` is the socket of `take_signals`.

        `on_serving` is called when the server is ready.
        """
        self._settings, self._listener, self._signals, self._on_serving = settings, listener, signals, on_serving
        self._commands = {"engine": engine_command, "frontend": frontend_command}
        self._children: list[ChildProcess] = []
        self._num_started: Counter[str] = Counter()
        # By kind and rank.
        self._num_failed_starts: Counter[tuple[str, int]] = Counter()
        self._selector = selectors.DefaultSelector()
        self._stage, self._deadline = _Stage.STARTING, float("inf")
        # This process's exit status, once it is known.
        self._status: int | None = None
        self._started_at = time.monotonic()
        self._counters = Counters.open(settings.run_directory, "supervisor-0")

    def run(self) -> int:
        """Run the server until it has ended. Return the exit status.

        Raise ServerStartError if the first start fails by the user's mistake, or for lack of descriptors or memory.
        """
        with self._selector:
            self._selector.register(self._signals, READ, self._handle_signals)
            try:
                for rank in range(self._settings.num_engines):
                    self._start_engine(rank)
                for rank in range(self._settings.num_frontends):
                    self._start_frontend(rank)
                while self._children:
                    self._wait()
            finally:
                self._kill_all()
        assert self._status is not None, "ended unasked"
        return self._status

    def _wait(self) -> None:
        for key, _ in self._selector.select(min(self._deadline - time.monotonic(), LOOK_SECONDS)):
            key.data()
        self._end_if_removed()
        # After the messages that had come: signs of life among them count.
        self._look_for_silence()
        if time.monotonic() >= self._deadline:
            self._enter(self._next_stage())

    # Starting -------------------------------------------------------------------------------------------------

    def _start_engine(self, rank: int) -> None:
        engine = self._start("engine", rank)
        self._send(
            engine,
            StartEngine(
                options=self._settings.options,
                run_directory=str(self._settings.run_directory),
                pixel_mode=self._settings.pixel_mode,
                endpoint=self._endpoint_of(engine),
                files=self._settings.files,
                watchdog_seconds=self._settings.watchdog_seconds,
                program=self._settings.program,
                rank=rank,
                num_engines=self._settings.num_engines,
            ),
        )

    def _start_frontend(self, rank: int) -> None:
        frontend = self._start("frontend", rank, self._listener.fileno())
        self._send(
            frontend,
            StartFrontend(
                options=self._settings.options,
                run_directory=str(self._settings.run_directory),
                pixel_mode=self._settings.pixel_mode,
                frontend_id=frontend.name,
                model_name=self._settings.model_name,
                files=self._settings.files,
                program=self._settings.program,
                listener_fd=self._listener.fileno(),
                api=self._settings.api,
                rank=rank,
                num_frontends=self._settings.num_frontends,
                num_engines=self._settings.num_engines,
            ),
        )
        for engine in self._of_kind("engine"):
            if engine.is_ready:
                self._send(frontend, EngineReady(self._endpoint_of(engine), engine.rank))

    def _start(self, kind: str, rank: int, *pass_fds: int) -> ChildProcess:
        self._num_started[kind] += 1
        try:
            folder = start_folder(self._settings.run_directory)
            child = ChildProcess(kind, rank, self._num_started[kind], self._commands[kind], pass_fds, folder)
        except OSError as error:  # no descriptors are left, or no memory
            raise ServerStartError(f"the {kind} cannot be started: {error}") from error
        self._children.append(child)
        self._selector.register(child.control.connection, READ, partial(self._exchange, child))
        return child

    def _endpoint_of(self, engine: ChildProcess) -> str:
        """Return the engine's endpoint: a new one for each, so that it cannot be mistaken for its predecessor."""
        return f"ipc://{self._socket_of(engine)}"

    def _socket_of(self, engine: ChildProcess) -> Path:
        return self._settings.run_directory / engine.name

    # Watching -------------------------------------------------------------------------------------------------

    def _exchange(self, child: ChildProcess) -> None:
        """Send what can be sent by now, and receive."""
        if child not in self._children:  # it was reaped earlier in the same round of events
            return
        if child.control.has_unsent:
            self._note_sent(child, is_alive=child.control.try_flush())
        self._receive(child)

    def _receive(self, child: ChildProcess) -> None:
        messages, is_open = child.control.take()
        for message in messages:
            self._act_on(child, message)
        if not is_open:
            self._stop_hearing(child)

    def _act_on(self, child: ChildProcess, message: FromProcess) -> None:
        match message:
            case Ready():
                self._note_ready(child)
            case Failed(reason):
                if self._stage is _Stage.STARTING:
                    raise ServerStartError(reason)
                logger.error("%s failed: %s", child, reason)
            case Alive(max_silent_seconds):
                child.max_silent_seconds = max_silent_seconds
                self._note_sign_of_life(child)

    def _note_sign_of_life(self, engine: ChildProcess) -> None:
        if engine.silence is None:
            engine.silence = Silence()
        elif engine.silence.end():
            logger.warning("%s gives signs of life again", engine)
            self._send_to_all("frontend", EngineHeard(engine.rank))

    def _look_for_silence(self) -> None:
        if self._stage is not _Stage.SERVING:
            return
        engines = [(child, child.silence) for child in self._of_kind("engine") if child.silence is not None]
        for engine, silence in engines:
            if silence.look():
                state = engine.describe_state()
                logger.error("%s has given no sign of life for %.0f s, in state %s", engine, silence.seconds, state)
                self._send_to_all("frontend", EngineSilent(engine.rank))
            if engine.is_overdue and not engine.is_given_up:
                logger.error("%s has been silent for %.0f s: it is killed", engine, silence.seconds)
                engine.is_given_up = True
                engine.process.kill()
        self._counters.set(SILENT, max((silence.seconds for _, silence in engines), default=0.0))

    def _note_ready(self, child: ChildProcess) -> None:
        child.ready_at = time.monotonic()
        if child.kind == "engine":
            self._send_to_all("frontend", EngineReady(self._endpoint_of(child), child.rank))
        logger.info("%s is ready", child)
        if self._stage is _Stage.STARTING and all(each.is_ready for each in self._children):
            self._stage, seconds = _Stage.SERVING, time.monotonic() - self._started_at
            url = url_of(self._settings.api.scheme, *self._listener.getsockname())
            logger.info("%s is served on %s after %.1f s", self._settings.model_name, url, seconds)
            self._on_serving()

    def _reap(self) -> None:
        for child in tuple(self._children):
            # Handling the death of one may have ended others.
            if child in self._children and child.process.poll() is not None:
                self._receive(child)  # its last messages
                self._remove_ended(child)
                self._act_on_death(child)

    def _act_on_death(self, child: ChildProcess) -> None:
        self._end_if_removed()
        if self._stage is _Stage.STARTING:
            logger.error("%s before it was ready", child.describe_end())
            self._end(status=1, stage=_Stage.KILLING)
        elif self._stage is _Stage.SERVING:
            self._replace(child)
        else:
            self._continue_ending(child)

    def _replace(self, child: ChildProcess) -> None:
        if child.kind == "engine":
            self._send_to_all("frontend", EngineLost(child.rank))
        else:
            self._send_to_all("engine", FrontendLost(child.name))
        place = child.kind, child.rank
        self._num_failed_starts[place] = self._num_failed_starts[place] + 1 if child.has_failed_to_start else 0
        if self._num_failed_starts[place] == MAX_FAILED_STARTS:
            self._do_without(child.kind, f"{child.describe_end()}; its start failed {MAX_FAILED_STARTS} times")
            return
        self._counters.add(RESTARTED[child.kind])
        logger.error("%s; another is started", child.describe_end())
        try:
            (self._start_engine if child.kind == "engine" else self._start_frontend)(child.rank)
        except ServerStartError as error:
            self._do_without(child.kind, str(error))

    def _do_without(self, kind: str, reason: str) -> None:
        """Go on with the other processes of this kind; if there are none, give up."""
        if others := self._of_kind(kind):
            logger.error("%s: continuing with %s", reason, ", ".join(map(str, others)))
        else:
            logger.error("%s: giving up", reason)
            self._end(status=1, stage=_Stage.GIVING_UP)

    # Ending ---------------------------------------------------------------------------------------------------

    def _end_if_removed(self) -> None:
        """End if the run directory was removed: what it held is lost, and no new process could reach the others."""
        if self._stage is _Stage.SERVING and not self._settings.run_directory.is_dir():
            directory = self._settings.run_directory
            logger.error("%s was removed (by systemd's RemoveIPC? see docs/operations.md)", directory)
            self._end(status=1, stage=_Stage.DRAINING)

    def _handle_signals(self) -> None:
        for number in self._signals.recv(4096):
            if number == signal.SIGCHLD:
                self._reap()
                _reap_orphans({child.process.pid for child in self._children})
            else:
                self._handle_request_to_end(number)

    def _handle_request_to_end(self, number: int) -> None:
        """The first request lets answers finish, the second fails those that run, the third kills all processes."""
        status = INTERRUPTED if number == signal.SIGINT else 0
        self._end(status, _Stage.KILLING if self._stage is _Stage.STARTING else self._next_stage())

    def _next_stage(self) -> _Stage:
        return _Stage(min(self._stage + 1, _Stage.KILLING))

    def _end(self, status: int, stage: _Stage) -> None:
        if self._status is None:
            self._status = status
            # Once the frontends close theirs, too, no client waits in a backlog that is not served.
            self._listener.close()
        self._enter(stage)

    def _enter(self, stage: _Stage) -> None:
        was_draining, self._stage = self._stage is _Stage.DRAINING, stage
        match stage:
            case _Stage.DRAINING:
                seconds = self._settings.shutdown_seconds
                logger.info("shutting down: running answers have %g s to finish", seconds)
                self._send_to_all("frontend", Drain())
                self._deadline = time.monotonic() + seconds
            case _Stage.GIVING_UP:
                reason = "the server is shutting down" if was_draining else "the engine failed for good"
                self._send_to_all("frontend", GiveUp(reason), Drain())
                self._deadline = time.monotonic() + GOODBYE_SECONDS
            case _Stage.KILLING:
                self._kill_all()
                self._deadline = float("inf")

    def _continue_ending(self, child: ChildProcess) -> None:
        if child.process.returncode:
            logger.error("%s while the server was shutting down", child.describe_end())
        if not self._of_kind("frontend"):
            for engine in self._of_kind("engine"):
                if engine.is_ready:
                    self._send(engine, Drain())
                else:
                    engine.process.kill()
            self._stage, self._deadline = _Stage.GIVING_UP, time.monotonic() + GOODBYE_SECONDS
        elif not self._of_kind("engine"):
            self._enter(_Stage.GIVING_UP)
        elif child.kind == "engine":
            self._send_to_all("frontend", EngineLost(child.rank))

    def _kill_all(self) -> None:
        for child in self._children:
            child.process.kill()
        for child in tuple(self._children):
            child.process.wait()
            self._remove_ended(child)

    # Children -------------------------------------------------------------------------------------------------

    def _remove_ended(self, child: ChildProcess) -> None:
        self._children.remove(child)
        self._stop_hearing(child)
        child.control.close()
        if child.kind == "engine":  # a killed engine leaves its socket file
            self._socket_of(child).unlink(missing_ok=True)

    def _stop_hearing(self, child: ChildProcess) -> None:
        if child.control.connection.fileno() in self._selector.get_map():
            self._selector.unregister(child.control.connection)

    def _send(self, child: ChildProcess, message: ToProcess) -> None:
        self._note_sent(child, is_alive=child.control.try_send(message))

    def _note_sent(self, child: ChildProcess, *, is_alive: bool) -> None:
        """Go on when the socket takes more, if anything is left to send."""
        if not is_alive:
            # It is dead, as SIGCHLD will tell, or has long read nothing: in either case of no more use.
            child.process.kill()
        if (key := self._selector.get_map().get(child.control.connection.fileno())) is not None:
            is_left = is_alive and child.control.has_unsent
            self._selector.modify(key.fileobj, READ | WRITE if is_left else READ, key.data)

    def _send_to_all(self, kind: str, *messages: ToProcess) -> None:
        for child in self._of_kind(kind):
            for message in messages:
                self._send(child, message)

    def _of_kind(self, kind: str) -> list[ChildProcess]:
        return [child for child in self._children if child.kind == kind]


def _reap_orphans(known: Set[int]) -> None:
    """Reap orphans of our children, which become ours if this is PID 1, as in a container."""
    with suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if ended.si_pid in known:  # it ended just now: another SIGCHLD will come for it
                return
            os.waitpid(ended.si_pid, 0)


def url_of(scheme: str, host: str, port: int, flow: int = 0, scope: int = 0) -> str:
    """Return the URL of a socket's address. `scope`: the number of the only interface that it is reached through."""
    if scope:
        host = f"{host}%{socket.if_indextoname(scope)}"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}/v1"
