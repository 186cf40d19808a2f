"""Tests of the order alone, then against a model that sorts lists."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from keepsight.scheduling.eviction_order import SECONDS_BETWEEN_LOOKS, EvictionOrder
from tests.scheduling.long_run import thorough

KEYS = "abcdefgh"


def order_of(*released: str, max_size: int = 100) -> EvictionOrder[str]:
    order: EvictionOrder[str] = EvictionOrder(max_size)
    for key in released:
        order.add(key)
    return order


def test_the_least_recently_released_goes_first() -> None:
    order = order_of("b", "a", "c")
    assert order.first() == "b"
    order.remove("b")
    order.add("b")
    assert list(order) == ["a", "c", "b"]


def test_pinned_keys_go_last_and_the_last_of_a_row_first() -> None:
    order = order_of("front", "middle", "back", "other")
    for key in ("front", "middle", "back"):
        assert order.pin(key, until=10, size=1)
    assert list(order) == ["other", "back", "middle", "front"]
    order.end_pins(10)
    assert list(order) == ["other", "back", "middle", "front"]
    order.add("newest")
    assert list(order)[-1] == "newest"


def test_a_pin_waits_while_its_key_is_in_use() -> None:
    order = order_of("a", "b")
    order.remove("a")
    assert order.pin("a", until=10, size=1)
    order.add("a")
    order.add("c")
    assert list(order) == ["b", "c", "a"]


def test_a_pin_ends_with_its_time_and_is_only_ever_prolonged() -> None:
    order = order_of("a", "b")
    order.pin("a", until=100, size=1)
    order.pin("a", until=50, size=1)
    assert (order.pinned_until("a"), order.pinned_until("b")) == (100, None)
    order.end_pins(99)
    assert list(order) == ["b", "a"]
    order.add("c")
    order.end_pins(99 + SECONDS_BETWEEN_LOOKS)
    assert list(order) == ["b", "c", "a"]
    assert order.size_of_pinned == 0


def test_expired_pins_are_not_searched_for_all_the_time() -> None:
    order = order_of("a", "b")
    order.pin("a", until=1, size=1)
    order.pin("b", until=2, size=1)
    order.end_pins(1)
    order.end_pins(2)
    assert list(order) == ["a", "b"]
    assert order.size_of_pinned == 1
    order.end_pins(1 + SECONDS_BETWEEN_LOOKS)
    assert order.size_of_pinned == 0


def test_half_of_the_cache_can_be_pinned_and_no_more() -> None:
    order = order_of("a", "b", "c", max_size=10)
    assert order.pin("a", until=1, size=3)
    assert not order.pin("b", until=1, size=3)
    assert order.pin("c", until=1, size=2)
    assert order.pin("a", until=2, size=3)  # again
    assert list(order) == ["b", "c", "a"]
    order.forget("a")
    assert order.pin("b", until=1, size=3)


def test_removed_keys_lose_their_pins() -> None:
    order = order_of("a", "b")
    order.pin("a", until=10, size=1)
    order.forget("a")
    order.add("a")
    order.add("c")
    assert list(order) == ["b", "a", "c"]
    order.pin("b", until=10, size=1)
    order.clear()
    assert (list(order), order.size_of_pinned) == ([], 0)


class OrderMachine(RuleBasedStateMachine):
    """The model: when each key was last released, until when each is pinned, and its size."""

    @initialize(max_size=st.integers(0, 12))
    def begin(self, max_size: int) -> None:
        self.order: EvictionOrder[str] = EvictionOrder(max_size)
        self.max_pinned = max_size / 2
        self.released: dict[str, int] = {}
        self.pins: dict[str, tuple[float, int]] = {}
        self.clock = 0
        self.now = self.next_look = 0.0

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    @rule(key=st.sampled_from(KEYS))
    def add_or_remove(self, key: str) -> None:
        if key in self.released:
            self.order.remove(key)
            del self.released[key]
        else:
            self.order.add(key)
            self.released[key] = self.tick()

    @rule(key=st.sampled_from(KEYS), seconds=st.integers(1, 300), size=st.integers(1, 4))
    def pin(self, key: str, seconds: int, size: int) -> None:
        until = self.now + seconds
        if key in self.pins:
            old_until, size = self.pins[key]
            assert self.order.pin(key, until, size)
            self.pins[key] = max(until, old_until), size
            return
        has_room = sum(held for _, held in self.pins.values()) + size <= self.max_pinned
        assert self.order.pin(key, until, size) == has_room
        if has_room:
            self.pins[key] = until, size
            if key in self.released:
                self.released[key] = -self.tick()

    @precondition(lambda self: bool(self.released))
    @rule()
    def evict(self) -> None:
        first = self.order.first()
        self.order.forget(first)
        del self.released[first]
        self.pins.pop(first, None)

    @rule(seconds=st.integers(0, 200))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        self.order.end_pins(self.now)
        if self.pins and self.now >= self.next_look:
            self.next_look = self.now + SECONDS_BETWEEN_LOOKS
            for key in reversed([key for key, (until, _) in self.pins.items() if until <= self.now]):
                del self.pins[key]
                if key in self.released:
                    self.released[key] = self.tick()

    @invariant()
    def they_go_as_the_model_says(self) -> None:
        if not hasattr(self, "order"):
            return
        self.order.check_invariants()
        assert list(self.order) == sorted(self.released, key=lambda key: (key in self.pins, self.released[key]))
        assert len(self.order) == len(self.released)
        assert self.order.size_of_pinned == sum(size for _, size in self.pins.values())


TestOrderMachine = OrderMachine.TestCase
TestOrderMachine.settings = thorough(100)
