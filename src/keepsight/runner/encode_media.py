"""Encodes media items into embeddings, as jobs that can be suspended between their parts.

Items of one shape are encoded together, a bounded number at a time, with the adapter that changes them, if any;
pictures prepared by a processor other than ours are encoded one by one. A fault of one item fails its key only.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from keepsight.media import ENCODED, Modality, frames_of
from keepsight.models.adapter_weights import AdapterWeights
from keepsight.models.model import Model
from keepsight.pixels import carried_embeddings, shape_of, show_a_picture
from keepsight.requests import Pixels
from keepsight.runner.encoder_output_store import EncoderOutputStore
from keepsight.scheduling.step_plan import Encoding, StepResult
from keepsight.sound_config import num_places

# One picture of the published models keeps a CPU busy; four keep a GPU busy and take a negligible part of its memory.
MAX_PATCHES_TOGETHER = {"cpu": 4096, "cuda": 16_384}
# Turns the pixels of items of one shape, as they are carried, into the encoder's input on the model's device.
Normalizer = Callable[[Tensor], Tensor]


def group_encodings(
    encodings: Sequence[Encoding], held: Mapping[str, Pixels], model: Model
) -> Iterator[tuple[Encoding, ...]]:
    """Yield batches of equal shape and one adapter, in the order in which they were asked for.

    An item without pixels gets a batch of its own.
    """
    by_shape: dict[object, list[Encoding]] = {}
    for each in encodings:
        pixels = held.get(each.media_hash)
        shape = each.encoder_key if pixels is None else (each.modality, pixels.shape, each.adapter)
        by_shape.setdefault(shape, []).append(each)
    for group in by_shape.values():
        together = _num_together(held.get(group[0].media_hash), group[0].modality, model)
        yield from (tuple(group[first : first + together]) for first in range(0, len(group), together))


def _num_together(pixels: Pixels | None, modality: Modality, model: Model) -> int:
    if pixels is None or model.shape.takes_arrays:
        return 1
    return max(1, MAX_PATCHES_TOGETHER[model.place.device.type] // _num_rows(pixels, modality, model))


def _num_rows(pixels: Pixels, modality: Modality, model: Model) -> int:
    """Return the number of rows to encode for an item: patches, places of a sound, or embeddings."""
    height, width, _ = shape_of(pixels)
    if modality == "audio":
        return num_places(height)
    side = model.shape.patch_size
    return (height // frames_of(modality) // side) * (width // side) if show_a_picture(pixels) else height


def encode_media(
    model: Model,
    normalizer: Normalizer | None,
    pixels: Sequence[Pixels],
    modality: Modality,
    adapter: AdapterWeights | None,
) -> Generator[None, None, Tensor]:
    """Encode pixels of one shape -> [pictures, tokens, hidden]"""
    if modality not in ENCODED:  # the client sent embeddings, as the projector or the token table would give them
        embeddings = torch.from_numpy(carried_embeddings(np.stack(pixels)))
        # Padded with zeros where pictures' embeddings are wider: these have no part that is added behind layers.
        missing = max(0, model.shape.media_width - embeddings.shape[-1])
        return F.pad(embeddings, (0, missing)).to(model.place.device, model.place.dtype)
    assert normalizer is not None, "a model that takes no media was given some"
    batch = normalizer(torch.from_numpy(np.stack(pixels)))
    if (frames := frames_of(modality)) > 1:
        num_items, height, width, _ = batch.shape
        batch = batch.view(num_items, frames, height // frames, width, 3)
    return (yield from model.encode_in_parts(batch, adapter))


def keep_embeddings(encodings: Sequence[Encoding], embeddings: Tensor, store: EncoderOutputStore) -> StepResult:
    """Store `embeddings` [pictures, tokens, hidden] under their keys; those that do not fill their spans fail."""
    encoded, failed = [], {}
    for encoding, own in zip(encodings, embeddings, strict=True):
        if len(own) == encoding.num_tokens:
            store.put(encoding.encoder_key, own)
            encoded.append(encoding.encoder_key)
        else:
            failed[encoding.encoder_key] = f"the encoder made {len(own)} embeddings for {encoding.num_tokens} tokens"
    return StepResult(encoded=encoded, failed_encodings=failed)
