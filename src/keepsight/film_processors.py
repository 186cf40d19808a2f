"""The reference's two video processors: how each chooses frames and their sizes, and how the model learns their times.

Results equal the reference's for any film. Uses no pixels and no torch.
"""

import dataclasses
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from keepsight.errors import UnsupportedPictureError
from keepsight.film_config import FilmConfig, frame_options, in_pairs
from keepsight.film_sizes import SizesOfAllFrames, SizesOfEachFrame
from keepsight.image_processor_config import DEFAULTS_WHERE_SIZES_FOLLOW, STEPS, ImageProcessorConfig, read_sizes
from keepsight.json_fields import JsonFields
from keepsight.media import FRAMES_PER_MOMENT, Timeline

# The architecture whose decoder gets a moment's time by rotary positions; others get it as text.
TIMED_BY_ROTARY = "Qwen2_5_VLForConditionalGeneration"
# Limit of a moment's rotary position, counted from the film's first: float32, in which the reference computes it,
# cannot represent every larger integer.
MAX_ROTARY_POSITION = 2**24
FILM_FILE = "video_preprocessor_config.json"


def read_film_config(
    directory: Path, fields: JsonFields, image_config: ImageProcessorConfig, **overrides: Any
) -> FilmConfig | None:
    """Return the film preprocessing, or None if the model takes no films. `fields` is config.json."""
    if TIMED_BY_ROTARY not in fields.strings("architectures"):
        return Qwen3VLFilmConfig.from_checkpoint(directory, image_config, **overrides)
    config = Qwen2VLFilmConfig.from_checkpoint(directory, image_config, **overrides)
    places_per_second = fields.section("vision_config").integer("tokens_per_second", 4)
    return config and dataclasses.replace(config, places_per_second=places_per_second)


@dataclass(frozen=True, slots=True)
class Qwen3VLFilmConfig(FilmConfig):
    processor: ClassVar[str] = "Qwen3VLVideoProcessor"
    files: ClassVar[Sequence[str]] = (FILM_FILE,)
    normalising: ClassVar[Mapping[str, Any]] = {"image_mean": 0.5, "image_std": 0.5, "rescale_factor": 1 / 255}
    steps: ClassVar[Sequence[str]] = (*STEPS, "do_sample_frames")

    @classmethod
    def _read_sizes(cls, values: Mapping[str, Any]) -> SizesOfAllFrames:
        # These limit pictures; the reference ignores them for films.
        read = {name: value for name, value in values.items() if name not in ("min_pixels", "max_pixels")}
        limits = read_sizes(read, 16, {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768})
        # The reference treats null as false here.
        capped = values.get("cap_pixels_per_frame") or False
        return SizesOfAllFrames(limits, capped, values.get("max_video_tokens", 768))

    def _frame_numbers(self, timeline: Timeline) -> list[int]:
        """Space the frames as numpy.linspace does, without importing numpy wherever options are read."""
        last, num_shown = timeline.num_frames - 1, self._num_shown(timeline)
        step = last / max(1, num_shown - 1)
        return [*(round(place * step) for place in range(num_shown - 1)), last]

    def _num_shown(self, timeline: Timeline) -> int:
        """Return the number of frames: more than the film has only where the reference repeats some, too."""
        if self.num_frames is not None:
            return self.num_frames
        if self.fps is None:
            return min(max(timeline.num_frames, self.min_frames), self.max_frames)
        wanted = int(timeline.num_frames / timeline.frames_per_second * self.fps)
        return min(max(wanted, self.min_frames), self.max_frames, timeline.num_frames)

    def _time_fields(self, numbers: Sequence[int], timeline: Timeline, field: str) -> dict[str, Any]:
        rate, moments = timeline.frames_per_second, in_pairs([timeline.number_in_whole(each) for each in numbers])
        return {"times": tuple((moment.first / rate + moment.last / rate) / 2 for moment in moments)}


@dataclass(frozen=True, slots=True)
class Qwen2VLFilmConfig(FilmConfig):
    """The reference lets its caller choose the frames; here they are those that it would choose by itself."""

    processor: ClassVar[str] = "Qwen2VLVideoProcessor"
    # Published checkpoints have no file of their own for films.
    files: ClassVar[Sequence[str]] = (FILM_FILE, "preprocessor_config.json")
    normalising: ClassVar[Mapping[str, Any]] = {**DEFAULTS_WHERE_SIZES_FOLLOW, "rescale_factor": 1 / 255}
    steps: ClassVar[Sequence[str]] = STEPS

    # Rotary positions per second of a film.
    places_per_second: int = 4

    @classmethod
    def _choose_frames(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Ignore nulls: older versions of transformers saved one for every value that was not set."""
        return frame_options({name: value for name, value in values.items() if value is not None})

    @classmethod
    def _read_sizes(cls, values: Mapping[str, Any]) -> SizesOfEachFrame:
        limits = read_sizes(values, 14, {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768})
        capped = values.get("cap_pixels_per_frame") or False
        return SizesOfEachFrame(limits, capped, values.get("max_video_tokens", 128_000))

    @property
    def most_frames(self) -> int:
        """The most frames that are shown of any film; `num_frames` is rounded."""
        return _round(self.num_frames) if self.num_frames is not None else self.max_frames

    def _frame_numbers(self, timeline: Timeline) -> list[int]:
        num_shown = self._num_shown(timeline)
        step = timeline.num_frames / max(1, num_shown)
        return [int(_float32(place * step)) for place in range(num_shown)]

    def _num_shown(self, timeline: Timeline) -> int:
        """Return the number of frames; all, if the film has fewer than asked for, where the reference fails."""
        most = min(self.max_frames, timeline.num_frames)
        if self.num_frames is not None:
            return min(_round(self.num_frames), _whole(timeline.num_frames))
        if self.fps is None:
            return most
        wanted = timeline.num_frames / timeline.frames_per_second * self.fps
        return _whole(min(max(wanted, self.min_frames), most))

    def _time_fields(self, numbers: Sequence[int], timeline: Timeline, field: str) -> dict[str, Any]:
        """Return each moment's rotary position. Rounding matters, so the order of operations is the reference's."""
        rate = len(numbers) / timeline.num_frames_of_whole * timeline.frames_per_second
        step = _float32(self.places_per_second * _float32(FRAMES_PER_MOMENT / rate))
        places = tuple(int(_float32(moment * step)) for moment in range(len(in_pairs(numbers))))
        if places[-1] > MAX_ROTARY_POSITION:
            seconds = timeline.num_frames_of_whole / timeline.frames_per_second
            limit = f"this model distinguishes times up to {MAX_ROTARY_POSITION // self.places_per_second} seconds"
            raise UnsupportedPictureError(field, f"is {seconds:.0f} seconds long; {limit}")
        return {"places": places}


def _round(num_frames: int) -> int:
    return round(num_frames / FRAMES_PER_MOMENT) * FRAMES_PER_MOMENT


def _whole(num_frames: float) -> int:
    """Round down to whole moments."""
    return int(num_frames) // FRAMES_PER_MOMENT * FRAMES_PER_MOMENT


def _float32(value: float) -> float:
    """Round to float32, as the reference does there, without importing numpy wherever options are read."""
    return float(struct.unpack("f", struct.pack("f", value))[0])
