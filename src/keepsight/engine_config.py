"""The engine's configuration once everything is known: what was asked for, the model's shape, the machine's memory.

Nothing here can fail to run: `__post_init__` refuses it with the numbers, in the names that users know.
"""

from dataclasses import dataclass

from keepsight.errors import InvalidArgumentError

MAX_BLOCK_SIZE = 128
# What is encoded at once, and by some models computed so.
_AN_ITEM = "a picture (with enable_prompt_embeds also a strip of a prompt)"


def least_batched_tokens(tokens_at_once: int, max_num_seqs: int) -> int:
    """What one step cannot do with less, and beside it each of the other sequences may take one token."""
    return max(1, tokens_at_once) + max_num_seqs - 1


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
    # None: all prompts join it, as they do where many wait, unless it is 0.
    max_prompt_tokens_beside_streams: int | None
    # Whether encodings and steps take turns, and answers pause for both to go on in larger batches: nobody reads along.
    takes_turns: bool = False
    # Steps of fewer tokens are filled up to so many with guesses of what streams say next.
    guess_up_to: int = 0
    # Of one media item, the most there are.
    tokens_per_item: int
    # Whether several steps may compute them: no token of an item sees those behind it.
    cuts_items: bool = False

    @property
    def tokens_at_once(self) -> int:
        """What one step must be able to compute of a media item."""
        return 0 if self.cuts_items else self.tokens_per_item

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "max_num_seqs", "max_model_len", "max_num_encoder_input_tokens"):
            _check_least(name, getattr(self, name), 1)
        _check_least("tokens_per_item", self.tokens_per_item, 0)
        _check_least("guess_up_to", self.guess_up_to, 0)
        _check_least("max_prompt_tokens_beside_streams", self.max_prompt_tokens_beside_streams or 0, 0)
        self._check_batch_holds_the_smallest_step()
        if self.max_num_encoder_input_tokens < self.tokens_per_item:
            raise InvalidArgumentError(
                "max_num_encoder_input_tokens",
                f"is {self.max_num_encoder_input_tokens}, but the {self.tokens_per_item} embeddings of {_AN_ITEM} are "
                "made at once",
            )

    def _check_batch_holds_the_smallest_step(self) -> None:
        # Not cut where a picture's tokens attend to each other in both directions.
        whole = max(1, self.tokens_at_once)
        least, others = least_batched_tokens(whole, self.max_num_seqs), self.max_num_seqs - 1
        if self.max_num_batched_tokens >= least:
            return
        first = f"{_AN_ITEM} is computed whole, {whole} tokens" if whole > 1 else "one sequence takes a token"
        raise InvalidArgumentError(
            "max_num_batched_tokens",
            f"is {self.max_num_batched_tokens}, but must be at least {whole} + {others} = {least}: {first}, and each "
            f"of the {others} other sequences that max_num_seqs={self.max_num_seqs} allows may take one",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCacheConfig:
    num_blocks: int
    block_size: int = 16
    enable_prefix_caching: bool = True
    # Prompts whose last logits are kept, with which an answer begins at once where the prompt comes again.
    max_prompt_ends: int = 0
    # So many are kept as one where they outlive this memory; 0: nowhere.
    blocks_per_stretch: int = 0

    def __post_init__(self) -> None:
        _check_least("num_gpu_blocks_override", self.num_blocks, 1)
        _check_least("max_prompt_ends", self.max_prompt_ends, 0)
        assert self.enable_prefix_caching or not self.blocks_per_stretch, "what is not found here is found nowhere"
        # Users are offered fewer; pages smaller than those make small tests.
        if self.block_size < 1 or self.block_size > MAX_BLOCK_SIZE or self.block_size.bit_count() != 1:
            raise InvalidArgumentError(
                "block_size", f"must be a power of two of at most {MAX_BLOCK_SIZE}, not {self.block_size}"
            )

    @property
    def num_slots(self) -> int:
        """Positions whose keys and values have room."""
        return self.num_blocks * self.block_size


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderCacheConfig:
    max_bytes: int
    bytes_per_embedding: int
    # False: an embedding serves one request and is dropped with it.
    is_shared: bool = True
    # Of what is kept in host memory besides.
    host_bytes: int = 0
    # Whether embeddings that are not held may be found in host memory, or farther away.
    has_tiers: bool = False

    def __post_init__(self) -> None:
        _check_least("max_mm_cache_bytes", self.max_bytes, 0)
        _check_least("bytes_per_embedding", self.bytes_per_embedding, 1)
        assert self.is_shared or not self.has_tiers, "what is not shared has names of its own, which no tier holds"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    scheduler: SchedulerConfig
    kv_cache: KvCacheConfig
    encoder_cache: EncoderCacheConfig

    def __post_init__(self) -> None:
        if self.scheduler.max_model_len > self.kv_cache.num_slots:
            raise InvalidArgumentError(
                "max_model_len",
                f"is {self.scheduler.max_model_len}, but the {self.kv_cache.num_blocks} pages of "
                f"{self.kv_cache.block_size} positions hold {self.kv_cache.num_slots}; lower it, or give the keys and "
                "values more memory (kv_cache_memory_bytes, gpu_memory_utilization)",
            )


def _check_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise InvalidArgumentError(name, f"must be at least {least}, not {value}")
