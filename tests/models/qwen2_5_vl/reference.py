"""Random small Qwen2.5-VL checkpoints made by transformers; prompts and tests are Qwen3-VL's."""

import random
from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from tests.models.qwen3_vl.reference import MERGE_SIZE, TOKENS, VOCAB_SIZE, settle


def draw_config(seed: int) -> dict[str, Any]:
    """Return the keyword arguments of one random configuration; together the seeds vary everything that can vary."""
    rng = random.Random(seed)
    kv_heads = rng.choice([1, 2, 3])
    heads = kv_heads * rng.choice([1, 2, 4])
    head_dim = rng.choice([8, 16, 32])
    half = head_dim // 2
    times, rows = rng.choice([(half // 4, half // 4), (half // 2, half // 2), (0, half // 4), (half // 4, 0)])
    depth, patch_size, vision_heads = rng.choice([1, 3, 4]), rng.choice([2, 4]), rng.choice([1, 2, 3])
    token_side = patch_size * MERGE_SIZE
    return {
        "text_config": {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": heads * head_dim,
            "intermediate_size": rng.choice([40, 96]),
            "num_hidden_layers": rng.choice([2, 3]),
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "rms_norm_eps": rng.choice([1e-6, 1e-3]),
            "hidden_act": rng.choice(["silu", "silu", "silu", "gelu_pytorch_tanh"]),
            "max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": rng.choice([1e6, 1e4]),
                "mrope_section": [times, rows, half - times - rows],
            },
            "eos_token_id": 1,
        },
        "vision_config": {
            "hidden_size": vision_heads * rng.choice([8, 16, 24]),
            "intermediate_size": rng.choice([40, 72]),
            "depth": depth,
            "num_heads": vision_heads,
            "patch_size": patch_size,
            "spatial_merge_size": MERGE_SIZE,
            # A remainder that is less than a token adds no token.
            "window_size": token_side * rng.choice([1, 2, 2, 3, 8]) + rng.choice([0, token_side - 1]),
            "tokens_per_second": 1 + seed % 4,
            "fullatt_block_indexes": sorted(rng.sample(range(depth), rng.randrange(min(3, depth)))),
            "out_hidden_size": heads * head_dim,
        },
        "tie_word_embeddings": rng.random() < 0.5,
    }


def make_reference(arguments: dict[str, Any], seed: int, tokens: Mapping[str, Any] = TOKENS) -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    reference = settle(Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLConfig(**arguments, **tokens), seed)
    places_per_second = reference.config.vision_config.tokens_per_second
    reference.model.get_rope_index = partial(
        rope_index, tokens=tokens, merge_size=MERGE_SIZE, places_per_second=places_per_second
    )
    return reference


def rope_index(
    input_ids: Tensor,
    *,
    tokens: Mapping[str, Any],
    merge_size: int,
    places_per_second: int,
    image_grid_thw: Tensor | None = None,
    video_grid_thw: Tensor | None = None,
    second_per_grid_ts: Tensor | None = None,
    attention_mask: Tensor | None = None,
    **_others: Any,
) -> tuple[Tensor, Tensor]:
    """Call transformers' Qwen2.5-Omni, which has the same rotation. Qwen2.5-VL's own was correct before version 5.3;
    since then it places the text after a long film amid the film's times, and the answer after all of them.
    """
    from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
        Qwen2_5OmniPreTrainedModelForConditionalGeneration as Omni,
    )

    no_sounds = {"audio_token_id": -1, "audio_start_token_id": -1, "seconds_per_chunk": 2}
    config = SimpleNamespace(**tokens, **no_sounds, position_id_per_seconds=places_per_second)
    holder: Any = SimpleNamespace(config=config, spatial_merge_size=merge_size)
    holder.get_llm_pos_ids_for_vision = partial(Omni.get_llm_pos_ids_for_vision, holder)
    find: Any = partial(Omni.get_rope_index, holder, second_per_grids=second_per_grid_ts)
    return find(input_ids, image_grid_thw, video_grid_thw, attention_mask)  # type: ignore[no-any-return]
