import dataclasses
from pathlib import Path
from typing import Any

import pytest

from keepsight.config import Config
from keepsight.demo import checkpoint_path
from keepsight.errors import InvalidArgumentError, UnsupportedFieldError


def test_without_a_model_it_is_the_demo() -> None:
    config = Config()
    assert (config.directory, config.model_name) == (checkpoint_path(), "keepsight-demo")


def test_a_model_is_named_by_its_folder_as_it_was_given() -> None:
    for model in ("models/gemma", Path("models/gemma")):
        config = Config.from_options(model=model)
        assert (config.directory, config.model_name) == (Path("models/gemma"), "models/gemma")


def test_it_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().dtype = "float32"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "hint"), [("max_model_length", "did you mean 'max_model_len'"), ("zzz", "known are model, dtype, device")]
)
def test_an_unknown_option_is_refused_with_what_may_have_been_meant(name: str, hint: str) -> None:
    with pytest.raises(UnsupportedFieldError, match=hint) as caught:
        Config.from_options(**{name: 1})
    assert caught.value.field == name


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model", 5, "must be a path, not 5"),
        ("model", "", "must be a path, not ''"),
        ("dtype", "float16", "must be one of auto, float32, bfloat16, not 'float16'"),
        ("dtype", None, "must be one of"),
        ("dtype", ["auto"], "must be one of"),
        ("device", "tpu", "must be one of auto, cpu, cuda"),
        ("image_backend", "opencv", "must be one of torchvision, pil"),
        ("max_model_len", 0, "an integer of at least 1, not 0"),
        ("max_model_len", True, "an integer of at least 1, not True"),
        ("max_model_len", 1.5, "an integer of at least 1, not 1.5"),
        ("max_model_len", "1k", "an integer of at least 1, not '1k'"),
        ("mm_processor_kwargs", None, "must be a dict, not None"),
        ("mm_processor_kwargs", [1], "must be a dict"),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_name(name: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        Config.from_options(**{name: value})
    assert caught.value.field == name
