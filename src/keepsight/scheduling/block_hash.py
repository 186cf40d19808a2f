"""Names blocks of tokens by everything that their keys and values depend on.

A block's hash covers its parent's hash (and so everything before it), its token ids, which media lie in it *and where*,
the times of a film's moments, the adapter and the tenant's salt. Adapter and salt enter the first block only: the
chain of hashes carries them on. Knows nothing of which blocks are held. Invariants: the hashed bytes can be decoded
in only one way, so equal hashes mean equal keys and values; and blocks with the same parent have equal keys and values
as far as their contents are equal.
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from typing import NamedTuple, Self

from blake3 import blake3

from keepsight.media import MediaItem
from keepsight.requests import EngineRequest

ExtraKey = tuple[str | int, ...]
BYTES_PER_TOKEN = 4
# Extra keys are encoded before the first token that depends on them: this mark, which is no token id, and their digest.
MARK = b"\xff" * BYTES_PER_TOKEN
MARK_WORD = 2 ** (8 * BYTES_PER_TOKEN) - 1
WORDS_OF_A_MARK = 1 + 32 // BYTES_PER_TOKEN


class BlockName(NamedTuple):
    block_hash: bytes
    # The hash of the block before it; for a first block, a constant.
    parent: bytes
    # Its tokens, with marks before the tokens from which on extra keys apply.
    content: bytes
    # The hashes of the media in it.
    media: tuple[str, ...] = ()


def count_common(content: bytes, other: bytes) -> int:
    """Return how many leading tokens, with the same dependencies, the two contents have in common."""
    limit = min(len(content), len(other))
    difference = int.from_bytes(content[:limit], "little") ^ int.from_bytes(other[:limit], "little")
    # All bits below the lowest set one are equal.
    num_bytes = ((difference & -difference).bit_length() - 1) // 8 if difference else limit
    num_words = num_bytes // BYTES_PER_TOKEN
    if MARK not in content[:num_bytes]:
        return num_words
    return sum(end <= num_words for end in _ends_of_tokens(memoryview(content).cast("I")))


def _ends_of_tokens(words: Sequence[int]) -> Iterator[int]:
    index = 0
    while index < len(words):
        if words[index] == MARK_WORD:
            index += WORDS_OF_A_MARK
        else:
            index += 1
            yield index


def extra_keys_by_block(request: EngineRequest, block_size: int) -> dict[int, list[ExtraKey]]:
    """Return, in one pass over the media, what each block depends on apart from its own and earlier tokens.

    Blocks without such keys are left out.
    """
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
    """Return the key of an item that lies `offset` tokens from the block's start.

    An embedded prompt's strips follow each other from its beginning, so their names alone say where they lie.
    """
    if not item.is_picture:
        return ("prompt_embeds", item.media_hash)
    # A moment at another time is the same to the tower but different to the decoder.
    later = () if item.rotary_offset is None else (item.rotary_offset,)
    return ("mm", item.media_hash, offset, *later)


def _media_by_block(extra_keys: Mapping[int, Iterable[ExtraKey]]) -> dict[int, tuple[str, ...]]:
    kinds = ("mm", "prompt_embeds")
    return {block: tuple(str(key[1]) for key in keys if key[0] in kinds) for block, keys in extra_keys.items()}


def _first_place(key: ExtraKey) -> int:
    """Return the index in the block of the first token that depends on the key, such as a picture's first token."""
    return max(0, int(key[2])) if key[0] == "mm" else 0


def _marks(keys: Iterable[ExtraKey]) -> list[tuple[int, bytes]]:
    """Return (index of the token that it precedes, mark) pairs for one block's keys."""
    by_place: dict[int, bytes] = {}
    for key in keys:
        place = _first_place(key)
        by_place[place] = by_place.get(place, b"") + _encode(key)
    return [(place, MARK + blake3(encoded).digest()) for place, encoded in sorted(by_place.items())]


def _encode(key: ExtraKey) -> bytes:
    """Encode a key, length-framed and tagged by kind: no two keys, and no two sequences of keys, encode alike."""
    return b"(%d:%b" % (len(key), b"".join(_encode_part(part) for part in key))


def _encode_part(part: str | int) -> bytes:
    if isinstance(part, int):
        return b"i%d:" % part
    # A salt comes from JSON, which can contain a lone surrogate.
    encoded = part.encode("utf-8", "surrogatepass")
    return b"s%d:%b" % (len(encoded), encoded)


class BlockHasher:
    """The hashes of one sequence's full blocks; builds the name of any block on demand."""

    def __init__(self, request: EngineRequest, block_size: int) -> None:
        self.hashes: list[bytes] = []
        extra_keys = extra_keys_by_block(request, block_size)
        self._marks = {block: _marks(keys) for block, keys in extra_keys.items()}
        self._media = _media_by_block(extra_keys)
        self._block_size = block_size
        self._root = blake3(b"keepsight block of %d tokens" % block_size).digest()
        self.tokens = array("I")
        assert self.tokens.itemsize == BYTES_PER_TOKEN
        self.extend(request.token_ids)
        # The hash of the whole prompt, including the tokens behind the last full block.
        self.prompt_end = self._hash_end()

    def fork(self) -> Self:
        """Return an independent copy for another sequence with the same prompt, which is not hashed again."""
        fork = copy(self)
        fork.hashes, fork.tokens = self.hashes[:], self.tokens[:]
        return fork

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append new tokens and hash the blocks that they fill."""
        self.tokens.extend(token_ids)
        if len(self.tokens) >= (len(self.hashes) + 1) * self._block_size:
            self._hash_full_blocks()

    def name_of(self, block: int, num_tokens: int | None = None) -> BlockName:
        """Return the name of a block, as far as its tokens are known, or of its first `num_tokens` alone."""
        start = block * self._block_size
        tokens = self.tokens[start : start + (self._block_size if num_tokens is None else num_tokens)]
        parent, content = self._parent_of(block), self._content(block, tokens.tobytes())
        if len(tokens) == self._block_size:
            return BlockName(self.hashes[block], parent, content, self._media.get(block, ()))
        # The media of a partial block are left out: full blocks before it name them.
        return BlockName(blake3(parent + content).digest(), parent, content)

    def _parent_of(self, block: int) -> bytes:
        return self.hashes[block - 1] if block else self._root

    def _hash_end(self) -> bytes:
        block = len(self.hashes)
        tokens = self.tokens[block * self._block_size :]
        name = self._parent_of(block), self._content(block, tokens.tobytes())
        return blake3(b"keepsight end, %d tokens:%b%b" % (len(tokens), *name)).digest()

    def _hash_full_blocks(self) -> None:
        first = len(self.hashes)
        tokens = self.tokens[first * self._block_size :].tobytes()
        bytes_per_block = self._block_size * BYTES_PER_TOKEN
        parent = self._parent_of(first)
        for start in range(0, len(tokens) - bytes_per_block + 1, bytes_per_block):
            content = self._content(len(self.hashes), tokens[start : start + bytes_per_block])
            # The parent's digest has a fixed length, so what follows it is the content.
            parent = blake3(parent + content).digest()
            self.hashes.append(parent)

    def _content(self, block: int, tokens: bytes) -> bytes:
        marks = self._marks.get(block)
        if marks is None:
            return tokens
        parts, end = list[bytes](), 0
        for place, mark in marks:
            start, end = end, place * BYTES_PER_TOKEN
            if end and end >= len(tokens):
                return b"".join((*parts, tokens[start:]))
            parts += tokens[start:end], mark
        return b"".join((*parts, tokens[end:]))
