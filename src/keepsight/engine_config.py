"""The engine's resolved configuration: derived from the options, the model's shape and the machine's memory.

Every instance can run: `__post_init__` refuses any other with the numbers, under the option names that users know.
"""

from dataclasses import dataclass

from keepsight.errors import InvalidArgumentError

MAX_BLOCK_SIZE = 128
# In messages: the unit that is always encoded at once, and that some models also compute at once.
_AN_ITEM = "a picture (with enable_prompt_embeds also a strip of a prompt)"


def least_batched_tokens(tokens_at_once: int, max_num_seqs: int) -> int:
    """Return the smallest token budget of a step: one indivisible piece, and a token for each other sequence."""
    return max(1, tokens_at_once) + max_num_seqs - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    # Tokens of all requests computed in one step.
    max_num_batched_tokens: int
    max_num_seqs: int
    # Prompt and answer of one sequence together.
    max_model_len: int
    # Limit of embeddings whose pictures are being encoded at the same time.
    max_num_encoder_input_tokens: int
    # While answers stream, up to this many prompt tokens join the same batch; longer prompts are computed beside it.
    # None: all prompts join, as they also do while many wait, unless this is 0.
    max_prompt_tokens_beside_streams: int | None
    # Whether encodings and steps alternate, and answers pause so that both run in larger batches. For throughput, when
    # no client reads along.
    takes_turns: bool = False
    # Steps with fewer tokens are filled up to this many with guesses of the streams' next tokens.
    guess_up_to: int = 0
    # The most tokens that a media item may have.
    tokens_per_item: int
    # Whether an item's tokens may be split over several steps, as none of them attends to later ones.
    cuts_items: bool = False
    # Whether an item's tokens attend to later ones of it, so that no state inside of it is one of what is before alone.
    sees_items_whole: bool = False

    @property
    def tokens_at_once(self) -> int:
        """The number of a media item's tokens that one step must be able to compute; 0 if items may be split."""
        return 0 if self.cuts_items else self.tokens_per_item

    @property
    def max_embeddings_of_pixels(self) -> int:
        """Limit of embeddings whose pixels are held or being made: enough for the encoder never to wait for others."""
        return 4 * self.max_num_encoder_input_tokens

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "max_num_seqs", "max_model_len", "max_num_encoder_input_tokens"):
            _check_least(name, getattr(self, name), 1)
        _check_least("tokens_per_item", self.tokens_per_item, 0)
        _check_least("guess_up_to", self.guess_up_to, 0)
        _check_least("max_prompt_tokens_beside_streams", self.max_prompt_tokens_beside_streams or 0, 0)
        assert not (self.cuts_items and self.sees_items_whole)
        self._check_batch_holds_the_smallest_step()
        if self.max_num_encoder_input_tokens < self.tokens_per_item:
            raise InvalidArgumentError(
                "max_num_encoder_input_tokens",
                f"must be at least {self.tokens_per_item}, not {self.max_num_encoder_input_tokens}: the "
                f"embeddings of {_AN_ITEM} are made at once",
            )

    def _check_batch_holds_the_smallest_step(self) -> None:
        # Pictures whose tokens attend to each other in both directions are not split.
        whole = max(1, self.tokens_at_once)
        least, others = least_batched_tokens(whole, self.max_num_seqs), self.max_num_seqs - 1
        if self.max_num_batched_tokens >= least:
            return
        first = f"{_AN_ITEM} is computed whole, {whole} tokens" if whole > 1 else "one sequence takes a token"
        raise InvalidArgumentError(
            "max_num_batched_tokens",
            f"must be at least {whole} + {others} = {least}, not {self.max_num_batched_tokens}: {first}, and each "
            f"of the {others} other sequences that max_num_seqs={self.max_num_seqs} allows may take one",
        )


# States for which there is room besides `num_state_slots`: no sequence's, for what recorded steps compute of none.
SPARE_STATE_SLOTS = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCacheConfig:
    num_blocks: int
    block_size: int = 16
    enable_prefix_caching: bool = True
    # Number of prompts whose last logits are kept, so that an answer to the same prompt begins at once.
    max_prompt_ends: int = 0
    # Number of blocks that make one entry in a tier that outlives this memory; 0: there is no such tier.
    blocks_per_stretch: int = 0
    # Number of recurrent states for which there is room, those of running sequences and those kept for others; 0: the
    # model has no recurrent layers.
    num_state_slots: int = 0

    def __post_init__(self) -> None:
        _check_least("num_gpu_blocks_override", self.num_blocks, 1)
        _check_least("max_prompt_ends", self.max_prompt_ends, 0)
        assert self.enable_prefix_caching or not self.blocks_per_stretch, "what is not found here is found nowhere"
        # Users may choose only some of these; smaller pages keep tests small.
        if self.block_size < 1 or self.block_size > MAX_BLOCK_SIZE or self.block_size.bit_count() != 1:
            raise InvalidArgumentError(
                "block_size", f"must be a power of two of at most {MAX_BLOCK_SIZE}, not {self.block_size}"
            )

    @property
    def num_positions(self) -> int:
        """The number of positions for whose keys and values there is room."""
        return self.num_blocks * self.block_size


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderCacheConfig:
    max_bytes: int
    bytes_per_embedding: int
    # False: an embedding serves one request and is dropped with it.
    is_shared: bool = True
    # Size of the tier in host memory.
    host_bytes: int = 0
    # Whether embeddings that are not in the cache may be found in host memory or a farther tier.
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
        only_pages = self.kv_cache.blocks_per_stretch or self.scheduler.guess_up_to
        assert not (self.kv_cache.num_state_slots and only_pages), "a state is in no tier, and cannot be taken back"
        if self.scheduler.max_model_len > self.kv_cache.num_positions:
            raise InvalidArgumentError(
                "max_model_len",
                f"must be at most {self.kv_cache.num_positions}, not {self.scheduler.max_model_len}: that is what the "
                f"{self.kv_cache.num_blocks} KV blocks of {self.kv_cache.block_size} positions hold; lower it, or give "
                "them more memory (kv_cache_memory_bytes, gpu_memory_utilization)",
            )


def count_reserved_slots(num_state_slots: int, *, keeps_states: bool) -> int:
    """Return how many slots no sequence takes, so that states are kept however many sequences could run in them.

    A single one would hold the state of one prompt's end, not of what many have in common.
    """
    return num_state_slots // 4 if keeps_states and num_state_slots >= 8 else 0


def _check_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise InvalidArgumentError(name, f"must be at least {least}, not {value}")
