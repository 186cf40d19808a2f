"""The two processor files of a checkpoint, with nulls and faults; values equal those that transformers reads."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from keepsight.demo import checkpoint_path
from keepsight.errors import CheckpointConfigError, InvalidArgumentError, UnsupportedFieldError
from keepsight.frontend.identity.pan_and_scan import plan_crops
from keepsight.image_processor_config import ImageProcessorConfig
from keepsight.media import Geometry
from keepsight.shown_sizes import ShownSizes
from tests.frontend.qwen_like import PROCESSOR as PUBLISHED_BY_QWEN
from tests.frontend.reference_processor import skip_where_the_reference_is_older

# As published by Google with gemma-3-4b-it.
PUBLISHED: dict[str, Any] = {
    "do_convert_rgb": None,
    "do_normalize": True,
    "do_pan_and_scan": None,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_processor_type": "Gemma3ImageProcessor",
    "image_seq_length": 256,
    "image_std": [0.5, 0.5, 0.5],
    "pan_and_scan_max_num_crops": None,
    "pan_and_scan_min_crop_size": None,
    "pan_and_scan_min_ratio_to_activate": None,
    "processor_class": "Gemma3Processor",
    "resample": 2,
    "rescale_factor": 0.00392156862745098,
    "size": {"height": 896, "width": 896},
}
DEMO = checkpoint_path()


def write(directory: Path, values: object, name: str = "preprocessor_config.json") -> Path:
    (directory / name).write_text(json.dumps(values))
    return directory


def read(directory: Path, **overrides: Any) -> ImageProcessorConfig:
    config = ImageProcessorConfig.from_checkpoint(directory, **overrides)
    assert config is not None
    return config


def test_the_published_file_gives_the_published_values(tmp_path: Path) -> None:
    assert read(write(tmp_path, PUBLISHED)) == ImageProcessorConfig(height=896, width=896)


def test_the_demo_checkpoint_is_readable() -> None:
    assert read(DEMO).width > 0


def test_a_text_only_checkpoint_has_none(tmp_path: Path) -> None:
    assert ImageProcessorConfig.from_checkpoint(tmp_path) is None
    write(tmp_path, {"image_seq_length": 256}, "processor_config.json")
    assert ImageProcessorConfig.from_checkpoint(tmp_path) is None


def test_the_nested_section_takes_precedence_over_the_older_file(tmp_path: Path) -> None:
    write(tmp_path, PUBLISHED)
    write(tmp_path, {"image_processor": {**PUBLISHED, "resample": 3}}, "processor_config.json")
    assert read(tmp_path).resample == 3


def test_without_the_nested_section_the_older_file_is_read(tmp_path: Path) -> None:
    write(tmp_path, {**PUBLISHED, "resample": 3})
    write(tmp_path, {"image_seq_length": 256}, "processor_config.json")
    assert read(tmp_path).resample == 3


PRESENT = ("size", "resample", "image_mean", "image_std", "rescale_factor")


@pytest.mark.parametrize(
    "values",
    [
        {},
        {name: value for name, value in PUBLISHED.items() if name not in PRESENT},
        {**PUBLISHED, "size": 448},
        {**PUBLISHED, "size": [448, 224]},
        {**PUBLISHED, "image_mean": 0.25, "image_std": [0.1, 0.2, 0.3], "rescale_factor": 0.1, "resample": 3},
        {**PUBLISHED, "do_convert_rgb": True, "do_center_crop": None, "unknown_to_anybody": 1},
    ],
)
def test_values_equal_those_read_by_transformers(tmp_path: Path, values: dict[str, Any]) -> None:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    write(tmp_path, values)
    ours = read(tmp_path)
    reference: Any = Gemma3ImageProcessorPil.from_pretrained(tmp_path)
    assert (ours.height, ours.width) == (reference.size["height"], reference.size["width"])
    assert (ours.resample, ours.rescale_factor) == (reference.resample, reference.rescale_factor)
    for name in ("image_mean", "image_std"):
        value = getattr(reference, name)
        assert getattr(ours, name) == (tuple(value) if isinstance(value, list | tuple) else (value,) * 3)


@pytest.mark.parametrize("name", PRESENT)
def test_a_null_that_transformers_rejects_is_refused(tmp_path: Path, name: str) -> None:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    write(tmp_path, {**PUBLISHED, name: None})
    with pytest.raises(ValueError):
        Gemma3ImageProcessorPil.from_pretrained(tmp_path)(Image.new("RGB", (9, 9)))
    with pytest.raises(CheckpointConfigError, match=name):
        read(tmp_path)


def test_pan_and_scan_in_the_file_is_overruled_as_gemma3processor_does(tmp_path: Path) -> None:
    skip_where_the_reference_is_older()
    from transformers import Gemma3Processor

    shutil.copytree(DEMO, tmp_path / "demo")
    path = tmp_path / "demo" / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "do_pan_and_scan": True}))
    processor = Gemma3Processor.from_pretrained(path.parent)
    wide = Image.new("RGB", (900, 300))
    pixels = processor(text="<start_of_image>", images=[wide], return_tensors="pt")["pixel_values"]
    config = read(path.parent)
    assert len(pixels) == 1 + len(plan_crops(Geometry(*wide.size), config)) == 1
    assert {name: getattr(config, name, True) for name in processor.images_kwargs} == processor.images_kwargs


def test_overrides_take_precedence_over_the_file(tmp_path: Path) -> None:
    config = read(write(tmp_path, PUBLISHED), do_pan_and_scan=True, backend="pil")
    assert (config.do_pan_and_scan, config.backend) == (True, "pil")


def test_with_overrides_leaves_the_original_unchanged(tmp_path: Path) -> None:
    config = read(write(tmp_path, PUBLISHED))
    assert config.with_overrides(do_pan_and_scan=True).do_pan_and_scan
    assert not config.do_pan_and_scan


def test_an_unknown_override_is_refused_by_name(tmp_path: Path) -> None:
    config = read(write(tmp_path, PUBLISHED))
    with pytest.raises(UnsupportedFieldError, match="do_something") as caught:
        config.with_overrides(do_something=True)
    assert caught.value.field == "do_something"
    with pytest.raises(UnsupportedFieldError, match="do_something"):
        read(tmp_path, do_something=True)


@pytest.mark.parametrize("name", ["do_resize", "do_rescale", "do_normalize"])
def test_a_disabled_step_is_refused_with_file_and_field(tmp_path: Path, name: str) -> None:
    for value in (False, None):
        with pytest.raises(CheckpointConfigError, match=rf"preprocessor_config\.json: {name}"):
            read(write(tmp_path, {**PUBLISHED, name: value}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("size", {"shortest_edge": 896}),
        ("size", "large"),
        ("size", {"height": 0, "width": 896}),
        ("resample", 9),
        ("resample", "bilinear"),
        ("resample", True),
        ("resample", 2.0),
        ("resample", [2]),
        ("image_mean", [0.5, 0.5]),
        ("image_mean", "grey"),
        ("image_std", [0.5, 0.0, 0.5]),
        ("image_std", 0),
        ("rescale_factor", 0),
        ("rescale_factor", "1/255"),
        ("rescale_factor", 10**400),
    ],
)
def test_an_invalid_value_is_refused_with_file_and_field(tmp_path: Path, field: str, value: object) -> None:
    named = "height" if isinstance(value, dict) and "height" in value else field
    with pytest.raises(CheckpointConfigError, match=rf"preprocessor_config\.json: {named}:"):
        read(write(tmp_path, {**PUBLISHED, field: value}))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\ufeff{}"])
def test_a_file_that_is_no_json_object_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "preprocessor_config.json").write_text(text)
    with pytest.raises(CheckpointConfigError, match=r"preprocessor_config\.json"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("height", 0),
        ("width", 1.5),
        ("do_pan_and_scan", 1),
        ("pan_and_scan_min_crop_size", 0),
        ("pan_and_scan_min_crop_size", 10**400),
        ("pan_and_scan_max_num_crops", -1),
        ("pan_and_scan_max_num_crops", 2**64),
        ("pan_and_scan_min_ratio_to_activate", 0),
        ("pan_and_scan_min_ratio_to_activate", float("nan")),
        ("pan_and_scan_min_ratio_to_activate", 10**400),
        ("resample", {}),
        ("backend", "opencv"),
        ("backend", ["pil"]),
    ],
)
def test_an_invalid_override_is_the_caller_s_error(tmp_path: Path, field: str, value: object) -> None:
    write(tmp_path, PUBLISHED)
    for make in (read(tmp_path).with_overrides, lambda **changes: read(tmp_path, **changes)):
        with pytest.raises(InvalidArgumentError) as caught:
            make(**{field: value})
        assert caught.value.field == field


def test_a_filter_that_only_pillow_has_needs_the_pil_backend(tmp_path: Path) -> None:
    write(tmp_path, {**PUBLISHED, "resample": 5})
    assert read(tmp_path, backend="pil").resample == 5
    with pytest.raises(CheckpointConfigError, match="torchvision"):
        read(tmp_path)


@pytest.mark.parametrize("name", ["rescale_factor", "pan_and_scan_min_ratio_to_activate"])
def test_a_whole_number_becomes_a_float(name: str) -> None:
    assert isinstance(getattr(ImageProcessorConfig().with_overrides(**{name: 10**30}), name), float)


def test_lists_become_tuples_so_that_configs_are_hashable() -> None:
    of_lists = ImageProcessorConfig(image_mean=[0.5, 0.5, 0.5])  # type: ignore[arg-type]
    assert hash(of_lists) == hash(ImageProcessorConfig())
    assert dataclasses.replace(of_lists) == of_lists


# Sizes that depend on the picture's own ---------------------------------------------------------------------------


def sizes_of(directory: Path, **overrides: Any) -> ShownSizes:
    sizes = read(directory, **overrides).sizes
    assert sizes is not None
    return sizes


def test_the_file_published_by_qwen_gives_the_published_values(tmp_path: Path) -> None:
    config = read(write(tmp_path, PUBLISHED_BY_QWEN))
    assert config == ImageProcessorConfig(resample=3, sizes=ShownSizes(16, 2, 65_536, 16_777_216))
    assert config.max_tokens_per_picture == 16_384
    assert read(write(tmp_path, PUBLISHED)).max_tokens_per_picture == 0


@pytest.mark.parametrize("suffix", ["", "Fast", "Pil"])
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"size": None, "min_pixels": None, "max_pixels": None},
        {"min_pixels": 4000},
        {"size": {"shortest_edge": 5000, "longest_edge": 6000}, "max_pixels": 70_000},
        {"size": {"min_pixels": 4000, "max_pixels": 5000}, "min_pixels": 4000, "max_pixels": 70_000},
        {"min_pixels": 3136, "max_pixels": 12_845_056, "patch_size": 14, "merge_size": 3, "resample": 2},
        {"size": {"shortest_edge": 5000, "longest_edge": 6000}, "image_mean": [0.1, 0.2, 0.3], "rescale_factor": 0.1},
    ],
)
def test_qwen_values_equal_those_read_by_transformers(tmp_path: Path, values: dict[str, Any], suffix: str) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    write(tmp_path, values | {"image_processor_type": f"Qwen2VLImageProcessor{suffix}"})
    ours, reference = read(tmp_path), Qwen2VLImageProcessorPil.from_pretrained(tmp_path)
    limits = (reference.size["shortest_edge"], reference.size["longest_edge"])
    assert ours.sizes == ShownSizes(reference.patch_size, reference.merge_size, *limits)
    assert (ours.resample, ours.rescale_factor) == (reference.resample, reference.rescale_factor)
    assert (ours.image_mean, ours.image_std) == (tuple(reference.image_mean), tuple(reference.image_std))


def test_a_file_without_a_processor_type_is_recognized_by_its_sizes(tmp_path: Path) -> None:
    unnamed = {name: value for name, value in PUBLISHED_BY_QWEN.items() if name != "image_processor_type"}
    assert sizes_of(write(tmp_path, unnamed)) == sizes_of(write(tmp_path, PUBLISHED_BY_QWEN))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temporal_patch_size", 1),
        ("temporal_patch_size", None),
        ("patch_size", None),
        ("patch_size", 0),
        ("merge_size", "2"),
        ("size", {"shortest_edge": 5000}),
        ("size", {"height": 896, "width": 896}),
        ("size", 448),
        ("min_pixels", 0),
        ("max_pixels", 65_535),
        ("do_resize", False),
        ("resample", None),
        ("image_mean", None),
    ],
)
def test_an_invalid_value_in_a_qwen_file_is_refused_by_name(tmp_path: Path, field: str, value: object) -> None:
    with pytest.raises(CheckpointConfigError, match=rf"preprocessor_config\.json: {field}:"):
        read(write(tmp_path, PUBLISHED_BY_QWEN | {field: value}))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_pixels": 70_000}, (65_536, 70_000)),
        ({"min_pixels": 1}, (1, 16_777_216)),
        ({"size": {"longest_edge": 70_000}}, (65_536, 70_000)),
        ({"size": {"shortest_edge": 5, "longest_edge": 70_000}, "min_pixels": 6}, (6, 70_000)),
        ({"size": None, "max_pixels": None}, (65_536, 16_777_216)),
    ],
)
def test_pixel_limits_may_be_given_in_every_accepted_form(
    tmp_path: Path, fields: dict[str, Any], expected: tuple[int, int]
) -> None:
    expected_sizes = ShownSizes(16, 2, *expected)
    assert sizes_of(write(tmp_path, PUBLISHED_BY_QWEN), **fields) == expected_sizes
    assert read(tmp_path).with_overrides(**fields).sizes == expected_sizes


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"max_pixels": 65_535}, "max_pixels"),
        ({"min_pixels": 16_777_217}, "min_pixels"),
        ({"size": {"longest_edge": 5}}, "size"),
        ({"size": {"shortest_edge": 5, "height": 6}}, "size"),
        ({"size": 448}, "size"),
        ({"size": {"shortest_edge": 0}}, "size"),
        ({"max_pixels": "many"}, "max_pixels"),
        ({"max_pixels": 2**31}, "max_pixels"),
        ({"do_pan_and_scan": True}, "do_pan_and_scan"),
        ({"patch_size": 14}, "patch_size"),
        ({"sizes": None}, "sizes"),
    ],
)
def test_invalid_limits_are_the_caller_s_error_with_the_given_name(
    tmp_path: Path, fields: dict[str, Any], field: str
) -> None:
    write(tmp_path, PUBLISHED_BY_QWEN)
    for make in (read(tmp_path).with_overrides, lambda **changes: read(tmp_path, **changes)):
        with pytest.raises(InvalidArgumentError) as caught:
            make(**fields)
        assert caught.value.field == field


def test_an_operator_may_raise_the_pixel_limit_and_a_request_may_not(tmp_path: Path) -> None:
    config = read(write(tmp_path, PUBLISHED_BY_QWEN), max_pixels=20_000_000)
    assert config.sizes is not None
    assert config.sizes.max_pixels == 20_000_000
    for limit in ({"max_pixels": 20_000_001}, {"size": {"longest_edge": 20_000_001}}):
        with pytest.raises(InvalidArgumentError, match=r"must be at most 20000000 here, got 20000001") as caught:
            config.with_overrides(**limit)
        assert caught.value.field in limit


def test_a_request_cannot_enlarge_pictures_beyond_the_token_limit(tmp_path: Path) -> None:
    """With a `min_pixels` so large that rounding up exceeds `max_pixels`."""
    config = read(write(tmp_path, PUBLISHED_BY_QWEN))
    with pytest.raises(InvalidArgumentError, match=r"min_pixels: would enlarge .* at most 16384 are allowed"):
        config.with_overrides(min_pixels=16_777_216)


def test_options_of_another_kind_of_model_are_refused_with_the_valid_ones(tmp_path: Path) -> None:
    of_gemma, of_qwen = read(write(tmp_path, PUBLISHED)), read(write(tmp_path, PUBLISHED_BY_QWEN))
    with pytest.raises(UnsupportedFieldError, match=r"changed: do_pan_and_scan, image_mean, .* rescale_factor$"):
        of_gemma.with_overrides(max_pixels=70_000)
    changeable = "image_mean, image_std, max_pixels, min_pixels, resample, rescale_factor, size"
    with pytest.raises(UnsupportedFieldError, match=f"changed: {changeable}$"):
        of_qwen.with_overrides(do_pan_and_scan=False)
    assert of_qwen.request_options == {"max_pixels", "min_pixels", "size", "resample"}
    assert of_gemma.request_options.isdisjoint({"max_pixels", "min_pixels", "size"})


def test_settled_for_fixes_the_size_of_one_picture(tmp_path: Path) -> None:
    config = read(write(tmp_path, PUBLISHED_BY_QWEN))
    settled = config.settled_for(Geometry(640, 300))
    assert (settled.width, settled.height, settled.sizes) == (640, 288, None)
    assert dataclasses.replace(settled, height=config.height, width=config.width, sizes=config.sizes) == config
    of_gemma = read(write(tmp_path, PUBLISHED))
    assert of_gemma.settled_for(Geometry(640, 300)) is of_gemma
