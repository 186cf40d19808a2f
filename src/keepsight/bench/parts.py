"""Measures each step of a picture's processing by itself, next to a plain copy of the bytes that it has to touch.

For the frontend's steps, these are the bytes of a picture that is read or made; for the model's, those of the weights,
on the device that computes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from keepsight.bench.draw import photograph
from keepsight.bench.model_work import ModelWork, median_seconds
from keepsight.checkpoint_folder import check_is_folder
from keepsight.config import Config
from keepsight.errors import CheckpointError
from keepsight.frontend.identity.hash_media import MediaHasher, hash_content
from keepsight.frontend.intake.read_header import read_geometry
from keepsight.frontend.pixels.decode_picture import decode_picture
from keepsight.frontend.pixels.pixel_cache import LocalCache
from keepsight.frontend.pixels.preprocess_image import resize_pixels
from keepsight.image_processor_config import ImageProcessorConfig
from keepsight.media import Geometry
from keepsight.models.model import Model
from keepsight.models.vision_language_model import VisionLanguageModel
from keepsight.processor_config import ProcessorConfig
from keepsight.runner.load_runner import choose_place, load_model_for
from keepsight.runner.normalize_pixels import PixelNormalizer
from keepsight.shown_sizes import check_can_show

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    work: Callable[[], object]
    # The bytes that it must at least read or write.
    num_bytes: int
    device: torch.device = _CPU


@dataclass(frozen=True, slots=True)
class PartCost:
    name: str
    ms: float
    copy_ms: float
    num_bytes: int


@torch.inference_mode()
def measure_parts(config: Config, picture_size: tuple[int, int], runs: int) -> list[PartCost]:
    check_is_folder(config.directory)
    processor = ProcessorConfig.from_checkpoint(config.directory, config.image_backend, {}, config.model_impl)
    if processor is None or not processor.takes_pictures:
        raise CheckpointError(config.directory, "takes no pictures, so there is nothing to measure")
    if processor.borrowed is not None:
        raise CheckpointError(config.directory, "is a borrowed model: transformers processes its pictures")
    geometry, image_config = Geometry(*picture_size), processor.image
    if image_config.sizes is not None:
        check_can_show(geometry, "picture_size")
    jpeg, image_config = photograph(0, *picture_size), image_config.settled_for(geometry)
    parts = [*_frontend_parts(jpeg, image_config), *_model_parts(config, jpeg, image_config)]
    return [_measure(part, runs) for part in parts]


def _measure(part: Part, runs: int) -> PartCost:
    source = torch.zeros(part.num_bytes, dtype=torch.uint8, device=part.device)
    target = torch.zeros_like(source)
    copy = median_seconds(lambda: target.copy_(source), runs, part.device)
    return PartCost(part.name, median_seconds(part.work, runs, part.device) * 1e3, copy * 1e3, part.num_bytes)


def _frontend_parts(jpeg: bytes, config: ImageProcessorConfig) -> Iterator[Part]:
    hasher = MediaHasher("model", config, None, "blake3")

    def identify() -> str:
        geometry = read_geometry(jpeg, "picture")
        return next(hasher.hash_parts(hash_content(jpeg, "blake3"), geometry, [None]))

    rgb = decode_picture(jpeg)
    pixels = resize_pixels(rgb, config)
    cache = LocalCache(2 * pixels.nbytes)
    cache.put(media_hash := identify(), pixels)
    yield Part("identify: header and content's hash", identify, len(jpeg))
    yield Part("decode", lambda: decode_picture(jpeg), rgb.size)
    yield Part("resize", lambda: resize_pixels(rgb, config), pixels.nbytes)
    yield Part("processor cache, hit", lambda: cache.get_and_update(media_hash), pixels.nbytes)


def _model_parts(config: Config, jpeg: bytes, image_config: ImageProcessorConfig) -> Iterator[Part]:
    model = load_model_for(config, choose_place(config))
    place = model.place
    normalize = PixelNormalizer(image_config, place.device, place.dtype)
    pixels = torch.from_numpy(resize_pixels(decode_picture(jpeg), image_config).copy())[None]
    normalized = normalize(pixels.to(place.device))
    [embeddings] = model.encode_images(normalized)
    work = ModelWork(model, len(embeddings))
    encoder, decoder = _weight_bytes(model)
    yield Part("to the device, normalised", lambda: normalize(pixels.to(place.device)), pixels.numel(), place.device)
    yield Part("encode", lambda: model.encode_images(normalized), encoder, place.device)
    yield Part("prefill: a picture and 100 words", work.prefill, decoder, place.device)
    yield Part("decode one token", work.decode, decoder, place.device)


def _weight_bytes(model: Model) -> tuple[int, int]:
    """Return the bytes of the weights before the decoder, and of the decoder."""
    assert isinstance(model, VisionLanguageModel)
    whole, decoder = (sum(weight.nbytes for weight in each.parameters()) for each in (model, model.decoder))
    return whole - decoder, decoder
