"""Tests the GPU kernels before use, as they are compiled on the machine by whatever Triton and driver it has.

The same few tokens, at near and far positions, are computed with and without the kernels, and some patches if there is
a tower of ours. Kernels that fail or give different results are not used. Of a borrowed decoder attention, norms and
gated delta nets have kernels, which are compared one by one: a mixture may choose other experts for a token because of
rounding.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from keepsight.models.attention import Attention, AttentionBatch, LayerCache, RequestSlice, write_cache
from keepsight.models.block_table import BlockTable
from keepsight.models.borrowed.attention import RecurrentModule
from keepsight.models.borrowed.model import BorrowedModel
from keepsight.models.gpu_library import kernels_for, use_kernels, without_kernels
from keepsight.models.layers import Placement
from keepsight.models.model import KvHeads, Model
from keepsight.models.paged_attention import PagedAttention
from keepsight.models.row_differences import row_differences
from keepsight.models.vision_language_model import VisionLanguageModel
from keepsight.models.vision_layer import VisionLayer, Windows, place_heads
from keepsight.runner.kv_block_store import KvBlockStore

logger = logging.getLogger(__name__)
# The prompt fills these pages, if the model has that many positions.
BLOCK_SIZE, NUM_BLOCKS = 16, 4
# A position beyond all sliding windows and beyond what a row's programs see at once, if the model has that many; the
# sequence's table repeats the same pages.
FAR = 10_000
# Far enough that a slice's program reuses each of its key buffers, but nearer than where keys are split between several
# programs.
NEAR = 500
# The length of the slices at `NEAR` and before the last token; each of their tokens has a slot of its own.
NUM_LATER = 8
# The step from one token id to the next: the first ids of a vocabulary are special and hardly trained.
STRIDE = 997
# For each picture, windows whose patches are not a multiple of any tile size of the kernel, and others that are.
NUM_PICTURES, WINDOWS = 2, (Windows(0, 400, 200), Windows(400, 784, 192))
# The standard deviation in heads: with it a patch attends mostly to a few others, the last of a window as well as any.
SPREAD = 2.0
# The relative difference allowed in a row: far more than rounding causes in so few tokens (0.03 in 62 layers with
# random weights), and less than if a kernel computed something else. One unseen key among many would pass.
MAX_DIFFERENCE = {torch.float32: 0.01, torch.bfloat16: 0.25}


@torch.inference_mode()
def prove_kernels(model: Model) -> None:
    """Disable the GPU kernels, in the whole process, unless they compute what torch computes."""
    if kernels_for(model.place.device) is None:
        return
    try:
        difference = _find_difference(model)
    except torch.AcceleratorError:
        logger.error("the kernels made this GPU fail; --enforce-eager does without them")
        raise
    except Exception as error:
        _do_without(f"{type(error).__name__}: {error}")
        return
    # `not ... <`, so that NaN counts as a difference.
    if not difference < MAX_DIFFERENCE[model.place.dtype]:
        _do_without(f"their results differ by {difference:.0%} from torch's")


def _do_without(reason: str) -> None:
    logger.warning("the kernels for the GPU are not used; torch's are slower: %s", reason)
    use_kernels(False)


def _find_difference(model: Model) -> float:
    """Return the largest difference of a row, relative to the expected row; NaN if there is any."""
    attention = _BothWays()
    tokens, found = _compute_tokens(model, attention), attention.differences
    if isinstance(model, VisionLanguageModel):  # all parts of its decoder have kernels
        with without_kernels():
            found.append(row_differences(tokens, _compute_tokens(model, PagedAttention())).max())
    if isinstance(model, BorrowedModel):
        found += [_compare(partial(_write_heads, each, model.place)) for each in set(model.shape.kv_heads)]
        norms = {next(norm.parameters()).shape: norm for norm in model.norms}
        found += [_compare(partial(_compute_norm, norm, model.place)) for norm in norms.values()]
        delta_nets = [each for each in model.recurrent if each.delta_net][:1]
        found += [_compare(partial(_compute_delta_net, model, each)) for each in delta_nets]
    tower = getattr(model, "tower", None)
    parts = tower.modules() if isinstance(tower, nn.Module) else ()
    layers = [each for each in parts if isinstance(each, VisionLayer)][:1]
    found += [_compare(partial(_compute_patches, each, model.place)) for each in layers]
    return float(torch.stack(found).max())


def _compare(compute: Callable[[], Tensor]) -> Tensor:
    """Return the largest difference of a row that is computed with and without the kernels."""
    rows = compute()
    with without_kernels():
        return row_differences(rows, compute()).max()


class _BothWays:
    """Attention by the kernels, compared each time with torch's of the same heads."""

    def __init__(self) -> None:
        self._with, self._without = PagedAttention(), PagedAttention()
        self.differences: list[Tensor] = []

    def __call__(self, query: Tensor, cache: LayerCache, batch: AttentionBatch, **options: Any) -> Tensor:
        found = self._with(query, cache, batch, **options)
        with without_kernels():
            expected = self._without(query, cache, batch, **options)
        self.differences.append(row_differences(found.flatten(1), expected.flatten(1)).max())
        return found


