"""Derives the engine's configuration from the user's options, the model's size and the machine's memory.

Pure except for the log, which gives each derived value with its reason. Values that the user set are accepted or
refused, never changed.
"""

import logging
from dataclasses import dataclass
from typing import NamedTuple

from keepsight.config import GIB, Config
from keepsight.engine_config import (
    SPARE_STATE_SLOTS,
    EncoderCacheConfig,
    EngineConfig,
    KvCacheConfig,
    SchedulerConfig,
    count_reserved_slots,
    least_batched_tokens,
)
from keepsight.errors import InvalidArgumentError

logger = logging.getLogger(__name__)
DEFAULT_MAX_NUM_SEQS = 256
DEFAULT_GUESS_UP_TO = 8
# A full step takes about the same time on both.
DEFAULT_BATCHED_TOKENS = {"cpu": 2048, "cuda": 8192}
# On a CPU a longer prompt is slow enough to make streams stutter; on a GPU it is not.
DEFAULT_PROMPT_TOKENS_BESIDE_STREAMS = {"cpu": 32, "cuda": None}
MAX_KV_BYTES_ON_CPU = 4 * GIB
# Tokens that a tier keeps as one entry. With fewer there would be more files, and more of a prompt would be found: the
# rest takes about as long to compute as the few words of a new question.
TOKENS_PER_STRETCH = 64
MAX_BYTES_OF_PROMPT_ENDS = 64 * 2**20
# One for a running sequence, and one that is kept.
LEAST_STATE_SLOTS = 2
DEFAULT_CACHED_PICTURES = 512
DEFAULT_HOST_CACHE_BYTES = 1 * GIB
# The largest picture that is decoded takes most of it.
LITTLE_HOST_BYTES = 256 * 2**20
# GPU memory that the model needs for computing, besides its weights.
CUDA_RESERVE_BYTES = 2 * GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    # The checkpoint's limit, or the one that the user asked for.
    max_model_len: int
    # Most tokens of a picture or a sound, or those of a strip of an embedded prompt; 0: the model takes none of these.
    tokens_per_item: int
    # True if a picture's tokens attend to each other in both directions, so that one step must compute all of them.
    sees_pictures_whole: bool = True
    # The keys and values of all layers.
    bytes_per_position: int
    bytes_per_embedding: int
    # The state of all recurrent layers, of one sequence; 0: the model has none.
    bytes_per_state: int = 0
    # One row of logits: a number for each token of the vocabulary.
    bytes_of_logits: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The device that the model runs on ("cpu" or "cuda"), and the memory left after loading it."""

    device: str
    total_bytes: int
    available_bytes: int
    # Host memory, whichever device the model runs on.
    available_host_bytes: int


def resolve_config(config: Config, size: ModelSize, machine: Machine) -> EngineConfig:
    if machine.available_host_bytes < LITTLE_HOST_BYTES:
        left = f"{machine.available_host_bytes // 2**20} MiB of memory are left for everything beside the model"
        logger.warning("%s: this or another process may be killed when it needs more", left)
    if config.mm_cache_device == "gpu" and machine.device == "cpu":
        raise InvalidArgumentError("mm_cache_device", "must be auto or cpu, not gpu: the model is on the CPU")
    cuts_items = _choose_whether_to_cut(config, size)
    tokens_at_once = 0 if cuts_items else size.tokens_per_item
    max_num_seqs, max_num_batched_tokens = _choose_batch(config, tokens_at_once, machine)
    encoder_tokens = config.max_num_encoder_input_tokens or _derive_encoder_tokens(size, max_num_batched_tokens)
    encoder_cache = _choose_encoder_cache(config, size, machine, encoder_tokens)
    kv_cache = _choose_kv_cache(config, size, machine, max_num_seqs, encoder_cache.max_bytes)
    return EngineConfig(
        scheduler=SchedulerConfig(
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            max_model_len=config.max_model_len or _fit_model_len(size, kv_cache),
            max_num_encoder_input_tokens=encoder_tokens,
            max_prompt_tokens_beside_streams=_choose_prompt_tokens_beside_streams(config, machine),
            takes_turns=config.performance_mode == "throughput",
            guess_up_to=_choose_guesses(config, size),
            tokens_per_item=size.tokens_per_item,
            cuts_items=cuts_items,
            sees_items_whole=size.sees_pictures_whole,
        ),
        kv_cache=kv_cache,
        encoder_cache=encoder_cache,
    )


def _derive(name: str, value: int, reason: str) -> int:
    logger.info("%s is %d: %s", name, value, reason)
    return value


def _choose_whether_to_cut(config: Config, size: ModelSize) -> bool:
    if size.sees_pictures_whole and config.disable_chunked_mm_input:
        logger.info("disable_chunked_mm_input has no effect: this model's pictures are always computed whole")
    return not (size.sees_pictures_whole or config.disable_chunked_mm_input)


def _choose_guesses(config: Config, size: ModelSize) -> int:
    asked, reason = config.guess_up_to, "a wrong guess cannot be taken back from the states of recurrent layers"
    if size.bytes_per_state and asked:
        raise InvalidArgumentError("guess_up_to", f"must be 0 or left out for this model, not {asked}: {reason}")
    if asked is not None:
        return asked
    if size.bytes_per_state:
        return _derive("guess_up_to", 0, reason)
    return _derive("guess_up_to", DEFAULT_GUESS_UP_TO, "the default")


def _derive_encoder_tokens(size: ModelSize, max_num_batched_tokens: int) -> int:
    usual, largest = max_num_batched_tokens, size.tokens_per_item
    if usual >= largest:
        return _derive("max_num_encoder_input_tokens", usual, "as many as a step computes")
    reason = "the largest item, plus as many as a step computes"
    return _derive("max_num_encoder_input_tokens", largest + usual, reason)


def _choose_batch(config: Config, tokens_at_once: int, machine: Machine) -> tuple[int, int]:
    """Return the most sequences and tokens of one step. An option that was not set is derived from the other."""
    asked, max_num_seqs = config.max_num_batched_tokens, config.max_num_seqs
    if asked is not None:
        if max_num_seqs is None:
            # At least one sequence, so that a refusal names the smallest token budget possible.
            most = max(1, asked - least_batched_tokens(tokens_at_once, 1) + 1)
            reason = f"what max_num_batched_tokens={asked} allows, up to {DEFAULT_MAX_NUM_SEQS}"
            max_num_seqs = _derive("max_num_seqs", min(DEFAULT_MAX_NUM_SEQS, most), reason)
        return max_num_seqs, asked
    if max_num_seqs is None:
        max_num_seqs = _derive("max_num_seqs", DEFAULT_MAX_NUM_SEQS, "the default")
    usual, least = DEFAULT_BATCHED_TOKENS[machine.device], least_batched_tokens(tokens_at_once, max_num_seqs)
    reason = (
        f"the default on {machine.device}" if usual >= least else f"a picture and {max_num_seqs - 1} more sequences"
    )
    return max_num_seqs, _derive("max_num_batched_tokens", max(usual, least), reason)


def _choose_prompt_tokens_beside_streams(config: Config, machine: Machine) -> int | None:
    if config.max_prompt_tokens_beside_streams is not None:
        return config.max_prompt_tokens_beside_streams
    chosen, reason = DEFAULT_PROMPT_TOKENS_BESIDE_STREAMS[machine.device], f"the default on {machine.device}"
    if config.performance_mode == "throughput":
        chosen, reason = None, "for throughput, all prompts join the answers"
    logger.info("max_prompt_tokens_beside_streams is %s: %s", chosen, reason)
    return chosen


# Embeddings ---------------------------------------------------------------------------------------------------


def _choose_encoder_cache(config: Config, size: ModelSize, machine: Machine, encoder_tokens: int) -> EncoderCacheConfig:
    asked, one_step = _asked_encoder_bytes(config, size), encoder_tokens * size.bytes_per_embedding
    if not size.tokens_per_item:
        max_bytes = 0
    elif asked is None:
        max_bytes = _derive_encoder_bytes(config, size, machine, one_step)
    elif asked == 0:
        max_bytes = _derive(
            "max_mm_cache_bytes", one_step, "what one step encodes, as nothing is kept for other requests"
        )
    else:
        max_bytes = asked
    is_shared = config.keeps_embeddings_for_others
    host_bytes = _choose_host_bytes(config, machine) if is_shared and size.tokens_per_item else 0
    return EncoderCacheConfig(
        max_bytes=max_bytes,
        bytes_per_embedding=size.bytes_per_embedding,
        is_shared=is_shared,
        host_bytes=host_bytes,
        has_tiers=bool(host_bytes or (config.has_far_embeddings and size.tokens_per_item)),
    )


def _choose_host_bytes(config: Config, machine: Machine) -> int:
    if config.encoder_host_cache_gb is not None:
        return int(config.encoder_host_cache_gb * GIB)
    chosen, reason = _limit_to_part(DEFAULT_HOST_CACHE_BYTES, "the default", machine.available_host_bytes)
    return _derive("encoder_host_cache_bytes", chosen, reason)


def _asked_encoder_bytes(config: Config, size: ModelSize) -> int | None:
    if config.encoder_cache_gb is not None:
        return int(config.encoder_cache_gb * GIB)
    if config.encoder_cache_size is not None:
        return config.encoder_cache_size * size.bytes_per_embedding
    return config.max_mm_cache_bytes


def _derive_encoder_bytes(config: Config, size: ModelSize, machine: Machine, one_step: int) -> int:
    available = machine.available_bytes if _embeddings_share_memory(config, machine) else machine.available_host_bytes
    pictures = DEFAULT_CACHED_PICTURES * size.tokens_per_item * size.bytes_per_embedding
    chosen, reason = _limit_to_part(pictures, f"room for {DEFAULT_CACHED_PICTURES} pictures", available)
    if chosen < one_step:
        chosen, reason = one_step, "what one step encodes"
    return _derive("max_mm_cache_bytes", chosen, reason)


def _limit_to_part(usual: int, reason: str, available: int) -> tuple[int, str]:
    """Return the usual size, or a small part of the available memory if that is less, and the reason."""
    part = available // 20
    return (part, f"5 % of the {available / GIB:.1f} GiB that are left") if part < usual else (usual, reason)


def _embeddings_share_memory(config: Config, machine: Machine) -> bool:
    """Return whether the embeddings share the model's memory."""
    return config.mm_cache_device != "cpu" or machine.device == "cpu"


