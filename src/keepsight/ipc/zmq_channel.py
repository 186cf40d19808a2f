"""Frontends and an engine over ZeroMQ: one DEALER in each frontend, one ROUTER in the engine.

Each end has a thread, which alone touches its sockets, sleeps until there is something to do, and calls back.  Others
leave what they send in its outbox and never wait.  Nothing is believed before the handshake, a connection that is lost
is never taken up again, and every queue has a bound.  Endpoints are files: who must not connect must not reach them.
"""

import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

import zmq
from zmq.utils.monitor import recv_monitor_message

from keepsight.errors import HandshakeError, WireError
from keepsight.ipc.codec import (
    MAX_PIXEL_BYTES,
    Frame,
    decode_from_engine,
    decode_to_engine,
    encode_from_engine,
    encode_to_engine,
    try_read_request_id,
)
from keepsight.ipc.handshake import (
    HELLO,
    REFUSED,
    Hello,
    Refused,
    Welcome,
    decode_answer,
    decode_hello,
    encode_hello,
    encode_refused,
    encode_welcome,
)
from keepsight.ipc.outbox import Outbox
from keepsight.ipc.peers import Peer, Peers, Source
from keepsight.requests import FromEngine, RequestFailed, ToEngine

logger = logging.getLogger(__name__)

T = TypeVar("T")
# To whom (None: to all), and what; without frames: it shall be forgotten.
_Outgoing = tuple[str | None, list[Frame] | None]

# Messages that ZeroMQ holds per connection and side.  To the engine few: pixels are large, and wait in the outbox, that
# counts bytes.  From it many: outputs are small, and a frontend that lags so far behind is cut off.
MAX_MESSAGES_TO_ENGINE = 16
MAX_MESSAGES_FROM_ENGINE = 4096
MAX_OUTBOX_BYTES = 2**30
# What a waiting message takes beside its frames, about.
MESSAGE_OVERHEAD_BYTES = 512
MAX_READ_IN_A_ROW = 64
# Smaller frames are cheaper copied than shared.
MIN_SHARED_BYTES = 2**16
RECONNECT_MS = 20
# How long until one that does not read, and so could not be told that it was cut off, is told again.
RETELL_MS = 1000


class FrontendChannel:
    """A frontend's connection to an engine.  Once it is lost, another one has to be made."""

    def __init__(
        self,
        endpoint: str,
        frontend_id: str,
        on_outputs: Callable[[Sequence[FromEngine]], None],
        on_lost: Callable[[str], None],
        max_outbox_bytes: int = MAX_OUTBOX_BYTES,
    ) -> None:
        """Both are called on the channel's thread.  `on_lost` is told the reason, at most once and last of all.

        It is not called if `connect` raises, nor after `close` has returned.
        """
        self._endpoint, self._hello = endpoint, encode_hello(Hello(frontend_id))
        self._on_outputs, self._on_lost = on_outputs, on_lost
        self._answered = threading.Event()
        self._has_greeted = self._has_missed_something = False
        self._welcome: Welcome | None = None
        self._reason_of_end: str | None = None
        self._io = _SocketThread[list[Frame]](zmq.DEALER, f"channel of {frontend_id}", max_outbox_bytes)
        self._io.socket.sndhwm, self._io.socket.rcvhwm = MAX_MESSAGES_TO_ENGINE, MAX_MESSAGES_FROM_ENGINE
        # Not `immediate`: the queue would go with the connection, and with it what was not read yet; where that happens
        # between two parts of one message, libzmq aborts the process.
        self._io.socket.reconnect_ivl = RECONNECT_MS

    def connect(self, timeout: float) -> Welcome:
        """Waits until an engine is there and answers.  Raises HandshakeError; the channel is closed then."""
        self._io.start(zmq.EVENT_DISCONNECTED, lambda socket: socket.connect(self._endpoint), self._turn, self._end)
        is_answered = self._answered.wait(timeout)
        if self._welcome is not None:
            return self._welcome
        late = f"no engine answered at {self._endpoint} within {timeout:g} s"
        reason = self._reason_of_end if is_answered else late
        self.close()
        raise HandshakeError(reason or late)

    def send(self, message: ToEngine) -> bool:
        """From any thread.  False: nobody will read it, or too much is waiting already; the connection is lost then."""
        if self._welcome is None or self._reason_of_end is not None:
            return False
        frames = encode_to_engine(message)
        is_taken = self._io.outbox.try_put(frames, _num_bytes(frames))
        if not is_taken:
            # What is missing would be waited for, for ever.
            self._has_missed_something = True
            self._io.outbox.wake()
        return is_taken

    def close(self) -> None:
        """At any time, from any thread, more than once."""
        self._io.close()

    # On its own thread ----------------------------------------------------------------------------------------

    def _turn(self) -> None:
        has_something_to_send = not self._has_greeted or not self._io.outbox.is_empty
        found = self._io.wait(zmq.POLLIN | zmq.POLLOUT if has_something_to_send else zmq.POLLIN)
        # Asked before reading: what came before the end is heard before it.
        is_cut = found.has_events and bool(list(self._io.take_events()))
        if is_cut or found.has_messages:
            for _, frames in self._io.receive(reads_all=is_cut):
                self._read(frames)
        if is_cut and self._welcome is not None:
            raise _ConnectionLostError("the engine's process ended")
        if self._has_missed_something:
            raise _ConnectionLostError("the engine does not read what it is sent")
        self._has_greeted = (self._has_greeted and not is_cut) or self._io.try_send(self._hello)
        if self._welcome is not None:
            self._io.send_waiting(self._io.try_send)

    def _read(self, frames: list[Frame]) -> None:
        try:
            if self._welcome is None or frames[0] == REFUSED:
                self._welcome = decode_answer(frames)
                self._answered.set()
            else:
                self._on_outputs(decode_from_engine(frames))
        except (HandshakeError, WireError) as error:
            raise _ConnectionLostError(str(error)) from error

    def _end(self, reason: str, is_closed: bool) -> None:
        self._reason_of_end = reason
        self._answered.set()
        if self._welcome is not None and not is_closed:
            self._on_lost(reason)


