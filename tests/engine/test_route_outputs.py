import threading
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from keepsight.engine.inbox import Inbox
from keepsight.engine.route_outputs import OutputRouter
from keepsight.requests import (
    AbortRequest,
    CachesReset,
    EngineRequest,
    FindMedia,
    FromEngine,
    MediaArrived,
    MediaFound,
    MediaHeld,
    MediaNeeded,
    RequestFailed,
    ResetCaches,
    StoredPixels,
    TokenOutput,
)
from keepsight.sampling_params import SamplingParams


class Sent:
    def __init__(self) -> None:
        self.to: dict[str, list[FromEngine]] = {}
        self.to_all: list[FromEngine] = []
        self.is_full = False
        self.forgotten: list[str] = []

    def send(self, frontend_id: str, outputs: Sequence[FromEngine]) -> bool:
        if not self.is_full:
            self.to.setdefault(frontend_id, []).extend(outputs)
        return not self.is_full

    def forget(self, frontend_id: str) -> None:
        self.forgotten.append(frontend_id)

    def send_to_all(self, outputs: Sequence[FromEngine]) -> None:
        self.to_all += outputs


def request(request_id: str, n: int = 1) -> EngineRequest:
    return EngineRequest(request_id, (1, 2), (), SamplingParams(n=n))


@pytest.fixture
def inbox() -> Inbox:
    return Inbox()


@pytest.fixture
def router(inbox: Inbox) -> OutputRouter:
    return OutputRouter(inbox)


def test_each_frontend_hears_of_its_own_requests_in_their_order(router: OutputRouter, inbox: Inbox) -> None:
    asked = [request("a"), request("b"), request("c")]
    for frontend_id, message in zip(("one", "two", "one"), asked, strict=True):
        assert router.take(frontend_id, message) is None
    assert inbox.take(waits=False) == asked
    outputs: list[FromEngine] = [TokenOutput("c", 0, 5), TokenOutput("b", 0, 6), MediaNeeded("a", ("h",))]
    sent = Sent()
    router.send(outputs, sent)
    assert sent.to == {"one": [outputs[0], outputs[2]], "two": [outputs[1]]}


def test_hints_go_to_all_frontends_and_media_are_accepted_from_any(router: OutputRouter, inbox: Inbox) -> None:
    sent, arrived = Sent(), MediaArrived("h", StoredPixels((1, 1, 3)))
    router.send([MediaHeld(("h",))], sent)
    assert (sent.to, sent.to_all) == ({}, [MediaHeld(("h",))])
    assert router.take("one", arrived) is None
    assert inbox.take(waits=False) == [arrived]


@pytest.mark.parametrize(
    ("asked", "found", "heard"),
    [
        (FindMedia("q", ("h",)), MediaFound("q", ("disk",), False), []),
        # All free what was cleared, whoever asked for it.
        (ResetCaches("q", encoder=True), CachesReset("q"), [CachesReset("q")] * 2),
    ],
)
def test_a_question_is_answered_once_to_the_frontend_that_asked(
    router: OutputRouter,
    inbox: Inbox,
    asked: FindMedia | ResetCaches,
    found: MediaFound | CachesReset,
    heard: list[FromEngine],
) -> None:
    sent = Sent()
    assert router.take("one", asked) is None
    assert router.take("two", asked) == "question 'q' exists already"
    assert inbox.take(waits=False) == [asked]
    router.send([found], sent)
    router.send([found], sent)
    assert (sent.to, sent.to_all) == ({"one": [found]}, heard)


def test_a_frontend_that_comes_again_gets_no_answer_to_what_it_had_asked_before(router: OutputRouter) -> None:
    sent = Sent()
    router.take("one", FindMedia("q", ("h",)))
    router.take("two", FindMedia("r", ("h",)))
    router.lose("one")
    router.take("one", request("a"))
    router.send([MediaFound("q", (), False), MediaFound("r", (), False)], sent)
    assert sent.to == {"two": [MediaFound("r", (), False)]}


def test_a_request_is_known_until_its_last_choice_has_ended(router: OutputRouter) -> None:
    router.take("one", request("a", n=2))
    sent = Sent()
    router.send([TokenOutput("a", 0, 5, finish_reason="stop")], sent)
    assert router.take("two", request("a")) == "request 'a' exists already"
    router.send([TokenOutput("a", 1, 5, finish_reason="stop")], sent)
    assert len(sent.to["one"]) == 2
    assert router.take("two", request("a")) is None


def test_a_frontend_cannot_end_another_one_s_request(router: OutputRouter, inbox: Inbox) -> None:
    router.take("one", request("a"))
    assert router.take("two", AbortRequest("a")) == "there is no request 'a'"
    assert router.take("one", AbortRequest("a")) is None
    assert inbox.take(waits=False) == [request("a"), AbortRequest("a")]


