"""Names blocks of tokens by everything that their keys and values depend on.

A block's hash covers its parent's hash (and with it all that comes before), its token ids, which media lie in it *and
where*, when the moments of a film are, the adapter and the tenant's salt.  Adapter and salt enter the first block only:
the chain carries them on.  Knows nothing of which blocks are held.  Its invariants: what is hashed can be read back in
one way only, so equal hashes mean equal keys and values; and as far as blocks with the same parent have equal contents,
theirs are equal, too.
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
# Before the token from which on extra keys count stand this, which is no token's id, and their digest.
MARK = b"\xff" * BYTES_PER_TOKEN
MARK_WORD = 2 ** (8 * BYTES_PER_TOKEN) - 1
WORDS_OF_A_MARK = 1 + 32 // BYTES_PER_TOKEN


class BlockName(NamedTuple):
    block_hash: bytes
    # The hash of the block before it; of the first one something that is the same for all.
    parent: bytes
    # Its tokens, each behind what else it depends on and those before it do not.
    content: bytes
    # The hashes of the media in it.
    media: tuple[str, ...] = ()


def count_common(content: bytes, other: bytes) -> int:
    """With how many tokens that depend on the same both begin."""
    limit = min(len(content), len(other))
    difference = int.from_bytes(content[:limit], "little") ^ int.from_bytes(other[:limit], "little")
    # All bits before the lowest that is set are equal.
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
    """What blocks depend on beside their tokens and those before them: of those that do, in one pass over the media."""
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
    if not item.is_picture:
        return ("prompt_embeds", item.media_hash)
    # The same moment at another time is the same to the tower, and another to the decoder.
    later = () if item.places_later is None else (item.places_later,)
    return ("mm", item.media_hash, offset, *later)


def _media_by_block(extra_keys: Mapping[int, Iterable[ExtraKey]]) -> dict[int, tuple[str, ...]]:
    kinds = ("mm", "prompt_embeds")
    return {block: tuple(str(key[1]) for key in keys if key[0] in kinds) for block, keys in extra_keys.items()}


def _first_place(key: ExtraKey) -> int:
    """Of its block's tokens, the first that depends on it: of a picture that begins there, its own first."""
    return max(0, int(key[2])) if key[0] == "mm" else 0


def _marks(keys: Iterable[ExtraKey]) -> list[tuple[int, bytes]]:
    """What stands for one block's keys, and before which of its tokens."""
    by_place: dict[int, bytes] = {}
    for key in keys:
        place = _first_place(key)
        by_place[place] = by_place.get(place, b"") + _encode(key)
    return [(place, MARK + blake3(encoded).digest()) for place, encoded in sorted(by_place.items())]


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
    """The hashes of one sequence's full blocks, and the name of any block when it is asked for."""

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
        # Of the whole prompt, the tokens that fill no block included.
        self.prompt_end = self._hash_end()

    def fork(self) -> Self:
        """For another sequence that begins alike: what is hashed is not hashed again, and each goes on by itself."""
        fork = copy(self)
        fork.hashes, fork.tokens = self.hashes[:], self.tokens[:]
        return fork

    def extend(self, token_ids: Sequence[int]) -> None:
        """Appends tokens that are known from now on."""
        self.tokens.extend(token_ids)
        if len(self.tokens) >= (len(self.hashes) + 1) * self._block_size:
            self._hash_full_blocks()

    def name_of(self, block: int, num_tokens: int | None = None) -> BlockName:
        """Of a block, as far as it is known, or of its first tokens alone."""
        start = block * self._block_size
        tokens = self.tokens[start : start + (self._block_size if num_tokens is None else num_tokens)]
        parent, content = self._parent_of(block), self._content(block, tokens.tobytes())
        if len(tokens) == self._block_size:
            return BlockName(self.hashes[block], parent, content, self._media.get(block, ()))
        # Its media are told of with the full blocks before it.
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
