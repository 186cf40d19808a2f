"""Read many forged handles: `python -m tests.ipc.long_handles [COUNT]`. None may return pixels or raise an error."""

import dataclasses
import sys
from collections.abc import Sequence

import numpy as np

from keepsight.ipc.run_directory import RunDirectory
from keepsight.ipc.shm_ring import RingReader, RingWriter
from keepsight.requests import RingPlace

RING_IDS = ("", "0" * 16, "../ledger", "f" * 15, "ring", "0" * 16 + "\n")
NUMBERS = (0, 1, -1, 63, 64, 65, 4096, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64, -(2**63), 2**200)
SHAPES = ((0, 0, 0), (1, 1, 1), (50, 20, 3), (20, 50, 3), (-1, 5, 5), (2**40, 2**40, 3), (50, 20, 4))


def distort(place: RingPlace, others: Sequence[RingPlace], rng: np.random.Generator) -> RingPlace:
    """Replace some of its fields by those of another place or by arbitrary values."""
    changes: dict[str, object] = {}
    while not changes or rng.random() < 0.4:
        name = str(rng.choice(["ring_id", "entry_id", "offset", "num_bytes", "shape", "signature"]))
        if rng.random() < 0.4:
            changes[name] = getattr(others[int(rng.integers(len(others)))], name)
        else:
            changes[name] = _anything(name, getattr(place, name), rng)
    return dataclasses.replace(place, **changes)  # type: ignore[arg-type]


def _anything(name: str, value: object, rng: np.random.Generator) -> object:
    if name == "ring_id":
        return RING_IDS[int(rng.integers(len(RING_IDS)))]
    if name == "shape":
        return SHAPES[int(rng.integers(len(SHAPES)))]
    if name == "signature":
        assert isinstance(value, bytes)
        position = int(rng.integers(len(value)))
        return [b"", rng.bytes(16), value[:-1], value + b"\0", _flip(value, position)][int(rng.integers(5))]
    assert isinstance(value, int)
    return int(rng.choice([value + 64, value - 64, value + 1])) if rng.random() < 0.5 else NUMBERS[rng.integers(15)]


def _flip(value: bytes, position: int) -> bytes:
    return value[:position] + bytes([value[position] ^ 1]) + value[position + 1 :]


def main(count: int) -> None:
    rng = np.random.default_rng(0)
    num_given = num_stale = 0
    with RunDirectory.create() as directory:
        ring = RingWriter(directory.path, 1 << 16, 1 << 14)
        reader = RingReader(directory.path)
        places: dict[RingPlace, int] = {}
        for number in range(count):
            if number % 5 == 0:
                place = ring.put(str(number), np.full((50, 20, 3), number % 251, np.uint8))
                assert place is not None
                places[place] = number % 251
                if len(places) > 60:  # About half of them are overwritten by now.
                    del places[next(iter(places))]
            known = list(places)
            forged = distort(known[int(rng.integers(len(known)))], known, rng)
            pixels = reader.read(forged)
            if pixels is not None:
                assert np.array_equal(pixels, np.full((50, 20, 3), places[forged], np.uint8))
            num_given += pixels is not None
            num_stale += pixels is None and forged in places
        ring.check_invariants()
        ring.close()
    print(f"{count} handles: {num_given} were true after all, {num_stale} true but stale, all others refused")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200_000)
