"""A question to all connected engines: where are these media held?

Knows neither requests nor hints. Asked and awaited on an event loop, answered from any thread. Invariant: it waits only
for engines that were asked and have neither answered nor ended, and never longer than `ANSWER_SECONDS`.
"""

import asyncio
import os
from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import NamedTuple

from keepsight.frontend.caller import ConnectedEngine
from keepsight.media import EMBEDDING_TIERS
from keepsight.requests import CachesReset, FindMedia, MediaFound

# Engines answer between two steps. One whose step takes longer is left out.
ANSWER_SECONDS = 1.0


class MediaPlaces(NamedTuple):
    """Where any engine holds all the media of a question."""

    # The tiers that hold their embeddings, nearest first.
    embeddings: tuple[str, ...] = ()
    # Whether prompts with them may find keys and values.
    is_in_prefixes: bool = False


class MediaQuery:
    def __init__(self, media_hashes: Iterable[str]) -> None:
        self.query_id = os.urandom(16).hex()
        self._media_hashes = tuple(dict.fromkeys(media_hashes))
        self._event_loop, self._is_over = asyncio.get_running_loop(), asyncio.Event()
        # Ranks of the engines that may still answer.
        self._awaited: set[int] = set()
        self._found: list[MediaFound] = []

    def ask(self, engines: Collection[ConnectedEngine]) -> None:
        # All before the first is asked: it may answer at once.
        self._awaited = {engine.rank for engine in engines}
        message = FindMedia(self.query_id, self._media_hashes)
        unreached = [engine.rank for engine in engines if not engine.send(message)]
        self._awaited.difference_update(unreached)
        self._end_if_answered()

    def take(self, answer: MediaFound | CachesReset, rank: int) -> None:
        if rank in self._awaited and isinstance(answer, MediaFound):
            self._found.append(answer)
            self.lose(rank)

    def lose(self, rank: int) -> None:
        """Note that an engine will not answer (any more)."""
        self._awaited.discard(rank)
        self._end_if_answered()

    def give_up(self) -> None:
        self._awaited.clear()
        self._end_if_answered()

    async def wait(self) -> MediaPlaces:
        """Wait for the answers, and return them as one."""
        with suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._is_over.wait()
        found = tuple(self._found)
        tiers = {tier for each in found for tier in each.embeddings}
        # Read by people, and only as good as its sender: in one order, and with no other names.
        embeddings = tuple(tier for tier in EMBEDDING_TIERS if tier in tiers)
        return MediaPlaces(embeddings, any(each.is_in_prefixes for each in found))

    def _end_if_answered(self) -> None:
        if not self._awaited:
            with suppress(RuntimeError):  # the event loop was closed, and nobody waits
                self._event_loop.call_soon_threadsafe(self._is_over.set)
