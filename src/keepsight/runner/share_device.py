"""Shares one device between two threads that compute at the same time.

On a CPU, two teams of threads that together outnumber the cores stall in each other's barriers, so while both compute
each has its own cores; a team that computes alone has all. On a GPU each thread has a stream, and answers have the
higher priority. The device has finished whatever a thread reports: nothing is handed over half done.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from keepsight.runner.openmp_team import dismiss_team, set_team_size
from keepsight.runner.place_threads import Places, cores_of_process

# The pause between two steps of a stream of answers is shorter than this.
LINGER_SECONDS = 0.02
# In multiply-adds. A smaller step mostly waits for memory, so a second core saves only a seventh of its time, and
# costs far more if another thread needs that core: to send the token on, or to read the next request.
MIN_WORK_TO_SHARE = 64_000_000
# Priorities of CUDA streams: lower goes first.
PRIORITY_OF_ANSWERS, PRIORITY_BESIDE = -1, 0


class DeviceShare(ABC):
    def __init__(self) -> None:
        self._is_in_step = False
        self._last_step_ended = -LINGER_SECONDS

    @abstractmethod
    def foreground(self, num_tokens: int, *, beside_works: bool) -> AbstractContextManager[None]:
        """Wrap one step of `num_tokens` tokens."""

    def handing_over(self) -> AbstractContextManager[None]:
        """Wrap work whose results the other thread reads."""
        return nullcontext()

    @abstractmethod
    def beside(self) -> AbstractContextManager[None]:
        """Wrap the whole life of the other thread."""

    @abstractmethod
    def before_part(self) -> None:
        """Called on the other thread, between two parts of its work."""

    @abstractmethod
    def finish_part(self) -> None:
        """Called on the other thread; returns when the device has done all work of that thread."""

    @abstractmethod
    def before_rest(self) -> None:
        """Called on either thread when it has nothing to compute for now."""

    def end_foreground(self) -> None:
        """Note that no step follows for now, so that work beside need not wait to find out."""
        self._last_step_ended = -LINGER_SECONDS

    @property
    def _has_foreground(self) -> bool:
        """True if the foreground thread computes a step, or did a moment ago."""
        return self._is_in_step or time.monotonic() - self._last_step_ended < LINGER_SECONDS

    @contextmanager
    def _step(self) -> Iterator[None]:
        self._is_in_step = True
        try:
            yield
        finally:
            self._last_step_ended = time.monotonic()
            self._is_in_step = False


def share_device(device: torch.device, beside_share: float, num_parameters: int) -> DeviceShare:
    if device.type == "cuda":
        return CudaShare(device, beside_share)
    return CpuShare(torch.get_num_threads(), beside_share, MIN_WORK_TO_SHARE // num_parameters)


class CpuShare(DeviceShare):
    def __init__(self, num_threads: int, beside_share: float, max_tokens_alone: int = 0) -> None:
        """Initialize; steps of up to `max_tokens_alone` tokens are computed on one core."""
        super().__init__()
        self.all, self._max_tokens_alone = num_threads, max_tokens_alone
        self.of_beside = min(max(1, round(num_threads * beside_share)), max(1, num_threads - 1))
        self.of_foreground = max(1, num_threads - self.of_beside)
        cores = cores_of_process()
        self._cores = cores if len(cores) == num_threads > 1 else ()
        self._places = Places(self._cores)

    @contextmanager
    def foreground(self, num_tokens: int, *, beside_works: bool) -> Iterator[None]:
        with self._step():
            own = self.of_foreground if beside_works else self.all
            count = 1 if num_tokens <= self._max_tokens_alone else own
            set_team_size(count)
            if count > 1 or beside_works:
                self._places.take(self._cores[:count])
            else:
                self._places.leave()
            yield

    def beside(self) -> AbstractContextManager[None]:
        return torch.inference_mode()

    def before_part(self) -> None:
        count = self.of_beside if self._has_foreground else self.all
        set_team_size(count)
        self._places.take(self._cores[-count:])

    def finish_part(self) -> None:
        pass

    def before_rest(self) -> None:
        dismiss_team()
        self._places.leave()


class CudaShare(DeviceShare):
    """Shares a GPU by streams. While answers run, each part beside them is followed by a pause in proportion to it."""

    def __init__(self, device: torch.device, beside_share: float) -> None:
        super().__init__()
        torch.cuda.synchronize(device)
        self._pause_per_second = (1 - beside_share) / beside_share
        self._stream_now = torch.cuda.Stream(device, priority=PRIORITY_OF_ANSWERS)  # type: ignore[no-untyped-call]
        self._stream_beside = torch.cuda.Stream(device, priority=PRIORITY_BESIDE)  # type: ignore[no-untyped-call]
        self._part_began: float | None = None
        # The end of all that the part before the current one launched.
        self._part_ended: torch.cuda.Event | None = None

    @contextmanager
    def foreground(self, num_tokens: int, *, beside_works: bool) -> Iterator[None]:
        with self._step(), self.handing_over():
            yield

    @contextmanager
    def handing_over(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream_now):
            try:
                yield
            finally:
                # Also after a failure: the batch's pages may be written to on the other stream next.
                self._stream_now.synchronize()

    @contextmanager
    def beside(self) -> Iterator[None]:
        with torch.inference_mode(), torch.cuda.stream(self._stream_beside):
            yield

    def before_part(self) -> None:
        # Launches run ahead of the device, and an urgent job would wait for all of them, so beside answers each part is
        # waited for. Otherwise a part is launched while the one before it is computed, so the device never waits for
        # launches.
        has_foreground = self._has_foreground
        ended = self._stream_beside.record_event()
        if (awaited := ended if has_foreground else self._part_ended) is not None:
            awaited.synchronize()
        self._part_ended = ended
        if self._part_began is not None and has_foreground:
            time.sleep((time.monotonic() - self._part_began) * self._pause_per_second)
        self._part_began = time.monotonic()

    def finish_part(self) -> None:
        self._stream_beside.synchronize()
        self._part_began = self._part_ended = None

    def before_rest(self) -> None:
        pass
