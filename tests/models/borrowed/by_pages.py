"""A model's answers computed as in a step: over pages, in parts, several prompts at once."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from keepsight.media import MediaItem, TokenSpan
from keepsight.models.attention import Attention, AttentionBatch, LayerCache, RequestSlice
from keepsight.models.block_table import BlockTable
from keepsight.models.model import Model
from keepsight.models.mrope_positions import MRopePositions
from keepsight.models.paged_attention import PagedAttention

BLOCK_SIZE, NUM_BLOCKS = 4, 64


class Pages:
    def __init__(self, model: Model, media: Sequence[MediaItem] = (), whole: tuple[TokenSpan, ...] = ()) -> None:
        """`media`: items of the first prompt, where a picture's tokens have positions by rows and columns; `whole`: the
        spans of its pictures' embeddings.
        """
        self.model, shape = model, model.shape
        self._whole = whole if shape.sees_pictures_whole else ()
        self._places = MRopePositions(media) if media else None
        num_slots = NUM_BLOCKS * BLOCK_SIZE
        self.caches = [LayerCache(*torch.zeros(2, num_slots, *heads)) for heads in shape.kv_heads]
        self.states = shape.make_states(3, model.place.device)
        self.attention: Attention = PagedAttention()
        self._free = list(range(NUM_BLOCKS))
        # The prompts' pages are interleaved.
        self.tables = [BlockTable(BLOCK_SIZE, self._free[first::3]) for first in range(3)]

    def compute(self, *parts: tuple[int, int, Tensor]) -> list[Tensor]:
        """Compute parts, each given by its prompt's number, first position and embeddings -> [tokens, vocabulary]"""
        with torch.inference_mode():
            pieces = [self._slice(index, start, len(part)) for index, start, part in parts]
            embeddings = torch.cat([part for _, _, part in parts])
            batch = AttentionBatch(pieces, "cpu")
            hidden = self.model.compute(embeddings, self.attention, self.caches, batch, states=self.states)
            logits = self.model.logits(hidden)
            return list(torch.split(logits, [len(part) for _, _, part in parts]))

    def _slice(self, index: int, start: int, length: int) -> RequestSlice:
        places = self._places.between(start, start + length) if self._places is not None and index == 0 else None
        own = TokenSpan(start, length)
        whole = tuple(span for span in self._whole if index == 0 and span.overlaps(own))
        return RequestSlice(start, length, self.tables[index], whole, mrope_positions=places, state_slot=index)


def at_once(
    model: Model, embeddings: Tensor, media: Sequence[MediaItem] = (), whole: tuple[TokenSpan, ...] = ()
) -> Tensor:
    """[tokens, hidden] -> [tokens, vocabulary]"""
    [logits] = Pages(model, media, whole).compute((0, 0, embeddings))
    return logits


def in_parts(
    model: Model,
    embeddings: Tensor,
    cuts: Sequence[int],
    others: Tensor,
    media: Sequence[MediaItem] = (),
    whole: tuple[TokenSpan, ...] = (),
) -> Tensor:
    """Compute in parts, each after as much of another prompt."""
    pages, bounds, logits = Pages(model, media, whole), [0, *cuts, len(embeddings)], []
    for start, end in itertools.pairwise(bounds):
        logits.append(pages.compute((1, start, others[start:end]), (0, start, embeddings[start:end]))[1])
    return torch.cat(logits)


def greedy(model: Model, token_ids: Tensor, num_new: int) -> list[int]:
    pages, made = Pages(model), list[int]()
    part, start = token_ids, 0
    for _ in range(num_new):
        with torch.inference_mode():
            embeddings = model.embed_tokens(part)
        [logits] = pages.compute((0, start, embeddings))
        start += len(part)
        made.append(int(logits[-1].argmax()))
        part = torch.tensor(made[-1:])
    return made
