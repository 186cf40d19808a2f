"""Sizes equal those of transformers' `smart_resize`, and the bound on their number of tokens holds."""

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from keepsight.errors import InvalidArgumentError
from keepsight.media import Geometry
from keepsight.shown_sizes import ShownSizes, can_show

# As published with Qwen3-VL.
PUBLISHED = ShownSizes(patch_size=16, merge_size=2, min_pixels=65_536, max_pixels=16_777_216)

sides = st.integers(1, 300) | st.integers(1, 20_000)
limits = st.tuples(st.integers(1, 3000) | st.integers(1, 2**24), st.integers(1, 3000) | st.integers(1, 2**24)).map(
    sorted
)
any_sizes = st.one_of(
    st.just(PUBLISHED),
    st.builds(
        lambda patch, merge, both: ShownSizes(patch, merge, *both), st.integers(1, 20), st.integers(1, 3), limits
    ),
    # Equal limits, where rounding matters most.
    st.builds(lambda pixels: ShownSizes(16, 2, pixels, pixels), st.integers(1, 2**21)),
)


@pytest.fixture(scope="module")
def smart_resize() -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    return smart_resize


def size_by_reference(smart_resize: Any, geometry: Geometry, sizes: ShownSizes) -> Geometry | None:
    """Return the reference's size, or None if it refuses."""
    try:
        height, width = smart_resize(
            geometry.height, geometry.width, sizes.token_side, sizes.min_pixels, sizes.max_pixels
        )
    except ValueError:
        return None
    return Geometry(width, height)


@settings(max_examples=2000)
@given(sides, sides, any_sizes)
@example(1, 1, PUBLISHED)
@example(200, 1, PUBLISHED)
@example(201, 1, PUBLISHED)
@example(20_000, 100, ShownSizes(16, 2, 1, 1))
@example(48, 80, PUBLISHED)
def test_sizes_equal_those_of_transformers_and_stay_within_the_limit(
    smart_resize: Any, width: int, height: int, sizes: ShownSizes
) -> None:
    geometry = Geometry(width, height)
    expected = size_by_reference(smart_resize, geometry, sizes)
    assert can_show(geometry) == (expected is not None)
    if expected is not None:
        rows, columns = sizes.grid_of(geometry)
        assert sizes.size_of(geometry) == expected
        assert (rows * sizes.token_side, columns * sizes.token_side) == (expected.height, expected.width)
        assert 1 <= rows * columns <= sizes.max_tokens


@given(st.integers(1, 200 * 64), st.integers(1, 64), any_sizes)
def test_the_longest_pictures_stay_within_the_limit(long_side: int, short_side: int, sizes: ShownSizes) -> None:
    geometry = Geometry(min(long_side, 200 * short_side), short_side)
    if can_show(geometry):
        rows, columns = sizes.grid_of(geometry)
        assert rows * columns <= sizes.max_tokens


def test_the_token_limit_follows_from_max_pixels() -> None:
    assert PUBLISHED.max_tokens == 16_384


def test_rounding_may_give_more_tokens_than_max_pixels_hold() -> None:
    tight = ShownSizes(16, 2, 65_536, 65_536)
    rows, columns = tight.grid_of(Geometry(198, 1))
    assert 64 < rows * columns <= tight.max_tokens


@pytest.mark.parametrize("name", ["patch_size", "merge_size", "min_pixels", "max_pixels"])
@pytest.mark.parametrize("value", [0, -1, 2**31, 1.5, "many", None, True])
def test_a_value_other_than_a_positive_integer_is_refused_by_name(name: str, value: Any) -> None:
    values: dict[str, Any] = {"patch_size": 16, "merge_size": 2, "min_pixels": 1, "max_pixels": 2**20, name: value}
    with pytest.raises(InvalidArgumentError, match=f"^{name}: must be an integer from 1 to") as caught:
        ShownSizes(**values)
    assert caught.value.field == name


def test_limits_that_leave_no_size_are_refused() -> None:
    with pytest.raises(
        InvalidArgumentError, match="max_pixels: min_pixels must be at most max_pixels, but 10 exceeds 9"
    ):
        ShownSizes(16, 2, 10, 9)
