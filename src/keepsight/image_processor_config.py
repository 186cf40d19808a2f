"""A checkpoint's picture preprocessing, read from the JSON files beside its weights.

Uses no pixels and no torch. An `ImageProcessorConfig` is validated on construction, so every instance is usable.
"""

import dataclasses
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from keepsight.errors import CheckpointConfigError, InvalidArgumentError, UnsupportedFieldError, renaming_fields
from keepsight.json_fields import read_json_object
from keepsight.media import Geometry
from keepsight.shown_sizes import ShownSizes, check_positive_int, is_integer

Backend = Literal["torchvision", "pil"]
PerChannel = tuple[float, float, float]

# PIL's resampling codes: nearest, lanczos, bilinear, bicubic, box, hamming.
BILINEAR, BICUBIC = 2, 3
# The codes that torch applies to uint8 with the same meaning. It has no box and no hamming, and what "lanczos" means in
# the reference depends on the torchvision version.
RESAMPLES: dict[Backend, frozenset[int]] = {
    "torchvision": frozenset({0, 2, 3}),
    "pil": frozenset(range(6)),
}

# By the processor's name in a file, without the backend: whether a picture's shown size follows from its own size.
HAS_DYNAMIC_SIZE = {"Gemma3ImageProcessor": False, "Qwen2VLImageProcessor": True}
# Qwen2VLImageProcessor's values in place of the defaults below.
DEFAULTS_WHERE_SIZES_FOLLOW: dict[str, Any] = {
    "resample": BICUBIC,
    "image_mean": (0.48145466, 0.4578275, 0.40821073),
    "image_std": (0.26862954, 0.26130258, 0.27577711),
}
# Options that the device applies together, with one lookup table.
NORMALISING = ("image_mean", "image_std", "rescale_factor")
STEPS = ("do_resize", "do_rescale", "do_normalize")
LIMITS = ("min_pixels", "max_pixels")
DEFAULT_EDGES = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}

# Options that a request may change for its pictures, and those that an operator may change for all pictures of a model.
# The rest is fixed by the tower.
PAN_AND_SCAN_OPTIONS = frozenset(
    {
        "do_pan_and_scan",
        "pan_and_scan_min_crop_size",
        "pan_and_scan_max_num_crops",
        "pan_and_scan_min_ratio_to_activate",
    }
)
SIZES_OPTIONS = frozenset({*LIMITS, "size"})
# For any model; a given checkpoint has only one of the two sets above.
REQUEST_OPTIONS = PAN_AND_SCAN_OPTIONS | SIZES_OPTIONS | {"resample"}
OPERATOR_OPTIONS = REQUEST_OPTIONS | {*NORMALISING}


def check_options(options: Mapping[str, object], allowed: Collection[str]) -> None:
    """Check the names of options. Values are checked where they are used, under `prefixing_option_errors`."""
    for name in options:
        if name not in allowed:
            known = ", ".join(sorted(allowed)) or "none"
            raise InvalidArgumentError(f"mm_processor_kwargs.{name}", f"cannot be changed; these can: {known}")


