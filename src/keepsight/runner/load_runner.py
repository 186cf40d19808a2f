"""From a configuration to a runner that is ready: where to compute, in which precision, with which model."""

import logging
import os
from pathlib import Path

import torch

from keepsight.config import Config
from keepsight.errors import InvalidArgumentError
from keepsight.image_processor_config import ImageProcessorConfig
from keepsight.models.layers import Placement
from keepsight.models.model import Model
from keepsight.models.registry import load_model
from keepsight.runner.model_runner import ModelRunner
from keepsight.runner.normalize_pixels import PixelNormalizer

logger = logging.getLogger(__name__)
# Below this a product is over before a second thread has begun; on a busy machine waiting for one costs a hundredfold.
MIN_PARAMETERS_TO_SHARE = 8_000_000
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_runner(
    config: Config, image_config: ImageProcessorConfig | None, end_ids: frozenset[int], max_model_len: int
) -> ModelRunner:
    place = choose_place(config)
    model = load_model(Path(config.directory), place)
    _limit_threads(model)
    normalizer = None
    if image_config is not None and model.shape.tokens_per_image:
        normalizer = PixelNormalizer(image_config, place.device, place.dtype)
    return ModelRunner(model, normalizer, end_ids, max_model_len)


def choose_place(config: Config) -> Placement:
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise InvalidArgumentError("device", "cuda was asked for, but torch sees no CUDA device on this machine")
    device = config.device if config.device != "auto" else ("cuda" if has_cuda else "cpu")
    # Without instructions of its own a CPU computes bfloat16 at a third of float32's speed.
    dtype = config.dtype if config.dtype != "auto" else ("bfloat16" if device == "cuda" else "float32")
    logger.info(
        "computing on %s in %s (device=%s, dtype=%s, CUDA %s)",
        device, dtype, config.device, config.dtype, "present" if has_cuda else "absent",
    )  # fmt: skip
    return Placement(torch.device(device), _DTYPES[dtype])


def _limit_threads(model: Model) -> None:
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if num_parameters < MIN_PARAMETERS_TO_SHARE and "OMP_NUM_THREADS" not in os.environ:
        logger.info("computing on one thread: %d parameters are too few to share", num_parameters)
        torch.set_num_threads(1)
