"""However wrong the guesses, tokens and their logprobs are those of steps without guesses."""

import random
from typing import Any

import pytest

from keepsight.requests import TokenLogprobs
from keepsight.scheduling.step_plan import SequenceId, Slice, StepPlan
from tests.place import LEEWAY
from tests.runner.small_model import Driver

NUM_TOKENS = 40
# Parameters of each request: everything that depends on earlier tokens, and everything that is reported of tokens.
WISHES: tuple[dict[str, Any], ...] = (
    {},
    {"logprobs": 3},
    {"temperature": 1.5, "seed": 4, "logprobs": 0},
    {"temperature": 0.7, "seed": 5, "top_k": 9, "top_p": 0.9},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.3},
    {"min_tokens": 20, "stop_token_ids": [3, 5, 9], "logprobs": 1},
    {"temperature": 1.0, "seed": 6, "logit_bias": {4: 3.0}, "repetition_penalty": 0.8},
)


def begin_all(driver: Driver, name: str) -> list[SequenceId]:
    ids = []
    for number, wishes in enumerate(WISHES):
        ids.append(driver.begin(driver.small.request(f"{name}{number}", number % 3, **wishes)))
        driver.compute(*driver.prompt_slices(ids[-1]))
    return ids


def as_near(tokens: TokenLogprobs | None) -> Any:
    """On a GPU, products differ in their last bits when other rows are computed beside them."""
    if tokens is None or not LEEWAY:
        return tokens
    return tuple(each._replace(logprob=pytest.approx(each.logprob, abs=LEEWAY)) for each in tokens)  # type: ignore[arg-type]


def compute(driver: Driver, logprobs: dict[SequenceId, list[TokenLogprobs | None]], *slices: Slice) -> None:
    for computed in driver.compute(*slices).computed:
        logprobs[computed.sequence_id] += [each.logprobs for each in computed.tokens]


@pytest.mark.parametrize("seed", range(4))
def test_tokens_and_their_probabilities_are_those_without_guesses(one: Driver, seed: int) -> None:
    plain, guessing = begin_all(one, "plain"), begin_all(one, "guessing")
    logprobs = {each: list[TokenLogprobs | None]() for each in (*plain, *guessing)}
    for _ in range(NUM_TOKENS - 1):
        compute(one, logprobs, *(one.next_slice(each) for each in plain))
    right = {other: one.tokens[each] for each, other in zip(plain, guessing, strict=True)}
    rng, num_steps = random.Random(seed), 0
    while waiting := [each for each in guessing if len(one.tokens[each]) < NUM_TOKENS]:
        firsts: list[Slice] = []
        guesses: list[Slice] = []
        for each in waiting:
            coming = right[each][len(one.tokens[each]) : NUM_TOKENS - 1][: rng.randrange(6)]
            some = [token_id if rng.random() < 0.8 else token_id ^ 1 for token_id in coming]
            first, *others = one.slices_with_guesses(each, some)
            firsts.append(first)
            guesses += others
        rng.shuffle(firsts)
        compute(one, logprobs, *firsts, *guesses)
        num_steps += 1
    assert num_steps < NUM_TOKENS - 1
    for each, other in zip(plain, guessing, strict=True):
        assert one.tokens[other] == one.tokens[each]
        assert logprobs[other] == [as_near(tokens) for tokens in logprobs[each]]


def test_a_step_that_fails_draws_nothing_for_right_guesses(one: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    sequence_id = one.begin(one.small.request("one"))
    one.compute(*one.prompt_slices(sequence_id))
    slices = one.slices_with_guesses(sequence_id, [1, 2])

    def fail(*_: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(type(one.small.model), "logits", fail)
    result = one.runner.run(StepPlan(now=slices))
    assert not result.computed
    assert [fault.message for fault in result.failed_sequences.values()] == ["out of luck"]
