"""Each prompt token gets its logprob given those before it, however the prompt was cut."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from keepsight.models.block_table import BlockTable
from keepsight.requests import EngineRequest
from keepsight.runner import compute_prompt_logprobs as module
from keepsight.runner.compute_prompt_logprobs import compute_prompt_logprobs
from keepsight.runner.sample_tokens import SamplingState, TokenConstraints
from keepsight.runner.sequence_table import RunningSequence
from keepsight.sampling_params import SamplingParams

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
VOCAB_SIZE = 12
# The "model": its hidden states are its logits.
LOGITS = torch.randn(len(PROMPT), VOCAB_SIZE, generator=torch.Generator().manual_seed(1))


def sequence(num_top: int = 2) -> RunningSequence:
    params = SamplingParams(prompt_logprobs=num_top)
    device = torch.device("cpu")
    sampling = SamplingState(TokenConstraints(params, PROMPT, frozenset()), 0)
    table = BlockTable(16, device=device)
    return RunningSequence(EngineRequest("r", PROMPT, (), params), (), list(PROMPT), table, sampling, 0)


def read(of: RunningSequence, start: int, end: int, to_logits: Callable[[Tensor], Tensor] = lambda rows: rows) -> None:
    compute_prompt_logprobs(LOGITS[start:end], of, start, to_logits, lambda: None)


def test_each_token_is_reported_with_its_rank_and_the_likeliest_ones() -> None:
    whole = sequence()
    read(whole, 0, len(PROMPT))
    assert len(whole.prompt_logprobs) == len(PROMPT) - 1
    for place, (own, *top) in enumerate(whole.prompt_logprobs):
        logprobs = LOGITS[place].log_softmax(dim=-1)
        order = logprobs.argsort(descending=True).tolist()
        assert own.token_id == PROMPT[place + 1]
        assert own.logprob == pytest.approx(float(logprobs[own.token_id]))
        assert order[own.rank - 1] == own.token_id
        assert [(each.token_id, each.rank) for each in top] == [(order[0], 1), (order[1], 2)]
        assert [each.logprob for each in top] == pytest.approx(logprobs[order[:2]].tolist())


@pytest.mark.parametrize("cuts", [(0, 8), (0, 1, 8), (0, 3, 7, 8), tuple(range(9))])
@pytest.mark.parametrize("rows_at_once", [1, 3, 64])
def test_cuts_change_nothing(monkeypatch: pytest.MonkeyPatch, cuts: tuple[int, ...], rows_at_once: int) -> None:
    whole = sequence()
    read(whole, 0, len(PROMPT))
    monkeypatch.setattr(module, "ROWS_AT_ONCE", rows_at_once)
    cut = sequence()
    sizes = list[int]()

    def to_logits(rows: Tensor) -> Tensor:
        sizes.append(len(rows))
        return rows

    for start, end in itertools.pairwise(cuts):
        read(cut, start, end, to_logits)
    assert max(sizes) <= rows_at_once
    found, expected = (torch.tensor([ones[0].logprob for ones in each.prompt_logprobs]) for each in (cut, whole))
    torch.testing.assert_close(found, expected)
    assert [[one.token_id for one in ones] for ones in cut.prompt_logprobs] == [
        [one.token_id for one in ones] for ones in whole.prompt_logprobs
    ]


def test_a_prompt_that_begins_anew_is_reported_once() -> None:
    anew, unbroken = sequence(0), sequence(0)
    read(anew, 0, 5)
    read(anew, 0, 3)
    read(anew, 3, len(PROMPT))
    read(unbroken, 0, len(PROMPT))
    assert anew.prompt_logprobs == unbroken.prompt_logprobs


def test_other_work_may_run_between_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROWS_AT_ONCE", 2)
    pauses = list[None]()
    compute_prompt_logprobs(LOGITS, sequence(), 0, lambda rows: rows, lambda: pauses.append(None))
    assert len(pauses) == 4
