"""Embeddings in a server that speaks the Redis protocol: shared by all machines that reach it.

One connection reads and one writes, so that a hit never waits behind a write. Each value carries its own checksum:
whatever the server returns is what was stored, or a miss. If the tier has a budget of its own, the server also holds
accounts of sizes and order, updated in one transaction with each write; invariant: after an accepted write the values
under our prefix do not exceed the budget, whoever writes, whoever is killed and whatever the server evicted, even these
accounts. Without a budget, the server's own `maxmemory` is the limit.
"""

import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from keepsight.errors import TierError
from keepsight.tiers.damage_log import DamageLog
from keepsight.tiers.entry_format import HEADER_BYTES, DamagedEntryError, pack_header, read_entry
from keepsight.tiers.entry_key import is_entry_key
from keepsight.tiers.fullness import Fullness
from keepsight.tiers.redis_address import RedisAddress, parse_address
from keepsight.tiers.resp import Part, RefusedError, Reply, RespConnection, WrongTypeError
from keepsight.tiers.tier import StoredArray, TierStats

# Error prefixes of a server that accepts no writes, but may serve reads: full, a replica, its own disk full, no
# replicas, closed to this user.
_TAKES_NOTHING = ("OOM", "READONLY", "MISCONF", "NOREPLICAS", "NOPERM")
# Limit on evictions in one script, so that no other client waits long for it, whatever the budget was before.
_MAX_EVICTIONS = 1000
# Time that one write may spend on counting existing entries.
_COUNTING_SECONDS = 0.2
_PREFIX = b"keepsight:{embeddings}:"
_ACCOUNTS_NAME = _PREFIX + b":accounts"
# All accounts are one sorted set, which a server that is short of memory evicts whole or not at all. Its members are
#   <key>:<size>  scored by its turn, from 1 on: a counter, so that no machine's clock matters
#   total         scored by the sum of these sizes, negated
#   counted       scored 0, present once everything under our prefix is in here
# An entry that the server evicted by itself stays in here until its turn comes. A value of another type is not ours,
# neither as the accounts nor as an entry, whose size then counts as 0.
_ACCOUNTS = """
local accounts, prefix, key = KEYS[1], ARGV[1], ARGV[2]
if redis.call('TYPE', accounts).ok ~= 'zset' then redis.call('UNLINK', accounts) end
local size = tonumber(redis.pcall('STRLEN', prefix .. key)) or 0
local entry = key .. ':' .. size
local function count_as_newest()
  local newest = redis.call('ZREVRANGE', accounts, 0, 0, 'WITHSCORES')[2] or 0
  if redis.call('ZADD', accounts, newest + 1, entry) == 1 then
    redis.call('ZINCRBY', accounts, -size, 'total')
  end
end
local function forget(which)
  if redis.call('ZREM', accounts, which) == 1 then
    redis.call('ZINCRBY', accounts, which:match('%d+$'), 'total')
  end
end
"""
_COUNT = _ACCOUNTS + "if size > 0 then count_as_newest() end return 0"
_DROP = _ACCOUNTS + "forget(entry) redis.call('UNLINK', prefix .. key) return 0"
# Removes what was just stored if it cannot be accounted for, or if the allowed evictions do not make room.
_ADMIT = (
    _ACCOUNTS
    + f"""
if not redis.call('ZSCORE', accounts, 'counted') then
  redis.call('UNLINK', prefix .. key)
  return false
end
count_as_newest()
local num_evicted = 0
for _ = 1, {_MAX_EVICTIONS} do
  if -redis.call('ZSCORE', accounts, 'total') <= tonumber(ARGV[3]) then return {{1, num_evicted}} end
  local oldest = redis.call('ZRANGEBYSCORE', accounts, 1, '+inf', 'LIMIT', 0, 1)[1]
  forget(oldest)
  num_evicted = num_evicted + redis.call('UNLINK', prefix .. oldest:match('^%x+'))
end
forget(entry)
redis.call('UNLINK', prefix .. key)
return {{0, num_evicted}}
"""
)
# Marks the accounts as complete, unless they were lost during the count.
_END_COUNTING = """
if redis.call('ZREM', KEYS[1], ARGV[2]) == 1 then redis.call('ZADD', KEYS[1], 0, 'counted') end
return 0
"""


