"""Values derived from the options, the model and the machine; impossible combinations are refused."""

import logging
from dataclasses import replace
from typing import Any

import pytest

from keepsight.config import GIB, Config
from keepsight.engine.resolve_config import Machine, ModelSize, resolve_config
from keepsight.engine_config import EngineConfig
from keepsight.errors import InvalidArgumentError

# Gemma 3 4b: 34 layers of 4 heads of 256, in float32 on a CPU and in bfloat16 on a GPU.
CPU = Machine(device="cpu", total_bytes=64 * GIB, available_bytes=32 * GIB, available_host_bytes=32 * GIB)
CUDA = Machine(device="cuda", total_bytes=80 * GIB, available_bytes=70 * GIB, available_host_bytes=200 * GIB)
KV_BYTES = 34 * 4 * 256 * 2 * 4
SIZE = ModelSize(
    max_model_len=131_072,
    tokens_per_item=256,
    bytes_per_position=KV_BYTES,
    bytes_per_embedding=10_240,
    bytes_of_logits=2**20,
)
CUDA_SIZE = replace(SIZE, bytes_per_position=KV_BYTES // 2, bytes_per_embedding=5120, bytes_of_logits=2**19)
TINY = ModelSize(
    max_model_len=2048, tokens_per_item=16, bytes_per_position=1024, bytes_per_embedding=512, bytes_of_logits=4096
)
TEXT_ONLY = replace(TINY, tokens_per_item=0)


def resolve(size: ModelSize = SIZE, machine: Machine = CPU, **options: Any) -> EngineConfig:
    return resolve_config(Config(**options), size, machine)


# One step -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "machine", "num_seqs", "num_tokens"),
    [
        ({}, CPU, 256, 2048),
        ({}, CUDA, 256, 8192),
        ({"max_num_seqs": 4000}, CPU, 4000, 4255),
        ({"max_num_seqs": 1, "max_num_batched_tokens": 256}, CPU, 1, 256),
        ({"max_num_batched_tokens": 300}, CPU, 45, 300),
        ({"max_num_batched_tokens": 256}, CPU, 1, 256),
        ({"max_num_batched_tokens": 9000}, CPU, 256, 9000),
    ],
)
def test_sequences_and_tokens_of_a_step_follow_from_each_other(
    options: dict[str, Any], machine: Machine, num_seqs: int, num_tokens: int
) -> None:
    scheduler = resolve(machine=machine, **options).scheduler
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens) == (num_seqs, num_tokens)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_batched_tokens": 255}, r"must be at least 256 \+ 0 = 256"),
        ({"max_num_batched_tokens": 300, "max_num_seqs": 46}, r"must be at least 256 \+ 45 = 301"),
    ],
)
def test_a_step_too_small_for_a_picture_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        resolve(**options)


def test_prompts_are_computed_beside_streams_on_a_cpu() -> None:
    assert resolve().scheduler.max_prompt_tokens_beside_streams == 32
    assert resolve(CUDA_SIZE, CUDA).scheduler.max_prompt_tokens_beside_streams is None
    assert resolve(performance_mode="throughput").scheduler.max_prompt_tokens_beside_streams is None
    assert resolve(CUDA_SIZE, CUDA, max_prompt_tokens_beside_streams=0).scheduler.max_prompt_tokens_beside_streams == 0


def test_as_many_tokens_are_encoded_as_computed_unless_configured_otherwise() -> None:
    assert resolve().scheduler.max_num_encoder_input_tokens == 2048
    assert resolve(max_num_encoder_input_tokens=256).scheduler.max_num_encoder_input_tokens == 256
    with pytest.raises(InvalidArgumentError, match="max_num_encoder_input_tokens: must be at least 256, not 255"):
        resolve(max_num_encoder_input_tokens=255)


# Embeddings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "max_bytes"),
    [
        ({"encoder_cache_gb": 1.5}, GIB * 3 // 2),
        ({"encoder_cache_size": 1000}, 10_240_000),
        ({"max_mm_cache_bytes": 12_345_678}, 12_345_678),
    ],
)
def test_the_encoder_cache_is_as_large_as_asked_in_any_unit(options: dict[str, Any], max_bytes: int) -> None:
    cache = resolve(**options).encoder_cache
    assert (cache.max_bytes, cache.is_shared, cache.bytes_per_embedding) == (max_bytes, True, 10_240)


