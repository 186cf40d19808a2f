"""Text to token ids and back, as the checkpoint's own `tokenizer.json` and `tokenizer_config.json` have it.

The ids are those of transformers' AutoTokenizer, without importing it.  Nothing is ever added to a text unasked: the
chat template writes its own `<bos>`, and `add_bos` is for prompts that have no template.
"""

import itertools
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from keepsight.end_ids import read_end_ids
from keepsight.errors import CheckpointConfigError, InvalidArgumentError
from keepsight.json_fields import read_optional_json_object
from keepsight.made_once import made_once
from keepsight.token_bytes import ByteRun, read_token_bytes

logger = logging.getLogger(__name__)

# Characters, which take some 10 ms.
_LONG_TEXT = 2**14
# Which take some 2 ms.
_MANY_TOKENS = 2**12
# For each token that fits: texts of no more are not worth counting.  And what is counted at a time.
MANY_CHARACTERS, PIECE_CHARACTERS = 8, 2**16
# Which a normalizer may join to the character before them.
_MARKS = tuple(map(chr, range(0x300, 0x370)))


class Tokenizer:
    """Shared by all requests; never changes once constructed."""

    def __init__(
        self, backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str], eos_token_ids: frozenset[int], bos: bool
    ) -> None:
        self._backend = backend
        self.special_tokens = dict(special_tokens)  # {"bos_token": "<bos>", ...}: what chat templates may name
        self.eos_token_ids = eos_token_ids
        self.bos_token_id = self._find_named_id("bos_token")
        # Their ids may be larger: where a vocabulary was pruned, some have no token.
        self.num_tokens: int = backend.get_vocab_size(with_added_tokens=True)
        self._bos_prefix = (self.bos_token_id,) if bos and self.bos_token_id is not None else ()
        added = backend.get_added_tokens_decoder()
        self._added = [token.content for token in added.values()]
        special = {token_id: token.content for token_id, token in added.items() if token.special}
        self._special, self._special_ids = frozenset(special.values()), frozenset(special)
        self._bytes = read_token_bytes(backend)

    @classmethod
    def from_checkpoint(cls, directory: Path | str) -> "Tokenizer":
        directory = Path(directory)
        backend = _load_backend(directory / "tokenizer.json")
        config_path = directory / "tokenizer_config.json"
        config = read_optional_json_object(config_path)
        special_tokens = _read_special_tokens(directory, config)
        for name in ("bos_token", "eos_token"):
            if name in special_tokens and backend.token_to_id(special_tokens[name]) is None:
                raise CheckpointConfigError(config_path, f"{name}: {special_tokens[name]!r} is not in tokenizer.json")
        _add_tokens(config_path, backend, config, special_tokens.values())
        eos_token_ids = _read_eos_token_ids(directory, backend, special_tokens)
        bos = _adds_bos(directory / "tokenizer.json", backend, special_tokens)
        try:
            return cls(backend, special_tokens, eos_token_ids, bos)
        except ValueError as error:  # its answers could not be read token by token
            raise CheckpointConfigError(directory / "tokenizer.json", f"decoder: {error}") from error

    def encode(self, text: str, add_bos: bool = False, field: str = "prompt") -> tuple[int, ...]:
        """Special tokens written out in `text` become their ids, as they do in transformers.

        `field` is named in errors.
        """
        try:
            encoding = self._encode_alone(text) if len(text) < _LONG_TEXT else self._encode_beside(text)
        except TypeError as error:  # what the tokenizers library makes of half a surrogate pair
            raise InvalidArgumentError(field, "the text cannot be encoded as UTF-8") from error
        return (*self._bos_prefix, *encoding.ids) if add_bos else tuple(encoding.ids)

    def _encode_alone(self, text: str) -> tokenizers.Encoding:
        """Nothing else runs in this process meanwhile: a second for 2 MB."""
        return self._backend.encode(text, add_special_tokens=False)

    def _encode_beside(self, text: str) -> tokenizers.Encoding:
        """On a thread of the library's, which a short text would wait for longer than it takes."""
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=False)
        return encoding

    def is_far_too_long(self, text: str, max_tokens: int, field: str = "prompt") -> bool:
        """Found without encoding all of it, which takes a hundred times its bytes.

        Where a piece is cut off, a few tokens stand for one: so twice as many have to be found.
        """
        if len(text) <= MANY_CHARACTERS * max_tokens:
            return False
        pieces = (text[begin : begin + PIECE_CHARACTERS] for begin in range(0, len(text), PIECE_CHARACTERS))
        counts = itertools.accumulate(len(self.encode(piece, field=field)) for piece in pieces)
        return any(num_tokens > 2 * max_tokens for num_tokens in counts)

    def as_plain_text(self, text: str) -> str:
        """Somebody else's, in which what is written as a special token shall be none: a space parts it."""
        return self._special_text.sub(lambda written: f"{written[0][:1]} {written[0][1:]}", text)

    @made_once
    def _special_text(self) -> re.Pattern[str]:
        longest_first = sorted((token for token in self._special if token), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        try:
            if len(token_ids) < _MANY_TOKENS:
                text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
            else:  # as `_encode_beside`
                [text] = self._backend.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError) as error:
            raise InvalidArgumentError("token_ids", f"must be token ids: {error}") from error
        return text

    def decode_each(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> list[str]:
        """What each adds to one decode() of them all: a character comes with the token that completes it."""
        parts = [b"" if skip_special_tokens and self.is_special(each) else self.token_bytes(each) for each in token_ids]
        texts = [""] * len(parts)
        # What adds nothing does not end a run either.
        visible = [place for place, part in enumerate(parts) if part]
        for is_run, group in itertools.groupby(visible, lambda place: self.is_in_run(token_ids[place])):
            places = [*group]
            said = [parts[place] for place in places]
            read = self._bytes.read_run(said) if is_run else [part.decode() for part in said]
            for place, text in zip(places, read, strict=True):
                texts[place] = text
        # A space that is a bad byte's neighbour is none.
        if self.drops_first_space and any(texts):
            first = next(place for place, text in enumerate(texts) if text)
            texts[first] = texts[first].removeprefix(" ")
        return texts

    def token_id(self, token: str) -> int | None:
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    def token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling (`▁the`, `<0xE2>`), None for ids that have no token."""
        try:
            token: str | None = self._backend.id_to_token(token_id)
        except OverflowError:  # as no id is
            return None
        return token

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds to a text, which may be less than a character."""
        return self._bytes.of(token_id)

    @property
    def drops_first_space(self) -> bool:
        """A text that begins with a space begins behind it; what goes on with a text does not."""
        return self._bytes.drops_first_space

    def lacks_bos(self, prompt: str) -> bool:
        """A caller who rendered a chat template has a `<bos>` already."""
        bos = self.special_tokens.get("bos_token")
        return bos is None or not prompt.startswith(bos)

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def is_in_run(self, token_id: int) -> bool:
        return self._bytes.is_in_run(token_id)

    def begin_run(self) -> ByteRun:
        """For tokens that are in one."""
        return self._bytes.begin_run()

    def is_boundary(self, token: str) -> bool:
        """Whether the text on either side of `token` is always encoded as if it stood alone.

        True of a plain special token; untrue where it eats white space, is normalised, or where another added token
        could match first and swallow a part of it.
        """
        token_id = self.token_id(token)
        if token_id is None or any(_can_swallow(other, token) for other in self._added if other != token):
            return False
        for left, right in (("a", "a"), ("a \n", "\n a")):
            if self.encode(left + token + right) != (*self.encode(left), token_id, *self.encode(right)):
                return False
        return all(self.encode(token + mark)[:1] == (token_id,) for mark in _MARKS)

    def _find_named_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.token_id(token)


def _load_backend(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise CheckpointConfigError(path, "is missing; the checkpoint needs its fast tokenizer")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more precise
        raise CheckpointConfigError(path, f"is no tokenizer that can be read: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_special_tokens(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    """Every `*_token` that has a text; nearer files win over `special_tokens_map.json`, which older ones had."""
    extra = config.get("extra_special_tokens")
    layers = (
        read_optional_json_object(directory / "special_tokens_map.json"),
        extra if isinstance(extra, dict) else {},
        config,
    )
    found: dict[str, str] = {}
    for layer in layers:
        texts = {name: _get_token_text(value) for name, value in layer.items() if name.endswith("_token")}
        found.update({name: text for name, text in texts.items() if text})
    return found


def _add_tokens(path: Path, backend: tokenizers.Tokenizer, config: dict[str, Any], named: Iterable[str]) -> None:
    """Those of which `config` says more, or something else, as transformers does: what is named is special.

    What is new has the next id.
    """
    special = dict.fromkeys(filter(None, [*named, *map(_get_token_text, _list_extra_tokens(config))]))
    try:
        described = config.get("added_tokens_decoder") or {}
        tokens = [tokenizers.AddedToken(**described[place]) for place in sorted(described, key=int)]
    except (LookupError, TypeError, ValueError) as error:
        raise CheckpointConfigError(path, f"added_tokens_decoder: cannot be read: {error}") from error
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    as_known = set(map(repr, known.values()))
    tokens += [known.get(text) or tokenizers.AddedToken(text) for text in special]
    for token in tokens:
        token.special = token.special or token.content in special
    # The first of each, which may differ by its flags alone.
    first = {token.content: token for token in reversed(tokens)}
    backend.add_tokens([token for token in reversed(first.values()) if repr(token) not in as_known])


def _list_extra_tokens(config: dict[str, Any]) -> list[object]:
    """Those that have no name; the second is what older files call them."""
    listed = (config.get(name) for name in ("extra_special_tokens", "additional_special_tokens"))
    return [token for tokens in listed if isinstance(tokens, list) for token in tokens]


def _get_token_text(value: object) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read_eos_token_ids(
    directory: Path, backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str]
) -> frozenset[int]:
    """What the configuration says, else the tokenizer's `<eos>`."""
    configured, eos_token = read_end_ids(directory), special_tokens.get("eos_token", "")
    eos_token_id = backend.token_to_id(eos_token)
    if configured is None:
        return frozenset() if eos_token_id is None else frozenset({eos_token_id})
    if eos_token_id is not None and eos_token_id not in configured:
        logger.warning(
            "the tokenizer's eos_token %s (%d) ends no answer: the checkpoint's eos_token_id says %s",
            eos_token, eos_token_id, sorted(configured),
        )  # fmt: skip
    return configured


def _adds_bos(path: Path, backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str]) -> bool:
    """As transformers 5: the post-processor decides; `add_bos_token` of tokenizer_config.json is not looked at."""
    added = backend.encode("", add_special_tokens=True).ids
    bos_token_id = backend.token_to_id(special_tokens.get("bos_token", ""))
    if added not in ([], [bos_token_id]):
        raise CheckpointConfigError(path, f"post_processor: adds the tokens {added}; only bos_token is supported")
    return added != []


def _can_swallow(other: str, token: str) -> bool:
    """Whether matching `other`, leftmost and longest first, can take characters away from a `token` in the text."""
    if token in other:
        return True
    if token[0] not in other[1:]:
        return False
    return any(token.startswith(other[start:]) for start in range(1, len(other)))
