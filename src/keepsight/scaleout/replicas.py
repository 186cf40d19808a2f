"""The servers behind the router. Each is asked every second whether it is ready; the set may change at any time.

A server whose connections fail is unready from then on, until it says that it is ready. Used on one event loop.
"""

import asyncio
import logging
from collections.abc import Collection, Sequence

import msgspec

from keepsight.errors import ReplicaLostError
from keepsight.scaleout.replica import Answer, Question, Replica, State

logger = logging.getLogger(__name__)
SECONDS_BETWEEN_CHECKS = 1.0
# A busy server answers late, one that is stopped never.
MAX_CHECK_SECONDS = 10.0


class _Readiness(msgspec.Struct):
    status: str


class Replicas:
    def __init__(self) -> None:
        self._watches: dict[Replica, asyncio.Task[None]] = {}
        # Replaced each time that it is set.
        self._changed = asyncio.Event()

    @property
    def all(self) -> Collection[Replica]:
        return self._watches.keys()

    @property
    def ready(self) -> Sequence[Replica]:
        return [replica for replica in self._watches if replica.state == "ready"]

    def add(self, address: str) -> Replica:
        """Add a server, such as http://10.0.0.1:8000; it gets requests once it is ready."""
        replica = Replica(address)
        self._watches[replica] = asyncio.create_task(self._watch(replica))
        return replica

    async def remove(self, address: str) -> None:
        """Give a server no more requests; those that it is answering go on."""
        replica = next(each for each in self._watches if each.address == address)
        watch = self._watches.pop(replica)
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        self._note_change()
        await replica.close_idle()

    def note_lost(self, replica: Replica, lost: ReplicaLostError) -> None:
        """Give a server no requests until it says that it is ready. If nobody listens there, its caches are gone."""
        self._set_state(replica, "unready", str(lost))
        if not lost.may_have_begun:
            replica.forget()

    async def wait_for_change(self) -> None:
        """Wait until the state of any server changes."""
        await self._changed.wait()

    async def ask_all(self, question: Question, max_seconds: float) -> dict[Replica, Answer]:
        """Return the whole answers of all servers that are ready, but for those that fail to answer."""
        asked = self.ready
        answers = await asyncio.gather(*(self._try_to_ask(replica, question, max_seconds) for replica in asked))
        return {replica: answer for replica, answer in zip(asked, answers, strict=True) if answer is not None}

    async def _try_to_ask(self, replica: Replica, question: Question, max_seconds: float) -> Answer | None:
        try:
            return await _ask_within(max_seconds, replica, question)
        except ReplicaLostError as lost:
            self.note_lost(replica, lost)
            return None

    async def _watch(self, replica: Replica) -> None:
        host = replica.address.partition("://")[2].encode()
        question = Question(b"GET", b"/ready", [(b"host", host), (b"accept", b"*/*")])
        while True:
            self._set_state(replica, *await _check(replica, question))
            await replica.close_expired()
            await asyncio.sleep(SECONDS_BETWEEN_CHECKS)

    def _set_state(self, replica: Replica, state: State, reason: str) -> None:
        if replica.state != state:
            replica.state = state
            replica.was_ready |= state == "ready"
            logger.log(
                logging.INFO if state == "ready" else logging.WARNING, "%s is %s: %s", replica.address, state, reason
            )
            self._note_change()

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


async def _check(replica: Replica, question: Question) -> tuple[State, str]:
    """Return its state, and why."""
    try:
        answer = await _ask_within(MAX_CHECK_SECONDS, replica, question)
        status = msgspec.json.decode(answer.held or b"", type=_Readiness).status
    except ReplicaLostError as lost:
        return "unready", str(lost)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return "unready", f"it answers /ready with status {answer.status}, and not as `keepsight serve` does"
    return ("ready" if answer.status == 200 else "unready"), f"it says {status[:80]!r}"


async def _ask_within(seconds: float, replica: Replica, question: Question) -> Answer:
    """Return the whole answer."""
    try:
        async with asyncio.timeout(seconds):
            answer = await replica.ask(question)
            await answer.hold()
    except TimeoutError:
        raise ReplicaLostError(f"it does not answer within {seconds:g} s", may_have_begun=True) from None
    return answer
