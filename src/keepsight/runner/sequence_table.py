"""The runner's state of each sequence, from its first plan to its end: tokens, pages, sampling state.

A sequence that loses its pages keeps its tokens and its random generator, so it goes on as if nothing had happened.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from keepsight.media import TokenSpan, find_runs
from keepsight.models.adapter_weights import AdapterWeights
from keepsight.models.block_table import BlockTable
from keepsight.models.model import ModelShape
from keepsight.models.mrope_positions import MRopePositions
from keepsight.requests import EngineRequest, TokenLogprobs
from keepsight.runner.guide_tokens import GuideMaker
from keepsight.runner.held_adapters import HeldAdapters, find_weights
from keepsight.runner.sample_tokens import SamplingState, TokenConstraints
from keepsight.scheduling.step_plan import NewSequence, SequenceId, Slice


@dataclass(slots=True, eq=False)
class RunningSequence:
    request: EngineRequest
    encoder_keys: tuple[str, ...]
    token_ids: list[int]  # prompt and answer
    table: BlockTable
    sampling: SamplingState
    # The end of the last media item: all positions behind it are text.
    media_end: int
    # The spans of pictures whose tokens attend to each other in both directions.
    whole_spans: tuple[TokenSpan, ...] = ()
    # None if all rotary positions equal the positions.
    places: MRopePositions | None = None
    adapter: AdapterWeights | None = None
    # If requested: of each prompt token but the first, as far as the prompt is computed.
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


class SequenceTable:
    def __init__(
        self,
        block_size: int,
        end_ids: frozenset[int],
        device: torch.device,
        guides: GuideMaker,
        shape: ModelShape,
        adapters: HeldAdapters | None = None,
    ) -> None:
        self._block_size, self._end_ids, self._device, self._guides = block_size, end_ids, device, guides
        self._shape, self._adapters = shape, adapters
        self._sequences: dict[SequenceId, RunningSequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, sequence_id: SequenceId) -> RunningSequence:
        return self._sequences[sequence_id]

    def remember(self, new: NewSequence) -> None:
        request = new.request
        constraints, form = self._find_constraints(request), request.sampling_params.structured_outputs
        guide = None if form is None else self._guides.begin(form, request.thought, constraints.guide_time)
        # Some models' media items have rows, but the decoder uses plain positions.
        has_rows = self._shape.uses_mrope and any(item.columns for item in request.media)
        self._sequences[new.sequence_id] = RunningSequence(
            request,
            new.encoder_keys,
            list(request.token_ids),
            BlockTable(self._block_size, device=self._device),
            SamplingState(constraints, new.choice, guide),
            max((item.span.end for item in request.media), default=0),
            tuple(self._find_whole_spans(request)),
            MRopePositions(request.media) if has_rows else None,
            find_weights(self._adapters, request.adapter),
        )

    def _find_whole_spans(self, request: EngineRequest) -> Iterator[TokenSpan]:
        """Yield the spans of tokens that see each other in both directions."""
        if not self._shape.sees_pictures_whole:
            return
        for span in (item.span for item in request.media if item.is_picture):
            if (token_id := self._shape.embedding_token) is None:
                yield span
            else:
                yield from find_runs(request.token_ids[span.start : span.end], token_id, span.start)

    def _find_constraints(self, request: EngineRequest) -> TokenConstraints:
        """Return the request's constraints, which its choices share as long as one of them is remembered."""
        for sequence in self._sequences.values():
            # Its id would not do: an aborted request's sequence may still run when another comes under that id.
            if sequence.request is request:
                return sequence.sampling.constraints
        return TokenConstraints(request.sampling_params, request.known_token_ids, self._end_ids, request.banned_runs)

    def forget(self, sequence_ids: Iterable[SequenceId]) -> None:
        for sequence_id in sequence_ids:
            self._sequences.pop(sequence_id, None)

    def lay_out(self, slices: Sequence[Slice]) -> list[RunningSequence]:
        """Return each slice's sequence, after putting the slice's new pages into its table."""
        sequences = [self._sequences[piece.sequence_id] for piece in slices]
        for piece, sequence in zip(slices, sequences, strict=True):
            sequence.table.replace_from(piece.first_block, piece.new_block_ids)
            assert piece.guess is not None or piece.end <= len(sequence.token_ids), (piece, len(sequence.token_ids))
        return sequences
