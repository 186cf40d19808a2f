"""Records, when an engine starts, the steps that a GPU replays."""

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from keepsight.models.gpu_library import kernels_for
from keepsight.models.model import Model
from keepsight.runner import decode_graphs, prompt_graphs
from keepsight.runner.decode_graphs import DecodeGraphs
from keepsight.runner.kv_block_store import KvBlockStore
from keepsight.runner.prompt_graphs import PromptGraphs
from keepsight.runner.record_graph import Record, make_recorder

logger = logging.getLogger(__name__)
G = TypeVar("G", DecodeGraphs, PromptGraphs)
MakeGraphs = Callable[[Model, KvBlockStore, Sequence[int], Record], G]


@dataclass(frozen=True, slots=True)
class RecordedSteps:
    """The recorded steps; None for a kind that is not recorded."""

    of_tokens: DecodeGraphs | None = None
    of_prompts: PromptGraphs | None = None


@torch.inference_mode()
def record_steps(model: Model, blocks: KvBlockStore, max_tokens: int, max_prompt_tokens: int) -> RecordedSteps:
    """Record steps, if the GPU has our own kernels and enough memory.

    With torch's kernels, the number of keys would be part of the recording.
    """
    if kernels_for(model.place.device) is None:
        return RecordedSteps()
    record = make_recorder()

    def make(graphs: MakeGraphs[G], sizes: Sequence[int], max_size: int, kind: str) -> G | None:
        if not max_size:
            return None
        began, some = time.monotonic(), sizes[: bisect_left(sizes, max_size) + 1]
        try:
            made = graphs(model, blocks, some, record)
        except torch.AcceleratorError:
            logger.error("recording steps made this GPU fail; --enforce-eager does without it")
            raise
        except Exception as error:
            logger.warning("%s could not be recorded and are launched one kernel at a time: %s", kind, error)
            return None
        logger.info("%s of up to %d tokens recorded in %.1f s", kind, some[-1], time.monotonic() - began)
        return made

    # Prompts first, as they need most memory: all other steps fit in it.
    max_prompt_tokens = 0 if model.shape.cuts_steps else max_prompt_tokens
    of_prompts = make(PromptGraphs, prompt_graphs.SIZES, max_prompt_tokens, "prompts")
    return RecordedSteps(make(DecodeGraphs, decode_graphs.SIZES, max_tokens, "steps"), of_prompts)
