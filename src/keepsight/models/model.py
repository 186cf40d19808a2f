"""What the runner asks of a model, whichever it is."""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor, nn

from keepsight.adapter_folder import AdapterFolder
from keepsight.models.adapter_weights import AdapterWeights
from keepsight.models.attention import Attention, AttentionBatch, LayerCache
from keepsight.models.layers import Placement

# Called after each decoder layer, with its number and its output: [tokens, hidden], after the last one [read, hidden].
LayerWatcher = Callable[[int, Tensor], None]


class DeepRows(NamedTuple):
    """What is added to rows [first, first + count) of a batch behind each of a decoder's first layers."""

    first: int
    rows: Tensor  # [count, layers, hidden]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What must be known of a model to feed it: pages for its keys and values, bounds for its inputs."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    # Of a picture's embedding, in numbers: what stands for the token's own, and what is added behind layers.
    media_width: int
    # The side of a patch, in pixels; 0 where the model takes no pixels.
    patch_size: int
    # Of any picture; 0 where that follows from its size.
    tokens_per_image: int
    # Whether a picture's tokens see each other in both directions, so that all of them are computed at once.
    sees_pictures_whole: bool
    # Whether a picture's tokens stand at times, rows and columns, as RotaryPlaces has them.
    turns_by_rows: bool = False
    # Whether a picture comes as the arrays that another processor than ours made of it, and is encoded alone.
    takes_arrays: bool = False
    # What stands beyond them has no meaning, or changes others' answers; None: there is no such end.
    max_positions: int | None = None

    def furthest(self, position: int) -> int:
        """It, or the last that there is before it."""
        return position if self.max_positions is None else min(position, self.max_positions - 1)


class Model(Protocol):
    shape: ModelShape
    place: Placement

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def encode_images(self, pixels: Tensor) -> Tensor:
        """Normalised pixels [pictures, height, width, 3] -> embeddings [pictures, tokens, hidden]

        Of films, where the model takes them: [moments, frames, height, width, 3]; of sounds: [sounds, frames, mels].
        """
        ...

    def encode_in_parts(self, pixels: Tensor, adapter: AdapterWeights | None = None) -> Generator[None, None, Tensor]:
        """The same, laid aside at every `yield`: each part takes a small and much the same part of the time."""
        ...

    def load_adapter(self, folder: AdapterFolder, max_rank: int) -> AdapterWeights:
        """For slices that are to be computed with it.  Raises CheckpointError."""
        ...

    def embed_tokens(self, token_ids: Tensor) -> Tensor:
        """[tokens] -> [tokens, hidden]"""
        ...

    def compute(
        self,
        embeddings: Tensor,
        attention: Attention,
        caches: Sequence[LayerCache],
        batch: AttentionBatch,
        watch_layer: LayerWatcher | None = None,
        deep: Sequence[DeepRows] = (),
    ) -> Tensor:
        """[tokens, hidden] -> hidden states of those that are read; keys and values of all stay in the caches."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, vocabulary]"""
        ...


def count_parameters(model: Model) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
