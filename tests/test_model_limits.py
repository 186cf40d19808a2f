"""What a checkpoint can take."""

import json
from pathlib import Path
from typing import Any

from keepsight.model_limits import ModelLimits


def test_what_is_left_out_is_the_default_of_its_family(tmp_path: Path) -> None:
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
