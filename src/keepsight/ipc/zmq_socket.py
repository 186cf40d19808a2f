"""A ZeroMQ socket that one thread reads and any thread may write to, with its connection events and an outbox.

Knows nothing of the messages' content. If no other message is waiting, the caller's thread sends at once, as waking a
thread takes longer than sending; what cannot be sent at once waits in the outbox for the socket's thread. No sender
ever waits for a reader. Invariant: messages leave in the order in which they were given.
"""

import errno
import select
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, Literal, NamedTuple, TypeVar

import zmq
from zmq.utils.monitor import recv_monitor_message

from keepsight.ipc.codec import Frame
from keepsight.ipc.outbox import Outbox
from keepsight.ipc.peers import Source
from keepsight.requests import MAX_PIXEL_BYTES

T = TypeVar("T")
# Plain integers, which are faster to combine and to query with than pyzmq's enums.
CAN_READ, CAN_SEND, STATE = int(zmq.POLLIN), int(zmq.POLLOUT), int(zmq.EVENTS)
MAX_READ_IN_A_ROW = 64
# Smaller frames are cheaper to copy than to share.
MIN_SHARED_BYTES = 2**16
RECONNECT_MS = 20


class ConnectionLostError(Exception):
    """The connection is lost. The turn that raises it is the last."""


class NobodyThereError(Exception):
    """The connection that a message is for is gone."""


class UnreadError(Exception):
    """The reader of a message has too many unread ones, or there is no reader yet."""


class ConnectionEvent(NamedTuple):
    is_new: bool
    # The connection's file descriptor.
    fd: int


