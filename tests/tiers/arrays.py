"""Embeddings for tests, and their keys."""

import numpy as np

from keepsight.tiers.tier import StoredArray
from tests.names import name_of

key_of = name_of


def array_of(number: int, num_bytes: int = 3000) -> StoredArray:
    payload = np.random.default_rng(number).integers(0, 256, num_bytes, np.uint8).data
    return StoredArray("bfloat16", (num_bytes // 2,), payload, seconds=0.01 + number / 1000)


def assert_equal(found: StoredArray | None, expected: StoredArray) -> None:
    assert found is not None
    assert (found.dtype, found.shape, found.seconds) == (expected.dtype, expected.shape, expected.seconds)
    assert found.payload == expected.payload