class RedisTier:
    name = "remote"

    def __init__(self, url: str, max_bytes: int | None = None, *, timeout: float = 2.0) -> None:
        """Raises InvalidArgumentError if the address is invalid; an unreachable server raises later."""
        self._max_bytes = max_bytes
        address = parse_address(url)
        self._reader, self._writer = _Line(address, timeout), _Line(address, timeout)
        self._num_evictions = 0
        self._damage = DamageLog("the Redis server")
        # The count in progress, if any: its connection, and the rest of it.
        self._counting: tuple[RespConnection, Iterator[None]] | None = None
        self._fullness = Fullness("the Redis server", max_bytes)

    def open(self) -> None:
        with self._writer.held() as connection:
            connection.run([b"PING"])

    def has(self, key: str) -> bool:
        return False

    def get(self, key: str) -> StoredArray | None:
        return self._get(key, self._reader)

    def _get(self, key: str, line: "_Line") -> StoredArray | None:
        commands: list[list[Part]] = [[b"GET", _name(key)]]
        if self._max_bytes is not None:
            commands.append(_script(_COUNT, key.encode()))
        try:
            with line.held() as connection:
                return connection.exchange(commands, lambda: self._read(connection, key))
        except DamagedEntryError as error:
            self._damage.report(_name(key).decode(), error, self._drop(key))
            return None

    def _drop(self, key: str) -> str:
        """Remove a damaged entry. Return what became of it, for the log."""
        try:
            with self._writer.held() as connection:
                connection.run([b"DEL", _name(key)] if self._max_bytes is None else _script(_DROP, key.encode()))
        except RefusedError as refusal:
            return f"ignored, as it cannot be removed ({refusal})"
        return "removed"

    def _read(self, connection: RespConnection, key: str) -> StoredArray | None:
        try:
            size = connection.read_size()
        except WrongTypeError as error:
            raise DamagedEntryError("of another type") from error
        array = None
        if size is not None:
            array = read_entry(key, size, connection.read_into)
            connection.end_value()
        if self._max_bytes is not None:
            # A full server does not record the use; only the eviction order suffers.
            with suppress(RefusedError):
                connection.read_reply()
        return array

    def put(self, key: str, array: StoredArray) -> bool:
        if self._fullness.turns_away(HEADER_BYTES + array.num_bytes):
            return False
        try:
            with self._writer.held() as connection:
                is_kept = self._put(connection, key, (pack_header(key, array), array.payload))
        except RefusedError as error:
            if not str(error).startswith(_TAKES_NOTHING):
                raise
            # Raises if nothing can be read either.
            self._get(key, self._writer)
            self._fullness.report(error, array.num_bytes)
            return False
        if is_kept:
            self._fullness.end(array.num_bytes)
        return is_kept

    def _put(self, connection: RespConnection, key: str, value: tuple[bytes, memoryview]) -> bool:
        store: list[Part] = [b"SET", _name(key), value]
        if self._max_bytes is None:
            connection.run(store)
            return True
        admit = _script(_ADMIT, key.encode(), str(self._max_bytes).encode())
        for _ in range(2):
            replies = connection.run_all([[b"MULTI"], store, admit, [b"EXEC"]])
            match replies[3]:
                case ["OK", [int(is_kept), int(num_evicted)]]:
                    self._num_evictions += num_evicted
                    return is_kept == 1
                case ["OK", None]:
                    if not self._count_some(connection):
                        return False
                case _:
                    connection.close()
                    raise TierError("the transaction was not carried out")
        # The accounts were lost again meanwhile.
        return False

    def _count_some(self, connection: RespConnection) -> bool:
        """Count entries for a while. Return False if some are left for the next write: slow writes set a tier aside."""
        # A SCAN cursor means nothing to another server, such as the same one after a restart.
        if self._counting is None or self._counting[0] is not connection:
            self._counting = connection, self._count_by_page(connection)
        end = time.monotonic() + _COUNTING_SECONDS
        for _ in self._counting[1]:
            if time.monotonic() >= end:
                return False
        self._counting = None
        return True

    def _count_by_page(self, connection: RespConnection) -> Iterator[None]:
        """Count all existing entries, each once even if several of our servers count at the same time."""
        token = secrets.token_hex(16).encode()
        connection.run([b"ZADD", _ACCOUNTS_NAME, b"0", token])
        for keys in self._pages(connection):
            connection.run_all([_script(_COUNT, key.encode()) for key in keys])
            yield
        connection.run(_script(_END_COUNTING, token))

    def list_sizes(self) -> dict[str, int]:
        """Return the bytes of all entries under this prefix, including those that other servers of ours stored."""
        with self._writer.held() as connection:
            return {key: size for keys in self._pages(connection) for key, size in _sizes_of(connection, keys)}

    def verify(self, key: str) -> bool:
        """Return False if the entry was damaged; it is removed then, if it can be."""
        num_damaged = self._damage.num_damaged
        self.get(key)
        return self._damage.num_damaged == num_damaged

    def note_use(self, key: str) -> None:
        pass

    def clear(self) -> None:
        """Remove all entries under this prefix, including those that other servers of ours stored."""
        with self._writer.held() as connection:
            for keys in self._pages(connection):
                connection.run_all([[b"DEL", _name(key)] for key in keys])
            connection.run([b"DEL", _ACCOUNTS_NAME])

    def stats(self) -> TierStats:
        return TierStats(0, self._max_bytes, 0, self._num_evictions, self._damage.num_damaged)

    def close(self) -> None:
        self._reader.close()
        self._writer.close()

    def check_invariants(self) -> None:
        sizes = self.list_sizes()
        if self._max_bytes is not None:
            with self._writer.held() as connection:
                total = -_int(connection.run([b"ZSCORE", _ACCOUNTS_NAME, b"total"]) or 0)
            assert sum(sizes.values()) <= total <= self._max_bytes, (sizes, total)

    def _pages(self, connection: RespConnection) -> Iterator[list[str]]:
        """Yield the keys of all entries, page by page. Skip foreign names with the same prefix, and the accounts."""
        cursor = b"0"
        while True:
            match connection.run([b"SCAN", cursor, b"MATCH", _PREFIX + b"*", b"COUNT", b"1000"]):
                case [bytes(cursor), list(names)]:
                    found = (name.removeprefix(_PREFIX) for name in names if isinstance(name, bytes))
                    yield list(filter(is_entry_key, (name.decode("ascii", "replace") for name in found)))
                case other:
                    raise TierError(f"SCAN: {other!r}")
            if cursor == b"0":
                return


