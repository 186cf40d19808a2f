"""Films of Qwen2.5-VL: for any film, its frames, sizes and positions equal those of transformers.

Settings that are read the same way from both processors' files are tested in `test_film_config.py`.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keepsight.errors import CheckpointConfigError, UnsupportedPictureError
from keepsight.film_config import FilmConfig
from keepsight.film_processors import TIMED_BY_ROTARY, Qwen2VLFilmConfig, Qwen3VLFilmConfig, read_film_config
from keepsight.film_sizes import SizesOfEachFrame
from keepsight.image_processor_config import DEFAULTS_WHERE_SIZES_FOLLOW, ImageProcessorConfig
from keepsight.json_fields import JsonFields
from keepsight.media import Excerpt, Geometry, Moment, Timeline
from keepsight.shown_sizes import ShownSizes
from tests.test_film_config import film, films, limits, write
from tests.video_processors import qwen2_vl_module

IMAGE_CONFIG = ImageProcessorConfig(
    sizes=ShownSizes(14, 2, 3136, 12_845_056), **DEFAULTS_WHERE_SIZES_FOLLOW, backend="pil"
)
# As Qwen publishes it; used for both pictures and films.
PUBLISHED: dict[str, Any] = {
    "min_pixels": 3136,
    "max_pixels": 12_845_056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": list(IMAGE_CONFIG.image_mean),
    "image_std": list(IMAGE_CONFIG.image_std),
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
}
any_sizes = st.builds(
    lambda patch, merge, both, capped, most: SizesOfEachFrame(ShownSizes(patch, merge, *both), capped, most),
    st.integers(1, 20),
    st.integers(1, 3),
    limits,
    st.booleans(),
    st.integers(1, 20_000),
)
any_configs = st.builds(
    lambda sizes, rule, least, most, places: Qwen2VLFilmConfig(
        sizes, IMAGE_CONFIG, **rule, min_frames=least, max_frames=most, places_per_second=places
    ),
    any_sizes,
    st.builds(lambda rate: {"fps": rate}, st.floats(0.01, 60) | st.integers(1, 9))
    | st.builds(lambda number: {"fps": None, "num_frames": number}, st.integers(2, 99)),
    st.integers(2, 9),
    st.integers(2, 99),
    st.integers(1, 25),
)


def reference_numbers(config: FilmConfig, timeline: Timeline) -> list[int] | None:
    """Return the frame numbers that transformers samples, or None if it fails."""
    metadata: Any = SimpleNamespace(total_num_frames=timeline.num_frames, fps=timeline.frames_per_second)
    least_and_most = {"min_frames": config.min_frames, "max_frames": config.max_frames}
    itself: Any = SimpleNamespace(fps=config.fps, num_frames=config.num_frames, temporal_patch_size=2, **least_and_most)
    try:
        numbers = qwen2_vl_module().Qwen2VLVideoProcessor.sample_frames(itself, metadata)
    except (ValueError, ZeroDivisionError):
        return None
    # Rounding of the step may add a frame number past the end.
    return [number for number in numbers.tolist() if number < timeline.num_frames]


def reference_size(sizes: SizesOfEachFrame, geometry: Geometry, num_frames: int) -> tuple[int, int] | None:
    """Return the size as computed in transformers' `resize`, which does not return it; None if it refuses."""
    factor, min_pixels, max_pixels = sizes.token_side, sizes.limits.min_pixels, sizes.limits.max_pixels
    if sizes.cap_pixels_per_frame:
        together = int(sizes.max_video_tokens * factor * factor * 0.9)
        max_pixels = max(min(max_pixels, together * 2 // num_frames), int(min_pixels * 1.05))
    try:
        size: tuple[int, int] = qwen2_vl_module().smart_resize(
            geometry.height, geometry.width, factor=factor, min_pixels=min_pixels, max_pixels=max_pixels
        )
    except ValueError:
        return None
    return size


def reference_places(config: Qwen2VLFilmConfig, timeline: Timeline, num_shown: int) -> list[int]:
    """Return each moment's temporal position, relative to the first, as transformers computes it."""
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
    from transformers.video_utils import VideoMetadata

    metadata = VideoMetadata(
        total_num_frames=timeline.num_frames_of_whole,
        fps=timeline.frames_per_second,
        frames_indices=list(range(num_shown)),
    )
    [seconds] = torch.tensor([2 / metadata.sampled_fps])
    interval = config.places_per_second * seconds
    itself, grid = None, torch.tensor([-(-num_shown // 2), 1, 1])
    places = Qwen2_5_VLModel.get_vision_position_ids(itself, 0, grid, time_interval=interval)  # type: ignore[arg-type]
    return places[0].tolist()  # type: ignore[no-any-return]


@settings(max_examples=500, deadline=None)
@given(any_configs, films)
def test_plans_equal_those_of_transformers_and_stay_within_the_limit(
    config: Qwen2VLFilmConfig, geometry: Geometry
) -> None:
    assert geometry.timeline is not None
    expected = reference_numbers(config, geometry.timeline)
    if expected is None:
        # The film has one frame, or fewer than requested.
        assert geometry.timeline.num_frames < max(2, config.most_frames)
        return
    size = reference_size(config.sizes, geometry, len(expected))  # type: ignore[arg-type]
    if size is None:
        with pytest.raises(UnsupportedPictureError):
            config.plan(geometry)
        return
    plan, side = config.plan(geometry), config.sizes.token_side
    assert [number for moment in plan.moments for number in (moment.first, moment.last)] == expected
    assert len(expected) <= config.most_frames
    assert (plan.config.height, plan.config.width) == size
    assert (plan.layout.times, list(plan.layout.places)) == (
        (),
        reference_places(config, geometry.timeline, len(expected)),
    )
    assert plan.layout.tokens_per_part == size[0] * size[1] // side**2 <= config.sizes.max_tokens_per_moment
    assert plan.layout.columns == size[1] // side


@pytest.fixture
def published(tmp_path: Path) -> Qwen2VLFilmConfig:
    config = Qwen2VLFilmConfig.from_checkpoint(write(tmp_path, PUBLISHED, "preprocessor_config.json"), IMAGE_CONFIG)
    assert config is not None
    return config


def test_a_published_preprocessor_config_also_describes_films(published: Qwen2VLFilmConfig) -> None:
    assert published.sizes == SizesOfEachFrame(ShownSizes(14, 2, 3136, 12_845_056), False, 128_000)
    assert (published.fps, published.min_frames, published.max_frames) == (2.0, 4, 768)
    assert published.sizes.max_tokens_per_moment == IMAGE_CONFIG.max_tokens_per_picture


def test_a_video_file_saved_by_transformers_is_read(published: Qwen2VLFilmConfig, tmp_path: Path) -> None:
    size = {"shortest_edge": 3136, "longest_edge": 12_845_056}
    saved = {"size": size, "do_sample_frames": False, "fps": None, "num_frames": None, "resample": 3}
    write(tmp_path, {"video_processor_type": "Qwen2VLVideoProcessor", **saved})
    assert Qwen2VLFilmConfig.from_checkpoint(tmp_path, IMAGE_CONFIG) == published


def test_missing_values_are_the_defaults_of_transformers(tmp_path: Path) -> None:
    config, reference = (
        Qwen2VLFilmConfig.from_checkpoint(write(tmp_path, {}), IMAGE_CONFIG),
        qwen2_vl_module().Qwen2VLVideoProcessor,
    )
    assert config is not None
    edges = {"shortest_edge": config.sizes.limits.min_pixels, "longest_edge": config.sizes.limits.max_pixels}
    assert edges == reference.size
    for name in ("min_frames", "max_frames"):
        assert getattr(config, name) == getattr(reference, name)
    assert config.sizes.max_video_tokens == reference.max_video_tokens
    assert config.frame.resample == reference.resample


def test_all_frames_are_shown_without_a_rate(published: Qwen2VLFilmConfig) -> None:
    plan = Qwen2VLFilmConfig(published.sizes, published.frame, fps=None).plan(film(5))
    assert plan.moments == (Moment(0, 1), Moment(2, 3), Moment(4, 4))
    assert plan.layout.places == (0, 0, 0)


def test_a_request_may_have_the_number_of_frames_that_is_set_though_it_is_rounded(published: Qwen2VLFilmConfig) -> None:
    setting = published.with_overrides(num_frames=5)
    assert setting.with_overrides(num_frames=5).plan(film(240)) == setting.plan(film(240))
    assert setting.with_overrides(fps=24).most_frames == 5


def test_a_film_with_fewer_frames_than_requested_is_shown_whole(published: Qwen2VLFilmConfig) -> None:
    plan = published.with_overrides(num_frames=32).plan(film(7))
    assert plan.moments == (Moment(0, 1), Moment(2, 3), Moment(4, 5))


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 40), st.integers(0, 2000), st.floats(0.1, 240))
def test_frames_that_were_sampled_already_are_all_shown_at_their_times(shown: int, left_out: int, rate: float) -> None:
    config = Qwen2VLFilmConfig(SizesOfEachFrame(ShownSizes(14, 2, 3136, 12_845_056), False, 128_000), IMAGE_CONFIG)
    timeline = Timeline(shown, rate, Excerpt(tuple(range(shown)), shown + left_out))
    plan = config.plan(Geometry(64, 64, timeline))
    assert len(plan.moments) == -(-shown // 2)
    assert list(plan.layout.places) == reference_places(config, timeline, shown)


def test_a_film_too_long_for_exact_times_is_refused(published: Qwen2VLFilmConfig) -> None:
    with pytest.raises(UnsupportedPictureError, match=r"^video: is 10000000 seconds long; .* up to 4194304 seconds"):
        published.plan(film(100, rate=1e-5))


@pytest.mark.parametrize(
    ("fields", "kind", "places"),
    [
        ({}, Qwen3VLFilmConfig, None),
        ({"architectures": [TIMED_BY_ROTARY]}, Qwen2VLFilmConfig, 4),
        ({"architectures": [TIMED_BY_ROTARY], "vision_config": {"tokens_per_second": 2}}, Qwen2VLFilmConfig, 2),
    ],
)
def test_the_architecture_determines_the_film_processor(
    tmp_path: Path, fields: dict[str, Any], kind: type[FilmConfig], places: int | None
) -> None:
    write(tmp_path, PUBLISHED)
    config = read_film_config(tmp_path, JsonFields(tmp_path / "config.json", fields), IMAGE_CONFIG)
    assert type(config) is kind
    assert getattr(config, "places_per_second", None) == places


def test_another_processor_s_file_is_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path, {**PUBLISHED, "video_processor_type": "Qwen3VLVideoProcessor"})
    with pytest.raises(CheckpointConfigError, match="video_processor_type: only Qwen2VLVideoProcessor is supported"):
        Qwen2VLFilmConfig.from_checkpoint(tmp_path, IMAGE_CONFIG)
