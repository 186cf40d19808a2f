"""The shown size of a film's frames, computed from its geometry and the number of frames shown.

Results equal those of the reference's video processors for every film.
"""

import dataclasses
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from keepsight.errors import InvalidArgumentError
from keepsight.media import FRAMES_PER_MOMENT, Geometry
from keepsight.shown_sizes import ShownSizes, can_show, check_positive_int, most_tokens, too_long


@dataclass(frozen=True, slots=True)
class FilmSizes(ABC):
    limits: ShownSizes
    # Whether a frame's pixels have a further limit, which follows from `max_video_tokens`.
    cap_pixels_per_frame: bool
    max_video_tokens: int

    def __post_init__(self) -> None:
        check_positive_int("max_video_tokens", self.max_video_tokens)
        if not isinstance(self.cap_pixels_per_frame, bool):
            message = f"must be true or false, got {self.cap_pixels_per_frame!r}"
            raise InvalidArgumentError("cap_pixels_per_frame", message)

    @property
    def token_side(self) -> int:
        return self.limits.token_side

    @property
    @abstractmethod
    def max_tokens_per_moment(self) -> int:
        """The most tokens of any moment of any film, whatever a request asks for."""

    @abstractmethod
    def grid_of(self, geometry: Geometry, num_frames: int) -> tuple[int, int]:
        """Return rows and columns of tokens. Rounding matters, so the order of operations is the reference's."""

    def check_can_show(self, geometry: Geometry, field: str) -> None:
        if not can_show(Geometry(*self._at_least(geometry))):
            raise too_long(field, f"frames of {geometry.width} x {geometry.height} pixels")

    def _at_least(self, geometry: Geometry) -> tuple[int, int]:
        """Return the width and height from which sizes are computed."""
        return geometry.width, geometry.height

    @property
    def _enlarged_pixels(self) -> int:
        """The pixels that a frame may have whatever the cap."""
        return int(self.limits.min_pixels * 1.05)


@dataclass(frozen=True, slots=True)
class SizesOfAllFrames(FilmSizes):
    """Sizes as Qwen3VLVideoProcessor computes them: the limits apply to all frames together, a cap to one frame.

    Frames smaller than a token are enlarged first.
    """

    @property
    def max_tokens_per_moment(self) -> int:
        """The most tokens of any moment.

        Reached with two frames if all frames share the limit; with five if each has a cap, as the reference counts
        only four of them.
        """
        fewest = FRAMES_PER_MOMENT
        pixels = self._max_pixels(fewest) / fewest * (5 / 4 if self.cap_pixels_per_frame else 1)
        return most_tokens(self.token_side, self.limits.min_pixels / fewest, pixels)

    def grid_of(self, geometry: Geometry, num_frames: int) -> tuple[int, int]:
        side, max_pixels, min_pixels = self.token_side, self._max_pixels(num_frames), self.limits.min_pixels
        width, height = self._at_least(geometry)
        rows, columns = round(height / side), round(width / side)
        num_counted = round(num_frames / FRAMES_PER_MOMENT) * FRAMES_PER_MOMENT
        num_pixels = num_counted * rows * columns * side**2
        if num_pixels > max_pixels:
            shrink = math.sqrt(num_frames * height * width / max_pixels)
            return max(1, math.floor(height / shrink / side)), max(1, math.floor(width / shrink / side))
        if num_pixels < min_pixels:
            enlarge = math.sqrt(min_pixels / (num_frames * height * width))
            return math.ceil(height * enlarge / side), math.ceil(width * enlarge / side)
        return rows, columns

    def _max_pixels(self, num_frames: int) -> int:
        """Return the limit of pixels of all frames together."""
        limits = self.limits
        if not self.cap_pixels_per_frame:
            return limits.max_pixels
        capped = min(self.max_video_tokens * self.token_side**2, limits.max_pixels // num_frames)
        return max(capped, self._enlarged_pixels) * num_frames

    def _at_least(self, geometry: Geometry) -> tuple[int, int]:
        """Return width and height, enlarged so that neither is shorter than a token."""
        width, height, side = geometry.width, geometry.height, self.token_side
        if width >= side and height >= side:
            return width, height
        scale = max(side / height, side / width)
        return int(width * scale), int(height * scale)


@dataclass(frozen=True, slots=True)
class SizesOfEachFrame(FilmSizes):
    """Sizes as Qwen2VLVideoProcessor computes them: each frame is sized like a picture; a cap limits all together."""

    @property
    def max_tokens_per_moment(self) -> int:
        """The most tokens of any moment; reached with two frames."""
        return self._limits_of_each(FRAMES_PER_MOMENT).max_tokens

    def grid_of(self, geometry: Geometry, num_frames: int) -> tuple[int, int]:
        return self._limits_of_each(num_frames).grid_of(geometry)

    def _limits_of_each(self, num_frames: int) -> ShownSizes:
        if not self.cap_pixels_per_frame:
            return self.limits
        # The reference leaves a tenth of what it takes for the model's context to text.
        together = int(self.max_video_tokens * self.token_side**2 * 0.9)
        share = min(self.limits.max_pixels, together * FRAMES_PER_MOMENT // num_frames)
        return dataclasses.replace(self.limits, max_pixels=max(share, self._enlarged_pixels))