# Keys and values ----------------------------------------------------------------------------------------------


class _KvMemory(NamedTuple):
    """The memory for keys and values, with the states of recurrent layers, and the option that can change it."""

    option: str
    num_bytes: int
    # What else the option's memory holds, for messages.
    beside: str = ""


def _choose_kv_cache(
    config: Config, size: ModelSize, machine: Machine, max_num_seqs: int, bytes_of_embeddings: int
) -> KvCacheConfig:
    if size.bytes_per_state and config.has_prefix_disk:
        raise InvalidArgumentError(
            "prefix_disk_cache",
            "must not be set: this model has recurrent layers, and keys and values are of no use without the states of "
            "these, which no disk keeps",
        )
    memory = _choose_kv_memory(config, size, machine, bytes_of_embeddings)
    num_state_slots = _choose_num_state_slots(config, size, max_num_seqs, memory)
    if num_state_slots:
        num_left = max(0, memory.num_bytes - (num_state_slots + SPARE_STATE_SLOTS) * size.bytes_per_state)
        beside = f" beside {num_state_slots} states of {size.bytes_per_state} bytes each and a spare one"
        memory = memory._replace(num_bytes=num_left, beside=beside)
    return KvCacheConfig(
        num_blocks=_choose_num_blocks(config, size, machine, max_num_seqs, memory),
        block_size=config.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
        blocks_per_stretch=max(1, TOKENS_PER_STRETCH // config.block_size) if config.has_prefix_disk else 0,
        max_prompt_ends=MAX_BYTES_OF_PROMPT_ENDS // size.bytes_of_logits,
        num_state_slots=num_state_slots,
    )


def _choose_kv_memory(config: Config, size: ModelSize, machine: Machine, bytes_of_embeddings: int) -> _KvMemory:
    if config.num_gpu_blocks_override is not None:
        # As many blocks as asked for; states may take as much again.
        return _KvMemory("num_gpu_blocks_override", 2 * config.num_gpu_blocks_override * _bytes_per_block(config, size))
    if config.kv_cache_memory_bytes is not None:
        return _KvMemory("kv_cache_memory_bytes", config.kv_cache_memory_bytes)
    if machine.device == "cpu":
        return _KvMemory("kv_cache_memory_bytes", min(MAX_KV_BYTES_ON_CPU, machine.available_bytes // 4))
    return _KvMemory("gpu_memory_utilization", _kv_bytes_on_cuda(config, machine, bytes_of_embeddings))


def _bytes_per_block(config: Config, size: ModelSize) -> int:
    return size.bytes_per_position * config.block_size


def _choose_num_state_slots(config: Config, size: ModelSize, max_num_seqs: int, memory: _KvMemory) -> int:
    """Return the number of states for which there is room: one for each running sequence, and others that are kept."""
    if not size.bytes_per_state:
        return 0
    # However few sequences run at once, keep the states of earlier prompts.
    num_kept = _most_seqs(config, max_num_seqs) if config.enable_prefix_caching else 0
    wanted, most = max_num_seqs + num_kept, memory.num_bytes // 2 // size.bytes_per_state - SPARE_STATE_SLOTS
    if wanted <= most:
        return _derive("num_state_slots", wanted, f"{max_num_seqs} running sequences, and {num_kept} kept states")
    chosen = max(most, min(wanted, LEAST_STATE_SLOTS))
    reason = f"half of the {memory.num_bytes / GIB:.2f} GiB for keys, values and states"
    most_seqs = chosen - count_reserved_slots(chosen, keeps_states=config.enable_prefix_caching)
    if most_seqs < max_num_seqs:
        reason += f", so at most {most_seqs} sequences run at once, not max_num_seqs={max_num_seqs}"
    return _derive("num_state_slots", chosen, reason)


def _most_seqs(config: Config, max_num_seqs: int) -> int:
    return max(max_num_seqs, DEFAULT_MAX_NUM_SEQS) if config.enable_prefix_caching else max_num_seqs


def _choose_num_blocks(config: Config, size: ModelSize, machine: Machine, max_num_seqs: int, memory: _KvMemory) -> int:
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override
    num_blocks = _count_blocks(memory, _bytes_per_block(config, size))
    if config.kv_cache_memory_bytes is not None:
        return num_blocks
    # However few sequences run at once, keep room for the prefixes of earlier prompts.
    most_seqs = _most_seqs(config, max_num_seqs)
    useful = most_seqs * -(-size.max_model_len // config.block_size)
    if useful < num_blocks:
        return _derive("num_blocks", useful, f"{most_seqs} sequences of {size.max_model_len} positions need no more")
    return _derive(
        "num_blocks", num_blocks, f"{memory.num_bytes / GIB:.2f} GiB of the {machine.available_bytes / GIB:.2f} left"
    )


def _count_blocks(memory: _KvMemory, bytes_per_block: int) -> int:
    if memory.num_bytes < bytes_per_block:
        left = f"{memory.num_bytes} bytes are left for keys and values{memory.beside}"
        raise InvalidArgumentError(memory.option, f"{left}, but one KV block takes {bytes_per_block}")
    return memory.num_bytes // bytes_per_block


def _kv_bytes_on_cuda(config: Config, machine: Machine, bytes_of_embeddings: int) -> int:
    num_used = machine.total_bytes - machine.available_bytes
    if _embeddings_share_memory(config, machine):
        num_used += bytes_of_embeddings
    return max(0, int(machine.total_bytes * config.gpu_memory_utilization) - num_used - CUDA_RESERVE_BYTES)


def _fit_model_len(size: ModelSize, kv_cache: KvCacheConfig) -> int:
    if size.max_model_len <= kv_cache.num_positions:
        return size.max_model_len
    return _derive(
        "max_model_len",
        kv_cache.num_positions,
        f"what the {kv_cache.num_blocks} KV blocks hold, fewer than the {size.max_model_len} of the checkpoint",
    )
