"""Pictures a second, made by one and by two threads or processes; and what the processes cost to start and to keep.

    PYTHONPATH=src:. python benchmarks/media_workers.py [--runs 5] [--pictures 24]

The contestants take turns, so that a busy machine disturbs none more than the others; medians are shown.
"""

import argparse
import os
import signal
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass

from benchmarks.preprocess import SIDE, pictures
from benchmarks.processes import proportional_mib
from keepsight.frontend.pixels.make_pixels import MakePixels, PictureJob
from keepsight.frontend.pixels.media_workers import MediaWorkers
from keepsight.image_processor_config import ImageProcessorConfig

NUM_WORKERS = (1, 2)


@dataclass(frozen=True)
class Contestant:
    name: str
    num_workers: int
    make: MakePixels

    def rate(self, job: PictureJob, num_pictures: int) -> float:
        with ThreadPoolExecutor(self.num_workers) as threads:
            start = time.perf_counter()
            list(threads.map(self.make, [job] * num_pictures))
            return num_pictures / (time.perf_counter() - start)


def print_rates(workers: MediaWorkers, runs: int, num_pictures: int) -> None:
    makers: list[tuple[str, MakePixels]] = [("threads", PictureJob.run), ("processes", workers.make)]
    contestants = [Contestant(name, count, make) for name, make in makers for count in NUM_WORKERS]
    print("| picture | made by | one, pictures/s | two, pictures/s | ratio |")
    print("|---|---|---|---|---|")
    for name, data in pictures().items():
        job = PictureJob(data, name, {"whole": None}, ImageProcessorConfig(height=SIDE, width=SIDE))
        for contestant in contestants:
            contestant.rate(job, 2)
        rates: list[list[float]] = [[] for _ in contestants]
        for _ in range(runs):
            for contestant, of_contestant in zip(contestants, rates, strict=True):
                of_contestant.append(contestant.rate(job, num_pictures))
        medians = [statistics.median(of_contestant) for of_contestant in rates]
        for (maker, _), one, two in zip(makers, medians[::2], medians[1::2], strict=True):
            print(f"| {name} | {maker} | {one:.1f} | {two:.1f} | {two / one:.2f} |")


def time_first_picture(runs: int) -> float:
    """Seconds from nothing to the pixels of a small picture."""
    job = PictureJob(pictures()["1024x768 JPEG"], "first", {"": None}, ImageProcessorConfig(height=SIDE, width=SIDE))
    return statistics.median(_time_first(job) for _ in range(runs))


def _time_first(job: PictureJob) -> float:
    start = time.perf_counter()
    with closing(MediaWorkers(1)) as workers:
        workers.make(job)
        return time.perf_counter() - start


def time_replacement(runs: int) -> float:
    """Seconds that a small picture takes more when its worker has just been killed."""
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
        template, *others = map(proportional_mib, workers.pids())
        print(
            f"MiB, shared pages in parts: template {template:.0f}, workers {', '.join(f'{mib:.0f}' for mib in others)}"
        )
    print(f"a picture whose worker was killed waits {time_replacement(arguments.runs) * 1e3:.0f} ms more")


if __name__ == "__main__":
    main()
