"""Embeddings in a server that speaks the Redis protocol: shared by all machines that reach it.

One connection reads and one writes, so that a hit never waits behind what is written.  A value carries its own
checksum: whatever the server gives, it is what was put, or a miss.  With a budget of its own, sizes and order are
accounted for in the server, in one transaction with each write; invariant: then the values under our prefix never
exceed it, whoever writes and whoever is killed.  Without one, the server's own `maxmemory` is the budget.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from keepsight.errors import TierError
from keepsight.tiers.entry_format import HEADER_BYTES, DamagedEntryError, pack_header, read_entry
from keepsight.tiers.entry_key import is_entry_key
from keepsight.tiers.fullness import Fullness
from keepsight.tiers.resp import Part, RefusedError, Reply, RespConnection, parse_address
from keepsight.tiers.tier import StoredArray, TierStats

# How a server begins that gives what it has, and takes nothing: full, a replica, one whose own disk is full, one alone.
_TAKES_NOTHING = ("OOM", "READONLY", "MISCONF", "NOREPLICAS")
_FORGET = """
local function forget(key)
  local size = redis.call('HGET', KEYS[2], key)
  if size then
    redis.call('HDEL', KEYS[2], key)
    redis.call('ZREM', KEYS[1], key)
    redis.call('DECRBY', KEYS[3], size)
  end
end
"""
# The order is that of a counter: no clock of any machine counts.
_RESERVE = (
    _FORGET
    + """
local size, budget, num_evicted = tonumber(ARGV[2]), tonumber(ARGV[3]), 0
forget(ARGV[1])
while tonumber(redis.call('GET', KEYS[3]) or '0') + size > budget do
  local oldest = redis.call('ZRANGE', KEYS[1], 0, 0)[1]
  if not oldest then redis.call('SET', KEYS[3], 0) break end
  redis.call('DEL', ARGV[4] .. oldest)
  forget(oldest)
  num_evicted = num_evicted + 1
end
redis.call('HSET', KEYS[2], ARGV[1], size)
redis.call('ZADD', KEYS[1], redis.call('INCR', KEYS[4]), ARGV[1])
redis.call('INCRBY', KEYS[3], size)
return num_evicted
"""
)
_TOUCH = (
    _FORGET
    + """
if redis.call('EXISTS', ARGV[2] .. ARGV[1]) == 0 then forget(ARGV[1])
elseif redis.call('HEXISTS', KEYS[2], ARGV[1]) == 1 then
  redis.call('ZADD', KEYS[1], redis.call('INCR', KEYS[4]), ARGV[1])
