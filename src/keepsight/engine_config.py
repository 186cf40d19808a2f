"""The engine's configuration once everything is known: what was asked for, the model's shape, the machine's memory.

Nothing here can fail to run: `__post_init__` refuses it with the numbers.
"""

from dataclasses import dataclass

from keepsight.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    # Tokens of all requests computed in one step.
    max_num_batched_tokens: int
    max_num_seqs: int
    # Prompt and answer of one sequence.
    max_model_len: int
    # Embeddings whose pictures are being encoded at the same time.
    max_num_encoder_input_tokens: int
    # While answers stream, so many tokens of prompts join the same batch; longer prompts are computed beside it.
    # None: all prompts join it.
    max_prompt_tokens_beside_streams: int | None
    # Of one media item, the most there are.
    tokens_per_item: int
    # Whether a step may compute a part of a picture: never where its tokens attend to each other in both directions.
    cuts_pictures: bool = False

    def __post_init__(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCacheConfig:
    num_blocks: int
    block_size: int = 16
    enable_prefix_caching: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderCacheConfig:
    max_bytes: int
    bytes_per_embedding: int
    # False: an embedding serves one request and is dropped with it.
    is_shared: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    scheduler: SchedulerConfig
    kv_cache: KvCacheConfig
    encoder_cache: EncoderCacheConfig
