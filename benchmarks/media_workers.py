"""Pictures per second, made by one and by two threads or processes; and what the processes cost to start and to keep.

    PYTHONPATH=src:. python benchmarks/media_workers.py [--runs 5] [--pictures 24]

Medians are printed.
"""

import argparse
import os
import signal
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial

from benchmarks.in_turn import time_in_turn
from benchmarks.preprocess import SIDE, pictures
from keepsight.frontend.pixels.make_pixels import MakePixels, PictureJob, run_job
from keepsight.frontend.pixels.media_workers import MediaWorkers
from keepsight.image_processor_config import ImageProcessorConfig
from tests.real_server import proportional_bytes

NUM_WORKERS = (1, 2)


def make_all(make: MakePixels, num_workers: int, jobs: Sequence[PictureJob]) -> None:
    with ThreadPoolExecutor(num_workers) as threads:
        list(threads.map(make, jobs))


def print_rates(workers: MediaWorkers, runs: int, num_pictures: int) -> None:
    makers: dict[str, MakePixels] = {"threads": run_job, "processes": workers.make}
    ways = {
        f"{maker} {count}": partial(make_all, make, count) for maker, make in makers.items() for count in NUM_WORKERS
    }
    print("| picture | made by | one, pictures/s | two, pictures/s | ratio |")
    print("|---|---|---|---|---|")
    for name, data in pictures().items():
        job = PictureJob(data, name, {"whole": None}, ImageProcessorConfig(height=SIDE, width=SIDE))
        times = time_in_turn(ways, [[job] * 2, *[[job] * num_pictures] * runs], num_warm_up=1)
        for maker in makers:
            one, two = (num_pictures / statistics.median(times[f"{maker} {count}"]) for count in NUM_WORKERS)
            print(f"| {name} | {maker} | {one:.1f} | {two:.1f} | {two / one:.2f} |")


def time_first_picture(runs: int) -> float:
    """Return the seconds from starting the workers to the pixels of a small picture."""
    job = PictureJob(pictures()["1024x768 JPEG"], "first", {"": None}, ImageProcessorConfig(height=SIDE, width=SIDE))
    return statistics.median(_time_first(job) for _ in range(runs))


def _time_first(job: PictureJob) -> float:
    start = time.perf_counter()
    with closing(MediaWorkers(1)) as workers:
        workers.make(job)
        return time.perf_counter() - start


def time_replacement(runs: int) -> float:
    """Return the extra seconds that a small picture takes if its worker has just been killed."""
    job = PictureJob(pictures()["1024x768 JPEG"], "next", {"": None}, ImageProcessorConfig(height=SIDE, width=SIDE))
    times: list[float] = []
    with closing(MediaWorkers(1)) as workers:
        workers.make(job)
        for _ in range(runs):
            os.kill(workers.pids()[1], signal.SIGKILL)
            start = time.perf_counter()
            workers.make(job)
            middle = time.perf_counter()
            workers.make(job)
            times.append((middle - start) - (time.perf_counter() - middle))
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--pictures", type=int, default=24)
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(f"from start to the first picture: {time_first_picture(arguments.runs):.2f} s")
    with closing(MediaWorkers(max(NUM_WORKERS))) as workers:
        print_rates(workers, arguments.runs, arguments.pictures)
        template, *others = (proportional_bytes(pid) / 2**20 for pid in workers.pids())
        print(
            f"MiB, shared pages in parts: template {template:.0f}, workers {', '.join(f'{mib:.0f}' for mib in others)}"
        )
    print(f"a picture whose worker was killed waits {time_replacement(arguments.runs) * 1e3:.0f} ms more")


if __name__ == "__main__":
    main()
