"""A lane that computes alone has all cores; two lanes together never take more than there are."""

import threading
from collections.abc import Generator
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from keepsight.runner import share_device
from keepsight.runner.run_beside import BesideThread
from keepsight.runner.share_device import CpuShare, CudaShare


@pytest.mark.parametrize("num_threads", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("beside_share", [0.01, 0.3, 0.5, 0.99])
def test_both_have_a_thread_and_together_no_more_than_there_are(num_threads: int, beside_share: float) -> None:
    share = CpuShare(num_threads, beside_share)
    assert min(share.of_foreground, share.of_beside) >= 1
    assert share.of_foreground + share.of_beside == max(2, num_threads)


def test_the_parts_follow_the_share() -> None:
    share = CpuShare(16, 0.25)
    assert (share.of_foreground, share.of_beside) == (12, 4)


class Observed:
    """Records the threads given to each lane, on separate threads so that the test's own is unchanged."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.share = CpuShare(8, 0.25, max_tokens_alone=3)
        self.now = 100.0
        monkeypatch.setattr("time.monotonic", lambda: self.now)

    def beside(self) -> int:
        counts: list[int] = []

        def look() -> None:
            self.share.before_part()
            counts.append(torch.get_num_threads())

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        return counts[0]

    def foreground(self, num_tokens: int = 4, *, beside_works: bool) -> tuple[int, int]:
        """Return its own threads, and those that the other lane gets meanwhile."""
        counts: list[int] = []

        def look() -> None:
            with self.share.foreground(num_tokens, beside_works=beside_works):
                counts.extend((torch.get_num_threads(), self.beside()))

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        return counts[0], counts[1]


@pytest.fixture
def observed(monkeypatch: pytest.MonkeyPatch) -> Observed:
    return Observed(monkeypatch)


def test_a_step_alone_has_all_threads_and_beside_others_its_own(observed: Observed) -> None:
    before = torch.get_num_threads()
    assert observed.foreground(beside_works=False)[0] == 8
    assert observed.foreground(beside_works=True) == (6, 2)
    assert torch.get_num_threads() == before


def test_a_step_of_few_tokens_leaves_the_other_cores_alone(observed: Observed) -> None:
    assert observed.foreground(3, beside_works=False)[0] == 1
    assert observed.foreground(3, beside_works=True) == (1, 2)


@pytest.mark.parametrize(("num_parameters", "num_alone"), [(1_000_000, 64), (10_500_000, 6), (121_000_000, 0)])
def test_the_larger_the_model_the_fewer_tokens_are_worth_a_second_core(num_parameters: int, num_alone: int) -> None:
    share = share_device.share_device(torch.device("cpu"), 0.5, num_parameters)
    counts = []
    for num_tokens in (max(1, num_alone), num_alone + 1):
        with share.foreground(num_tokens, beside_works=False):
            counts.append(torch.get_num_threads())
    every = torch.get_num_threads()
    assert counts == [1 if num_alone else every, every]


def test_work_beside_has_all_threads_once_no_step_has_followed_for_a_while(observed: Observed) -> None:
    assert observed.beside() == 8
    observed.foreground(beside_works=True)
    assert observed.beside() == 2
    observed.now += 2 * share_device.LINGER_SECONDS
    assert observed.beside() == 8


def test_work_beside_has_all_threads_at_once_when_no_step_is_to_follow(observed: Observed) -> None:
    observed.foreground(beside_works=True)
    observed.share.end_foreground()
    assert observed.beside() == 8


class OnCuda:
    """A share of a missing device; records when each of its streams was waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waited_for: list[int] = []
        # Events recorded beside, numbered in order.
        self.num_events, self.events_waited_for = 0, list[int]()
        self.slept: list[float] = []
        self.now = 100.0
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self.slept.append)
        monkeypatch.setattr(share_device, "time", clock)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
        monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
        monkeypatch.setattr(torch.cuda, "Stream", self._make_stream)
        self.share = CudaShare(torch.device("cuda"), beside_share=0.5)

    def _make_stream(self, _: torch.device, priority: int) -> SimpleNamespace:
        return SimpleNamespace(synchronize=lambda: self.waited_for.append(priority), record_event=self._record_event)

    def _record_event(self) -> SimpleNamespace:
        number, self.num_events = self.num_events, self.num_events + 1
        return SimpleNamespace(synchronize=lambda: self.events_waited_for.append(number))


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> OnCuda:
    return OnCuda(monkeypatch)


NOW_STREAM = -1  # identified by its priority


def test_a_pause_on_cuda_is_as_long_as_the_part_before_it(on_cuda: OnCuda) -> None:
    finished = threading.Semaphore(0)
    share = on_cuda.share

    def job(num_parts: int) -> Generator[None, None, None]:
        for part in range(num_parts):
            on_cuda.now += 0.01
            if part < num_parts - 1:
                yield

    thread: BesideThread[None] = BesideThread(
        share.beside, share.before_part, share.finish_part, share.before_rest, finished.release
    )
    for _ in range(2):
        with share.foreground(1, beside_works=True):
            thread.begin(job(3))
            assert finished.acquire(timeout=10)
        on_cuda.now += 3600
    thread.close()
    assert on_cuda.slept == pytest.approx([0.01, 0.01] * 2)


def test_on_cuda_a_part_is_launched_behind_another_s_end_or_alone_while_that_is_computed(on_cuda: OnCuda) -> None:
    share = on_cuda.share
    for _ in range(3):
        share.before_part()
    assert on_cuda.events_waited_for == [0, 1]  # waited for when events 1 and 2 had been recorded
    with share.foreground(1, beside_works=True):
        share.before_part()
    assert on_cuda.events_waited_for[2:] == [3]
    share.finish_part()
    on_cuda.now += 3600
    share.before_part()
    assert on_cuda.events_waited_for[3:] == []


def test_a_step_that_fails_on_cuda_has_ended_before_its_pages_are_reused(on_cuda: OnCuda) -> None:
    with pytest.raises(RuntimeError), on_cuda.share.foreground(1, beside_works=True):
        raise RuntimeError("out of memory")
    assert on_cuda.waited_for == [NOW_STREAM]
