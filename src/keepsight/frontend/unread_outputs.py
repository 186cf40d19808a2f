"""The outputs of one request that its reader has not taken yet: on one event loop, and limited.

A reader that waits for its client takes nothing, and the engine knows nothing of it. Far behind, it is cut off, like a
client that does not read at all: its outputs would fill the memory. One that is behind for lack of processor time never
is.
"""

import asyncio
from collections.abc import Callable

from keepsight.errors import SlowReaderError
from keepsight.frontend.caller import Outputs
from keepsight.requests import TokenOutput

# Tokens and log-probabilities that may wait, some 150 bytes each.
MAX_UNREAD_PARTS = 2**18
# How long a reader must have waited for its client to be cut off: less may be a delay in the network.
MAX_PAUSE_SECONDS = 1.0


class UnreadOutputs:
    def __init__(self, on_cut_off: Callable[[], object], clock: Callable[[], float]) -> None:
        self._on_cut_off, self._clock = on_cut_off, clock
        self._arrived: asyncio.Queue[Outputs] = asyncio.Queue()
        self._num_parts = 0
        # Since when the reader is busy with what it took last; in the future while it waits for more.
        self._busy_since = float("inf")

    def __bool__(self) -> bool:
        return not self._arrived.empty()

    def put(self, outputs: Outputs) -> None:
        self._num_parts += _count_parts(outputs)
        self._arrived.put_nowait(outputs)
        if self._num_parts > MAX_UNREAD_PARTS and self._clock() - self._busy_since > MAX_PAUSE_SECONDS:
            self._cut_off()

    async def take(self) -> Outputs:
        if self:
            # Outputs have piled up, as when the client did not read: `get` alone would never suspend, and no other task
            # would run until the end.
            self.note_read()
            await asyncio.sleep(0)
        else:
            self._busy_since = float("inf")
        outputs = await self._arrived.get()
        self._num_parts -= _count_parts(outputs)
        self.note_read()
        return outputs

    def note_read(self) -> None:
        """Called each time the reader is done with one of the outputs that it took."""
        self._busy_since = self._clock()

    def _cut_off(self) -> None:
        self._arrived, self._num_parts = asyncio.Queue(), 0
        self._arrived.put_nowait([SlowReaderError(f"more than {MAX_UNREAD_PARTS} tokens and log-probabilities waited")])
        self._on_cut_off()


def _count_parts(outputs: Outputs) -> int:
    """Return about how many there are: all tokens of a request have as many log-probabilities."""
    first = outputs[0]
    return len(outputs) * (1 + len(first.logprobs or ())) if isinstance(first, TokenOutput) else 1
