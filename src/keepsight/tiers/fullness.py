"""A tier that takes nothing more is told of once, until it keeps something again.  What it has can still be read."""

import logging

logger = logging.getLogger(__name__)


class Fullness:
    def __init__(self, place: object) -> None:
        self._place, self._is_told = place, False

    def tell(self, why: object) -> None:
        if not self._is_told:
            self._is_told = True
            logger.error("%s takes nothing more: %s", self._place, why)

    def end(self) -> None:
        self._is_told = False
