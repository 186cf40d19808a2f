"""Finds the server that answers a request: the best one, or another if that fails before an answer has begun.

Invariant: every request gets one answer that begins, or an error that says why not. A request that may have been the
end of two servers is not given to a third.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress

from keepsight.errors import EngineLostError, NoReplicaError, ReplicaLostError
from keepsight.scaleout.affinity import Affinity
from keepsight.scaleout.choose_replica import choose_replica
from keepsight.scaleout.owners import OWNER_LOST, Owners
from keepsight.scaleout.replica import Answer, Question, Replica, WholeAnswer
from keepsight.scaleout.replicas import Replicas
from keepsight.scaleout.router_meter import RouterMeter

# How long a request waits for a server that can take it: one may be starting again.
MAX_WAIT_SECONDS = 5.0
# An owner is asked for again when a server becomes ready, and so often: its failure may not have been noticed.
SECONDS_BETWEEN_SEARCHES = 1.0
MAX_LOSSES = 2
# For what all servers do: resets wait for all their engines.
MAX_ALL_SECONDS = 60.0
# So that a request ends even if its connections fail again and again to servers that say that they are ready.
MAX_ATTEMPTS = 16
NONE_READY = "no server behind this address is ready"


class Forwarder:
    def __init__(self, replicas: Replicas, meter: RouterMeter) -> None:
        self._replicas, self._meter, self._owners = replicas, meter, Owners(replicas)

    async def forward(self, question: Question, affinity: Affinity) -> Answer | WholeAnswer:
        """Return an answer that has begun."""
        if not affinity.ids:
            return await self._ask_in_turn(question, affinity, None)
        owner = await self._find_owner(question, affinity)
        answer = await self._ask_in_turn(question, affinity, owner)
        if answer.status == 404:
            self._owners.forget(affinity.ids)  # the owner may have been started anew, at the same address
        return answer

    async def ask_all(self, question: Question) -> Mapping[Replica, WholeAnswer | None]:
        """Return the answers of all servers that are ready, None for those that fail; of one at least."""
        await self._wait_for_any(None)
        answers = await self._replicas.ask_all(question, MAX_ALL_SECONDS)
        if not any(answers.values()):
            raise NoReplicaError(NONE_READY)
        return answers

    async def _find_owner(self, question: Question, affinity: Affinity) -> Replica | None:
        """Return the server that has what the request names, after a moment if it may be one that does not say."""
        loop = asyncio.get_running_loop()
        until = loop.time() + MAX_WAIT_SECONDS
        while True:
            await self._wait_for_any(None)
            changed = self._replicas.changed
            try:
                return await self._owners.find(affinity.ids, question.headers)
            except NoReplicaError:
                if loop.time() >= until:
                    raise
            with suppress(TimeoutError):
                async with asyncio.timeout_at(min(until, loop.time() + SECONDS_BETWEEN_SEARCHES)):
                    await changed.wait()

    async def _ask_in_turn(self, question: Question, affinity: Affinity, owner: Replica | None) -> Answer | WholeAnswer:
        refusals: dict[Replica, WholeAnswer] = {}
        num_losses = 0
        for _ in range(MAX_ATTEMPTS):
            able = [each for each in await self._wait_for_any(owner) if each not in refusals]
            if not able:
                break
            replica, chosen_by = choose_replica(affinity, able)
            self._meter.note_sent(replica, "owner" if owner is not None else chosen_by)
            try:
                answer = await replica.forward(question, affinity)
                if not isinstance(answer, WholeAnswer):
                    return answer
                refusals[replica] = answer
                num_losses += b'"engine_lost"' in answer.body
            except ReplicaLostError as lost:
                self._replicas.note_lost(replica, lost)
                num_losses += lost.may_have_begun
            self._meter.note_retry(replica)
            if num_losses == MAX_LOSSES:
                raise EngineLostError(f"{MAX_LOSSES} servers were lost while they worked on this request")
        if not refusals:
            raise NoReplicaError("all servers behind this address fail")
        return next(reversed(refusals.values()))

    async def _wait_for_any(self, owner: Replica | None) -> Sequence[Replica]:
        """Return the servers that are ready, after a moment if there is none; of `owner` alone, if it is given."""
        try:
            async with asyncio.timeout(MAX_WAIT_SECONDS):
                while not (ready := [each for each in self._replicas.ready if owner in (None, each)]):
                    await self._replicas.changed.wait()
        except TimeoutError:
            raise NoReplicaError(NONE_READY if owner is None else OWNER_LOST) from None
        return ready
