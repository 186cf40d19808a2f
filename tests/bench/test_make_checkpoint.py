"""The checkpoints for the benchmarks can be made from the repository alone."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from benchmarks.make_checkpoint import SIZES, TOKENS_PER_PICTURE, VOCAB_SIZE, main, make_checkpoint
from keepsight import LLM, SamplingParams
from tests.frontend.gemma_like import load_processor
from tests.place import placed

ONE_LAYER = {"num_hidden_layers": 1}


def test_transformers_and_keepsight_tokenize_alike_with_the_made_checkpoint(tmp_path: Path) -> None:
    size = {part: {**widths, **ONE_LAYER} for part, widths in SIZES["tiny-gemma3"].items()}
    make_checkpoint(tmp_path, size, torch.float32, 0)
    question = {"type": "text", "text": "What is in this picture?"}
    picture: dict[str, Any] = {"type": "image_pil", "image_pil": Image.new("RGB", (40, 30), "teal")}
    with_llm = [{"role": "user", "content": [picture, question]}]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    [output] = LLM(tmp_path, **placed()).chat(with_llm, params)
    with_transformers = [{"role": "user", "content": [{"type": "image", "image": picture["image_pil"]}, question]}]
    read = load_processor(tmp_path).apply_chat_template(
        with_transformers, tokenize=True, add_generation_prompt=True, return_dict=True
    )
    assert output.prompt_token_ids == read["input_ids"][0]
    assert output.prompt_token_ids.count(VOCAB_SIZE - 1) == TOKENS_PER_PICTURE
    assert len(output.outputs[0].token_ids) == 4


def test_a_device_is_refused_for_a_shape_that_does_not_use_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["make_checkpoint.py", "tiny-qwen3-vl", str(tmp_path / "new"), "--device", "cuda"])
    with pytest.raises(SystemExit):
        main()
    assert "--device is for Gemma's shape" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
