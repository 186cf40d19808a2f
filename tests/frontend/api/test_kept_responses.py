"""Kept responses: their owners, their size limit, and that a conversation is evicted as a whole."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from keepsight.errors import ResponseStoreError, UnknownResponseError
from keepsight.frontend.api.kept_responses import KeptResponses, Turn
from keepsight.ipc import shared_database
from keepsight.ipc.run_directory import RunDirectory

MAX_BYTES = 100


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[KeptResponses]:
    kept = KeptResponses(tmp_path, MAX_BYTES)
    yield kept
    kept.check_invariants()
    kept.close()


def keep(kept: KeptResponses, name: str, previous: str | None = None, size: int = 10, tenant: str = "a") -> bool:
    """Keep a turn of `size` bytes, half of them its input."""
    return kept.keep(tenant, name, previous, Turn(b"?" * (size // 2), b"!" * (size - size // 2)))


def has(kept: KeptResponses, name: str, tenant: str = "a") -> bool:
    try:
        return bool(kept.get(tenant, name))
    except UnknownResponseError:
        return False


def test_a_conversation_is_found_by_its_last_response(kept: KeptResponses) -> None:
    keep(kept, "one")
    kept.keep("a", "two", "one", Turn(b"asked", b"told"))
    assert kept.read("a", "two", "id") == [Turn(b"?" * 5, b"!" * 5), Turn(b"asked", b"told")]
    assert kept.count_bytes("a", "two", "id") == 19
    assert kept.get("a", "two") == b"told"


def test_a_response_is_found_by_the_id_of_an_item_in_it(kept: KeptResponses) -> None:
    kept.keep("a", "one", None, Turn(b"asked", b"told"), ["first", "second"])
    assert kept.find_responses("a", ["first", "second", "third"]) == {"one": b"told"}
    assert kept.find_responses("b", ["first"]) == {}
    kept.delete("a", "one")
    assert kept.find_responses("a", ["first"]) == {}


def test_several_responses_may_continue_the_same_one(kept: KeptResponses) -> None:
    for name, previous in (("root", None), ("left", "root"), ("right", "root")):
        assert keep(kept, name, previous)
    assert len(kept.read("a", "left", "id")) == len(kept.read("a", "right", "id")) == 2


def test_responses_of_other_tenants_are_not_found(kept: KeptResponses) -> None:
    keep(kept, "one")
    assert not keep(kept, "two", "one", tenant="b")
    with pytest.raises(UnknownResponseError) as caught:
        kept.get("b", "one")
    assert (caught.value.field, caught.value.status) == ("id", 404)
    with pytest.raises(UnknownResponseError, match="previous_response_id"):
        kept.read("b", "one", "previous_response_id")
    with pytest.raises(UnknownResponseError):
        kept.delete("b", "one")
    assert has(kept, "one")


def test_the_least_recently_used_response_is_evicted(kept: KeptResponses) -> None:
    for name in ("one", "two"):
        keep(kept, name, size=40)
    kept.get("a", "one")
    assert keep(kept, "three", size=40)
    assert [has(kept, name) for name in ("one", "two", "three")] == [True, False, True]


def test_using_a_response_uses_its_whole_conversation(kept: KeptResponses) -> None:
    keep(kept, "one", size=30)
    keep(kept, "other", size=30)
    keep(kept, "two", "one", size=30)
    kept.read("a", "two", "id")
    assert keep(kept, "three", "two", size=30)
    assert len(kept.read("a", "three", "id")) == 3
    assert not has(kept, "other")


def test_each_tenant_has_its_own_size_limit(kept: KeptResponses) -> None:
    for tenant in ("a", "b"):
        assert keep(kept, f"of {tenant}", size=80, tenant=tenant)
    assert has(kept, "of a")


def test_a_response_too_large_to_keep_evicts_nothing(kept: KeptResponses) -> None:
    keep(kept, "one")
    assert not keep(kept, "large", size=MAX_BYTES + 1)
    assert not has(kept, "large")
    assert has(kept, "one")


def test_a_turn_that_makes_a_conversation_too_long_is_not_kept(kept: KeptResponses) -> None:
    keep(kept, "one", size=50)
    assert not keep(kept, "two", "one", size=60)
    assert has(kept, "one")


def test_a_turn_whose_earlier_turns_were_evicted_is_not_kept(kept: KeptResponses) -> None:
    keep(kept, "one")
    keep(kept, "other", size=MAX_BYTES)
    assert not keep(kept, "two", "one")


def test_deleting_a_response_ends_conversations_that_continue_it(kept: KeptResponses) -> None:
    keep(kept, "one")
    keep(kept, "two", "one")
    kept.delete("a", "one")
    assert has(kept, "two")
    with pytest.raises(UnknownResponseError, match="earlier"):
        kept.read("a", "two", "id")
    with pytest.raises(UnknownResponseError):
        kept.delete("a", "one")


def test_frontends_share_kept_responses(kept: KeptResponses, tmp_path: Path) -> None:
    keep(kept, "one")
    other = KeptResponses(tmp_path, MAX_BYTES)
    assert has(other, "one")
    other.delete("a", "one")
    assert not has(kept, "one")
    other.close()


def test_a_missing_folder_is_reported(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    kept = KeptResponses(folder, MAX_BYTES)
    folder.rename(tmp_path / "gone")
    with pytest.raises(ResponseStoreError, match="cannot be kept"):
        keep(kept, "one")
    kept.close()


def test_a_conversation_of_thousands_of_turns_is_found(tmp_path: Path) -> None:
    kept = KeptResponses(tmp_path, 2**20)
    with kept._writing():
        rows = [(str(each), "a", str(each - 1) if each else None, each, 2) for each in range(3000)]
        kept._database.executemany("INSERT INTO responses VALUES (?, ?, ?, ?, ?)", rows)
        kept._database.executemany("INSERT INTO contents VALUES (?, '?', '!')", [row[:1] for row in rows])
    assert len(kept.read("a", "2999", "id")) == 3000
    assert keep(kept, "3000", "2999")
    kept.close()


def test_without_room_nothing_is_kept(kept: KeptResponses, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(kept, "one")
    monkeypatch.setattr(RunDirectory, "num_free_bytes", property(lambda _: 1000))
    assert not keep(kept, "two")
    assert has(kept, "one")


def test_waiting_for_another_writer_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_database, "PATIENCE_SECONDS", 0.01)
    kept, other = KeptResponses(tmp_path, MAX_BYTES), KeptResponses(tmp_path, MAX_BYTES)
    with other._writing():
        for do in (lambda: keep(kept, "one"), lambda: kept.get("a", "one")):
            with pytest.raises(ResponseStoreError, match="locked"):
                do()
    assert keep(kept, "one")
    kept.close()
    other.close()


class Histories(RuleBasedStateMachine):
    """Compares with a model of what should be kept: by tenant, the least recently used first."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self._kept = KeptResponses(Path(self._folder.name), MAX_BYTES)
        # Each response's size, and the one it continues.
        self._expected: dict[str, dict[str, tuple[int, str | None]]] = {"a": {}, "b": {}}
        self._number = 0

    @rule(tenant=st.sampled_from("ab"), size=st.integers(2, 120), continues=st.booleans(), chosen=st.integers(0, 99))
    def keep(self, tenant: str, size: int, continues: bool, chosen: int) -> None:
        own = self._expected[tenant]
        previous = list(own)[chosen % len(own)] if continues and own else None
        chain = self._chain(own, previous)
        self._number += 1
        name = str(self._number)
        is_kept = keep(self._kept, name, previous, size, tenant)
        if chain is None or sum(own[each][0] for each in chain) + size > MAX_BYTES:
            assert not is_kept
            return
        assert is_kept
        self._use(own, chain)
        while sum(each for each, _ in own.values()) + size > MAX_BYTES:
            del own[next(iter(own))]
        own[name] = size, previous

    @staticmethod
    def _chain(own: dict[str, tuple[int, str | None]], last: str | None) -> list[str] | None:
        """Return a conversation's turns, the first one first; None if one of them is gone."""
        chain: list[str] = []
        while last is not None:
            if last not in own:
                return None
            chain.insert(0, last)
            last = own[last][1]
        return chain

    @staticmethod
    def _use(own: dict[str, tuple[int, str | None]], chain: list[str]) -> None:
        for each in chain:
            own[each] = own.pop(each)

    @rule(tenant=st.sampled_from("ab"), chosen=st.integers(0, 99))
    def go_on(self, tenant: str, chosen: int) -> None:
        own = self._expected[tenant]
        if not own:
            return
        last = list(own)[chosen % len(own)]
        if (chain := self._chain(own, last)) is None:
            with pytest.raises(UnknownResponseError, match="earlier"):
                self._kept.read(tenant, last, "id")
            return
        turns = self._kept.read(tenant, last, "id")
        assert [turn.num_bytes for turn in turns] == [own[each][0] for each in chain]
        self._use(own, chain)

    @rule(tenant=st.sampled_from("ab"), chosen=st.integers(0, 99))
    def delete(self, tenant: str, chosen: int) -> None:
        if own := self._expected[tenant]:
            name = list(own)[chosen % len(own)]
            self._kept.delete(tenant, name)
            del own[name]

    @invariant()
    def check(self) -> None:
        self._kept.check_invariants()

    def teardown(self) -> None:
        for tenant, own in self._expected.items():
            for name in map(str, range(1, self._number + 1)):
                assert has(self._kept, name, tenant) == (name in own)
        self._kept.close()
        self._folder.cleanup()


Histories.TestCase.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)
TestHistories = Histories.TestCase