class EngineListener:
    """An engine's connections to all of its frontends."""

    def __init__(
        self,
        endpoint: str,
        welcome: Welcome,
        on_message: Callable[[str, ToEngine], None],
        on_lost: Callable[[str], None],
        max_outbox_bytes: int = MAX_OUTBOX_BYTES,
        max_messages_from_engine: int = MAX_MESSAGES_FROM_ENGINE,
        on_welcomed: Callable[[], None] = lambda: None,
    ) -> None:
        """Listens at once.  All are called on the listener's thread, the first two with the name of the frontend.

        `on_lost`: it ended, does not read, or came anew under its name and knows nothing of what was before.
        `on_welcomed`: what is sent to all from now on reaches one more.
        """
        self._welcome = encode_welcome(welcome)
        self._on_message, self._on_lost, self._on_welcomed = on_message, on_lost, on_welcomed
        self._peers = Peers()
        # The kernel's names of the connections that there are.
        self._open_fds: set[int] = set()
        # Connections that were cut off and could not be told.
        self._untold: dict[bytes, Refused] = {}
        self.num_unreadable = 0
        self._io = _SocketThread[_Outgoing](zmq.ROUTER, "engine listener", max_outbox_bytes)
        self._io.socket.sndhwm, self._io.socket.rcvhwm = max_messages_from_engine, MAX_MESSAGES_TO_ENGINE
        # What cannot be sent is not dropped in silence.
        self._io.socket.router_mandatory = True
        connections = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
        self._io.start(connections, lambda socket: socket.bind(endpoint), self._turn, lambda reason, is_closed: None)

    def send(self, frontend_id: str, outputs: Sequence[FromEngine]) -> bool:
        """From any thread.  False: it is closed, or its thread is too far behind; then `forget` whom it was for."""
        return self._put((frontend_id, encode_from_engine(outputs)))

    def send_to_all(self, outputs: Sequence[FromEngine]) -> bool:
        return self._put((None, encode_from_engine(outputs)))

    def forget(self, frontend_id: str) -> None:
        """It ended, or missed something, as whoever calls this knows: `on_lost` is not called."""
        # Of no size: where there is no room, room is to be made.
        self._io.outbox.try_put((frontend_id, None), 0)

    def close(self) -> None:
        """At any time, from any thread, more than once."""
        self._io.close()

    def _put(self, outgoing: _Outgoing) -> bool:
        return self._io.outbox.try_put(outgoing, _num_bytes(outgoing[1] or []))

    # On its own thread ----------------------------------------------------------------------------------------

    def _turn(self) -> None:
        self._io.wait(zmq.POLLIN, RETELL_MS if self._untold else None)
        self._note_connections()
        for source, frames in self._io.receive():
            self._read(source, frames)
        self._io.send_waiting(self._send)
        for routing_id, refused in list(self._untold.items()):
            self._refuse(routing_id, refused)

    def _note_connections(self) -> None:
        for event, fd in self._io.take_events():
            if event == zmq.EVENT_ACCEPTED:
                self._open_fds.add(fd)
            else:
                self._open_fds.discard(fd)
                self._lose(self._peers.at_fd(fd))

    def _read(self, source: Source, frames: list[Frame]) -> None:
        peer = self._peers.from_source(source)
        if peer is None:
            self._greet(source, frames)
            return
        try:
            message = decode_to_engine(frames)
        except WireError as error:
            self._complain(peer, frames, error)
        else:
            self._on_message(peer.frontend_id, message)

    def _greet(self, source: Source, frames: list[Frame]) -> None:
        # The kernel uses its names again.  The events of this one's earlier owner, if any, are there by now.
        self._note_connections()
        if source.fd not in self._open_fds:
            return
        try:
            self._welcome_peer(Peer(decode_hello(frames).frontend_id, source))
        except (WireError, HandshakeError) as error:
            if frames[0] == HELLO:
                logger.warning("a frontend was refused: %s", error)
            self._refuse(source.routing_id, Refused(str(error)))

    def _welcome_peer(self, peer: Peer) -> None:
        self._lose(self._peers.at_fd(peer.source.fd))
        self._lose(self._peers.named(peer.frontend_id), Refused("another one came under this name"))
        self._peers.add(peer)
        self._send_to(peer, self._welcome)
        self._on_welcomed()

    def _complain(self, peer: Peer, frames: list[Frame], error: WireError) -> None:
        if peer.num_unreadable == 0:
            logger.error("frontend %s sends what cannot be read: %s", peer.frontend_id, error)
        peer.num_unreadable += 1
        self.num_unreadable += 1
        if (request_id := try_read_request_id(frames)) is not None:
            failed = RequestFailed(request_id, f"the engine could not read the request: {error}")
            self._send_to(peer, encode_from_engine([failed]))

    def _send(self, outgoing: _Outgoing) -> bool:
        """Whatever becomes of it, it is done with."""
        frontend_id, frames = outgoing
        for peer in self._peers.all() if frontend_id is None else [self._peers.named(frontend_id)]:
            if peer is None:
                continue
            if frames is None:
                self._drop(peer, Refused("the engine has given up this frontend"))
            else:
                self._send_to(peer, frames)
        return True

    def _send_to(self, peer: Peer, frames: list[Frame]) -> None:
        if not self._io.try_send([peer.source.routing_id, *frames]):
            self._lose(peer, Refused("it did not read what the engine sent"))

    def _lose(self, peer: Peer | None, refused: Refused | None = None) -> None:
        if peer is not None:
            self._drop(peer, refused)
            self._on_lost(peer.frontend_id)

    def _drop(self, peer: Peer, refused: Refused | None) -> None:
        self._peers.remove(peer)
        if refused is not None:
            logger.warning("frontend %s is cut off: %s", peer.frontend_id, refused.reason)
            self._refuse(peer.source.routing_id, refused)

    def _refuse(self, routing_id: bytes, refused: Refused) -> None:
        try:
            self._io.send([routing_id, *encode_refused(refused)])
        except zmq.Again:
            self._untold[routing_id] = refused
            return
        except _NobodyThereError:
            pass
        self._untold.pop(routing_id, None)


