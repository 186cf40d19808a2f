"""A test double of the runner, without a model, and the answers that it must give.

Its "model" is a hash: a page's content at a position depends on every position before it and on the token or picture
there, and the next token depends on all pages read. So a single wrong, stale or missing page changes the answer. The
state after a position is the page's content there, so a wrong, stale or missing state is noticed at once.
"""

import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from keepsight.media import MediaItem, TokenSpan
from keepsight.requests import EngineRequest, Pixels, TokenLogprob, TokenLogprobs
from keepsight.scheduling.step_plan import (
    Computed,
    EncodeTime,
    Encoding,
    EndName,
    Fault,
    KeptStretch,
    NewSequence,
    PageCopy,
    PageFill,
    Recall,
    SampledToken,
    SequenceId,
    Slice,
    StateCopy,
    StepPlan,
    StepResult,
)
from keepsight.structured_outputs import StructuredOutputsParams
from keepsight.tiers.tier import StoredArray

VOCAB_SIZE = 50
LENGTH_OF_ROUND = 5
# The time that encoding one item is reported to have taken.
ENCODE_SECONDS = 0.01
BAD_REQUEST = Fault("a bad request")


def pixels_like(media_hash: str) -> Pixels:
    """Return pixels that are unique to this hash."""
    content = np.frombuffer(media_hash.encode().ljust(48, b"\0")[:48], np.uint8)
    return content.reshape(4, 4, 3)


def expected_answer(request: EngineRequest, choice: int, end_ids: frozenset[int], max_model_len: int) -> list[int]:
    """Return the tokens of one choice, computed from scratch, without any cache."""
    params = request.sampling_params
    ends = params.ids_that_end(end_ids)
    longest = len(request.token_ids) + (params.max_tokens or max_model_len)
    token_ids, held = list(request.token_ids), list[int]()
    while True:
        token_ids.append(_next_token(_hold(request, token_ids, held), request, choice))
        if token_ids[-1] in ends or len(token_ids) >= min(longest, max_model_len):
            return token_ids[len(request.token_ids) :]


def expected_logprobs(request: EngineRequest) -> list[TokenLogprobs]:
    """Return the logprobs of the request's prompt, computed from scratch."""
    return _prompt_logprobs(request, _hold(request, request.token_ids, []))


def expected_vector(request: EngineRequest) -> bytes:
    """Return the vector of the request's prompt, computed from scratch."""
    return _vector(_hold(request, request.token_ids, []))


def _hold(request: EngineRequest, token_ids: Sequence[int], held: list[int]) -> list[int]:
    """Extend `held`, the page contents of the first tokens, to all tokens."""
    for position in range(len(held), len(token_ids)):
        held.append(hash((*held, _content_at(request, token_ids, position, _encode))))
    return held


def _vector(held: Sequence[int]) -> bytes:
    return struct.pack("<q", held[-1])


def _is_in_item(end: int, request: EngineRequest) -> bool:
    return any(item.span.is_cut_by(end) for item in request.media)


def _prompt_logprobs(request: EngineRequest, held: Sequence[int]) -> list[TokenLogprobs]:
    """Return made-up logprobs of the prompt's tokens, each derived from the page contents before it."""
    next_ids = request.token_ids[1 : len(held) + 1]
    return [(TokenLogprob(token_id, -float(value % 997), 1),) for token_id, value in zip(next_ids, held, strict=False)]


def _content_at(
    request: EngineRequest, token_ids: Sequence[int], position: int, embeddings_of: Callable[[MediaItem], int]
) -> int:
    for item in request.media:
        if position in item.span:
            return hash((embeddings_of(item), position - item.span.start))
    adapter = 0 if request.adapter is None else _text(request.adapter.name + request.adapter.digest)
    return hash((token_ids[position], adapter))


def _encode(item: MediaItem) -> int:
    return _embeddings(pixels_like(item.media_hash))


def _embeddings(pixels: Pixels) -> int:
    return int.from_bytes(pixels.tobytes(), "little")


def _text(text: str) -> int:
    return int.from_bytes(text.encode(), "little")