def prefixing_option_errors() -> AbstractContextManager[None]:
    """Report an invalid option under the name that the caller wrote."""
    return renaming_fields("mm_processor_kwargs.{}".format)


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
    # Which of the reference's two implementations the pixels equal; these differ by 1 of 255 in places.
    backend: Backend = "torchvision"
    # None: every picture and crop is resized to height x width.
    sizes: ShownSizes | None = None

    def __post_init__(self) -> None:
        for name in ("height", "width", "pan_and_scan_min_crop_size", "pan_and_scan_max_num_crops"):
            check_positive_int(name, getattr(self, name))
        for name in ("rescale_factor", "pan_and_scan_min_ratio_to_activate"):
            object.__setattr__(self, name, check_positive(name, getattr(self, name)))
        if not isinstance(self.do_pan_and_scan, bool):
            raise InvalidArgumentError("do_pan_and_scan", f"must be true or false, got {self.do_pan_and_scan!r}")
        # JSON gives lists; tuples make configurations hashable.
        object.__setattr__(self, "image_mean", per_channel("image_mean", self.image_mean))
        object.__setattr__(self, "image_std", per_channel("image_std", self.image_std))
        if 0.0 in self.image_std:
            raise InvalidArgumentError("image_std", f"must not contain 0, got {list(self.image_std)}")
        self._check_backend()

    def _check_backend(self) -> None:
        if not isinstance(self.backend, str) or self.backend not in RESAMPLES:
            raise InvalidArgumentError("backend", f"must be one of {', '.join(RESAMPLES)}, got {self.backend!r}")
        allowed = RESAMPLES[self.backend]
        if not is_integer(self.resample) or self.resample not in allowed:
            codes = ", ".join(map(str, sorted(allowed)))
            raise InvalidArgumentError(
                "resample", f"must be one of {codes} for the {self.backend} backend, got {self.resample!r}"
            )

    @classmethod
    def from_checkpoint(cls, directory: Path, **overrides: Any) -> Self | None:
        """Return the checkpoint's configuration, or None if it has none because it takes no pictures."""
        found = read_processor(directory, "image_processor", "preprocessor_config.json")
        if found is None:
            return None
        path, values = found
        check_steps(path, values, STEPS)
        # The overrides may repair what the file says (a resample that only one backend has), so all is checked at once.
        with naming_fault_source(path, overrides):
            fields = _fields_from_json(values)
            return cls(**{**fields, **_fields_from_overrides(overrides, fields.get("sizes"))})

    def with_overrides(self, **overrides: Any) -> Self:
        """Return a copy with some fields changed, as a request may ask."""
        with _naming_given_option(overrides):
            changed = dataclasses.replace(self, **_fields_from_overrides(overrides, self.sizes))
            if changed.sizes is not None and self.sizes is not None:
                changed.sizes.check_cost_no_more_than(self.sizes)
        return changed

    @property
    def request_options(self) -> frozenset[str]:
        """The options that one request may change for its pictures."""
        return REQUEST_OPTIONS - (SIZES_OPTIONS if self.sizes is None else PAN_AND_SCAN_OPTIONS)

    @property
    def max_tokens_per_picture(self) -> int:
        """The most tokens of any picture; 0 if all pictures and crops have the number that the model fixes."""
        return 0 if self.sizes is None else self.sizes.max_tokens

    def settled_for(self, geometry: Geometry) -> Self:
        """Return a copy for pictures of this size only, with the shown size resolved."""
        if self.sizes is None:
            return self
        shown = self.sizes.size_of(geometry)
        return dataclasses.replace(self, height=shown.height, width=shown.width, sizes=None)


def read_processor(directory: Path, section: str, *older_files: str) -> tuple[Path, dict[str, Any]] | None:
    """Return the file that describes a processor, and its values; None if there is none.

    transformers now writes a section of processor_config.json; older versions wrote files, of which the first counts.
    """
    path = directory / "processor_config.json"
    if path.is_file():
        values = read_json_object(path).get(section)
        if isinstance(values, dict):
            return path, values
        if values is not None:
            raise CheckpointConfigError(path, f"{section}: must be an object, got {values!r}")
    paths = [directory / name for name in older_files if (directory / name).is_file()]
    return (paths[0], read_json_object(paths[0])) if paths else None


@contextmanager
def naming_fault_source(path: Path, overrides: Collection[str]) -> Iterator[None]:
    """Report an invalid field as the override's fault if there is one, else as the file's."""
    try:
        yield
    except InvalidArgumentError as error:
        if error.field in overrides:
            raise
        raise CheckpointConfigError(path, str(error)) from None


def check_steps(path: Path, values: Mapping[str, Any], names: Collection[str]) -> None:
    for name in names:
        # The reference treats null as false here; only an absent value means the default.
        if values.get(name, True) is not True:
            raise CheckpointConfigError(path, f"{name}: only true is supported, got {values[name]!r}")


