"""A request run from prompt to last token says what transformers says."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from keepsight.image_processor_config import ImageProcessorConfig
from keepsight.media import Geometry, MediaItem
from keepsight.models.gemma3.model import Gemma3
from keepsight.models.layers import Placement
from keepsight.requests import EngineRequest, TokenOutput
from keepsight.runner.model_runner import ModelRunner
from keepsight.runner.normalize_pixels import PixelNormalizer
from keepsight.sampling_params import SamplingParams
from tests.models.gemma3 import reference as ref

NUM_TOKENS = 64
MAX_MODEL_LEN = 300


class Setup:
    def __init__(self, seed: int, directory: Path) -> None:
        self.arguments = ref.draw_config(seed)
        self.reference = ref.make_reference(self.arguments, seed)
        place = Placement(torch.device("cpu"), torch.float32)
        model = Gemma3.from_checkpoint(ref.save_checkpoint(self.reference, directory), place)
        size = self.arguments["vision_config"]["image_size"]
        config = ImageProcessorConfig(height=size, width=size)
        self.normalizer = PixelNormalizer(config, place.device, place.dtype)
        self.runner = ModelRunner(model, self.normalizer, frozenset({1}), MAX_MODEL_LEN)

    def request(self, num_pictures: int, **params: Any) -> tuple[EngineRequest, ref.Prompt]:
        prompt = ref.draw_prompt(self.arguments, num_pictures, seed=num_pictures)
        size = prompt.pixels.shape[-1]
        rng = np.random.default_rng(num_pictures)
        pixels = tuple(rng.integers(0, 256, (size, size, 3), np.uint8) for _ in prompt.spans)
        media = tuple(MediaItem(span, Geometry(size, size)) for span in prompt.spans)
        request = EngineRequest("r", tuple(prompt.token_ids), media, pixels, SamplingParams(**params))
        if pixels:
            normalized = self.normalizer(torch.from_numpy(np.stack(pixels))).permute(0, 3, 1, 2)
            prompt = ref.Prompt(prompt.token_ids, prompt.spans, normalized)
        return request, prompt


@pytest.fixture(scope="module", params=[0, 5, 8, 11, 12, 13], ids=lambda seed: f"config{seed}")
def setup(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return Setup(request.param, tmp_path_factory.mktemp("checkpoint"))


def choice_ids(outputs: list[TokenOutput], choice: int = 0) -> list[int]:
    return [output.token_id for output in outputs if output.choice == choice]


@pytest.mark.parametrize("num_pictures", [0, 1, 3])
def test_greedy_tokens_equal_the_reference_s_over_64_tokens(setup: Setup, num_pictures: int) -> None:
    request, prompt = setup.request(num_pictures, temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    ours = choice_ids(list(setup.runner.generate(request)))
    inputs = ref.reference_inputs(prompt)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    theirs = setup.reference.generate(
        **inputs, max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert ours == theirs[0, len(prompt.token_ids) :].tolist()


def test_several_choices_share_a_prompt_and_nothing_else(setup: Setup) -> None:
    greedy, _ = setup.request(1, temperature=0, max_tokens=20, ignore_eos=True)
    several, _ = setup.request(1, temperature=0, max_tokens=20, ignore_eos=True, n=3)
    alone = choice_ids(list(setup.runner.generate(greedy)))
    outputs = list(setup.runner.generate(several))
    for choice in range(3):
        assert choice_ids(outputs, choice) == alone
    drawn, _ = setup.request(1, temperature=2, seed=1, max_tokens=20, ignore_eos=True, n=2)
    outputs = list(setup.runner.generate(drawn))
    assert choice_ids(outputs, 0) != choice_ids(outputs, 1)


def test_an_answer_ends_at_a_stop_token_at_max_tokens_or_where_the_context_ends(setup: Setup) -> None:
    request, prompt = setup.request(0, temperature=0, max_tokens=10, ignore_eos=True)
    outputs = list(setup.runner.generate(request))
    assert [output.finish_reason for output in outputs] == [None] * 9 + ["length"]
    ids = choice_ids(outputs)
    stopping, _ = setup.request(0, temperature=0, max_tokens=10, ignore_eos=True, stop_token_ids=[ids[4]])
    outputs = list(setup.runner.generate(stopping))
    assert choice_ids(outputs) == ids[: ids.index(ids[4]) + 1]
    assert outputs[-1].finish_reason == "stop"
    endless, _ = setup.request(0, temperature=0, max_tokens=None, ignore_eos=True)
    outputs = list(setup.runner.generate(endless))
    assert len(prompt.token_ids) + len(outputs) == MAX_MODEL_LEN
    assert outputs[-1].finish_reason == "length"
