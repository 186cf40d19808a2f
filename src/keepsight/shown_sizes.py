"""The shown size of a picture, for models without a fixed size, computed from its geometry alone.

Equals the reference's `smart_resize` for every size, so prompts can be laid out before any pixel is decoded.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import TypeGuard

from keepsight.errors import InvalidArgumentError, UnsupportedPictureError
from keepsight.media import Geometry

# Larger integers cannot be sent to another process.
MAX_COUNT = 2**31 - 1
# Longer side / shorter side. The reference refuses longer pictures, too.
MAX_ASPECT_RATIO = 200


def is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def check_positive_int(name: str, value: object) -> None:
    if not is_integer(value) or not 1 <= value <= MAX_COUNT:
        raise InvalidArgumentError(name, f"must be an integer from 1 to {MAX_COUNT}, got {value!r}")


def can_show(geometry: Geometry) -> bool:
    short_side, long_side = sorted((geometry.width, geometry.height))
    return long_side / short_side <= MAX_ASPECT_RATIO


def check_can_show(geometry: Geometry, field: str) -> None:
    if not can_show(geometry):
        raise too_long(field, f"{geometry.width} x {geometry.height} pixels")


def too_long(field: str, size: str) -> UnsupportedPictureError:
    limit = f"no side may be more than {MAX_ASPECT_RATIO} times as long as the other for this model"
    return UnsupportedPictureError(field, f"{size}: {limit}")


def most_tokens(side: int, min_pixels: float, max_pixels: float) -> int:
    """Return the most tokens of any picture.

    May exceed `max_pixels`: enlarged sides are rounded up, and no side becomes shorter than a token. Both effects are
    largest for the longest pictures.
    """
    least, most = (math.sqrt(pixels) / side for pixels in (min_pixels, max_pixels))
    stretch = math.sqrt(MAX_ASPECT_RATIO)
    enlarged = (least / stretch + 1) * (least * stretch + 1)
    return max(int(max_pixels // side**2), math.ceil(most * stretch), math.ceil(enlarged))


@dataclass(frozen=True, slots=True)
class ShownSizes:
    """Sizes close to the picture's own, in whole tokens, each a square of `merge_size` x `merge_size` patches."""

    patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            check_positive_int(field.name, getattr(self, field.name))
        if self.min_pixels > self.max_pixels:
            message = f"min_pixels must be at most max_pixels, but {self.min_pixels} exceeds {self.max_pixels}"
            raise InvalidArgumentError("max_pixels", message)

    @property
    def token_side(self) -> int:
        return self.patch_size * self.merge_size

    @property
    def max_tokens(self) -> int:
        """The most tokens of any picture."""
        return most_tokens(self.token_side, self.min_pixels, self.max_pixels)

    def check_cost_no_more_than(self, limit: "ShownSizes") -> None:
        """Refuse sizes that may need more tokens or pixels than `limit`, for which room was reserved."""
        if self.max_pixels > limit.max_pixels:
            raise InvalidArgumentError("max_pixels", f"must be at most {limit.max_pixels} here, got {self.max_pixels}")
        if self.max_tokens > limit.max_tokens:
            message = (
                f"would enlarge pictures to up to {self.max_tokens} tokens; at most {limit.max_tokens} are allowed here"
            )
            raise InvalidArgumentError("min_pixels", message)

    def size_of(self, geometry: Geometry) -> Geometry:
        """Return the shown size in pixels."""
        rows, columns = self.grid_of(geometry)
        return Geometry(columns * self.token_side, rows * self.token_side)

    def grid_of(self, geometry: Geometry) -> tuple[int, int]:
        """Return rows and columns of tokens. Rounding matters, so the order of operations is the reference's."""
        assert can_show(geometry), geometry
        side, num_pixels = self.token_side, geometry.width * geometry.height
        rows, columns = round(geometry.height / side), round(geometry.width / side)
        if rows * columns * side**2 > self.max_pixels:
            shrink = math.sqrt(num_pixels / self.max_pixels)
            rows, columns = (math.floor(each / shrink / side) for each in (geometry.height, geometry.width))
            return max(1, rows), max(1, columns)
        if rows * columns * side**2 < self.min_pixels:
            enlarge = math.sqrt(self.min_pixels / num_pixels)
            return math.ceil(geometry.height * enlarge / side), math.ceil(geometry.width * enlarge / side)
        return rows, columns
