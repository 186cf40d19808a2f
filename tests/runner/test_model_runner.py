"""Whatever the plan (whole, in pieces, batched, beside, begun again), the tokens equal transformers'."""

import itertools
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from keepsight.models.gemma3.model import Gemma3
from keepsight.pixels import carry_embeddings
from keepsight.requests import EngineRequest
from keepsight.runner import model_runner
from keepsight.runner.encoder_output_store import EncoderOutputStore
from keepsight.runner.model_runner import Job
from keepsight.runner.share_device import CpuShare, CudaShare
from keepsight.runner.step_inputs import StepInputs, make_step_inputs
from keepsight.runner.stored_tensors import from_stored, to_stored
from keepsight.scheduling.step_plan import (
    Encoding,
    EndName,
    Fault,
    KeptStretch,
    NewSequence,
    PageCopy,
    PageFill,
    Recall,
    Slice,
    StepPlan,
    StepResult,
)
from keepsight.tiers.tier import StoredArray
from tests.place import DEVICE, on_cpu_alone
from tests.runner.small_model import BLOCK_SIZE, NUM_BLOCKS, WAIT_SECONDS, Driver, SmallModel
from tests.runner.test_memory_ahead import needs_kernel

NUM_TOKENS = 64
Share = {"cpu": CpuShare, "cuda": CudaShare}[DEVICE]


