import json
from pathlib import Path
from typing import Any

import pytest

from keepsight.demo import checkpoint_path
from keepsight.errors import CheckpointConfigError
from keepsight.frontend.api.chat_request import parse_chat_request
from keepsight.frontend.prompt.sampling_defaults import read_sampling_defaults
from keepsight.sampling_params import SamplingParams

GEMMA = {"do_sample": True, "eos_token_id": [1, 106], "top_k": 64, "top_p": 0.95, "bos_token_id": 2}


def write(folder: Path, values: dict[str, Any]) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


def test_the_checkpoints_own_numbers_are_taken_by_default_and_no_others(tmp_path: Path) -> None:
    assert read_sampling_defaults(write(tmp_path, GEMMA), "auto") == {"top_k": 64, "top_p": 0.95}
    assert read_sampling_defaults(write(tmp_path, {"max_new_tokens": 9, "min_p": None}), "auto") == {"max_tokens": 9}
    assert read_sampling_defaults(tmp_path / "has none", "auto") == {}
    assert read_sampling_defaults(checkpoint_path(), "auto") == {}


def test_what_is_left_out_and_would_change_an_answer_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    neutral = {"num_beams": 1, "typical_p": 1.0, "min_length": 0, "suppress_tokens": []}
    assert read_sampling_defaults(write(tmp_path, GEMMA | neutral), "none") == {}
    read_sampling_defaults(write(tmp_path, GEMMA | neutral), "auto")
    assert "left out" not in caplog.text
    read_sampling_defaults(write(tmp_path, {"no_repeat_ngram_size": 2, "forced_eos_token_id": 1}), "auto")
    assert "no_repeat_ngram_size is not" in caplog.text.replace("forced_eos_token_id, ", "")


def test_none_takes_nothing_and_a_path_takes_anothers(tmp_path: Path) -> None:
    write(tmp_path, {"temperature": 0.5})
    assert read_sampling_defaults(tmp_path, "none") == {}
    for path in (tmp_path, str(tmp_path), tmp_path / "generation_config.json"):
        assert read_sampling_defaults(checkpoint_path(), path) == {"temperature": 0.5}


def test_a_value_out_of_range_or_a_missing_file_is_told_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(CheckpointConfigError, match="top_p: must be"):
        read_sampling_defaults(write(tmp_path, {"top_p": 2}), "auto")
    with pytest.raises(CheckpointConfigError, match="cannot be read"):
        read_sampling_defaults(tmp_path, tmp_path / "nowhere")


def test_what_a_request_says_wins_over_the_defaults() -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "top_k": 3, "temperature": 0}
    request = parse_chat_request(json.dumps(body).encode())
    params = request.to_sampling_params({"top_k": 64, "top_p": 0.95, "temperature": 0.7, "max_tokens": 9})
    assert params == SamplingParams(top_k=3, top_p=0.95, temperature=0, max_tokens=9)
    longer = parse_chat_request(json.dumps(body | {"max_completion_tokens": 50}).encode())
    assert longer.to_sampling_params({"max_tokens": 9}).max_tokens == 50
