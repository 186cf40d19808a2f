"""Which server has what a request names by an id: an upload, or a stored response. Learned by asking all of them."""

from collections import OrderedDict
from collections.abc import Sequence

from keepsight.errors import InvalidArgumentError
from keepsight.scaleout.replica import Headers, Question, Replica
from keepsight.scaleout.replicas import Replicas

# Of ids.
MAX_KNOWN = 2**16
MAX_SECONDS = 10.0
# What a server needs to tell the caller.
_OF_CALLER = frozenset({b"host", b"authorization", b"x-api-key", b"anthropic-version", b"via", b"origin"})


class Owners:
    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        # The least recently used first.
        self._owners = OrderedDict[str, Replica]()

    async def find(self, ids: Sequence[str], headers: Headers) -> Replica | None:
        """Return the server that has all of these that any has; None if none has any.

        `headers`: of the request that names them. A server tells only those about an id who may use it.
        """
        found = {name: owner for name in ids if (owner := await self._find(name, headers)) is not None}
        owners = list(dict.fromkeys(found.values()))
        if len(owners) > 1:
            first, *others = [next(name for name, each in found.items() if each is owner) for owner in owners]
            raise InvalidArgumentError(
                "body",
                f"names {first} and {', '.join(others)}, which are on different servers behind this address: "
                "send what one of them names instead of its id",
            )
        return owners[0] if owners else None

    def forget(self, ids: Sequence[str]) -> None:
        for name in ids:
            self._owners.pop(name, None)

    async def _find(self, name: str, headers: Headers) -> Replica | None:
        if (known := self._owners.get(name)) in self._replicas.all:
            self._owners.move_to_end(name)
            return known
        if len(self._replicas.all) == 1:
            return None  # nobody else can have it
        folder = b"responses" if name.startswith("resp_") else b"files"
        own = [(key, value) for key, value in headers if key in _OF_CALLER]
        question = Question(b"HEAD", b"/v1/%s/%s" % (folder, name.encode()), own)
        answers = await self._replicas.ask_all(question, MAX_SECONDS)
        owner = next((replica for replica, answer in answers.items() if answer.status == 200), None)
        if owner is not None:
            self._owners[name] = owner
            if len(self._owners) > MAX_KNOWN:
                self._owners.popitem(last=False)
        return owner