@pytest.fixture(scope="module", params=[0, 5, 8, 11, 12, 13], ids=lambda seed: f"config{seed}")
def small(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SmallModel:
    return SmallModel(request.param, tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def driver(small: SmallModel) -> Iterator[Driver]:
    driver = Driver(small)
    yield driver
    driver.runner.close()


def legal_cuts(request: EngineRequest) -> list[int]:
    """Positions at which a prompt may be cut: none inside a picture."""
    return [
        position
        for position in range(1, len(request.token_ids))
        if not any(item.span.is_cut_by(position) for item in request.media)
    ]


@pytest.mark.parametrize("num_pictures", [0, 1, 3])
def test_greedy_tokens_equal_the_reference_s_over_64_tokens(
    driver: Driver, small: SmallModel, num_pictures: int
) -> None:
    answer = driver.answer(small.request("r", num_pictures), NUM_TOKENS)
    assert answer == small.reference_answer(num_pictures, NUM_TOKENS)


def test_a_prompt_may_be_cut_at_every_legal_boundary(driver: Driver, small: SmallModel) -> None:
    request = small.request("r", 3)
    whole = driver.answer(request, 8)
    cuts = legal_cuts(request)
    assert driver.answer(request, 8, cuts) == whole
    for seed in range(3):
        some = sorted(random.Random(seed).sample(cuts, len(cuts) // 4))
        assert driver.answer(request, 8, some) == whole


def test_prompts_and_answers_in_one_batch_do_not_affect_each_other(driver: Driver, small: SmallModel) -> None:
    requests = [small.request(f"r{number}", number, prompt_seed=number) for number in (0, 1, 3)]
    alone = [driver.answer(request, 12) for request in requests]
    ids = [driver.begin(request) for request in requests]
    waiting = [iter(driver.prompt_slices(ids[index], legal_cuts(requests[index])[5::9])) for index in range(3)]
    # Each begins when the one before has answered a few tokens, so prompts and answers share steps.
    for step in itertools.count():
        slices = [_next_of(driver, ids[index], waiting[index]) for index in range(3) if step >= 4 * index]
        driver.compute(*(piece for piece in slices if len(driver.tokens[piece.sequence_id]) < 12))
        if all(len(driver.tokens[each]) >= 12 for each in ids):
            break
    assert [driver.tokens[each] for each in ids] == alone


def _next_of(driver: Driver, sequence_id: tuple[str, int], prompt: Iterator[Slice]) -> Slice:
    return next(prompt, None) or driver.next_slice(sequence_id)


def test_a_slice_may_begin_inside_a_picture_whose_first_pages_are_held(driver: Driver, small: SmallModel) -> None:
    request = small.request("r", 3)
    whole = driver.answer(request, 8)
    for item in request.media:
        sequence_id = driver.begin(request)
        driver.compute(driver.slice(sequence_id, 0, item.span.end))
        # As after a prefix hit: the pages are there, and computing begins in the middle.
        middle = item.span.start + item.span.length // 2
        driver.compute(driver.slice(sequence_id, middle, len(request.token_ids)))
        driver.decode(sequence_id, num_tokens=7)
        assert driver.tokens[sequence_id] == whole
        driver.end(sequence_id)


@pytest.mark.parametrize("order", [[0, 1], [1, 0]], ids=["in order", "mixed"])
def test_kept_pages_are_continued_by_another_runner(small: SmallModel, order: list[int]) -> None:
    kept: dict[bytes, StoredArray] = {}
    before, after = (
        Driver(small, keep_stretch=lambda each, make_array: kept.update({each.stretch: make_array()})),
        Driver(small),
    )
    request = small.request("r", 3)
    whole = after.answer(request, 8)
    sequence_id = before.begin(request)
    before.compute(*before.prompt_slices(sequence_id))
    pages = before.pages[sequence_id][:2]
    # Another sequence overwrites them in the same step.
    overwritten = [PageCopy(NUM_BLOCKS - 1, page) for page in pages]
    before.runner.run(StepPlan(keep=[KeptStretch(b"kept", tuple(pages))], copy=overwritten))
    before.runner.close()

    sequence_id = after.begin(request)
    rest = after.slice(sequence_id, 2 * BLOCK_SIZE, len(request.token_ids), gap=True)
    after.runner.hold_stretch(b"kept", kept[b"kept"])
    after.runner.run(StepPlan(fill=[PageFill(after.pages[sequence_id][place], b"kept", place) for place in order]))
    found = after.runner.blocks.read(after.pages[sequence_id][:2]).cpu()
    assert torch.equal(found, from_stored(kept[b"kept"]))
    after.compute(rest)
    after.decode(sequence_id, num_tokens=7)
    after.runner.close()
    assert after.tokens[sequence_id] == whole


def test_loaded_stretches_that_no_plan_uses_are_dropped(driver: Driver) -> None:
    driver.runner.hold_stretch(b"unused", to_stored(torch.zeros(1), 0))
    driver.runner.run(StepPlan())
    assert driver.runner._stretches == {}


@pytest.mark.parametrize("num_left", [1, 3, 5, 8])
def test_pages_that_begin_as_another_s_are_copied_and_both_go_on(
    driver: Driver, small: SmallModel, num_left: int
) -> None:
    request = small.request("r", 1)
    whole = driver.answer(request, 8)
    source, target = driver.begin(request), driver.begin(request, choice=1)
    driver.compute(*driver.prompt_slices(source))
    held = len(request.token_ids) - num_left
    piece = driver.slice(target, held, len(request.token_ids))
    copies = map(PageCopy, driver.pages[source], piece.new_block_ids[: -(-held // BLOCK_SIZE)])
    driver.runner.run(StepPlan(copy=list(copies)))
    driver.compute(piece)
    for sequence_id in (target, source):
        driver.decode(sequence_id, num_tokens=7)
        assert driver.tokens[sequence_id] == whole


def test_a_sequence_that_lost_its_pages_begins_anew_and_continues_as_before(driver: Driver, small: SmallModel) -> None:
    request = small.request("r", 1, temperature=1.0, seed=4)
    unbroken = driver.answer(request, 20)
    sequence_id = driver.begin(request)
    driver.compute(*driver.prompt_slices(sequence_id))
    driver.decode(sequence_id, num_tokens=9)
    driver.lose_pages(sequence_id)
    other = driver.begin(small.request("other", 3))
    driver.compute(*driver.prompt_slices(other))  # overwrites the lost pages
    anew = driver.prompt_slices(sequence_id)
    assert anew[0].first_block == 0
    driver.compute(*anew)
    driver.decode(sequence_id, num_tokens=9)
    assert driver.tokens[sequence_id] == unbroken


def test_tokens_computed_beside_equal_those_computed_now(driver: Driver, small: SmallModel) -> None:
    for number in (0, 3):
        request = small.request("r", number)
        now = driver.answer(request, 6)
        sequence_id = driver.begin(request)
        for piece in driver.prompt_slices(sequence_id, legal_cuts(request)[3::7]):
            driver.compute(piece, beside=True)
        for _ in range(5):
            driver.compute(driver.next_slice(sequence_id), beside=True)
        assert driver.tokens[sequence_id] == now
        driver.end(sequence_id)


def test_scattered_pages_hold_what_pages_in_a_row_hold(one: Driver, one_small: SmallModel) -> None:
    whole = one.answer(one_small.request("r", 3), 40)
    sequence_id = one.begin(one_small.request("r", 3))
    length = one.lengths[sequence_id]
    one.compute(one.slice(sequence_id, 0, length, gap=True))
    for end in range(length + 1, length + 40):
        one.compute(one.slice(sequence_id, end - 1, end, gap=True))
    assert one.tokens[sequence_id] == whole


def test_a_seed_gives_the_same_tokens_whatever_the_batch_and_the_lane(one: Driver, one_small: SmallModel) -> None:
    request = one_small.request("r", 1, temperature=1.5, seed=7, n=2)
    alone = one.answer(request, 10)
    ids = [one.begin(request), one.begin(request, choice=1), one.begin(one_small.request("s", 0, temperature=2.0))]
    one.compute(*(piece for each in ids for piece in one.prompt_slices(each)), beside=True)
    for step in range(9):
        one.compute(*(one.next_slice(each) for each in reversed(ids)), beside=step % 2 == 0)
    assert one.tokens[ids[0]] == alone
    assert one.tokens[ids[1]] != alone


def test_several_slices_beside_are_one_batch_and_leave_the_others_their_pace(
    one: Driver, one_small: SmallModel
) -> None:
    requests = [one_small.request(f"r{number}", number, prompt_seed=number) for number in (0, 1, 3)]
    alone = [one.answer(request, 5) for request in requests]
    ids = [one.begin(request) for request in requests]
    one.compute(*one.prompt_slices(ids[0]))
    beside = [piece for each in ids[1:] for piece in one.prompt_slices(each)]
    plan = StepPlan(beside=beside, now=[one.next_slice(ids[0])])
    results = one.run_until(plan, lambda results: sum(len(each.computed) for each in results) == len(ids))
    computed = [each for result in results for each in result.computed]
    assert {each.sequence_id: each.end for each in computed} == {
        ids[0]: one.lengths[ids[0]] + 1, ids[1]: one.lengths[ids[1]], ids[2]: one.lengths[ids[2]],
    }  # fmt: skip
    tokens = {each.sequence_id: each.tokens for each in computed}
    for sequence_id, expected in zip(ids[1:], alone[1:], strict=True):
        assert [each.token_id for each in tokens[sequence_id]] == expected[:1]


def test_a_slice_samples_only_where_the_plan_says_so(one: Driver, one_small: SmallModel) -> None:
    request = one_small.request("r", 0, logprobs=2)
    sequence_id = one.begin(request)
    first, second = one.prompt_slices(sequence_id, [5])
    assert [(each.end, [*each.tokens]) for each in one.compute(first).computed] == [(5, [])]
    (computed,) = one.compute(second).computed
    (token,) = computed.tokens
    assert token.logprobs is not None
    assert len(token.logprobs) == 3


def test_slots_that_were_not_computed_are_never_read(one_small: SmallModel) -> None:
    driver = Driver(one_small)
    for layer in driver.runner.blocks.layers:
        layer.keys.fill_(float("nan"))
        layer.values.fill_(float("nan"))
    ids = [driver.begin(one_small.request(f"r{number}", number)) for number in (0, 3)]
    driver.compute(*(piece for each in ids for piece in driver.prompt_slices(each)))
    driver.decode(*ids, num_tokens=20)
    assert driver.tokens[ids[1]] == driver.answer(one_small.request("again", 3), 21)
    driver.runner.close()


def test_no_answer_ends_before_its_min_tokens(one_small: SmallModel) -> None:
    endless = Driver(one_small)
    free = endless.answer(one_small.request("r"), 10)
    endless.runner.close()
    bound = Driver(one_small, end_ids=frozenset(free))
    request = one_small.request("r", min_tokens=5)
    assert not set(bound.answer(request, 6)[:5]) & set(free)
    bound.runner.close()


# Failures -----------------------------------------------------------------------------------------------------


def fail_on(monkeypatch: pytest.MonkeyPatch, method: str, error: type[Exception] = RuntimeError) -> None:
    def fail(*_: object) -> None:
        raise error("out of memory")

    monkeypatch.setattr(Gemma3, method, fail)


def test_a_failure_concerns_the_batch_it_happened_in(
    one: Driver, one_small: SmallModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = one.answer(one_small.request("r", 1), 4)
    ids = [one.begin(one_small.request(f"r{number}", number)) for number in (0, 1)]
    with monkeypatch.context() as patched:
        fail_on(patched, "compute")
        for beside in (False, True):
            result = one.compute(*one.prompt_slices(ids[0]), beside=beside)
            assert result.failed_sequences == {ids[0]: Fault("out of memory")}
            assert not result.computed
    one.compute(*one.prompt_slices(ids[1]))
    one.decode(ids[1], num_tokens=3)
    assert one.tokens[ids[1]] == expected


@pytest.mark.parametrize("beside", [False, True])
def test_a_lost_device_ends_the_runner(one_small: SmallModel, monkeypatch: pytest.MonkeyPatch, beside: bool) -> None:
    """Everything after it would fail too, while an engine in its own process would report that all is well."""
    driver = Driver(one_small)
    sequence_id = driver.begin(one_small.request("r"))
    fail_on(monkeypatch, "compute", torch.AcceleratorError)
    with pytest.raises(torch.AcceleratorError):
        driver.compute(*driver.prompt_slices(sequence_id), beside=beside)
    driver.runner.close()


def test_work_that_fails_beside_has_ended_on_its_device_before_it_is_reported(
    one_small: SmallModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would still write to memory that belongs to another by then."""
    ended = threading.Event()
    monkeypatch.setattr(Share, "finish_part", lambda _: ended.set())
    driver = Driver(one_small)
    sequence_id = driver.begin(one_small.request("r"))
    fail_on(monkeypatch, "compute")
    assert driver.compute(*driver.prompt_slices(sequence_id), beside=True).failed_sequences
    assert ended.is_set()
    driver.runner.close()


def test_inputs_read_beside_are_held_until_the_device_has_read_them(
    one_small: SmallModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another stream frees that memory, and would give it to others without waiting for the read."""
    made, are_held = list[weakref.ref[Tensor]](), list[bool]()

    def make(*arguments: Any) -> StepInputs:
        inputs = make_step_inputs(*arguments)
        made.append(weakref.ref(inputs.token_ids))
        return inputs

    monkeypatch.setattr(model_runner, "make_step_inputs", make)
    monkeypatch.setattr(Share, "finish_part", lambda _: are_held.extend(each() is not None for each in made))
    driver = Driver(one_small)
    sequence_id = driver.begin(one_small.request("r"))
    assert driver.compute(*driver.prompt_slices(sequence_id), beside=True).computed
    driver.runner.close()
    assert are_held == [True, False]


def test_a_failed_encoding_concerns_its_own_keys(
    one: Driver, one_small: SmallModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_tokens = one_small.arguments["mm_tokens_per_image"]
    one.runner.hold_pixels("0", one_small.pixels(0))
    with monkeypatch.context() as patched:
        fail_on(patched, "encode_in_parts")
        assert one.encode([Encoding("a", "0", num_tokens)])[-1].failed_encodings == {"a": "out of memory"}
    encodings = [Encoding("a", "0", num_tokens), Encoding("b", "0", num_tokens + 1), Encoding("c", "?", num_tokens)]
    results = one.encode(encodings)
    assert [key for each in results for key in each.encoded] == ["a"]
    failed = {key: text for each in results for key, text in each.failed_encodings.items()}
    assert failed.keys() == {"b", "c"}
    assert f"{num_tokens} embeddings for {num_tokens + 1} tokens" in failed["b"]
    assert [key in one.runner.embeddings for key in "abc"] == [True, False, False]


def fail_on_second(method: Callable[..., Any]) -> Callable[..., Any]:
    calls = itertools.count(1)

    def call(*arguments: Any) -> Any:
        if next(calls) == 2:
            raise RuntimeError("out of memory")
        return method(*arguments)

    return call


def test_no_picture_is_held_of_those_that_fail_together(
    one: Driver, one_small: SmallModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_tokens = one_small.arguments["mm_tokens_per_image"]
    for number in range(3):
        one.runner.hold_pixels(str(number), one_small.pixels(number))
    monkeypatch.setattr(EncoderOutputStore, "put", fail_on_second(EncoderOutputStore.put))
    results = one.encode([Encoding(name, str(number), num_tokens) for number, name in enumerate("abc")])
    assert {key for each in results for key in each.failed_encodings} == set("abc")
    assert len(one.runner.embeddings) == 0


def test_no_end_is_kept_of_prompts_that_fail_together(one: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [one.begin(one.small.request(name, 0)) for name in ("a", "b")]
    slices = [piece._replace(keep_as=EndName(0, each[0].encode())) for each in ids for piece in one.prompt_slices(each)]
    monkeypatch.setattr(torch.Tensor, "clone", fail_on_second(torch.Tensor.clone))
    result = one.compute(*slices)
    assert result.failed_sequences.keys() == set(ids)
    assert not one.runner._ends


def test_a_prompt_whose_embeddings_are_absent_fails_alone(one: Driver, one_small: SmallModel) -> None:
    request = one_small.request("r", 1)
    sequence_id = one.begin(request)
    one.runner.run(StepPlan(evicted=["0"]))
    for beside in (False, True):
        plan_slices = one.prompt_slices(sequence_id)
        plan = StepPlan(beside=plan_slices) if beside else StepPlan(now=plan_slices)
        assert one.runner.run(plan).failed_sequences.keys() == {sequence_id}
    assert one.answer(one_small.request("s", 0), 3) == one_small.reference_answer(0, 3)


# Media --------------------------------------------------------------------------------------------------------


def test_an_item_that_is_not_wanted_at_its_turn_is_not_encoded(
    one_small: SmallModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_begin = threading.Event()
    monkeypatch.setattr(Share, "before_part", lambda _: may_begin.wait(WAIT_SECONDS))
    driver = Driver(one_small)
    for number in range(2):
        driver.runner.hold_pixels(str(number), one_small.pixels(number))
    encodings = [Encoding(key, key, one_small.arguments["mm_tokens_per_image"]) for key in ("0", "1")]
    driver.runner.run(StepPlan(encode=encodings[:1]))
    driver.runner.run(StepPlan(encode=encodings[1:], unwanted=["0"]))
    may_begin.set()
    assert all(driver.finished.acquire(timeout=WAIT_SECONDS) for _ in encodings)
    result = driver.runner.run(StepPlan())
    assert (result.left_out, result.encoded) == (["0"], ["1"])
    assert not result.is_empty
    driver.runner.close()


def test_pictures_encoded_together_took_the_same_time_from_their_batch_s_begin_to_its_end(
    one: Driver, one_small: SmallModel
) -> None:
    for index in range(3):
        one.runner.hold_pixels(str(index), one_small.pixels(index))
    num_tokens = one_small.arguments["mm_tokens_per_image"]
    began = time.monotonic()
    results = one.encode([Encoding(str(index), str(index), num_tokens) for index in range(3)])
    ended = time.monotonic()
    times = [took for each in results for took in each.encode_times.values()]
    assert len(times) == 3
    assert len(set(times)) == 1
    assert began < times[0].began < times[0].ended < ended
    assert times[0].num_together == 3


def test_pictures_encoded_together_get_the_embeddings_that_each_gets_alone(one: Driver, one_small: SmallModel) -> None:
    num_tokens = one_small.arguments["mm_tokens_per_image"]
    for index in range(5):
        one.runner.hold_pixels(str(index), one_small.pixels(index))
    one.encode([Encoding(f"together{index}", str(index), num_tokens) for index in range(5)])
    for index in range(5):
        one.encode([Encoding(f"alone{index}", str(index), num_tokens)])
        together, alone = (one.runner.embeddings.get(f"{name}{index}") for name in ("together", "alone"))
        torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)


def test_embeddings_that_came_are_held_as_they_are_beside_pictures_that_are_encoded(
    one: Driver, one_small: SmallModel
) -> None:
    num_tokens = one_small.arguments["mm_tokens_per_image"]
    came = np.random.default_rng(1).standard_normal((num_tokens, one.runner.model.shape.media_width), np.float32)
    for name, pixels in (("e", carry_embeddings(came)), ("f", carry_embeddings(came[1:])), ("p", one_small.pixels(0))):
        one.runner.hold_pixels(name, pixels)
    embeds = [Encoding(name, name, num_tokens, "image_embeds") for name in "ef"]
    wrong = Encoding("w", "p", num_tokens, "image_embeds")
    results = one.encode([embeds[0], Encoding("p", "p", num_tokens), embeds[1], wrong])
    assert {key for each in results for key in each.encoded} == {"e", "p"}
    assert {key for each in results for key in each.failed_encodings} == {"f", "w"}
    assert np.array_equal(one.runner.embeddings.get("e").cpu().numpy(), came)


def test_evicted_embeddings_unneeded_pixels_and_ended_sequences_are_forgotten(
    one: Driver, one_small: SmallModel
) -> None:
    request = one_small.request("r", 2)
    sequence_id = one.begin(request)
    assert "0" in one.runner.embeddings
    one.runner.run(StepPlan(ended=[sequence_id], evicted=["0"], unneeded_pixels=["0", "1"]))
    assert "0" not in one.runner.embeddings
    assert "1" in one.runner.embeddings
    assert not len(one.runner.sequences)
    (failed,) = one.encode([Encoding("2", "0", request.media[0].span.length)])[-1].failed_encodings
    assert failed == "2"


def test_a_picture_is_whole_when_its_pixels_are_replaced_while_it_is_encoded(
    one: Driver, one_small: SmallModel
) -> None:
    num_tokens = one_small.arguments["mm_tokens_per_image"]
    one.runner.hold_pixels("x", one_small.pixels(1))
    plans = StepPlan(encode=[Encoding("first", "x", num_tokens)]), StepPlan(unneeded_pixels=["x"])
    # On a busy machine it may have been encoded already.
    early = [each for plan in plans for each in one.runner.run(plan).encoded]
    one.runner.hold_pixels("x", np.zeros_like(one_small.pixels(1)))
    assert one.finished.acquire(timeout=30)
    assert [*early, *one.runner.run(StepPlan()).encoded] == ["first"]
    one.runner.hold_pixels("1", one_small.pixels(1))
    one.encode([Encoding("second", "1", num_tokens)])
    torch.testing.assert_close(one.runner.embeddings.get("first"), one.runner.embeddings.get("second"))


def test_a_closed_runner_s_thread_has_ended(one_small: SmallModel) -> None:
    driver = Driver(one_small)
    driver.runner.hold_pixels("0", one_small.pixels(0))
    driver.runner.run(StepPlan(encode=[Encoding("0", "0", 1)] * 20))
    driver.runner.close()
    assert not driver.runner._beside._thread.is_alive()


@needs_kernel
@on_cpu_alone("a GPU's memory is there at once")
def test_the_runner_prepares_memory_until_there_is_enough_and_keeps_computed_values(
    one: Driver, one_small: SmallModel
) -> None:
    request = one_small.request("r", 1)
    sequence_id = one.begin(request)
    first, *others = one.prompt_slices(sequence_id, legal_cuts(request)[:1])
    one.compute(first)
    assert sum(1 for _ in iter(one.runner.prepare, False)) > 0
    one.compute(*others)
    assert not one.runner.prepare()
    one.decode(sequence_id, num_tokens=3)
    assert one.tokens[sequence_id] == one_small.reference_answer(1, 4)


@needs_kernel
@on_cpu_alone("a GPU's memory is there at once")
def test_the_runner_prepares_no_memory_while_others_compute(one: Driver) -> None:
    may_end = threading.Event()

    def other_work() -> Job:
        yield
        assert may_end.wait(WAIT_SECONDS)
        return StepResult()

    one.runner._beside.begin(other_work())
    assert not one.runner.prepare()
    may_end.set()
    assert one.finished.acquire(timeout=WAIT_SECONDS)
    assert one.runner.prepare()


def test_a_request_id_may_come_again_after_its_sequence_ended(one: Driver, one_small: SmallModel) -> None:
    for number in (0, 1):
        request = one_small.request("r", number)
        sequence_id = one.begin(request)
        one.compute(*one.prompt_slices(sequence_id))
        plan = StepPlan(ended=[sequence_id], new=[NewSequence(sequence_id, request, 0, ("0",) * number)])
        one.runner.run(plan)
        one.lose_pages(sequence_id)
        one.tokens[sequence_id] = []
        one.compute(*one.prompt_slices(sequence_id))
        assert one.tokens[sequence_id] == one_small.reference_answer(number, 1)
        one.end(sequence_id)


# Repeated prompts ---------------------------------------------------------------------------------------------


END = EndName(0, b"of the first prompt")


def test_a_first_token_drawn_from_kept_logits_equals_one_from_computed_logits(one: Driver) -> None:
    params: dict[str, Any] = {"temperature": 1.0, "seed": 3, "logprobs": 2}
    requests = [one.small.request(name, 1, **params) for name in ("first", "again")]
    first, again = (one.begin(request) for request in requests)
    [whole] = one.prompt_slices(first)
    kept = one.compute(whole._replace(keep_as=END))
    assert kept.kept_ends == [END]
    recalled = one.runner.run(StepPlan(recall=[Recall(again, END)]))
    assert recalled.recalled == {again: kept.computed[0].tokens[0]}
    # The answer goes on from there.
    one.tokens[again].append(recalled.recalled[again].token_id)
    for sequence_id in (first, again):
        for piece in one.prompt_slices(sequence_id) if sequence_id == again else [one.next_slice(first)]:
            one.compute(piece)
    assert one.tokens[first] == one.tokens[again]


def test_only_a_sequence_without_kept_logits_fails(one: Driver) -> None:
    first, lost = one.begin(one.small.request("first", 0)), one.begin(one.small.request("lost", 0))
    [whole] = one.prompt_slices(first)
    one.compute(whole._replace(keep_as=END))
    result = one.runner.run(StepPlan(evicted_ends=[END], recall=[Recall(lost, END)], now=[one.next_slice(first)]))
    assert list(result.failed_sequences) == [lost]
    assert [each.sequence_id for each in result.computed] == [first]
