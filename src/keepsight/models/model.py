"""What the runner asks of a model, whichever it is."""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from keepsight.models.attention import Attention, AttentionBatch, LayerCache
from keepsight.models.layers import Placement

# Called after each decoder layer, with its number and its output: [tokens, hidden], after the last one [read, hidden].
LayerWatcher = Callable[[int, Tensor], None]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What must be known of a model to feed it: pages for its keys and values, bounds for its inputs."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    # Of one picture; 0 where the model takes none.
    patches_per_image: int
    tokens_per_image: int


class Model(Protocol):
    shape: ModelShape
    place: Placement

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def encode_images(self, pixels: Tensor) -> Tensor:
        """Normalised pixels [pictures, height, width, 3] -> embeddings [pictures, tokens, hidden]"""
        ...

    def encode_in_parts(self, pixels: Tensor) -> Generator[None, None, Tensor]:
        """The same, laid aside at every `yield`: each part takes a small and much the same part of the time."""
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
    ) -> Tensor:
        """[tokens, hidden] -> hidden states of those that are read; keys and values of all stay in the caches."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, vocabulary]"""
        ...


def count_parameters(model: Model) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
