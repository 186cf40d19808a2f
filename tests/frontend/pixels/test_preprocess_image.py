"""From bytes to normalized floats, bit for bit, for every case and against both backends of transformers."""

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from keepsight.film_processors import Qwen2VLFilmConfig, Qwen3VLFilmConfig
from keepsight.frontend.identity.pan_and_scan import plan_crops
from keepsight.frontend.intake.read_film import read_film
from keepsight.frontend.intake.read_header import read_geometry
from keepsight.frontend.intake.take_picture import take_picture
from keepsight.frontend.pixels.decode_picture import decode_picture
from keepsight.frontend.pixels.make_pixels import FilmJob
from keepsight.frontend.pixels.preprocess_image import preprocess_image, resize_pixels
from keepsight.image_processor_config import BICUBIC, Backend, ImageProcessorConfig
from keepsight.media import CropBox
from keepsight.requests import Pixels
from keepsight.runner.normalize_pixels import PixelNormalizer
from keepsight.shown_sizes import ShownSizes
from tests.frontend.reference_processor import (
    PUBLISHED_FOR_FILMS,
    Floats,
    config_of,
    reference_pixels,
    skip_where_the_reference_is_older,
)
from tests.frontend.sample_films import FilmCase, film_cases
from tests.frontend.sample_pictures import Case, all_cases, encode, random_picture

REPOSITORY = Path(__file__).parents[3]
TORCHVISION = REPOSITORY / ".venv" / "torchvision-reference"


@pytest.fixture(scope="session")
def cases() -> tuple[Case, ...]:
    return all_cases()


