"""How long a process has given no sign of life, as seen by one that may have stood still itself.

Pure except for the clock.
"""

import time
from collections.abc import Callable

from keepsight.ipc.control import SIGN_SECONDS

# No longer counted between two looks, however much time has passed: while a laptop slept, a container was frozen or
# this process had no memory, the other one could not give any sign, or it is still on its way.
LOOK_SECONDS = SIGN_SECONDS
# Silent for long: several signs are missing. A false alarm would be worse than a late one.
SILENT_SECONDS = 4 * SIGN_SECONDS


class Silence:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._looked_at, self.seconds = clock, clock(), 0.0
        # Whether it was found to be long.
        self.is_long = False

    def look(self) -> bool:
        """Count the time since the last look. Return True if the silence has just become long."""
        now = self._clock()
        self.seconds += min(now - self._looked_at, LOOK_SECONDS)
        self._looked_at = now
        was_long, self.is_long = self.is_long, self.seconds >= SILENT_SECONDS
        return self.is_long and not was_long

    def end(self) -> bool:
        """Note a sign of life. Return True if the silence was long."""
        was_long, self.is_long = self.is_long, False
        self._looked_at, self.seconds = self._clock(), 0.0
        return was_long
