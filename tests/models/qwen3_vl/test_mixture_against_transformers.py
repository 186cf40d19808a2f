"""Every stage of Qwen3-VL's mixtures of experts equals transformers', as for the dense models."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from keepsight.models.layers import Placement
from keepsight.models.qwen3_vl.model import Qwen3VL
from tests.models.judged import CASES, judging, name_of_case
from tests.models.qwen3_vl.mixture_reference import draw_config, make_reference
from tests.models.qwen3_vl.reference import save_checkpoint
from tests.models.qwen3_vl.test_against_transformers import (  # noqa: F401
    Pair,
    test_every_decoder_layer_and_the_logits_equal,
    test_the_ends_that_are_read_are_what_they_are_when_all_is_read,
    test_the_tower_gives_the_reference_s_embeddings_and_what_is_added_behind_layers,
)

# One, three or four experts for each token, in all layers or in some.
SEEDS = (0, 3, 5, 9, 12)


@pytest.fixture(scope="module", params=[case for case in CASES if case[0] in SEEDS], ids=name_of_case)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    seed, device, has_kernels = request.param
    arguments = draw_config(seed)
    reference = make_reference(arguments, seed)
    directory = save_checkpoint(reference, tmp_path_factory.mktemp("checkpoint"))
    if seed % 2:
        turn_experts(directory / "model.safetensors")
    with judging(has_kernels=has_kernels):
        model = Qwen3VL.from_checkpoint(directory, Placement(torch.device(device), torch.float32))
        yield Pair(arguments, seed, device, reference.to(device), model)


def turn_experts(path: Path) -> None:
    """Transpose experts to the published layout: inputs before outputs."""
    tensors = load_file(path)
    turned = {name: tensor.mT.contiguous() if ".experts." in name else tensor for name, tensor in tensors.items()}
    save_file(turned, path)
