"""What transformers makes of a case; the class of its image processor is the caller's choice."""

import io
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from keepsight.image_processor_config import Backend, ImageProcessorConfig
from tests.frontend.sample_pictures import BASE, Case

Floats = npt.NDArray[np.float32]


def skip_where_the_reference_is_older() -> None:
    """Than what `convert_to_rgb` has made of pictures since transformers 5.23."""
    import transformers

    if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23):
        pytest.skip(f"transformers {transformers.__version__} treats pictures in another way than 5.23, the reference")


def config_of(case: Case, backend: Backend) -> ImageProcessorConfig:
    return ImageProcessorConfig(**{**BASE, **case.options}, backend=backend)


def reference_pixels(case: Case, processor_class: Any) -> Floats:
    """float32 [1 + crops, 3, height, width], through `load_image` where the case is bytes."""
    from transformers.image_utils import load_image

    config = config_of(case, "pil")
    processor = processor_class(
        size={"height": config.height, "width": config.width},
        resample=config.resample,
        image_mean=list(config.image_mean),
        image_std=list(config.image_std),
        rescale_factor=config.rescale_factor,
    )
    image = load_image(Image.open(io.BytesIO(case.source))) if isinstance(case.source, bytes) else case.source
    output = processor(
        image,
        return_tensors="pt",
        do_convert_rgb=True,
        do_pan_and_scan=config.do_pan_and_scan,
        pan_and_scan_min_crop_size=config.pan_and_scan_min_crop_size,
        pan_and_scan_max_num_crops=config.pan_and_scan_max_num_crops,
        pan_and_scan_min_ratio_to_activate=config.pan_and_scan_min_ratio_to_activate,
    )
    pixels: Floats = output["pixel_values"].numpy()
    return pixels