class _Line:
    """One connection, made on demand, and anew after a fault or if the server has closed it meanwhile."""

    def __init__(self, address: RedisAddress, timeout: float) -> None:
        self._address, self._timeout = address, timeout
        self._lock = threading.Lock()
        self._connection: RespConnection | None = None

    @contextmanager
    def held(self) -> Iterator[RespConnection]:
        with self._lock:
            connection = self._take() or RespConnection(self._address, self._timeout)
            try:
                yield connection
            except BaseException:
                # It may be in the middle of several replies.
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
        # Without waiting for a thread that is using it: that one has its timeout.
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def _name(key: str) -> bytes:
    return _PREFIX + key.encode()


def _script(script: str, *arguments: bytes) -> list[Part]:
    return [b"EVAL", script.encode(), b"1", _ACCOUNTS_NAME, _PREFIX, *arguments]


def _sizes_of(connection: RespConnection, keys: list[str]) -> list[tuple[str, int]]:
    """Ask for all sizes at once."""

    def read_size() -> int:
        try:
            return _int(connection.read_reply())
        except WrongTypeError:
            return 0

    commands = [[b"STRLEN", _name(key)] for key in keys]
    return connection.exchange(commands, lambda: [(key, read_size()) for key in keys])


def _int(reply: Reply) -> int:
    if isinstance(reply, bytes):
        reply = int(reply)
    if not isinstance(reply, int):
        raise TierError(f"reply {reply!r} instead of a number")
    return reply
