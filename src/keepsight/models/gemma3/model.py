"""Gemma 3: encodes pictures with its tower and projector; the rest is shared with other models.

`weight_names.py` maps the names of tensors in checkpoints.
"""

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Self

from torch import Tensor

from keepsight.models.adapter_weights import AdapterWeights
from keepsight.models.gemma3.config import Gemma3Config
from keepsight.models.gemma3.vision_tower import Projector, VisionTower
from keepsight.models.gemma3.weight_names import canonical_name, is_never_read
from keepsight.models.layers import Placement, WeightSlot, under
from keepsight.models.vision_language_model import VisionLanguageModel


class Gemma3(VisionLanguageModel):
    canonical_name = staticmethod(canonical_name)

    def __init__(self, config: Gemma3Config, place: Placement) -> None:
        text, vision = config.text, config.vision
        super().__init__(
            text,
            place,
            media_width=text.hidden_size,
            patch_size=0 if vision is None else vision.patch_size,
            tokens_per_image=config.tokens_per_image,
            sees_pictures_whole=True,
        )
        self.config = config
        self.tower: VisionTower | None = None
        self.projector: Projector | None = None
        if vision is not None:
            self.tower = VisionTower(vision, place)
            self.projector = Projector(vision, config.tokens_per_image, text.hidden_size, place)

    @classmethod
    def from_checkpoint(cls, directory: Path, place: Placement, room: int | None = None) -> Self:
        return cls(Gemma3Config.from_checkpoint(directory), place).load(directory, room)

    def is_never_read(self, name: str) -> bool:
        return is_never_read(name, self.config)

    def encode_in_parts(self, pixels: Tensor, adapter: AdapterWeights | None = None) -> Generator[None, None, Tensor]:
        patches = yield from super().encode_in_parts(pixels, adapter)
        assert self.projector is not None
        return self.projector(patches)  # type: ignore[no-any-return]

    def slots(self) -> Iterator[WeightSlot]:
        yield from super().slots()
        if self.tower is not None and self.projector is not None:
            yield from under("tower.", self.tower.slots())
            yield from under("projector.", self.projector.slots())
