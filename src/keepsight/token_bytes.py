"""The bytes that each token adds to a text, possibly less than a character, and how those of several are decoded.

For two kinds of vocabularies. In the first (SentencePiece's), tokens are texts, and characters without a token are
spelled as tokens of one byte (`<0xE2>`). Some of them (Llama's) add a space before every text, and remove it when
decoding. In the second (GPT-2's, "byte level"), all tokens are bytes.

Either way a text is what its bytes say, and what is no character becomes U+FFFD. The tokenizers library differs from
that with the first kind: one bad byte turns all adjacent byte tokens into U+FFFD. An answer that ends within a
character would lose the characters before it, and a stream could send none before the next text.
"""

import codecs
import json
from abc import ABC, abstractmethod

import tokenizers
from tokenizers import decoders

# The last step of Llama's decoder.
FIRST_SPACE_DROPPED = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class BytesReader:
    """Incremental decoder of a text's bytes: each part that is no character becomes U+FFFD, and the rest stays."""

    def __init__(self) -> None:
        self._decoder = _Utf8Decoder("replace")

    @property
    def is_incomplete(self) -> bool:
        """True if the text of its last bytes is not known yet."""
        return bool(self._decoder.getstate()[0])

    def push(self, data: bytes) -> str:
        """Return the text that is now certain."""
        return self._decoder.decode(data)

    def finish(self) -> str:
        """Return the remaining text."""
        return self._decoder.decode(b"", final=True)


class TokenBytes(ABC):
    """The bytes of one vocabulary's tokens."""

    # Whether decoding removes a leading space from a text.
    drops_first_space = False
    # Whether the library gives up a whole run of byte tokens for one bad byte.
    loses_runs = False

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend

    @abstractmethod
    def of(self, token_id: int) -> bytes:
        """Return the token's bytes; empty if the id has no token."""

    @abstractmethod
    def is_bytes(self, token_id: int) -> bool:
        """Return whether the token stands for bytes, which may be a part of a character, not for a text."""


class _FallbackBytes(TokenBytes):
    loses_runs = True

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        super().__init__(backend)
        decoder = json.loads(backend.decoder.__getstate__())
        steps = [each for each in decoder.get("decoders", [decoder]) if each != FIRST_SPACE_DROPPED]
        # Decodes a token regardless of its position.
        self._decoder = decoders.Sequence([])
        self._decoder.__setstate__(json.dumps({"type": "Sequence", "decoders": steps}).encode())
        # The byte of every token such as `<0xE2>`, by its id.
        spellings = [f"<0x{byte:02{case}}>" for byte in range(256) for case in "Xx"]
        ids = {spelling: backend.token_to_id(spelling) for spelling in spellings}
        self._values = {id_: int(spelling[3:5], 16) for spelling, id_ in ids.items() if id_ is not None}

    def of(self, token_id: int) -> bytes:
        value = self._values.get(token_id)
        if value is not None:
            return bytes([value])
        token = self._backend.id_to_token(token_id)
        text: str = "" if token is None else self._decoder.decode([token])
        return text.encode()

    def is_bytes(self, token_id: int) -> bool:
        return token_id in self._values


class _SpacedBytes(_FallbackBytes):
    drops_first_space = True


def _read_alphabet() -> dict[str, int]:
    """Return GPT-2's alphabet: visible Latin-1 characters spell their own byte, those from U+0100 on the others."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


class _ByteLevelBytes(TokenBytes):
    _ALPHABET = _read_alphabet()

    def of(self, token_id: int) -> bytes:
        spelling: str = self._backend.id_to_token(token_id) or ""
        try:
            return bytes(map(self._ALPHABET.__getitem__, spelling))
        except KeyError:  # an added token, which spells its text
            return spelling.encode()

    def is_bytes(self, token_id: int) -> bool:
        return True


# By the decoder steps that such a vocabulary may have. Those of the first kind decode each token independently of its
# neighbors, except that ByteFallback joins a run of byte tokens.
_KINDS: dict[frozenset[str], type[TokenBytes]] = {
    frozenset({"Replace", "ByteFallback", "Fuse"}): _FallbackBytes,
    frozenset({"Replace", "ByteFallback", "Fuse", "Strip"}): _SpacedBytes,
    frozenset({"ByteLevel"}): _ByteLevelBytes,
}


def read_token_bytes(backend: tokenizers.Tokenizer) -> TokenBytes:
    """Return the token bytes of a tokenizer. Raise ValueError if its decoder is of no known kind."""
    decoder = {} if backend.decoder is None else json.loads(backend.decoder.__getstate__())
    steps = decoder.get("decoders", [decoder])
    names = {each.get("type") for each in steps}
    if "Strip" in names and steps[-1] != FIRST_SPACE_DROPPED:
        raise ValueError(f"a Strip is supported only at the end, as {FIRST_SPACE_DROPPED}")
    for known, kind in _KINDS.items():
        if names <= known:
            return kind(backend)
    supported = " or ".join(", ".join(sorted(known)) for known in _KINDS)
    raise ValueError(f"{sorted(map(str, names))} is not supported, only {supported}")