class _ConnectionLostError(Exception):
    """The turn that meets it is the last."""


class _NobodyThereError(Exception):
    """The connection that a message is for is gone."""


class _Found(NamedTuple):
    """By waiting.  To look for what is not there costs more than to read what is."""

    has_events: bool
    has_messages: bool


class _SocketThread(Generic[T]):
    """A socket, the events of its connections, an outbox, and the thread that has them to itself."""

    def __init__(self, socket_type: int, name: str, max_outbox_bytes: int) -> None:
        self.outbox = Outbox[T](max_outbox_bytes)
        self._context = zmq.Context()
        self.socket: zmq.Socket[bytes] = self._context.socket(socket_type)
        self.socket.linger = 0
        self.socket.maxmsgsize = MAX_PIXEL_BYTES
        # A context that is garbage together with its sockets waits for ever for their closing, inside the collection.
        self._free_sockets = weakref.finalize(self, _close_all, self._context, self.socket)
        self._free_sockets.atexit = False
        self._poller = zmq.Poller()
        self._name = name
        # Over whether there is a thread.
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(
        self,
        events: int,
        attach: Callable[[zmq.Socket[bytes]], object],
        turn: Callable[[], None],
        end: Callable[[str, bool], None],
    ) -> None:
        """`turn` over and over; then `end` with the reason, and whether that was the closing."""
        with self._lock:
            if self.outbox.is_closed:
                end("the connection was closed", True)
                return
            self._monitor = self.socket.get_monitor_socket(events)
            self._poller.register(self._monitor, zmq.POLLIN)
            self._poller.register(self.outbox.fd, zmq.POLLIN)
            try:
                attach(self.socket)
            except zmq.ZMQError as error:
                self._free()
                raise OSError(error.errno, str(error)) from error
            self._thread = threading.Thread(target=self._run, args=(turn, end), name=self._name, daemon=True)
            self._thread.start()

    def close(self) -> None:
        with self._lock:
            self.outbox.close()
            thread = self._thread
            if thread is None:
                self._free()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self, turn: Callable[[], None], end: Callable[[str, bool], None]) -> None:
        reason = "a fault in the connection's thread"
        try:
            while not self.outbox.is_closed:
                turn()
            reason = "the connection was closed"
        except _ConnectionLostError as lost:
            reason = str(lost)
        finally:
            is_closed = self.outbox.is_closed
            self._free()
            end(reason, is_closed)

    def _free(self) -> None:
        self.outbox.free()
        self._free_sockets()

    # Within a turn --------------------------------------------------------------------------------------------

    def wait(self, flags: int, timeout_ms: int | None = None) -> _Found:
        """Until the socket is ready, a connection comes or goes, or something was left in the outbox."""
        self._poller.register(self.socket, flags)
        ready = dict(self._poller.poll(timeout_ms))
        if self.outbox.fd in ready:
            self.outbox.note_awake()
        return _Found(self._monitor in ready, bool(ready.get(self.socket, 0) & zmq.POLLIN))

    def take_events(self) -> Iterator[tuple[int, int]]:
        """What happened to connections, and to which of the kernel's."""
        while int(self._monitor.get(zmq.EVENTS)) & zmq.POLLIN:
            event = recv_monitor_message(self._monitor)
            yield event["event"], event["value"]

    def receive(self, reads_all: bool = False) -> Iterator[tuple[Source, list[Frame]]]:
        """Of those that are there some, so that nobody who sends much keeps others from being heard."""
        num_read = 0
        while reads_all or num_read < MAX_READ_IN_A_ROW:
            try:
                parts = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            num_read += 1
            routing_id = parts.pop(0).bytes if self.socket.type == zmq.ROUTER else b""
            if parts:
                yield Source(routing_id, int(parts[0].get(zmq.SRCFD))), [_content(part) for part in parts]

    def send_waiting(self, try_send: Callable[[T], bool]) -> None:
        while not self.outbox.is_empty and try_send(self.outbox.first()):
            self.outbox.remove_first()

    def try_send(self, frames: Sequence[Frame]) -> bool:
        try:
            self.send(frames)
        except (zmq.Again, _NobodyThereError):
            return False
        return True

    def send(self, frames: Sequence[Frame]) -> None:
        """Raises zmq.Again if its reader has too many unread, and _NobodyThereError."""
        try:
            self.socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                raise _NobodyThereError from error
            raise


def _close_all(context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes]) -> None:
    socket.close(linger=0)
    context.destroy(linger=0)


def _num_bytes(frames: Sequence[Frame]) -> int:
    return MESSAGE_OVERHEAD_BYTES + sum(map(len, frames))


def _content(part: zmq.Frame) -> Frame:
    return part.buffer if len(part) >= MIN_SHARED_BYTES else part.bytes
