"""Of several servers the one with most merit is chosen, unless it is far busier than the others."""

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from keepsight.choose_by_merit import Merit, choose_by_merit, rendezvous

NOTHING = Merit(0, b"", 0)
MERITS = st.builds(Merit, st.integers(0, 3), st.sampled_from([b"", b"a", b"b"]), st.integers(-5, 5))


def choose(work: Mapping[str, int], merits: Mapping[str, Merit] | None = None, slack: int = 10) -> str:
    return choose_by_merit(work, slack, lambda server: (merits or {}).get(server, NOTHING), lambda name: name.encode())


def test_held_media_come_before_the_key_and_the_key_before_the_work_ahead() -> None:
    work = {"a": 1, "b": 1}
    assert choose(work, {"a": Merit(1, b"", -9), "b": Merit(0, b"z", 0)}) == "a"
    assert choose(work, {"a": Merit(1, b"y", 0), "b": Merit(1, b"z", -9)}) == "b"
    assert choose(work, {"a": Merit(1, b"z", -1), "b": Merit(1, b"z", -2)}) == "a"


def test_a_server_that_is_far_busier_is_skipped_whatever_it_holds() -> None:
    holds = {"a": Merit(5, b"", 0)}
    assert choose({"a": 2 * 7 + 10, "b": 7}, holds) == "a"
    assert choose({"a": 2 * 7 + 11, "b": 7}, holds) == "b"


@given(st.dictionaries(st.text(max_size=2), st.tuples(st.integers(0, 50), MERITS), min_size=1), st.integers(0, 20))
def test_no_server_within_the_limit_has_more_merit_than_the_chosen_one(
    servers: dict[str, tuple[int, Merit]], slack: int
) -> None:
    work = {name: each for name, (each, _) in servers.items()}
    merits = {name: each for name, (_, each) in servers.items()}
    chosen, limit = choose(work, merits, slack), 2 * min(work.values()) + slack
    assert work[chosen] <= limit
    assert merits[chosen] == max(merits[name] for name in work if work[name] <= limit)


def test_if_one_server_is_missing_only_its_own_names_move() -> None:
    def place(name: int, servers: str) -> str:
        return max(servers, key=lambda server: rendezvous(name, server))

    before, after = [place(name, "abc") for name in range(200)], [place(name, "ab") for name in range(200)]
    assert set(before) == {"a", "b", "c"}
    assert all(new == old for new, old in zip(after, before, strict=True) if old != "c")
