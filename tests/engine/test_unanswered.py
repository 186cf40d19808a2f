"""Requests and choices that still have to be answered."""

from keepsight.engine.unanswered import Unanswered
from keepsight.requests import AbortRequest, MediaNeeded, RequestFailed, TokenOutput
from tests.scheduling.drive import make_request


def asked(*num_choices: int) -> Unanswered:
    unanswered = Unanswered()
    for index, n in enumerate(num_choices):
        unanswered.note_asked(make_request("abc"[index], 3, n=n, temperature=1))
    return unanswered


def test_a_request_is_answered_when_the_last_of_its_choices_has_ended() -> None:
    unanswered = asked(2, 1)
    unanswered.note_answered(TokenOutput("a", 0, 5))
    unanswered.note_answered(TokenOutput("a", 1, 5, finish_reason="stop"))
    unanswered.note_answered(TokenOutput("a", 1, 5, finish_reason="stop"))
    assert list(unanswered) == ["a", "b"]
    unanswered.note_answered(TokenOutput("a", 0, 5, finish_reason="length"))
    assert list(unanswered) == ["b"]


def test_an_aborted_choice_needs_no_answer() -> None:
    unanswered = asked(2, 2)
    unanswered.note_asked(AbortRequest("a", 0))
    unanswered.note_answered(TokenOutput("a", 1, 5, finish_reason="stop"))
    unanswered.note_asked(AbortRequest("b"))
    assert not list(unanswered)


def test_a_failure_answers_all_choices_and_unknown_ids_change_nothing() -> None:
    unanswered = asked(3, 1)
    unanswered.note_answered(MediaNeeded("b", ("x",)))
    unanswered.note_answered(RequestFailed("a", "too long"))
    unanswered.note_answered(RequestFailed("z", "too long"))
    unanswered.note_asked(AbortRequest("z", 1))
    assert list(unanswered) == ["b"]
