"""A server may be gone, slow, restarted, or answer nonsense: an error or a miss, in bounded time, never wrong bytes."""

import logging
import random
import select
import time
from collections.abc import Iterator

import pytest

from keepsight.errors import TierError
from keepsight.tiers import redis_tier
from keepsight.tiers.entry_key import is_entry_key
from keepsight.tiers.redis_address import parse_address
from keepsight.tiers.redis_tier import RedisTier
from keepsight.tiers.resp import Reply, RespConnection
from keepsight.tiers.tier import StoredArray
from tests.tiers.arrays import array_of, assert_equal, key_of
from tests.tiers.redis_servers import REAL, FakeServer, real_server
from tests.wait_until import PATIENCE_SECONDS, wait_until

needs_redis = pytest.mark.skipif(REAL is None, reason="NO REAL REDIS: redis-server is not installed")


@pytest.fixture
def server() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.close()


@pytest.fixture
def tier(server: FakeServer) -> Iterator[RedisTier]:
    tier = RedisTier(server.url, timeout=20)
    assert tier.put(key_of(1), array_of(1))
    yield tier
    tier.close()


def set_patience(tier: RedisTier, seconds: float) -> None:
    """Set the timeout, also of open connections. Keep it long unless no reply comes: a busy machine may be slow."""
    for line in (tier._reader, tier._writer):
        line._timeout = seconds
        if line._connection is not None:
            line._connection._timeout = seconds


def get(tier: RedisTier, number: int) -> StoredArray | None:
    try:
        return tier.get(key_of(number))
    except (OSError, TierError):
        return None


def test_a_missing_server_is_an_error_each_time(server: FakeServer) -> None:
    tier = RedisTier(server.url, timeout=20)
    server.close()
    for _ in range(2):
        with pytest.raises(OSError):
            tier.get(key_of(1))
    tier.close()


def test_after_a_server_restart_one_error_then_operations_succeed(tier: RedisTier, server: FakeServer) -> None:
    assert_equal(tier.get(key_of(1)), array_of(1))
    server.drop_all()
    get(tier, 1)
    assert_equal(tier.get(key_of(1)), array_of(1))


def test_idle_connections_closed_by_the_server_are_reopened(tier: RedisTier, server: FakeServer) -> None:
    assert_equal(tier.get(key_of(1)), array_of(1))
    # As a server with a `timeout`, or a proxy, closes idle connections.
    server.drop_all()
    for line in (tier._reader, tier._writer):
        assert line._connection is not None
        assert select.select([line._connection._socket], [], [], PATIENCE_SECONDS)[0]
    assert_equal(tier.get(key_of(1)), array_of(1))
    assert tier.put(key_of(2), array_of(2))


def test_a_silent_server_is_an_error_in_time(tier: RedisTier, server: FakeServer) -> None:
    server.is_silent.set()
    set_patience(tier, 0.05)
    for silent in (lambda: tier.get(key_of(1)), lambda: tier.put(key_of(1), array_of(1))):
        with pytest.raises(TimeoutError):
            silent()
    server.is_silent.clear()
    set_patience(tier, 20)
    assert tier.put(key_of(1), array_of(1))
    assert_equal(tier.get(key_of(1)), array_of(1))


def test_a_server_that_drips_is_an_error_in_time(tier: RedisTier, server: FakeServer) -> None:
    def drip(reply: bytes) -> bytes:
        for byte in reply[:100]:
            server.send(bytes([byte]))
            time.sleep(0.005)
        return b""

    server.misbehave = drip
    set_patience(tier, 0.2)
    with pytest.raises(TimeoutError):
        tier.get(key_of(1))


def test_a_connection_closed_within_a_value_is_an_error_and_no_damage(tier: RedisTier, server: FakeServer) -> None:
    # `send` returns None, which closes the connection after the partial reply.
    server.misbehave = lambda reply: server.send(reply[:1000])
    with pytest.raises(ConnectionResetError):
        tier.get(key_of(1))
    server.misbehave = lambda reply: reply
    assert_equal(tier.get(key_of(1)), array_of(1))
    assert tier.stats().num_damaged == 0


