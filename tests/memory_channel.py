"""A channel between frontends and an engine in one process, which may be disturbed."""

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Generic, TypeVar

from keepsight.ipc.codec import decode_from_engine, decode_to_engine, encode_from_engine, encode_to_engine
from keepsight.requests import FromEngine, ToEngine

T = TypeVar("T")


class _Line(Generic[T]):
    """Messages in transit; `put` may be called from any thread."""

    def __init__(self, fate: Callable[[T], int | None]) -> None:
        self._fate, self._lock = fate, Lock()
        self._messages: list[tuple[int, T]] = []

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, message: T) -> None:
        delay = self._fate(message)
        if delay is not None:
            with self._lock:
                self._messages.append((delay, message))

    def take(self) -> list[T]:
        with self._lock:
            taken = [message for delay, message in self._messages if delay == 0]
            self._messages = [(delay - 1, message) for delay, message in self._messages if delay]
            return taken


class MemoryChannel:
    """Messages are encoded and decoded.

    `fate` returns how many deliveries a message to the engine misses (others overtake it), or None if it is lost.
    """

    def __init__(self, fate: Callable[[ToEngine], int | None] = lambda _: 0) -> None:
        self._to_engine = _Line[ToEngine](fate)
        self._to_frontends = _Line[Sequence[FromEngine]](lambda _: 0)

    @property
    def is_empty(self) -> bool:
        return not (len(self._to_engine) or len(self._to_frontends))

    def send_to_engine(self, message: ToEngine) -> bool:
        self._to_engine.put(decode_to_engine([bytes(frame) for frame in encode_to_engine(message)]))
        return True

    def send_to_frontends(self, outputs: Sequence[FromEngine]) -> None:
        self._to_frontends.put(decode_from_engine([bytes(frame) for frame in encode_from_engine(outputs)]))

    def deliver_to_engine(self, put: Callable[[ToEngine], object]) -> None:
        for message in self._to_engine.take():
            put(message)

    def deliver_to_frontends(self, *receivers: Callable[[Sequence[FromEngine]], object]) -> None:
        """Give all messages to all receivers, which ignore those for others."""
        for outputs in self._to_frontends.take():
            for receive in receivers:
                receive(outputs)
