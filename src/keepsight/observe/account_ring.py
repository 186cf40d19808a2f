"""The accounts of a frontend's last requests, in memory shared with its siblings: each frontend can report all of them.

Each account has a slot, compressed, and the newest overwrites the oldest. A slot begins with the time it was written (0
while it is being written), from the monotonic clock, which all processes of a machine share.
"""

import mmap
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import msgspec

from keepsight.observe.account import AccountBody
from keepsight.observe.shared_page import share_or_keep

FOLDER = "accounts"
NUM_SLOTS, SLOT_BYTES = 128, 4096
RING_BYTES = NUM_SLOTS * SLOT_BYTES
_HEADER = struct.Struct("<QI")  # time of writing, number of bytes
ROOM = SLOT_BYTES - _HEADER.size
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(AccountBody)


class AccountRing:
    def __init__(self, memory: mmap.mmap | bytearray) -> None:
        self._memory = memory
        self._lock = threading.Lock()
        written = [_HEADER.unpack_from(self._memory, slot * SLOT_BYTES)[0] for slot in range(NUM_SLOTS)]
        self._next = (written.index(max(written)) + 1) % NUM_SLOTS if any(written) else 0

    @classmethod
    def open(cls, run_directory: Path, process: str) -> Self:
        """Open the ring of this process, with the accounts of the process that it replaces, if any."""
        if_kept = "nobody else will tell of this process's requests"
        return cls(share_or_keep(run_directory, f"{FOLDER}/{process}", RING_BYTES, if_kept))

    def put(self, account: AccountBody) -> None:
        """Add an account, on any thread. One that has no room, even without its media, is left out."""
        body = _fit(account)
        if len(body) > ROOM:
            return
        with self._lock:
            begin = self._next * SLOT_BYTES
            self._next = (self._next + 1) % NUM_SLOTS
            _HEADER.pack_into(self._memory, begin, 0, len(body))
            start = begin + _HEADER.size
            self._memory[start : start + len(body)] = body
            _HEADER.pack_into(self._memory, begin, time.monotonic_ns(), len(body))


def read_rings(run_directory: Path) -> list[AccountBody]:
    """Return the accounts of all frontends, newest first."""
    rings = (path.read_bytes() for path in (run_directory / FOLDER).glob("*"))
    found = sorted((each for ring in rings for each in _read_slots(ring)), key=lambda each: each[0], reverse=True)
    return [account for _, account in found]


def _read_slots(ring: bytes) -> Iterator[tuple[int, AccountBody]]:
    for begin in range(0, len(ring) - SLOT_BYTES + 1, SLOT_BYTES):
        written, num_bytes = _HEADER.unpack_from(ring, begin)
        if not written:
            continue
        start = begin + _HEADER.size
        try:
            yield written, _decoder.decode(zlib.decompress(ring[start : start + num_bytes]))
        except zlib.error:
            # The slot was overwritten while it was read, so its checksum is wrong.
            continue


def _encode(account: AccountBody) -> bytes:
    return zlib.compress(_encoder.encode(account), zlib.Z_BEST_SPEED)


def _fit(account: AccountBody) -> bytes:
    """Encode an account into a slot's size, if possible. If there are too many pictures, only the first are kept."""
    while len(body := _encode(account)) > ROOM and account.media:
        account = _keep_first(account, len(account.media) * ROOM // len(body))
    return body


def _keep_first(account: AccountBody, num_media: int) -> AccountBody:
    stages = [each for each in account.stages if each.item is None or each.item < num_media]
    return msgspec.structs.replace(account, media=account.media[:num_media], stages=stages)
