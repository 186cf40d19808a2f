"""Responses that are kept: whose they are, how much there may be of them, and that a conversation goes as a whole."""

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
    """Half of its bytes are what is asked."""
    is_begun = kept.begin(tenant, name, previous, b"?" * (size // 2))
    return is_begun and kept.finish(tenant, name, b"!" * (size - size // 2))


def has(kept: KeptResponses, name: str, tenant: str = "a") -> bool:
    try:
        return bool(kept.get(tenant, name))
    except UnknownResponseError:
        return False


def test_a_conversation_is_found_by_its_last_response(kept: KeptResponses) -> None:
    keep(kept, "one")
    kept.begin("a", "two", "one", b"asked")
    kept.finish("a", "two", b"told")
    assert kept.find_turns("a", "two", "id") == [Turn(b"?" * 5, b"!" * 5), Turn(b"asked", b"told")]
    assert kept.get("a", "two") == b"told"


def test_several_may_go_on_from_one(kept: KeptResponses) -> None:
    for name, previous in (("root", None), ("left", "root"), ("right", "root")):
        assert keep(kept, name, previous)
    assert len(kept.find_turns("a", "left", "id")) == len(kept.find_turns("a", "right", "id")) == 2


def test_what_is_not_answered_is_not_found(kept: KeptResponses) -> None:
    kept.begin("a", "one", None, b"asked")
    assert not has(kept, "one")
    with pytest.raises(UnknownResponseError, match="previous_response_id"):
        kept.find_turns("a", "one", "previous_response_id")


def test_others_responses_do_not_exist(kept: KeptResponses) -> None:
    keep(kept, "one")
    keep(kept, "two", "one", tenant="b")
    with pytest.raises(UnknownResponseError) as caught:
        kept.get("b", "one")
    assert (caught.value.field, caught.value.status) == ("id", 404)
    with pytest.raises(UnknownResponseError):
        kept.find_turns("b", "one", "id")
    with pytest.raises(UnknownResponseError, match="earlier"):
        kept.find_turns("b", "two", "id")
    with pytest.raises(UnknownResponseError):
        kept.delete("b", "one")
    assert has(kept, "one")


def test_what_was_used_longest_ago_goes_for_what_comes(kept: KeptResponses) -> None:
    for name in ("one", "two"):
        keep(kept, name, size=40)
    kept.get("a", "one")
    assert keep(kept, "three", size=40)
    assert [has(kept, name) for name in ("one", "two", "three")] == [True, False, True]


def test_a_conversation_is_used_as_a_whole(kept: KeptResponses) -> None:
    keep(kept, "one", size=30)
    keep(kept, "other", size=30)
    keep(kept, "two", "one", size=30)
    kept.find_turns("a", "two", "id")
    assert keep(kept, "three", "two", size=30)
    assert len(kept.find_turns("a", "three", "id")) == 3
    assert not has(kept, "other")


def test_each_tenant_has_its_own_bytes(kept: KeptResponses) -> None:
    for tenant in ("a", "b"):
        assert keep(kept, f"of {tenant}", size=80, tenant=tenant)
    assert has(kept, "of a")


@pytest.mark.parametrize("size", [MAX_BYTES + 2, 3 * MAX_BYTES])
def test_what_is_larger_than_all_that_may_be_is_not_kept(kept: KeptResponses, size: int) -> None:
    assert not keep(kept, "large", size=size)
    assert not has(kept, "large")


def test_what_is_asked_that_is_too_large_drives_nothing_out(kept: KeptResponses) -> None:
    keep(kept, "one")
    assert not kept.begin("a", "large", None, b"?" * (MAX_BYTES + 1))
    assert has(kept, "one")


def test_a_response_that_is_deleted_ends_what_went_on_from_it(kept: KeptResponses) -> None:
    keep(kept, "one")
    keep(kept, "two", "one")
    kept.delete("a", "one")
    assert has(kept, "two")
    with pytest.raises(UnknownResponseError, match="earlier"):
        kept.find_turns("a", "two", "id")
    with pytest.raises(UnknownResponseError):
        kept.delete("a", "one")


def test_frontends_find_each_other_s(kept: KeptResponses, tmp_path: Path) -> None:
    keep(kept, "one")
    other = KeptResponses(tmp_path, MAX_BYTES)
    assert has(other, "one")
    other.delete("a", "one")
    assert not has(kept, "one")
    other.close()


def test_nothing_is_kept_where_there_is_no_room(kept: KeptResponses, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(kept, "one")
    monkeypatch.setattr(RunDirectory, "num_free_bytes", property(lambda _: 1000))
    assert not keep(kept, "two")
    assert has(kept, "one")


def test_whoever_writes_for_too_long_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_database, "PATIENCE_SECONDS", 0.01)
    kept, other = KeptResponses(tmp_path, MAX_BYTES), KeptResponses(tmp_path, MAX_BYTES)
    with other._writing():
        assert not kept.begin("a", "one", None, b"asked")
        with pytest.raises(ResponseStoreError, match="locked"):
            kept.get("a", "one")
    assert keep(kept, "one")
    kept.close()
    other.close()


class Histories(RuleBasedStateMachine):
    """Against what should be there: by tenant, the least recently used first."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self._kept = KeptResponses(Path(self._folder.name), MAX_BYTES)
        # Of each: its size, what it goes on from.
        self._expected: dict[str, dict[str, tuple[int, str | None]]] = {"a": {}, "b": {}}
        self._number = 0

    @rule(tenant=st.sampled_from("ab"), size=st.integers(2, 60), goes_on=st.booleans(), chosen=st.integers(0, 99))
    def keep(self, tenant: str, size: int, goes_on: bool, chosen: int) -> None:
        own = self._expected[tenant]
        previous = list(own)[chosen % len(own)] if goes_on and own else None
        self._number += 1
        name = str(self._number)
        assert keep(self._kept, name, previous, size, tenant)
        # What it asked for made room first, and then the answer, when it had been used itself.
        for needed in (size // 2, size):
            while sum(each for each, _ in own.values()) + needed > MAX_BYTES:
                del own[next(iter(own))]
        own[name] = size, previous

    @rule(tenant=st.sampled_from("ab"), chosen=st.integers(0, 99))
    def go_on(self, tenant: str, chosen: int) -> None:
        own = self._expected[tenant]
        if not own:
            return
        last = name = list(own)[chosen % len(own)]
        chain = [name]
        while (previous := own[name][1]) is not None and previous in own:
            chain.append(name := previous)
        if previous is not None:
            with pytest.raises(UnknownResponseError, match="earlier"):
                self._kept.find_turns(tenant, last, "id")
            return
        turns = self._kept.find_turns(tenant, last, "id")
        assert [len(turn.input) + len(turn.response) for turn in turns] == [own[each][0] for each in reversed(chain)]
        for each in reversed(chain):
            own[each] = own.pop(each)

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
