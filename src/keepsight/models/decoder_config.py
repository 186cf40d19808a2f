"""The configuration of a decoder as frozen values, which each family reads from its own `config.json`."""

from dataclasses import dataclass

from keepsight.json_fields import JsonFields


@dataclass(frozen=True, slots=True)
class RotaryConfig:
    theta: float
    # Positions are divided by this ("linear" scaling): how the larger models reach their long contexts.
    scaling_factor: float = 1.0
    # Indices of the frequencies (the first is the fastest) that rotate by a token's row and by its column in a picture.
    # The others, and all in text, rotate by the token's time. None: all rotate by time.
    by_row_and_column: tuple[range, range] | None = None


@dataclass(frozen=True, slots=True)
class MixtureConfig:
    """A feed-forward of many experts, a few of which are used for each token."""

    num_experts: int
    num_chosen: int
    # Size of one expert.
    intermediate_size: int


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """The settings that differ from one decoder layer to the next."""

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
    # Factor applied to token embeddings.
    embedding_scale: float = 1.0
    # Whether queries and keys are normalized before rotation.
    norms_heads: bool = True
    # Whether the outputs of attention and feed-forward are normalized before they are added.
    norms_results: bool = False
    # Whether a norm's scale is 1 + weight.
    norms_add_one: bool = False
    attention_softcap: float | None = None
    final_softcap: float | None = None


def read_rotary_kind(fields: JsonFields, kinds: tuple[str, ...]) -> str:
    """Return the rotary kind, from the field of newer files or of older ones."""
    return fields.choice("rope_type" if "rope_type" in fields else "type", kinds, "default")


def names_rotary_kind(fields: JsonFields) -> bool:
    return "rope_type" in fields or "type" in fields


def check_heads(fields: JsonFields, config: DecoderConfig) -> None:
    """Check the numbers of heads. `fields`: the source of the configuration; all families use the same names."""
    if config.num_heads % config.num_kv_heads:
        raise fields.refuse(
            "num_attention_heads", f"{config.num_heads} is not a multiple of num_key_value_heads {config.num_kv_heads}"
        )
    if config.head_dim % 2:
        raise fields.refuse("head_dim", f"must be even for rotary positions, not {config.head_dim}")
