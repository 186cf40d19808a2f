"""The cost of the engine's decisions: a step's schedule and update with many streams, and hashing a long prompt.

    PYTHONPATH=. python benchmarks/scheduler_cost.py [--streams 256] [--steps 200] [--profile]

No model and no runner: the results of the steps are fabricated, outside of the measured time.  Parked requests wait for
pixels that never come; waiting ones for a seat.  Streams begin at different offsets in their blocks, unless `--aligned`
makes all of them fill one in the same step.  Times are processor time of one thread; they include Python's garbage
collector, whose share is printed.
"""

import argparse
import cProfile
import gc
import pstats
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.decisions import BLOCK_SIZE, END_IDS, compute, make_request, media_hash
from keepsight.engine_config import EncoderCacheConfig, EngineConfig, KvCacheConfig, SchedulerConfig
from keepsight.requests import EngineRequest
from keepsight.scheduling.block_hash import BlockHasher
from keepsight.scheduling.scheduler import Scheduler

TOKENS_PER_PICTURE, PROMPT_TOKENS = 256, 300
LONG_PROMPT_TOKENS, LONG_PROMPT_PICTURES = 32_768, 16


def ask(name: str, num_tokens: int, num_pictures: int) -> EngineRequest:
    """Make a request whose pictures all have different hashes."""
    pictures = [media_hash(f"{name} {index}") for index in range(num_pictures)]
    return make_request(name, num_tokens, pictures, None, TOKENS_PER_PICTURE)


def make_config(num_streams: int, num_steps: int) -> EngineConfig:
    model_len = PROMPT_TOKENS + num_steps + 2 * BLOCK_SIZE
    return EngineConfig(
        scheduler=SchedulerConfig(
            max_num_batched_tokens=num_streams * (PROMPT_TOKENS + BLOCK_SIZE),
            max_num_seqs=num_streams,
            max_model_len=model_len,
            max_num_encoder_input_tokens=2048,
            max_prompt_tokens_beside_streams=32,
            tokens_per_item=TOKENS_PER_PICTURE,
        ),
        kv_cache=KvCacheConfig(num_blocks=num_streams * (model_len // BLOCK_SIZE + 1), block_size=BLOCK_SIZE),
        encoder_cache=EncoderCacheConfig(max_bytes=2**30, bytes_per_embedding=2560),
    )


class Streams:
    """A scheduler whose seats are taken by streams, and other requests that it cannot serve yet."""

    def __init__(self, num_streams: int, num_steps: int, num_others: int, is_aligned: bool) -> None:
        self.scheduler = Scheduler(make_config(num_streams, num_steps), END_IDS)
        for index in range(num_others):
            self.scheduler.add(ask(f"parked {index}", PROMPT_TOKENS, 1))
        for index in range(num_streams):
            offset = 0 if is_aligned else index % BLOCK_SIZE
            self.scheduler.add(ask(f"stream {index}", PROMPT_TOKENS + offset, 0))
        self.step()
        for index in range(num_others):
            self.scheduler.add(ask(f"waiting {index}", PROMPT_TOKENS, 0))
        self.step()
        assert self.step_size() == num_streams

    def step_size(self) -> int:
        plan = self.scheduler.schedule()
        self.scheduler.update(compute(plan))
        return len(plan.now)

    def step(self) -> tuple[float, float]:
        """Run a step.  Return the seconds of schedule and of update."""
        started = time.process_time()
        plan = self.scheduler.schedule()
        planned = time.process_time()
        result = compute(plan)
        computed = time.process_time()
        self.scheduler.update(result)
        return planned - started, time.process_time() - computed


class GarbageCollector:
    """The processor time that Python's garbage collector takes from now on."""

    def __init__(self) -> None:
        self.seconds, self._started = 0.0, 0.0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, _: dict[str, Any]) -> None:
        now = time.process_time()
        if phase == "start":
            self._started = now
        else:
            self.seconds += now - self._started


def milliseconds(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    values = {
        "median": statistics.median(ordered),
        "mean": statistics.mean(ordered),
        "p99": ordered[int(len(ordered) * 0.99)],
        "longest": ordered[-1],
    }
    return "  ".join(f"{name} {value * 1e3:7.3f}" for name, value in values.items())


def report_steps(name: str, streams: Streams, num_steps: int) -> None:
    collector = GarbageCollector()
    times = [streams.step() for _ in range(num_steps)]
    print(f"{name}, ms a step:")
    print(f"    schedule   {milliseconds([schedule for schedule, _ in times])}")
    print(f"    update     {milliseconds([update for _, update in times])}")
    print(f"    together   {milliseconds([schedule + update for schedule, update in times])}")
    print(f"    garbage collection, of the mean: {collector.seconds / num_steps * 1e3:.3f}")


def report_hashing(runs: int) -> None:
    request = ask("long", LONG_PROMPT_TOKENS, LONG_PROMPT_PICTURES)
    times = []
    for _ in range(runs):
        started = time.process_time()
        hasher = BlockHasher(request, BLOCK_SIZE)
        times.append(time.process_time() - started)
    assert len(set(hasher.hashes)) == LONG_PROMPT_TOKENS // BLOCK_SIZE
    print(f"hashing {LONG_PROMPT_TOKENS} tokens with {LONG_PROMPT_PICTURES} pictures, ms: {milliseconds(times)}")


def print_profile(work: Callable[[], object]) -> None:
    with cProfile.Profile() as profile:
        work()
    pstats.Stats(profile).sort_stats("tottime").print_stats(14)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--others", type=int, default=64, help="parked for pixels, and as many waiting for a seat")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--aligned", action="store_true", help="all streams fill a block in the same step")
    parser.add_argument("--profile", action="store_true", help="also where the time goes")
    arguments = parser.parse_args()
    others, num_steps = arguments.others, arguments.steps
    cases = {f"{arguments.streams} streams": 0, f"and beside them {others} parked, {others} waiting": others}
    for name, number in cases.items():
        streams = Streams(arguments.streams, 2 * num_steps, number, arguments.aligned)
        report_steps(name, streams, num_steps)
        if arguments.profile:
            print_profile(lambda streams=streams: [streams.step() for _ in range(num_steps)])  # type: ignore[misc]
    report_hashing(runs=50)


if __name__ == "__main__":
    main()
