"""The bytes that each token adds to a text, possibly less than a character, and how those of several are decoded.

For two kinds of vocabularies. In the first (SentencePiece's), tokens are texts, and characters without a token are
spelled as tokens of one byte (`<0xE2>`); adjacent byte tokens are decoded together. Some of them (Llama's) add a space
before every text, and remove it when decoding. In the second (GPT-2's, "byte level"), all tokens are bytes, and all are
decoded together.
"""

import codecs
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence

import tokenizers
from tokenizers import decoders

# The last step of Llama's decoder.
FIRST_SPACE_DROPPED = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class ByteRun:
    """Incremental decoder of adjacent tokens' bytes: each invalid part becomes U+FFFD, and the rest stays."""

    # Whether an invalid byte would change the text of earlier ones.
    can_be_invalid = False

    def __init__(self) -> None:
        self._decoder = _Utf8Decoder("strict" if self.can_be_invalid else "replace")
        self.is_invalid = False

    @property
    def is_incomplete(self) -> bool:
        """True if the text of its last bytes is not known yet."""
        return bool(self._decoder.getstate()[0])

    def push(self, data: bytes) -> str:
        """Return the characters that `data` completes."""
        return self._decoder.decode(data)

    def finish(self) -> str:
        """Return the remaining text; if the run is invalid, the text of the whole run."""
        return self._decoder.decode(b"", final=True)


class _FallbackRun(ByteRun):
    """A run of byte tokens: a single invalid byte turns every byte into U+FFFD."""

    can_be_invalid = True

    def __init__(self) -> None:
        super().__init__()
        self._num_bytes = 0

    @property
    def is_incomplete(self) -> bool:
        return True

    def push(self, data: bytes) -> str:
        self._num_bytes += len(data)
        try:
            return "" if self.is_invalid else super().push(data)
        except UnicodeDecodeError:
            self.is_invalid = True
            return ""

    def finish(self) -> str:
        self.is_invalid = self.is_invalid or super().is_incomplete
        return "\ufffd" * self._num_bytes if self.is_invalid else ""


class TokenBytes(ABC):
    """The bytes of one vocabulary's tokens."""

    # Whether decoding removes a leading space from a text.
    drops_first_space = False

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend

    @abstractmethod
    def of(self, token_id: int) -> bytes:
        """Return the token's bytes; empty if the id has no token."""

    @abstractmethod
    def is_in_run(self, token_id: int) -> bool:
        """Return whether the token is decoded together with adjacent tokens of which this is also true."""

    @abstractmethod
    def begin_run(self) -> ByteRun: ...

    def read_run(self, parts: Sequence[bytes]) -> list[str]:
        """Return the text that each token of a run adds, given the tokens' bytes."""
        run = self.begin_run()
        texts = [run.push(part) for part in parts]
        rest = run.finish()
        if run.is_invalid:  # each part is one byte, and each byte a character
            return [*rest]
        return [*texts[:-1], texts[-1] + rest]


class _FallbackBytes(TokenBytes):
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

    def is_in_run(self, token_id: int) -> bool:
        return token_id in self._values

    def begin_run(self) -> ByteRun:
        return _FallbackRun()


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

    def is_in_run(self, token_id: int) -> bool:
        return True

    def begin_run(self) -> ByteRun:
        return ByteRun()


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
