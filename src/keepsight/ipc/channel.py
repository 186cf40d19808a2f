"""The connections between frontends and an engine.

Each end has a thread, which sleeps until there is something to read, and calls back. Senders never wait. Nothing is
accepted before the handshake, a lost connection is never resumed, and every queue is bounded. Endpoints are files:
anyone who can reach one can connect.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial

from keepsight.errors import HandshakeError, WireError
from keepsight.ipc.codec import (
    Frame,
    cut_into_messages,
    decode_from_engine,
    decode_to_engine,
    encode_from_engine,
    encode_to_engine,
    try_read_media_hash,
    try_read_request_id,
)
from keepsight.ipc.handshake import (
    HELLO,
    REFUSED,
    Hello,
    Welcome,
    decode_answer,
    decode_hello,
    encode_hello,
    encode_refusal,
    encode_welcome,
)
from keepsight.ipc.peers import Peer, Peers, Source
from keepsight.ipc.zmq_socket import ConnectionLostError, NobodyThereError, UnreadError, ZmqSocket
from keepsight.requests import MAX_PIXEL_BYTES, FromEngine, Received, RequestFailed, ToEngine, UnreadableMedia

logger = logging.getLogger(__name__)

# The recipient's id (None: all) and the frames (None: drop the recipient).
_Outgoing = tuple[str | None, list[Frame] | None]

# Messages queued per connection and side. Few to the engine, though small ones are then slower: each may have
# `MAX_PIXEL_BYTES`, and others wait in the outbox, which counts bytes. Many from it: outputs are small, and a frontend
# that lags this far behind is cut off.
MAX_MESSAGES_TO_ENGINE = 4
MAX_MESSAGES_FROM_ENGINE = 4096
MAX_OUTBOX_BYTES = 2**30
# The largest item leaves room for others: one that found none would end the connection. So would several of that size
# sent at once, faster than the engine reads them.
MAX_OUTBOX_BYTES_TO_ENGINE = MAX_PIXEL_BYTES + MAX_OUTBOX_BYTES
# Approximate memory that a waiting message takes besides its frames.
MESSAGE_OVERHEAD_BYTES = 512
# Pause between attempts to tell a frontend that it was cut off, if it does not read.
RESEND_MS = 1000
DOES_NOT_READ = "it did not read what the engine sent"


class FrontendChannel:
    """A frontend's connection to an engine. Once it is lost, a new one has to be made."""

    def __init__(
        self,
        endpoint: str,
        frontend_id: str,
        on_outputs: Callable[[Sequence[FromEngine]], None],
        on_lost: Callable[[str], None],
        on_welcome: Callable[[Welcome], None] = lambda _: None,
        max_outbox_bytes: int = MAX_OUTBOX_BYTES_TO_ENGINE,
    ) -> None:
        """All callbacks run on the channel's thread: `on_welcome` before all outputs, perhaps even if `connect` raises.

        `on_lost` gets the reason, at most once and as the last callback. It is not called if `connect` raises, nor
        after `close` has returned.
        """
        self._endpoint, self._hello = endpoint, encode_hello(Hello(frontend_id))
        self._on_outputs, self._on_lost, self._on_welcome = on_outputs, on_lost, on_welcome
        self._answered = threading.Event()
        self._has_greeted = self._has_missed_something = False
        self._welcome: Welcome | None = None
        self._reason_of_end: str | None = None
        limits = max_outbox_bytes, MAX_MESSAGES_TO_ENGINE, MAX_MESSAGES_FROM_ENGINE
        self._io = ZmqSocket[list[Frame]]("connects", f"channel of {frontend_id}", *limits)

    def connect(self, timeout: float) -> Welcome:
        """Wait until an engine is there and answers. On HandshakeError the channel is closed."""
        self._io.start(self._endpoint, self._turn, self._end)
        self._answered.wait(timeout)
        if self._welcome is not None:
            return self._welcome
        reason = self._reason_of_end or f"no engine answered at {self._endpoint} within {timeout:g} s"
        self.close()
        raise HandshakeError(reason)

    def send(self, message: ToEngine) -> bool:
        """Send from any thread. False: nobody will read it, or too much is waiting, and the connection is given up."""
        if self._welcome is None or self._reason_of_end is not None:
            return False
        frames = encode_to_engine(message)
        is_taken = self._io.send_or_keep(frames, _num_bytes(frames), partial(self._io.try_send, frames))
        if not is_taken:
            # The engine would wait for the missing message forever.
            self._has_missed_something = True
            self._io.outbox.wake()
        return is_taken

    def close(self) -> None:
        """Close the channel. May be called at any time, from any thread, more than once."""
        self._io.close()

    # On its own thread ----------------------------------------------------------------------------------------

    def _turn(self) -> None:
        has_events = self._io.wait(for_sending=not self._has_greeted or not self._io.outbox.is_empty)
        # Checked before reading, so that all that came before the end is read before the end is reported.
        is_cut = has_events and bool(list(self._io.take_events()))
        for _, frames in self._io.receive(reads_all=is_cut):
            self._read(frames)
        if is_cut and self._welcome is not None:
            raise ConnectionLostError("the engine's process ended")
        if self._has_missed_something:
            raise ConnectionLostError("the engine does not read its messages")
        self._has_greeted = (self._has_greeted and not is_cut) or self._io.try_send(self._hello)
        if self._welcome is not None:
            self._io.send_waiting(self._io.try_send)

    def _read(self, frames: list[Frame]) -> None:
        try:
            if self._welcome is None or frames[0] == REFUSED:
                self._welcome = decode_answer(frames)
                self._answered.set()
                self._on_welcome(self._welcome)
            else:
                self._on_outputs(decode_from_engine(frames))
        except (HandshakeError, WireError) as error:
            raise ConnectionLostError(str(error)) from error

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
        on_message: Callable[[str, Received], None],
        on_lost: Callable[[str], None],
        max_messages_from_engine: int = MAX_MESSAGES_FROM_ENGINE,
        on_welcomed: Callable[[], None] = lambda: None,
    ) -> None:
        """Listen at once. All callbacks run on the listener's thread, the first two with the frontend's id.

        `on_lost`: the frontend ended, does not read, or connected anew under its id and knows nothing of before.
        `on_welcomed`: one more frontend gets what is sent to all from now on.
        """
        self._welcome = encode_welcome(welcome)
        self._on_message, self._on_lost, self._on_welcomed = on_message, on_lost, on_welcomed
        self._peers = Peers()
        self._last_refusal = ""
        # File descriptors of the open connections.
        self._open_fds: set[int] = set()
        # Routing ids of connections that were cut off, and the reasons that they could not be told yet.
        self._unsent_reasons: dict[bytes, str] = {}
        limits = MAX_OUTBOX_BYTES, max_messages_from_engine, MAX_MESSAGES_TO_ENGINE
        self._io = ZmqSocket[_Outgoing]("listens", "engine listener", *limits)
        self._io.start(endpoint, self._turn, lambda reason, is_closed: None)

    def send(self, frontend_id: str, outputs: Sequence[FromEngine]) -> bool:
        """Send from any thread. False: the listener is closed or too far behind; then `forget` the frontend."""
        return all(self._send_message(frontend_id, encode_from_engine(each)) for each in cut_into_messages(outputs))

    def _send_message(self, frontend_id: str, frames: list[Frame]) -> bool:
        try_send = partial(self._try_send_now, frontend_id, frames)
        return self._io.send_or_keep((frontend_id, frames), _num_bytes(frames), try_send)

    def send_to_all(self, outputs: Sequence[FromEngine]) -> bool:
        """Send to all frontends. False: the listener is closed or too far behind, and not all of it is sent."""
        messages = map(encode_from_engine, cut_into_messages(outputs))
        return all(self._io.outbox.try_put((None, frames), _num_bytes(frames)) for frames in messages)

    def forget(self, frontend_id: str) -> None:
        """Drop a frontend that ended or missed something. The caller knows that: `on_lost` is not called."""
        # Of size 0, to fit into a full outbox: it makes room.
        self._io.outbox.try_put((frontend_id, None), 0)

    def close(self) -> None:
        """Close the listener. May be called at any time, from any thread, more than once."""
        self._io.close()

    def _try_send_now(self, frontend_id: str, frames: list[Frame]) -> bool:
        """Send now if possible. A frontend that cannot be sent to now is left to the listener's thread."""
        peer = self._peers.named(frontend_id)
        return peer is not None and self._try_send(peer, frames)

    def _try_send(self, peer: Peer, frames: list[Frame]) -> bool:
        return self._io.try_send([peer.source.routing_id, *frames])

    # On its own thread ----------------------------------------------------------------------------------------

    def _turn(self) -> None:
        self._io.wait(timeout_ms=RESEND_MS if self._unsent_reasons else None)
        self._note_connections()
        for source, frames in self._io.receive():
            self._read(source, frames)
        self._io.send_waiting(self._send)
        for routing_id, reason in list(self._unsent_reasons.items()):
            self._refuse(routing_id, reason)

    def _note_connections(self) -> None:
        for event in self._io.take_events():
            if event.is_new:
                self._open_fds.add(event.fd)
            else:
                self._open_fds.discard(event.fd)
                self._lose(self._peers.at_fd(event.fd))

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
        # The kernel reuses descriptors. Events of this one's previous connection, if any, have arrived by now.
        self._note_connections()
        if source.fd not in self._open_fds:
            return
        try:
            self._welcome_peer(Peer(decode_hello(frames).frontend_id, source))
        except (WireError, HandshakeError) as error:
            reason = str(error)
            # Frontends that are refused try again several times a second.
            if frames[0] == HELLO and reason != self._last_refusal:
                logger.warning("a frontend was refused: %s", reason)
                self._last_refusal = reason
            self._refuse(source.routing_id, reason)

    def _welcome_peer(self, peer: Peer) -> None:
        self._lose(self._peers.at_fd(peer.source.fd))
        self._lose(self._peers.named(peer.frontend_id), "another frontend connected under this name")
        # Waiting messages are only for frontends that were connected already.
        self._io.send_waiting(self._send)
        with self._io.lock:  # no other thread sends it anything before
            self._peers.add(peer)
            is_sent = self._try_send(peer, self._welcome)
        if is_sent:
            self._on_welcomed()
        else:
            self._lose(peer, DOES_NOT_READ)

    def _complain(self, peer: Peer, frames: list[Frame], error: WireError) -> None:
        if not peer.has_sent_unreadable:
            peer.has_sent_unreadable = True
            logger.error("frontend %s sent an unreadable message: %s", peer.frontend_id, error)
        if (request_id := try_read_request_id(frames)) is not None:
            failed = RequestFailed(request_id, f"the engine could not read the request: {error}")
            self._send_to(peer, encode_from_engine([failed]))
        if (media_hash := try_read_media_hash(frames)) is not None:
            unreadable = UnreadableMedia(media_hash, f"the engine could not read the pixels of {media_hash}: {error}")
            self._on_message(peer.frontend_id, unreadable)

    def _send(self, outgoing: _Outgoing) -> bool:
        """Send to one frontend or all. Always returns True: the message is done with, whether sent or not."""
        frontend_id, frames = outgoing
        for peer in self._peers.all() if frontend_id is None else [self._peers.named(frontend_id)]:
            if peer is None:
                continue
            if frames is None:
                self._drop(peer, "the engine has dropped this frontend")
            else:
                self._send_to(peer, frames)
        return True

    def _send_to(self, peer: Peer, frames: list[Frame]) -> None:
        if not self._try_send(peer, frames):
            self._lose(peer, DOES_NOT_READ)

    def _lose(self, peer: Peer | None, reason: str | None = None) -> None:
        if peer is not None:
            self._drop(peer, reason)
            self._on_lost(peer.frontend_id)

    def _drop(self, peer: Peer, reason: str | None) -> None:
        """Remove a frontend. `reason`: told to it; None: it has ended, and cannot be told."""
        self._peers.remove(peer)
        if reason is not None:
            logger.warning("frontend %s is cut off: %s", peer.frontend_id, reason)
            self._refuse(peer.source.routing_id, reason)

    def _refuse(self, routing_id: bytes, reason: str) -> None:
        try:
            self._io.send([routing_id, *encode_refusal(reason)])
        except UnreadError:
            self._unsent_reasons[routing_id] = reason
            return
        except NobodyThereError:
            pass
        self._unsent_reasons.pop(routing_id, None)


def _num_bytes(frames: Sequence[Frame]) -> int:
    return MESSAGE_OVERHEAD_BYTES + sum(map(len, frames))
