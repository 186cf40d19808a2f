"""A checkpoint's film preprocessing: which frames are shown, in pairs, the time of each pair, and their size.

Read from the JSON files beside its weights, like `ImageProcessorConfig`. Computes with a film's geometry alone: no
pixels, no torch. The differences between the reference's processors are in `film_processors.py`.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from keepsight.errors import CheckpointConfigError, InvalidArgumentError, UnsupportedFieldError, UnsupportedPictureError
from keepsight.film_sizes import FilmSizes
from keepsight.image_processor_config import (
    BICUBIC,
    NORMALISING,
    ImageProcessorConfig,
    check_positive,
    check_steps,
    naming_fault_source,
    per_channel,
    read_processor,
)
from keepsight.media import FRAMES_PER_MOMENT, Geometry, Moment, PictureLayout, Timeline
from keepsight.shown_sizes import MAX_COUNT, ShownSizes, check_positive_int

# Options that a request may change for its films, and those that an operator may change for all films of a model.
# Neither includes `size` or `resample`: these apply to pictures.
FILM_REQUEST_OPTIONS = frozenset({"fps", "num_frames", "min_frames", "max_frames"})
FILM_OPERATOR_OPTIONS = FILM_REQUEST_OPTIONS | {"cap_pixels_per_frame", "max_video_tokens"}


@dataclass(frozen=True, slots=True)
class FilmPlan:
    """How one film is shown."""

    moments: tuple[Moment, ...]
    layout: PictureLayout
    # How each frame is prepared, with its final size.
    config: ImageProcessorConfig


@dataclass(frozen=True, slots=True)
class FilmConfig(ABC):
    # The reference class that this equals, the files that may describe it (the first found counts), and its defaults.
    processor: ClassVar[str]
    files: ClassVar[Sequence[str]]
    normalising: ClassVar[Mapping[str, Any]]
    # Processing steps that must be enabled.
    steps: ClassVar[Sequence[str]]

    sizes: FilmSizes
    # How each frame is prepared, except for its size. The reference has only one backend for films.
    frame: ImageProcessorConfig
    # Number of frames shown per second of a film. None: all.
    fps: float | None = 2.0
    # Number of frames shown of any film, whatever its length; in place of `fps`.
    num_frames: int | None = None
    # Bounds on the number of frames that follows from `fps`.
    min_frames: int = 4
    max_frames: int = 768
    # The most frames that are shown of a film that was sampled already, which no request chooses. None: `most_frames`.
    max_sampled: int | None = None

    def __post_init__(self) -> None:
        _check_makes_a_moment("min_frames", self.min_frames)
        _check_makes_a_moment("max_frames", self.max_frames)
        if self.num_frames is not None:
            _check_makes_a_moment("num_frames", self.num_frames)
        if self.fps is not None:
            object.__setattr__(self, "fps", _check_rate(self.fps))
        if self.num_frames is not None and self.fps is not None:
            raise InvalidArgumentError("num_frames", "cannot be combined with fps: give only one of them")

    @classmethod
    def from_checkpoint(
        cls, directory: Path, image_config: ImageProcessorConfig | None, **overrides: Any
    ) -> Self | None:
        """Return None if the model takes no films: no video processor is described, or all pictures have one size.

        `overrides` may include the options shared with pictures (`NORMALISING`), which `image_config` has already.
        """
        found = read_processor(directory, "video_processor", *cls.files)
        if found is None or image_config is None or image_config.sizes is None:
            return None
        path, values = found
        cls._check_processor(path, values)
        _check_names(overrides, FILM_OPERATOR_OPTIONS | {*NORMALISING})
        with naming_fault_source(path, overrides):
            _check_one_table({**cls.normalising, **values}, image_config, overrides)
            sizes = cls._read_sizes({**values, **overrides})
            _check_one_tower(sizes.limits, image_config.sizes)
            options = {**cls._choose_frames(values), **frame_options(overrides)}
            return cls(sizes, _frame_of(values, image_config), **options)

    @classmethod
    def _check_processor(cls, path: Path, values: Mapping[str, Any]) -> None:
        if (name := values.get("video_processor_type", cls.processor)) != cls.processor:
            raise CheckpointConfigError(path, f"video_processor_type: only {cls.processor} is supported, got {name!r}")
        check_steps(path, values, cls.steps)

    @classmethod
    def _choose_frames(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the frame fields above that a file sets."""
        return frame_options(values)

    @classmethod
    @abstractmethod
    def _read_sizes(cls, values: Mapping[str, Any]) -> FilmSizes: ...

    def with_overrides(self, **overrides: Any) -> Self:
        """Return a copy changed as a request asks. Refuse changes that let a film have more frames."""
        _check_names(overrides, FILM_REQUEST_OPTIONS)
        given = {name: value for name, value in overrides.items() if value is not None}
        changed = dataclasses.replace(self, **frame_options(given))
        most = self.num_frames or self.max_frames
        for name in ("max_frames", "num_frames"):
            if (requested := given.get(name, 0)) > most:
                raise InvalidArgumentError(name, f"must be at most {most} here, got {requested}")
        return dataclasses.replace(changed, max_frames=min(changed.max_frames, most), max_sampled=self.most_frames)

    @property
    def most_frames(self) -> int:
        """The most frames that are sampled of any film."""
        return self.num_frames or self.max_frames

    def plan(self, geometry: Geometry, field: str = "video") -> FilmPlan:
        """Return how to show a film. Refuse films that cannot be shown; `field` is the caller's name for the film."""
        assert geometry.timeline is not None, geometry
        numbers = self._choose_numbers(geometry.timeline, field)
        if len(numbers) < FRAMES_PER_MOMENT:
            raise UnsupportedPictureError(
                field, "has only 1 frame; send that frame by itself, as a picture (image_url)"
            )
        self.sizes.check_can_show(geometry, field)
        rows, columns = self.sizes.grid_of(geometry, len(numbers))
        layout = PictureLayout(rows * columns, columns=columns, kind="video")
        side = self.sizes.token_side
        return FilmPlan(
            in_pairs(numbers),
            dataclasses.replace(layout, **self._time_fields(numbers, geometry.timeline, field)),
            dataclasses.replace(self.frame, height=rows * side, width=columns * side),
        )

    def _choose_numbers(self, timeline: Timeline, field: str) -> list[int]:
        if timeline.excerpt is None:
            return self._frame_numbers(timeline)
        if timeline.num_frames > (most := self.max_sampled or self.most_frames):
            message = f"has {timeline.num_frames} frames that are not to be sampled; at most {most} are shown"
            raise InvalidArgumentError(field, message)
        return list(range(timeline.num_frames))

    @abstractmethod
    def _frame_numbers(self, timeline: Timeline) -> list[int]:
        """Return the indices of the frames to show: fewer than a moment needs if the film has no more."""

    @abstractmethod
    def _time_fields(self, numbers: Sequence[int], timeline: Timeline, field: str) -> dict[str, Any]:
        """Return the field of `PictureLayout` that holds the time of each moment."""


