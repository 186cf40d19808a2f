"""Lets several processes accept on one socket, each one connection at a time, so that all of them get some.

By default an event loop accepts all pending connections as soon as it wakes: of 64 connections at once, two of four
processes got none. Here a busy process comes late and gets fewer.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import uvicorn

from keepsight.certificate import Certificate

logger = logging.getLogger(__name__)
# The delay after a failed accept, as when the process may open no more files.
RETRY_SECONDS = 1.0
# The interval of uvicorn's tick; the date in answers may be as old.
TICK_SECONDS = 1.0
# asyncio's own limit for ending TLS cuts off clients that still read; `slow_client_limits` has a better one.
GOODBYE_SECONDS = 24 * 60 * 60.0
# How long a shutdown waits for accepted connections to finish their TLS handshake and be handed over.
HAND_OVER_SECONDS = 0.1
# Probes of load balancers connect and leave every few seconds, and so may any stranger.
SECONDS_BETWEEN_COMPLAINTS = 60.0


class FairAcceptServer(uvicorn.Server):
    # Called once connections are accepted: nothing else can fail at startup.
    on_accepting: Callable[[], None] = staticmethod(lambda: None)
    # How long a client may take for the TLS handshake; None: asyncio's default.
    handshake_seconds: float | None = None
    # None: without TLS. (uvicorn would load it once and for all.)
    certificate: Certificate | None = None
    _should_exit = False
    _acceptors: Sequence["Acceptor"] = ()
    # While `main_loop` runs: its event loop, and the event that ends it.
    _ending: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    @property
    def should_exit(self) -> bool:
        return self._should_exit

    @should_exit.setter
    def should_exit(self, should_exit: bool) -> None:
        """Safe to call from any thread and from a signal handler."""
        self._should_exit = should_exit
        if should_exit and self._ending is not None:
            event_loop, ending = self._ending
            event_loop.call_soon_threadsafe(ending.set)

    async def main_loop(self) -> None:
        """Run until `should_exit` is set; uvicorn's own loop wakes ten times a second to check it."""
        ending = asyncio.Event()
        self._ending = asyncio.get_running_loop(), ending
        try:
            while not await self.on_tick(0):
                with suppress(TimeoutError):
                    async with asyncio.timeout(TICK_SECONDS):
                        await ending.wait()
        finally:
            self._ending = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        while self.certificate is not None and self.certificate.get() is None:
            if self.should_exit:
                return
            # It is being renewed just as this process takes a lost one's place: clients wait in line.
            await asyncio.sleep(RETRY_SECONDS)
        protocol: Any = self.config.http_protocol_class
        make_protocol = partial(
            protocol, config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        self._acceptors = [
            Acceptor(each, make_protocol, self.certificate, self.handshake_seconds) for each in sockets or ()
        ]
        self.on_accepting()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for acceptor in self._acceptors:
            acceptor.close()
        # This must come first: uvicorn then tells each connection that it knows to end, once.
        await asyncio.gather(*(acceptor.finish() for acceptor in self._acceptors))
        await super().shutdown(sockets)


class Acceptor:
    """Accepts connections on the running event loop until closed; does not own the socket."""

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        certificate: Certificate | None = None,
        handshake_seconds: float | None = None,
    ) -> None:
        listener.setblocking(False)
        self._listener, self._make_protocol, self._certificate = listener, make_protocol, certificate
        # asyncio takes these only with TLS.
        self._patience: dict[str, float | None] = {}
        if certificate is not None:
            self._patience = {"ssl_handshake_timeout": handshake_seconds, "ssl_shutdown_timeout": GOODBYE_SECONDS}
        self._event_loop = asyncio.get_running_loop()
        # Connections that were accepted but not yet handed to their protocols.
        self._handshakes = set[asyncio.Task[None]]()
        self._retry: asyncio.TimerHandle | None = None
        self._quiet_until = float("-inf")
        self._listen()

    def close(self) -> None:
        self._event_loop.remove_reader(self._listener)
        if self._retry is not None:
            self._retry.cancel()

    async def finish(self) -> None:
        """After `close`: hand over accepted connections, or cut them off if that takes too long."""
        if not self._handshakes:
            return
        _, late = await asyncio.wait(self._handshakes, timeout=HAND_OVER_SECONDS)
        for handshake in late:
            handshake.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    def _listen(self) -> None:
        self._event_loop.add_reader(self._listener, self._accept_one)

    def _accept_one(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # another process was faster; the client has left
            return
        except OSError as error:
            logger.error("no connection can be accepted; retrying in %g s: %s", RETRY_SECONDS, error)
            self._event_loop.remove_reader(self._listener)
            self._retry = self._event_loop.call_later(RETRY_SECONDS, self._listen)
            return
        connection.setblocking(False)
        handshake = self._event_loop.create_task(self._hand_over(connection))
        self._handshakes.add(handshake)
        handshake.add_done_callback(self._handshakes.discard)

    async def _hand_over(self, connection: socket.socket) -> None:
        tls = None
        if self._certificate is not None:
            tls = self._certificate.get()
            assert tls is not None, "would be served without TLS"
        try:
            await self._event_loop.connect_accepted_socket(self._make_protocol, connection, ssl=tls, **self._patience)
        except OSError as error:  # includes TLS errors
            self._complain(error)

    def _complain(self, error: OSError) -> None:
        now = self._event_loop.time()
        if is_loud := now >= self._quiet_until:
            self._quiet_until = now + SECONDS_BETWEEN_COMPLAINTS
        # Its type, too: a client that leaves gives an error without a text.
        logger.log(logging.INFO if is_loud else logging.DEBUG, "a connection could not be set up: %r", error)
