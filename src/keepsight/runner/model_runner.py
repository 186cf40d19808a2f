"""Executes the plan of a step: encode, gather, merge, decode, sample. Makes no scheduling decisions.

A plan's `now` is computed before `run` returns; its `encode` and `beside` are started on another thread and reported by
the run that finds them finished. An error fails the sequences or media that were computed together, never the runner,
unless the device is lost.
"""

import dataclasses
import itertools
import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch import Tensor

from keepsight.engine_config import KvCacheConfig
from keepsight.models.model import Model, count_parameters
from keepsight.models.paged_attention import PagedAttention
from keepsight.requests import Pixels
from keepsight.runner.compute_prompt_logprobs import compute_prompt_logprobs
from keepsight.runner.draw_tokens import take_rows
from keepsight.runner.encode_media import Normalizer, encode_media, group_encodings, keep_embeddings
from keepsight.runner.encoder_output_store import EncoderOutputStore
from keepsight.runner.guide_tokens import GuideMaker
from keepsight.runner.held_adapters import HeldAdapters, find_weights
from keepsight.runner.kv_block_store import KvBlockStore
from keepsight.runner.merge_embeddings import merge_embeddings
from keepsight.runner.record_steps import record_steps
from keepsight.runner.run_beside import BesideThread
from keepsight.runner.sample_tokens import sample_tokens
from keepsight.runner.sequence_table import RunningSequence, SequenceTable
from keepsight.runner.share_device import share_device
from keepsight.runner.step_inputs import StepInputs, make_step_inputs
from keepsight.runner.stored_tensors import from_stored, to_stored
from keepsight.scheduling.step_plan import (
    Computed,
    EncodeTime,
    Encoding,
    EndName,
    Fault,
    KeptStretch,
    NewSequence,
    PageFill,
    Recall,
    SampledToken,
    SequenceId,
    Slice,
    StepPlan,
    StepResult,
)
from keepsight.structured_outputs import StructuredOutputsParams
from keepsight.tiers.tier import StoredArray

logger = logging.getLogger(__name__)
Job = Generator[None, None, StepResult]
# Offers embeddings to the tiers: the encoding, its share of the seconds taken, and a function that fetches them.
Keep = Callable[[Encoding, float, Callable[[], StoredArray]], object]
# The same for consecutive pages. They must be fetched during the call, as they are written to again afterwards.
KeepStretch = Callable[[KeptStretch, Callable[[], StoredArray]], object]


