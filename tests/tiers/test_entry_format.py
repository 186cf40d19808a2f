"""An entry reads back as it was written; anything else is detected as damaged."""

import io
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepsight.tiers.entry_format import DamagedEntryError, pack_header, read_entry, read_seconds
from keepsight.tiers.tier import StoredArray
from tests.scheduling.long_run import thorough
from tests.tiers.arrays import array_of, assert_equal, key_of


def entry(number: int, num_bytes: int = 3000) -> bytes:
    array = array_of(number, num_bytes)
    return pack_header(key_of(number), array) + bytes(array.payload)


def read(number: int, content: bytes) -> StoredArray:
    return read_entry(key_of(number), len(content), io.BytesIO(content).readinto)


def test_an_entry_is_read_as_it_was_written() -> None:
    assert_equal(read(1, entry(1, 2_000_000)), array_of(1, 2_000_000))
    assert read(1, entry(1)).payload.readonly


def test_an_entry_may_be_read_in_pieces_of_any_size() -> None:
    stream, rng = io.BytesIO(entry(1)), random.Random(0)

    def some(target: memoryview) -> int:
        return stream.readinto(target[: rng.randint(1, 100)])

    assert_equal(read_entry(key_of(1), len(entry(1)), some), array_of(1))


@thorough(300)
@given(st.randoms(use_true_random=False))
def test_any_bit_flip_is_detected(rng: random.Random) -> None:
    content = bytearray(entry(1, 600))
    for _ in range(rng.randint(1, 4)):
        content[rng.choice([rng.randrange(256), rng.randrange(len(content))])] ^= 1 << rng.randrange(8)
    if content != entry(1, 600):
        with pytest.raises(DamagedEntryError):
            read(1, bytes(content))


def test_torn_zeroed_or_swapped_pages_are_detected() -> None:
    whole, other, page = entry(1, 600_000), entry(1, 600_000)[::-1], 4096
    for at in range(page, len(whole) - 2 * page, 37 * page):
        first, second = whole[at : at + page], whole[at + page : at + 2 * page]
        for damaged in (bytes(2 * page), second + first, other[at : at + 2 * page]):
            with pytest.raises(DamagedEntryError):
                read(1, whole[:at] + damaged + whole[at + 2 * page :])


def test_an_entry_of_an_older_version_is_detected() -> None:
    with pytest.raises(DamagedEntryError):
        read(1, b"KSEMBED1" + entry(1)[8:])


@pytest.mark.parametrize("cut", [0, 1, 255, 256, 257, 3255])
def test_a_truncated_entry_is_detected(cut: int) -> None:
    with pytest.raises(DamagedEntryError):
        read(1, entry(1)[:cut])
    with pytest.raises(DamagedEntryError):
        read(1, entry(1)[:cut].ljust(3256, b"\0"))


def test_an_entry_truncated_while_it_is_read_is_detected() -> None:
    with pytest.raises(DamagedEntryError):
        read_entry(key_of(1), 3256, io.BytesIO(entry(1)[:-1]).readinto)


def test_an_entry_of_another_key_is_detected() -> None:
    with pytest.raises(DamagedEntryError):
        read(2, entry(1))
    with pytest.raises(DamagedEntryError):
        read(1, entry(1) + b"x")


def test_the_header_holds_the_computation_time() -> None:
    assert read_seconds(key_of(1), entry(1)[:256]) == array_of(1).seconds
    assert read_seconds(key_of(2), entry(1)[:256]) is None
    assert read_seconds(key_of(1), b"") is None
