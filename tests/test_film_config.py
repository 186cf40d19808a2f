"""Sampled frames, their timestamps and sizes equal those of transformers' Qwen3VLVideoProcessor for any film."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepsight.errors import CheckpointConfigError, InvalidArgumentError, UnsupportedFieldError, UnsupportedPictureError
from keepsight.film_processors import Qwen3VLFilmConfig as FilmConfig
from keepsight.film_sizes import SizesOfAllFrames as FilmSizes
from keepsight.image_processor_config import BICUBIC, ImageProcessorConfig
from keepsight.media import Excerpt, Geometry, Moment, Timeline
from keepsight.shown_sizes import ShownSizes
from tests.frontend.reference_processor import PUBLISHED_FOR_FILMS

IMAGE_CONFIG = ImageProcessorConfig(resample=BICUBIC, backend="pil", sizes=ShownSizes(16, 2, 65_536, 16_777_216))
PUBLISHED: dict[str, Any] = {
    **PUBLISHED_FOR_FILMS,
    "processor_class": "Qwen3VLProcessor",
    "video_processor_type": "Qwen3VLVideoProcessor",
}


def write(directory: Path, values: object, name: str = "video_preprocessor_config.json") -> Path:
    (directory / name).write_text(json.dumps(values))
    return directory


def read(directory: Path, **overrides: Any) -> FilmConfig:
    config = FilmConfig.from_checkpoint(directory, IMAGE_CONFIG, **overrides)
    assert config is not None
    return config


def film(num_frames: int, rate: float = 24.0, width: int = 64, height: int = 48) -> Geometry:
    return Geometry(width, height, Timeline(num_frames, rate))


@pytest.fixture
def published(tmp_path: Path) -> FilmConfig:
    return read(write(tmp_path, PUBLISHED))


# Plans of films -----------------------------------------------------------------------------------------------


limits = st.tuples(st.integers(1, 2**26), st.integers(1, 2**26)).map(sorted)
any_sizes = st.builds(
    lambda patch, merge, both, capped, most: FilmSizes(ShownSizes(patch, merge, *both), capped, most),
    st.integers(1, 20),
    st.integers(1, 3),
    limits | st.integers(1, 2**20).map(lambda pixels: (pixels, pixels)),
    st.booleans(),
    st.integers(1, 2000),
)
any_configs = st.builds(
    lambda sizes, rule, least, most: FilmConfig(sizes, IMAGE_CONFIG, **rule, min_frames=least, max_frames=most),
    any_sizes,
    st.builds(lambda rate: {"fps": rate}, st.none() | st.floats(0.01, 60))
    | st.builds(lambda number: {"fps": None, "num_frames": number}, st.integers(2, 99)),
    st.integers(2, 9),
    st.integers(2, 99),
)
sides = st.integers(1, 300) | st.integers(1, 8000)
films = st.builds(film, st.integers(1, 2000), st.floats(0.1, 240), sides, sides)


@dataclasses.dataclass
class Reference:
    indices: list[int]
    times: list[float]
    height: int
    width: int


def plan_of_reference(config: FilmConfig, geometry: Geometry) -> Reference | None:
    """Return the reference's result, or None if it refuses the film."""
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor, smart_resize

    timeline, limits = geometry.timeline, config.sizes.limits
    assert timeline is not None
    metadata: Any = SimpleNamespace(total_num_frames=timeline.num_frames, fps=timeline.frames_per_second)
    itself: Any = SimpleNamespace(fps=config.fps, min_frames=config.min_frames, max_frames=config.max_frames)
    indices = Qwen3VLVideoProcessor.sample_frames(itself, metadata, config.num_frames, config.fps)
    times = Qwen3VLProcessor._calculate_timestamps(itself, indices, timeline.frames_per_second)
    # Copied from its `resize`, which does not return the size it chose.
    max_pixels, factor, num_frames = limits.max_pixels, config.sizes.token_side, len(indices)
    if config.sizes.cap_pixels_per_frame:
        cap = min(config.sizes.max_video_tokens * factor * factor, max_pixels // num_frames)
        max_pixels = max(cap, int(limits.min_pixels * 1.05)) * num_frames
    try:
        height, width = smart_resize(
            num_frames, geometry.height, geometry.width, 2, factor, limits.min_pixels, max_pixels
        )
    except ValueError:
        return None
    return Reference(indices.tolist(), times, height, width)


@settings(max_examples=500, deadline=None)
@given(any_configs, films)
def test_plans_equal_those_of_transformers_and_stay_within_the_limit(config: FilmConfig, geometry: Geometry) -> None:
    expected = plan_of_reference(config, geometry)
    if expected is None:
        with pytest.raises(UnsupportedPictureError):
            config.plan(geometry)
        return
    plan = config.plan(geometry)
    shown = [number for moment in plan.moments for number in (moment.first, moment.last)]
    assert shown == expected.indices + expected.indices[-1:] * (len(expected.indices) % 2)
    assert list(plan.layout.times) == expected.times
    assert (plan.config.height, plan.config.width) == (expected.height, expected.width)
    num_tokens = expected.height * expected.width // config.sizes.token_side**2
    assert plan.layout.tokens_per_part == num_tokens <= config.sizes.max_tokens_per_moment
    assert plan.layout.columns == expected.width // config.sizes.token_side
    assert len(expected.indices) <= config.most_frames


@settings(max_examples=500, deadline=None)
@given(any_sizes, st.integers(2, 12), st.integers(1, 200 * 64), st.integers(1, 64))
def test_the_longest_films_stay_within_the_limit(sizes: FilmSizes, num_frames: int, long: int, short: int) -> None:
    geometry = Geometry(min(long, 200 * short), short)
    try:
        sizes.check_can_show(geometry, "video")
    except UnsupportedPictureError:
        return
    rows, columns = sizes.grid_of(geometry, num_frames)
    assert 1 <= rows * columns <= sizes.max_tokens_per_moment


def test_two_frames_form_a_moment_and_an_odd_last_frame_is_repeated(published: FilmConfig) -> None:
    plan = published.plan(film(30, rate=10.0))  # two frames per second, so six
    assert [(each.first, each.last) for each in plan.moments] == [(0, 6), (12, 17), (23, 29)]
    assert plan.layout.times == pytest.approx((0.3, 1.45, 2.6))
    assert published.with_overrides(num_frames=5).plan(film(9)).moments[-1] == Moment(8, 8)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 2000), min_size=2, max_size=20), st.floats(0.1, 240))
