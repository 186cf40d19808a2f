"""Random small mixtures of experts made by transformers; everything but feed-forwards is drawn as for dense ones."""

import random
from collections.abc import Mapping
from typing import Any

from tests.models.qwen3_vl import reference as dense
from tests.models.qwen3_vl.reference import TOKENS, settle


def draw_config(seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    arguments = dense.draw_config(seed)
    num_layers, num_experts = arguments["text_config"]["num_hidden_layers"], rng.choice([2, 5, 8])
    hidden_size = arguments["text_config"]["hidden_size"]
    arguments["text_config"] |= {
        "num_experts": num_experts,
        "num_experts_per_tok": rng.randint(1, min(4, num_experts)),
        "moe_intermediate_size": rng.choice([wide for wide in (8, 24, 40) if hidden_size not in (wide, 2 * wide)]),
        "decoder_sparse_step": rng.choice([1, 1, 2]),
        "mlp_only_layers": rng.choice([[], [0], [num_layers - 1]]),
    }
    return arguments


def make_reference(arguments: dict[str, Any], seed: int, tokens: Mapping[str, Any] = TOKENS) -> Any:
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    return settle(Qwen3VLMoeForConditionalGeneration, Qwen3VLMoeConfig(**arguments, **tokens), seed)
