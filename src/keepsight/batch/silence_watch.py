"""Notices that nothing comes from a server any more.

An answer that comes whole may take any time, in which its connection is silent. So the server itself has to say
something now and then: another answer, or what its models are, whatever it says to that. It may also refuse
connections, as servers do that end and finish their answers.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from keepsight import lost_machines
from keepsight.bench.address import Address
from keepsight.bench.http_connection import connecting
from keepsight.errors import NoAnswerError

# Long for a server that is only busy.
MAX_SILENT_SECONDS = 60.0
SECONDS_BETWEEN_LOOKS = 10.0


class SilenceWatch:
    def __init__(self, address: Address, headers: Mapping[str, str]) -> None:
        self._address, self._headers = address, headers
        # Of the requests whose answers have not come.
        self._patience = set[asyncio.Timeout]()
        self._heard_at = 0.0

    def _note_heard(self) -> None:
        self._heard_at = asyncio.get_running_loop().time()

    @asynccontextmanager
    async def patiently(self) -> AsyncIterator[None]:
        """Wait for an answer while the server is heard. Raises NoAnswerError if it is not."""
        if not self._patience:
            self._note_heard()  # before it was not asked
        try:
            async with asyncio.timeout(None) as patience:
                self._patience.add(patience)
                try:
                    yield
                    self._note_heard()
                finally:
                    self._patience.discard(patience)
        except TimeoutError:
            if not patience.expired():
                raise
            raise NoAnswerError(f"nothing has come from it for {MAX_SILENT_SECONDS:g} s", is_unreachable=True) from None

    async def run(self) -> None:
        while True:
            await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
            if self._patience and await self._says_something():
                self._note_heard()
            if asyncio.get_running_loop().time() - self._heard_at >= MAX_SILENT_SECONDS:
                given_up, self._patience = self._patience, set()
                for each in given_up:
                    each.reschedule(0)

    async def _says_something(self) -> bool:
        try:
            async with asyncio.timeout(MAX_SILENT_SECONDS), connecting(self._address) as connection:
                await connection.get("/models", self._headers)
        except OSError as error:
            return not isinstance(error, TimeoutError) and error.errno not in lost_machines.FAULTS
        except (EOFError, ValueError, NoAnswerError):
            pass  # nor is that silence
        return True
