"""A request goes where its pictures were sent before, else to the least busy replica; never to a far busier one."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from keepsight.scaleout import choose_replica as choosing
from keepsight.scaleout.affinity import SHORTEST_BEGINNING, Affinity
from keepsight.scaleout.choose_replica import SLACK_BYTES, ReplicaView, choose_replica


def about(*media: str, beginnings: int = 0, key: str | None = None, work: int = 1000) -> Affinity:
    names = tuple(b"%d" % index for index in range(beginnings))
    return Affinity({each.encode(): 500 for each in media}, names, key, (), work)


def replicas(count: int = 3) -> list[ReplicaView]:
    return [ReplicaView(f"http://10.0.0.{number}:8000") for number in range(count)]


def test_a_picture_is_sent_where_it_was_sent_before_even_if_others_are_less_busy() -> None:
    views = replicas()
    views[1].note_sent(about("a"))
    assert choose_replica(about("a", "b"), views) == (views[1], "media")
    views[2].note_sent(about("b", "c", work=0))
    assert choose_replica(about("a", "b", "c"), views) == (views[2], "media")


def test_it_is_sent_elsewhere_while_its_holder_is_far_busier() -> None:
    views = replicas(2)
    views[0].note_sent(about("a", work=SLACK_BYTES + 1))
    assert choose_replica(about("a"), views) == (views[1], "load")
    views[0].note_taken(about("a"))
    views[0].note_ended(about("a", work=SLACK_BYTES + 1))
    assert choose_replica(about("a"), views) == (views[0], "media")


def test_a_cache_key_decides_among_equals_and_is_the_same_for_everyone() -> None:
    chosen, reason = choose_replica(about(key="mine"), replicas())
    assert reason == "cache_key"
    assert choose_replica(about(key="mine"), replicas()[::-1])[0].address == chosen.address


def test_a_known_beginning_offsets_as_many_bytes_in_flight() -> None:
    views = replicas(2)
    views[0].note_sent(about(beginnings=3, work=4 * SHORTEST_BEGINNING - 1))
    assert choose_replica(about(beginnings=5), views) == (views[0], "beginning")
    views[0].note_sent(about(work=2))
    assert choose_replica(about(beginnings=5), views) == (views[1], "load")


def test_requests_that_have_nothing_in_common_are_spread_over_idle_replicas() -> None:
    views = replicas()
    assert {choose_replica(about(f"{index}"), views)[0] for index in range(50)} == set(views)


def test_what_a_replica_held_is_forgotten_with_its_caches() -> None:
    views = replicas(2)
    views[0].note_taken(about("a", beginnings=3))
    views[0].forget()
    assert choose_replica(about("a", beginnings=3), views)[1] == "load"


def test_what_a_replica_refused_is_known_there_only_until_then() -> None:
    [view] = replicas(1)
    view.note_sent(about("a"))
    view.note_sent(about("a", beginnings=2))
    view.note_ended(about("a", beginnings=2))
    assert choose_replica(about("a"), [view])[1] == "media"
    view.note_ended(about("a"))
    assert choose_replica(about("a", beginnings=2), [view])[1] == "load"


def test_only_so_many_names_are_kept_the_last_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "MAX_NAMES", 2)
    view = ReplicaView("http://a")
    for name in ("a", "b", "a", "c"):
        view.note_taken(about(name))
    assert view.count_held_media_bytes(about("a", "b", "c")) == 1000


class AnyTraffic(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.views, self.running = replicas(), list[tuple[ReplicaView, Affinity]]()

    @rule(
        media=st.lists(st.sampled_from("abcd"), unique=True),
        beginnings=st.integers(0, 4),
        key=st.none() | st.sampled_from("kl"),
        work=st.integers(1, 2 * SLACK_BYTES),
    )
    def send(self, media: list[str], beginnings: int, key: str | None, work: int) -> None:
        affinity = about(*media, beginnings=beginnings, key=key, work=work)
        chosen, reason = choose_replica(affinity, self.views)
        assert chosen.num_bytes_in_flight <= 2 * min(view.num_bytes_in_flight for view in self.views) + SLACK_BYTES
        assert (reason == "media") == (chosen.count_held_media_bytes(affinity) > 0)
        chosen.note_sent(affinity)
        self.running.append((chosen, affinity))

    @rule(data=st.data(), is_taken=st.booleans())
    def end(self, data: st.DataObject, is_taken: bool) -> None:
        if self.running:
            view, affinity = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
            if is_taken:
                view.note_taken(affinity)
            view.note_ended(affinity)

    @rule(index=st.integers(0, 2))
    def lose_caches(self, index: int) -> None:
        self.views[index].forget()

    @invariant()
    def counts_are_right(self) -> None:
        for view in self.views:
            view.check_invariants()
            own = [affinity.num_bytes for each, affinity in self.running if each is view]
            assert (view.num_requests, view.num_bytes_in_flight) == (len(own), sum(own))


TestAnyTraffic = AnyTraffic.TestCase
TestAnyTraffic.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