def _write_heads(heads: KvHeads, place: Placement) -> Tensor:
    """Write random keys and values to every other slot. Return all slots."""
    random = torch.Generator(place.device).manual_seed(0)
    key, value = torch.randn(2, NUM_LATER, *heads, device=place.device, dtype=place.dtype, generator=random)
    cache = LayerCache(*torch.zeros(2, 2 * NUM_LATER, *heads, device=place.device, dtype=place.kv_dtype))
    write_cache(key, value, cache, 2 * torch.arange(NUM_LATER, device=place.device))
    return torch.cat((cache.keys, cache.values)).flatten(1).float()


def _compute_norm(norm: nn.Module, place: Placement) -> Tensor:
    """Norm random rows, as few as a step may have and more."""
    random, [weight] = torch.Generator(place.device).manual_seed(0), norm.parameters()
    rows = torch.randn(BLOCK_SIZE + 1, len(weight), device=place.device, dtype=place.dtype, generator=random)
    return torch.cat((norm(rows[:1]), norm(rows[1:]))).float()


def _compute_delta_net(model: BorrowedModel, module: RecurrentModule) -> Tensor:
    """Compute random tokens by one of a decoder's gated delta nets, which are all alike.

    The steps: a prompt beside a single token, and what follows both, and a state that was kept within the prompt.
    """
    assert module.delta_net is not None
    device, outputs = model.place.device, list[Tensor]()
    states, random = model.shape.make_states(3, device), torch.Generator(device).manual_seed(0)
    table = BlockTable(BLOCK_SIZE, [0] * NUM_BLOCKS, device)
    for lengths, kept in (((BLOCK_SIZE * NUM_BLOCKS, 1), [(BLOCK_SIZE - 1, 2)]), ((1, NUM_LATER, 1), [])):
        pieces = [RequestSlice(0, length, table, state_slot=slot) for slot, length in enumerate(lengths)]
        pieces[0] = replace(pieces[0], kept_states=kept)
        shape = (1, sum(lengths), module.delta_net.width)
        hidden = torch.randn(shape, device=device, dtype=model.place.dtype, generator=random)
        outputs += model.recurrent_step(AttentionBatch(pieces, device), states).recur(module, hidden)
    return torch.cat(outputs).float()


def _compute_patches(layer: VisionLayer, place: Placement) -> Tensor:
    """Compute the attention of random patches in one of a tower's layers, which are all alike."""
    shape = (NUM_PICTURES, WINDOWS[-1].end, layer.num_heads, layer.head_dim)
    # NaN shows rows that a kernel leaves unwritten.
    attended = torch.full(shape, torch.nan, device=place.device, dtype=place.dtype)
    heads, random = layer.make_heads(attended.flatten(2)), torch.Generator(place.device).manual_seed(0)
    projected = torch.empty_like(heads, memory_format=torch.contiguous_format).normal_(std=SPREAD, generator=random)
    # Random, not cosines and sines of any angle, but different for each element.
    cos, sin = torch.randn(2, shape[1], 1, shape[3], device=place.device, generator=random)
    place_heads(projected[:1], None, heads[:1])
    place_heads(projected[1:], (cos, sin), heads[1:])
    for _ in layer.attend(heads, attended, WINDOWS):
        pass
    return attended.flatten(end_dim=-2).float()


def _compute_tokens(model: Model, attention: Attention) -> Tensor:
    """Return hidden states of some tokens.

    The steps: a prompt, a single token of an answer, a slice of a longer prompt, and such a slice beside two tokens of
    answers.
    """
    device, far = model.place.device, model.shape.furthest(FAR)
    near, num_prompt = min(NEAR, far - NUM_LATER), min(BLOCK_SIZE * NUM_BLOCKS, far - 1)
    steps = [
        [(0, num_prompt)],
        [(num_prompt, 1)],
        [(near, NUM_LATER)],
        [(num_prompt + 1, 1), (far - NUM_LATER, NUM_LATER), (far, 1)],
    ]
    table = BlockTable(BLOCK_SIZE, [block % NUM_BLOCKS for block in range(far // BLOCK_SIZE + 1)], device)
    # Slices of one step must not share a state.
    store = KvBlockStore(model.shape, NUM_BLOCKS, BLOCK_SIZE, model.place, num_state_slots=max(map(len, steps)))
    outputs = list[Tensor]()
    for spans in steps:
        pieces = [RequestSlice(*span, table, state_slot=slot) for slot, span in enumerate(spans)]
        batch = AttentionBatch(pieces, device)
        token_ids = batch.positions * STRIDE % model.shape.vocab_size
        outputs.append(
            model.compute(model.embed_tokens(token_ids), attention, store.layers, batch, states=store.states.of_layers)
        )
    return torch.cat(outputs).float()
