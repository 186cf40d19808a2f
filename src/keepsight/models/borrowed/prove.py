"""Checks, before a borrowed model serves, that paged, chunked and batched results equal those of a plain computation.

Plain: a whole prompt alone, by transformers' own attention, with no cache. Anything that our way does not support (a
position, a mask, a cache of the modules' own) shows as different results, and the checkpoint is refused. Pictures are
checked with the first one that comes, which takes as long as two prompts of its tokens.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import count, filterfalse, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from keepsight.borrowed import count_columns
from keepsight.errors import CheckpointError
from keepsight.media import Geometry, MediaItem, TokenSpan
from keepsight.models.attention import AttentionBatch, LayerCache, RequestSlice
from keepsight.models.block_table import BlockTable
from keepsight.models.borrowed.attention import NAME, LayerRule
from keepsight.models.borrowed.media_tokens import find_media_tokens
from keepsight.models.borrowed.products import count_experts
from keepsight.models.gpu_library import without_kernels
from keepsight.models.layers import Placement
from keepsight.models.model import KvHeads, Model
from keepsight.models.mrope_positions import MRopePositions
from keepsight.models.paged_attention import PagedAttention
from keepsight.models.row_differences import row_differences

BLOCK_SIZE = 16
# A prompt is longer than the narrowest window if that is very narrow, as in models made for tests.
MIN_TOKENS, MAX_TOKENS = 24, 64
# From one token id to the next: the first ids of a vocabulary are special and hardly trained.
STRIDE = 997
# Position of the other prompt's last token, if the model has so many: tables derived from the longest would differ.
FAR = 10_000
# Relative difference of a token's vectors. In float32 rounding changes some millionths; a wrong position, or one more
# visible token, changes them by the order of their size. With less precision rounding changes some hundredths, a few
# tokens more: so there only some of them must be alike, fewer than those that only a window hides tokens from.
MAX_DIFFERENCE, MAX_DIFFERENCE_ROUNDED, SHARE_ALIKE = 1e-3, 0.25, 0.8
# With less precision a mixture may choose other experts for a token. It may differ by twice what noise as small as
# rounding in its embeddings changes, but at most by this, as a wrong computation usually does by more.
MAX_DIFFERENCE_OF_NOISY = 0.7


@torch.inference_mode()
def prove(model: Model, modules: Any, windows: Iterable[int | None], directory: Path) -> None:
    """Raise CheckpointError if `model` computes other logits than transformers' `modules`, on which it is built."""
    token_ids = _draw_prompt(modules, windows)
    with without_kernels():  # they are verified separately
        computed = _compute_in_parts(model, token_ids)
    found = _find_difference(computed, expected := _compute_plainly(modules, token_ids), model.place)
    if found is not None and not found < _measure_noise(modules, token_ids, expected, model.place):
        told = f"computed in parts and beside another prompt, they differ by {found:.1%}"
        raise CheckpointError(directory, f"transformers' modules give wrong results: {told}")


