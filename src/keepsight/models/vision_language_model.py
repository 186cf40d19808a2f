"""The base of models of pictures and text: computes hidden states and logits, and loads weights and adapters.

`WeightSlot` names are canonical (`decoder.`, `lm_head.`, and those of a family's tower); each family maps the names in
its checkpoints to them.
"""

from abc import abstractmethod
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Protocol, Self, cast

import torch
from torch import Tensor, nn

from keepsight.adapter_folder import AdapterFolder
from keepsight.models.adapter_weights import AdapterWeights, adapt, choose_tower
from keepsight.models.attention import Attention, AttentionBatch, LayerCache
from keepsight.models.decoder import Decoder
from keepsight.models.decoder_config import DecoderConfig
from keepsight.models.layers import Linear, Output, Placement, WeightSlot, run_to_end, under
from keepsight.models.load_adapter import load_adapter
from keepsight.models.load_weights import load_weights
from keepsight.models.mixture import Mixture
from keepsight.models.model import DeepRows, KvHeads, LayerWatcher, ModelShape

_ADAPTABLE = (
    "matrices of attention and of feed-forwards without experts, and linear layers of the tower and of what connects "
    "it,"
)


class Tower(Protocol):
    def in_parts(self, pixels: Tensor) -> Generator[None, None, Tensor]:
        """[pictures, height, width, 3], or of sounds [sounds, frames, mels] -> [pictures, tokens, media width]"""
        ...

    def slots(self) -> Iterator[WeightSlot]: ...

    def modules(self) -> Iterator[nn.Module]: ...


class VisionLanguageModel(nn.Module):
    # None if the model is text-only.
    tower: Tower | None

    def __init__(
        self,
        config: DecoderConfig,
        place: Placement,
        *,
        media_width: int,
        patch_size: int,
        tokens_per_image: int,
        sees_pictures_whole: bool,
    ) -> None:
        super().__init__()
        self.place = place
        self.shape = ModelShape(
            kv_heads=(KvHeads(config.num_kv_heads, config.head_dim),) * len(config.layers),
            vocab_size=config.vocab_size,
            media_width=media_width,
            patch_size=patch_size,
            tokens_per_image=tokens_per_image,
            sees_pictures_whole=sees_pictures_whole,
            uses_mrope=any(layer.rotary.by_row_and_column for layer in config.layers),
        )
        self.decoder = Decoder(config, place.for_decoder())
        self.head: Linear | None = None
        if not config.tie_word_embeddings:
            self.head = Linear(place.for_decoder(), config.hidden_size, {"lm_head": config.vocab_size}, bias=False)

    @staticmethod
    @abstractmethod
    def canonical_name(name: str) -> str:
        """Return the canonical name of a tensor, from its name in a checkpoint."""

    def is_never_read(self, _name: str) -> bool:
        """Return whether a tensor (by its canonical name) of complete checkpoints is unused by the model."""
        return False

    def load(self, directory: Path, room: int | None) -> Self:
        """Load and pack the weights. `room`: bytes of memory that they may take."""
        copies = {"lm_head.weight": "decoder.embed_tokens.weight"} if self.head is None else {}
        load_weights(directory, self.slots(), self.canonical_name, self.is_never_read, copies, room)
        self.pack()
        return self

    def load_adapter(self, folder: AdapterFolder, max_rank: int) -> AdapterWeights:
        outputs = self._adaptable_outputs()

        def find(module: str) -> Output | None:
            return outputs.get(self.canonical_name(f"{module}.weight"))

        added = load_adapter(folder, max_rank, find, self.place, _ADAPTABLE)
        layers = self.decoder.products()
        tower = cast("nn.Module | None", self.tower)
        adapted = None if tower is None else adapt(tower, added)
        return AdapterWeights(
            [{name: added[each] for name, each in layer.items() if each in added} for layer in layers],
            None if adapted is tower else adapted,
        )

    def _adaptable_outputs(self) -> dict[str, Output]:
        """Outputs by canonical weight name: all of the tower's, and the decoder's except its experts."""
        products: set[nn.Module] = {product for layer in self.decoder.products() for product in layer.values()}
        if self.tower is not None:
            products.update(self.tower.modules())
        return {each.name: each.output for each in self.slots() if each.output and each.output.product in products}

    def pack(self) -> None:
        for part in self.modules():
            if isinstance(part, Linear | Mixture):
                part.pack()
        self.decoder.pack()

    def encode_images(self, pixels: Tensor, adapter: AdapterWeights | None = None) -> Tensor:
        return run_to_end(self.encode_in_parts(pixels, adapter))

    def encode_in_parts(self, pixels: Tensor, adapter: AdapterWeights | None = None) -> Generator[None, None, Tensor]:
        assert self.tower is not None, "a text-only model was given pictures"
        return (yield from choose_tower(self.tower, adapter).in_parts(pixels))

    def embed_tokens(self, token_ids: Tensor) -> Tensor:
        # The published picture token lies outside the embedding table of some text-only conversions.
        return self.decoder.embed(token_ids.clamp(max=self.shape.vocab_size - 1))

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
        assert not states, "it has no recurrent layers"
        return self.decoder(embeddings, attention, caches, batch, watch_layer, deep)  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        logits = (self.head or self.decoder.embedding)(hidden)
        cap = self.decoder.config.final_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def slots(self) -> Iterator[WeightSlot]:
        yield from under("decoder.", self.decoder.slots())
        if self.head is not None:
            yield from self.head.slots()