def _next_token(held: Sequence[int], request: EngineRequest, choice: int) -> int:
    """Return the next token. Most follow a fixed cycle, as a hash alone would never repeat a sequence of tokens."""
    value = hash((*held, request.sampling_params.seed or 0, choice))
    return value % VOCAB_SIZE if value % 4 == 0 else len(held) % LENGTH_OF_ROUND


@dataclass(slots=True)
class _Sequence:
    request: EngineRequest
    choice: int
    encoder_keys: dict[TokenSpan, str]
    token_ids: list[int]
    block_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


def array_like(pixels: Pixels) -> StoredArray:
    """Return the embeddings of `pixels` as tiers keep them."""
    return StoredArray("uint8", (pixels.size // 8, 8), memoryview(pixels.tobytes()), ENCODE_SECONDS)


class FakeRunner:
    """`is_done()` is called in each step for the next piece of work beside: True ends it. None: all end at once."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        is_done: Callable[[], bool] | None = None,
        keep: Callable[[Encoding, float, Callable[[], StoredArray]], object] = lambda *_: None,
        clock: Callable[[], float] = time.monotonic,
        keep_stretch: Callable[[KeptStretch, Callable[[], StoredArray]], object] = lambda *_: None,
        *,
        cuts_items: bool = False,
        sees_items_whole: bool = False,
        num_state_slots: int = 0,
    ) -> None:
        self._cuts_items, self._sees_items_whole = cuts_items, sees_items_whole
        self._block_size, self._clock, self._keep_stretch = block_size, clock, keep_stretch
        self._slots: list[int | None] = [None] * (num_blocks * block_size)
        # The state in each slot; None: nothing was written to it yet.
        self._states: list[int | None] = [None] * num_state_slots
        self._is_done = is_done or (lambda: True)
        self._sequences: dict[SequenceId, _Sequence] = {}
        self._pixels: dict[str, Pixels] = {}
        self._loaded: dict[str, int] = {}
        self._stretches: dict[bytes, StoredArray] = {}
        # Page contents from which an answer's first token is drawn, by name.
        self.ends: dict[EndName, list[int]] = {}
        self._newly_kept: list[EndName] = []
        self._keep = keep
        self._beside: deque[list[Slice] | Encoding] = deque()
        # From the last plan and the one before. Work whose turn comes in between goes by the older one: it is left out
        # even if it is wanted again.
        self._unwanted = self._unwanted_before = frozenset[str]()
        self.embeddings: dict[str, int] = {}
        self.plans: list[StepPlan] = []
        # Media hashes in the order of encoding: the work that was really done.
        self.encoded: list[str] = []
        self.num_computed_tokens = 0
        # By grammar, compilations that were asked for.
        self.grammars: dict[str, Future[Any]] = {}
        # Simulated failures: media whose encoding fails, and requests on which the model fails.
        self.bad_media: set[str] = set()
        self.bad_requests: set[str] = set()

    def hold_pixels(self, media_hash: str, pixels: Pixels) -> None:
        self._pixels[media_hash] = pixels

    def hold_embeddings(self, encoder_key: str, array: StoredArray) -> None:
        self._loaded[encoder_key] = int.from_bytes(array.payload, "little")

    def hold_stretch(self, stretch: bytes, array: StoredArray) -> None:
        self._stretches[stretch] = array

    def compile(self, form: StructuredOutputsParams) -> Future[Any]:
        """A test ends a grammar's compilation; the answer is not constrained."""
        return self.grammars.setdefault(form.to_grammar(), Future())

    @property
    def num_held_pixels(self) -> int:
        return len(self._pixels)

    @property
    def num_loaded(self) -> int:
        return len(self._loaded)

    @property
    def is_busy(self) -> bool:
        return bool(self._beside)

    @property
    def num_sequences(self) -> int:
        return len(self._sequences)

    def set_pace(self, is_done: Callable[[], bool]) -> None:
        self._is_done = is_done

    def prepare(self) -> bool:
        return False

    def close(self) -> None:
        pass

    def run(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        self._forget(plan)
        for kept in plan.keep:
            self._keep_stretch(kept, partial(self._read, kept))
        self._fill(plan.fill)
        self._unwanted_before, self._unwanted = self._unwanted, frozenset(plan.unwanted)
        for new in plan.new:
            self._begin(new)
        self._copy_states(plan.copy_states)
        self._beside.extend(plan.encode)
        if plan.beside:
            self._beside.append(list(plan.beside))
        for piece in (*plan.beside, *plan.now):
            table = self._sequences[piece.sequence_id].block_ids
            table[piece.first_block :] = piece.new_block_ids
        self._copy(plan.copy)
        recalled = self._recall(plan.recall)
        work: list[list[Slice] | Encoding] = [list(plan.now)]
        while self._beside and self._is_done():
            work.append(self._beside.popleft())
        result = self._carry_out(work)
        failed = {each.sequence_id: BAD_REQUEST for each in plan.recall if each.sequence_id not in recalled}
        return replace(
            result,
            encoded=[*self._place(plan.place), *result.encoded],
            failed_sequences={**failed, **result.failed_sequences},
            recalled=recalled,
        )

    def _read(self, kept: KeptStretch) -> StoredArray:
        size = self._block_size
        values = [value for each in kept.block_ids for value in self._slots[each * size : (each + 1) * size]]
        payload = struct.pack(f"{len(values)}q", *values)
        return StoredArray("int64", (len(kept.block_ids), size), memoryview(payload))

    def _fill(self, fills: Iterable[PageFill]) -> None:
        size = self._block_size
        for block_id, stretch, place in fills:
            values = self._stretches[stretch].payload.cast("q")[place * size : (place + 1) * size]
            self._slots[block_id * size : (block_id + 1) * size] = values.tolist()
        self._stretches.clear()

    def _copy(self, copies: Iterable[PageCopy]) -> None:
        size = self._block_size
        for source, target in copies:
            self._slots[target * size : (target + 1) * size] = self._slots[source * size : (source + 1) * size]

    def _copy_states(self, copies: Iterable[StateCopy]) -> None:
        slices = [piece for work in self._beside if isinstance(work, list) for piece in work]
        under_way = {
            slot for piece in slices for slot in (piece.state_slot, *(each.slot for each in piece.kept_states))
        }
        for source, target in copies:
            assert not under_way & {source, target}, "a state was copied while a slice computes it"
            self._states[target] = self._states[source]

    def _recall(self, recalls: Iterable[Recall]) -> dict[SequenceId, SampledToken]:
        good = [each for each in recalls if each.sequence_id[0] not in self.bad_requests]
        return {each.sequence_id: self._sample(each.sequence_id, self.ends[each.kept_as]) for each in good}

    def _place(self, keys: Iterable[str]) -> list[str]:
        for key in keys:
            assert key not in self.embeddings, "placed where something is"
            self.embeddings[key] = self._loaded.pop(key)
        return list(keys)

    def _forget(self, plan: StepPlan) -> None:
        for sequence_id in plan.ended:
            del self._sequences[sequence_id]
        for key in plan.evicted:
            del self.embeddings[key]
        for name in plan.evicted_ends:
            del self.ends[name]
        for media_hash in plan.unneeded_pixels:
            del self._pixels[media_hash]
        for key in plan.unneeded_embeddings:
            del self._loaded[key]

    def _begin(self, new: NewSequence) -> None:
        request = new.request
        assert new.sequence_id not in self._sequences
        spans = [item.span for item in request.media]
        keys = dict(zip(spans, new.encoder_keys, strict=True))
        self._sequences[new.sequence_id] = _Sequence(request, new.choice, keys, list(request.token_ids))

    def _carry_out(self, work: Iterable[list[Slice] | Encoding]) -> StepResult:
        computed, failed_sequences = list[Computed](), dict[SequenceId, Fault]()
        self._newly_kept.clear()
        encoded, failed_encodings, left_out = list[str](), dict[str, str](), list[str]()
        for each in work:
            if isinstance(each, list):
                self._carry_out_slices(each, computed, failed_sequences)
            elif each.encoder_key in self._unwanted_before:
                left_out.append(each.encoder_key)
            elif self._try_encode(each):
                encoded.append(each.encoder_key)
            else:
                failed_encodings[each.encoder_key] = "a bad picture"
        now = self._clock()
        times = dict.fromkeys(encoded, EncodeTime(now - ENCODE_SECONDS, now))
        return StepResult(
            computed,
            encoded,
            failed_encodings,
            failed_sequences,
            times,
            kept_ends=list(self._newly_kept),
            left_out=left_out,
        )

    def _try_encode(self, encoding: Encoding) -> bool:
        assert encoding.encoder_key not in self.embeddings, "encoded twice"
        pixels = self._pixels[encoding.media_hash]
        if encoding.media_hash in self.bad_media:
            return False
        self.encoded.append(encoding.media_hash)
        self.embeddings[encoding.encoder_key] = _embeddings(pixels)
        self._keep(encoding, ENCODE_SECONDS, lambda: array_like(pixels))
        return True

    def _carry_out_slices(
        self, slices: Sequence[Slice], computed: list[Computed], failed: dict[SequenceId, Fault]
    ) -> None:
        drawn = dict[SequenceId, list[SampledToken]]()
        for piece in slices:
            if piece.sequence_id[0] in self.bad_requests:
                failed[piece.sequence_id] = BAD_REQUEST
            elif piece.guess is not None:
                self._follow(piece, piece.guess, drawn[piece.sequence_id])
            else:
                drawn[piece.sequence_id] = self._compute(piece)
                computed.append(Computed(piece.sequence_id, piece.end, drawn[piece.sequence_id]))

    def _follow(self, piece: Slice, guess: int, drawn: list[SampledToken]) -> None:
        """Write a guess to its page, right or wrong; sample from it if it is right."""
        sequence = self._sequences[piece.sequence_id]
        values = self._write(piece, sequence, [*[0] * piece.start, guess])
        if sequence.token_ids[piece.start :] == [guess]:
            drawn.append(self._sample(piece.sequence_id, values))

    def _compute(self, piece: Slice) -> list[SampledToken]:
        sequence = self._sequences[piece.sequence_id]
        request = sequence.request
        assert self._cuts_items or not _is_in_item(piece.end, request), "a picture was cut"
        values = self._write(piece, sequence, sequence.token_ids)
        if piece.wants_prompt_logprobs:
            del sequence.prompt_logprobs[piece.start :]
            sequence.prompt_logprobs += _prompt_logprobs(request, values)[piece.start :]
        assert piece.samples == (piece.end == len(sequence.token_ids))
        if not piece.samples:
            assert piece.keep_as is None, "an end before the prompt's"
            return []
        if piece.keep_as is not None:
            self.ends[piece.keep_as] = values
            self._newly_kept.append(piece.keep_as)
        token = self._sample(piece.sequence_id, values)
        if piece.wants_prompt_logprobs:
            token = token._replace(prompt_logprobs=tuple(sequence.prompt_logprobs))
        if request.wants_vector:
            token = token._replace(vector=_vector(values))
        return [token]

    def _write(self, piece: Slice, sequence: _Sequence, token_ids: Sequence[int]) -> list[int]:
        """Compute the slice, write it to its pages, and return the page contents up to its end."""
        self.num_computed_tokens += piece.length
        held = [self._slots[self._slot(sequence, position)] for position in range(piece.start)]
        assert None not in held, "read before it was written"
        values = [value for value in held if value is not None]
        for position in range(piece.start, piece.end):
            content = _content_at(
                sequence.request,
                token_ids,
                position,
                lambda item: self.embeddings[sequence.encoder_keys[item.span]],
            )
            values.append(hash((*values, content)))
            self._slots[self._slot(sequence, position)] = values[-1]
        if piece.state_slot is not None:
            assert not piece.start or self._states[piece.state_slot] == held[-1], "begins with a wrong state"
            self._states[piece.state_slot] = values[-1]
            for end, slot in piece.kept_states:
                assert piece.start < end <= piece.end
                is_of_more = self._sees_items_whole and _is_in_item(end, sequence.request)
                assert not is_of_more, "a state of what is behind it, too"
                self._states[slot] = values[end - 1]
        return values

    def _sample(self, sequence_id: SequenceId, values: Sequence[int]) -> SampledToken:
        sequence = self._sequences[sequence_id]
        sequence.token_ids.append(_next_token(values, sequence.request, sequence.choice))
        return SampledToken(sequence.token_ids[-1])

    def _slot(self, sequence: _Sequence, position: int) -> int:
        return sequence.block_ids[position // self._block_size] * self._block_size + position % self._block_size
