"""A GPU's kernels are compiled where they run, by whatever Triton and driver are there: so they are tried there first.

The same few tokens are computed with them and without, near and far, and some patches where there is a tower.  Where
they fail or disagree they are not used.
"""

import logging

import torch
from torch import Tensor, nn

from keepsight.models.attention import AttentionBatch, RequestSlice
from keepsight.models.block_table import BlockTable
from keepsight.models.gpu_library import kernels_for, use_kernels, without_kernels
from keepsight.models.layers import Placement
from keepsight.models.model import Model
from keepsight.models.paged_attention import PagedAttention
from keepsight.models.vision_layer import VisionLayer, Windows, place_heads
from keepsight.runner.kv_block_store import KvBlockStore

logger = logging.getLogger(__name__)
# A prompt fills the pages, where a model has so many positions.
BLOCK_SIZE, NUM_BLOCKS = 16, 4
# Behind all windows, and further than a row's programs see at once, where there are so many positions; its sequence has
# the same pages over and over.
FAR = 10_000
# So far that a program of a slice has keys again where others were, all of its parts of memory having had some; nearer
# than where they are shared out to several.
NEAR = 500
# Of a slice that stands there, or in front of the last token; each has a slot of its own.
NUM_LATER = 8
# From one token to the next: a vocabulary's first ones are of a kind of their own, and hardly trained.
STRIDE = 997
# Of each of two pictures, windows whose patches are no whole number of any of a kernel's parts, and others that are.
NUM_PICTURES, WINDOWS = 2, (Windows(0, 400, 200), Windows(400, 784, 192))
# Of a head's numbers: with it a patch sees a few others above all, the last ones of a window as well as any.
SPREAD = 2.0
# Of a row's numbers: far more than rounding makes of so few tokens (of 62 layers with random weights 0.03), and less
# than where a kernel computes something else.  One key of many that is not seen would pass.
MAX_DIFFERENCE = {torch.float32: 0.01, torch.bfloat16: 0.25}
LEAST_NORM = 1e-6


@torch.inference_mode()
def prove_kernels(model: Model) -> None:
    """Of the whole process: they are not asked for any more, unless they do what torch does."""
    if kernels_for(model.place.device) is None:
        return
    try:
        with without_kernels():
            expected = _compute(model)
        difference = _largest_difference(_compute(model), expected)
    except torch.AcceleratorError:
        logger.error("the kernels for this GPU have lost it; --enforce-eager does without them")
        raise
    except Exception as error:
        _do_without(f"{type(error).__name__}: {error}")
        return
    # Of what is no number nothing is known to be less.
    if not difference < MAX_DIFFERENCE[model.place.dtype]:
        _do_without(f"their numbers differ by {difference:.0%} of torch's")


def _do_without(reason: str) -> None:
    logger.warning("the kernels for the GPU are not used, all is torch's and slower: %s", reason)
    use_kernels(False)


def _largest_difference(found: list[Tensor], expected: list[Tensor]) -> float:
    """Of a row, and its part of what is expected."""
    pairs = list(zip(found, expected, strict=True))
    differences = torch.cat([(ours - theirs).norm(dim=-1) for ours, theirs in pairs])
    # A token whose embedding is zero, as one for padding may be, is zero to the end.
    norms = torch.cat([theirs.norm(dim=-1) for _, theirs in pairs]).clamp(min=LEAST_NORM)
    return float((differences / norms).max())


def _compute(model: Model) -> list[Tensor]:
    """Rows of tokens, and of a tower's patches."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    layers = [each for each in modules if isinstance(each, VisionLayer)]
    return [_compute_tokens(model), *(_compute_patches(layer, model.place) for layer in layers[:1])]


def _compute_patches(layer: VisionLayer, place: Placement) -> Tensor:
    """What patches make of what they see, by one of a tower's layers, which are all alike."""
    shape = (NUM_PICTURES, WINDOWS[-1].end, layer.num_heads, layer.head_dim)
    # A row that is left as it is is no number.
    attended = torch.full(shape, torch.nan, device=place.device, dtype=place.dtype)
    heads, random = layer.make_heads(attended.flatten(2)), torch.Generator(place.device).manual_seed(0)
    projected = torch.empty_like(heads, memory_format=torch.contiguous_format).normal_(std=SPREAD, generator=random)
    # Of nothing that turns; but each number has its own.
    cos, sin = torch.randn(2, shape[1], 1, shape[3], device=place.device, generator=random)
    place_heads(projected[:1], None, heads[:1])
    place_heads(projected[1:], (cos, sin), heads[1:])
    for _ in layer.attend(heads, attended, WINDOWS):
        pass
    return attended.flatten(end_dim=-2).float()


def _compute_tokens(model: Model) -> Tensor:
    """Hidden states of some tokens: a prompt's, then one of an answer alone, then some of a prompt that goes on, then
    such beside two of answers."""
    device, far = model.place.device, model.shape.furthest(FAR)
    near, num_prompt = min(NEAR, far - NUM_LATER), min(BLOCK_SIZE * NUM_BLOCKS, far - 1)
    steps = [
        [(0, num_prompt)],
        [(num_prompt, 1)],
        [(near, NUM_LATER)],
        [(num_prompt + 1, 1), (far - NUM_LATER, NUM_LATER), (far, 1)],
    ]
    table = BlockTable(BLOCK_SIZE, [block % NUM_BLOCKS for block in range(far // BLOCK_SIZE + 1)], device)
    caches = KvBlockStore(model.shape, NUM_BLOCKS, BLOCK_SIZE, model.place).layers
    attention, outputs = PagedAttention(), list[Tensor]()
    for spans in steps:
        batch = AttentionBatch([RequestSlice(*span, table) for span in spans], device)
        token_ids = batch.positions * STRIDE % model.shape.vocab_size
        outputs.append(model.compute(model.embed_tokens(token_ids), attention, caches, batch))
    return torch.cat(outputs).float()
