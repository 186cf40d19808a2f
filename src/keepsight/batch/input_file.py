"""The file that a batch's requests are read from. It may be a pipe, from which nothing comes for any time."""

import io
import select
from collections.abc import Callable
from typing import Any

# How soon a read that waits notices that the batch is over.
_LOOK_MILLISECONDS = 200


class InputFile(io.FileIO):
    # Whether nobody waits for more: the file ends then, even in the middle of a line.
    is_over: Callable[[], bool] = staticmethod(lambda: False)

    def readinto(self, buffer: Any) -> int | None:
        poll = select.poll()
        poll.register(self, select.POLLIN)
        while not poll.poll(_LOOK_MILLISECONDS):
            if self.is_over():
                return 0
        return super().readinto(buffer)
