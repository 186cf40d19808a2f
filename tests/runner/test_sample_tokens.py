"""Edits of logits before sampling, and that a sequence samples the same in any batch."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import RepetitionPenaltyLogitsProcessor

from keepsight.runner import sample_tokens as sampler
from keepsight.runner.draw_tokens import draw_tokens
from keepsight.runner.sample_tokens import SamplingState, TokenConstraints, sample_tokens
from keepsight.sampling_params import SamplingParams
from keepsight.scheduling.step_plan import SampledToken

VOCAB_SIZE = 50
END = frozenset({7})


def logits_of(seed: int, rows: int = 1) -> Tensor:
    return 3 * torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))


def state(prompt: tuple[int, ...] = (), choice: int = 0, **params: Any) -> SamplingState:
    return SamplingState(TokenConstraints(SamplingParams(**params), prompt, END), choice)


def sample_alone(logits: Tensor, **params: Any) -> SampledToken:
    return sample_tokens(logits, [state(**params)])[0]


def test_zero_temperature_takes_the_most_likely_token() -> None:
    logits = logits_of(5)
    assert sample_alone(logits, temperature=0).token_id == logits.argmax()


def test_the_repetition_penalty_equals_transformers_over_prompt_and_output() -> None:
    logits, prompt = logits_of(6), tuple(range(0, VOCAB_SIZE, 2))
    theirs = RepetitionPenaltyLogitsProcessor(1.9)(torch.tensor([prompt]), logits.clone())
    seen = state(prompt, temperature=0, repetition_penalty=1.9)
    assert sample_tokens(logits, [seen])[0].token_id == theirs.argmax()


def test_the_repetition_penalty_looks_at_the_prompt_once_however_long_the_answer() -> None:
    class Counted(int):
        num_looks = 0

        def __hash__(self) -> int:
            Counted.num_looks += 1
            return int(self)

    penalized = state(tuple(map(Counted, range(40))), temperature=0, repetition_penalty=1.9)
    sample_tokens(logits_of(6), [penalized])
    num_looks = Counted.num_looks
    for _ in range(30):
        sample_tokens(logits_of(6), [penalized])
    assert Counted.num_looks == num_looks > 0


def test_a_token_of_the_prompt_is_penalized_once_though_the_answer_repeats_it() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 3], logits[0, 4] = 3.0, 1.0
    penalized = state((3, 3), temperature=0, repetition_penalty=2.0)
    # Penalized once, its logit is 1.5; twice would leave 0.75, less than the 1.0 of token 4.
    assert [sample_tokens(logits, [penalized])[0].token_id for _ in range(3)] == [3, 3, 3]


def test_presence_counts_once_and_frequency_each_time_and_only_in_the_answer() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 3], logits[0, 4] = 3.0, 1.0
    penalized = state((3,), temperature=0, presence_penalty=0.5, frequency_penalty=1.0)
    # 3.0 at first, though the prompt contains it; then 1.5; then 0.5, which is less than the 1.0 of token 4.
    assert [sample_tokens(logits, [penalized])[0].token_id for _ in range(3)] == [3, 3, 4]


class CallsOfTorch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.made.append(func)
        return func(*args, **(kwargs or {}))

    @property
    def num_numbers(self) -> int:
        """Number of values read one by one; for each, the host waits for the device."""
        return self.made.count(torch.ops.aten._local_scalar_dense.default)


def test_penalties_and_biases_read_no_number_from_the_device_however_long_the_answer() -> None:
    talkative = state((3,), temperature=0, frequency_penalty=1.0, repetition_penalty=1.1, logit_bias={4: 1.0, 5: 2.0})
    for token_id in range(20):
        talkative.note(token_id)
    with CallsOfTorch() as calls:
        sample_tokens(logits_of(0), [talkative])
    assert calls.num_numbers == 0


def test_bans_read_no_number_from_the_device() -> None:
    params = SamplingParams(temperature=0, min_tokens=2, allowed_token_ids=[2, 4])
    banning = SamplingState(TokenConstraints(params, (), END, [(5,)]), 0)
    with CallsOfTorch() as calls:
        sample_tokens(logits_of(0), [banning])
    assert calls.num_numbers == 0


def test_logit_bias_adds_and_ignores_ids_outside_the_vocabulary() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    assert sample_alone(logits, temperature=0, logit_bias={9: 1.0, VOCAB_SIZE + 3: 100.0}).token_id == 9


@pytest.mark.parametrize("others", [{}, {"logit_bias": {2: 1.0}}])
def test_before_min_tokens_nothing_can_end_the_answer(others: dict[str, Any]) -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 7], logits[0, 11], logits[0, 2] = 30.0, 20.0, 10.0
    waiting = state(temperature=0, min_tokens=2, stop_token_ids=[11], **others)
    assert [sample_tokens(logits, [waiting])[0].token_id for _ in range(3)] == [2, 2, 7]


def test_min_tokens_bans_no_ends_that_are_ignored_but_the_callers_own_stop_tokens() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 7], logits[0, 11] = 10.0, 20.0
    ignoring = state(temperature=0, min_tokens=1, ignore_eos=True, stop_token_ids=[11])
    assert sample_tokens(logits, [ignoring])[0].token_id == 7


def test_only_allowed_tokens_are_sampled_and_those_outside_the_vocabulary_count_for_nothing() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 2] = 30.0
    allowed = state(seed=1, allowed_token_ids=[5, 9, VOCAB_SIZE + 1])
    assert {sample_tokens(logits, [allowed])[0].token_id for _ in range(30)} == {5, 9}


def test_per_token_options_are_examined_once_however_long_the_answer() -> None:
    class Counted(tuple[int, ...]):
        num_readings = 0

        def __iter__(self) -> Iterator[int]:
            Counted.num_readings += 1
            return super().__iter__()

    allowed = state(seed=1, allowed_token_ids=[5, 9])
    object.__setattr__(allowed.params, "allowed_token_ids", Counted((5, 9)))
    sampled = {sample_tokens(torch.zeros(1, VOCAB_SIZE), [allowed])[0].token_id for _ in range(30)}
    assert (sampled, Counted.num_readings) == ({5, 9}, 1)


def test_a_banned_run_is_never_completed_but_its_tokens_may_come_otherwise() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 2], logits[0, 3], logits[0, 4] = 30.0, 20.0, 10.0
    params = SamplingParams(temperature=0)
    banning = SamplingState(TokenConstraints(params, (2, 2), END, [(2, 2), (3, 2, 3), (VOCAB_SIZE + 1,)]), 0)
    # Tokens of the prompt do not count.
    assert [sample_tokens(logits, [banning])[0].token_id for _ in range(6)] == [2, 3, 2, 4, 2, 3]


@given(st.sets(st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple), max_size=6), st.integers(0, 99))
def test_no_banned_run_is_ever_in_an_answer(runs: set[tuple[int, ...]], seed: int) -> None:
    banning = SamplingState(TokenConstraints(SamplingParams(seed=seed), (), END, runs), 0)
    answer = tuple(sample_tokens(torch.zeros(1, 5), [banning])[0].token_id for _ in range(12))
    assert not any(answer[start : start + len(run)] == run for run in runs for start in range(12))


def test_a_ban_that_would_leave_no_token_is_ignored() -> None:
    logits = torch.full((1, VOCAB_SIZE), -torch.inf)
    logits[0, 7] = 0.0
    assert sample_alone(logits, temperature=1.0, min_tokens=3).token_id == 7


def test_a_seed_gives_the_same_tokens_whatever_the_batch() -> None:
    steps = [logits_of(seed) for seed in range(20)]
    alone = [sample_tokens(step, [own])[0].token_id for own in [state(seed=5)] for step in steps]
    own, others = state(seed=5), [state(seed=6), state(temperature=0), state(top_k=2)]
    crowded = [sample_tokens(step.repeat(4, 1), [others[0], own, *others[1:]])[1].token_id for step in steps]
    assert crowded == alone


def test_many_rows_are_drawn_some_at_a_time_and_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = logits_of(0, rows=5)

    def draw() -> list[int]:
        states = [state(temperature=0), *(state(seed=seed, top_p=0.9) for seed in range(4))]
        return [each.token_id for each in sample_tokens(logits, states)]

    def counted(some: Tensor, params: Sequence[SamplingParams], points: Sequence[float]) -> Tensor:
        sizes.append(len(some))
        return draw_tokens(some, params, points)

    at_once, sizes = draw(), list[int]()
    monkeypatch.setattr(sampler, "draw_tokens", counted)
    monkeypatch.setattr(sampler, "ROWS_AT_ONCE", 3)
    assert draw() == at_once
    assert sizes == [3, 1]


def test_choices_of_one_request_differ_though_they_share_a_seed() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    first, second = (state(choice=choice, seed=5) for choice in (0, 1))
    draws = [[sample_tokens(logits, [each])[0].token_id for _ in range(10)] for each in (first, second)]
    assert draws[0] != draws[1]


@pytest.mark.parametrize("seeds", [(5, 5 + 2**32), (-7, 2**32 - 7), (-7, 7), (0, -(2**63))])
def test_different_seeds_draw_different_tokens(seeds: tuple[int, int]) -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    draws = [[sample_tokens(logits, [own])[0].token_id for _ in range(10)] for own in [state(seed=s) for s in seeds]]
    assert draws[0] != draws[1]


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -50.0]])
    drawing = state(seed=1)
    counts = torch.zeros(4)
    for _ in range(4000):
        counts[sample_tokens(logits, [drawing])[0].token_id] += 1
    torch.testing.assert_close(counts / 4000, logits[0].softmax(-1), atol=0.03, rtol=0)


def test_each_sequence_of_a_batch_gets_its_own_logprobs() -> None:
    logits = logits_of(9, rows=3)
    together = sample_tokens(logits, [state(temperature=0, logprobs=number) for number in (1, 2, 3)])
    alone = [sample_alone(row[None], temperature=0, logprobs=number) for number, row in enumerate(logits, start=1)]
    assert together == alone


def test_logprobs_take_as_many_calls_of_torch_for_many_sequences_as_for_one() -> None:
    def count_calls(rows: int) -> int:
        with CallsOfTorch() as calls:
            sample_tokens(logits_of(9, rows), [state(temperature=0, logprobs=2) for _ in range(rows)])
        return len(calls.made)

    assert count_calls(16) == count_calls(2)


def test_logprobs_are_the_models_own_before_any_edit() -> None:
    logits = logits_of(8)
    expected = logits[0].log_softmax(-1)
    token = sample_alone(logits, temperature=0, logprobs=3, logit_bias={13: 100.0})
    assert token.token_id == 13
    assert token.logprobs is not None
    sampled, *top = token.logprobs
    assert sampled.logprob == pytest.approx(float(expected[13]))
    assert sampled.rank == 1 + int((expected > expected[13]).sum())
    assert [each.token_id for each in top] == expected.topk(3).indices.tolist()
    assert [each.rank for each in top] == [1, 2, 3]
    assert sample_alone(logits, logprobs=None).logprobs is None
    assert len(sample_alone(logits, logprobs=0).logprobs or ()) == 1