class ModelRunner:
    def __init__(
        self,
        model: Model,
        normalizer: Normalizer | None,
        pages: KvCacheConfig,
        # Called on any thread, when something that ran beside can be reported by the next run.
        on_finished: Callable[[], None],
        encoder_share: float = 0.5,
        *,
        # Tokens that no answer may end with before its `min_tokens`.
        end_ids: frozenset[int] = frozenset(),
        embeddings_device: torch.device | None = None,
        # None if no answer is kept to a grammar.
        guides: GuideMaker | None = None,
        # Called on the thread of `run`, when an encoding is started.
        keeping: Callable[[], Keep] | None = None,
        keep_stretch: KeepStretch | None = None,
        # The most tokens of a step of single tokens and guesses, up to which steps are recorded; 0: none are.
        max_recorded: int = 0,
        # The same for steps with longer slices.
        max_recorded_prompt: int = 0,
        # None if requests may not name adapters.
        adapters: HeldAdapters | None = None,
    ) -> None:
        device = model.place.device
        self.model, self.normalizer, self._adapters = model, normalizer, adapters
        self.blocks = KvBlockStore(model.shape, pages.num_blocks, pages.block_size, model.place, pages.num_state_slots)
        self._recorded = record_steps(model, self.blocks, max_recorded, max_recorded_prompt)
        self.embeddings = EncoderOutputStore(embeddings_device or device)
        self._guides = guides or GuideMaker(None, end_ids)
        self.sequences = SequenceTable(pages.block_size, end_ids, device, self._guides, model.shape, adapters)
        self._pixels: dict[str, Pixels] = {}
        self._loaded: dict[str, StoredArray] = {}
        self._stretches: dict[bytes, StoredArray] = {}
        # Encoder keys of encodings not to be started, from the last plan.
        self._unwanted: frozenset[str] = frozenset()
        # Logits after the last token of prompts, by name.
        self._ends: dict[EndName, Tensor] = {}
        self._keeping, self._keep_stretch = keeping, keep_stretch
        self._share = share_device(device, encoder_share, count_parameters(model))
        # PagedAttention caches the plan of the current batch, so each thread has its own.
        self._attention, self._attention_beside = PagedAttention(), PagedAttention()
        self._beside: BesideThread[StepResult] = BesideThread(
            self._share.beside, self._share.before_part, self._share.finish_part, self._share.before_rest, on_finished
        )
        # The loading thread may be another than the one that calls `run`.
        self._share.before_rest()

    def hold_pixels(self, media_hash: str, pixels: Pixels) -> None:
        self._pixels[media_hash] = pixels

    def hold_embeddings(self, encoder_key: str, array: StoredArray) -> None:
        """Hold loaded embeddings apart from those in use, until a plan places them."""
        self._loaded[encoder_key] = array

    def hold_stretch(self, stretch: bytes, array: StoredArray) -> None:
        """Hold a loaded stretch until the next plan, which fills pages from it."""
        self._stretches[stretch] = array

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        if not plan.now:
            self._share.end_foreground()
            self._share.before_rest()
        self._forget(plan)
        self._keep_stretches(plan.keep)
        self._fill(plan.fill)
        self._unwanted = frozenset(plan.unwanted)
        self.blocks.note_used(block_id for each in (*plan.now, *plan.beside) for block_id in each.new_block_ids)
        self._remember(plan.new)
        placed = self._place(plan.place)
        for encodings in group_encodings(plan.encode, self._pixels, self.model):
            pixels = [self._pixels.get(each.media_hash) for each in encodings]
            size = sum(each.shape[0] * each.shape[1] for each in pixels if each is not None)
            self._beside.begin(self._encode(encodings, pixels, self._keeping() if self._keeping else None), size=size)
        self._copy(plan)
        results = [placed, self._recall(plan.recall), self._begin_beside(plan.beside), self._compute_now(plan.now)]
        return _merge((*results, *self._beside.take_finished()))

    def compile(self, form: StructuredOutputsParams) -> "Future[Any]":
        return self._guides.compile(form)

    def prepare(self) -> bool:
        """Do a moment's work ahead of later runs, while there is nothing to run. Return False if none is left."""
        return not self._beside.has_work and self.blocks.prepare()

    def close(self) -> None:
        self._beside.close()
        self._guides.close()

    def _forget(self, plan: StepPlan) -> None:
        self.sequences.forget(plan.ended)
        for key in plan.evicted:
            self.embeddings.drop(key)
        for name in plan.evicted_ends:
            del self._ends[name]
        for media_hash in plan.unneeded_pixels:
            self._pixels.pop(media_hash, None)
        for key in plan.unneeded_embeddings:
            self._loaded.pop(key, None)

    def _keep_stretches(self, stretches: Sequence[KeptStretch]) -> None:
        if not stretches or self._keep_stretch is None:
            return
        with self._share.handing_over():
            for kept in stretches:
                self._keep_stretch(kept, partial(self._read_pages, kept.block_ids))

    def _read_pages(self, block_ids: Sequence[int]) -> StoredArray:
        return to_stored(self.blocks.read(block_ids), 0)

    def _fill(self, fills: Sequence[PageFill]) -> None:
        if not self._stretches:
            return
        self.blocks.note_used(fill.block_id for fill in fills)
        with self._share.handing_over():
            for stretch, its in itertools.groupby(fills, key=lambda fill: fill.stretch):
                block_ids, places = zip(*((fill.block_id, fill.place) for fill in its), strict=True)
                self.blocks.fill(block_ids, from_stored(self._stretches[stretch]), places)
        self._stretches.clear()

    def _remember(self, sequences: Sequence[NewSequence]) -> None:
        if not sequences:
            return
        # Their block tables are on the device, in memory that is written to and freed in stream order.
        with self._share.handing_over():
            for new in sequences:
                self.sequences.remember(new)

    def _copy(self, plan: StepPlan) -> None:
        if not (plan.copy or plan.copy_states):
            return
        with self._share.handing_over():
            self.blocks.copy(plan.copy)
            self.blocks.states.copy(plan.copy_states)

    def _place(self, keys: Sequence[str]) -> StepResult:
        if not keys:
            return StepResult()
        placed, failed = [], {}
        # Keeps the arrays alive until the device has read them, for which `handing_over` waits at its end.
        held = []
        with self._share.handing_over():
            for key in keys:
                try:
                    held.append(self._loaded.pop(key))
                    self.embeddings.adopt(key, from_stored(held[-1]))
                    placed.append(key)
                except Exception as error:
                    logger.exception("embeddings could not be placed")
                    failed[key] = _message_unless_lost(error)
        return StepResult(encoded=placed, failed_encodings=failed)

    def _encode(self, encodings: Sequence[Encoding], pixels: Sequence[Pixels | None], keep: Keep | None) -> Job:
        if self._unwanted.issuperset(each.encoder_key for each in encodings):
            return StepResult(left_out=[each.encoder_key for each in encodings])
        began = time.monotonic()
        try:
            held = [each for each in pixels if each is not None]
            assert len(held) == len(pixels), f"no pixels of {encodings[0].media_hash}"
            adapter = find_weights(self._adapters, encodings[0].adapter)
            embeddings = yield from encode_media(self.model, self.normalizer, held, encodings[0].modality, adapter)
            result = keep_embeddings(encodings, embeddings, self.embeddings)
            self._share.finish_part()
        except Exception as error:
            logger.exception("encoding failed")
            # Some of the batch may be held already; the scheduler would never ask to drop them.
            for each in encodings:
                self.embeddings.drop(each.encoder_key)
            return StepResult(failed_encodings={each.encoder_key: _message_unless_lost(error) for each in encodings})
        took = EncodeTime(began, time.monotonic(), len(encodings))
        if keep is not None:
            # Runs after this result is reported, and before the next encoding.
            done = [each for each in encodings if each.encoder_key in result.encoded]
            kept = {each: self.embeddings.get(each.encoder_key) for each in done}
            self._beside.begin(_keep_all(kept, took.seconds, keep), is_light=True)
        return dataclasses.replace(result, encode_times=dict.fromkeys(result.encoded, took))

    def _recall(self, recalls: Sequence[Recall]) -> StepResult:
        if not recalls:
            return StepResult()
        sequences = {each.sequence_id: self.sequences[each.sequence_id] for each in recalls}
        try:
            with self._share.handing_over():
                drawn = _draw(torch.stack([self._ends[each.kept_as] for each in recalls]), sequences)
        except Exception as error:
            return _failure(sequences, error)
        failed = _faults(sequences)
        return StepResult(
            recalled={each: token for each, token in drawn.items() if each not in failed},
            failed_sequences=failed,
        )

    def _begin_beside(self, slices: Sequence[Slice]) -> StepResult:
        """Start slices that run beside: inputs are laid out here, in plan order; only the computing runs beside."""
        if not slices:
            return StepResult()
        try:
            with self._share.handing_over():
                inputs = self._make_inputs(slices, self._lay_out(slices))
        except Exception as error:
            return _failure(_ids_of(slices), error)
        self._beside.begin(self._compute_beside(inputs), is_urgent=True)
        return StepResult()

    def _compute_beside(self, inputs: StepInputs) -> Job:
        yield from ()
        try:
            result = self._compute(inputs, self._attention_beside, self._share.before_part)
        except Exception as error:
            result = _failure(_ids_of(inputs.slices), error)
        # Launched kernels may still read the inputs, whose memory is freed on the stream where others are laid out.
        self._share.finish_part()
        return result

    def _compute_now(self, slices: Sequence[Slice]) -> StepResult:
        if not slices:
            return StepResult()
        try:
            num_tokens = sum(piece.length for piece in slices)
            with self._share.foreground(num_tokens, beside_works=self._beside.has_heavy_work):
                sequences = self._lay_out(slices)
                recorded = self._recorded.of_tokens
                if recorded is not None and recorded.has_room_for(slices, sequences):
                    return self._read(recorded.compute(slices, sequences), slices, sequences)
                return self._compute(self._make_inputs(slices, sequences), self._attention)
        except Exception as error:
            return _failure(_ids_of(slices), error)

    def _lay_out(self, slices: Sequence[Slice]) -> list[RunningSequence]:
        begun = [piece.state_slot for piece in slices if piece.start == 0 and piece.state_slot is not None]
        self.blocks.states.clear(begun)
        return self.sequences.lay_out(slices)

    def _make_inputs(self, slices: Sequence[Slice], sequences: Sequence[RunningSequence]) -> StepInputs:
        return make_step_inputs(slices, sequences, self.embeddings, self.model.place.device)

    def _compute(
        self, inputs: StepInputs, attention: PagedAttention, between_layers: Callable[[], None] | None = None
    ) -> StepResult:
        model = self.model
        embeddings = model.embed_tokens(inputs.token_ids)
        deep = merge_embeddings(embeddings, inputs.media)
        graphs = None if between_layers or inputs.wants_prompt_logprobs else self._recorded.of_prompts
        if graphs is not None and (step := graphs.find(inputs.batch)):
            return self._read(step.compute(embeddings, inputs.batch, deep), inputs.slices, inputs.sequences)
        watch = None if between_layers is None else lambda *_: between_layers()
        caches, states = self.blocks.layers, self.blocks.states.of_layers
        hidden = model.compute(embeddings, attention, caches, inputs.batch, watch, deep, states)
        if inputs.wants_prompt_logprobs:
            hidden = self._read_prompts(hidden, inputs, between_layers or (lambda: None))
        return self._read(hidden, inputs.slices, inputs.sequences)

    def _read(self, hidden: Tensor, slices: Sequence[Slice], sequences: Sequence[RunningSequence]) -> StepResult:
        """Turn the hidden states of the slices that sample into the step's result."""
        drawn = self._sample(hidden, slices, sequences)
        failed = _faults(dict(zip(_ids_of(slices), sequences, strict=True)))
        done = [piece for piece in slices if piece.guess is None and piece.sequence_id not in failed]
        return StepResult(
            [Computed(piece.sequence_id, piece.end, drawn.get(piece.sequence_id, ())) for piece in done],
            failed_sequences=failed,
            kept_ends=[piece.keep_as for piece in slices if piece.keep_as is not None],
        )

    def _read_prompts(self, hidden: Tensor, inputs: StepInputs, between_parts: Callable[[], None]) -> Tensor:
        """Read prompts' log-probabilities from all hidden states. Return those at the ends of slices that sample."""
        ends = []
        parts = torch.split(hidden, [piece.length for piece in inputs.slices])
        for piece, sequence, part in zip(inputs.slices, inputs.sequences, parts, strict=True):
            if piece.wants_prompt_logprobs:
                compute_prompt_logprobs(part, sequence, piece.start, self.model.logits, between_parts)
            if piece.samples:
                ends.append(part[-1])
        return torch.stack(ends) if ends else hidden[:0]

    def _sample(
        self, hidden: Tensor, slices: Sequence[Slice], sequences: Sequence[RunningSequence]
    ) -> dict[SequenceId, list[SampledToken]]:
        """Draw one token for each slice that samples, except for void guesses."""
        pairs = zip(slices, sequences, strict=True)
        sampling = {piece: sequence for piece, sequence in pairs if piece.samples}
        if not sampling:
            return {}
        logits = self.model.logits(hidden)
        drawn = _draw_in_turn(logits, sampling)
        for row, (piece, sequence) in enumerate(sampling.items()):
            if piece.wants_prompt_logprobs:
                prompt_logprobs, sequence.prompt_logprobs = tuple(sequence.prompt_logprobs), []
                drawn[piece.sequence_id][0] = drawn[piece.sequence_id][0]._replace(prompt_logprobs=prompt_logprobs)
            if sequence.request.wants_vector:
                vector = hidden[row].float().cpu().numpy().tobytes()
                drawn[piece.sequence_id][0] = drawn[piece.sequence_id][0]._replace(vector=vector)
        # Keep all or none: for a batch that fails, kept ends are not reported.
        kept = {piece.keep_as: logits[row].clone() for row, piece in enumerate(sampling) if piece.keep_as is not None}
        self._ends |= kept
        return drawn


