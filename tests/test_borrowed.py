import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keepsight import borrowed
from keepsight.borrowed import (
    OWN_ARCHITECTURES,
    PROCESSOR_FILES,
    BorrowedProcessor,
    count_columns,
    is_borrowed,
    read_max_tokens,
)
from keepsight.errors import CheckpointError
from keepsight.models import registry


def with_architectures(directory: Path, *architectures: str) -> Path:
    (directory / "config.json").write_text(json.dumps({"architectures": architectures}))
    return directory


def test_own_architectures_are_those_in_the_model_registry() -> None:
    assert set(OWN_ARCHITECTURES) == set(registry._LOADERS)


@pytest.mark.parametrize(
    ("model_impl", "architecture", "expected"),
    [
        ("auto", "Gemma3ForCausalLM", False),
        ("auto", "LlamaForCausalLM", True),
        ("transformers", "Gemma3ForCausalLM", True),
        ("keepsight", "LlamaForCausalLM", False),
    ],
)
def test_a_model_is_borrowed_if_not_implemented_or_if_requested(
    tmp_path: Path, model_impl: str, architecture: str, expected: bool
) -> None:
    assert is_borrowed(with_architectures(tmp_path, architecture), model_impl) is expected


def test_a_config_without_an_architecture_is_not_borrowed(tmp_path: Path) -> None:
    assert not is_borrowed(with_architectures(tmp_path), "auto")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 16_384),
        ({"preprocessor_config": {"max_soft_tokens": 280}}, 296),
        ({"processor_config": {"image_processor": {"max_soft_tokens": 70}}, "preprocessor_config": {}}, 86),
        ({"preprocessor_config": {"max_soft_tokens": "many"}}, 16_384),
        ({"preprocessor_config": {"max_soft_tokens": 10**9}}, 16_384),
    ],
)
def test_the_token_limit_comes_from_the_processor_s_files(tmp_path: Path, files: dict[str, Any], expected: int) -> None:
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert read_max_tokens(tmp_path) == expected


def test_a_missing_transformers_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_not_found(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(borrowed, "version", raise_not_found)
    with pytest.raises(
        CheckpointError, match=r"transformers is not installed: pip install 'keepsight\[transformers\]'"
    ):
        BorrowedProcessor.from_checkpoint(with_architectures(tmp_path, "LlavaForConditionalGeneration"))


@pytest.mark.parametrize(
    ("grid", "num_tokens", "columns"),
    [
        ([[1, 4, 6]], 6, 3),
        ([[1, 4, 6]], 24, 6),
        ([[1, 4, 6]], 8, 0),  # with separator tokens in between
        ([[1, 4, 6]], 30, 0),
        ([[2, 4, 6]], 12, 0),
        ([[1, 4, 6], [1, 4, 6]], 6, 0),
        ([1, 4, 6], 6, 0),
    ],
)
def test_columns_are_known_if_tokens_are_squares_of_patches(grid: list[Any], num_tokens: int, columns: int) -> None:
    assert count_columns({"image_grid_thw": np.array(grid)}, num_tokens) == columns


def test_columns_are_unknown_without_a_patch_grid() -> None:
    assert count_columns({}, 6) == 0


@pytest.mark.parametrize("name", PROCESSOR_FILES)
def test_the_digest_covers_every_processor_file_and_the_package_version(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"image_token_index": 7}')
    first = BorrowedProcessor.from_checkpoint(tmp_path)
    assert first.image_token_id == 7
    (tmp_path / name).write_text("{}")
    second = BorrowedProcessor.from_checkpoint(tmp_path)
    monkeypatch.setattr(borrowed, "version", lambda _: "6.0")
    third = BorrowedProcessor.from_checkpoint(tmp_path)
    assert len({first.digest, second.digest, third.digest}) == 3
