"""Recorded steps with longer slices compute the same as launched ones, whichever rows each sequence takes."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from keepsight.media import TokenSpan
from keepsight.models import recorded_batch
from keepsight.models.adapter_weights import AdapterWeights, LowRank
from keepsight.models.attention import AttentionBatch, LayerCache, RequestSlice
from keepsight.models.block_table import BlockTable
from keepsight.models.borrowed.model import BorrowedModel
from keepsight.models.gemma3.model import Gemma3
from keepsight.models.layers import Placement
from keepsight.models.model import DeepRows, Model
from keepsight.models.mrope_positions import MRopePositions
from keepsight.models.paged_attention import PagedAttention
from keepsight.models.qwen3_vl.model import Qwen3VL
from keepsight.runner import prompt_graphs, record_steps
from keepsight.runner.kv_block_store import KvBlockStore
from keepsight.runner.prompt_graphs import PromptGraphs
from tests.models.borrowed import reference as borrowed
from tests.models.borrowed.pictures import GEMMA4_LARGE
from tests.models.gemma3 import reference as gemma
from tests.models.gpu_kernels_here import DEVICE, gpu_slices, kernels_in_use, simple_kernels_by_torch
from tests.models.qwen3_vl import mixture_reference as mixture
from tests.models.qwen3_vl import reference as qwen
from tests.runner.replays import Replays, recorder_for
from tests.runner.small_model import Driver, SmallModel

SIZES, MOST_ROWS = (8, 40), 3
# A GPU multiplies as many rows as are recorded in another order than fewer.
assert_close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)
PLACE = Placement(DEVICE, torch.float32)
# With experts in other dtypes torch waits for the GPU.
PLACE_OF_EXPERTS = Placement(DEVICE, torch.bfloat16 if DEVICE.type == "cuda" else torch.float32)


@pytest.fixture(scope="module", autouse=True)
def _small_steps() -> Iterator[None]:
    with kernels_in_use(), simple_kernels_by_torch(), pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(prompt_graphs, "SIZES", SIZES)
        monkeypatch.setattr(recorded_batch, "MOST_ROWS", MOST_ROWS)
        monkeypatch.setattr(recorded_batch, "SPARE_BLOCKS", 3)
        # Two shares of a block's keys.
        monkeypatch.setattr(recorded_batch, "NUM_KEYS", 2 * gpu_slices.LEAST_KEYS_PER_SHARE)
        monkeypatch.setattr(gpu_slices, "MOST_PROGRAMS", 8)
        yield


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> SmallModel:
    return SmallModel(8, tmp_path_factory.mktemp("checkpoint"), PLACE)


@pytest.fixture(scope="module")
def recorded() -> Replays:
    return Replays()


@pytest.fixture
def replays(recorded: Replays) -> Replays:
    recorded.num = 0
    return recorded


@pytest.fixture(scope="module")
def driver(small: SmallModel, recorded: Replays) -> Driver:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(record_steps, "make_recorder", lambda: recorded.record)
        driver = Driver(small, max_recorded_prompt=SIZES[-1])
    assert recorded.num_recorded == len(SIZES)
    return driver


@pytest.mark.parametrize(("num_pictures", "cuts", "num_recorded"), [(0, (), 1), (1, (), 1), (0, (3, 8), 3)])
def test_an_answer_is_the_reference_s_by_recorded_prompts(
    small: SmallModel, driver: Driver, replays: Replays, num_pictures: int, cuts: Sequence[int], num_recorded: int
) -> None:
    answer = driver.answer(small.request("one", num_pictures), 1, cuts)
    assert answer == small.reference_answer(num_pictures, 1)
    assert replays.num == num_recorded


def test_prompts_and_single_tokens_may_take_each_other_s_rows(
    small: SmallModel, driver: Driver, replays: Replays
) -> None:
    one, two, three = (driver.begin(small.request(str(number), number % 2)) for number in (0, 1, 2))
    [whole] = driver.prompt_slices(one)
    driver.compute(whole)
    first, rest = driver.prompt_slices(two, cuts=(2,))
    driver.compute(first, driver.next_slice(one))
    driver.compute(driver.next_slice(one), rest)
    [whole] = driver.prompt_slices(three)
    driver.compute(driver.next_slice(two), whole, driver.next_slice(one))
    assert replays.num == 4
    for number, each in enumerate((one, two, three)):
        assert driver.tokens[each] == small.reference_answer(number % 2, len(driver.tokens[each]))


def test_padding_tokens_write_nowhere(small: SmallModel, driver: Driver) -> None:
    caches = driver.runner.blocks.layers
    for cache in caches:  # on a GPU they are uninitialized, and NaN differs from itself
        cache.keys.zero_()
        cache.values.zero_()
    sequence_id = driver.begin(small.request("one"))
    driver.compute(*driver.prompt_slices(sequence_id))
    length = driver.lengths[sequence_id]
    assert length not in SIZES
    for cache in caches:
        assert cache.keys.any(dim=(1, 2)).sum() == length
        assert cache.values.any(dim=(1, 2)).sum() == length


def test_steps_that_do_not_fit_are_launched(small: SmallModel, driver: Driver, replays: Replays) -> None:
    ids = [driver.begin(small.request(str(number))) for number in range(5)]
    slices = [piece for each in ids for piece in driver.prompt_slices(each)]
    assert sum(piece.length for piece in slices) > SIZES[-1]
    driver.compute(*slices)
    one, *others = ids
    driver.lose_pages(one)  # computed again, in one step with more tokens than there are rows for
    driver.compute(*driver.prompt_slices(one), *map(driver.next_slice, others))
    assert replays.num == 0
    assert all(driver.tokens[each] == small.reference_answer(0, 2) for each in ids)


def test_a_prompt_with_logprobs_or_computed_beside_is_launched(
    small: SmallModel, driver: Driver, replays: Replays
) -> None:
    reported = driver.begin(small.request("reported", prompt_logprobs=1))
    driver.compute(*(piece._replace(wants_prompt_logprobs=True) for piece in driver.prompt_slices(reported)))
    beside = driver.begin(small.request("beside"))
    driver.compute(*driver.prompt_slices(beside), beside=True)
    assert replays.num == 0
    assert driver.tokens[reported] == driver.tokens[beside] == small.reference_answer(0, 1)


def test_steps_with_adapters_are_launched(driver: Driver) -> None:
    graphs, table = driver.runner._recorded.of_prompts, BlockTable(16, [0], DEVICE)
    assert graphs is not None
    adapter = AdapterWeights([{"out": LowRank(PLACE, torch.ones(1, 1), torch.ones(1, 1))}])
    plain, adapted = RequestSlice(0, 5, table), RequestSlice(0, 5, table, adapter=adapter)
    assert graphs.find(AttentionBatch([plain], DEVICE, [0])) is not None
    assert graphs.find(AttentionBatch([adapted], DEVICE, [0])) is None


def test_slices_beyond_the_longest_recorded_position_are_launched(driver: Driver) -> None:
    graphs, furthest = driver.runner._recorded.of_prompts, recorded_batch.MOST_POSITIONS
    assert graphs is not None
    table = BlockTable(16, [0] * (furthest // 16 + 1), DEVICE)
    near, far = (AttentionBatch([RequestSlice(end - 5, 5, table)], DEVICE, [0]) for end in (furthest, furthest + 1))
    assert graphs.find(near) is not None
    assert graphs.find(far) is None


def test_more_slices_than_there_are_blocks_for_are_launched(driver: Driver) -> None:
    graphs, piece = driver.runner._recorded.of_prompts, RequestSlice(0, 2, BlockTable(16, [0], DEVICE))
    assert graphs is not None
    most = 1 + recorded_batch.SPARE_BLOCKS
    assert graphs.find(AttentionBatch([piece] * most, DEVICE, [0])) is not None
    assert graphs.find(AttentionBatch([piece] * (most + 1), DEVICE, [0])) is None


# Other models -------------------------------------------------------------------------------------------------


def make_blocks(model: Model) -> KvBlockStore:
    blocks = KvBlockStore(model.shape, 64, 16, model.place, num_state_slots=2)
    for cache in blocks.layers:  # on a GPU they are uninitialized, and NaN differs from itself
        cache.keys.zero_()
        cache.values.zero_()
    return blocks


@torch.inference_mode()
def test_each_prompt_has_its_own_rows_columns_and_additions_behind_layers(tmp_path: Path) -> None:
    arguments = qwen.draw_config(23)
    assert arguments["vision_config"]["deepstack_visual_indexes"]
    model = Qwen3VL.from_checkpoint(qwen.save_checkpoint(qwen.make_reference(arguments, 23), tmp_path), PLACE)
    prompts = [qwen.draw_prompt(arguments, num_pictures, seed) for num_pictures, seed in ((1, 1), (0, 2))]
    lengths = [len(prompt.token_ids) for prompt in prompts]
    sizes = [length + 3 for length in lengths]
    recorded = PromptGraphs(model, blocks := make_blocks(model), sizes, recorder_for(DEVICE))
    launched = []
    for prompt, length in zip(prompts, lengths, strict=True):
        places = MRopePositions(prompt.media).between(0, length) if prompt.media else None
        piece = RequestSlice(0, length, BlockTable(16, range(-(-length // 16)), DEVICE), mrope_positions=places)
        launched.append((piece, *qwen.merged_embeddings(model, prompt)))
        assert_as_launched(model, recorded, blocks, *launched[-1])
    (piece, embeddings, deep), text = launched
    step = recorded.find(batch := AttentionBatch([piece], DEVICE, [0]))
    assert step is not None
    with pytest.raises(RuntimeError):  # at the last layer's part of what its pictures add
        step.compute(embeddings, batch, [*deep, DeepRows(0, torch.zeros(2, 3))])
    assert_as_launched(model, recorded, blocks, *text)


@torch.inference_mode()
def test_the_last_layer_s_window_is_as_narrow_as_the_others(tmp_path: Path) -> None:
    arguments = gemma.draw_config(8)
    arguments["text_config"] |= {"layer_types": ["full_attention", "full_attention", "sliding_attention"]}
    model = Gemma3.from_checkpoint(gemma.save_checkpoint(gemma.make_reference(arguments, 8), tmp_path), PLACE)
    window = model.decoder.config.layers[-1].window
    assert window is not None
    assert window < 17
    assert_parts_as_launched(model)


@torch.inference_mode()
def test_experts_of_a_mixture_are_chosen_anew(tmp_path: Path) -> None:
    reference = mixture.make_reference(mixture.draw_config(3), 3)
    assert_parts_as_launched(Qwen3VL.from_checkpoint(qwen.save_checkpoint(reference, tmp_path), PLACE_OF_EXPERTS))


@torch.inference_mode()
@pytest.mark.parametrize(
    ("architecture", "place"),
    [
        ("LlamaForCausalLM", PLACE),
        ("Qwen3_5ForCausalLM", PLACE),
        ("Gemma4ForCausalLM", PLACE),
        *((each, PLACE_OF_EXPERTS) for each in ("Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM")),
    ],
)
def test_a_borrowed_model_writes_no_keys_of_padding(tmp_path: Path, architecture: str, place: Placement) -> None:
    borrowed.make_text_checkpoint(tmp_path, architecture)
    model = BorrowedModel.from_checkpoint(tmp_path, place)
    assert_parts_as_launched(model)


@torch.inference_mode()
def test_a_picture_that_only_layers_with_a_window_see_whole_is_shown_to_them_alone(tmp_path: Path) -> None:
    GEMMA4_LARGE.make_checkpoint(tmp_path)
    model = BorrowedModel.from_checkpoint(tmp_path, PLACE_OF_EXPERTS)
    recorded = PromptGraphs(model, blocks := make_blocks(model), [24], recorder_for(DEVICE))
    for pictures in ((TokenSpan(3, 6), TokenSpan(12, 5)), ()):
        piece = RequestSlice(0, 20, BlockTable(16, [3, 1], DEVICE), pictures)
        embeddings = model.embed_tokens(torch.arange(20, device=DEVICE))
        assert_as_launched(model, recorded, blocks, piece, embeddings, [])


@torch.inference_mode()
def test_a_model_with_fewer_positions_than_tokens_of_a_step_is_recorded(tmp_path: Path) -> None:
    arguments = {**borrowed.SMALL, **borrowed.TEXT_MODELS["OPTForCausalLM"], "max_position_embeddings": 32}
    borrowed.make_checkpoint(tmp_path, "OPTForCausalLM", arguments)
    model = BorrowedModel.from_checkpoint(tmp_path, PLACE)
    recorded = PromptGraphs(model, blocks := make_blocks(model), [40], recorder_for(DEVICE))
    piece = RequestSlice(0, 16, BlockTable(16, [2], DEVICE))
    embeddings = model.embed_tokens(torch.arange(16, device=DEVICE))
    assert_as_launched(model, recorded, blocks, piece, embeddings, [])


def assert_parts_as_launched(model: Model) -> None:
    """Check two consecutive slices of a prompt of words."""
    recorded = PromptGraphs(model, blocks := make_blocks(model), [18], recorder_for(DEVICE))
    # Nothing is kept any more where the first slice kept its state.
    for start, length, kept in ((0, 17, [(16, 0)]), (17, 3, [])):
        table = BlockTable(16, [3, 1], DEVICE)
        piece = RequestSlice(start, length, table, state_slot=1, kept_states=kept)
        embeddings = model.embed_tokens(torch.arange(start, start + length, device=DEVICE))
        assert_as_launched(model, recorded, blocks, piece, embeddings, [])


def assert_as_launched(
    model: Model,
    recorded: PromptGraphs,
    blocks: KvBlockStore,
    piece: RequestSlice,
    embeddings: torch.Tensor,
    deep: Sequence[DeepRows],
) -> None:
    """Launched with copies of the caches and states, which must then be equal."""
    batch = AttentionBatch([piece], DEVICE, [0])
    others = [LayerCache(cache.keys.clone(), cache.values.clone()) for cache in blocks.layers]
    states, other_states = blocks.states.of_layers, [each.clone() for each in blocks.states.of_layers]
    step = recorded.find(batch)
    assert step is not None
    found = step.compute(embeddings, batch, deep)
    expected = model.compute(embeddings, PagedAttention(), others, batch, None, deep, other_states)
    assert_close(found, expected)
    for state, other_state in zip(states, other_states, strict=True):
        assert_close(state[:2], other_state[:2])
    for cache, other in zip(blocks.layers, others, strict=True):
        assert_close(cache.keys, other.keys)
        assert_close(cache.values, other.values)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="NO CUDA DEVICE HERE: a stand-in alone recorded prompts")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cuda_replays_what_it_computes(tmp_path: Path, dtype: torch.dtype) -> None:
    small = SmallModel(8, tmp_path, Placement(DEVICE, dtype))
    plain, recorded = Driver(small), Driver(small, max_recorded_prompt=SIZES[-1])
    assert recorded.runner._recorded.of_prompts is not None
    for cuts in ((), (5, 9)):
        answers = [each.answer(small.request("one"), 3, cuts) for each in (plain, recorded)]
        assert answers[0] == answers[1]
