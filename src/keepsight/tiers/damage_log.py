"""Logs damaged entries: the first ones each, then how many whenever that has doubled: a whole disk may be damaged."""

import logging

logger = logging.getLogger(__name__)

_NUM_EACH = 20


class DamageLog:
    def __init__(self, place: object) -> None:
        self._place = place
        self._next_number = 2 * _NUM_EACH
        self.num_damaged = 0

    def report(self, entry: object, reason: object, fate: str) -> None:
        self.num_damaged += 1
        if self.num_damaged <= _NUM_EACH:
            logger.warning("%s was damaged (%s): %s", entry, reason, fate)
        elif self.num_damaged >= self._next_number:
            self._next_number *= 2
            logger.warning("%d entries of %s were damaged so far; not each is logged", self.num_damaged, self._place)
