"""Keeps a client connected to the engine of one rank, the one that the supervisor names, for as long as that lives.

Knows nothing of requests or other ranks.  A connection that breaks while its engine lives (this process was too slow to
read) is made again; one whose engine died tells the last that it was sent, and then its end.  Invariant: the client is
connected exactly while there is a channel that has been welcomed and not lost.
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
# An engine is listening before it is named here.
CONNECT_SECONDS = 5.0
# Between two tries at an engine that is said to live.
RETRY_SECONDS = 0.2


class EngineLink:
    def __init__(
        self, client: EngineClient, frontend_id: str, on_welcome: Callable[[Welcome], None], rank: int = 0
    ) -> None:
        """`on_welcome` is called before each connecting of the client."""
        self._rank = rank
        self._client, self._frontend_id, self._on_welcome = client, frontend_id, on_welcome
        self._changed = threading.Condition(threading.RLock())
        # Of the engine, as far as there is one; and whether the connection is due again only after a pause.
        self._endpoint: str | None = None
        self._has_failed = False
        self._channel: FrontendChannel | None = None
        self._is_welcomed = False
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=f"engine link {rank}", daemon=True)
        self._thread.start()

    def engine_is_ready(self, endpoint: str) -> None:
        with self._changed:
            self._endpoint, self._has_failed = endpoint, False
            channel = self._channel
            self._changed.notify()
        if channel is not None:  # its engine is gone, even if it has not noticed
            # First: who is given to another engine must not hear of this one any more.
            channel.close()
            self._lose(channel, "the engine was replaced")

    def engine_is_lost(self) -> None:
        """Its channel is left to read what has come, and to find its end."""
        with self._changed:
            self._endpoint = None

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
        """The engine to connect to; None at the end."""
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
                if self._is_closed or self._endpoint != endpoint:  # told so before there was a channel to close
                    return
                self._channel = channel
            channel.connect(CONNECT_SECONDS)
        except (HandshakeError, OSError) as error:  # the latter: no more descriptors or threads, for now
            logger.warning("no connection to the engine: %s", error)
            with self._changed:
                self._has_failed = True
                if self._channel is not None:  # it may just have been welcomed all the same
                    self._lose(self._channel, str(error))

    # On its channel's thread, or whose it is to end that --------------------------------------------------------

    def _take(self, channel: FrontendChannel, welcome: Welcome) -> None:
        with self._changed:
            if self._channel is channel:  # it may be lost again already
                self._has_failed, self._is_welcomed = False, True
                self._on_welcome(welcome)
                self._client.connect(channel.send, self._rank, takes_unasked=welcome.takes_unasked)

    def _lose(self, channel: FrontendChannel, reason: str) -> None:
        with self._changed:
            if self._channel is channel:
                self._channel = None
                if self._is_welcomed:
                    self._is_welcomed = False
                    self._client.disconnect(reason, self._rank)
                self._changed.notify()
