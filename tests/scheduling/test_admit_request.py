"""What the choices of a request share, and what each has of its own."""

from itertools import count

from keepsight.scheduling.admit_request import make_states
from keepsight.scheduling.request_state import RequestState
from keepsight.scheduling.step_plan import SampledToken
from tests.scheduling.drive import END_IDS, make_config, make_request


def states_of(*parts: int | str, n: int, predicted: tuple[int, ...] = ()) -> list[RequestState]:
    request = make_request("a", *parts, n=n, predicted=predicted)
    return make_states(request, None, count(), make_config(block_size=4), END_IDS)


def test_a_prompt_is_hashed_once_however_many_choices_it_has() -> None:
    first, second = states_of(9, n=2)
    assert len(first.hasher.hashes) == 2
    assert all(a is b for a, b in zip(first.hasher.hashes, second.hasher.hashes, strict=True))


def test_each_choice_hashes_its_own_answer() -> None:
    first, second, third = states_of(9, n=3)
    for _ in range(3):
        first.append(SampledToken(30))
        second.append(SampledToken(31))
    hashes = [state.hasher.hashes for state in (first, second, third)]
    assert [len(each) for each in hashes] == [3, 3, 2]
    assert hashes[0][:2] == hashes[1][:2] == hashes[2]
    assert hashes[0][2] != hashes[1][2]
    assert first.hasher.prompt_end == second.hasher.prompt_end


def test_a_prediction_is_prepared_once_and_each_choice_follows_it_separately() -> None:
    first, second = states_of(9, n=2, predicted=tuple(range(30, 40)))
    assert first.guesser.before is second.guesser.before
    for state, token in ((first, 30), (second, 29)):
        state.append(SampledToken(token))
    assert list(first.guess(3)) == [31, 32, 33]
    assert list(second.guess(3)) == []
