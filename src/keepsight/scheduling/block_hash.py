"""Names blocks of tokens by everything that their keys and values depend on.

A block's hash covers its parent's hash (and with it all that comes before), its token ids, which media lie in it *and
where*, the adapter and the tenant's salt.  Adapter and salt enter the first block only: the chain carries them on.
Knows nothing of which blocks are held.  Its invariant: what is hashed can be read back in one way only, so equal hashes
mean equal keys and values.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from typing import Self

from blake3 import blake3

from keepsight.media import MediaItem
from keepsight.requests import EngineRequest

ExtraKey = tuple[str | int, ...]
BYTES_PER_TOKEN = 4


def extra_keys(request: EngineRequest, block_start: int, block_size: int) -> tuple[ExtraKey, ...]:
    """What the block that starts at `block_start` depends on beside its tokens and those before it."""
    assert block_start % block_size == 0, (block_start, block_size)
    return tuple(_extra_keys_by_block(request, block_size).get(block_start // block_size, ()))


def _extra_keys_by_block(request: EngineRequest, block_size: int) -> dict[int, list[ExtraKey]]:
    """Those of all blocks that have any, in one pass over the media."""
    keys: dict[int, list[ExtraKey]] = {}
    if request.adapter is not None:
        keys[0] = [("lora", request.adapter.name, request.adapter.digest)]
    for item in request.media:
        start, last = item.span.start, item.span.end - 1
        for block in range(start // block_size, last // block_size + 1):
            keys.setdefault(block, []).append(_media_key(item, start - block * block_size))
    if request.cache_salt is not None:
        keys.setdefault(0, []).append(("cache_salt", request.cache_salt))
    return keys


def _media_key(item: MediaItem, offset: int) -> ExtraKey:
    """The strips of an embedded prompt follow each other from its beginning: their names alone say where they lie."""
    return ("mm", item.media_hash, offset) if item.is_picture else ("prompt_embeds", item.media_hash)


def _media_by_block(extra_keys: Mapping[int, Iterable[ExtraKey]]) -> dict[int, tuple[str, ...]]:
    kinds = ("mm", "prompt_embeds")
    media = {block: tuple(str(key[1]) for key in keys if key[0] in kinds) for block, keys in extra_keys.items()}
    return {block: media_hashes for block, media_hashes in media.items() if media_hashes}


def _encode(key: ExtraKey) -> bytes:
    """Length-framed, and tagged by kind: no two keys, and no two rows of keys, encode alike."""
    return b"(%d:%b" % (len(key), b"".join(_encode_part(part) for part in key))


def _encode_part(part: str | int) -> bytes:
    if isinstance(part, int):
        return b"i%d:" % part
    # A salt comes from JSON, which can spell half of a surrogate pair.
    encoded = part.encode("utf-8", "surrogatepass")
    return b"s%d:%b" % (len(encoded), encoded)


class BlockHasher:
    """The hashes of one sequence's full blocks, and the tokens that do not fill one yet."""

    def __init__(self, request: EngineRequest, block_size: int) -> None:
        self.hashes: list[bytes] = []
        extra_keys = _extra_keys_by_block(request, block_size)
        self._extra = {block: b"".join(map(_encode, keys)) for block, keys in extra_keys.items()}
        # Media hashes by block, where there are any.
        self.media = _media_by_block(extra_keys)
        self._block_size = block_size
        self._parent = blake3(b"keepsight block of %d tokens" % block_size).digest()
        self._tail = array("I")
        assert self._tail.itemsize == BYTES_PER_TOKEN
        self.extend(request.token_ids)
        # Of the whole prompt, the tokens that fill no block included.
        self.prompt_end = self._hash_end()

    def fork(self) -> Self:
        """For another sequence that begins alike: what is hashed is not hashed again, and each goes on by itself."""
        fork = copy(self)
        fork.hashes, fork._tail = self.hashes[:], self._tail[:]
        return fork

    def extend(self, token_ids: Sequence[int]) -> None:
        """Appends tokens that are known from now on."""
        self._tail.extend(token_ids)
        if len(self._tail) >= self._block_size:
            self._hash_full_blocks()

    def _hash_end(self) -> bytes:
        extra = self._extra.get(len(self.hashes), b"")
        return blake3(
            b"keepsight end, %d tokens:%b%b%b" % (len(self._tail), self._parent, self._tail.tobytes(), extra)
        ).digest()

    def _hash_full_blocks(self) -> None:
        num_blocks = len(self._tail) // self._block_size
        tokens = self._tail[: num_blocks * self._block_size].tobytes()
        del self._tail[: num_blocks * self._block_size]
        bytes_per_block = self._block_size * BYTES_PER_TOKEN
        extra = self._extra
        for start in range(0, len(tokens), bytes_per_block):
            # Digest and tokens have a fixed length, so what follows them is the extra keys.
            data = self._parent + tokens[start : start + bytes_per_block] + extra.get(len(self.hashes), b"")
            self._parent = blake3(data).digest()
            self.hashes.append(self._parent)