@pytest.mark.parametrize("name", ["encoder_cache_gb", "encoder_cache_size", "max_mm_cache_bytes"])
def test_a_size_of_zero_is_room_for_one_step_without_sharing(name: str) -> None:
    nothing: dict[str, Any] = {name: 0}
    cache = resolve(**nothing).encoder_cache
    assert (cache.max_bytes, cache.is_shared) == (2048 * 10_240, False)


def test_by_default_it_holds_512_pictures_or_a_twentieth_of_the_memory() -> None:
    def max_bytes(available: int, **options: Any) -> int:
        machine = Machine(device="cuda", total_bytes=80 * GIB, available_bytes=available, available_host_bytes=10 * GIB)
        return resolve(CUDA_SIZE, machine, num_gpu_blocks_override=10_000, **options).encoder_cache.max_bytes

    assert max_bytes(70 * GIB) == 512 * 256 * 5120
    assert max_bytes(4 * GIB) == 4 * GIB // 20
    assert max_bytes(70 * GIB, mm_cache_device="cpu") == 10 * GIB // 20
    assert max_bytes(10 * 2**20) == 8192 * 5120, "never less than one step encodes"


def test_embeddings_cannot_be_held_on_a_gpu_that_does_not_exist() -> None:
    with pytest.raises(InvalidArgumentError, match="mm_cache_device: must be auto or cpu, not gpu"):
        resolve(mm_cache_device="gpu", encoder_cache_gb=1)
    assert resolve(CUDA_SIZE, CUDA, mm_cache_device="gpu").encoder_cache.is_shared


def test_a_model_that_reads_text_only_needs_no_room_for_embeddings() -> None:
    config = resolve(TEXT_ONLY)
    assert (config.encoder_cache.max_bytes, config.scheduler.tokens_per_item) == (0, 0)


# Keys and values ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "num_blocks"),
    [
        ({"num_gpu_blocks_override": 77, "max_model_len": 77 * 16}, 77),
        ({"kv_cache_memory_bytes": KV_BYTES * 16 * 10 + 5}, 10),
        ({"kv_cache_memory_bytes": KV_BYTES * 32 * 10, "block_size": 32}, 10),
        ({}, 4 * GIB // (KV_BYTES * 16)),
    ],
)
def test_pages_on_a_cpu(options: dict[str, Any], num_blocks: int) -> None:
    assert resolve(**options).kv_cache.num_blocks == num_blocks


def test_pages_take_at_most_a_quarter_of_what_a_small_machine_has_left() -> None:
    small = Machine(device="cpu", total_bytes=8 * GIB, available_bytes=4 * GIB, available_host_bytes=4 * GIB)
    assert resolve(machine=small).kv_cache.num_blocks == GIB // (KV_BYTES * 16)


def test_there_are_never_more_pages_than_all_sequences_could_fill() -> None:
    assert resolve(TINY).kv_cache.num_blocks == 256 * 128
    alone = resolve(TINY, max_num_seqs=3, block_size=64, enable_prefix_caching=False)
    assert alone.kv_cache.num_blocks == 3 * 32
    assert resolve(TINY, num_gpu_blocks_override=99_999).kv_cache.num_blocks == 99_999


def test_few_sequences_at_once_leave_pages_for_the_prompts_of_many() -> None:
    assert resolve(TINY, max_num_seqs=3, block_size=64).kv_cache.num_blocks == 256 * 32


def test_pages_on_a_gpu_take_what_weights_embeddings_and_a_reserve_leave() -> None:
    bytes_per_page, embeddings = KV_BYTES // 2 * 16, 512 * 256 * 5120
    left = 72 * GIB - 10 * GIB - 2 * GIB
    assert resolve(CUDA_SIZE, CUDA).kv_cache.num_blocks == (left - embeddings) // bytes_per_page
    assert resolve(CUDA_SIZE, CUDA, mm_cache_device="cpu").kv_cache.num_blocks == left // bytes_per_page
    half = resolve(CUDA_SIZE, CUDA, gpu_memory_utilization=0.5, mm_cache_device="cpu")
    assert half.kv_cache.num_blocks == 28 * GIB // bytes_per_page


