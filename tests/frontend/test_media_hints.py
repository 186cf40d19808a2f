"""Only media that the engine is not known to hold are promised: once, and within a limit."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from keepsight.frontend.media_hints import MediaHints


def test_media_unknown_to_the_engine_are_promised_once() -> None:
    hints = MediaHints()
    assert hints.promise("1", ["a", "b"]) == ("a", "b")
    assert hints.promise("2", ["b", "c"]) == ("c",)


def test_held_media_are_not_promised_until_they_are_dropped() -> None:
    hints = MediaHints()
    hints.note_held(["a"])
    assert hints.promise("1", ["a"]) == ()
    hints.note_dropped(["a"])
    assert hints.promise("1", ["a"]) == ("a",)


def test_an_ended_request_s_promises_are_withdrawn() -> None:
    hints = MediaHints()
    hints.promise("1", ["a"])
    hints.forget("1")
    assert hints.promise("2", ["a"]) == ("a",)


def test_a_fulfilled_promise_makes_room_for_others() -> None:
    hints = MediaHints(max_promises=2)
    assert hints.promise("1", ["a", "b", "c"]) == ()
    assert hints.promise("1", ["a", "b"]) == ("a", "b")
    assert hints.promise("2", ["c"]) == ()
    hints.note_held(["a"])
    assert hints.promise("2", ["c"]) == ("c",)


def test_beyond_the_limit_the_oldest_held_hash_is_forgotten() -> None:
    hints = MediaHints(max_held=2)
    hints.note_held(["a", "b", "c"])
    assert [hints.is_held(each) for each in "abc"] == [False, True, True]


NAMES = st.lists(st.sampled_from("abcdef"), max_size=4)
REQUESTS = st.sampled_from("123")


class AnyHistory(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.hints = MediaHints(max_promises=3, max_held=4)
        self.promised: dict[str, str] = {}

    @rule(request_id=REQUESTS, names=NAMES)
    def promise(self, request_id: str, names: list[str]) -> None:
        for name in self.hints.promise(request_id, names):
            assert name not in self.promised, "promised twice"
            self.promised[name] = request_id

    @rule(names=NAMES)
    def hold(self, names: list[str]) -> None:
        self.hints.note_held(names)
        for name in names:
            self.promised.pop(name, None)

    @rule(names=NAMES)
    def drop(self, names: list[str]) -> None:
        self.hints.note_dropped(names)

    @rule(request_id=REQUESTS)
    def forget(self, request_id: str) -> None:
        self.hints.forget(request_id)
        self.promised = {name: each for name, each in self.promised.items() if each != request_id}

    @invariant()
    def holds(self) -> None:
        self.hints.check_invariants()


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(max_examples=40, stateful_step_count=30)


def test_promised_media_do_not_count_as_held() -> None:
    hints = MediaHints()
    hints.promise("r", ["a"])
    hints.note_held(["b"])
    assert [hints.is_held(each) for each in "abc"] == [False, True, False]
    hints.note_dropped(["b"])
    assert not hints.is_held("b")