def _keep_all(held: Mapping[Encoding, Tensor], seconds: float, keep: Keep) -> Job:
    yield from ()
    for encoding, embeddings in held.items():
        try:
            keep(encoding, seconds, partial(to_stored, embeddings, seconds))
        except Exception:
            logger.exception("embeddings could not be kept")
    return StepResult()


def _draw_in_turn(logits: Tensor, sampling: Mapping[Slice, RunningSequence]) -> dict[SequenceId, list[SampledToken]]:
    """Draw from each row of logits; from a guess's row only once the tokens up to it are drawn as guessed."""
    sequences = {piece.sequence_id: sequence for piece, sequence in sampling.items()}
    if len(sequences) == len(sampling):  # without guesses, as in steps of many streams
        return {each: [token] for each, token in _draw(logits, sequences).items()}
    waiting = defaultdict[SequenceId, deque[tuple[int, int | None]]](deque)
    for row, piece in enumerate(sampling):
        waiting[piece.sequence_id].append((row, piece.guess))
    drawn = {each: list[SampledToken]() for each in waiting}
    turn = list(waiting)
    while turn:
        rows = [waiting[each].popleft()[0] for each in turn]
        for each, token in _draw(take_rows(logits, rows), {each: sequences[each] for each in turn}).items():
            drawn[each].append(token)
        turn = [each for each in turn if waiting[each] and waiting[each][0][1] == drawn[each][-1].token_id]
    return drawn


