"""Compares the crops of every size with the arrays that transformers cuts out."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepsight.frontend.identity.pan_and_scan import count_crops, plan_crops
from keepsight.image_processor_config import ImageProcessorConfig
from keepsight.media import CropBox, Geometry


@pytest.fixture(scope="session")
def reference() -> Any:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    return Gemma3ImageProcessorPil()


def crops_of_reference(reference: Any, geometry: Geometry, config: ImageProcessorConfig) -> tuple[CropBox, ...]:
    """Find the reference's crops by cropping two broadcast arrays of each pixel's row and column."""
    shape = (geometry.height, geometry.width)
    rows = np.broadcast_to(np.arange(geometry.height)[:, None], shape)
    columns = np.broadcast_to(np.arange(geometry.width)[None, :], shape)
    options = (
        config.pan_and_scan_min_crop_size,
        config.pan_and_scan_max_num_crops,
        config.pan_and_scan_min_ratio_to_activate,
    )
    cut_rows, cut_columns = (reference.pan_and_scan(numbers[None], *options) for numbers in (rows, columns))
    # The reference cannot resize an empty crop: it fails on the picture. We leave the crop out.
    return tuple(
        CropBox(int(xs[0, 0, 0]), int(ys[0, 0, 0]), xs.shape[2], xs.shape[1])
        for ys, xs in zip(cut_rows, cut_columns, strict=True)
        if xs.size
    )


sides = st.integers(1, 30_000) | st.integers(1, 40)
configs = st.builds(
    ImageProcessorConfig,
    do_pan_and_scan=st.just(True),
    pan_and_scan_min_crop_size=st.integers(1, 400) | st.just(256),
    pan_and_scan_max_num_crops=st.integers(1, 9),
    pan_and_scan_min_ratio_to_activate=st.floats(0.1, 4) | st.just(1.2),
)


@settings(max_examples=250)
@given(width=sides, height=sides, config=configs)
def test_the_crops_are_those_of_the_reference(
    reference: Any, width: int, height: int, config: ImageProcessorConfig
) -> None:
    geometry = Geometry(width, height)
    assert plan_crops(geometry, config) == crops_of_reference(reference, geometry, config)


@settings(max_examples=150)
@given(width=sides, height=sides, config=configs)
def test_the_crops_cover_the_picture_without_overlap(width: int, height: int, config: ImageProcessorConfig) -> None:
    crops = plan_crops(Geometry(width, height), config)
    assert all(crop.width > 0 and crop.height > 0 for crop in crops)
    assert not crops or sum(crop.width * crop.height for crop in crops) == width * height
    assert count_crops(Geometry(width, height), config) == len(crops)


def test_nothing_is_cropped_unless_asked_for() -> None:
    assert plan_crops(Geometry(4000, 500), ImageProcessorConfig()) == ()


def test_the_last_crop_ends_with_the_picture() -> None:
    crops = plan_crops(Geometry(1000, 333), ImageProcessorConfig(do_pan_and_scan=True))
    assert crops == (CropBox(0, 0, 334, 333), CropBox(334, 0, 334, 333), CropBox(668, 0, 332, 333))


def test_a_crop_that_would_be_empty_is_left_out() -> None:
    config = ImageProcessorConfig(do_pan_and_scan=True, pan_and_scan_min_crop_size=1)
    # Four crops of ceil(5 / 4) pixels: the fourth would begin past the end of the picture.
    assert [(crop.left, crop.width) for crop in plan_crops(Geometry(5, 1), config)] == [(0, 2), (2, 2), (4, 1)]


def test_every_size_of_a_small_range_agrees_with_the_reference(reference: Any) -> None:
    config = ImageProcessorConfig(do_pan_and_scan=True, pan_and_scan_min_crop_size=3)
    for width in range(1, 40):
        for height in range(1, 40):
            geometry = Geometry(width, height)
            assert plan_crops(geometry, config) == crops_of_reference(reference, geometry, config)
