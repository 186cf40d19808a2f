"""The interface of models to the runner."""

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from keepsight.adapter_folder import AdapterFolder
from keepsight.models.adapter_weights import AdapterWeights
from keepsight.models.attention import Attention, AttentionBatch, LayerCache
from keepsight.models.layers import Placement

# Called after each decoder layer with its index and its output: [tokens, hidden], after the last one [read, hidden].
LayerWatcher = Callable[[int, Tensor], None]


class DeepRows(NamedTuple):
    """Vectors added to rows [first, first + count) of a batch after each of a decoder's first layers (DeepStack)."""

    first: int
    rows: Tensor  # [count, layers, hidden]


class KvHeads(NamedTuple):
    """The shape of a position's keys in one layer, and of its values."""

    num_heads: int
    head_dim: int


class StateShape(NamedTuple):
    """One of the states that recurrent layers keep of a sequence."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The properties of a model needed to allocate its KV pages and to bound its inputs."""

    # Of each layer that stores keys and values.
    kv_heads: tuple[KvHeads, ...]
    vocab_size: int
    # Width of a picture's rows: the token's embedding, those added after layers, or what else a token's row has.
    media_width: int
    # The side of a patch, in pixels; 0 if the model takes no pixels.
    patch_size: int
    # Tokens of any picture; 0 if they depend on its size.
    tokens_per_image: int
    # Whether a picture's tokens see each other in both directions, so that all must be computed in one step.
    sees_pictures_whole: bool
    # The token that stands for each embedding of a picture, if others may be among them; None: all tokens do.
    embedding_token: int | None = None
    # Whether a picture's tokens have rotary times, rows and columns, as in MRopePositions.
    uses_mrope: bool = False
    # Whether a picture is given as the arrays that its checkpoint's own processor made of it, and encoded alone.
    takes_arrays: bool = False
    # Whether layers also read the tokens themselves, so that a prompt cannot be given as embeddings.
    reads_tokens: bool = False
    # What recurrent layers keep of a sequence instead of keys and values; empty if there are none.
    states: tuple[StateShape, ...] = ()
    # Whether a step with longer slices is cut into these, so that its operations depend on them: it is never recorded.
    cuts_steps: bool = False
    # Positions beyond these are meaningless, or change the answers of other requests; None: unlimited.
    max_positions: int | None = None

    @property
    def numbers_per_position(self) -> int:
        """Keys and values of one position in all layers."""
        return sum(2 * heads.num_heads * heads.head_dim for heads in self.kv_heads)

    @property
    def bytes_per_state(self) -> int:
        """What recurrent layers keep of one sequence."""
        return sum(math.prod(each.shape) * each.dtype.itemsize for each in self.states)

    def make_states(self, num_slots: int, device: torch.device) -> list[Tensor]:
        """Return empty states of this many sequences: [slots, ...] for each of `states`."""
        return [torch.zeros(num_slots, *each.shape, dtype=each.dtype, device=device) for each in self.states]

    def furthest(self, position: int) -> int:
        """Return the position, or the last one that exists before it."""
        return position if self.max_positions is None else min(position, self.max_positions - 1)


class Model(Protocol):
    shape: ModelShape
    place: Placement

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def encode_images(self, pixels: Tensor) -> Tensor:
        """Normalized pixels [pictures, height, width, 3] -> embeddings [pictures, tokens, hidden]

        Films, if the model takes them: [moments, frames, height, width, 3]; sounds: [sounds, frames, mels].
        """
        ...

    def encode_in_parts(self, pixels: Tensor, adapter: AdapterWeights | None = None) -> Generator[None, None, Tensor]:
        """Compute the same, suspended at every `yield`; all parts take a small and similar share of the time."""
        ...

    def load_adapter(self, folder: AdapterFolder, max_rank: int) -> AdapterWeights:
        """Load an adapter for use in slices. Raises CheckpointError."""
        ...

    def embed_tokens(self, token_ids: Tensor) -> Tensor:
        """[tokens] -> [tokens, width]: embeddings, and behind them whatever else the decoder reads of tokens."""
        ...

    def compute(
        self,
        embeddings: Tensor,
        attention: Attention,
        caches: Sequence[LayerCache],
        batch: AttentionBatch,
        watch_layer: LayerWatcher | None = None,
        deep: Sequence[DeepRows] = (),
        states: Sequence[Tensor] = (),
    ) -> Tensor:
        """[tokens, width] -> hidden states of the tokens that are read; caches the keys and values of all tokens.

        `states`: [slots, ...] for each of the shape's states; those of the batch's slots are read and overwritten. An
        empty state is all zeros.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, vocabulary]"""
        ...


def count_parameters(model: Model) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
