"""Contents that only a decoder understands are looked at once for all who send them: at once, too, or later.

Knows neither contents nor decoders.  What fails, fails for all who wait for it; who comes later tries again.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from copy import copy

from keepsight.errors import PictureError
from keepsight.frontend.identity.known_media import KnownMedia
from keepsight.media import Geometry


class SharedLooks:
    def __init__(self, known: KnownMedia) -> None:
        self._known, self._lock = known, threading.Lock()
        self._running: dict[str, Future[Geometry]] = {}

    def recall_or_look(self, shown_as: str, field: str, look: Callable[[], Geometry]) -> Geometry:
        """`shown_as` names the content, and `field` is what its caller calls it."""
        with self._lock:
            if (geometry := self._known.recall_content(shown_as)) is not None:
                return geometry
            if (running := self._running.get(shown_as)) is None:
                own = self._running[shown_as] = Future()
        return self._look(shown_as, own, look) if running is None else _wait_for(running, field)

    def _look(self, shown_as: str, own: Future[Geometry], look: Callable[[], Geometry]) -> Geometry:
        try:
            geometry = look()
            self._known.learn_content(shown_as, geometry)
            own.set_result(geometry)
            return geometry
        except BaseException as error:
            own.set_exception(error)
            raise
        finally:
            with self._lock:
                del self._running[shown_as]


def _wait_for(running: Future[Geometry], field: str) -> Geometry:
    error = running.exception()
    if error is None:
        return running.result()
    # Never the same object: raised by many, it would gather the frames of them all.
    raise type(error)(field, error.message) if isinstance(error, PictureError) else copy(error)