@pytest.fixture(scope="session")
def torchvision_pixels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Floats]]:
    if not (TORCHVISION / "torchvision").is_dir():
        pytest.skip(
            f"PARITY WITH THE DEFAULT BACKEND IS NOT TESTED: {TORCHVISION} is missing; "
            f"pip install --no-deps --target {TORCHVISION} torchvision==0.28.0"
        )
    output = tmp_path_factory.mktemp("torchvision") / "reference.npz"
    script = [sys.executable, "-m", "tests.frontend.torchvision_reference", str(TORCHVISION), str(output)]
    path = os.pathsep.join((str(REPOSITORY), str(REPOSITORY / "src")))
    run = subprocess.run(
        script, cwd=REPOSITORY, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    with np.load(output) as pixels:
        yield pixels


def our_pixels(case: Case, backend: Backend) -> Floats:
    """Return pixels in the reference's layout: float32 [1 + crops, 3, height, width], or [patches, values]."""
    config = config_of(case, backend)
    source = take_picture(case.source, "picture")
    geometry = read_geometry(source, "picture")
    settled = config.settled_for(geometry)
    prepared = preprocess_image(decode_picture(source, "picture"), (None, *plan_crops(geometry, config)), settled)
    normalized = PixelNormalizer(config, "cpu", torch.float32)(torch.from_numpy(np.stack(prepared)))
    channels_first = normalized.permute(0, 3, 1, 2).contiguous()
    return (channels_first if config.sizes is None else cut_into_patches(channels_first, config.sizes)).numpy()


def cut_into_patches(pixels: torch.Tensor, sizes: ShownSizes) -> torch.Tensor:
    """Reshape [1 or 2, 3, height, width] to [patches, values]: patches of a token adjacent, two frames per patch."""
    patch, merge, side = sizes.patch_size, sizes.merge_size, sizes.token_side
    height, width = pixels.shape[2:]
    frames = pixels.expand(2, -1, -1, -1)
    cut = frames.reshape(2, 3, height // side, merge, patch, width // side, merge, patch)
    return cut.permute(2, 5, 3, 6, 1, 0, 4, 7).reshape(-1, 3 * 2 * patch**2)


def our_film(case: FilmCase, directory: Path) -> Floats:
    """[patches, values]"""
    (directory / "video_preprocessor_config.json").write_text(json.dumps({**PUBLISHED_FOR_FILMS, **case.options}))
    pictures = ImageProcessorConfig(resample=BICUBIC, backend="pil", sizes=ShownSizes(16, 2, 65_536, 16_777_216))
    kind = Qwen2VLFilmConfig if case.processor == Qwen2VLFilmConfig.processor else Qwen3VLFilmConfig
    config = kind.from_checkpoint(directory, pictures)
    assert config is not None
    plan = config.plan(read_film(case.source, "video"))
    moments = {str(number): moment for number, moment in enumerate(plan.moments)}
    made = FilmJob(case.source, "video", moments, plan.config).run().pixels
    frames = np.stack(list(made.values())).reshape(-1, 2, plan.config.height, plan.config.width, 3)
    normalized = PixelNormalizer(plan.config, "cpu", torch.float32)(torch.from_numpy(frames))
    patches = [cut_into_patches(moment.permute(0, 3, 1, 2), config.sizes.limits) for moment in normalized]
    return torch.cat(patches).numpy()


def are_bit_equal(ours: Floats, reference: Floats) -> bool:
    return ours.shape == reference.shape and ours.tobytes() == reference.tobytes()


def test_there_are_more_than_two_hundred_cases_of_different_names(cases: tuple[Case, ...]) -> None:
    assert len({case.name for case in cases}) == len(cases) > 200


def test_every_case_equals_the_pil_backend_of_transformers_bit_for_bit(cases: tuple[Case, ...]) -> None:
    skip_where_the_reference_is_older()
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    classes = (Gemma3ImageProcessorPil, Qwen2VLImageProcessorPil)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the reference's
        reference = {case.name: reference_pixels(case, *classes) for case in cases}
    wrong = [case.name for case in cases if not are_bit_equal(our_pixels(case, "pil"), reference[case.name])]
    assert wrong == []


def test_every_case_equals_the_torchvision_backend_of_transformers_bit_for_bit(
    cases: tuple[Case, ...], torchvision_pixels: Mapping[str, Floats]
) -> None:
    skip_where_the_reference_is_older()
    assert {name for name in torchvision_pixels if not name.startswith("film")} == {case.name for case in cases}
    wrong = [
        case.name for case in cases if not are_bit_equal(our_pixels(case, "torchvision"), torchvision_pixels[case.name])
    ]
    assert wrong == []


def test_every_film_equals_that_of_transformers_bit_for_bit(
    tmp_path: Path, torchvision_pixels: Mapping[str, Floats]
) -> None:
    skip_where_the_reference_is_older()
    cases = film_cases()
    wrong = [case.name for case in cases if not are_bit_equal(our_film(case, tmp_path), torchvision_pixels[case.name])]
    assert wrong == []


def packed(pixels: Pixels) -> Pixels:
    return np.ascontiguousarray(pixels)


def padded(pixels: Pixels) -> Pixels:
    storage = np.full((*pixels.shape[:2], 4), 99, dtype=np.uint8)
    storage[..., :3] = pixels
    return storage[..., :3]


def pushed_to_the_end(pixels: Pixels) -> Pixels:
    """Store pixels 4 bytes apart, so that the last pixel has no fourth byte."""
    storage = np.full((*pixels.shape[:2], 4), 99, dtype=np.uint8)
    storage[..., 1:] = pixels
    return storage[..., 1:]


@pytest.mark.parametrize("backend", ["torchvision", "pil"])
@pytest.mark.parametrize("lay_out", [padded, pushed_to_the_end])
def test_how_the_pixels_lie_in_memory_does_not_matter(backend: Backend, lay_out: object) -> None:
    assert callable(lay_out)
    config = ImageProcessorConfig(height=31, width=29, backend=backend)
    pixels = np.asarray(random_picture("RGB", (97, 61)))
    crops = (CropBox(0, 0, 49, 61), CropBox(49, 0, 48, 61), CropBox(3, 5, 29, 31))
    expected = preprocess_image(packed(pixels), (None, *crops), config)
    found = preprocess_image(lay_out(pixels), (None, *crops), config)
    assert all(np.array_equal(left, right) for left, right in zip(expected, found, strict=True))


@pytest.mark.parametrize("backend", ["torchvision", "pil"])
def test_the_result_is_contiguous_uint8_of_the_configured_size(backend: Backend) -> None:
    config = ImageProcessorConfig(height=31, width=29, backend=backend)
    for size in ((97, 61), (29, 31), (1, 1)):
        resized = resize_pixels(decode_picture(encode(random_picture("RGB", size), "JPEG")), config)
        assert resized.shape == (31, 29, 3)
        assert resized.dtype == np.uint8
        assert resized.flags.c_contiguous


def test_a_picture_of_the_right_size_keeps_its_pixels() -> None:
    pixels = np.asarray(random_picture("RGB", (29, 31)))
    assert np.array_equal(resize_pixels(pixels, ImageProcessorConfig(height=31, width=29)), pixels)


def test_read_only_pixels_are_resized_without_a_warning() -> None:
    pixels = np.asarray(random_picture("RGB", (97, 61)))
    pixels.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resize_pixels(pixels, ImageProcessorConfig(height=31, width=29))


def test_all_resamplings_of_pillow_serve_the_pil_backend() -> None:
    image = random_picture("RGB", (97, 61))
    for resample in range(6):
        config = ImageProcessorConfig(height=31, width=29, resample=resample, backend="pil")
        expected = np.asarray(image.resize((29, 31), Image.Resampling(resample)))
        assert np.array_equal(resize_pixels(np.asarray(image), config), expected)