def _draw(logits: Tensor, sequences: Mapping[SequenceId, RunningSequence]) -> dict[SequenceId, SampledToken]:
    """Draw a token from each row of logits and append it to its sequence."""
    tokens = sample_tokens(logits, [each.sampling for each in sequences.values()])
    for sequence, token in zip(sequences.values(), tokens, strict=True):
        sequence.token_ids.append(token.token_id)
    return dict(zip(sequences, tokens, strict=True))


def _faults(sequences: Mapping[SequenceId, RunningSequence]) -> dict[SequenceId, Fault]:
    return {each: fault for each, sequence in sequences.items() if (fault := sequence.sampling.fault)}


def _ids_of(slices: Sequence[Slice]) -> list[SequenceId]:
    return [piece.sequence_id for piece in slices]


def _failure(sequence_ids: Iterable[SequenceId], error: Exception) -> StepResult:
    logger.error("a batch failed", exc_info=error)
    return StepResult(failed_sequences=dict.fromkeys(sequence_ids, Fault(_message_unless_lost(error))))


def _message_unless_lost(error: Exception) -> str:
    """Return the message to report. Re-raise if no later batch can be computed: the process must be replaced."""
    if isinstance(error, torch.AcceleratorError):
        raise error
    return str(error) or type(error).__name__


def _merge(results: Sequence[StepResult]) -> StepResult:
    return StepResult(
        computed=list(itertools.chain.from_iterable(each.computed for each in results)),
        encoded=list(itertools.chain.from_iterable(each.encoded for each in results)),
        failed_encodings={key: text for each in results for key, text in each.failed_encodings.items()},
        failed_sequences={key: fault for each in results for key, fault in each.failed_sequences.items()},
        encode_times={key: took for each in results for key, took in each.encode_times.items()},
        recalled={key: token for each in results for key, token in each.recalled.items()},
        kept_ends=list(itertools.chain.from_iterable(each.kept_ends for each in results)),
        left_out=list(itertools.chain.from_iterable(each.left_out for each in results)),
    )
