import torch

from keepsight.requests import EngineRequest
from keepsight.runner.guide_tokens import GuideMaker
from keepsight.runner.sequence_table import SequenceTable
from keepsight.sampling_params import SamplingParams
from keepsight.scheduling.step_plan import NewSequence


def test_the_choices_of_a_request_have_one_set_of_wishes_as_long_as_one_of_them_is_remembered() -> None:
    guides = GuideMaker(None, frozenset({1}))
    table = SequenceTable(16, frozenset({1}), torch.device("cpu"), guides, sees_pictures_whole=True)

    def remember(request_id: str, choice: int) -> int:
        request = EngineRequest(request_id, (2, 3), (), SamplingParams(n=3))
        table.remember(NewSequence((request_id, choice), request, choice, ()))
        return id(table[request_id, choice].sampling.wishes)

    first, other = remember("a", 0), remember("b", 0)
    assert remember("a", 1) == first != other
    table.forget([("a", 0)])
    assert remember("a", 2) == first
    table.forget([("a", 1), ("a", 2), ("b", 0)])
    assert not table._wishes