end
return 0
"""
)
_DROP = _FORGET + "redis.call('DEL', ARGV[2] .. ARGV[1]) forget(ARGV[1]) return 0"


class RedisTier:
    name = "remote"

    def __init__(
        self,
        url: str,
        max_bytes: int | None = None,
        *,
        timeout: float = 2.0,
        prefix: str = "keepsight:{embeddings}:",
    ) -> None:
        """Raises InvalidArgumentError if the address is none; a server that is not there raises later."""
        self._address, self._max_bytes, self._timeout = parse_address(url), max_bytes, timeout
        self._prefix = prefix.encode()
        self._reader = _Line(lambda: RespConnection(self._address, self._timeout))
        self._writer = _Line(lambda: RespConnection(self._address, self._timeout))
        self._num_evictions = self._num_damaged = 0
        self._fullness = Fullness("the Redis server")

    def open(self) -> None:
        with self._writer.held() as connection:
            connection.run([b"PING"])

    def has(self, key: str) -> bool:
        return False

    def get(self, key: str) -> StoredArray | None:
        commands: list[list[Part]] = [[b"GET", self._prefix + key.encode()]]
        if self._max_bytes is not None:
            commands.append(self._script(_TOUCH, key.encode(), self._prefix))
        try:
            with self._reader.held() as connection:
                return connection.exchange(commands, lambda: self._read(connection, key, len(commands) - 1))
        except DamagedEntryError:
            self._num_damaged += 1
            self.drop(key)
            return None

    def _read(self, connection: RespConnection, key: str, num_more: int) -> StoredArray | None:
        size = connection.read_size()
        array = None
        if size is not None:
            array = read_entry(key, size, connection.read_into)
            connection.end_value()
        for _ in range(num_more):
            # A use that is not noted, as a full server does not: only the order suffers.
            with suppress(RefusedError):
                connection.read_reply()
        return array

    def put(self, key: str, array: StoredArray) -> bool:
        num_bytes = HEADER_BYTES + array.num_bytes
        if self._max_bytes is not None and num_bytes > self._max_bytes:
            return False
        try:
            with self._writer.held() as connection:
                self._put(connection, key, (pack_header(key, array), array.payload), num_bytes)
        except RefusedError as error:
            if not str(error).startswith(_TAKES_NOTHING):
                raise
            self._fullness.tell(error)
            return False
        self._fullness.end()
        return True

    def _put(self, connection: RespConnection, key: str, value: tuple[bytes, memoryview], num_bytes: int) -> None:
        store: list[Part] = [b"SET", self._prefix + key.encode(), value]
        if self._max_bytes is None:
            connection.run(store)
            return
        sizes = (str(num_bytes).encode(), str(self._max_bytes).encode())
        reserve = self._script(_RESERVE, key.encode(), *sizes, self._prefix)
        replies = connection.exchange(
            [[b"MULTI"], reserve, store, [b"EXEC"]], lambda: [connection.read_reply() for _ in range(4)]
        )
        match replies[3]:
            case [int(num_evicted), "OK"]:
                self._num_evictions += num_evicted
            case _:
                connection.close()
                raise TierError("the transaction was not carried out")

    def list_sizes(self) -> dict[str, int]:
        """Bytes of all servers' entries under this prefix."""
        with self._writer.held() as connection:
            keys = list(self._keys(connection))
            return {key: _int(connection.run([b"STRLEN", self._prefix + key.encode()])) for key in keys}

    def verify(self, key: str) -> bool:
        """False: it was not as it had been put there, and is removed."""
        num_damaged = self._num_damaged
        self.get(key)
        return self._num_damaged == num_damaged

    def drop(self, key: str) -> None:
        with self._writer.held() as connection:
            if self._max_bytes is None:
                connection.run([b"DEL", self._prefix + key.encode()])
            else:
                connection.run(self._script(_DROP, key.encode(), self._prefix))

    def clear(self) -> None:
        """Of all servers' entries under this prefix."""
        with self._writer.held() as connection:
            for key in self._keys(connection):
                connection.run([b"DEL", self._prefix + key.encode()])
            connection.run([b"DEL", *self._accounts()])

    def stats(self) -> TierStats:
        return TierStats(0, self._max_bytes, 0, self._num_evictions, self._num_damaged)

    def close(self) -> None:
        self._reader.close()
        self._writer.close()

    def check_invariants(self) -> None:
        sizes = self.list_sizes()
        if self._max_bytes is not None:
            with self._writer.held() as connection:
                total = _int(connection.run([b"GET", self._accounts()[2]]) or 0)
            assert sum(sizes.values()) <= total <= self._max_bytes, (sizes, total)

    def _keys(self, connection: RespConnection) -> Iterator[str]:
        """Of all entries.  What others keep under names that begin alike is none, nor are the accounts."""
        cursor = b"0"
        pattern = self._prefix.replace(b"[", rb"\[") + b"*"
        while True:
            match connection.run([b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"1000"]):
                case [bytes(cursor), list(names)]:
                    found = (name.removeprefix(self._prefix) for name in names if isinstance(name, bytes))
                    yield from filter(is_entry_key, (name.decode("ascii", "replace") for name in found))
                case other:
                    raise TierError(f"SCAN: {other!r}")
            if cursor == b"0":
                return

    def _script(self, script: str, *arguments: bytes) -> list[Part]:
        accounts = self._accounts()
        return [b"EVAL", script.encode(), str(len(accounts)).encode(), *accounts, *arguments]

    def _accounts(self) -> list[bytes]:
        return [self._prefix + name for name in (b":order", b":sizes", b":total", b":turn")]


class _Line:
    """One connection, made when it is needed, and anew after a fault or when the server has closed it meanwhile."""

    def __init__(self, connect: Callable[[], RespConnection]) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._connection: RespConnection | None = None

    @contextmanager
    def held(self) -> Iterator[RespConnection]:
        with self._lock:
            connection = self._take() or self._connect()
            try:
                yield connection
            except BaseException:
                # Maybe in the middle of several replies.
                connection.close()
                raise
            self._connection = connection

    def _take(self) -> RespConnection | None:
        connection, self._connection = self._connection, None
        if connection is not None and connection.is_closed_there:
            connection.close()
            return None
        return connection

    def close(self) -> None:
        # Not waiting for who uses it: that one has its timeout.
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def _int(reply: Reply) -> int:
    if isinstance(reply, bytes):
        reply = int(reply)
    if not isinstance(reply, int):
        raise TierError(f"a reply {reply!r} in place of a number")
    return reply