def test_a_lost_frontend_s_requests_are_aborted_and_no_others(router: OutputRouter, inbox: Inbox) -> None:
    for frontend_id, request_id in (("one", "a"), ("two", "b"), ("one", "c")):
        router.take(frontend_id, request(request_id))
    inbox.take(waits=False)
    router.lose("one")
    router.lose("one")
    assert inbox.take(waits=False) == [AbortRequest("a"), AbortRequest("c")]
    sent = Sent()
    router.send([TokenOutput("a", 0, 5), TokenOutput("b", 0, 5)], sent)
    assert sent.to == {"two": [TokenOutput("b", 0, 5)]}


def test_a_frontend_that_cannot_be_sent_to_is_sent_nothing_more(router: OutputRouter, inbox: Inbox) -> None:
    for request_id in "ab":
        router.take("one", request(request_id))
    inbox.take(waits=False)
    sent = Sent()
    sent.is_full = True
    router.send([TokenOutput("a", 0, 5)], sent)
    assert sent.forgotten == ["one"]
    assert inbox.take(waits=False) == [AbortRequest("a"), AbortRequest("b")]
    sent.is_full = False
    router.send([TokenOutput("b", 0, 5)], sent)
    assert sent.to == {}


def test_an_engine_that_has_ended_accepts_no_messages(router: OutputRouter, inbox: Inbox) -> None:
    inbox.close()
    assert router.take("one", request("a")) == "the engine has ended"


def test_late_outputs_of_a_request_do_not_go_to_a_new_one_of_the_same_id(router: OutputRouter, inbox: Inbox) -> None:
    router.take("one", request("a"))
    inbox.take(waits=False)
    # The connection breaks and is made again while a step is computed.
    router.lose("one")
    assert router.take("one", request("a")) is None
    sent = Sent()
    router.send([TokenOutput("a", 0, 5, finish_reason="length")], sent)
    assert sent.to == {}
    assert inbox.take(waits=False) == [AbortRequest("a"), request("a")]
    router.send([TokenOutput("a", 0, 6)], sent)
    assert sent.to == {"one": [TokenOutput("a", 0, 6)]}


def test_a_frontend_cannot_be_lost_between_choosing_its_outputs_and_sending_them(
    router: OutputRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    router.take("one", request("a"))
    losing, sent = threading.Thread(target=router.lose, args=["one"]), Sent()

    def send(*_: object) -> bool:
        losing.start()
        losing.join(0.1)
        assert losing.is_alive()
        return True

    monkeypatch.setattr(sent, "send", send)
    router.send([TokenOutput("a", 0, 5)], sent)
    losing.join()


class RouterMachine(RuleBasedStateMachine):
    """Against a model of which frontend owns each request."""

    def __init__(self) -> None:
        super().__init__()
        self.inbox, self.owners = Inbox(), dict[str, str]()
        self.router = OutputRouter(self.inbox)

    @rule(frontend=st.sampled_from("xyz"), request_id=st.sampled_from("abcdef"))
    def ask(self, frontend: str, request_id: str) -> None:
        assert (self.router.take(frontend, request(request_id)) is None) == (request_id not in self.owners)
        self.owners.setdefault(request_id, frontend)

    @rule(frontend=st.sampled_from("xyz"), request_id=st.sampled_from("abcdef"))
    def abort(self, frontend: str, request_id: str) -> None:
        is_own = self.owners.get(request_id) == frontend
        assert (self.router.take(frontend, AbortRequest(request_id)) is None) == is_own
        if is_own:
            del self.owners[request_id]

    @rule(frontend=st.sampled_from("xyz"))
    def lose(self, frontend: str) -> None:
        self.router.lose(frontend)
        self.owners = {request_id: owner for request_id, owner in self.owners.items() if owner != frontend}

    @precondition(lambda self: self.owners)
    @rule(request_id=st.sampled_from("abcdef"), fails=st.booleans(), ends=st.booleans())
    def answer(self, request_id: str, fails: bool, ends: bool) -> None:
        sent = Sent()
        token = TokenOutput(request_id, 0, 7, finish_reason="stop" if ends else None)
        output: FromEngine = RequestFailed(request_id, "no") if fails else token
        # Only requests the engine has read are answered.
        self.inbox.take(waits=False)
        self.router.send([output], sent)
        owner = self.owners.get(request_id)
        assert sent.to == ({} if owner is None else {owner: [output]})
        if fails or ends:
            self.owners.pop(request_id, None)

    @invariant()
    def holds(self) -> None:
        self.router.check_invariants()


RouterMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestRouterMachine = RouterMachine.TestCase