def test_memory_without_room_for_a_page_is_refused_by_what_the_user_can_change() -> None:
    with pytest.raises(InvalidArgumentError, match="gpu_memory_utilization: 0 bytes are left for keys and values"):
        resolve(CUDA_SIZE, CUDA, gpu_memory_utilization=0.1)
    with pytest.raises(InvalidArgumentError, match=f"kv_cache_memory_bytes: 99 bytes .* takes {KV_BYTES * 16}"):
        resolve(kv_cache_memory_bytes=99)


def test_a_machine_that_is_nearly_full_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    resolve(machine=replace(CPU, available_host_bytes=256 * 2**20))
    assert not caplog.text
    resolve(machine=replace(CPU, available_host_bytes=255 * 2**20))
    assert "255 MiB of memory are left" in caplog.text


def test_the_context_shrinks_to_the_pages_unless_it_was_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        config = resolve(TINY, num_gpu_blocks_override=100)
    assert config.scheduler.max_model_len == 1600
    assert "max_model_len is 1600: what the 100 KV blocks hold, fewer than the 2048 of the checkpoint" in caplog.text
    asked = replace(TINY, max_model_len=1601)
    with pytest.raises(
        InvalidArgumentError,
        match="max_model_len: must be at most 1600, not 1601: that is what the 100 KV blocks of 16 ",
    ):
        resolve(asked, num_gpu_blocks_override=100, max_model_len=1601)


def test_the_ends_of_so_many_prompts_are_kept_as_have_room() -> None:
    assert resolve().kv_cache.max_prompt_ends == 64
    assert resolve(CUDA_SIZE, CUDA).kv_cache.max_prompt_ends == 128
    assert resolve(replace(TINY, bytes_of_logits=2**30)).kv_cache.max_prompt_ends == 0


def test_prefix_caching_and_page_size_are_passed_on() -> None:
    kv_cache = resolve(TINY, enable_prefix_caching=False, block_size=128).kv_cache
    assert (kv_cache.enable_prefix_caching, kv_cache.block_size) == (False, 128)
    assert resolve(TINY).kv_cache.enable_prefix_caching


# The states of recurrent layers --------------------------------------------------------------------------------

# Qwen3.5 0.8B: 18 of its 24 layers are recurrent.
RECURRENT = ModelSize(
    max_model_len=262_144,
    tokens_per_item=256,
    sees_pictures_whole=False,
    bytes_per_position=12_288,
    bytes_per_state=19 * 10**6,
    bytes_per_embedding=2048,
    bytes_of_logits=2**19,
)


