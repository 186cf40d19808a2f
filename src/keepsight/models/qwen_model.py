"""The base of Qwen's models that take pictures of any size, or sounds: a tower, and a causal decoder.

`qwen_weight_names.py` maps the names of tensors in checkpoints.
"""

from collections.abc import Iterator

from keepsight.models.decoder_config import DecoderConfig
from keepsight.models.layers import Placement, WeightSlot, under
from keepsight.models.qwen_weight_names import canonical_name
from keepsight.models.vision_language_model import Tower, VisionLanguageModel


class QwenModel(VisionLanguageModel):
    canonical_name = staticmethod(canonical_name)
    tower: Tower

    def __init__(self, config: DecoderConfig, patch_size: int, media_width: int, place: Placement) -> None:
        super().__init__(
            config, place, media_width=media_width, patch_size=patch_size, tokens_per_image=0, sees_pictures_whole=False
        )

    def slots(self) -> Iterator[WeightSlot]:
        yield from super().slots()
        yield from under("tower.", self.tower.slots())
