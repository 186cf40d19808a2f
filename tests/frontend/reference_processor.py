"""Runs a case through transformers; the caller chooses the classes of its image processors."""

import dataclasses
import io
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from keepsight.image_processor_config import Backend, ImageProcessorConfig
from tests.frontend.sample_films import FilmCase
from tests.frontend.sample_pictures import BASE, Case

Floats = npt.NDArray[np.float32]
# The configuration that Qwen publishes with Qwen3-VL.
PUBLISHED_FOR_FILMS: dict[str, Any] = {
    "size": {"longest_edge": 25_165_824, "shortest_edge": 4096},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def skip_where_the_reference_is_older() -> None:
    """Skip the test if transformers is older than 5.23, which changed `convert_to_rgb`."""
    import transformers

    if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23):
        pytest.skip(f"transformers {transformers.__version__} treats pictures in another way than 5.23, the reference")


def config_of(case: Case, backend: Backend) -> ImageProcessorConfig:
    return ImageProcessorConfig(**{**BASE, **case.options}, backend=backend)


def reference_pixels(case: Case, gemma_class: Any, qwen_class: Any) -> Floats:
    """Return float32 [1 + crops, 3, height, width], or [patches, values] for Qwen; bytes are read by `load_image`."""
    from transformers.image_utils import load_image

    config = config_of(case, "pil")
    processor_class, options = (
        (gemma_class, _options_of_gemma) if config.sizes is None else (qwen_class, _options_of_qwen)
    )
    processor = processor_class(
        resample=config.resample,
        image_mean=list(config.image_mean),
        image_std=list(config.image_std),
        rescale_factor=config.rescale_factor,
        do_convert_rgb=True,
    )
    image = load_image(Image.open(io.BytesIO(case.source))) if isinstance(case.source, bytes) else case.source
    pixels: Floats = processor(image, return_tensors="pt", **options(config))["pixel_values"].numpy()
    return pixels


def _options_of_gemma(config: ImageProcessorConfig) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(config) if "pan_and_scan" in field.name]
    size = {"height": config.height, "width": config.width}
    return {"size": size, "do_convert_rgb": True, **{name: getattr(config, name) for name in names}}


def _options_of_qwen(config: ImageProcessorConfig) -> dict[str, Any]:
    assert config.sizes is not None
    size = {"shortest_edge": config.sizes.min_pixels, "longest_edge": config.sizes.max_pixels}
    return {"size": size, "patch_size": config.sizes.patch_size, "merge_size": config.sizes.merge_size}


def reference_film(case: FilmCase, processor_class: Any) -> Floats:
    """Return float32 [patches, values]; bytes are read by transformers' PyAV reader."""
    from transformers import video_utils

    read_video_pyav: Any = video_utils.read_video_pyav
    processor = processor_class(**{**PUBLISHED_FOR_FILMS, "cap_pixels_per_frame": False, **case.options})
    frames = case.source
    if is_file := isinstance(frames, bytes):
        frames, _ = read_video_pyav(io.BytesIO(frames), processor.sample_frames)
    metadata = {"total_num_frames": len(frames), "fps": 24}
    made = processor([frames], video_metadata=[metadata], do_sample_frames=not is_file, return_tensors="pt")
    pixels: Floats = made["pixel_values_videos"].numpy()
    return pixels
