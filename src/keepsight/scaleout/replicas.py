"""The servers behind the router. Each is asked every second whether it is ready; the set may change at any time.

A server whose connections fail is unready from then on, until it says that it is ready. Used on one event loop.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from time import monotonic

import msgspec

from keepsight.errors import ReplicaLostError, ServerOverloadedError
from keepsight.scaleout.replica import Question, Replica, WholeAnswer

logger = logging.getLogger(__name__)
SECONDS_BETWEEN_CHECKS = 1.0
# A server's event loop answers, which waits for no engine: one that says nothing for longer hangs, however busy it is,
# or its machine is lost.
MAX_CHECK_SECONDS = 10.0
# What a server serves.
_Kind = frozenset[tuple[str, str]]


class _Readiness(msgspec.Struct):
    status: str
    # Those of earlier versions do not say.
    serves: dict[str, str] = {}


class Replicas:
    def __init__(self) -> None:
        self._watches: dict[Replica, asyncio.Task[None]] = {}
        # What servers serve that do not serve the same; empty once all do.
        self._warned_of = frozenset[_Kind]()
        # Set once a server becomes ready or unready; replaced then.
        self.changed = asyncio.Event()
        # Questions whose answers nobody waits for any more. The event loop itself keeps no task alive.
        self._left = set[asyncio.Task[WholeAnswer | None]]()

    @property
    def all(self) -> Collection[Replica]:
        return self._watches.keys()

    @property
    def ready(self) -> Sequence[Replica]:
        return [replica for replica in self._watches if replica.is_ready]

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
        replica.close_idle()

    def note_lost(self, replica: Replica, lost: ReplicaLostError) -> None:
        """Give a server no requests until it says that it is ready."""
        if lost.how == "gone":
            replica.forget()
        if replica.is_ready:
            self._set_state(replica, False, str(lost))

    async def ask_all(
        self, question: Question, max_seconds: float, is_enough: Callable[[WholeAnswer], bool] = lambda _: False
    ) -> dict[Replica, WholeAnswer | None]:
        """Return the answers of all servers that are ready; None for those that fail to answer.

        `is_enough`: whether an answer makes those needless that have not come. They are left to come, as their
        connections can be used again then.
        """
        asked = {asyncio.create_task(self._try_to_ask(each, question, max_seconds)): each for each in self.ready}
        answers: dict[Replica, WholeAnswer | None] = {}
        waiting = {*asked}
        try:
            while waiting and not any(answer is not None and is_enough(answer) for answer in answers.values()):
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                answers |= {asked[each]: each.result() for each in done}
        except BaseException:
            for each in waiting:
                each.cancel()
            raise
        finally:
            for each in asked:
                self._left.add(each)
                each.add_done_callback(self._note_left)
        return answers

    def _note_left(self, asked: asyncio.Task[WholeAnswer | None]) -> None:
        self._left.discard(asked)
        if not asked.cancelled():
            asked.exception()  # or asyncio complains that nobody has seen it

    async def _try_to_ask(self, replica: Replica, question: Question, max_seconds: float) -> WholeAnswer | None:
        try:
            async with asyncio.timeout(max_seconds):
                return await (await replica.ask(question)).hold()
        except TimeoutError:
            self.note_lost(replica, ReplicaLostError(f"it does not answer within {max_seconds:g} s", True))
        except ReplicaLostError as lost:
            self.note_lost(replica, lost)
        return None

    async def _watch(self, replica: Replica) -> None:
        host = replica.address.partition("://")[2].encode()
        question = Question(b"GET", b"/ready", [(b"host", host), (b"accept", b"*/*")])
        alive_at = monotonic()
        while True:
            if await self._check(replica, question):
                alive_at = monotonic()
            elif monotonic() - alive_at >= MAX_CHECK_SECONDS:
                replica.give_up()
            replica.close_unusable()
            await asyncio.sleep(SECONDS_BETWEEN_CHECKS)

    async def _check(self, replica: Replica, question: Question) -> bool:
        """Ask a server whether it is ready. Return False if it hangs, or its machine may be lost.

        Any other failure says nothing of what it is answering: it may even refuse connections as it finishes that.
        """
        try:
            async with asyncio.timeout(MAX_CHECK_SECONDS):
                answer = await (await replica.ask(question)).hold()
            is_ready, reason, serves = _read_state(answer)
            self._set_state(replica, is_ready, reason)
            self._note_served(replica, serves)
        except TimeoutError:
            self._set_state(replica, False, f"it does not answer within {MAX_CHECK_SECONDS:g} s")
            return False
        except ReplicaLostError as lost:
            self.note_lost(replica, lost)
            self._set_state(replica, False, str(lost), needs_care=lost.how == "distrusted")
            return lost.how != "silent"
        except ServerOverloadedError:
            pass  # of the router itself, which says nothing of the server
        except Exception:  # nobody else would ask again
            logger.exception("%s cannot be asked whether it is ready", replica.address)
            self._set_state(replica, False, "asking it fails")
        return True

    def _set_state(self, replica: Replica, is_ready: bool, reason: str, needs_care: bool = False) -> None:
        """`needs_care`: waiting is not enough."""
        has_changed = replica.is_ready != is_ready
        if has_changed or replica.reason != reason:
            replica.is_ready, replica.reason = is_ready, reason
            replica.was_ready |= is_ready
            # One that was never ready is starting.
            level = logging.WARNING if needs_care or (replica.was_ready and not is_ready) else logging.INFO
            logger.log(level, "%s is %s: %s", replica.address, "ready" if is_ready else "unready", reason)
        if has_changed:
            self._note_change()

    def _note_served(self, replica: Replica, serves: Mapping[str, str]) -> None:
        """Warn once a server that gets requests serves what no other of those does."""
        replica.serves = serves
        if len(_kinds_of(self.all)) < 2:
            self._warned_of = frozenset()
        if (kinds := _kinds_of(self.ready)) <= self._warned_of or len(kinds) < 2:
            return
        self._warned_of |= kinds
        others = [each for each in self.ready if each.serves and each is not replica]
        fields = {name for each in others for name, _ in each.serves.items() ^ serves.items()}
        logger.warning(
            "%s does not serve the same as %s: they differ in %s. Each request is answered by any of them; nothing is "
            "needed while they are updated",
            replica.address,
            ", ".join(each.address for each in others),
            ", ".join(sorted(fields)),
        )

    def _note_change(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


def _kinds_of(replicas: Collection[Replica]) -> frozenset[_Kind]:
    return frozenset(frozenset(each.serves.items()) for each in replicas if each.serves)


def _read_state(answer: WholeAnswer) -> tuple[bool, str, Mapping[str, str]]:
    """Return whether a server is ready, why, and what it serves."""
    try:
        said = msgspec.json.decode(answer.body, type=_Readiness)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False, f"it answers /ready with status {answer.status}, and not as `keepsight serve` does", {}
    return answer.status == 200, f"it says {said.status[:80]!r}", said.serves
