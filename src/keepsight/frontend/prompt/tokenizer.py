"""Encodes text and decodes token ids with the checkpoint's own `tokenizer.json` and `tokenizer_config.json`.

The ids are those of transformers' AutoTokenizer, without importing it. Nothing is added to a text unless asked for: the
chat template writes its own `<bos>`; `add_bos` and `add_eos` are for prompts that have no template.
"""

import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from keepsight.end_ids import read_end_ids
from keepsight.errors import CheckpointConfigError, InvalidArgumentError
from keepsight.json_fields import read_optional_json_object
from keepsight.token_bytes import BytesReader, read_token_bytes

logger = logging.getLogger(__name__)

# In characters; encoding so many takes some 10 ms.
_LONG_TEXT = 2**14
# Decoding so many takes some 2 ms.
_MANY_TOKENS = 2**12
# Characters for each token that fits, up to which a text's tokens are not counted; and how many are counted at a time.
MANY_CHARACTERS, PIECE_CHARACTERS = 8, 2**16
# Combining marks, which a normalizer may join to the character before them.
_MARKS = tuple(map(chr, range(0x300, 0x370)))


class AddedTokens(NamedTuple):
    """What the post-processor adds to a text: most often `<bos>`, or nothing. Not only `<bos>` and `<eos>`."""

    before: tuple[int, ...]
    after: tuple[int, ...]


class Tokenizer:
    """A checkpoint's tokenizer. Shared by all requests; immutable once constructed."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str],
        eos_token_ids: frozenset[int],
        around: AddedTokens,
    ) -> None:
        self._backend = backend
        self.special_tokens = dict(special_tokens)  # {"bos_token": "<bos>", ...}: variables of chat templates
        self.eos_token_ids = eos_token_ids
        self.bos_token_id = self.token_id(self.special_tokens.get("bos_token", ""))
        # Ids may be larger: in a pruned vocabulary some ids have no token.
        self.num_tokens: int = backend.get_vocab_size(with_added_tokens=True)
        self._around = around
        self._begun = "".join(filter(None, map(backend.id_to_token, around.before)))
        added = backend.get_added_tokens_decoder()
        self._added = [token.content for token in added.values()]
        special = {token_id: token.content for token_id, token in added.items() if token.special}
        self._special_ids = frozenset(special)
        # The tokens that can give a prompt its structure: those that are special, and others like `<think>`, `[INST]`.
        # Added words and runs of spaces do not.
        self.structure = frozenset((*special.values(), *filter(_is_between_signs, self._added)))
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
        around = _find_added_tokens(directory / "tokenizer.json", backend)
        try:
            return cls(backend, special_tokens, eos_token_ids, around)
        except ValueError as error:  # answers could not be decoded token by token
            raise CheckpointConfigError(directory / "tokenizer.json", f"decoder: {error}") from error

    def encode(
        self, text: str, add_bos: bool = False, field: str = "prompt", *, add_eos: bool = False
    ) -> tuple[int, ...]:
        """Return the token ids of a text. Special tokens written out in it become their ids, as in transformers.

        `add_bos`, `add_eos`: add what the post-processor adds before and after a text. `field` is named in errors.
        """
        try:
            encoding = self._encode_alone(text) if len(text) < _LONG_TEXT else self._encode_beside(text)
        except TypeError as error:  # raised by the tokenizers library for a lone surrogate
            raise InvalidArgumentError(field, "the text cannot be encoded as UTF-8") from error
        return (*self._around.before * add_bos, *encoding.ids, *self._around.after * add_eos)

    def _encode_alone(self, text: str) -> tokenizers.Encoding:
        """Encode on this thread. No other thread of this process runs meanwhile: a second for 2 MB."""
        return self._backend.encode(text, add_special_tokens=False)

    def _encode_beside(self, text: str) -> tokenizers.Encoding:
        """Encode on a thread of the library's. A short text would wait for that longer than it takes to encode."""
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=False)
        return encoding

    def is_far_too_long(self, text: str, max_tokens: int, field: str = "prompt") -> bool:
        """Return whether a text is far too long, without encoding all of it, which takes a hundred times its bytes.

        A cut between two pieces may turn one token into a few, so twice as many have to be found.
        """
        if len(text) <= MANY_CHARACTERS * max_tokens:
            return False
        pieces = (text[begin : begin + PIECE_CHARACTERS] for begin in range(0, len(text), PIECE_CHARACTERS))
        counts = itertools.accumulate(len(self.encode(piece, field=field)) for piece in pieces)
        return any(num_tokens > 2 * max_tokens for num_tokens in counts)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        try:
            if len(token_ids) < _MANY_TOKENS:
                text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
            else:  # on another thread, as in `_encode_beside`
                [text] = self._backend.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError) as error:
            raise InvalidArgumentError("token_ids", f"must be token ids: {error}") from error
        if self._bytes.loses_runs and "\ufffd" in text:
            return "".join(self.decode_each(token_ids, skip_special_tokens))
        return text

    def decode_each(
        self, token_ids: Sequence[int], skip_special_tokens: bool = True, *, continues_text: bool = False
    ) -> list[str]:
        """Return what each token adds to one decode() of all: a character comes with the token that completes it.

        `continues_text`: other text precedes them, so a leading space is theirs.
        """
        hidden = self._special_ids if skip_special_tokens else frozenset[int]()
        spelled = {each: b"" if each in hidden else self.token_bytes(each) for each in set(token_ids)}
        reader = BytesReader()
        texts = [reader.push(spelled[each]) for each in token_ids]
        if texts:
            texts[-1] += reader.finish()
        if self.drops_first_space and not continues_text and any(texts):
            first = next(place for place, text in enumerate(texts) if text)
            texts[first] = texts[first].removeprefix(" ")
        return texts

    def token_id(self, token: str) -> int | None:
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    def token(self, token_id: int) -> str | None:
        """Return the vocabulary's own spelling (`▁the`, `<0xE2>`); None for ids that have no token."""
        try:
            token: str | None = self._backend.id_to_token(token_id)
        except OverflowError:  # out of the range of ids
            return None
        return token

    def token_bytes(self, token_id: int) -> bytes:
        """Return what one token adds to a text, which may be less than a character."""
        return self._bytes.of(token_id)

    @property
    def drops_first_space(self) -> bool:
        """True if decoding drops a space at the beginning of a text; the continuation of a text keeps it."""
        return self._bytes.drops_first_space

    def lacks_bos(self, prompt: str) -> bool:
        """Return whether a text lacks the tokens that begin texts: one rendered with a chat template has its own."""
        bos = self.special_tokens.get("bos_token")
        return not prompt.startswith((self._begun,) if bos is None else (self._begun, bos))

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def is_boundary(self, token: str) -> bool:
        """Return whether the text on either side of `token` is always encoded as if it stood alone.

        True for a plain special token; false if it strips white space, is normalized, or if another added token could
        match first and consume a part of it.
        """
        token_id = self.token_id(token)
        if token_id is None or any(_can_swallow(other, token) for other in self._added if other != token):
            return False
        for left, right in (("a", "a"), ("a \n", "\n a")):
            if self.encode(left + token + right) != (*self.encode(left), token_id, *self.encode(right)):
                return False
        return all(self.encode(token + mark)[:1] == (token_id,) for mark in _MARKS)