def in_pairs(numbers: Sequence[int]) -> tuple[Moment, ...]:
    paired = [*numbers, *numbers[-1:]][: len(numbers) + len(numbers) % FRAMES_PER_MOMENT]
    return tuple(Moment(first, last) for first, last in zip(paired[::2], paired[1::2], strict=True))


def _check_makes_a_moment(name: str, value: object) -> None:
    check_positive_int(name, value)
    if value == 1:
        raise InvalidArgumentError(name, f"must be at least {FRAMES_PER_MOMENT}, the number of frames shown together")


def _check_rate(value: object) -> float:
    rate = check_positive("fps", value)
    if rate > MAX_COUNT:
        raise InvalidArgumentError("fps", f"must be at most {MAX_COUNT}, got {value!r}")
    return rate


def _check_names(overrides: Collection[str], known: Collection[str]) -> None:
    for name in overrides:
        if name not in known:
            changeable = ", ".join(sorted(known))
            raise UnsupportedFieldError(name, f"is not an option of films; these can be changed: {changeable}")


def _check_one_table(values: Mapping[str, Any], image_config: ImageProcessorConfig, given: Collection[str]) -> None:
    """Check that films are normalized as pictures are: the device has one table for both."""
    for name in NORMALISING:
        value, pictures = values[name], getattr(image_config, name)
        own = check_positive(name, value) if name == "rescale_factor" else per_channel(name, value)
        if name not in given and own != pictures:
            raise InvalidArgumentError(name, f"must be {pictures}, as for pictures, got {value!r}")


def _check_one_tower(films: ShownSizes, pictures: ShownSizes) -> None:
    for name in ("patch_size", "merge_size"):
        if (own := getattr(films, name)) != (shared := getattr(pictures, name)):
            raise InvalidArgumentError(name, f"must be {shared}, as for pictures, got {own}")


def frame_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the frame fields that are set. Setting either of `num_frames` and `fps` unsets the other."""
    options = {name: values[name] for name in FILM_REQUEST_OPTIONS if name in values}
    if options.get("num_frames") is not None:
        options.setdefault("fps", None)
    elif options.get("fps") is not None:
        options.setdefault("num_frames", None)
    return options


def _frame_of(values: Mapping[str, Any], image_config: ImageProcessorConfig) -> ImageProcessorConfig:
    resample = values.get("resample", BICUBIC)
    return dataclasses.replace(image_config, resample=resample, backend="torchvision", sizes=None)
