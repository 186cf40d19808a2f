"""Logs once, not for each entry, that a tier has no room for more. The entries it has can still be read."""

import logging

logger = logging.getLogger(__name__)


class Fullness:
    def __init__(self, place: object, max_bytes: int | None) -> None:
        self._place, self._max_bytes = place, max_bytes
        self._is_logged = self._has_turned_away = False

    def turns_away(self, num_bytes: int) -> bool:
        """Return True if an entry is larger than the whole tier."""
        if self._max_bytes is None or num_bytes <= self._max_bytes:
            return False
        if not self._has_turned_away:
            self._has_turned_away = True
            logger.warning(
                "an entry of %d bytes exceeds the %d bytes of %s: such entries are not stored there",
                num_bytes,
                self._max_bytes,
                self._place,
            )
        return True

    def report(self, reason: object) -> None:
        """Log that the tier accepts nothing more; not again until it has kept something (`end`)."""
        if not self._is_logged:
            self._is_logged = True
            logger.error("%s accepts no more entries: %s", self._place, reason)

    def end(self) -> None:
        self._is_logged = False
