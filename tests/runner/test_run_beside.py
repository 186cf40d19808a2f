"""Jobs in parts: urgent jobs and closing wait for one part at most; each job is reported once."""

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest

from keepsight.runner.run_beside import BesideThread

WAIT_SECONDS = 10


class Story:
    """Records the thread's actions part by part; before each part, the thread waits until told to go on."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.ends: list[str] = []
        self.finished = threading.Semaphore(0)
        self.may_go_on = threading.Semaphore(0)
        self.waits = threading.Semaphore(0)
        self.rests = threading.Semaphore(0)
        self.thread: BesideThread[str] = BesideThread(
            self.surroundings, self.before_part, self.after_job, self.rests.release, self.note_finished
        )

    @contextmanager
    def surroundings(self) -> Iterator[None]:
        self.parts.append("in")
        yield
        self.parts.append("out")

    def before_part(self) -> None:
        self.waits.release()
        assert self.may_go_on.acquire(timeout=WAIT_SECONDS)

    def after_job(self) -> None:
        self.ends.append(f"after {self.parts[-1]}")

    def note_finished(self) -> None:
        self.ends.append("reported")
        self.finished.release()

    def job(self, name: str, num_parts: int) -> Generator[None, None, str]:
        for part in range(num_parts):
            self.parts.append(f"{name}{part}")
            if part < num_parts - 1:
                yield
        return name

    def go_on(self, num_parts: int) -> None:
        for _ in range(num_parts):
            self.may_go_on.release()

    def await_finished(self, count: int = 1) -> None:
        for _ in range(count):
            assert self.finished.acquire(timeout=WAIT_SECONDS)


@pytest.fixture
def story() -> Iterator[Story]:
    story = Story()
    yield story
    story.go_on(100)
    story.thread.close()


def test_an_urgent_job_is_taken_up_between_two_parts_of_a_patient_one(story: Story) -> None:
    story.thread.begin(story.job("patient", 3))
    assert story.waits.acquire(timeout=WAIT_SECONDS)  # the thread has chosen the patient job
    story.thread.begin(story.job("urgent", 1), is_urgent=True)
    story.go_on(4)
    story.await_finished(2)
    assert story.parts == ["in", "patient0", "urgent0", "patient1", "patient2"]
    assert list(story.thread.take_finished()) == ["urgent", "patient"]


def test_a_light_job_comes_before_the_next_patient_one_and_does_not_count_as_heavy_work(story: Story) -> None:
    story.thread.begin(story.job("light", 1), is_light=True)
    assert story.waits.acquire(timeout=WAIT_SECONDS)
    assert story.thread.has_work
    assert not story.thread.has_heavy_work
    story.thread.begin(story.job("patient", 1))
    assert story.thread.has_heavy_work
    story.thread.begin(story.job("other", 1), is_light=True)
    story.go_on(3)
    story.await_finished(3)
    assert story.parts == ["in", "light0", "other0", "patient0"]


def test_the_thread_rests_at_first_and_when_all_jobs_are_done_and_never_between(story: Story) -> None:
    assert story.rests.acquire(timeout=WAIT_SECONDS)
    for name in "abc":
        story.thread.begin(story.job(name, 2))
    story.go_on(5)
    story.await_finished(2)
    assert not story.rests.acquire(blocking=False)
    story.go_on(1)
    assert story.rests.acquire(timeout=WAIT_SECONDS)


def test_every_job_is_reported_once_in_the_order_of_their_ends(story: Story) -> None:
    for name in "abc":
        story.thread.begin(story.job(name, 2))
    assert story.thread.has_work
    story.go_on(6)
    story.await_finished(3)
    assert list(story.thread.take_finished()) == ["a", "b", "c"]
    assert not list(story.thread.take_finished())
    assert not story.thread.has_work


def test_the_call_after_a_job_comes_once_between_its_last_part_and_its_report(story: Story) -> None:
    story.thread.begin(story.job("patient", 2))
    story.thread.begin(story.job("light", 1), is_light=True)
    story.go_on(3)
    story.await_finished(2)
    assert story.ends == ["after light0", "reported", "after patient1", "reported"]


def test_closing_waits_for_the_part_under_way_and_begins_no_other(story: Story) -> None:
    story.thread.begin(story.job("long", 1000))
    assert story.waits.acquire(timeout=WAIT_SECONDS)
    closing = threading.Thread(target=story.thread.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()
    story.go_on(1)
    closing.join(WAIT_SECONDS)
    assert story.parts == ["in", "long0", "out"]


def test_closing_finishes_light_jobs(story: Story) -> None:
    story.thread.begin(story.job("long", 1000))
    assert story.waits.acquire(timeout=WAIT_SECONDS)
    story.thread.begin(story.job("light", 2), is_light=True)
    closing = threading.Thread(target=story.thread.close)
    closing.start()
    closing.join(0.05)
    story.go_on(3)
    closing.join(WAIT_SECONDS)
    assert story.parts == ["in", "long0", "light0", "light1", "out"]


def test_a_thread_without_work_can_be_closed_at_once(story: Story) -> None:
    story.thread.close()
    assert story.parts == ["in", "out"]


def never() -> Generator[None, None, str]:
    yield
    return "never"


@pytest.fixture
def lost() -> Iterator[BesideThread[str]]:
    """A thread whose device was lost before the first part of its first job."""
    finished = threading.Semaphore(0)

    def before_part() -> None:
        raise RuntimeError("the device is lost")

    thread: BesideThread[str] = BesideThread(nullcontext, before_part, lambda: None, lambda: None, finished.release)
    thread.begin(never())
    assert finished.acquire(timeout=WAIT_SECONDS)
    yield thread
    thread.close()


def test_a_device_fault_between_two_parts_is_raised_when_results_are_taken(
    lost: BesideThread[str],
) -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the device is lost"):
            list(lost.take_finished())


def test_beginning_a_job_after_such_a_fault_raises_it_too(lost: BesideThread[str]) -> None:
    with pytest.raises(RuntimeError, match="the device is lost"):
        lost.begin(never())


def test_a_far_smaller_job_takes_turns_with_one_that_was_begun_before(story: Story) -> None:
    story.thread.begin(story.job("large", 4), size=100)
    story.go_on(1)
    for _ in range(2):
        assert story.waits.acquire(timeout=WAIT_SECONDS)
    # One part is done; the next one waits.
    story.thread.begin(story.job("alike", 1), size=26)
    story.thread.begin(story.job("small", 2), size=25)
    story.go_on(6)
    story.await_finished(3)
    done = [part for part in story.parts if part != "in"]
    assert done == ["large0", "large1", "small0", "large2", "small1", "large3", "alike0"]


class Compared(Generator[None, None, str]):
    """A job that calls a function when it is compared with another."""

    def __init__(self, job: Generator[None, None, str], on_comparison: Callable[[], None]) -> None:
        self._job, self._on_comparison = job, on_comparison

    def send(self, value: None) -> None:
        self._job.send(value)

    def throw(self, *error: Any) -> None:
        self._job.throw(*error)

    def __eq__(self, other: object) -> bool:
        self._on_comparison()
        return self is other


def test_jobs_may_be_begun_while_others_end(story: Story) -> None:
    """Without the lock, the queue would change while the job that has ended is looked for in it."""
    beginning = threading.Thread(target=lambda: story.thread.begin(story.job("late", 1)))

    def begin_another() -> None:
        beginning.start()
        beginning.join(0.2)

    story.thread.begin(Compared(story.job("large", 2), begin_another), size=4)
    story.thread.begin(story.job("small", 1), size=1)
    story.go_on(4)
    story.await_finished(3)
    beginning.join()
    assert list(story.thread.take_finished()) == ["small", "large", "late"]