def _fields_from_json(values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that the file sets; refuse null where the reference would fail on it.

    The file's pan-and-scan values are not read: Gemma3Processor, the reference, passes its own with every call.
    """
    fields: dict[str, Any] = {name: values[name] for name in ("resample", *NORMALISING) if name in values}
    if _has_dynamic_size(values):
        return {**DEFAULTS_WHERE_SIZES_FOLLOW, **fields, "sizes": read_sizes(values, 14, DEFAULT_EDGES)}
    if "size" in values:
        fields["height"], fields["width"] = _height_and_width(values["size"])
    return fields


def _has_dynamic_size(values: dict[str, Any]) -> bool:
    """Return whether sizes follow from the picture's own, by the processor's name or else by the keys of `size`."""
    name, size = values.get("image_processor_type"), values.get("size")
    known = HAS_DYNAMIC_SIZE.get(str(name).removesuffix("Fast").removesuffix("Pil"))
    return isinstance(size, dict) and size.keys() == DEFAULT_EDGES.keys() if known is None else known


def read_sizes(values: Mapping[str, Any], patch_size: int, default_edges: Mapping[str, int]) -> ShownSizes:
    """Read the sizes of a processor whose sizes follow from the picture's own. `patch_size` is the default."""
    if (depth := values.get("temporal_patch_size", 2)) != 2:
        raise InvalidArgumentError("temporal_patch_size", f"only 2 is supported, got {depth!r}")
    edges = dict(default_edges) if values.get("size") is None else _without_repeated(values["size"], values)
    limits = _read_limits({**values, "size": edges})
    if len(limits) < 2:
        raise InvalidArgumentError("size", f"must give a {' and a '.join(DEFAULT_EDGES)}, got {edges!r}")
    return ShownSizes(values.get("patch_size", patch_size), values.get("merge_size", 2), **limits)


def _without_repeated(size: Any, values: Mapping[str, Any]) -> Any:
    """Return `size` without limits that are also given beside it: older versions of transformers wrote them twice."""
    repeated = {name for name in LIMITS if values.get(name) is not None}
    return {name: edge for name, edge in size.items() if name not in repeated} if isinstance(size, dict) else size


def _read_limits(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the limits. `min_pixels` and `max_pixels` take precedence over the edges in `size`."""
    size = values.get("size")
    if size is not None and not (isinstance(size, dict) and size.keys() <= DEFAULT_EDGES.keys()):
        raise InvalidArgumentError("size", f"may only give a {' and a '.join(DEFAULT_EDGES)}, got {size!r}")
    limits = {name: (size or {}).get(edge) for name, edge in zip(LIMITS, DEFAULT_EDGES, strict=True)}
    limits.update({name: values[name] for name in LIMITS if values.get(name) is not None})
    return {name: value for name, value in limits.items() if value is not None}


def _fields_from_overrides(overrides: dict[str, Any], sizes: ShownSizes | None) -> dict[str, Any]:
    """Return the fields to change; options that belong to `sizes` are merged into a new value of it."""
    _check_names(overrides, sizes)
    fields = {name: value for name, value in overrides.items() if name not in SIZES_OPTIONS}
    if sizes is None:
        return fields
    with _naming_given_option(overrides):
        return {**fields, "sizes": dataclasses.replace(sizes, **_read_limits(overrides))}


@contextmanager
def _naming_given_option(overrides: dict[str, Any]) -> Iterator[None]:
    """Report a limit that the caller did not name under the option that it did give: `size`, or the other limit."""
    try:
        yield
    except InvalidArgumentError as error:
        if error.field not in LIMITS or error.field in overrides:
            raise
        given = next(name for name in ("size", *LIMITS) if name in overrides)
        raise InvalidArgumentError(given, error.message) from error


def _height_and_width(size: Any) -> tuple[Any, Any]:
    if isinstance(size, int):
        return size, size
    if isinstance(size, list) and len(size) == 2:
        return size[0], size[1]
    if isinstance(size, dict) and size.keys() == {"height", "width"}:
        return size["height"], size["width"]
    raise InvalidArgumentError("size", f"must give a height and a width, got {size!r}")


def _check_names(overrides: dict[str, Any], sizes: ShownSizes | None) -> None:
    fields = {field.name for field in dataclasses.fields(ImageProcessorConfig)} - {"sizes"}
    known = fields if sizes is None else fields - PAN_AND_SCAN_OPTIONS | SIZES_OPTIONS
    for name in overrides:
        if name not in known:
            changeable = ", ".join(sorted(known & OPERATOR_OPTIONS))
            raise UnsupportedFieldError(
                name, f"is not an option of this checkpoint's image processor; these can be changed: {changeable}"
            )


def _is_number(value: Any) -> bool:
    """Return whether `value` is a number, and finite as a float."""
    return (isinstance(value, float) or is_integer(value)) and abs(value) <= sys.float_info.max


def check_positive(name: str, value: Any) -> float:
    if not _is_number(value) or value <= 0:
        raise InvalidArgumentError(name, f"must be a number above 0, got {value!r}")
    return float(value)


def per_channel(name: str, value: Any) -> PerChannel:
    values = [value] * 3 if _is_number(value) else value
    if not isinstance(values, list | tuple) or len(values) != 3 or not all(map(_is_number, values)):
        raise InvalidArgumentError(name, f"must be one number or three, got {value!r}")
    red, green, blue = map(float, values)
    return red, green, blue
