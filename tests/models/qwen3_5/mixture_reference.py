"""Random small Qwen3.5 mixtures of experts made by transformers; all but feed-forwards is drawn as for dense ones."""

from collections.abc import Mapping
from typing import Any

from tests.models.qwen3_5 import reference as dense
from tests.models.qwen3_vl.reference import TOKENS, settle


def draw_config(seed: int) -> dict[str, Any]:
    arguments = dense.draw_config(seed)
    arguments["text_config"] |= {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 16,
    }
    return arguments


def make_reference(arguments: dict[str, Any], seed: int, tokens: Mapping[str, Any] = TOKENS) -> Any:
    from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

    return settle(Qwen3_5MoeForConditionalGeneration, Qwen3_5MoeConfig(**arguments, **tokens), seed)
