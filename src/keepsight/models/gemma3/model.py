"""Gemma 3 as one thing: pictures to embeddings, embeddings to hidden states, hidden states to logits.

`WeightSlot` names are canonical (`tower.`, `projector.`, `decoder.`, `head.`); `weight_names.py` maps what checkpoints
call them.
"""

from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from keepsight.models.attention import Attention, AttentionBatch, LayerCache
from keepsight.models.gemma3.config import Gemma3Config
from keepsight.models.gemma3.decoder import Decoder
from keepsight.models.gemma3.vision_tower import Projector, VisionTower
from keepsight.models.gemma3.weight_names import canonical_name, copies_of, is_never_read
from keepsight.models.layers import Linear, Placement, WeightSlot, run_to_end, under
from keepsight.models.load_weights import load_weights
from keepsight.models.model import LayerWatcher, ModelShape


class Gemma3(nn.Module):
    def __init__(self, config: Gemma3Config, place: Placement) -> None:
        super().__init__()
        self.config, self.place, self.shape = config, place, _shape_of(config)
        text, vision = config.text, config.vision
        self.decoder = Decoder(text, place)
        self.head: Linear | None = None
        if not text.tie_word_embeddings:
            self.head = Linear(place, text.hidden_size, {"lm_head": text.vocab_size}, bias=False)
        self.tower: VisionTower | None = None
        self.projector: Projector | None = None
        if vision is not None:
            self.tower = VisionTower(vision, place)
            self.projector = Projector(vision, config.tokens_per_image, text.hidden_size, place)

    @classmethod
    def from_checkpoint(cls, directory: Path, place: Placement, room: int | None = None) -> Self:
        """`room`: bytes of memory that the weights may take."""
        config = Gemma3Config.from_checkpoint(directory)
        model = cls(config, place)
        load_weights(
            directory, model.slots(), canonical_name, lambda name: is_never_read(name, config), copies_of(config), room
        )
        model.pack()
        return model

    def pack(self) -> None:
        for part in self.modules():
            if isinstance(part, Linear):
                part.pack()
        self.decoder.pack()

    def encode_images(self, pixels: Tensor) -> Tensor:
        return run_to_end(self.encode_in_parts(pixels))

    def encode_in_parts(self, pixels: Tensor) -> Generator[None, None, Tensor]:
        assert self.tower is not None, "a text-only model was given pictures"
        assert self.projector is not None
        patches = yield from self.tower.in_parts(pixels)
        return self.projector(patches)  # type: ignore[no-any-return]

    def embed_tokens(self, token_ids: Tensor) -> Tensor:
        # The published picture token lies outside the embedding table of some text-only conversions.
        return self.decoder.embed(token_ids.clamp(max=self.config.text.vocab_size - 1))

    def compute(
        self,
        embeddings: Tensor,
        attention: Attention,
        caches: Sequence[LayerCache],
        batch: AttentionBatch,
        watch_layer: LayerWatcher | None = None,
    ) -> Tensor:
        return self.decoder(embeddings, attention, caches, batch, watch_layer)  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        logits = (self.head or self.decoder.embedding)(hidden)
        cap = self.config.text.final_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def slots(self) -> Iterator[WeightSlot]:
        yield from under("decoder.", self.decoder.slots())
        if self.head is not None:
            yield from self.head.slots()
        if self.tower is not None and self.projector is not None:
            yield from under("tower.", self.tower.slots())
            yield from under("projector.", self.projector.slots())


def _shape_of(config: Gemma3Config) -> ModelShape:
    text, vision = config.text, config.vision
    return ModelShape(
        num_layers=len(text.layers),
        num_kv_heads=text.num_kv_heads,
        head_dim=text.head_dim,
        vocab_size=text.vocab_size,
        patches_per_image=0 if vision is None else vision.patches_per_side**2,
        tokens_per_image=config.tokens_per_image,
    )
