"""The cost of a picture whose embeddings are in a tier, compared to on the device and to being encoded again.

    PYTHONPATH=. python benchmarks/tier_hits.py [--model FOLDER] [--rounds 30] [--device cpu]

Time to first token, without a server, with the prefix cache off and room on the device for one picture, so that two
pictures asked about in turn evict each other: from the device (one picture, again and again), from host memory, from
the disk (its pages in the page cache), from a disk folder that an earlier engine filled (each picture once), encoded
again from cached pixels, and decoded again, too.  Each way has an engine of its own in one process, and all take turns.
Then how long tiers block the engine's loop, call by call, while many requests load from a disk and write to it: in
total; without waiting for a core, which compute threads and other processes may occupy; and the loop's own computing.
"""

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.in_turn import time_in_turn
from keepsight import LLM, SamplingParams
from tests.drawn import ask, by_url, draw

FIRST_TOKEN = SamplingParams(temperature=0, max_tokens=1)
OFF: dict[str, Any] = {"encoder_host_cache_gb": 0}


class Pause(NamedTuple):
    """Milliseconds of one call on the loop's thread: in total, without waits for a core, and computing."""

    whole: float
    with_a_core: float
    busy: float


def question(seed: int) -> list[dict[str, Any]]:
    return ask(by_url(draw(seed).picture), "What is in the picture?")


def measure_hits(common: dict[str, Any], rounds: int) -> dict[str, float]:
    """Return the median milliseconds to the first token, all ways in turn, after two rounds that are not counted."""
    one, two = [question(1)], [question(1), question(2)]
    each_once = [question(seed) for seed in range(10, 10 + rounds + 2)]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        disk, left_behind = ({**common, **OFF, "encoder_disk_cache": f"{folder}/{name}"} for name in ("new", "old"))
        with LLM(**left_behind) as llm:
            llm.chat(each_once, FIRST_TOKEN, use_tqdm=False)
        engines_and_questions: dict[str, tuple[dict[str, Any], Sequence[Any]]] = {
            "device": ({**common, **OFF}, one),
            "encoded again": ({**common, **OFF}, two),
            "host memory": (common, two),
            "disk": (disk, two),
            "disk, after a restart": (left_behind, each_once),
            "decoded and encoded again": ({**common, **OFF, "mm_processor_cache_gb": 0}, two),
        }
        ways = {
            name: ask_repeatedly(stack.enter_context(LLM(**options)), questions)
            for name, (options, questions) in engines_and_questions.items()
        }
        # Each way always follows another one: the encoding before it has flushed the CPU's caches.
        taken = time_in_turn(ways, range(rounds + 2), num_warm_up=2)
    return {name: statistics.median(seconds) * 1000 for name, seconds in taken.items()}


def ask_repeatedly(llm: LLM, questions: Sequence[Any]) -> Callable[[int], object]:
    return lambda turn: llm.chat(questions[turn % len(questions)], FIRST_TOKEN, use_tqdm=False)


def measure_pauses(common: dict[str, Any], num_pictures: int) -> list[Pause]:
    questions = [question(seed) for seed in range(num_pictures)]
    pauses: list[Pause] = []
    with tempfile.TemporaryDirectory() as folder, LLM(**common, encoder_disk_cache=f"{folder}/cache") as llm:
        # As in a server's engine.
        gc.freeze()
        loop: Any = llm.engine._loop
        loop._load_embeddings = timed(loop._load_embeddings, pauses)
        loop._tiers.take_changes = timed(loop._tiers.take_changes, pauses)
        loop._runner._place = timed(loop._runner._place, pauses)
        for _ in range(3):
            llm.chat(questions, SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
    return pauses


def timed(function: Callable[..., Any], pauses: list[Pause]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        waited, began, busy = seconds_without_core(), time.perf_counter(), time.thread_time()
        result = function(*arguments)
        busy, whole = time.thread_time() - busy, time.perf_counter() - began
        # The clocks are not read at the same instant.
        with_a_core = max(busy, whole - (seconds_without_core() - waited))
        pauses.append(Pause(whole * 1000, with_a_core * 1000, busy * 1000))
        return result

    return call


def seconds_without_core() -> float:
    """Return how long this thread has waited for a core so far, as other processes use them, too; 0 if unknown."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_bytes().split()[1]) / 1e9
    except FileNotFoundError:
        return 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint's folder (default: the demo checkpoint)")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--pictures", type=int, default=64, help="of the load under which pauses are measured")
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    common: dict[str, Any] = {
        "model": arguments.model,
        "device": arguments.device,
        "enable_prefix_caching": False,
        "encoder_cache_size": tokens_per_picture(arguments),
    }
    found = measure_hits(common, arguments.rounds)
    encoding = found["encoded again"] - found["device"]
    for name, milliseconds in found.items():
        more = milliseconds - found["device"]
        ratio = milliseconds / found["device"]
        print(
            f"{name:<28}{milliseconds:8.2f} ms  {ratio:5.2f}x  {more / encoding:6.1%} of an encoding beside the device"
        )
    pauses = measure_pauses(common, arguments.pictures)
    titles = ("in all", "with a core", "busy itself")
    for title, values in zip(titles, map(sorted, zip(*pauses, strict=True)), strict=True):
        p50, p99 = (values[int(share * (len(values) - 1))] for share in (0.5, 0.99))
        print(
            f"tiers hold up the loop, {title:<12} median {p50:.3f} ms, p99 {p99:.3f} ms, longest {values[-1]:.2f} ms"
            f" of {len(values)}"
        )


def tokens_per_picture(arguments: argparse.Namespace) -> int:
    with LLM(arguments.model, device=arguments.device) as llm:
        image_format = llm.preparer.prepare_chat(question(1), FIRST_TOKEN).engine_request.media[0]
        return image_format.span.length


if __name__ == "__main__":
    main()
