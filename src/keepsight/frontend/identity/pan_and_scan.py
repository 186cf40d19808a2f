"""Plans which crops of a wide or tall picture are shown to the model beside the whole, from its geometry alone.

Equal to the reference for every size, so that prompts can be laid out before any pixel is decoded.
"""

import math

from keepsight.image_processor_config import ImageProcessorConfig
from keepsight.media import CropBox, Geometry


def count_crops(geometry: Geometry, config: ImageProcessorConfig) -> int:
    """Return the number of crops of `plan_crops`, which may be millions if a request sets their minimum size."""
    return len(_starts(geometry, config))


def plan_crops(geometry: Geometry, config: ImageProcessorConfig) -> tuple[CropBox, ...]:
    """Return the crops in the order of the prompt; none for a picture that is nearly square or too small."""
    width, height = geometry.width, geometry.height
    starts = _starts(geometry, config)
    return tuple(
        CropBox(start, 0, min(starts.step, width - start), height)
        if width >= height
        else CropBox(0, start, width, min(starts.step, height - start))
        for start in starts
    )


def _starts(geometry: Geometry, config: ImageProcessorConfig) -> range:
    """Return where crops begin on the longer side; all are equally long but the last, which ends with the picture."""
    if not config.do_pan_and_scan:
        return range(0)
    short_side, long_side = sorted((geometry.width, geometry.height))
    if long_side / short_side < config.pan_and_scan_min_ratio_to_activate:
        return range(0)
    crop_length = math.ceil(long_side / _num_crops(long_side, short_side, config))
    if min(crop_length, short_side) < config.pan_and_scan_min_crop_size:
        return range(0)
    return range(0, long_side, crop_length)


def _num_crops(long_side: int, short_side: int, config: ImageProcessorConfig) -> int:
    nearest_to_square = math.floor(long_side / short_side + 0.5)
    largest = math.floor(long_side / config.pan_and_scan_min_crop_size)
    return min(config.pan_and_scan_max_num_crops, max(2, min(largest, nearest_to_square)))
