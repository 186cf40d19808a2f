"""Qwen3-VL's mixture of experts, end to end; what it shares with dense sizes is tested in `test_qwen3_vl.py`."""

from pathlib import Path
from typing import Any

import pytest

from keepsight import LLM
from tests.drawn import ask
from tests.place import placed
from tests.qwen_checkpoint import QWEN3_VL_MIXTURE, make_qwen_checkpoint, reference_answer
from tests.qwen_turns import GREEDY, film, picture, shown

WITHOUT_CACHES: dict[str, Any] = {"enable_prefix_caching": False, "mm_processor_cache_gb": 0, "encoder_cache_gb": 0}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("mixture")
    return directory, make_qwen_checkpoint(directory, seed=5, shape=QWEN3_VL_MIXTURE)


@pytest.mark.parametrize("options", [{}, WITHOUT_CACHES], ids=["cached", "not cached"])
def test_answers_about_pictures_and_films_equal_the_reference_s(
    checkpoint: tuple[Path, Any], options: dict[str, Any]
) -> None:
    directory, reference = checkpoint
    beside, frames = picture(40, 60, 1), film(4)
    conversations = [ask(*shown(beside), *more, "What is it?") for more in ([], [{"type": "video", "video": frames}])]
    sizes = {"max_num_batched_tokens": 32, "max_num_seqs": 8}
    with LLM(directory, **placed(image_backend="pil", **sizes, **options)) as llm:
        outputs = [output for _ in range(2) for output in llm.chat(conversations, GREEDY)]
    assert [bool(output.num_cached_tokens) for output in outputs[2:]] == [not options] * 2
    for output, shown_frames in zip(outputs, [None, frames] * 2, strict=True):
        theirs = reference_answer(reference, directory, output.prompt_token_ids, [beside], 8, shown_frames)
        assert output.outputs[0].token_ids[: len(theirs)] == theirs
