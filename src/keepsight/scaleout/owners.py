"""Which server has what a request names by an id: an upload, or a stored response. Learned by asking all of them."""

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from keepsight.errors import InvalidArgumentError, NoReplicaError
from keepsight.scaleout.replica import Headers, Question, Replica
from keepsight.scaleout.replicas import Replicas

# Of ids.
MAX_KNOWN = 2**16
# A request that names more goes to any server.
MAX_IDS = 64
MAX_SECONDS = 10.0
OWNER_LOST = "the server that has what the request names is not ready"
# What a server needs to tell the caller.
_OF_CALLER = frozenset({b"host", b"authorization", b"x-api-key", b"anthropic-version", b"via", b"origin"})


class Owners:
    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        # The least recently used first.
        self._owners = OrderedDict[str, Replica]()

    async def find(self, ids: Sequence[str], headers: Headers) -> Replica | None:
        """Return the server that has all of these that any has; None if any server may say that there are none.

        `headers`: of the request that names them. A server tells only those about an id who may use it. Raises
        NoReplicaError if an id may be at a server that does not say.
        """
        if len(self._replicas.all) == 1 or len(ids) > MAX_IDS:
            return None  # nobody else can have them; no request has so many
        known = {name: owner for name in ids if (owner := self._recall(name)) is not None}
        known |= await self._ask_for([name for name in ids if name not in known], headers)
        firsts = _name_one_of_each(known)
        if len(firsts) > 1:
            # What is remembered is not for a caller whom the servers refuse; and a server may have two names here.
            firsts = _name_one_of_each(await self._ask_for([*firsts.values()], headers, of_all=True))
        if len(firsts) > 1:
            first, *others = firsts.values()
            raise InvalidArgumentError(
                "body",
                f"names {first} and {', '.join(others)}, which are on different servers behind this address: "
                "send what one of them names instead of its id",
            )
        return next(iter(firsts), None)

    def forget(self, ids: Sequence[str]) -> None:
        for name in ids:
            self._owners.pop(name, None)

    def _recall(self, name: str) -> Replica | None:
        if (known := self._owners.get(name)) not in self._replicas.all:
            self._owners.pop(name, None)
            return None
        self._owners.move_to_end(name)
        return known

    async def _ask_for(self, ids: Sequence[str], headers: Headers, of_all: bool = False) -> Mapping[str, Replica]:
        """Ask all servers who has these; return the owners that are found. The first id shows who may not ask.

        `of_all`: the same one of all those that have an id, not the one that says so first.
        """
        owners: dict[str, Replica] = {}
        for together in (ids[:1], ids[1:]):
            answers = await asyncio.gather(*(self._ask(name, headers, of_all) for name in together))
            if any({401, 403} & {*statuses.values()} for statuses in answers):
                return {}
            for name, statuses in zip(together, answers, strict=True):
                holders = (replica for replica in self._replicas.all if statuses.get(replica) == 200)
                if (owner := next(holders, None)) is not None:
                    owners[name] = owner
                    self._remember(name, owner)
                elif any(statuses.get(replica) != 404 for replica in self._replicas.all):
                    raise NoReplicaError(OWNER_LOST)
        return owners

    async def _ask(self, name: str, headers: Headers, of_all: bool) -> Mapping[Replica, int | None]:
        """Return the status of each server's answer, None if it failed; unless `of_all`, of those before one has it."""
        folder = b"responses" if name.startswith("resp_") else b"files"
        own = [(key, value) for key, value in headers if key in _OF_CALLER]
        question = Question(b"HEAD", b"/v1/%s/%s" % (folder, name.encode()), own)
        answers = await self._replicas.ask_all(question, MAX_SECONDS, lambda each: each.status == 200 and not of_all)
        return {replica: None if answer is None else answer.status for replica, answer in answers.items()}

    def _remember(self, name: str, owner: Replica) -> None:
        self._owners[name] = owner
        if len(self._owners) > MAX_KNOWN:
            self._owners.popitem(last=False)


def _name_one_of_each(owners: Mapping[str, Replica]) -> Mapping[Replica, str]:
    """Return the first id of each owner."""
    firsts: dict[Replica, str] = {}
    for name, owner in owners.items():
        firsts.setdefault(owner, name)
    return firsts
