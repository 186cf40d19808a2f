"""Qwen3.5: the tower of Qwen3-VL, and a decoder with recurrent layers that transformers' modules compute."""

import itertools
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from torch import Tensor, nn

from keepsight.adapter_folder import AdapterFolder
from keepsight.json_fields import JsonFields
from keepsight.models.adapter_weights import AdapterWeights, adapt, choose_tower
from keepsight.models.borrowed.adapted_products import AdaptableProduct
from keepsight.models.borrowed.model import BorrowedModel
from keepsight.models.layers import Linear, Placement, under
from keepsight.models.load_adapter import load_adapter
from keepsight.models.load_weights import load_weights
from keepsight.models.qwen3_vl.config import read_vision
from keepsight.models.qwen3_vl.vision_tower import VisionTower
from keepsight.models.qwen_config import check_out_size
from keepsight.models.qwen_weight_names import canonical_name

_TOWER = "tower."
_ADAPTABLE = "linear layers of the tower, and those of the decoder that are no experts,"


class Qwen35(BorrowedModel):
    tower: VisionTower

    @classmethod
    def of_modules(cls, modules: Any, directory: Path, place: Placement) -> Self:
        fields = JsonFields.read(directory / "config.json")
        vision = read_vision(fields.section("vision_config"), deep_layers=())
        check_out_size(fields, vision.out_size, modules.get_input_embeddings().embedding_dim)
        del modules.base_model.visual
        model = super().of_modules(modules, directory, place)
        model.tower = _load_tower(VisionTower(vision, place), directory)
        model.shape = replace(model.shape, patch_size=vision.patch_size, takes_arrays=False, embedding_token=None)
        return model

    def parameters(self) -> Iterator[nn.Parameter]:
        return itertools.chain(super().parameters(), self.tower.parameters())

    def encode_in_parts(self, pixels: Tensor, adapter: AdapterWeights | None = None) -> Generator[None, None, Tensor]:
        return (yield from choose_tower(self.tower, adapter).in_parts(pixels))

    def load_adapter(self, folder: AdapterFolder, max_rank: int) -> AdapterWeights:
        outputs = {each.name: each.output for each in under(_TOWER, self.tower.slots()) if each.output}

        def find(module: str) -> tuple[Linear | AdaptableProduct, str] | None:
            return self.products.find(module) or outputs.get(canonical_name(f"{module}.weight"))

        added = load_adapter(folder, max_rank, find, self.place, _ADAPTABLE)
        of_tower = {product: term for product, term in added.items() if isinstance(product, Linear)}
        of_decoder = {product: term for product, term in added.items() if isinstance(product, AdaptableProduct)}
        tower = adapt(self.tower, of_tower)
        return AdapterWeights([self.products.add(of_decoder)], None if tower is self.tower else tower)


def _load_tower(tower: VisionTower, directory: Path) -> VisionTower:
    def is_never_read(name: str) -> bool:
        return not name.startswith(_TOWER)

    load_weights(directory, under(_TOWER, tower.slots()), canonical_name, is_never_read, {}, None)
    for part in tower.modules():
        if isinstance(part, Linear):
            part.pack()
    return tower
