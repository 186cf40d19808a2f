"""Impossible configurations are refused with the numbers and with the options' public names."""

from typing import Any

import pytest

from keepsight.engine_config import EncoderCacheConfig, EngineConfig, KvCacheConfig, SchedulerConfig
from keepsight.errors import InvalidArgumentError


def scheduler_config(**changed: Any) -> SchedulerConfig:
    settings: dict[str, Any] = {
        "max_num_batched_tokens": 511,
        "max_num_seqs": 256,
        "max_model_len": 1024,
        "max_num_encoder_input_tokens": 256,
        "max_prompt_tokens_beside_streams": 32,
        "tokens_per_item": 256,
    }
    return SchedulerConfig(**(settings | changed))


@pytest.mark.parametrize(
    ("changed", "field", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs", "must be at least 1, not 0"),
        ({"max_model_len": -5}, "max_model_len", "must be at least 1, not -5"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens", "must be at least 1, not 0"),
        ({"max_num_encoder_input_tokens": 0}, "max_num_encoder_input_tokens", "must be at least 1, not 0"),
        ({"max_prompt_tokens_beside_streams": -1}, "max_prompt_tokens_beside_streams", "must be at least 0, not -1"),
        (
            {"max_num_batched_tokens": 510},
            "max_num_batched_tokens",
            "must be at least 256 + 255 = 511, not 510: a picture (with enable_prompt_embeds also a strip of a "
            "prompt) is computed whole, 256 tokens, and each of the 255 other sequences that max_num_seqs=256 allows "
            "may take one",
        ),
        (
            {"max_num_batched_tokens": 255, "tokens_per_item": 0},
            "max_num_batched_tokens",
            "must be at least 1 + 255 = 256, not 255: one sequence takes a token, and each of the 255 other",
        ),
        (
            {"max_num_encoder_input_tokens": 255},
            "max_num_encoder_input_tokens",
            "must be at least 256, not 255: the embeddings of a picture (with enable_prompt_embeds also a strip of a "
            "prompt) are made at once",
        ),
    ],
)
def test_an_impossible_step_size_is_refused(changed: dict[str, int], field: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        scheduler_config(**changed)
    assert caught.value.field == field
    assert caught.value.message.startswith(message)


def test_the_smallest_possible_step_is_accepted() -> None:
    assert scheduler_config().max_num_batched_tokens == 511
    assert scheduler_config(max_num_batched_tokens=256, max_num_seqs=1).max_num_seqs == 1
    assert scheduler_config(max_num_batched_tokens=256, cuts_items=True).tokens_at_once == 0
    assert scheduler_config(max_num_batched_tokens=256, tokens_per_item=0).tokens_per_item == 0
    assert scheduler_config(max_prompt_tokens_beside_streams=None).max_prompt_tokens_beside_streams is None


@pytest.mark.parametrize("block_size", [0, -16, 3, 24, 256])
def test_the_block_size_must_be_a_power_of_two(block_size: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"block_size: must be a power of two .*128, not {block_size}"):
        KvCacheConfig(num_blocks=4, block_size=block_size)


def test_there_must_be_at_least_one_block() -> None:
    with pytest.raises(InvalidArgumentError, match="num_gpu_blocks_override: must be at least 1, not 0"):
        KvCacheConfig(num_blocks=0)


def test_a_negative_encoder_cache_size_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="max_mm_cache_bytes: must be at least 0, not -1"):
        EncoderCacheConfig(max_bytes=-1, bytes_per_embedding=4)


def test_the_longest_sequence_must_fit_into_the_blocks() -> None:
    encoder_cache = EncoderCacheConfig(max_bytes=0, bytes_per_embedding=4)
    fits = EngineConfig(
        scheduler=scheduler_config(), kv_cache=KvCacheConfig(num_blocks=64, block_size=16), encoder_cache=encoder_cache
    )
    assert fits.kv_cache.num_positions == fits.scheduler.max_model_len == 1024
    with pytest.raises(
        InvalidArgumentError, match=r"max_model_len: must be at most 1008, not 1024: that is what the 63 KV blocks"
    ):
        EngineConfig(
            scheduler=scheduler_config(),
            kv_cache=KvCacheConfig(num_blocks=63, block_size=16),
            encoder_cache=encoder_cache,
        )
