"""A value is made on first access, once per object, and objects do not block one another."""

import threading
from collections.abc import Callable

from keepsight.made_once import made_once


class Maker:
    def __init__(self, make: Callable[[], str]) -> None:
        self.make, self.num_made = make, 0

    @made_once
    def value(self) -> str:
        self.num_made += 1
        return self.make()


def test_each_object_computes_its_value_once_and_only_on_access() -> None:
    first, second, unused = Maker(lambda: "one's"), Maker(lambda: "the other's"), Maker(lambda: "nobody's")
    for _ in range(2):
        assert (first.value, second.value) == ("one's", "the other's")
    assert (first.num_made, second.num_made, unused.num_made) == (1, 1, 0)


def test_objects_do_not_wait_for_one_another() -> None:
    """With a shared lock, a process forked at that moment would inherit it locked forever."""
    is_making, may_end = threading.Event(), threading.Event()

    def make_slowly() -> str:
        is_making.set()
        assert may_end.wait(60)  # longer than the quick one is waited for
        return "slow"

    slow = Maker(make_slowly)
    thread = threading.Thread(target=lambda: slow.value)
    thread.start()
    assert is_making.wait(20)
    quick = threading.Thread(target=lambda: Maker(lambda: "quick").value)
    quick.start()
    quick.join(20)
    is_blocked = quick.is_alive()
    may_end.set()
    thread.join()
    assert not is_blocked