def _load_backend(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise CheckpointConfigError(path, "is missing; the checkpoint needs its fast tokenizer")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more precise
        raise CheckpointConfigError(path, f"cannot be read as a tokenizer: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_special_tokens(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return every `*_token` that has a text; `config` overrides `special_tokens_map.json` of older checkpoints."""
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
    """Add the tokens that `config` describes further or differently, as transformers does; named tokens are special.

    New tokens get the next ids.
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
    # Of tokens with the same text, which may differ in their flags alone, the first one counts.
    first = {token.content: token for token in reversed(tokens)}
    backend.add_tokens([token for token in reversed(first.values()) if repr(token) not in as_known])


def _list_extra_tokens(config: dict[str, Any]) -> list[object]:
    """Return special tokens without a name. The second field is the name in older files."""
    listed = (config.get(name) for name in ("extra_special_tokens", "additional_special_tokens"))
    return [token for tokens in listed if isinstance(tokens, list) for token in tokens]


def _get_token_text(value: object) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read_eos_token_ids(
    directory: Path, backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str]
) -> frozenset[int]:
    """Return the end ids of the configuration, or else the tokenizer's `<eos>`."""
    configured, eos_token = read_end_ids(directory), special_tokens.get("eos_token", "")
    eos_token_id = backend.token_to_id(eos_token)
    if configured is None:
        return frozenset() if eos_token_id is None else frozenset({eos_token_id})
    if eos_token_id is not None and eos_token_id not in configured:
        logger.warning(
            "the tokenizer's eos_token %s (%d) does not end answers: the checkpoint's eos_token_id is %s",
            eos_token, eos_token_id, sorted(configured),
        )  # fmt: skip
    return configured


def _find_added_tokens(path: Path, backend: tokenizers.Tokenizer) -> AddedTokens:
    """Return what is added to prompts. As in transformers 5 the post-processor decides; `add_bos_token` of
    tokenizer_config.json is ignored.
    """
    # The vocabulary may lack any letter.
    text = next((each.content for each in backend.get_added_tokens_decoder().values()), "a")
    plain, full = (backend.encode(text, add_special_tokens=each) for each in (False, True))
    is_added = [each is None for each in full.sequence_ids]
    before = tuple(full.ids[: is_added.index(False)] if False in is_added else full.ids)
    after = tuple(full.ids[len(before) + len(plain.ids) :])
    without_text = backend.encode("", add_special_tokens=True).ids
    if [*before, *plain.ids, *after] != full.ids or [*before, *after] != without_text:
        told = f"turns the tokens {plain.ids} into {full.ids}, and none into {without_text}"
        raise CheckpointConfigError(path, f"post_processor: {told}; only tokens before and after a text are supported")
    return AddedTokens(before, after)


def _is_between_signs(token: str) -> bool:
    ends = token[:1] + token[-1:]
    return any(map(str.isalnum, token)) and not any(each.isalnum() or each.isspace() for each in ends)


def _can_swallow(other: str, token: str) -> bool:
    """Return whether matching `other`, leftmost and longest first, can consume characters of a `token` in the text."""
    if token in other:
        return True
    if token[0] not in other[1:]:
        return False
    return any(token.startswith(other[start:]) for start in range(1, len(other)))