class ZmqSocket(Generic[T]):
    def __init__(
        self, kind: Literal["connects", "listens"], name: str, max_outbox_bytes: int, max_unsent: int, max_unread: int
    ) -> None:
        """`max_unsent`, `max_unread`: messages that ZeroMQ queues for each connection. Raises OSError."""
        self.outbox = Outbox[T](max_outbox_bytes)
        # Guards the socket, and the order of what is sent. Never held while the owner's callbacks run.
        self.lock = threading.RLock()
        self._listens = kind == "listens"
        with _as_os_error():
            self._context = zmq.Context()
            self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER if self._listens else zmq.DEALER)
        self._socket.linger = 0
        self._socket.maxmsgsize = MAX_PIXEL_BYTES
        self._socket.sndhwm, self._socket.rcvhwm = max_unsent, max_unread
        if self._listens:
            # Sending to a missing or slow peer fails, instead of silently dropping the message.
            self._socket.router_mandatory = True
        else:
            # Not `immediate`: the queue would be destroyed with the connection, unread messages included; if that
            # happens between two parts of one message, libzmq aborts the process.
            self._socket.reconnect_ivl = RECONNECT_MS
        # A context that is garbage collected together with its open sockets blocks the collection forever.
        self._free_sockets = weakref.finalize(self, _close_all, self._context, self._socket)
        self._free_sockets.atexit = False
        self._name = name
        # Guards `_thread`.
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self, endpoint: str, turn: Callable[[], None], end: Callable[[str, bool], None]) -> None:
        """Start the thread. It calls `turn` over and over, then `end` with the reason and whether that was `close`.

        Raises OSError.
        """
        with self._starting:
            if self.outbox.is_closed:
                end("the connection was closed", True)
                return
            thread = threading.Thread(target=self._run, args=(turn, end), name=self._name, daemon=True)
            try:
                self._prepare(endpoint)
                thread.start()
            except RuntimeError as error:  # no more threads, for now
                self._free()
                raise OSError(errno.EAGAIN, str(error)) from error
            except OSError:
                self._free()
                raise
            # Set only now: a thread that was never started cannot be joined.
            self._thread = thread

    def _prepare(self, endpoint: str) -> None:
        with _as_os_error():
            self._monitor = self._socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
            self._monitor_fd = int(self._monitor.get(zmq.FD))
            # Its descriptor signals later events only once the state has been read.
            self._monitor.get(STATE)
            # Descriptors rather than sockets: polling a socket uses it, while other threads may send.
            self._poll = select.poll()
            for fd in (int(self._socket.get(zmq.FD)), self._monitor_fd, self.outbox.fd):
                self._poll.register(fd, select.POLLIN)
            (self._socket.bind if self._listens else self._socket.connect)(endpoint)

    def close(self) -> None:
        with self._starting:
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
        except ConnectionLostError as lost:
            reason = str(lost)
        finally:
            is_closed = self.outbox.is_closed
            self._free()
            end(reason, is_closed)

    def _free(self) -> None:
        with self.lock:
            self.outbox.free()
            self._free_sockets()

    # From any thread ------------------------------------------------------------------------------------------

    def send_or_keep(self, item: T, num_bytes: int, try_send: Callable[[], bool]) -> bool:
        """Send at once, or leave it to the socket's thread. False: the socket was closed, or too much is waiting."""
        with self.lock:
            if self.outbox.is_closed:
                return False
            if not self.outbox.is_empty or not try_send():
                return self.outbox.try_put(item, num_bytes)
            # Sending consumes the descriptor's signal for received messages; nothing else would then wake the thread.
            if self._look() & CAN_READ:
                self.outbox.wake()
            return True

    def try_send(self, frames: Sequence[Frame]) -> bool:
        try:
            self.send(frames)
        except (UnreadError, NobodyThereError):
            return False
        return True

    def send(self, frames: Sequence[Frame]) -> None:
        """Send a message at once. Raises UnreadError and NobodyThereError."""
        try:
            with self.lock:
                self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again as error:
            raise UnreadError from error
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                raise NobodyThereError from error
            raise

    # Within a turn --------------------------------------------------------------------------------------------

    def wait(self, *, for_sending: bool = False, timeout_ms: int | None = None) -> bool:
        """Wait until something has come or can be sent, a connection comes or goes, or the outbox wakes the thread.

        Return whether there may be connection events.
        """
        wanted = CAN_READ | CAN_SEND if for_sending else CAN_READ
        ready = dict(self._poll.poll(0 if self._look() & wanted else timeout_ms))
        if self.outbox.fd in ready:
            self.outbox.note_awake()
        return self._monitor_fd in ready

    def take_events(self) -> Iterator[ConnectionEvent]:
        while int(self._monitor.get(STATE)) & CAN_READ:
            event = recv_monitor_message(self._monitor)
            yield ConnectionEvent(event["event"] == zmq.EVENT_ACCEPTED, event["value"])

    def receive(self, reads_all: bool = False) -> Iterator[tuple[Source, list[Frame]]]:
        """Yield some of the messages that have come, so that a busy sender does not keep others from being heard."""
        num_read = 0
        while (reads_all or num_read < MAX_READ_IN_A_ROW) and self._look() & CAN_READ:
            num_read += 1
            with self.lock:
                parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            routing_id = parts.pop(0).bytes if self._listens else b""
            if parts:
                yield Source(routing_id, int(parts[0].get(zmq.SRCFD))), [_content(part) for part in parts]

    def send_waiting(self, try_send: Callable[[T], bool]) -> None:
        while not self.outbox.is_empty and try_send(self.outbox.first()):
            self.outbox.remove_first()

    def _look(self) -> int:
        """Return the socket's state: whether it can be read and written."""
        with self.lock:
            return int(self._socket.get(STATE))


@contextmanager
def _as_os_error() -> Iterator[None]:
    try:
        yield
    except zmq.ZMQError as error:
        raise OSError(error.errno, str(error)) from error


def _close_all(context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes]) -> None:
    socket.close(linger=0)
    context.destroy(linger=0)


def _content(part: zmq.Frame) -> Frame:
    return part.buffer if len(part) >= MIN_SHARED_BYTES else part.bytes
