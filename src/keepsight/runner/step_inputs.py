"""Builds the tensors that the model reads from the slices of one batch, and notes which rows are sampled."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from keepsight.media import TokenSpan
from keepsight.models.attention import AttentionBatch, RequestSlice
from keepsight.runner.encoder_output_store import EncoderOutputStore
from keepsight.runner.gather_embeddings import MediaRows, gather_embeddings
from keepsight.runner.sequence_table import RunningSequence
from keepsight.scheduling.step_plan import Slice


@dataclass(frozen=True, slots=True)
class StepInputs:
    slices: Sequence[Slice]
    sequences: Sequence[RunningSequence]  # one for each slice
    token_ids: Tensor  # [tokens]
    media: Sequence[MediaRows]
    # Its read rows are the ends of the slices that sample; all tokens, if a slice wants its prompt's log-probabilities.
    batch: AttentionBatch
    # True if any slice does.
    wants_prompt_logprobs: bool


def make_step_inputs(
    slices: Sequence[Slice], sequences: Sequence[RunningSequence], store: EncoderOutputStore, device: torch.device
) -> StepInputs:
    token_ids: list[int] = []
    media: list[MediaRows] = []
    pieces: list[RequestSlice] = []
    for piece, sequence in zip(slices, sequences, strict=True):
        if piece.start < sequence.media_end:
            media.extend(gather_embeddings(sequence, piece.start, piece.end, len(token_ids), store))
        pieces.append(make_request_slice(piece, sequence))
        token_ids.extend(tokens_of(piece, sequence))
    sampling = [index for index, piece in enumerate(slices) if piece.samples]
    wants_prompt_logprobs = any(piece.wants_prompt_logprobs for piece in slices)
    batch = AttentionBatch(pieces, device, None if wants_prompt_logprobs else sampling)
    return StepInputs(slices, sequences, torch.tensor(token_ids).to(device), media, batch, wants_prompt_logprobs)


def tokens_of(piece: Slice, sequence: RunningSequence) -> Sequence[int]:
    return sequence.token_ids[piece.start : piece.end] if piece.guess is None else (piece.guess,)


def make_request_slice(piece: Slice, sequence: RunningSequence) -> RequestSlice:
    places, shift, stands = sequence.places, 0, None
    pictures: tuple[TokenSpan, ...] = ()
    if piece.start < sequence.media_end:
        span = TokenSpan(piece.start, piece.length)
        pictures = tuple(each for each in sequence.whole_spans if each.overlaps(span))
        stands = None if places is None else places.between(piece.start, piece.end)
    elif places is not None:
        shift = places.shift
    return RequestSlice(
        piece.start,
        piece.length,
        sequence.table,
        pictures,
        rotary_shift=shift,
        mrope_positions=stands,
        adapter=sequence.adapter,
        state_slot=piece.state_slot,
        kept_states=piece.kept_states,
    )
