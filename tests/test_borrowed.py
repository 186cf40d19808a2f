import json
from pathlib import Path

import pytest

from keepsight.borrowed import OWN_ARCHITECTURES, is_borrowed
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
