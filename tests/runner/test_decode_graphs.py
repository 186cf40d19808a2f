"""Recorded steps compute the same as launched ones, whichever row each sequence takes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from keepsight.models.adapter_weights import AdapterWeights, LowRank
from keepsight.models.attention import AttentionBatch, LayerCache
from keepsight.models.borrowed.model import BorrowedModel
from keepsight.models.gpu_library import without_kernels
from keepsight.models.layers import Placement
from keepsight.models.paged_attention import PagedAttention
from keepsight.requests import EngineRequest
from keepsight.runner import model_runner, record_steps
from keepsight.runner.decode_graphs import DecodeGraphs
from keepsight.runner.guide_tokens import GuideMaker
from keepsight.runner.kv_block_store import KvBlockStore
from keepsight.runner.sequence_table import RunningSequence, SequenceTable
from keepsight.runner.share_device import PRIORITY_OF_ANSWERS, CpuShare
from keepsight.runner.step_inputs import make_request_slice
from keepsight.sampling_params import SamplingParams
from keepsight.scheduling.step_plan import KeptState, NewSequence, Slice
from tests.models.borrowed import reference as borrowed
from tests.models.gpu_kernels_here import DEVICE, kernels_in_use, simple_kernels_by_torch
from tests.runner.replays import Replays, recorder_for
from tests.runner.small_model import Driver, SmallModel

MAX_RECORDED = 3
NUM_TOKENS = 5


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallModel]:
    with kernels_in_use(), simple_kernels_by_torch():
        yield SmallModel(8, tmp_path_factory.mktemp("checkpoint"), Placement(DEVICE, torch.float32))


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Replays:
    replays = Replays()
    monkeypatch.setattr(record_steps, "make_recorder", lambda: replays.record)
    return replays


@pytest.fixture
def driver(small: SmallModel, replays: Replays) -> Driver:
    driver = Driver(small, max_recorded=MAX_RECORDED)
    assert replays.num_recorded == 3  # steps of 1, 2 and 4 rows
    return driver


@pytest.mark.parametrize("num_pictures", [0, 1, 3])
def test_an_answer_is_the_reference_s_by_recorded_steps(
    small: SmallModel, driver: Driver, replays: Replays, num_pictures: int
) -> None:
    answer = driver.answer(small.request("one", num_pictures), NUM_TOKENS)
    assert answer == small.reference_answer(num_pictures, NUM_TOKENS)
    assert replays.num == NUM_TOKENS - 1


def test_sequences_may_take_each_other_s_rows(small: SmallModel, driver: Driver, replays: Replays) -> None:
    ids = [driver.begin(small.request(str(number), number)) for number in range(3)]
    for each in ids:
        driver.compute(*driver.prompt_slices(each))
    for together in (ids, ids[::-1], ids[1:], ids[::-2], ids[:1], ids):
        driver.decode(*together, num_tokens=1)
    assert replays.num == 6
    for number, each in enumerate(ids):
        assert driver.tokens[each] == small.reference_answer(number, len(driver.tokens[each]))


def test_guesses_are_rows_of_their_own(small: SmallModel, driver: Driver, replays: Replays) -> None:
    right = small.reference_answer(1, 6)
    sequence_id = driver.begin(small.request("one", 1))
    driver.compute(*driver.prompt_slices(sequence_id))
    wrong = (right[3] + 1) % 7
    driver.compute(*driver.slices_with_guesses(sequence_id, [right[1], right[2]]))
    assert driver.tokens[sequence_id] == right[:4]
    driver.compute(*driver.slices_with_guesses(sequence_id, [wrong, right[4]]))
    driver.decode(sequence_id, num_tokens=1)
    assert driver.tokens[sequence_id] == right
    assert replays.num == 3


def test_padding_rows_write_nowhere(small: SmallModel, driver: Driver) -> None:
    caches = driver.runner.blocks.layers
    for cache in caches:  # on a GPU they are uninitialized, and NaN differs from itself
        cache.keys.zero_()
        cache.values.zero_()
    ids = [driver.begin(small.request(str(number), 0, prompt_seed=number)) for number in range(3)]
    for each in ids:
        driver.compute(*driver.prompt_slices(each))
    before = [(cache.keys.clone(), cache.values.clone()) for cache in caches]
    driver.decode(*ids, num_tokens=1)  # recorded for four rows, so one is padding
    for cache, (keys, values) in zip(caches, before, strict=True):
        assert (cache.keys != keys).any(dim=(1, 2)).sum() == 3
        assert (cache.values != values).any(dim=(1, 2)).sum() == 3


def test_prompts_and_steps_with_too_many_tokens_are_launched_as_usual(
    small: SmallModel, driver: Driver, replays: Replays
) -> None:
    ids = [driver.begin(small.request(str(number), 0, prompt_seed=number)) for number in range(5)]
    for each in ids:
        driver.compute(*driver.prompt_slices(each))
    driver.decode(*ids, num_tokens=2)
    assert replays.num == 0
    one, *others = ids
    driver.lose_pages(one)  # computed again, in one step with the others' tokens
    driver.compute(*driver.prompt_slices(one), *map(driver.next_slice, others))
    assert replays.num == 0
    driver.decode(one, num_tokens=1)
    assert replays.num == 1
    with without_kernels():  # they take long where they are interpreted
        alone = Driver(small)
        for number, each in enumerate(ids):
            expected = alone.answer(small.request(f"{number} alone", 0, prompt_seed=number), len(driver.tokens[each]))
            assert driver.tokens[each] == expected


def test_only_single_text_tokens_that_sample_are_recorded_steps(small: SmallModel, driver: Driver) -> None:
    graphs, picture = driver.runner._recorded.of_tokens, driver.begin(small.request("picture", 1))
    assert graphs is not None
    sequence = driver.runner.sequences[picture]

    def takes(piece: Slice) -> bool:
        return graphs.has_room_for([piece], [sequence])

    last = Slice(picture, sequence.media_end, 1, 0, (), True)
    assert takes(last)
    assert not takes(last._replace(start=sequence.media_end - 1))
    assert not takes(last._replace(length=2))
    assert not takes(last._replace(samples=False))
    assert not takes(last._replace(wants_prompt_logprobs=True))
    assert not takes(last._replace(kept_states=(KeptState(last.end, 0),)))
    # An adapter's weights were not recorded with the model's.
    sequence.adapter = AdapterWeights([{"out": LowRank(small.model.place, torch.ones(1, 1), torch.ones(1, 1))}])
    assert not takes(last)


# Recurrent layers ---------------------------------------------------------------------------------------------


class Recurrent:
    """A borrowed model whose sequences are somewhere in their answers, with random states in all slots."""

    # One for each sequence, and others between them.
    SLOTS = (3, 1, 4)
    NUM_SLOTS = 6

    def __init__(self, directory: Path, architecture: str) -> None:
        borrowed.make_text_checkpoint(directory, architecture)
        self.model = BorrowedModel.from_checkpoint(directory, Placement(DEVICE, torch.float32))
        self.blocks = KvBlockStore(self.model.shape, 4, 16, self.model.place, num_state_slots=self.NUM_SLOTS)
        torch.manual_seed(0)
        for cache in self.blocks.layers:
            cache.keys.normal_()
            cache.values.normal_()
        for states in self.blocks.states.of_layers:
            states.normal_()
        self._table = SequenceTable(16, frozenset(), DEVICE, GuideMaker(None, frozenset()), self.model.shape)
        self._ids = [(str(number), 0) for number in range(len(self.SLOTS))]
        for number, each in enumerate(self._ids):
            request = EngineRequest(each[0], tuple(range(7 * number, 7 * number + 16)), (), SamplingParams())
            self._table.remember(NewSequence(each, request, 0, ()))

    def slice(self, number: int, start: int) -> Slice:
        """Return the single token of a sequence at that position."""
        return Slice(self._ids[number], start, 1, 0, (number + 1,), True, state_slot=self.SLOTS[number])

    def sequences_of(self, slices: Sequence[Slice]) -> list[RunningSequence]:
        return self._table.lay_out(slices)

    def launch(self, slices: Sequence[Slice], caches: Sequence[LayerCache], states: Sequence[Tensor]) -> Tensor:
        sequences = self.sequences_of(slices)
        token_ids = [sequence.token_ids[piece.start] for piece, sequence in zip(slices, sequences, strict=True)]
        embeddings = self.model.embed_tokens(torch.tensor(token_ids, device=DEVICE))
        batch = AttentionBatch(list(map(make_request_slice, slices, sequences)), DEVICE)
        return self.model.compute(embeddings, PagedAttention(), caches, batch, states=states)


@torch.inference_mode()
@pytest.mark.parametrize(("architecture", "has_kernels"), [("Qwen3_5ForCausalLM", True), ("Lfm2ForCausalLM", False)])
def test_each_sequence_goes_on_from_its_own_state_whichever_row_it_takes(
    tmp_path: Path, architecture: str, has_kernels: bool
) -> None:
    with kernels_in_use(), simple_kernels_by_torch():
        given = Recurrent(tmp_path, architecture)
        assert given.model.shape.cuts_steps is not has_kernels
        states = given.blocks.states.of_layers
        others = [LayerCache(cache.keys.clone(), cache.values.clone()) for cache in given.blocks.layers]
        before, launched = ([each.clone() for each in states] for _ in range(2))
        graphs = DecodeGraphs(given.model, given.blocks, [4], recorder_for(DEVICE))
        for step, numbers in enumerate([(0, 1, 2), (2, 0, 1), (1, 2)]):
            slices = [given.slice(number, 9 + step) for number in numbers]
            sequences = given.sequences_of(slices)
            assert graphs.has_room_for(slices, sequences)
            found = graphs.compute(slices, sequences)
            torch.testing.assert_close(found, given.launch(slices, others, launched), rtol=1e-4, atol=1e-4)
    unused = [slot for slot in range(given.NUM_SLOTS) if slot not in given.SLOTS]
    for state, other, old in zip(states, launched, before, strict=True):
        own = list(given.SLOTS)
        torch.testing.assert_close(state[own], other[own], rtol=1e-4, atol=1e-4)
        assert not torch.equal(state[own], old[own])
        assert torch.equal(state[unused], old[unused])


class Cuda:
    """Stand-in for what a recording calls of torch.cuda; notes the current stream and those recorded on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.default = self.current = Stream(0)
        self.num_streams = 0
        self.recorded_on: list[Stream] = []
        self.fault_within: Exception | None = None
        self.fault_at_end: Exception | None = None
        self.fault_afterwards: Exception | None = None
        # On a GPU the runner would take its own streams from here.
        monkeypatch.setattr(model_runner, "share_device", lambda *_: CpuShare(1, 0.5))
        monkeypatch.setattr(torch.cuda, "Stream", self.make_stream)
        for name in ("current_stream", "stream", "graph", "synchronize"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        for name in ("CUDAGraph", "graph_pool_handle"):
            monkeypatch.setattr(torch.cuda, name, object)

    def make_stream(self, priority: int = 0) -> "Stream":
        self.num_streams += 1
        return Stream(priority)

    def current_stream(self) -> "Stream":
        return self.current

    @contextmanager
    def stream(self, stream: "Stream") -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph: object, pool: object, stream: "Stream", capture_error_mode: str) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
            raise_if(self.fault_within)
        finally:
            # As in torch: an exception raised here leaves its stream current.
            raise_if(self.fault_at_end)
            self.current = before
        self.recorded_on.append(stream)

    def synchronize(self) -> None:
        raise_if(self.fault_afterwards)


