"""A GPU's kernels are compiled where they run, by whatever Triton and driver are there: so they are tried there first.

The same few tokens are computed with them and without.  Where they fail or disagree they are not used.
"""

import logging

import torch
from torch import Tensor

from keepsight.models.attention import AttentionBatch, RequestSlice
from keepsight.models.block_table import BlockTable
from keepsight.models.gpu_library import kernels_for, use_kernels, without_kernels
from keepsight.models.model import Model
from keepsight.models.paged_attention import PagedAttention
from keepsight.runner.kv_block_store import KvBlockStore

logger = logging.getLogger(__name__)
BLOCK_SIZE, NUM_BLOCKS = 16, 4
# So many at once, then as many one by one: both ways of a layer.
NUM_TOKENS = (BLOCK_SIZE * NUM_BLOCKS - 3, 3)
# Of a token's numbers: far more than rounding makes of so few tokens, far less than a fault.
MAX_DIFFERENCE = {torch.float32: 0.01, torch.bfloat16: 0.25}


@torch.inference_mode()
def prove_kernels(model: Model) -> None:
    """Of the whole process: they are not asked for any more, unless they do what torch does."""
    if kernels_for(model.place.device) is None:
        return
    try:
        with without_kernels():
            expected = _compute(model)
        difference = float(((_compute(model) - expected).norm(dim=-1) / expected.norm(dim=-1)).max())
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


def _compute(model: Model) -> Tensor:
    """Hidden states of some tokens, the first read as a prompt is, the last as an answer is."""
    device = model.place.device
    table = BlockTable(BLOCK_SIZE, range(NUM_BLOCKS), device)
    caches = KvBlockStore(model.shape, NUM_BLOCKS, BLOCK_SIZE, model.place).layers
    num_prompt, num_answer = NUM_TOKENS
    lengths = [num_prompt, *[1] * num_answer]
    attention, outputs, start = PagedAttention(), list[Tensor](), 0
    for length in lengths:
        token_ids = torch.arange(start, start + length, device=device) % model.shape.vocab_size
        batch = AttentionBatch([RequestSlice(start, length, table)], device)
        outputs.append(model.compute(model.embed_tokens(token_ids), attention, caches, batch))
        start += length
    return torch.cat(outputs).float()
