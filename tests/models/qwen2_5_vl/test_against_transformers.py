"""Every stage of Qwen2.5-VL equals transformers' on random small configurations that vary everything.

The tests are those of Qwen3-VL.
"""

from collections.abc import Iterator

import pytest
import torch

from keepsight.models.layers import Placement
from keepsight.models.qwen2_5_vl.model import Qwen25VL
from tests.models.judged import CASES, judging, name_of_case
from tests.models.qwen2_5_vl.reference import draw_config, make_reference
from tests.models.qwen3_vl.reference import save_checkpoint
from tests.models.qwen3_vl.test_against_transformers import (  # noqa: F401
    Pair,
    test_every_decoder_layer_and_the_logits_equal,
    test_pictures_of_one_size_may_be_encoded_together_and_some_patches_at_a_time,
    test_the_tower_gives_the_reference_s_embeddings_and_what_is_added_behind_layers,
)


@pytest.fixture(scope="module", params=[case for case in CASES if case[0] % 2], ids=name_of_case)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    seed, device, has_kernels = request.param
    arguments = draw_config(seed)
    reference = make_reference(arguments, seed)
    directory = save_checkpoint(reference, tmp_path_factory.mktemp("checkpoint"))
    with judging(has_kernels=has_kernels):
        model = Qwen25VL.from_checkpoint(directory, Placement(torch.device(device), torch.float32))
        yield Pair(arguments, seed, device, reference.to(device), model, most_moments=3)