@pytest.mark.parametrize(
    "nonsense",
    [
        None,
        b"",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"$abc\r\n",
        b"$-5\r\n",
        b"$99999999999999999999\r\n",
        b"$600000000\r\n",
        b"*1\r\n$-1\r\n",
        b":1\r\n",
        b"+OK\r\n",
        b"-LOADING Redis is loading the dataset in memory\r\n",
        b"x" * 70_000,
        b"$3\r\nabcdef\r\n",
        b"$300\r\n" + b"z" * 300 + b"\r\n",
        b"$0\r\n\r\n",
    ],
)
def test_an_invalid_reply_is_an_error_or_a_miss_and_does_not_affect_later_replies(
    tier: RedisTier, server: FakeServer, nonsense: bytes | None
) -> None:
    truth = dict(server.values)
    # An empty reply would look like silence, so the connection is closed instead.
    server.misbehave = lambda reply: nonsense or None
    assert get(tier, 1) is None
    server.misbehave = lambda reply: reply
    server.values = truth
    assert_equal(tier.get(key_of(1)), array_of(1))


@pytest.mark.parametrize("error_code", ["OOM", "READONLY", "MISCONF", "NOREPLICAS", "NOPERM"])
def test_a_server_that_refuses_writes_is_logged_once_and_still_read(
    tier: RedisTier, server: FakeServer, error_code: str, caplog: pytest.LogCaptureFixture
) -> None:
    server.misbehave = lambda reply: (
        f"-{error_code} this cannot be written\r\n".encode() if reply == b"+OK\r\n" else reply
    )
    for _ in range(2):
        assert not tier.put(key_of(2), array_of(2))
        assert_equal(tier.get(key_of(1)), array_of(1))
    assert caplog.text.count(f"accepts no more entries: {error_code}") == 1


