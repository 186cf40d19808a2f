"""Context lengths and other limits read from a checkpoint's configuration."""

import json
from pathlib import Path
from typing import Any

import pytest

from keepsight.errors import CheckpointConfigError
from keepsight.model_limits import ModelLimits


def test_missing_values_are_the_defaults_of_the_architecture(tmp_path: Path) -> None:
    from transformers import Gemma3TextConfig, Qwen2_5_VLTextConfig, Qwen3VLMoeTextConfig, Qwen3VLTextConfig

    families: dict[str, Any] = {
        "Gemma3ForConditionalGeneration": Gemma3TextConfig(),
        "Qwen2_5_VLForConditionalGeneration": Qwen2_5_VLTextConfig(),
        "Qwen3VLForConditionalGeneration": Qwen3VLTextConfig(),
        "Qwen3VLMoeForConditionalGeneration": Qwen3VLMoeTextConfig(),
    }
    for name, defaults in families.items():
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [name], "text_config": {}}))
        limits = ModelLimits.from_checkpoint(tmp_path, None)
        expected = (defaults.max_position_embeddings, defaults.vocab_size, defaults.hidden_size)
        assert (limits.max_model_len, limits.vocab_size, limits.hidden_size) == expected


def limits_of(directory: Path, **config: Any) -> ModelLimits:
    (directory / "config.json").write_text(json.dumps(config))
    return ModelLimits.from_checkpoint(directory, None)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ({"n_positions": 1024, "n_embd": 768}, (1024, 768)),
        ({"n_ctx": 512, "n_positions": 1024, "d_model": 64}, (1024, 64)),
        ({"max_sequence_length": 2048, "hidden_size": 32, "d_model": 64}, (2048, 32)),
        ({"n_positions": 1024, "hidden_size": 64, "word_embed_proj_dim": 32}, (1024, 32)),
        ({"max_position_embeddings": 4096}, (4096, 0)),
    ],
)
def test_older_names_of_config_fields_are_read(
    tmp_path: Path, names: dict[str, int], expected: tuple[int, int]
) -> None:
    for config in ({"vocab_size": 9, **names}, {"text_config": {"vocab_size": 9, **names}}):
        limits = limits_of(tmp_path, architectures=["GPT2LMHeadModel"], **config)
        assert (limits.max_model_len, limits.hidden_size) == expected
        assert limits.vocab_size == 9


@pytest.mark.parametrize("missing", ["max_position_embeddings", "vocab_size"])
def test_a_missing_value_of_a_borrowed_model_is_an_error(tmp_path: Path, missing: str) -> None:
    numbers = {"max_position_embeddings": 4096, "vocab_size": 9}
    del numbers[missing]
    with pytest.raises(CheckpointConfigError, match=rf"text_config\.{missing}: is missing"):
        limits_of(tmp_path, architectures=["LlavaForConditionalGeneration"], text_config={"x": 1, **numbers})


@pytest.mark.parametrize("section", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind", [{"type": "longrope"}, {"rope_type": "longrope"}, {"type": "su"}])
@pytest.mark.parametrize("is_within", [False, True])
def test_longrope_is_limited_to_the_trained_length(
    tmp_path: Path, section: str, kind: dict[str, str], is_within: bool
) -> None:
    trained = {"original_max_position_embeddings": 4096}
    config = {"max_position_embeddings": 131_072, "vocab_size": 9, section: kind | (trained if is_within else {})}
    config |= {} if is_within else trained
    assert limits_of(tmp_path, architectures=["Phi3ForCausalLM"], **config).max_model_len == 4096


def test_longrope_of_one_layer_type_is_limited_to_the_trained_length(tmp_path: Path) -> None:
    trained = {"rope_type": "longrope", "original_max_position_embeddings": 4096}
    ropes = {"full_attention": trained, "sliding_attention": {"rope_type": "default"}}
    config = {"max_position_embeddings": 131_072, "vocab_size": 9, "rope_parameters": ropes}
    assert limits_of(tmp_path, architectures=["Phi3ForCausalLM"], **config).max_model_len == 4096


def test_other_rope_types_reach_the_stated_length(tmp_path: Path) -> None:
    config = {"max_position_embeddings": 131_072, "vocab_size": 9, "rope_scaling": {"rope_type": "llama3", "factor": 8}}
    assert limits_of(tmp_path, architectures=["LlamaForCausalLM"], **config).max_model_len == 131_072
