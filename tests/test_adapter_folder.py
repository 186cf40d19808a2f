"""Reading an adapter's folder, and the hash that names its content."""

import json
from pathlib import Path
from typing import Any

import pytest

from keepsight.adapter_folder import AdapterFolder
from keepsight.errors import CheckpointError


def write(directory: Path, content: bytes = b"tensors", **config: Any) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "adapter_model.safetensors").write_bytes(content)
    (directory / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 16, "bias": "none", "use_dora": False, **config})
    )
    return directory


def test_an_adapter_is_identified_by_its_content_not_its_path(tmp_path: Path) -> None:
    first = AdapterFolder.read(write(tmp_path / "a")).as_adapter("sql")
    assert AdapterFolder.read(write(tmp_path / "b", lora_dropout=0.1)).as_adapter("sql") == first
    others: list[dict[str, Any]] = [
        {"content": b"others"},
        {"r": 4},
        {"lora_alpha": 8},
        {"use_rslora": True},
        {"rank_pattern": {"q_proj": 2}},
        {"alpha_pattern": {"q_proj": 2}},
    ]
    digests = {AdapterFolder.read(write(tmp_path / "a", **each)).as_adapter("sql").digest for each in others}
    assert len(digests | {first.digest}) == 7


def test_scales_equal_those_of_peft(tmp_path: Path) -> None:
    patterns: dict[str, Any] = {"rank_pattern": {"layers.1.*.q_proj": 2}, "alpha_pattern": {"up_proj": 4, "proj": 9}}
    scales = AdapterFolder.read(write(tmp_path, **patterns)).scales
    assert scales.rank_of("model.layers.1.self_attn.q_proj") == 2
    assert scales.rank_of("model.layers.0.self_attn.q_proj") == 8
    of = {"self_attn.q_proj": 16 / 2, "mlp.up_proj": 4 / 8, "mlp.down_proj": 16 / 8}
    assert {name: scales.scale_of(f"model.layers.1.{name}") for name in of} == of
    by_root = AdapterFolder.read(write(tmp_path, r=4, use_rslora=True)).scales
    assert by_root.scale_of("model.layers.1.mlp.up_proj") == 16 / 2


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, "use_dora: True is not supported"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save: \['lm_head'\] is not supported"),
        ({"bias": "all"}, "bias: 'all' is not supported"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"lora_bias": True}, "lora_bias"),
        ({"of_tomorrow": 1}, "of_tomorrow: 1 is not supported"),
        ({"init_lora_weights": "pissa"}, "also changes the model's weights"),
        ({"peft_type": "IA3"}, "peft_type: must be one of"),
        ({"r": 0}, "r: must be an integer of at least 1"),
        ({"lora_alpha": None}, "lora_alpha: is missing"),
        ({"rank_pattern": {"(": 2}}, "is not a regular expression"),
        ({"rank_pattern": {"(?i)q_proj": 2}}, "is not a regular expression"),
        ({"alpha_pattern": {"q{99999999999}": 2}}, "is not a regular expression"),
        ({"rank_pattern": [2]}, "rank_pattern: must be an object"),
    ],
    ids=str,
)
def test_an_unsupported_adapter_option_is_refused_by_name(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        AdapterFolder.read(write(tmp_path, **config))
    assert str(tmp_path) in str(caught.value)


def test_a_folder_with_missing_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"it has no adapter_config\.json"):
        AdapterFolder.read(tmp_path)
    (write(tmp_path) / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors: cannot be read"):
        AdapterFolder.read(tmp_path)
