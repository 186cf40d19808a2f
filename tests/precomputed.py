"""Embeddings of drawn pictures as a client would compute them, and the file formats for sending them."""

import base64
import io
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from keepsight.config import Config
from keepsight.frontend.prepare_request import RequestPreparer
from keepsight.frontend.prompt.read_messages import PicturePart
from keepsight.models.layers import Placement
from keepsight.models.registry import load_model
from keepsight.runner.normalize_pixels import PixelNormalizer

Values = npt.NDArray[np.floating[Any]]


def embed(*pictures: Image.Image) -> list[Values]:
    """Return float32 [tokens, hidden] per picture, from the demo's own tower and projector."""
    config = Config(device="cpu")
    preparer = RequestPreparer.from_config(config)
    place = Placement(torch.device("cpu"), torch.float32)
    model = load_model(config.directory, place)
    assert preparer.processor is not None
    normalizer = PixelNormalizer(preparer.processor.image, place.device, place.dtype)
    named = [each for picture in pictures for each in preparer.name_media(PicturePart(picture, "picture"), None)]
    pixels = [next(iter(each.job(tuple(each.parts)).run().pixels.values())) for each in named]
    preparer.close()
    with torch.inference_mode():
        return list(model.encode_images(normalizer(torch.from_numpy(np.stack(pixels)))).numpy())


def embed_tokens(token_ids: Sequence[int]) -> Values:
    """Return [tokens, hidden], as the demo's decoder reads them."""
    model = load_model(Config(device="cpu").directory, Placement(torch.device("cpu"), torch.float32))
    with torch.inference_mode():
        return np.array(model.embed_tokens(torch.tensor(token_ids)))


def to_npy(values: npt.NDArray[Any], **options: Any) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, values, **options)
    return buffer.getvalue()


def to_safetensors(*tensors: tuple[str, list[int], bytes], metadata: dict[str, str] | None = None) -> bytes:
    """Write a safetensors file; each tensor is given as dtype, shape and bytes."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    begin = 0
    for index, (dtype, shape, content) in enumerate(tensors):
        end = begin + len(content)
        header[f"t{index}"] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        begin = end
    encoded = json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + b"".join(content for _, _, content in tensors)


def by_embeds(source: object) -> dict[str, Any]:
    """Return the content part for embeddings: a file's bytes base64-encoded, any other object as it is."""
    return {"type": "image_embeds", "image_embeds": to_text(source) if isinstance(source, bytes) else source}


def to_text(content: bytes) -> str:
    return base64.b64encode(content).decode()
