"""What a decoder is made of, as frozen values: each family reads them from its own `config.json`."""

from dataclasses import dataclass

from keepsight.json_fields import JsonFields


@dataclass(frozen=True, slots=True)
class RotaryConfig:
    theta: float
    # Positions are divided by this ("linear" scaling): how the larger models reach their long contexts.
    scaling_factor: float = 1.0
    # Which frequencies, of which the first is the fastest, turn by a token's row and by its column in a picture.  The
    # rest, and all of text, turn by its place in the order of time.  None: all do.
    by_row_and_column: tuple[range, range] | None = None


@dataclass(frozen=True, slots=True)
class MixtureConfig:
    """A feed-forward of many experts, of which each token has a few."""

    num_experts: int
    num_chosen: int
    # Of one expert.
    intermediate_size: int


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What differs from one decoder layer to the next."""

    rotary: RotaryConfig
    # How many positions back a token sees, itself included; None: all.
    window: int | None = None
    # None: one feed-forward for all tokens.
    mixture: MixtureConfig | None = None


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    rms_norm_eps: float
    attention_scale: float
    qkv_bias: bool
    out_bias: bool
    activation: str
    tie_word_embeddings: bool
    # What a token's embedding is multiplied by.
    embedding_scale: float = 1.0
    # Whether queries and keys are normalised before they turn.
    norms_heads: bool = True
    # Whether what attention and the feed-forward give is normalised before it is added.
    norms_results: bool = False
    # Whether a norm's weight is what is added to 1.
    norms_add_one: bool = False
    attention_softcap: float | None = None
    final_softcap: float | None = None


def read_rotary_kind(fields: JsonFields, kinds: tuple[str, ...]) -> str:
    """By its name in newer files or in older ones."""
    return fields.choice("rope_type" if "rope_type" in fields else "type", kinds, "default")


def names_rotary_kind(fields: JsonFields) -> bool:
    return "rope_type" in fields or "type" in fields


def check_heads(fields: JsonFields, config: DecoderConfig) -> None:
    """`fields`: where the configuration was read from, in the names that all families have for these."""
    if config.num_heads % config.num_kv_heads:
        raise fields.refuse(
            "num_attention_heads",
            f"{config.num_heads} is not a multiple of num_key_value_heads {config.num_kv_heads}",
        )
    if config.head_dim % 2:
        raise fields.refuse("head_dim", f"must be even for rotary positions, not {config.head_dim}")