def test_frames_that_were_sampled_already_are_all_shown_at_their_times(indices: list[int], rate: float) -> None:
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    config = FilmConfig(FilmSizes(ShownSizes(16, 2, 4096, 25_165_824), False, 768), IMAGE_CONFIG)
    timeline = Timeline(len(indices), rate, Excerpt(tuple(indices), 2001))
    plan = config.plan(Geometry(64, 64, timeline))
    assert [plan.moments[0].first, plan.moments[-1].last] == [0, len(indices) - 1]
    assert len(plan.moments) == -(-len(indices) // 2)
    itself: Any = None
    assert list(plan.layout.times) == Qwen3VLProcessor._calculate_timestamps(itself, list(indices), rate)


def test_more_sampled_frames_than_the_setting_allows_are_refused(published: FilmConfig) -> None:
    setting = dataclasses.replace(published, max_frames=4)
    with pytest.raises(InvalidArgumentError, match=r"^here: has 5 frames that are not to be sampled; at most 4 are"):
        setting.plan(Geometry(64, 64, Timeline(5, 24.0, Excerpt((0, 2, 4, 6, 8), 9))), "here")


@pytest.mark.parametrize("choice", [{"num_frames": 4}, {"max_frames": 4}, {"fps": 1, "max_frames": 4}])
def test_the_number_of_frames_that_a_request_has_sampled_limits_none_that_were_sampled_before(
    published: FilmConfig, choice: dict[str, int]
) -> None:
    sampled = Geometry(64, 64, Timeline(8, 24.0, Excerpt(tuple(range(0, 80, 10)), 80)))
    setting = published.with_overrides(**choice)
    assert len(setting.plan(sampled).moments) == 4
    assert len(setting.plan(film(80)).moments) == 2


def test_frames_are_resized_with_the_reference_s_backend_and_filter(
    published: FilmConfig,
) -> None:
    config = published.plan(film(30)).config
    assert (config.backend, config.resample, config.sizes) == ("torchvision", BICUBIC, None)


def test_a_film_of_one_frame_is_refused_with_advice(published: FilmConfig) -> None:
    with pytest.raises(UnsupportedPictureError, match=r"^here: has only 1 frame; send that frame by itself, as a pict"):
        published.plan(film(1), "here")


def test_a_film_that_is_too_long_on_one_side_is_refused(published: FilmConfig) -> None:
    with pytest.raises(UnsupportedPictureError, match="frames of 20100 x 100 pixels: no side may be more than 200"):
        published.plan(film(9, width=20_100, height=100))


# Reading the file ---------------------------------------------------------------------------------------------


def test_the_published_file_gives_the_published_values(published: FilmConfig) -> None:
    assert published.sizes == FilmSizes(ShownSizes(16, 2, 4096, 25_165_824), False, 768)
    assert (published.fps, published.num_frames, published.min_frames, published.max_frames) == (2.0, None, 4, 768)
    assert published.sizes.max_tokens_per_moment == 12_288


def test_missing_values_are_the_defaults_of_transformers(tmp_path: Path) -> None:
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor as Reference

    ours = read(write(tmp_path, {}))
    edges = {"shortest_edge": ours.sizes.limits.min_pixels, "longest_edge": ours.sizes.limits.max_pixels}
    assert edges == Reference.size
    for name in ("fps", "num_frames", "min_frames", "max_frames"):
        assert getattr(ours, name) == getattr(Reference, name)
    assert ours.sizes.max_video_tokens == Reference.max_video_tokens
    assert ours.frame.resample == Reference.resample
    assert list(ours.frame.image_mean) == Reference.image_mean
    assert list(ours.frame.image_std) == Reference.image_std


def test_the_nested_section_takes_precedence_over_the_file(tmp_path: Path) -> None:
    write(tmp_path, PUBLISHED)
    write(tmp_path, {"video_processor": {**PUBLISHED, "fps": 1}}, "processor_config.json")
    assert read(tmp_path).fps == 1.0


def test_films_need_a_video_file_and_an_image_config_with_sizes(tmp_path: Path) -> None:
    assert FilmConfig.from_checkpoint(tmp_path, IMAGE_CONFIG) is None
    write(tmp_path, PUBLISHED)
    assert FilmConfig.from_checkpoint(tmp_path, None) is None
    assert FilmConfig.from_checkpoint(tmp_path, ImageProcessorConfig()) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"video_processor_type": "Qwen2VLVideoProcessor"},
        {"do_sample_frames": False},
        {"do_resize": None},
        {"image_mean": [0.1, 0.2, 0.3]},
        {"rescale_factor": 1.0},
        {"temporal_patch_size": 3},
        {"patch_size": 14},
        {"size": {"longest_edge": 4096}},
        {"resample": 1},
        {"fps": 0},
        {"num_frames": 1},
        {"min_frames": None},
        {"max_frames": 2.5},
        {"max_video_tokens": 0},
        {"cap_pixels_per_frame": 1},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_an_unsupported_value_in_the_file_is_refused_by_name(tmp_path: Path, fields: dict[str, Any]) -> None:
    write(tmp_path, {**PUBLISHED, **fields})
    with pytest.raises(CheckpointConfigError, match=next(iter(fields))):
        read(tmp_path)


