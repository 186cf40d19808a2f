"""One picture's work: decoded once, and made into the pixels of each of its parts that is wanted.

Knows nothing of requests, threads or processes: a job is a value, and whoever has one may run it.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from keepsight.frontend.intake.open_picture import PictureSource
from keepsight.frontend.intake.read_embeds import Embeds
from keepsight.frontend.pixels.decode_picture import decode_picture
from keepsight.image_processor_config import ImageProcessorConfig
from keepsight.media import DEFAULT_MAX_PIXELS, CropBox
from keepsight.pixels import carry_embeddings
from keepsight.requests import Pixels


@dataclass(frozen=True, slots=True)
class Made:
    # By media hash.
    pixels: dict[str, Pixels]
    # Of decoding and of resizing, as whoever did it says.
    seconds: tuple[float, float]


@dataclass(frozen=True, slots=True)
class PictureJob:
    source: PictureSource | Embeds
    # What the caller calls the picture.
    field: str
    # By media hash; None is the whole.
    parts: Mapping[str, CropBox | None]
    config: ImageProcessorConfig
    max_pixels: int = DEFAULT_MAX_PIXELS

    def run(self) -> Made:
        """Raises PictureError if the picture cannot be decoded."""
        if isinstance(self.source, Embeds):
            began = time.perf_counter()
            carried = dict.fromkeys(self.parts, carry_embeddings(self.source.values))
            return Made(carried, (time.perf_counter() - began, 0.0))
        # Imported when needed: a frontend that leaves this to other processes does without torch.
        from keepsight.frontend.pixels.preprocess_image import preprocess_image

        began = time.perf_counter()
        rgb = decode_picture(self.source, self.field, self.max_pixels)
        decoded = time.perf_counter()
        made = preprocess_image(rgb, tuple(self.parts.values()), self.config)
        return Made(dict(zip(self.parts, made, strict=True)), (decoded - began, time.perf_counter() - decoded))


MakePixels = Callable[[PictureJob], Made]
