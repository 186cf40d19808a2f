"""What models of Qwen share that take pictures of any size, or sounds: a tower, and a decoder that sees only what is
before.

`qwen_weight_names.py` maps what checkpoints call their tensors.
"""

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Protocol

from torch import Tensor

from keepsight.models.decoder_config import DecoderConfig
from keepsight.models.layers import Placement, WeightSlot, under
from keepsight.models.qwen_weight_names import canonical_name
from keepsight.models.vision_language_model import VisionLanguageModel, shape_of


class Tower(Protocol):
    def in_parts(self, pixels: Tensor) -> Generator[None, None, Tensor]:
        """[pictures, height, width, 3] -> [pictures, tokens, media width]

        Of sounds: [sounds, frames, mels].
        """
        ...

    def slots(self) -> Iterator[WeightSlot]: ...


class QwenModel(VisionLanguageModel):
    tower: Tower

    def __init__(self, config: DecoderConfig, patch_size: int, media_width: int, place: Placement) -> None:
        shape = shape_of(
            config,
            media_width=media_width,
            patch_size=patch_size,
            tokens_per_image=0,
            sees_pictures_whole=False,
        )
        super().__init__(config, shape, place)

    def load_from(self, directory: Path, room: int | None) -> None:
        self.load(directory, canonical_name, lambda _name: False, room)

    def encode_in_parts(self, pixels: Tensor) -> Generator[None, None, Tensor]:
        return (yield from self.tower.in_parts(pixels))

    def slots(self) -> Iterator[WeightSlot]:
        yield from super().slots()
        yield from under("tower.", self.tower.slots())