def prove_picture(
    model: Model,
    rules: Mapping[int, LayerRule],
    compute_body: Callable[..., Tensor],
    token_ids: Tensor,
    given: Mapping[str, Tensor],
    embeddings: Tensor,
) -> None:
    """Raise ValueError if a picture's `embeddings` [tokens, width] are not all that the modules use of it.

    `compute_body` computes hidden states from arguments of the modules; `given`: those of the picture.
    """
    num_blocks = -(-len(token_ids) // BLOCK_SIZE)
    table = BlockTable(BLOCK_SIZE, range(num_blocks), model.place.device)
    columns = count_columns(given, len(token_ids))
    item = MediaItem("", TokenSpan(0, len(token_ids)), Geometry(), columns=columns)
    places = MRopePositions([item]).between(0, len(token_ids))
    piece = RequestSlice(0, len(token_ids), table, mrope_positions=places, state_slot=0)
    batch = AttentionBatch([piece], model.place.device)
    caches = _make_caches(model, num_blocks * BLOCK_SIZE, are_shared=all(rule.writes for rule in rules.values()))
    make_states = partial(model.shape.make_states, 1, model.place.device)
    given = {"input_ids": token_ids[None], **given}
    expected = compute_body(given, PagedAttention(), caches, batch, states=make_states())
    hidden = model.compute(embeddings, PagedAttention(), caches, batch, states=make_states())
    if (found := _find_difference(hidden, expected, model.place)) is not None:
        raise ValueError(f"this model's pictures cannot be served: its own code computes them {found:.1%} differently")


def _find_difference(computed: Tensor, expected: Tensor, place: Placement) -> float | None:
    """Return the relative difference of [tokens, ...]; None if rounding explains it."""
    difference = float(row_differences(computed, expected).quantile(1.0 if place.is_exact else SHARE_ALIKE))
    # NaN compares as not less, so it is returned as a difference.
    return None if difference < (MAX_DIFFERENCE if place.is_exact else MAX_DIFFERENCE_ROUNDED) else difference


def _measure_noise(modules: Any, token_ids: Tensor, expected: Tensor, place: Placement) -> float:
    """Return the difference that rounding may cause: 0 with full precision, or without experts to choose."""
    if place.is_exact or not count_experts(modules.base_model.get_decoder()):
        return 0.0
    random = torch.Generator(token_ids.device).manual_seed(0)

    def disturb(_module: Any, _inputs: Any, embeddings: Tensor) -> Tensor:
        noise = torch.randn(embeddings.shape, generator=random, device=embeddings.device, dtype=embeddings.dtype)
        return embeddings * (1 + torch.finfo(torch.bfloat16).eps / 4 * noise)

    with modules.get_input_embeddings().register_forward_hook(disturb):
        noisy = _compute_plainly(modules, token_ids)
    return min(2 * float(row_differences(noisy, expected).quantile(SHARE_ALIKE)), MAX_DIFFERENCE_OF_NOISY)


def _draw_prompt(modules: Any, windows: Iterable[int | None]) -> Tensor:
    """Return token ids [tokens], none of which is a media token."""
    narrowest = min((window for window in windows if window is not None), default=0)
    num_tokens = min(max(MIN_TOKENS, narrowest + BLOCK_SIZE), MAX_TOKENS)
    left_out, size = find_media_tokens(modules.config), modules.get_input_embeddings().num_embeddings
    drawn = (index * STRIDE % size for index in count(1))
    return torch.tensor(list(islice(filterfalse(left_out.__contains__, drawn), num_tokens)), device=modules.device)


def _compute_plainly(modules: Any, token_ids: Tensor) -> Tensor:
    """[tokens] -> [tokens, vocabulary], by transformers' own attention."""
    decoder = modules.base_model.get_decoder()
    decoder.set_attn_implementation("eager")
    output = modules(input_ids=token_ids[None], use_cache=False)
    decoder.set_attn_implementation(NAME)
    return output.logits[0]  # type: ignore[no-any-return]


def _compute_in_parts(model: Model, token_ids: Tensor) -> Tensor:
    """[tokens] -> [tokens, vocabulary]

    Each part is batched after a part of another prompt: the same tokens reversed, the last at a far position.
    """
    device, end, far = model.place.device, len(token_ids), model.shape.furthest(FAR)
    num_blocks = -(-end // BLOCK_SIZE)
    ours = BlockTable(BLOCK_SIZE, range(0, 2 * num_blocks, 2), device)
    # The pages between ours, used repeatedly.
    blocks = [2 * (block % num_blocks) + 1 for block in range(max(far, end) // BLOCK_SIZE + 1)]
    others = BlockTable(BLOCK_SIZE, blocks, device)
    caches, states = _make_caches(model, 2 * num_blocks * BLOCK_SIZE), model.shape.make_states(2, device)
    attention, logits = PagedAttention(), list[Tensor]()
    # One part is shorter than what most convolutions see.
    third, after = end // 3, min(end, far)
    parts = ((0, third), (third, third + 2), (third + 2, end - 1), (end - 1, end))
    beside_parts = ((0, end - 1), (end - 1, 1), (after, 1), (far, 1))
    for (start, stop), (other, length) in zip(parts, beside_parts, strict=True):
        pieces = [
            RequestSlice(other, length, others, state_slot=0),
            RequestSlice(start, stop - start, ours, state_slot=1),
        ]
        beside = token_ids.flip(0)[:length]
        embeddings = model.embed_tokens(torch.cat((beside, token_ids[start:stop])))
        hidden = model.compute(embeddings, attention, caches, AttentionBatch(pieces, device), states=states)
        logits.append(model.logits(hidden)[length:])
    return torch.cat(logits)


def _make_caches(model: Model, num_slots: int, *, are_shared: bool = False) -> list[LayerCache]:
    """Make a cache for each layer.

    `are_shared`: one for all layers of a shape, whose keys are read before the next layer's are written.
    """
    place = model.place

    def make(heads: KvHeads) -> LayerCache:
        return LayerCache(*torch.zeros(2, num_slots, *heads, device=place.device, dtype=place.kv_dtype))

    shared = {heads: make(heads) for heads in set(model.shape.kv_heads)} if are_shared else {}
    return [shared.get(heads) or make(heads) for heads in model.shape.kv_heads]
