"""Keeps a client connected to the engine of one rank, the one that the supervisor names, for as long as it lives.

Knows nothing of requests or other ranks. A connection that breaks while its engine lives (this process was too slow to
read) is made again. If the engine died, what it had sent is delivered before the client is disconnected. Invariant: the
client is connected exactly while there is a channel that has been welcomed and not lost.
"""

import logging
import threading
from collections.abc import Callable
from functools import partial

from keepsight.errors import HandshakeError
from keepsight.frontend.engine_client import EngineClient
from keepsight.ipc.channel import FrontendChannel
from keepsight.ipc.handshake import Welcome

logger = logging.getLogger(__name__)
# Short, as an engine listens before the supervisor names it.
CONNECT_SECONDS = 5.0
# Pause between two attempts to connect to an engine that the supervisor believes alive.
RETRY_SECONDS = 0.2


class EngineLink:
    def __init__(
        self, client: EngineClient, frontend_id: str, on_welcome: Callable[[Welcome], None], rank: int = 0
    ) -> None:
        """`on_welcome` is called each time before the client is connected."""
        self._rank = rank
        self._client, self._frontend_id, self._on_welcome = client, frontend_id, on_welcome
        self._changed = threading.Condition(threading.RLock())
        # The engine's endpoint, None if there is no engine; and whether to pause before the next attempt to connect.
        self._endpoint: str | None = None
        self._has_failed = False
        # What was logged last, so that what stays true is not logged five times a second.
        self._complaint = ""
        self._channel: FrontendChannel | None = None
        self._is_welcomed = False
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=f"engine link {rank}", daemon=True)
        self._thread.start()

    def engine_is_ready(self, endpoint: str) -> None:
        with self._changed:
            self._endpoint, self._has_failed = endpoint, False
            self._client.expect(self._rank, lives=True)
            channel = self._channel
            self._changed.notify()
        if channel is not None:  # its engine is gone, even if the channel has not noticed
            # Closed first: requests that move to another engine must get nothing more from this one.
            channel.close()
            self._lose(channel, "the engine was replaced")

    def engine_is_lost(self) -> None:
        """Forget the endpoint. The channel stays open, to read what has arrived and find the connection's end."""
        with self._changed:
            self._endpoint = None
            self._client.expect(self._rank, lives=False)

    def close(self) -> None:
        with self._changed:
            self._is_closed, channel = True, self._channel
            self._changed.notify()
        if channel is not None:
            channel.close()
        self._thread.join()

    # On its own thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (endpoint := self._await_need()) is not None:
            self._connect(endpoint)

    def _await_need(self) -> str | None:
        """Wait until a connection is needed. Return the endpoint; None if the link is closed."""
        with self._changed:
            if self._has_failed:
                self._changed.wait(RETRY_SECONDS)
            while not self._is_closed and (self._endpoint is None or self._channel is not None):
                self._changed.wait()
            return None if self._is_closed else self._endpoint

    def _connect(self, endpoint: str) -> None:
        try:
            channel = FrontendChannel(
                endpoint,
                self._frontend_id,
                partial(self._client.receive, rank=self._rank),
                lambda reason: self._lose(channel, reason),
                lambda welcome: self._take(channel, welcome),
            )
            with self._changed:
                if self._is_closed or self._endpoint != endpoint:  # it changed before there was a channel to close
                    return
                self._channel = channel
            channel.connect(CONNECT_SECONDS)
        except (HandshakeError, OSError) as error:  # OSError: out of descriptors or threads, for now
            if self._complaint != (complaint := str(error)):
                logger.warning("no connection to the engine: %s", complaint)
            self._complaint = complaint
            with self._changed:
                self._has_failed = True
                if self._channel is not None:  # the welcome may have come in the meantime
                    self._lose(self._channel, str(error))

    # On the channel's thread, or the thread that ends it --------------------------------------------------------

    def _take(self, channel: FrontendChannel, welcome: Welcome) -> None:
        with self._changed:
            if self._channel is channel:  # it may already be lost again
                self._has_failed, self._is_welcomed, self._complaint = False, True, ""
                self._on_welcome(welcome)
                self._client.connect(
                    channel.send, self._rank, accepts_unrequested_pixels=welcome.accepts_unrequested_pixels
                )

    def _lose(self, channel: FrontendChannel, reason: str) -> None:
        with self._changed:
            if self._channel is channel:
                self._channel = None
                if self._is_welcomed:
                    self._is_welcomed = False
                    self._client.disconnect(reason, self._rank)
                self._changed.notify()
