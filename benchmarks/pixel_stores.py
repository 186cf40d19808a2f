"""The cost of storing pixels in shared memory and of getting them from there, compared to the necessary minimum.

    PYTHONPATH=. python benchmarks/pixel_stores.py [--pictures 40] [--rounds 30]

Hit: from the media hash to the pixels in the engine, all of them read (the ring copies them out, the store maps them),
compared to copying the same bytes out of a map.  Miss: `put`, compared to copying the same bytes into new shared
memory.  All take turns, picture by picture, in one process; in two, both sides would do the same work.  Then the memory
that each kind of cache takes when it is full, compared to what it reports.
"""

import argparse
import mmap
import os
import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.in_turn import time_in_turn
from keepsight.config import GIB, Config
from keepsight.engine.pixel_source import KeptPixels, PixelSource, open_pixel_source
from keepsight.frontend.pixels.pixel_cache import LocalCache, PixelCache, open_pixel_cache
from keepsight.ipc.pixel_mode import PixelMode
from keepsight.ipc.run_directory import RunDirectory
from keepsight.ipc.shared_store import SharedStore
from keepsight.ipc.shm_ring import RingWriter
from keepsight.ipc.unnamed_file import open_unnamed
from keepsight.observe.process_memory import resident_bytes
from keepsight.requests import MediaArrived, Pixels
from tests.names import name_of

SHAPE = (896, 896, 3)
NUM_BYTES = 896 * 896 * 3
MODES: tuple[PixelMode, ...] = ("lru", "shm", "shared")


def picture(number: int) -> Pixels:
    return np.random.default_rng(number).integers(0, 256, SHAPE, np.uint8)


class Bare:
    """The same bytes in plain files, one for each picture."""

    def __init__(self, folder: Path, pictures: list[Pixels]) -> None:
        self._folder, self._pictures = folder, pictures
        self._target = np.empty(NUM_BYTES, np.uint8)
        for number, pixels in enumerate(pictures):
            (folder / str(number)).write_bytes(pixels.tobytes())
        self._maps = [self._map(number) for number in range(len(pictures))]

    def copy_of_map(self, number: int) -> Pixels:
        return self._maps[number].copy()

    def map_and_touch(self, number: int) -> None:
        self.touch(self._map(number))

    def touch(self, pixels: Pixels) -> None:
        self._target[:] = pixels.reshape(-1)

    def put(self, number: int) -> None:
        descriptor = open_unnamed(self._folder)
        os.ftruncate(descriptor, NUM_BYTES)
        content = mmap.mmap(descriptor, NUM_BYTES)
        os.close(descriptor)
        np.frombuffer(content, np.uint8)[:] = self._pictures[number].reshape(-1)

    def _map(self, number: int) -> Pixels:
        with (self._folder / str(number)).open("rb") as file:
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)


def hit(cache: PixelCache, source: PixelSource, number: int) -> Pixels:
    carried = cache.get_and_update(name_of(number))
    assert carried is not None
    pixels = source.receive(MediaArrived(name_of(number), carried))
    assert pixels is not None
    return pixels


def find(source: PixelSource, number: int) -> Pixels:
    pixels = source.find(name_of(number))
    assert pixels is not None
    return pixels


def compare(steps: dict[str, Callable[[int], object]], num_pictures: int, num_rounds: int) -> None:
    """Time all steps; each is compared to the last one."""
    seconds = time_in_turn(steps, [*range(num_pictures)] * (num_rounds + 1), num_warm_up=num_pictures)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    bare = list(medians.values())[-1]
    for name, median in medians.items():
        print(f"    {name:42s} {1e3 * median:6.3f} ms  {median / bare:5.2f}")


def new_cache(mode: PixelMode, num_pictures: int, directory: RunDirectory) -> tuple[PixelCache, PixelSource]:
    config = Config(mm_processor_cache_gb=num_pictures * (NUM_BYTES + 8192) / GIB)
    return open_pixel_cache(mode, config, directory.path), open_pixel_source(mode, config, directory.path)


def measure_time(num_pictures: int, num_rounds: int) -> None:
    pictures = [picture(number) for number in range(num_pictures)]
    with RunDirectory.create() as directory, RunDirectory.create() as other:
        bare = Bare(other.path, pictures)
        sides = {mode: new_cache(mode, num_pictures, directory) for mode in MODES}
        for number, pixels in enumerate(pictures):
            for cache, source in sides.values():
                source.receive(MediaArrived(name_of(number), cache.put(name_of(number), pixels)))
        print(f"hit, {NUM_BYTES} bytes:")
        ring, store = sides["shm"], sides["shared"]
        copying: dict[str, Callable[[int], object]] = {
            "shm": lambda number: hit(*ring, number),
            "copy of a map": bare.copy_of_map,
        }
        compare(copying, num_pictures, num_rounds)
        mapping: dict[str, Callable[[int], object]] = {
            "lru": lambda number: bare.touch(find(sides["lru"][1], number)),
            "shared, by the engine alone": lambda number: bare.touch(find(store[1], number)),
            "shared, found by the frontend, then read": lambda number: bare.touch(hit(*store, number)),
            "map and read": bare.map_and_touch,
        }
        compare(mapping, num_pictures, num_rounds)
        print("miss:")
        compare({**putting(sides, pictures), "copy into fresh shared memory": bare.put}, num_pictures, num_rounds)
        for cache, source in sides.values():
            cache.close()
            source.close()


def putting(
    sides: dict[PixelMode, tuple[PixelCache, PixelSource]], pictures: list[Pixels]
) -> dict[str, Callable[[int], object]]:
    """Return the steps that put new pictures in, which evicts the oldest."""
    next_name = iter(range(1000, 1 << 40))
    return {
        mode: lambda number, cache=cache: cache.put(name_of(next(next_name)), pictures[number])  # type: ignore[misc]
        for mode, (cache, _) in sides.items()
        if mode != "lru"
    }


def measure_memory(num_pictures: int) -> None:
    print(f"memory of {num_pictures} pictures, what is held over what is counted:")
    max_bytes = num_pictures * (NUM_BYTES + 8192)
    with RunDirectory.create() as directory:
        before = directory.num_free_bytes
        ring = RingWriter(directory.path, max_bytes, 1 << 30)
        report("shm", before - directory.num_free_bytes, ring.num_bytes)
        ring.close()
        store = SharedStore(directory.path, max_bytes)
        before = directory.num_free_bytes
        for number in range(2 * num_pictures):
            store.put(name_of(number), picture(number))
        report("shared", before - directory.num_free_bytes, store.num_bytes)
        store.close()
    local, kept = LocalCache(max_bytes), KeptPixels(max_bytes)
    resident = [resident_bytes(os.getpid())]
    for number in range(2 * num_pictures):
        local.put(name_of(number), picture(number))
    resident.append(resident_bytes(os.getpid()))
    for number in range(2 * num_pictures):
        kept.receive(MediaArrived(name_of(number), picture(number)))
    resident.append(resident_bytes(os.getpid()))
    report("processor_only", resident[1] - resident[0], local._cache.num_bytes)
    report("lru", resident[2] - resident[1], kept._cache.num_bytes)


def report(name: str, held: int, counted: int) -> None:
    print(f"    {name:16s} {held / 1e6:8.1f} MB over {counted / 1e6:8.1f} MB  {held / counted:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    measure_time(arguments.pictures, arguments.rounds)
    measure_memory(2 * arguments.pictures)


if __name__ == "__main__":
    main()
