import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from keepsight import borrowed
from keepsight.borrowed import OWN_ARCHITECTURES, PROCESSOR_FILES, BorrowedProcessor, is_borrowed
from keepsight.errors import CheckpointError
from keepsight.models import registry


def named(directory: Path, *architectures: str) -> Path:
    (directory / "config.json").write_text(json.dumps({"architectures": architectures}))
    return directory


def test_own_architectures_are_those_that_there_is_a_model_for() -> None:
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
def test_a_model_is_borrowed_where_there_is_none_of_ours_or_as_is_asked(
    tmp_path: Path, model_impl: str, architecture: str, expected: bool
) -> None:
    assert is_borrowed(named(tmp_path, architecture), model_impl) is expected


def test_what_names_no_architecture_is_nobody_s(tmp_path: Path) -> None:
    assert not is_borrowed(named(tmp_path))


def test_where_transformers_is_missing_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lack(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(borrowed, "version", lack)
    with pytest.raises(CheckpointError, match=r"transformers is missing: pip install 'keepsight\[transformers\]'"):
        BorrowedProcessor.from_checkpoint(named(tmp_path, "LlavaForConditionalGeneration"))


@pytest.mark.parametrize("name", PROCESSOR_FILES)
def test_a_processor_is_another_with_each_of_its_files_and_with_its_code(
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