@pytest.mark.parametrize("error_code", ["READONLY", "MISCONF", "NOPERM", "BUSY"])
def test_a_damaged_value_that_the_server_does_not_remove_is_a_miss_and_logged(
    tier: RedisTier, server: FakeServer, error_code: str, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in server.values.items():
        server.values[name] = value[:-1] + b"!"
    server.misbehave = lambda reply: f"-{error_code} no\r\n".encode() if reply == b":1\r\n" else reply
    assert tier.get(key_of(1)) is None
    assert f"{key_of(1)} was damaged (checksum): ignored, as it cannot be removed ({error_code} no)" in caplog.text


def test_a_server_that_refuses_reads_too_is_not_merely_full(tier: RedisTier, server: FakeServer) -> None:
    # As a replica without its master, or for a user without permission for any key.
    server.misbehave = lambda reply: b"-READONLY no\r\n" if reply == b"+OK\r\n" else b"-MASTERDOWN no\r\n"
    with pytest.raises(TierError, match="MASTERDOWN"):
        tier.put(key_of(2), array_of(2))


def test_endlessly_nested_replies_are_refused(tier: RedisTier, server: FakeServer) -> None:
    server.misbehave = lambda reply: b"*1\r\n" * 10_000
    with pytest.raises(TierError, match="not the Redis protocol"):
        tier.open()


def test_corrupted_replies_are_never_accepted(server: FakeServer) -> None:
    rng = random.Random(0)
    tier = RedisTier(server.url, timeout=20)
    tier.put(key_of(1), array_of(1, 200))
    truth = dict(server.values)
    set_patience(tier, 0.02)

    def spoil(reply: bytes) -> bytes:
        spoilt = bytearray(reply)
        spoilt[rng.randrange(len(reply))] ^= 1 << rng.randrange(8)
        return bytes(spoilt[: rng.randint(1, len(spoilt))] if rng.random() < 0.1 else spoilt)

    for _ in range(100):
        server.values = dict(truth)
        server.misbehave = spoil
        found = get(tier, 1)
        if found is not None:
            assert_equal(found, array_of(1, 200))
        server.misbehave = lambda reply: reply
    set_patience(tier, 20)

    def finds_value_again() -> bool:
        # A corrupted value is deleted, and a delete that timed out earlier may only be executed now.
        server.values = dict(truth)
        found = get(tier, 1)
        if found is not None:
            assert_equal(found, array_of(1, 200))
        return found is not None

    wait_until(finds_value_again)
    tier.close()


def test_a_damaged_value_is_removed_and_logged(
    tier: RedisTier, server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in server.values.items():
        server.values[name] = value[:-1] + b"!"
    assert tier.get(key_of(1)) is None
    assert not server.values
    assert tier.stats().num_damaged == 1
    assert f"{key_of(1)} was damaged (checksum): removed" in caplog.text


def test_sizes_are_asked_for_in_few_round_trips(tier: RedisTier, server: FakeServer) -> None:
    for number in range(2, 50):
        assert tier.put(key_of(number), array_of(number))
    replies = list[bytes]()

    def answer_together(reply: bytes) -> bytes:
        """Answer the sizes once all of them have been asked for, and the rest at once."""
        if not reply.startswith(b":"):
            return reply
        replies.append(reply)
        return b"".join(replies) if len(replies) == 49 else b""

    server.misbehave = answer_together
    assert len(tier.list_sizes()) == 49


@pytest.mark.parametrize("name", [b"ab\xff", b"abc", b"ab\x1b[31m", key_of(1).upper().encode()])
def test_foreign_keys_with_our_prefix_are_neither_listed_nor_cleared(
    tier: RedisTier, server: FakeServer, name: bytes
) -> None:
    [entry] = server.values
    stranger = entry.removesuffix(key_of(1).encode()) + name
    server.values[stranger] = b"of others"
    assert tier.list_sizes() == {key_of(1): len(server.values[entry])}
    tier.clear()
    assert server.values == {stranger: b"of others"}


def test_passwords_are_sent_and_never_shown(server: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    server.password = b"s:e@cret"
    with pytest.raises(TierError) as refusal:
        RedisTier(server.url).put(key_of(1), array_of(1))
    url = server.url.replace("redis://", "redis://user:s%3Ae%40cret@") + "/3"
    tier = RedisTier(url)
    assert tier.put(key_of(1), array_of(1))
    tier.close()
    shown = caplog.text + str(refusal.value) + repr(parse_address(url)) + str(parse_address(url))
    assert "cret" not in shown


@pytest.mark.parametrize("quote", ["'", "`"])
def test_a_password_that_the_server_repeats_is_not_shown(tier: RedisTier, server: FakeServer, quote: str) -> None:
    echo = f"-ERR unknown command {quote}AUTH{quote}, with args beginning with: {quote}s3cret{quote} \r\n"
    server.misbehave = lambda reply: echo.encode()
    with pytest.raises(TierError) as refusal:
        tier.put(key_of(2), array_of(2))
    assert str(refusal.value) == f"ERR unknown command {quote}AUTH{quote}"


def test_a_refusal_cannot_flood_or_forge_the_log(tier: RedisTier, server: FakeServer) -> None:
    server.misbehave = lambda reply: b"-ERR \n\x1b[31m" + b"x" * 60_000 + b"\r\n"
    with pytest.raises(TierError) as refusal:
        tier.put(key_of(2), array_of(2))
    assert str(refusal.value).startswith("ERR ??[31mxxx")
    assert len(str(refusal.value)) <= 300


@needs_redis
def test_a_real_server_serves_a_second_tier_and_may_be_killed() -> None:
    with real_server() as (url, process):
        first, second = RedisTier(url), RedisTier(url)
        for number in range(5):
            first.put(key_of(number), array_of(number, 300_000))
        for number in range(5):
            assert_equal(second.get(key_of(number)), array_of(number, 300_000))
        process.kill()
        process.wait(20)
        with pytest.raises(OSError):
            second.get(key_of(1))
        first.close()
        second.close()


@needs_redis
def test_all_clients_of_a_real_server_share_its_budget() -> None:
    with real_server() as (url, _):
        tiers = [RedisTier(url, 20_000) for _ in range(2)]
        for number in range(40):
            assert tiers[number % 2].put(key_of(number), array_of(number))
            tiers[0].get(key_of(0))
            tiers[1].check_invariants()
        assert_equal(tiers[1].get(key_of(0)), array_of(0))
        assert tiers[1].get(key_of(1)) is None
        assert sum(tier.stats().num_evictions for tier in tiers) >= 30
        for tier in tiers:
            tier.close()


def put_ten(url: str, max_bytes: int | None) -> None:
    tier = RedisTier(url, max_bytes)
    assert all(tier.put(key_of(number), array_of(number)) for number in range(10))
    tier.close()


def run(url: str, *command: bytes) -> Reply:
    connection = RespConnection(parse_address(url), PATIENCE_SECONDS)
    try:
        return connection.run(command)
    finally:
        connection.close()


def names_of_accounts(url: str) -> list[bytes]:
    match run(url, b"KEYS", b"*"):
        case list(names):
            return [name for name in names if isinstance(name, bytes) and not is_entry_key(name.decode()[-64:])]
        case other:
            raise AssertionError(other)


@needs_redis
def test_the_budget_is_restored_after_the_server_evicted_any_account() -> None:
    with real_server() as (url, _):
        put_ten(url, 40_000)
        tier = RedisTier(url, 40_000)
        for number, name in enumerate(names_of_accounts(url), start=10):
            run(url, b"DEL", name)
            assert tier.put(key_of(number), array_of(number, 20_000))
            tier.check_invariants()
        # Only as many entries as necessary were evicted.
        assert len(tier.list_sizes()) == 7
        tier.close()


@needs_redis
def test_entries_that_the_server_evicted_are_no_longer_counted() -> None:
    with real_server() as (url, _):
        put_ten(url, 40_000)
        tier = RedisTier(url, 40_000)
        for number in range(0, 10, 2):
            run(url, b"DEL", b"keepsight:{embeddings}:" + key_of(number).encode())
        for number in range(10, 30):
            assert tier.put(key_of(number), array_of(number))
            tier.check_invariants()
        assert set(tier.list_sizes()) == {key_of(number) for number in range(18, 30)}
        # The five odd entries and the first eight new ones.
        assert tier.stats().num_evictions == 5 + 8
        tier.close()


@needs_redis
def test_entries_put_before_there_was_a_budget_count_too() -> None:
    with real_server() as (url, _):
        put_ten(url, None)
        tier = RedisTier(url, 20_000)
        assert tier.put(key_of(10), array_of(10))
        tier.check_invariants()
        assert len(tier.list_sizes()) == 6
        tier.close()


@needs_redis
def test_accounts_lost_during_their_creation_are_recreated(monkeypatch: pytest.MonkeyPatch) -> None:
    with real_server() as (url, _):
        put_ten(url, None)
        tier = RedisTier(url, 20_000)
        list_pages, is_lost = tier._pages, False

        def lose_accounts(connection: RespConnection) -> Iterator[list[str]]:
            nonlocal is_lost
            for keys in list_pages(connection):
                yield keys[:5]
                if not is_lost:
                    is_lost = True
                    run(url, b"DEL", *names_of_accounts(url))
                yield keys[5:]

        monkeypatch.setattr(tier, "_pages", lose_accounts)
        assert not tier.put(key_of(10), array_of(10))
        assert tier.put(key_of(10), array_of(10))
        tier.check_invariants()
        tier.close()


@needs_redis
def test_many_entries_are_counted_by_several_writes_also_when_the_connection_breaks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(redis_tier, "_COUNTING_SECONDS", 0)
    with real_server() as (url, _):
        before = RedisTier(url)
        for number in range(2500):
            assert before.put(key_of(number), array_of(number, 2))
        tier = RedisTier(url, 10**7)
        assert not tier.put(key_of(2500), array_of(2500))
        tier._writer.close()
        are_kept = [tier.put(key_of(number), array_of(number)) for number in range(2500, 2510)]
        assert are_kept[:2] == [False, False]
        assert are_kept[-2:] == [True, True]
        tier.check_invariants()
        before.close()
        tier.close()


@needs_redis
def test_one_write_evicts_a_thousand_entries_at_most_and_the_next_finds_room() -> None:
    with real_server() as (url, _):
        roomy = RedisTier(url, 10**9)
        for number in range(1100):
            assert roomy.put(key_of(number), array_of(number, 2))
        tier = RedisTier(url, 10_000)
        assert not tier.put(key_of(1100), array_of(1100, 5000))
        assert set(tier.list_sizes()) == {key_of(number) for number in range(1000, 1100)}
        assert tier.put(key_of(1100), array_of(1100, 5000))
        tier.check_invariants()
        roomy.close()
        tier.close()


@needs_redis
@pytest.mark.parametrize("max_bytes", [None, 20_000])
def test_values_of_another_redis_type_are_removed(max_bytes: int | None) -> None:
    with real_server() as (url, _):
        tier = RedisTier(url, max_bytes)
        for number in range(2):
            run(url, b"LPUSH", b"keepsight:{embeddings}:" + key_of(number).encode(), b"x")
        run(url, b"SET", b"keepsight:{embeddings}::accounts", b"x")
        assert tier.put(key_of(0), array_of(0))
        assert_equal(tier.get(key_of(0)), array_of(0))
        assert tier.list_sizes().keys() == {key_of(0), key_of(1)}
        assert tier.get(key_of(1)) is None
        assert tier.list_sizes().keys() == {key_of(0)}
        assert tier.stats().num_damaged == 1
        tier.check_invariants()
        tier.close()


@needs_redis
@pytest.mark.parametrize("max_bytes", [None, 50_000_000])
def test_a_full_server_still_returns_its_entries(max_bytes: int | None, caplog: pytest.LogCaptureFixture) -> None:
    with real_server("--maxmemory", "3mb") as (url, _):
        tier = RedisTier(url, max_bytes)
        are_kept = [tier.put(key_of(number), array_of(number, 300_000)) for number in range(12)]
        assert are_kept[0]
        assert not are_kept[-1]
        assert [tier.get(key_of(number)) is not None for number in range(12)] == are_kept
        assert caplog.text.count("accepts no more entries") == 1
        tier.close()


@needs_redis
@pytest.mark.parametrize("max_bytes", [None, 50_000_000])
def test_a_user_who_may_only_read_reads(max_bytes: int | None, caplog: pytest.LogCaptureFixture) -> None:
    with real_server() as (url, _):
        put_ten(url, None)
        run(url, b"ACL", b"SETUSER", b"reader", b"on", b">pw", b"~keepsight:*", b"+get", b"+ping")
        tier = RedisTier(url.replace("unix://", "unix://reader:pw@"), max_bytes)
        for _ in range(2):
            assert not tier.put(key_of(10), array_of(10))
            assert_equal(tier.get(key_of(1)), array_of(1))
        assert caplog.text.count("accepts no more entries: NOPERM") == 1
        run(url, b"SET", b"keepsight:{embeddings}:" + key_of(2).encode(), b"x" * 300)
        assert tier.get(key_of(2)) is None
        tier.close()


@needs_redis
def test_a_real_server_s_password() -> None:
    with real_server("--requirepass", "secret") as (url, _):
        path = url.removeprefix("unix://")
        with pytest.raises(TierError):
            RedisTier(url).get(key_of(1))
        tier = RedisTier(f"unix://:secret@{path}")
        assert tier.put(key_of(1), array_of(1))
        tier.close()
