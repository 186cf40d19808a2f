"""Models of architectures that are not ours: logits and tokens equal transformers', in any batch."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from keepsight.models.borrowed.model import BorrowedModel
from keepsight.models.borrowed.products import PackedTable
from keepsight.models.cpu_library import has_library, number
from keepsight.models.layers import Placement
from keepsight.models.registry import load_model
from tests.dequantized import QUANTIZED, dequantize_products
from tests.models.borrowed import by_pages
from tests.models.borrowed import reference as ref
from tests.models.borrowed.pictures import GEMMA4_LARGE
from tests.models.judged import MAX_ERROR, assert_close

PLACE = Placement(torch.device("cpu"), torch.float32)
NUM_TOKENS, CUTS = 37, (9, 10, 30)
# Its random weights amplify rounding: transformers' float32 logits, too, are up to 4e-4 from its float64 ones.
MAX_ERRORS = {"Qwen3_5MoeForCausalLM": 5e-4}
Pair = tuple[BorrowedModel, Any]


@pytest.fixture(scope="module", params=ref.TEXT_MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    directory = tmp_path_factory.mktemp(request.param)
    reference = ref.make_text_checkpoint(directory, request.param)
    model = load_model(directory, PLACE)
    assert isinstance(model, BorrowedModel)
    return model, reference


def prompt(seed: int) -> torch.Tensor:
    return torch.randint(3, ref.VOCAB_SIZE, (NUM_TOKENS,), generator=torch.Generator().manual_seed(seed))


def test_logits_equal_those_of_the_whole_prompt_computed_alone(pair: Pair) -> None:
    model, reference = pair
    ours, others = (model.embed_tokens(prompt(seed)) for seed in range(2))
    expected = ref.plain_logits(reference, prompt(0))
    assert expected.std() > 0.1
    max_error = MAX_ERRORS.get(type(reference).__name__, MAX_ERROR)
    assert_close(by_pages.at_once(model, ours), expected, max_error)
    assert_close(by_pages.in_parts(model, ours, CUTS, others), expected, max_error)


def test_greedy_tokens_equal(pair: Pair) -> None:
    model, reference = pair
    assert by_pages.greedy(model, prompt(2), 12) == ref.greedy(reference, prompt(2), 12)


def test_no_bit_depends_on_what_is_computed_beside_it(pair: Pair) -> None:
    model, reference = pair
    if not has_library():
        pytest.skip("NO KERNELS FOR THE CPU HERE: torch's products depend on how many rows they have")
    if getattr(reference.config, "attn_logit_softcapping", None):
        pytest.skip("attention with a softcap is torch's")
    if type(reference).__name__ in ("FalconH1ForCausalLM", "Qwen3_5MoeForCausalLM"):
        pytest.skip("transformers computes its recurrent layers by chunks of a slice, or its sigmoids by their number")
    if any(heads.head_dim % number("numbers_at_once") for heads in model.shape.kv_heads):
        pytest.skip("attention of heads that do not fit the kernels' tiles is torch's")
    ours, others = (model.embed_tokens(prompt(seed)) for seed in range(2))
    assert torch.equal(by_pages.in_parts(model, ours, CUTS, others), by_pages.at_once(model, ours))


@pytest.mark.skipif(not has_library(), reason="NO KERNELS FOR THE CPU HERE: nothing is quantized")
@pytest.mark.parametrize(
    "architecture",
    ["LlamaForCausalLM", "Qwen3ForCausalLM", "GPT2LMHeadModel", "MixtralForCausalLM", "DeepseekV3ForCausalLM"],
)
def test_quantized_it_computes_what_its_int8_stands_for(architecture: str, tmp_path: Path) -> None:
    reference = ref.make_text_checkpoint(tmp_path, architecture)
    whole, model = (load_model(tmp_path, place) for place in (PLACE, QUANTIZED))
    dequantize_products(reference)
    ours, expected = model.embed_tokens(prompt(0)), ref.plain_logits(reference, prompt(0))
    assert_close(by_pages.at_once(model, ours), expected)
    assert not torch.allclose(by_pages.at_once(whole, ours), expected, atol=1e-3)


@pytest.mark.skipif(not has_library(), reason="NO KERNELS FOR THE CPU HERE: nothing is quantized")
@pytest.mark.parametrize("architecture", ["MixtralForCausalLM", "Gemma4ForCausalLM"])
def test_routers_are_never_quantized(architecture: str, tmp_path: Path) -> None:
    fields = GEMMA4_LARGE.text if architecture == "Gemma4ForCausalLM" else ref.TEXT_MODELS[architecture]
    ref.make_checkpoint(tmp_path, architecture, {**ref.SMALL, **fields})
    model = load_model(tmp_path, QUANTIZED)
    assert isinstance(model, BorrowedModel)
    kept = {name: weight.kept_in for name, weight in model._modules.named_parameters() if hasattr(weight, "kept_in")}
    routers = {name: dtype for name, dtype in kept.items() if re.search(r"\.(gate|router\.proj)\.weight$", name)}
    assert set(routers.values()) == {torch.float32}
    assert {dtype for name, dtype in kept.items() if name not in routers} == {torch.int8}


@pytest.mark.skipif(not has_library(), reason="NO KERNELS FOR THE CPU HERE: nothing is packed")
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GPT2LMHeadModel", "OPTForCausalLM", "Gemma4ForCausalLM"])
def test_tables_of_a_checkpoint_in_bfloat16_stay_so_and_their_rows_are_exact(architecture: str, tmp_path: Path) -> None:
    reference = ref.make_text_checkpoint(tmp_path, architecture)
    for parameter in reference.parameters():
        parameter.data = parameter.data.bfloat16().float()
    reference.save_pretrained(tmp_path)
    model = load_model(tmp_path, PLACE)
    assert isinstance(model, BorrowedModel)
    tables = [module for module in model._modules.modules() if isinstance(module, torch.nn.Embedding)]
    of_tokens = [table.weight for table in tables if table.num_embeddings == ref.VOCAB_SIZE]
    assert {type(table) for table in of_tokens} == {PackedTable}
    ours, others = (model.embed_tokens(prompt(seed)) for seed in range(2))
    assert ours.dtype is torch.float32
    expected = ref.plain_logits(reference, prompt(0))
    assert_close(by_pages.at_once(model, ours), expected)
    assert_close(by_pages.in_parts(model, ours, CUTS, others), expected)


def test_where_positions_end_that_would_turn_others_tokens_is_known(pair: Pair) -> None:
    model, reference = pair
    assert model.shape.max_positions == (64 if type(reference).__name__ == "Phi3ForCausalLM" else 256)


@pytest.mark.parametrize("architecture", ["Gemma3nForCausalLM", "Gemma4ForCausalLM"])
def test_keys_that_several_layers_attend_to_are_stored_once(architecture: str, tmp_path: Path) -> None:
    ref.make_text_checkpoint(tmp_path, architecture)
    model = load_model(tmp_path, PLACE)
    assert isinstance(model, BorrowedModel)
    assert [rule.cache for rule in model.rules.values()] == [0, 1, 2, 1, 2]
    assert [rule.writes for rule in model.rules.values()] == [True, True, True, False, False]
    assert len(model.shape.kv_heads) == 3