def test_overrides_take_precedence_over_the_file(tmp_path: Path) -> None:
    write(tmp_path, {**PUBLISHED, "image_mean": 0.25, "num_frames": 8, "fps": None})
    config = read(tmp_path, fps=3, image_mean=0.5, cap_pixels_per_frame=True)
    assert (config.fps, config.num_frames, config.sizes.cap_pixels_per_frame) == (3.0, None, True)
    with pytest.raises(InvalidArgumentError, match="max_frames") as caught:
        read(tmp_path, image_mean=0.5, max_frames=0)
    assert caught.value.field == "max_frames"


# Options of a request -----------------------------------------------------------------------------------------


def test_a_request_may_set_the_number_of_frames_or_the_rate(published: FilmConfig) -> None:
    assert len(published.with_overrides(num_frames=8).plan(film(99)).moments) == 4
    assert len(published.with_overrides(fps=4, num_frames=None).plan(film(240)).moments) == 20
    assert len(published.with_overrides(max_frames=6).plan(film(2400)).moments) == 3
    assert published.with_overrides(num_frames=8).with_overrides(fps=1).num_frames is None


@pytest.mark.parametrize("name", ["num_frames", "max_frames"])
def test_no_request_may_have_more_frames_than_the_setting_allows(published: FilmConfig, name: str) -> None:
    setting = published.with_overrides(max_frames=32)
    with pytest.raises(InvalidArgumentError, match=f"^{name}: must be at most 32 here, got 33"):
        setting.with_overrides(**{name: 33})
    assert len(setting.with_overrides(fps=2**31 - 1).plan(film(2**31 - 1)).moments) == 16


def test_a_number_of_frames_that_the_setting_fixes_is_the_most_that_a_request_may_have(published: FilmConfig) -> None:
    setting = published.with_overrides(num_frames=4)
    for name in ("num_frames", "max_frames"):
        with pytest.raises(InvalidArgumentError, match=f"^{name}: must be at most 4 here, got 20"):
            setting.with_overrides(**{name: 20})
    assert len(setting.with_overrides(fps=24).plan(film(240)).moments) == 2
    assert len(setting.with_overrides(num_frames=2).plan(film(240)).moments) == 1


@pytest.mark.parametrize("options", [{"fps": 2**31}, {"fps": True}, {"fps": 1, "num_frames": 2}, {"num_frames": "all"}])
def test_invalid_options_of_a_request_are_refused(published: FilmConfig, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError):
        published.with_overrides(**options)


@pytest.mark.parametrize("name", ["size", "cap_pixels_per_frame", "image_mean"])
def test_an_option_that_requests_may_not_set_is_refused_by_name(published: FilmConfig, name: str) -> None:
    with pytest.raises(UnsupportedFieldError, match=name):
        published.with_overrides(**{name: 1})
