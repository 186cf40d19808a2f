"""Every stage of Qwen2-Audio equals transformers' on random small configurations that vary everything.

The tests are those of Qwen3-VL, with sounds; their embeddings are the first layer's input.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from keepsight.models.layers import Placement
from keepsight.models.qwen2_audio.model import Qwen2Audio
from tests.models.judged import CASES, judging, name_of_case
from tests.models.qwen2_audio import reference as ref
from tests.models.qwen3_vl.reference import Prompt, save_checkpoint
from tests.models.qwen3_vl.test_against_transformers import (  # noqa: F401
    Pair,
    test_every_decoder_layer_and_the_logits_equal,
    test_pictures_of_one_size_may_be_encoded_together_and_some_patches_at_a_time,
)


class SoundPair(Pair):
    def prompt(self, num_pictures: int) -> ref.SoundPrompt:
        return ref.draw_prompt(self.arguments, num_pictures, self.seed)

    def inputs(self, prompt: Prompt) -> dict[str, Any]:
        assert isinstance(prompt, ref.SoundPrompt)
        inputs = ref.reference_inputs(prompt.token_ids, prompt.sounds, ref.sound_config(self.arguments))
        return {name: tensor.to(self.device) for name, tensor in inputs.items()}


@pytest.fixture(scope="module", params=[case for case in CASES if case[0] % 2 == 0], ids=name_of_case)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    seed, device, has_kernels = request.param
    arguments = ref.draw_config(seed)
    reference = ref.make_reference(arguments, seed)
    directory = save_checkpoint(reference, tmp_path_factory.mktemp("checkpoint"))
    with judging(has_kernels=has_kernels):
        model = Qwen2Audio.from_checkpoint(directory, Placement(torch.device(device), torch.float32))
        yield SoundPair(arguments, seed, device, reference.to(device), model)