@dataclass(frozen=True)
class Stream:
    priority: int

    def wait_stream(self, other: "Stream") -> None: ...


def raise_if(fault: Exception | None) -> None:
    if fault is not None:
        raise fault


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


def test_steps_are_recorded_on_one_stream_whose_kernels_go_before_others(small: SmallModel, cuda: Cuda) -> None:
    assert Driver(small, max_recorded=MAX_RECORDED).runner._recorded.of_tokens is not None
    assert cuda.recorded_on == [Stream(PRIORITY_OF_ANSWERS)] * 3
    assert cuda.num_streams == 2  # one for a trial run


@pytest.mark.parametrize(
    ("within", "at_end"),
    [
        (None, torch.AcceleratorError("operation not permitted")),
        (torch.AcceleratorError("operation not permitted"), torch.AcceleratorError("a previous error")),
        (RuntimeError("operation not permitted"), torch.AcceleratorError("a previous error")),
        (RuntimeError("operation not permitted"), None),
        (MemoryError("operation not permitted"), None),
        (LookupError("operation not permitted"), None),
    ],
    ids=["at the end", "within", "of a kernel", "of a kernel alone", "memory", "whatever"],
)
def test_a_gpu_that_cannot_record_computes_without(
    small: SmallModel, cuda: Cuda, caplog: pytest.LogCaptureFixture, within: Exception | None, at_end: Exception | None
) -> None:
    cuda.fault_within, cuda.fault_at_end = within, at_end
    driver = Driver(small, max_recorded=MAX_RECORDED)
    assert cuda.current is cuda.default
    assert driver.answer(small.request("one"), NUM_TOKENS) == small.reference_answer(0, NUM_TOKENS)
    assert "one kernel at a time: operation not permitted" in caplog.text


def test_a_gpu_that_is_lost_by_recording_is_not_used_and_the_log_names_the_workaround(
    small: SmallModel, cuda: Cuda, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.fault_at_end = cuda.fault_afterwards = torch.AcceleratorError("an illegal memory access was encountered")
    with pytest.raises(torch.AcceleratorError):
        Driver(small, max_recorded=MAX_RECORDED)
    assert "--enforce-eager" in caplog.text


def test_without_kernels_nothing_is_recorded(small: SmallModel) -> None:
    with without_kernels():
        assert Driver(small, max_recorded=MAX_RECORDED).runner._recorded.of_tokens is None


@pytest.mark.skipif(DEVICE.type != "cuda", reason="NO CUDA DEVICE HERE: a stand-in alone recorded steps")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cuda_replays_what_it_computes(tmp_path: Path, dtype: torch.dtype) -> None:
    small = SmallModel(8, tmp_path, Placement(DEVICE, dtype))
    plain, recorded = Driver(small), Driver(small, max_recorded=MAX_RECORDED)
    assert recorded.runner._recorded.of_tokens is not None
    answers = [each.answer(small.request("one"), 40) for each in (plain, recorded)]
    assert answers[0] == answers[1]
