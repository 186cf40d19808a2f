from typing import Any

import pytest
import torch

from keepsight.media import Geometry, MediaItem, TokenSpan
from keepsight.models.model import ModelShape
from keepsight.requests import EngineRequest, ThoughtTokens
from keepsight.runner.guide_tokens import GuideMaker
from keepsight.runner.sequence_table import SequenceTable
from keepsight.sampling_params import SamplingParams
from keepsight.scheduling.step_plan import NewSequence
from keepsight.structured_outputs import StructuredOutputsParams


def make_table(**shape: Any) -> SequenceTable:
    guides = GuideMaker(None, frozenset({1}))
    made = ModelShape((), 10, 8, 0, 0, **{"sees_pictures_whole": True, **shape})
    return SequenceTable(16, frozenset({1}), torch.device("cpu"), guides, made)


def test_the_choices_of_a_request_share_constraints_as_long_as_one_of_them_is_remembered() -> None:
    table, requests = make_table(), {each: EngineRequest(each, (2, 3), (), SamplingParams(n=3)) for each in "ab"}

    def remember(request_id: str, choice: int) -> int:
        table.remember(NewSequence((request_id, choice), requests[request_id], choice, ()))
        return id(table[request_id, choice].sampling.constraints)

    first, other = remember("a", 0), remember("b", 0)
    assert remember("a", 1) == first != other
    table.forget([("a", 0)])
    assert remember("a", 2) == first
    assert remember("b", 1) == other


def test_a_request_under_the_id_of_an_aborted_one_whose_sequence_still_runs_has_its_own_constraints() -> None:
    table, mine = make_table(), SamplingParams(allowed_token_ids=[3])
    former = EngineRequest("a", (5, 6, 7), (), SamplingParams(repetition_penalty=1.3))
    table.remember(NewSequence(("a", 0), former, 0, ()))
    table.remember(NewSequence(("a", 1), EngineRequest("a", (8, 9), (), mine), 0, ()))
    table.forget([("a", 0)])
    assert table["a", 1].sampling.params is mine


def test_the_guide_of_a_request_that_thinks_first_waits_for_the_end_of_the_thought() -> None:
    table = make_table()
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    table.remember(NewSequence(("a", 0), EngineRequest("a", (2, 3), (), params, thought=ThoughtTokens(None, 7)), 0, ()))
    guide = table["a", 0].sampling.guide
    assert guide is not None
    guide.follow(5)
    assert (guide.mask(), guide.fault) == (None, None)
    guide.follow(7)
    # There is no tokenizer to follow its form with.
    assert (guide.mask(), guide.fault is None) == (None, False)


@pytest.mark.parametrize("uses_mrope", [True, False])
def test_a_picture_s_tokens_have_rows_and_columns_where_the_model_uses_mrope(uses_mrope: bool) -> None:
    table, picture = make_table(uses_mrope=uses_mrope), MediaItem("0", TokenSpan(1, 6), Geometry(), columns=3)
    request = EngineRequest("a", (2, *[9] * 6, 3), (picture,), SamplingParams())
    table.remember(NewSequence(("a", 0), request, 0, ("0",)))
    assert (table["a", 0].places is not None) == uses_mrope


@pytest.mark.parametrize(
    ("shape", "spans"),
    [
        ({}, [TokenSpan(1, 6)]),
        ({"embedding_token": 9}, [TokenSpan(2, 2), TokenSpan(5, 1)]),
        ({"sees_pictures_whole": False}, []),
    ],
)
def test_text_tokens_within_a_picture_are_not_seen_by_tokens_before_them(
    shape: dict[str, Any], spans: list[TokenSpan]
) -> None:
    table, picture = make_table(**shape), MediaItem("0", TokenSpan(1, 6), Geometry())
    request = EngineRequest("a", (9, 4, 9, 9, 5, 9, 4, 9), (picture,), SamplingParams())
    table.remember(NewSequence(("a", 0), request, 0, ("0",)))
    assert table["a", 0].whole_spans == tuple(spans)
