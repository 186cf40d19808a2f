"""No message is lost, and no wait outlasts what it waits for."""

import threading
from collections.abc import Callable

import pytest

from keepsight.engine.inbox import Inbox
from keepsight.requests import AbortRequest, Received

SOON = 10  # seconds, for operations that take milliseconds


def messages(*names: str) -> list[Received]:
    return [AbortRequest(name) for name in names]


def put_all(inbox: Inbox, *names: str) -> None:
    for message in messages(*names):
        assert inbox.try_put(message)


def test_messages_are_taken_once_and_in_their_order() -> None:
    inbox = Inbox()
    put_all(inbox, "a", "b")
    assert inbox.take(waits=True) == messages("a", "b")
    assert inbox.take(waits=False) == []


@pytest.mark.parametrize(
    ("end_wait", "expected"),
    [(lambda inbox: put_all(inbox, "a"), messages("a")), (Inbox.wake, []), (Inbox.close, [])],
    ids=["a message", "a waking", "the closing"],
)
@pytest.mark.parametrize("is_early", [True, False])
def test_a_wait_ends_with(end_wait: Callable[[Inbox], None], expected: list[Received], is_early: bool) -> None:
    """Also if it happened before the wait began."""
    inbox = Inbox()
    taken: list[list[Received]] = []
    waiting = threading.Thread(target=lambda: taken.append(inbox.take(waits=True)), daemon=True)
    if is_early:
        end_wait(inbox)
        waiting.start()
    else:
        waiting.start()
        end_wait(inbox)
    waiting.join(SOON)
    assert taken == [expected]


def test_only_a_wait_that_lasts_is_told_to_the_watchdog() -> None:
    inbox = Inbox()
    put_all(inbox, "a")
    inbox.take(waits=True)
    inbox.take(waits=False)
    assert not inbox.is_waited_at
    waiting = threading.Thread(target=lambda: inbox.take(waits=True), daemon=True)
    waiting.start()
    while not inbox.is_waited_at:
        waiting.join(0.001)
        assert waiting.is_alive()
    inbox.wake()
    waiting.join(SOON)
    assert not inbox.is_waited_at


def test_one_wake_call_ends_one_wait() -> None:
    inbox = Inbox()
    inbox.wake()
    inbox.wake()
    inbox.take(waits=True)
    waiting = threading.Thread(target=lambda: inbox.take(waits=True), daemon=True)
    waiting.start()
    waiting.join(0.02)
    assert waiting.is_alive()
    inbox.close()
    waiting.join(SOON)


def test_messages_before_the_closing_are_handed_out_and_later_ones_are_refused() -> None:
    inbox = Inbox()
    put_all(inbox, "a")
    inbox.close()
    assert not inbox.try_put(AbortRequest("b"))
    assert inbox.is_closed
    assert inbox.take(waits=True) == messages("a")


def test_many_threads_lose_nothing() -> None:
    inbox = Inbox()
    names = [[f"{thread}.{number}" for number in range(300)] for thread in range(4)]
    threads = [threading.Thread(target=put_all, args=(inbox, *own)) for own in names]
    for thread in threads:
        thread.start()
    taken: list[str] = []
    while len(taken) < 1200:
        taken += [message.request_id for message in inbox.take(waits=True) if isinstance(message, AbortRequest)]
    for number, own in enumerate(names):
        assert [each for each in taken if each.startswith(f"{number}.")] == own