def test_states_take_at_most_half_of_the_memory_for_keys_and_values(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        kv_cache = resolve(RECURRENT).kv_cache
    # One more is spare.
    assert kv_cache.num_state_slots + 1 == 2 * GIB // RECURRENT.bytes_per_state == 113
    assert kv_cache.num_blocks == (4 * GIB - 113 * RECURRENT.bytes_per_state) // (12_288 * 16)
    assert "num_state_slots is 112: half of the 4.00 GiB" in caplog.text
    assert "so at most 84 sequences run at once, not max_num_seqs=256" in caplog.text


@pytest.mark.parametrize(
    ("options", "num_slots"), [({}, 512), ({"max_num_seqs": 4}, 260), ({"enable_prefix_caching": False}, 256)]
)
def test_with_enough_memory_there_is_a_state_for_each_sequence_and_as_many_are_kept(
    options: dict[str, Any], num_slots: int
) -> None:
    assert resolve(RECURRENT, CUDA, **options).kv_cache.num_state_slots == num_slots


@pytest.mark.parametrize(
    ("options", "num_slots", "num_blocks"),
    [
        # The bytes asked for are those of both; blocks asked for are had, and states take as much again.
        ({"kv_cache_memory_bytes": 10**9}, 25, (10**9 - 26 * 19 * 10**6) // (12_288 * 16)),
        ({"num_gpu_blocks_override": 1000}, 1000 * 16 * 12_288 // (19 * 10**6) - 1, 1000),
        ({"num_gpu_blocks_override": 3}, 2, 3),
        ({"kv_cache_memory_bytes": 60 * 10**6}, 2, 15),
        ({"kv_cache_memory_bytes": 40 * 10**6, "enable_prefix_caching": False, "max_num_seqs": 1}, 1, 10),
    ],
)
def test_states_under_a_limit_that_was_asked_for(options: dict[str, Any], num_slots: int, num_blocks: int) -> None:
    kv_cache = resolve(RECURRENT, **options).kv_cache
    assert (kv_cache.num_state_slots, kv_cache.num_blocks) == (num_slots, num_blocks)


def test_memory_without_room_for_two_states_is_refused() -> None:
    message = "0 bytes are left for keys and values beside 2 states of 19000000 bytes each and a spare one, but"
    with pytest.raises(InvalidArgumentError, match=f"kv_cache_memory_bytes: {message}"):
        resolve(RECURRENT, kv_cache_memory_bytes=56 * 10**6)


def test_what_works_without_states_only_is_refused_or_left_out(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(InvalidArgumentError, match="prefix_disk_cache: must not be set: this model has recurrent"):
        resolve(RECURRENT, prefix_disk_cache=True)
    with caplog.at_level(logging.INFO):
        assert resolve(RECURRENT).scheduler.guess_up_to == 0
    assert "guess_up_to is 0: a wrong guess cannot be taken back" in caplog.text
    assert resolve(RECURRENT, guess_up_to=0).scheduler.guess_up_to == 0
    with pytest.raises(InvalidArgumentError, match="guess_up_to: must be 0 or left out for this model, not 64: a"):
        resolve(RECURRENT, guess_up_to=64)
    assert (resolve().scheduler.guess_up_to, resolve(guess_up_to=64).scheduler.guess_up_to) == (8, 64)
    assert resolve().kv_cache.num_state_slots == 0


# Pictures in steps ---------------------------------------------------------------------------------------------


def test_a_picture_whose_tokens_see_only_what_is_before_them_may_be_larger_than_a_step() -> None:
    size = replace(SIZE, tokens_per_item=16_384, sees_pictures_whole=False)
    scheduler = resolve(size).scheduler
    assert (scheduler.max_num_batched_tokens, scheduler.max_num_encoder_input_tokens) == (2048, 16_384 + 2048)
    assert scheduler.cuts_items
    whole = resolve(size, disable_chunked_mm_input=True).scheduler
    assert (whole.max_num_batched_tokens, whole.cuts_items) == (16_384 + 255, False)


def test_a_picture_whose_tokens_see_each_other_is_always_computed_whole(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        assert resolve(disable_chunked_mm_input=True) == resolve(disable_chunked_mm_input=False)
    assert caplog.text.count("disable_chunked_mm_input has no effect") == 1


def test_every_value_that_was_derived_is_logged_with_its_reason_and_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        resolve()
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split(" is ")[0] for line in lines] == [
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_num_encoder_input_tokens",
        "max_mm_cache_bytes",
        "encoder_host_cache_bytes",
        "num_blocks",
        "max_model_len",
        "max_prompt_tokens_beside_streams",
        "guess_up_to",
    ]
    assert all(len(line.split(": ")[1]) > 5 for line in lines)
    caplog.clear()
    asked: dict[str, Any] = {
        "max_num_seqs": 2,
        "max_num_batched_tokens": 300,
        "max_num_encoder_input_tokens": 256,
        "max_mm_cache_bytes": 10_000_000,
        "encoder_host_cache_gb": 0.1,
        "num_gpu_blocks_override": 9,
        "max_model_len": 100,
        "max_prompt_tokens_beside_streams": 1,
        "guess_up_to": 3,
    }
    with caplog.at_level(logging.INFO):
        resolve(**asked)
    assert not caplog.records
