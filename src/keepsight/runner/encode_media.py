"""Pictures to embeddings: normalise on the device, run the encoder, a bounded number of pictures at a time."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from keepsight.models.model import Model
from keepsight.requests import Pixels
from keepsight.runner.normalize_pixels import PixelNormalizer

# Four pictures of the published models: enough to fill a machine, little enough memory to forget about.
MAX_PATCHES_PER_RUN = 16_384


def encode_media(model: Model, normalizer: PixelNormalizer, pixels: Sequence[Pixels]) -> list[Tensor]:
    """One [tokens, hidden] for each picture."""
    pictures_per_run = max(1, MAX_PATCHES_PER_RUN // model.shape.patches_per_image)
    embeddings: list[Tensor] = []
    for first in range(0, len(pixels), pictures_per_run):
        batch = torch.from_numpy(np.stack(pixels[first : first + pictures_per_run])).to(model.place.device)
        embeddings.extend(model.encode_images(normalizer(batch)))
    return embeddings
