"""Logs once, not for each entry, that a tier has no room for more. The entries it has can still be read."""

import logging

logger = logging.getLogger(__name__)


class Fullness:
    def __init__(self, place: object, max_bytes: int | None) -> None:
        self._place, self._max_bytes = place, max_bytes
        self._has_turned_away = False
        # The bytes of the smallest entry refused since the last log line, if any.
        self._refused: int | None = None

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

    def report(self, reason: object, num_bytes: int = 0) -> None:
        """Log that the tier accepts nothing more; not again until there has been more room (`end`)."""
        if self._refused is None:
            logger.error("%s accepts no more entries: %s", self._place, reason)
            self._refused = num_bytes
        self._refused = min(num_bytes, self._refused)

    def end(self, num_bytes: int) -> None:
        """Note that an entry was kept. One smaller than all refused ones does not show that there is more room."""
        if self._refused is not None and num_bytes >= self._refused:
            self._refused = None
