"""How a checkpoint wants its pictures prepared, read from the JSON files beside its weights.

Knows no pixels and no torch.  A value of this class is checked when it is made: whoever holds one may use it.
"""

import dataclasses
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from keepsight.errors import CheckpointConfigError, InvalidArgumentError, UnsupportedFieldError
from keepsight.json_fields import read_json_object

Backend = Literal["torchvision", "pil"]
PerChannel = tuple[float, float, float]

# PIL's resampling codes: nearest, lanczos, bilinear, bicubic, box, hamming.
BILINEAR = 2
# What torch resizes as uint8 under the same meaning. Its box and hamming do not exist, and what "lanczos" means to the
# reference depends on the torchvision version.
RESAMPLES: dict[Backend, frozenset[int]] = {
    "torchvision": frozenset({0, 2, 3}),
    "pil": frozenset(range(6)),
}

# Larger ones would not reach another process.
MAX_COUNT = 2**31 - 1

# What may be changed of one request's pictures, and what of all pictures of a model: the rest is the tower's.
REQUEST_OPTIONS = frozenset(
    {
        "do_pan_and_scan",
        "pan_and_scan_min_crop_size",
        "pan_and_scan_max_num_crops",
        "pan_and_scan_min_ratio_to_activate",
        "resample",
    }
)
OPERATOR_OPTIONS = REQUEST_OPTIONS | {"image_mean", "image_std", "rescale_factor"}


def check_options(options: Mapping[str, object], allowed: Collection[str]) -> None:
    """Their names; what they say is checked where they are used, and told by `options_named`."""
    for name in options:
        if name not in allowed:
            known = ", ".join(sorted(allowed))
            raise InvalidArgumentError(f"mm_processor_kwargs.{name}", f"cannot be changed; these can: {known}")


@contextmanager
def options_named() -> Iterator[None]:
    """A fault of one is told as the caller wrote it."""
    try:
        yield
    except InvalidArgumentError as error:
        raise type(error)(f"mm_processor_kwargs.{error.field}", error.message) from error


@dataclass(frozen=True, slots=True)
class ImageProcessorConfig:
    """The defaults are those of Gemma3Processor and Gemma3ImageProcessor."""

    height: int = 224
    width: int = 224
    resample: int = BILINEAR
    image_mean: PerChannel = (0.5, 0.5, 0.5)
    image_std: PerChannel = (0.5, 0.5, 0.5)
    rescale_factor: float = 1 / 255
    do_pan_and_scan: bool = False
    pan_and_scan_min_crop_size: int = 256
    pan_and_scan_max_num_crops: int = 4
    pan_and_scan_min_ratio_to_activate: float = 1.2
    # Which of the reference's two implementations the pixels equal; they differ by 1 of 255 here and there.
    backend: Backend = "torchvision"

    def __post_init__(self) -> None:
        for name in ("height", "width", "pan_and_scan_min_crop_size", "pan_and_scan_max_num_crops"):
            _check_positive_int(name, getattr(self, name))
        for name in ("rescale_factor", "pan_and_scan_min_ratio_to_activate"):
            object.__setattr__(self, name, _positive(name, getattr(self, name)))
        if not isinstance(self.do_pan_and_scan, bool):
            raise InvalidArgumentError("do_pan_and_scan", f"must be true or false, got {self.do_pan_and_scan!r}")
        # Lists are what JSON gives; as tuples two equal configurations hash equally.
        object.__setattr__(self, "image_mean", _per_channel("image_mean", self.image_mean))
        object.__setattr__(self, "image_std", _per_channel("image_std", self.image_std))
        if 0.0 in self.image_std:
            raise InvalidArgumentError("image_std", f"must not contain 0, got {list(self.image_std)}")
        self._check_backend()

    def _check_backend(self) -> None:
        if not isinstance(self.backend, str) or self.backend not in RESAMPLES:
            raise InvalidArgumentError("backend", f"must be one of {', '.join(RESAMPLES)}, got {self.backend!r}")
        allowed = RESAMPLES[self.backend]
        if not _is_integer(self.resample) or self.resample not in allowed:
            codes = ", ".join(map(str, sorted(allowed)))
            raise InvalidArgumentError(
                "resample", f"must be one of {codes} for the {self.backend} backend, got {self.resample!r}"
            )

    @classmethod
    def from_checkpoint(cls, directory: Path, **overrides: Any) -> Self | None:
        """The checkpoint's configuration, or None where it has none because it takes no pictures."""
        found = _read_image_processor(directory)
        if found is None:
            return None
        path, values = found
        # The overrides may repair what the file says (a resample that only one backend has), so all is checked at once,
        # and a complaint is laid at the door of whoever set the field.
        _check_names(overrides)
        _check_steps(path, values)
        try:
            return cls(**{**_fields_from_json(values), **overrides})
        except InvalidArgumentError as error:
            if error.field in overrides:
                raise
            raise CheckpointConfigError(path, str(error)) from None

    def with_overrides(self, **overrides: Any) -> Self:
        """The same with some fields changed, as a request may ask."""
        _check_names(overrides)
        return dataclasses.replace(self, **overrides)


