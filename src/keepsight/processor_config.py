"""How a checkpoint's media are prepared for its encoder: read once; requests may override some options."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from keepsight.borrowed import BorrowedProcessor, is_borrowed
from keepsight.errors import CheckpointConfigError, InvalidArgumentError
from keepsight.film_config import FILM_OPERATOR_OPTIONS, FILM_REQUEST_OPTIONS, FilmConfig
from keepsight.film_processors import read_film_config
from keepsight.image_processor_config import NORMALISING, ImageProcessorConfig, check_options, prefixing_option_errors
from keepsight.image_processor_config import OPERATOR_OPTIONS as IMAGE_OPERATOR_OPTIONS
from keepsight.json_fields import JsonFields
from keepsight.sound_config import SoundConfig

# For any model.
OPERATOR_OPTIONS = IMAGE_OPERATOR_OPTIONS | FILM_OPERATOR_OPTIONS


@dataclass(frozen=True, slots=True)
class ProcessorConfig:
    # Without effect if the model takes no pictures.
    image: ImageProcessorConfig
    # None: the model takes no films (or sounds).
    film: FilmConfig | None = None
    sound: SoundConfig | None = None
    takes_pictures: bool = True
    # Prepares the pictures of a borrowed model, in place of `image`.
    borrowed: BorrowedProcessor | None = None

    @classmethod
    def from_checkpoint(
        cls, directory: Path, backend: str, overrides: Mapping[str, Any], model_impl: str = "auto"
    ) -> Self | None:
        """Return None for a text-only model. Two files state the size of pictures, and they must agree."""
        fields = JsonFields.read(directory / "config.json")
        if is_borrowed(directory, model_impl):
            return cls._of_borrowed(directory, overrides) if "vision_config" in fields else None
        if "vision_config" not in fields:
            return cls._of_sounds(directory, fields.section("audio_config"), overrides)
        with prefixing_option_errors():
            config = cls._read(directory, backend, overrides, fields)
        if config is None:
            raise CheckpointConfigError(
                directory / "preprocessor_config.json", "is missing, though config.json has a vision tower"
            )
        _check_agree(fields.section("vision_config"), config.image)
        return config

    @classmethod
    def _of_borrowed(cls, directory: Path, overrides: Mapping[str, Any]) -> Self:
        check_options(overrides, allowed=())
        return cls(ImageProcessorConfig(), borrowed=BorrowedProcessor.from_checkpoint(directory))

    @classmethod
    def _of_sounds(cls, directory: Path, audio: JsonFields, overrides: Mapping[str, Any]) -> Self | None:
        if not audio.values():
            return None
        sound = SoundConfig.from_checkpoint(directory)
        _check_hears_all(audio, sound)
        check_options(overrides, allowed=())
        return cls(ImageProcessorConfig(), sound=sound, takes_pictures=False)

    @classmethod
    def _read(cls, directory: Path, backend: str, overrides: Mapping[str, Any], fields: JsonFields) -> Self | None:
        of_pictures, of_films = _split(overrides)
        image = ImageProcessorConfig.from_checkpoint(directory, backend=backend, **of_pictures)
        if image is None:
            return None
        of_both = {name: value for name, value in of_pictures.items() if name in NORMALISING}
        film = read_film_config(directory, fields, image, **of_both, **of_films)
        if film is None and of_films:
            raise InvalidArgumentError(next(iter(of_films)), "is an option of videos, which this model does not take")
        return cls(image, film)

    def with_overrides(self, overrides: Mapping[str, Any]) -> "ProcessorConfig":
        """Return a copy with some options changed, as a request may ask."""
        of_pictures, of_films = _split(overrides)
        image = self.image.with_overrides(**of_pictures) if of_pictures else self.image
        film = self.film.with_overrides(**of_films) if self.film and of_films else self.film
        return replace(self, image=image, film=film)

    @property
    def request_options(self) -> frozenset[str]:
        """The options that one request may change for its pictures and films; there are none for sounds."""
        of_pictures = self.image.request_options if self.takes_pictures and not self.borrowed else frozenset()
        return of_pictures | (FILM_REQUEST_OPTIONS if self.film else frozenset())

    @property
    def max_tokens_per_item(self) -> int:
        """The most tokens of any media item; 0 if all, crops included, have the number that the model fixes."""
        if self.borrowed:
            return self.borrowed.max_tokens
        of_film = self.film.sizes.max_tokens_per_moment if self.film else 0
        return max(self.image.max_tokens_per_picture, of_film, self.sound.max_tokens if self.sound else 0)


# For text-only models; without effect.
NO_PROCESSOR = ProcessorConfig(ImageProcessorConfig(), takes_pictures=False)


def _split(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split options into those of pictures and those of films."""
    of_films = {name: value for name, value in options.items() if name in FILM_OPERATOR_OPTIONS}
    return {name: value for name, value in options.items() if name not in of_films}, of_films


def _check_agree(vision: JsonFields, config: ImageProcessorConfig) -> None:
    if config.sizes is not None:
        expected = {"patch_size": config.sizes.patch_size, "spatial_merge_size": config.sizes.merge_size}
        for name, value in {**expected, "temporal_patch_size": 2}.items():
            if vision.integer(name) != value:
                raise vision.refuse(name, f"is {vision.integer(name)}, but the image processor has {value}")
    elif "spatial_merge_size" in vision:
        message = f"is for pictures of many sizes, but all are resized to {config.width} x {config.height}"
        raise vision.refuse("spatial_merge_size", message)
    elif "image_size" in vision:
        side = vision.integer("image_size")
        if (config.width, config.height) != (side, side):
            raise vision.refuse(
                "image_size", f"is {side}, but pictures are resized to {config.width} x {config.height}"
            )


def _check_hears_all(audio: JsonFields, sound: SoundConfig) -> None:
    """Check that tower and feature extractor agree. The tower's second convolution keeps every second frame."""
    expected = {"num_mel_bins": (128, sound.num_mels), "max_source_positions": (1500, sound.max_frames // 2)}
    for name, (default, value) in expected.items():
        if (own := audio.integer(name, default)) != value:
            raise audio.refuse(name, f"is {own}, but the feature extractor has {value}")
