"""Turns a rendered text and the layout of each picture, film or sound into token ids, and a span for each media part.

The ids are those of the reference's processor. Special tokens split a text before the tokenizer's model runs, so the
text between two of them is encoded alone, together with the newlines that expansion adds to it, and cached: when a
conversation comes back one turn longer, only that turn is encoded. Never looks at a picture.
"""

import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from keepsight.borrowed import read_marker
from keepsight.errors import CheckpointConfigError, PictureCountError, PictureError, ReservedTokenError
from keepsight.frontend.prompt.tokenizer import Tokenizer
from keepsight.json_fields import JsonFields, get_optional_int, read_json_object, read_optional_json_object
from keepsight.lru_cache import LruCache
from keepsight.media import SEVERAL, Geometry, Kind, PictureLayout, TokenSpan

DEFAULT_TOKENS_PER_IMAGE = 256  # transformers' default, for checkpoints that give no number
TEXT_CACHE_MAX_BYTES = 32 * 2**20
# Sizes laid out first for a borrowed model: small, wide and tall, so that its processor shows which tokens it writes.
SIZES_LAID_OUT_AT_FIRST = (Geometry(60, 40), Geometry(1200, 300), Geometry(300, 1200), Geometry(1000, 1000))
# Lays out a picture of some size; the text is the caller's name for it.
LayOut = Callable[[Geometry, str], PictureLayout]
# (cache salt, text). The cache is per salt: a cached text is encoded so much faster that other tenants could tell.
_Text = tuple[str | None, str]
_Encoded = tuple[_Text, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class WrittenForm:
    """How a checkpoint writes a picture, a moment of a film, or a sound: its soft tokens and what surrounds them."""

    # The text that stands for all of it, or for a whole film, in an unexpanded prompt.
    marker: str
    soft_token_id: int
    opening: tuple[int, ...] = ()
    closing: tuple[int, ...] = ()
    # The text added on either side.
    margin: str = ""


@dataclass(frozen=True, slots=True)
class MediaPromptFormat:
    """How a checkpoint writes each kind of media that it takes."""

    forms: Mapping[Kind, WrittenForm]
    # Tokens that no text may contain, by id.
    reserved: Mapping[int, str]
    # The number of tokens of every picture; 0: it depends on the picture's size.
    tokens_per_image: int = 0

    @classmethod
    def from_checkpoint(
        cls, directory: Path | str, tokenizer: Tokenizer, lay_out: LayOut | None = None, *, is_borrowed: bool = False
    ) -> "MediaPromptFormat | None":
        """Return the checkpoint's format; None if it has no tower and so reads text only.

        `lay_out` lays out the pictures of a borrowed model; None if that takes none.
        """
        path = Path(directory) / "config.json"
        config = read_json_object(path)
        if is_borrowed:
            return None if lay_out is None else _read_format_of_borrowed(path, config, tokenizer, lay_out)
        if config.get("vision_config") is not None:
            follows = "spatial_merge_size" in JsonFields(path, config).section("vision_config")
            return (_read_format_of_qwen if follows else _read_format_of_gemma)(path, config, tokenizer)
        return None if config.get("audio_config") is None else _read_format_of_sounds(path, config, tokenizer)

    @property
    def markers(self) -> list[str]:
        return [form.marker for form in self.forms.values()]

    def kind_of(self, marker: str) -> Kind:
        return next(kind for kind, form in self.forms.items() if form.marker == marker)


def _read_format_of_gemma(path: Path, config: dict[str, Any], tokenizer: Tokenizer) -> MediaPromptFormat:
    start, soft, end = tokens = [
        _find_token(path, config, tokenizer, name, f"{name}_token_index", f"{name}_token_id")
        for name in ("boi", "image", "eoi")
    ]
    form = WrittenForm(start[1], soft[0], (start[0],), (end[0],), "\n\n")
    return MediaPromptFormat({"image": form}, dict(tokens), _find_tokens_per_image(path, config))


def _read_format_of_qwen(path: Path, config: dict[str, Any], tokenizer: Tokenizer) -> MediaPromptFormat:
    """Return Qwen's format. The template writes the opening and closing of a picture or a film; where the time of a
    moment is told as text, each moment also has an opening and a closing of its own.
    """
    image, video = (_find_token(path, config, tokenizer, name, f"{name}_token_id") for name in ("image", "video"))
    forms: dict[Kind, WrittenForm] = {"image": WrittenForm(image[1], image[0])}
    around = ("vision_start", "vision_end")
    if all(f"{name}_token_id" in config for name in around):
        start, end = (_find_token(path, config, tokenizer, name, f"{name}_token_id") for name in around)
        forms["video"] = WrittenForm(video[1], video[0], (start[0],), (end[0],))
    return MediaPromptFormat(forms, dict((image, video)))


def _read_format_of_borrowed(
    path: Path, config: dict[str, Any], tokenizer: Tokenizer, lay_out: LayOut
) -> MediaPromptFormat:
    """Return a borrowed model's format. Its processor writes a picture's tokens; a few sizes show which it uses."""
    token_id, token = _find_token(path, config, tokenizer, "image", "image_token_id", "image_token_index")
    reserved = {token_id: token}
    for size in SIZES_LAID_OUT_AT_FIRST:
        try:
            token_ids = lay_out(size, "picture").token_ids
        except PictureError as error:
            raise CheckpointConfigError(path.parent, f"its processor takes no pictures: {error.message}") from error
        if token_id not in token_ids:
            raise CheckpointConfigError(path, f"image_token_id: {token} is not what the processor writes for a picture")
        names = {each: tokenizer.token(each) for each in token_ids}
        if None in names.values():
            lacking = sorted(each for each, name in names.items() if name is None)
            message = f"the processor writes the tokens {lacking} for a picture, which are missing here"
            raise CheckpointConfigError(path.parent / "tokenizer.json", message)
        reserved |= {each: name for each, name in names.items() if name is not None and tokenizer.is_special(each)}
    return MediaPromptFormat({"image": WrittenForm(read_marker(path.parent) or token, token_id)}, reserved)


def _read_format_of_sounds(path: Path, config: dict[str, Any], tokenizer: Tokenizer) -> MediaPromptFormat:
    """Return the format of a model that takes sounds. The template writes a sound's opening and closing."""
    token_id, token = _find_token(path, config, tokenizer, "audio", "audio_token_index", "audio_token_id")
    return MediaPromptFormat({"audio": WrittenForm(token, token_id)}, {token_id: token})


@dataclass(frozen=True, slots=True)
class ExpandedPrompt:
    token_ids: tuple[int, ...]
    # The soft tokens of each picture followed by those of its crops, of each moment of a film, and of each sound.
    spans: tuple[TokenSpan, ...]


class PromptExpander:
    """Shared by all requests; `media_format` is None for a model that reads text only."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        media_format: MediaPromptFormat | None,
        text_cache_max_bytes: int = TEXT_CACHE_MAX_BYTES,
    ) -> None:
        self._tokenizer = tokenizer
        self._format = media_format or MediaPromptFormat({}, {})
        self._markers = re.compile(f"({'|'.join(map(re.escape, self._format.markers))})")
        # Each value repeats its key, so that its bytes are counted too.
        self._cache = LruCache[_Text, _Encoded](text_cache_max_bytes, _count_bytes)
        self._cache_lock = threading.Lock()  # LLM may be called from several threads
        self._boundary_ids = self._find_boundaries()
        # No boundary is a substring of another, so their order in the pattern does not matter.
        boundaries = "|".join(map(re.escape, self._boundary_ids))
        self._boundary = re.compile(f"({boundaries})") if boundaries else None
        self._bos_prefix, self._eos_suffix = tokenizer.encode("", add_bos=True), tokenizer.encode("", add_eos=True)

    def expand(
        self,
        text: str,
        layouts: Sequence[PictureLayout] = (),
        add_bos: bool = False,
        field: str = "messages",
        cache_salt: str | None = None,
        *,
        add_eos: bool = False,
    ) -> ExpandedPrompt:
        """Expand a text. `layouts` has one for each picture, film and sound; `field` is named in errors."""
        first, *pieces = self._write_out_pictures(self._split_at_markers(text, layouts, field), layouts)
        token_ids = list(self._bos_prefix) if add_bos else []
        token_ids.extend(self._encode(first, field, cache_salt))
        spans: list[TokenSpan] = []
        parts = [layout for layout in layouts for _ in range(layout.num_parts)]
        for layout, piece in zip(parts, pieces, strict=True):
            spans.append(self._append_part(token_ids, layout))
            token_ids.extend(self._encode(piece, field, cache_salt))
        token_ids.extend(self._eos_suffix if add_eos else ())
        return ExpandedPrompt(tuple(token_ids), tuple(spans))

    def find_kinds(self, text: str) -> list[Kind]:
        """Return the kind of media that each marker in a text stands for."""
        if not self._format.forms:
            return []
        return list(map(self._format.kind_of, self._markers.findall(text)))

    def count_tokens_of(
        self,
        beginning: str,
        expanded: ExpandedPrompt,
        layouts: Sequence[PictureLayout],
        cache_salt: str | None = None,
        *,
        add_bos: bool = False,
    ) -> int:
        """Return how many of a prompt's first tokens it shares with its text's `beginning`, whose end may differ."""
        num_pictures = len(self.find_kinds(beginning))
        own = self.expand(beginning, layouts[:num_pictures], add_bos, cache_salt=cache_salt).token_ids
        shared = takewhile(lambda pair: pair[0] == pair[1], zip(own, expanded.token_ids, strict=False))
        return sum(1 for _ in shared)

    def _split_at_markers(self, text: str, layouts: Sequence[PictureLayout], field: str) -> list[str]:
        if not self._format.forms:
            if layouts:
                raise PictureCountError(field, f"holds {len(layouts)} pictures, but this model reads text only")
            return [text]
        around = self._markers.split(text)  # every second element is a marker
        marked, sent = list(map(self._format.kind_of, around[1::2])), [layout.kind for layout in layouts]
        for kind, form in self._format.forms.items():
            if (num_markers := marked.count(kind)) != (num_sent := sent.count(kind)):
                message = f"the prompt has {num_markers} {form.marker} markers for {num_sent} {SEVERAL[kind]}"
                raise PictureCountError(field, message)
        if marked != sent:
            kinds = " and ".join(SEVERAL[kind] for kind in self._format.forms)
            raise PictureCountError(field, f"the prompt has its {kinds} in another order than they were sent in")
        return around[::2]

    def _write_out_pictures(self, around: Sequence[str], layouts: Sequence[PictureLayout]) -> list[str]:
        """Return the texts between media parts, with every marker replaced as the reference's processor does it.

        Gemma's processor writes `\\n\\n<image>\\n\\n` for a picture, and a sentence around that where there are crops.
        """
        pieces = [around[0]]
        for layout, after in zip(layouts, around[1:], strict=True):
            margin = self._form_of(layout).margin
            before, *between = _write_moments(layout) or _write_around_crops(layout.num_crops, margin)
            pieces[-1] += before
            pieces += [*between, margin + after]
        return pieces

    def _append_part(self, token_ids: list[int], layout: PictureLayout) -> TokenSpan:
        form = self._form_of(layout)
        opening, closing = ((), ()) if layout.places else (form.opening, form.closing)
        token_ids.extend(opening)
        span = TokenSpan(len(token_ids), layout.tokens_per_part)
        token_ids.extend(layout.token_ids or [form.soft_token_id] * span.length)
        token_ids.extend(closing)
        return span

    def _form_of(self, layout: PictureLayout) -> WrittenForm:
        return self._format.forms[layout.kind]

    def _encode(self, text: str, field: str, cache_salt: str | None) -> Iterator[int]:
        pieces = [text] if self._boundary is None else self._boundary.split(text)
        for index, piece in enumerate(pieces):
            if index % 2:  # re.split() puts what it split at into every second place
                yield self._boundary_ids[piece]
            elif piece:
                yield from self._encode_piece((cache_salt, piece), field)

    def _encode_piece(self, piece: _Text, field: str) -> tuple[int, ...]:
        with self._cache_lock:
            known = self._cache.get_and_update(piece)
        if known is not None:
            return known[1]
        token_ids = self._tokenizer.encode(piece[1], field=field)
        self._check_holds_none_reserved(token_ids, field)
        with self._cache_lock:
            self._cache.put_if_fits(piece, (piece, token_ids))
        return token_ids

    def _check_holds_none_reserved(self, token_ids: tuple[int, ...], field: str) -> None:
        """Raise an error if a text spells out reserved tokens: they would forge a picture or a sound."""
        reserved = self._format.reserved
        for token_id in token_ids:
            if token_id in reserved:
                raise ReservedTokenError(field, f"the text must not contain {reserved[token_id]}")

    def _find_boundaries(self) -> dict[str, int]:
        """Return the tokens at which a text may be split without changing its ids: those between turns."""
        tokenizer = self._tokenizer
        candidates = [tokenizer.bos_token_id, *sorted(tokenizer.eos_token_ids)]
        tokens = [tokenizer.token(token_id) for token_id in candidates if token_id is not None]
        boundaries = {token: tokenizer.token_id(token) for token in tokens if token and tokenizer.is_boundary(token)}
        return {token: token_id for token, token_id in boundaries.items() if token_id is not None}


def _write_around_crops(num_crops: int, margin: str) -> list[str]:
    """Return the text before the whole picture, and before each of its crops."""
    if not num_crops:
        return [margin]
    first = "\n\n and here are some crops to help you see better \n\n"
    return [f"Here is the original image {margin}", first, *["\n\n \n\n"] * (num_crops - 1)]


def _write_moments(layout: PictureLayout) -> list[str]:
    """Return the text before each moment."""
    return [f"<{seconds:.1f} seconds>" for seconds in layout.times] or [""] * len(layout.places)


def _find_token(path: Path, config: dict[str, Any], tokenizer: Tokenizer, name: str, *fields: str) -> tuple[int, str]:
    """Return the id and text of `<name>_token`, from the tokenizer's files or from one of config.json's fields; where
    both give it, they must agree."""
    named = tokenizer.special_tokens.get(f"{name}_token")
    named_id = None if named is None else tokenizer.token_id(named)
    config_id = get_optional_int(path, config, *fields)
    token_id = named_id if config_id is None else config_id
    token = None if token_id is None else tokenizer.token(token_id)
    if token_id is None or token is None:
        raise CheckpointConfigError(path, f"{fields[0]}: names no token, nor does {name}_token of the tokenizer")
    if named_id is not None and named_id != token_id:
        raise CheckpointConfigError(path, f"{fields[0]}: is {token_id}, but {named} of the tokenizer is {named_id}")
    if not tokenizer.is_boundary(token):
        raise CheckpointConfigError(path, f"{fields[0]}: {token} is not a plain special token of the tokenizer")
    return token_id, token


def _find_tokens_per_image(path: Path, config: dict[str, Any]) -> int:
    processor_path = path.parent / "processor_config.json"
    written = get_optional_int(processor_path, read_optional_json_object(processor_path), "image_seq_length")
    computed = get_optional_int(path, config, "mm_tokens_per_image")
    if computed is None:
        computed = DEFAULT_TOKENS_PER_IMAGE
    if written not in (None, computed):
        message = f"mm_tokens_per_image: is {computed}, but image_seq_length of {processor_path.name} is {written}"
        raise CheckpointConfigError(path, message)
    if computed == 0:
        raise CheckpointConfigError(path, "mm_tokens_per_image: must be at least 1, not 0")
    return computed


def _count_bytes(encoded: _Encoded) -> int:
    """Return an entry's size, with the integers themselves (28 bytes each) and about 250 bytes for the cache's own."""
    text, token_ids = encoded
    return sum(map(sys.getsizeof, text)) + sys.getsizeof(token_ids) + 28 * len(token_ids) + 250