def _read_image_processor(directory: Path) -> tuple[Path, dict[str, Any]] | None:
    """transformers writes a section of processor_config.json today, and once wrote preprocessor_config.json."""
    path = directory / "processor_config.json"
    if path.is_file():
        section = read_json_object(path).get("image_processor")
        if isinstance(section, dict):
            return path, section
        if section is not None:
            raise CheckpointConfigError(path, f"image_processor: must be an object, got {section!r}")
    path = directory / "preprocessor_config.json"
    return (path, read_json_object(path)) if path.is_file() else None


def _check_steps(path: Path, values: dict[str, Any]) -> None:
    for name in ("do_resize", "do_rescale", "do_normalize"):
        # To the reference null means false here; only an absent value means the default.
        if values.get(name, True) is not True:
            raise CheckpointConfigError(path, f"{name}: only true is supported, got {values[name]!r}")


def _fields_from_json(values: dict[str, Any]) -> dict[str, Any]:
    """The fields that the file sets; a null is refused where the reference would fail on it.

    The pan-and-scan values of the file are not read: Gemma3Processor passes its own with every call, whatever the file
    says, and that is the reference.
    """
    fields: dict[str, Any] = {
        name: values[name] for name in ("resample", "image_mean", "image_std", "rescale_factor") if name in values
    }
    if "size" in values:
        fields["height"], fields["width"] = _height_and_width(values["size"])
    return fields


def _height_and_width(size: Any) -> tuple[Any, Any]:
    if isinstance(size, int):
        return size, size
    if isinstance(size, list) and len(size) == 2:
        return size[0], size[1]
    if isinstance(size, dict) and size.keys() == {"height", "width"}:
        return size["height"], size["width"]
    raise InvalidArgumentError("size", f"must give a height and a width, got {size!r}")


def _check_names(overrides: dict[str, Any]) -> None:
    known = {field.name for field in dataclasses.fields(ImageProcessorConfig)}
    for name in overrides:
        if name not in known:
            raise UnsupportedFieldError(name, f"is no option of the image processor; it has {', '.join(sorted(known))}")


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    """Finite, as a float too."""
    return (isinstance(value, float) or _is_integer(value)) and abs(value) <= sys.float_info.max


def _check_positive_int(name: str, value: Any) -> None:
    if not _is_integer(value) or not 1 <= value <= MAX_COUNT:
        raise InvalidArgumentError(name, f"must be an integer from 1 to {MAX_COUNT}, got {value!r}")


def _positive(name: str, value: Any) -> float:
    if not _is_number(value) or value <= 0:
        raise InvalidArgumentError(name, f"must be a number above 0, got {value!r}")
    return float(value)


def _per_channel(name: str, value: Any) -> PerChannel:
    values = [value] * 3 if _is_number(value) else value
    if not isinstance(values, list | tuple) or len(values) != 3 or not all(map(_is_number, values)):
        raise InvalidArgumentError(name, f"must be one number or three, got {value!r}")
    red, green, blue = map(float, values)
    return red, green, blue
