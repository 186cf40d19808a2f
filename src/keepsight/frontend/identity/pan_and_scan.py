"""Which parts of a wide or tall picture are shown to the model beside the whole: arithmetic on its geometry alone.

Equal to the reference for every size, so that prompts can be laid out before any pixel is decoded.
"""

import math

from keepsight.image_processor_config import ImageProcessorConfig
from keepsight.media import CropBox, Geometry


def plan_crops(geometry: Geometry, config: ImageProcessorConfig) -> tuple[CropBox, ...]:
    """The crops in the order in which the prompt names them; none for a picture that is nearly square or too small."""
    if not config.do_pan_and_scan:
        return ()
    width, height = geometry.width, geometry.height
    is_wide = width >= height
    long_side, short_side = (width, height) if is_wide else (height, width)
    if long_side / short_side < config.pan_and_scan_min_ratio_to_activate:
        return ()
    num_crops = _num_crops(long_side, short_side, config)
    # The crops are equally long but for the last, which ends with the picture.
    crop_length = math.ceil(long_side / num_crops)
    if min(crop_length, short_side) < config.pan_and_scan_min_crop_size:
        return ()
    starts = range(0, long_side, crop_length)
    return tuple(
        CropBox(start, 0, min(crop_length, width - start), height)
        if is_wide
        else CropBox(0, start, width, min(crop_length, height - start))
        for start in starts
    )


def _num_crops(long_side: int, short_side: int, config: ImageProcessorConfig) -> int:
    nearest_to_square = math.floor(long_side / short_side + 0.5)
    largest = math.floor(long_side / config.pan_and_scan_min_crop_size)
    return min(config.pan_and_scan_max_num_crops, max(2, min(largest, nearest_to_square)))
