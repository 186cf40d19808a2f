"""A thread that runs jobs beside the one that serves streams, in parts, so that an urgent job never waits long.

A job is a generator; at each `yield` the thread may switch to another. Knows nothing of what jobs compute. Every job
is reported once, in the order of completion, unless the thread is closed first or ended by an exception, which is
raised instead.
"""

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")
Job = Generator[None, None, T]
# A job at least this many times as large as another takes turns with it.
FAR_LARGER = 4


class _Work(NamedTuple, Generic[T]):
    job: Job[T]
    # Used for patient jobs only.
    size: int


class BesideThread(Generic[T]):
    def __init__(
        self,
        # Entered for the thread's whole life.
        surroundings: Callable[[], AbstractContextManager[object]],
        # Called before each part of a job.
        before_part: Callable[[], None],
        # Called after the last part of a job, however it ended, and before it is reported.
        after_job: Callable[[], None],
        # Called before the thread waits for jobs.
        before_rest: Callable[[], None],
        # Called after each job, once its result can be taken.
        on_finished: Callable[[], None],
    ) -> None:
        self._surroundings, self._before_part, self._after_job = surroundings, before_part, after_job
        self._before_rest, self._on_finished = before_rest, on_finished
        self._urgent: deque[_Work[T]] = deque()
        self._light: deque[_Work[T]] = deque()
        self._patient: deque[_Work[T]] = deque()
        # True if the last patient part belonged to the first job of that queue.
        self._first_had_part = False
        self._finished: deque[T] = deque()
        self._is_closing = False
        self._fault: Exception | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="beside", daemon=True)
        self._thread.start()

    @property
    def has_work(self) -> bool:
        return self.has_heavy_work or bool(self._light)

    @property
    def has_heavy_work(self) -> bool:
        return bool(self._urgent or self._patient)

    def begin(self, job: Job[T], *, is_urgent: bool = False, is_light: bool = False, size: int = 0) -> None:
        """Queue a job: urgent, light or, by default, patient.

        A light job takes only a moment of one core, and runs before the next part of a patient one. Patient jobs run
        in order, but one far smaller than the first takes turns with it. Raises the exception that ended the thread,
        if one did.
        """
        if self._fault is not None:
            raise self._fault
        assert self._thread.is_alive(), "closed"
        with self._changed:
            queue = self._light if is_light else self._urgent if is_urgent else self._patient
            queue.append(_Work(job, size))
            self._changed.notify()

    def take_finished(self) -> Iterator[T]:
        """Yield the results of finished jobs.

        Raises the exception that ended the thread, if one did: unfinished jobs will not be reported then.
        """
        while self._finished:
            yield self._finished.popleft()
        if self._fault is not None:
            raise self._fault

    def close(self) -> None:
        """Stop after the part under way and all light jobs, which store what was made. Nothing else is started."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        with self._surroundings():
            while (found := self._wait_for_work()) is not None:
                try:
                    self._before_part()
                    self._do_part(*found)
                except Exception as fault:  # of the device, or a bug: jobs report their own errors in their results
                    self._fault = fault
                    self._on_finished()
                    return

    def _do_part(self, queue: deque[_Work[T]], work: _Work[T]) -> None:
        try:
            next(work.job)
        except StopIteration as end:
            self._after_job()
            with self._changed:  # another thread may queue jobs meanwhile
                queue.remove(work)
            self._finished.append(end.value)
            self._on_finished()

    def _wait_for_work(self) -> tuple[deque[_Work[T]], _Work[T]] | None:
        """Wait for a job. Return it and its queue, where it stays until it is done; None to end the thread."""
        if not self.has_work:
            self._before_rest()
        with self._changed:
            self._changed.wait_for(lambda: self._is_closing or self.has_work)
            queue = self._light if self._is_closing else self._urgent or self._light or self._patient
            if not queue:
                return None
            return queue, self._choose_patient() if queue is self._patient else queue[0]

    def _choose_patient(self) -> _Work[T]:
        first = self._patient[0]
        smaller = (each for each in self._patient if each.size * FAR_LARGER <= first.size)
        other = next(smaller, first) if self._first_had_part else first
        self._first_had_part = other is first
        return other
