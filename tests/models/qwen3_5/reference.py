"""Random small Qwen3.5 checkpoints, and transformers' models of them: the reference."""

import random
from collections.abc import Mapping
from typing import Any

from tests.models.qwen3_vl import reference as qwen3_vl

RECURRENT, ATTENDING = "linear_attention", "full_attention"


def draw_config(seed: int) -> dict[str, Any]:
    """Return the keyword arguments of one random configuration."""
    arguments, rng = qwen3_vl.draw_config(seed), random.Random(seed)
    text, vision = arguments["text_config"], arguments["vision_config"]
    del vision["deepstack_visual_indexes"]
    text["layer_types"] = [rng.choice([RECURRENT, ATTENDING]) for _ in range(text["num_hidden_layers"] - 2)]
    text["layer_types"] += rng.sample([RECURRENT, ATTENDING], 2)
    # A half of each head is rotated.
    text["head_dim"] = rng.choice([16, 32])
    quarter = text["head_dim"] // 4
    rows, columns = rng.choice([(quarter // 3, quarter // 3), (0, quarter // 3)])
    text["rope_parameters"] |= {
        "partial_rotary_factor": 0.5,
        "mrope_section": [quarter - rows - columns, rows, columns],
    }
    key_heads = rng.choice([1, 2])
    text |= {
        "hidden_act": "silu",
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * rng.choice([1, 2]),
        "linear_key_head_dim": rng.choice([8, 16]),
        # The kernel takes multiples of 16.
        "linear_value_head_dim": rng.choice([16, 16, 24, 48]),
    }
    return arguments


def make_reference(arguments: dict[str, Any], seed: int, tokens: Mapping[str, Any] = qwen3_vl.TOKENS) -> Any:
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    return qwen3_vl.settle(Qwen3_5ForConditionalGeneration, Qwen3_5Config(**arguments, **tokens), seed)
