"""Order of a step, when the loop sleeps, and that every request is answered however the loop ends. No model runs."""

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import numpy as np
import pytest

from keepsight.engine.engine_loop import EngineLoop
from keepsight.engine.engine_meter import EngineMeter
from keepsight.engine.inbox import Inbox
from keepsight.engine.pixel_source import PixelSource
from keepsight.engine.prefix_tiers import PrefixTiers, StretchFormat
from keepsight.observe.counters import Counters
from keepsight.requests import (
    AbortRequest,
    CachesReset,
    EngineRequest,
    FindMedia,
    FromEngine,
    MediaArrived,
    MediaDropped,
    MediaFound,
    MediaHeld,
    MediaNeeded,
    Pixels,
    Received,
    RequestBegun,
    RequestFailed,
    ResetCaches,
    StoredPixels,
    TokenOutput,
    UnreadableMedia,
)
from keepsight.scheduling.request_state import Grammar
from keepsight.scheduling.scheduler import Scheduler
from keepsight.scheduling.step_plan import Slice, StepPlan, StepResult
from keepsight.structured_outputs import StructuredOutputsParams
from keepsight.testing import FakeRunner, pixels_like
from keepsight.tiers.tier import StoredArray
from keepsight.tiers.tiered_store import TieredStore
from tests.scheduling.drive import END_IDS, make_config, make_request

T = TypeVar("T")
WORK = StepPlan(now=[Slice(("a", 0), 0, 1, 0, (), False)])
BEGINS = StepPlan(beside=[Slice(("a", 0), 0, 1, 0, (), False)])
FINISHED = StepResult(encoded=["x"])


class ClosingInbox(Inbox):
    """Records when the loop would sleep, and closes instead of sleeping forever."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[bool] = []

    def take(self, *, waits: bool) -> list[Received]:
        self.waits.append(waits)
        if waits and not self._messages and not self._is_awake:
            self.close()
        return super().take(waits=waits)


@dataclass
class Parts:
    """Scheduler, runner and receiver in one: all record their calls and return what a test told them to."""

    plans: list[StepPlan | Exception] = field(default_factory=list)
    results: list[StepResult | Exception] = field(default_factory=list)
    outputs: list[list[FromEngine] | Exception] = field(default_factory=list)
    needed: list[MediaNeeded] = field(default_factory=list)
    num_left_to_prepare: int = 0
    on_prepare: Callable[[], object] = lambda: None
    refused: set[str] = field(default_factory=set)
    wanted: set[str] = field(default_factory=set)
    waiting: dict[str, str] = field(default_factory=dict)  # media hash -> the request that waits for it
    hints: list[MediaHeld | MediaDropped] = field(default_factory=list)
    embeddings: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    moments: list[float] = field(default_factory=list)
    story: list[Any] = field(default_factory=list)
    sent: list[FromEngine] = field(default_factory=list)

    def compile(self, form: StructuredOutputsParams) -> Future[Any]:
        return Future()

    def add(self, request: EngineRequest, grammar: Grammar | None = None) -> RequestFailed | None:
        self.story.append(("add", request.request_id))
        is_refused = request.request_id in self.refused
        return RequestFailed(request.request_id, "too long", is_refusal=True) if is_refused else None

    def abort(self, request_id: str, choice: int | None = None) -> None:
        self.story.append(("abort", request_id, choice))

    def media_arrived(self, media_hash: str) -> bool:
        return media_hash in self.wanted

    def can_be_made(self, media_hash: str) -> bool:
        return True

    def lose(self, media_hash: str) -> None:
        if (request_id := self.waiting.get(media_hash)) is not None:
            self.needed.append(MediaNeeded(request_id, (media_hash,), inline=True))

    def give_up(self, media_hash: str) -> list[str]:
        return [self.waiting[media_hash]] if media_hash in self.waiting else []

    def hold_stretch(self, stretch: bytes, array: StoredArray) -> None:
        self.story.append(("stretch", stretch))

    @property
    def reported(self) -> "Parts":
        return self

    holdings = held_embeddings = media = pixels = pins = reported

    def note_time(self, now: float) -> None:
        self.moments.append(now)

    def note_pixels(self, kept: Sequence[str], dropped: Sequence[str]) -> None:
        if kept or dropped:
            self.story.append(("kept", kept, dropped))

    def take_names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        embeddings, self.embeddings = self.embeddings, ((), ())
        return embeddings

    def take_changes(self) -> list[MediaHeld | MediaDropped]:
        hints, self.hints = self.hints, []
        return hints

    def list_held(self) -> list[MediaHeld]:
        return [MediaHeld(("x",))]

    def reset(self, *, prefix: bool, encoder: bool) -> None:
        self.story.append(("reset", prefix, encoder))

    def schedule(self) -> StepPlan:
        self.story.append("schedule")
        return _next(self.plans, StepPlan())

    def take_needed(self) -> list[MediaNeeded]:
        needed, self.needed = self.needed, []
        return needed

    def update(self, result: StepResult) -> list[FromEngine]:
        self.story.append("update")
        return _next(self.outputs, [])

    def hold_pixels(self, media_hash: str, pixels: Pixels) -> None:
        self.story.append(("hold", media_hash))

    def hold_embeddings(self, encoder_key: str, array: StoredArray) -> None:
        self.story.append(("hold embeddings", encoder_key))

    def run(self, plan: StepPlan) -> StepResult:
        self.story.append("run")
        return _next(self.results, StepResult())

    def prepare(self) -> bool:
        self.num_left_to_prepare -= 1
        self.on_prepare()
        return self.num_left_to_prepare >= 0

    def close(self) -> None:
        self.story.append("close")

    def send(self, outputs: Sequence[FromEngine]) -> None:
        self.story.append("send")
        self.sent += outputs


@dataclass
class Source(PixelSource):
    """Finds what a test put there; an entry that is not an array is stale."""

    found: dict[str, Pixels] = field(default_factory=dict)
    changes: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    received: list[str] = field(default_factory=list)
    touched: list[str] = field(default_factory=list)
    embeddings: list[tuple[Sequence[str], Sequence[str]]] = field(default_factory=list)
    is_closed: bool = False

    def find(self, media_hash: str, *, may_hold_back: bool = True) -> Pixels | None:
        return self.found.get(media_hash)

    def receive(self, message: MediaArrived) -> Pixels | None:
        self.received.append(message.media_hash)
        return message.pixels if isinstance(message.pixels, np.ndarray) else None

    def touch(self, media_hashes: Iterable[str]) -> None:
        self.touched += media_hashes

    def take_changes(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        changes, self.changes = self.changes, ((), ())
        return changes

    def note_embeddings(self, held: Iterable[str], dropped: Iterable[str]) -> None:
        if held or dropped:
            self.embeddings.append((tuple(held), tuple(dropped)))

    def clear(self) -> None:
        self.found.clear()

    def close(self) -> None:
        self.is_closed = True


class Meter:
    """Counts nothing."""

    def note_arrived(self, request: EngineRequest) -> None:
        pass

    def note_pixels(self, media_hash: str, *, was_cached: bool) -> None:
        pass

    def note_found_pixels(self, media_hash: str) -> None:
        pass

    def note_step(self, plan: StepPlan, result: StepResult, seconds: float) -> list[RequestBegun]:
        return []


def _next(values: list[T | Exception], otherwise: T) -> T:
    value = values.pop(0) if values else otherwise
    if isinstance(value, Exception):
        raise value
    return value


def make_loop(parts: Parts, *received: Received, source: Source | None = None) -> tuple[EngineLoop, ClosingInbox]:
    inbox = ClosingInbox()
    for message in received:
        inbox.try_put(message)
    its_source, meter = source or PixelSource(), cast(EngineMeter, Meter())
    return EngineLoop(cast(Scheduler, parts), parts, inbox, parts.send, its_source, None, meter), inbox


def token(request_id: str, finish_reason: Any = None) -> TokenOutput:
    return TokenOutput(request_id, 0, 5, finish_reason=finish_reason)


def test_a_step_receives_schedules_runs_updates_and_sends() -> None:
    parts = Parts(plans=[WORK], outputs=[[token("a")]])
    loop, _ = make_loop(parts, make_request("a", 3))
    loop.step()
    assert parts.story == [("add", "a"), "schedule", "run", "update", "send"]
    assert parts.sent == [token("a")]


def test_missing_media_are_asked_for_before_the_step_is_computed() -> None:
    parts = Parts(plans=[WORK], needed=[MediaNeeded("a", ("x",))])
    loop, _ = make_loop(parts, make_request("a", 3))
    loop.step()
    assert parts.story == [("add", "a"), "schedule", "send", "run", "update"]
    assert parts.sent == [MediaNeeded("a", ("x",))]


def test_every_message_reaches_its_receiver() -> None:
    parts = Parts(wanted={"x"}, refused={"b"})
    arrived = [MediaArrived(media_hash, pixels_like(media_hash)) for media_hash in ("x", "unwanted")]
    loop, _ = make_loop(
        parts,
        make_request("b", 3),
        *arrived,
        AbortRequest("a"),
        AbortRequest("a", 2),
        ResetCaches("r", prefix=True),
        ResetCaches("s", encoder=True),
    )
    loop.step()
    assert parts.story[:7] == [
        ("add", "b"),
        "send",
        ("hold", "x"),
        ("abort", "a", None),
        ("abort", "a", 2),
        ("reset", True, False),
        ("reset", False, True),
    ]
    assert parts.sent == [RequestFailed("b", "too long", is_refusal=True), CachesReset("r"), CachesReset("s")]


def test_a_question_is_answered_between_steps_in_its_order_among_the_other_messages() -> None:
    scheduler, inbox, sent = Scheduler(make_config(), END_IDS), ClosingInbox(), list[FromEngine]()
    source = PixelSource()
    meter = EngineMeter(Counters(), scheduler, 100, source, None, None)
    loop = EngineLoop(scheduler, FakeRunner(64, 4), inbox, sent.extend, source, None, meter)

    def answers() -> list[FromEngine]:
        return [each for each in sent if isinstance(each, MediaFound)]

    inbox.try_put(FindMedia("early", ("cat",)))
    inbox.try_put(make_request("a", 3, "cat", 9))
    inbox.try_put(MediaArrived("cat", pixels_like("cat")))
    inbox.try_put(FindMedia("before the first step", ("cat",)))
    loop.step()
    assert answers() == [MediaFound("early", (), False), MediaFound("before the first step", (), False)]
    while not any(isinstance(each, TokenOutput) and each.finish_reason for each in sent):
        loop.step()
    for message in (
        FindMedia("afterwards", ("cat",)),
        FindMedia("of two", ("cat", "dog")),
        ResetCaches("reset", encoder=True),
        FindMedia("without embeddings", ("cat",)),
        ResetCaches("reset", prefix=True),
        FindMedia("after all", ("cat",)),
    ):
        inbox.try_put(message)
    loop.step()
    assert answers()[2:] == [
        MediaFound("afterwards", ("device",), True),
        MediaFound("of two", (), False),
        MediaFound("without embeddings", (), True),
        MediaFound("after all", (), False),
    ]


def test_pixels_the_source_finds_are_not_asked_for_but_arrive_with_the_next_step() -> None:
    parts = Parts(needed=[MediaNeeded("a", ("x", "y")), MediaNeeded("b", ("z",))], wanted={"x", "z"})
    source = Source(found={each: pixels_like(each) for each in ("x", "z")})
    loop, inbox = make_loop(parts, make_request("a", 3), source=source)
    loop.step()
    assert parts.sent == [MediaNeeded("a", ("y",))]
    assert ("hold", "x") not in parts.story  # the plan of this step may still drop pixels of that name
    loop.step()
    assert parts.story[-5:] == [("hold", "x"), ("hold", "z"), "schedule", "run", "update"]
    assert not inbox.is_closed, "the loop would have slept on what it found"


def test_a_stale_handle_leads_to_a_request_for_inline_pixels_if_needed() -> None:
    parts = Parts(waiting={"x": "a"}, wanted={"x", "y"})
    handles = [MediaArrived(media_hash, StoredPixels((4, 4, 3))) for media_hash in ("x", "y")]
    loop, _ = make_loop(parts, *handles, source=Source())
    loop.step()
    assert parts.sent == [MediaNeeded("a", ("x",), inline=True)]
    assert not any(event[0] == "hold" for event in parts.story)


def test_pixels_that_cannot_be_read_fail_the_requests_that_wait_for_them() -> None:
    parts = Parts(waiting={"x": "a"})
    loop, _ = make_loop(parts, UnreadableMedia("x", "too many bytes"), UnreadableMedia("y", "too many bytes"))
    loop.step()
    assert parts.sent == [RequestFailed("a", "too many bytes")]
    assert ("abort", "a", None) in parts.story


def test_without_a_processor_cache_any_handle_is_stale() -> None:
    parts = Parts(waiting={"x": "a"}, wanted={"x", "y"})
    loop, _ = make_loop(
        parts,
        MediaArrived("x", StoredPixels((4, 4, 3))),
        MediaArrived("y", pixels_like("y")),
        ResetCaches("reset", False),
    )
    loop.step()
    assert parts.sent == [CachesReset("reset"), MediaNeeded("a", ("x",), inline=True)]
    assert ("hold", "y") in parts.story


def test_the_source_hears_of_pixels_that_are_no_longer_wanted() -> None:
    source = Source()
    loop, _ = make_loop(Parts(), MediaArrived("unwanted", pixels_like("unwanted")), source=source)
    loop.step()
    assert source.received == ["unwanted"]


def test_the_source_hears_which_media_a_request_shows_unless_it_is_refused() -> None:
    source = Source()
    requests = (make_request("a", 3, "x", 2, "y"), make_request("b", 3, "z"))
    make_loop(Parts(refused={"b"}), *requests, source=source)[0].step()
    assert source.touched == ["x", "y"]


def test_a_reset_of_the_processor_cache_clears_the_source_and_only_that_does() -> None:
    parts, source = Parts(), Source(found={"x": pixels_like("x")})
    loop, inbox = make_loop(parts, ResetCaches("reset", prefix=True, encoder=True), source=source)
    loop.step()
    assert source.found
    inbox.try_put(ResetCaches("reset", processor=True))
    loop.step()
    assert not source.found


def test_a_new_listener_learns_once_what_is_held() -> None:
    parts = Parts(plans=[WORK, WORK])
    loop, _ = make_loop(parts)
    loop.report_all_held()
    loop.step()
    loop.step()
    assert parts.sent == [MediaHeld(("x",))]


def test_hints_follow_the_answers_of_their_step() -> None:
    parts = Parts(plans=[WORK], outputs=[[token("a")]], hints=[MediaHeld(("x",)), MediaDropped(("y",))])
    loop, _ = make_loop(parts, make_request("a", 3), source=Source(changes=(("x",), ("y",))))
    loop.step()
    assert parts.sent == [token("a"), MediaHeld(("x",)), MediaDropped(("y",))]
    assert parts.story[-3:] == ["update", ("kept", ("x",), ("y",)), "send"]


def test_the_source_learns_once_which_embeddings_are_held() -> None:
    parts, source = Parts(plans=[WORK, WORK], embeddings=(("x",), ("y",))), Source()
    loop, _ = make_loop(parts, make_request("a", 3), source=source)
    loop.step()
    loop.step()
    assert source.embeddings == [(("x",), ("y",))]


def test_the_source_is_closed_with_the_loop() -> None:
    source = Source()
    loop, _ = make_loop(Parts(), source=source)
    loop.run()
    assert source.is_closed


@pytest.mark.parametrize(
    ("plans", "results", "waits"),
    [
        ([], [], [True]),
        ([WORK, WORK], [], [True, False, False]),
        # Work that was begun may have finished, or made room, by the next step.
        ([BEGINS], [], [True, False]),
        ([StepPlan(), StepPlan()], [FINISHED], [True, False]),
        ([StepPlan(), StepPlan()], [StepResult(failed_encodings={"x": "why"})], [True, False]),
        # Telling the runner which sequences ended begins no work.
        ([StepPlan(ended=[("a", 0)])], [], [True]),
    ],
)
def test_the_loop_sleeps_when_no_work_began_and_no_message_came(
    plans: list[StepPlan | Exception], results: list[StepResult | Exception], waits: list[bool]
) -> None:
    parts = Parts(plans=plans, results=results)
    loop, inbox = make_loop(parts, AbortRequest("a"))
    loop.run()
    assert inbox.waits[: len(waits)] == waits
    assert inbox.waits[len(waits) :] == [True, False]  # the sleep, and the read when the loop ends


def test_the_runner_prepares_before_the_loop_sleeps_and_new_messages_do_not_wait() -> None:
    parts = Parts(num_left_to_prepare=5)
    loop, inbox = make_loop(parts)
    parts.on_prepare = lambda: parts.num_left_to_prepare == 2 and inbox.try_put(AbortRequest("a"))
    loop.step()
    assert parts.num_left_to_prepare == 2
    # Nothing else happened meanwhile, and the abort was read before anything was planned.
    assert parts.story[:2] == [("abort", "a", None), "schedule"]
    assert parts.story.count("run") == 1
    loop.step()
    assert parts.num_left_to_prepare < 0
    assert inbox.waits == [True, True]


def test_the_beat_changes_with_each_step_and_each_piece_of_preparing() -> None:
    parts, beats = Parts(num_left_to_prepare=2), list[int | None]()
    loop, inbox = make_loop(parts)
    parts.on_prepare = lambda: beats.append(loop.beat)
    for name in ("a", "b"):
        inbox.try_put(AbortRequest(name))
        loop.step()
        beats.append(loop.beat)
    loop.step()  # prepares three times, the last in vain
    assert beats == [1, 2, 2, 3, 4]
    assert loop.beat is None, "it would wait for messages"
    inbox.is_waited_at = True
    assert loop.beat is None


def test_a_prompt_whose_stretches_found_no_room_does_not_wait_for_another_s_pixels() -> None:
    """The other one's load leaves room once that prompt has been parked, which no message follows."""
    scheduler, inbox, sent = Scheduler(make_config(blocks_per_stretch=2), END_IDS), ClosingInbox(), list[FromEngine]()
    prefixes, source = (
        PrefixTiers(TieredStore(None, []), bytes.hex, StretchFormat("int64", (2, 4)), inbox.wake),
        PixelSource(),
    )
    meter = EngineMeter(Counters(), scheduler, 100, source, None, prefixes)
    inbox.try_put(make_request("a", 1, "cat", 190))
    inbox.try_put(make_request("b", 200))
    EngineLoop(scheduler, FakeRunner(64, 4), inbox, sent.extend, source, None, meter, prefixes).run()
    assert [each.request_id for each in sent if isinstance(each, MediaNeeded | RequestFailed)] == ["a", "a"]
    assert {each.request_id for each in sent if isinstance(each, TokenOutput)} == {"b"}


def test_streams_go_on_while_a_grammar_is_compiled_and_its_request_begins_then() -> None:
    scheduler, runner, inbox, sent = Scheduler(make_config(), END_IDS), FakeRunner(64, 4), Inbox(), list[FromEngine]()
    source = PixelSource()
    loop = EngineLoop(
        scheduler, runner, inbox, sent.extend, source, None, EngineMeter(Counters(), scheduler, 100, source)
    )
    form = StructuredOutputsParams(regex="a+")

    def finished() -> set[str]:
        return {each.request_id for each in sent if isinstance(each, TokenOutput) and each.finish_reason}

    def step_until_answered(request_id: str) -> None:
        while request_id not in finished():
            loop.step()

    inbox.try_put(make_request("guided", 5, structured_outputs=form))
    inbox.try_put(make_request("plain", 9, max_tokens=20))
    step_until_answered("plain")
    assert finished() == {"plain"}
    runner.grammars[form.to_grammar()].set_exception(ValueError("its guide tells"))
    step_until_answered("guided")
    inbox.try_put(make_request("again", 6, structured_outputs=form))  # its grammar is compiled
    step_until_answered("again")


def test_a_request_with_the_id_of_one_that_left_waits_for_its_own_grammar() -> None:
    scheduler, runner, inbox = Scheduler(make_config(), END_IDS), FakeRunner(64, 4), Inbox()
    source = PixelSource()
    loop = EngineLoop(
        scheduler, runner, inbox, lambda _: None, source, None, EngineMeter(Counters(), scheduler, 100, source)
    )
    form = StructuredOutputsParams(regex="a+")
    inbox.try_put(make_request("guided", 5, structured_outputs=form))
    loop.step()
    inbox.try_put(AbortRequest("guided"))
    loop.step()
    assert not scheduler.lineup
    other = StructuredOutputsParams(regex="b+")
    inbox.try_put(make_request("guided", 5, structured_outputs=other))
    loop.step()
    runner.grammars[form.to_grammar()].set_result(None)
    for _ in range(3):
        inbox.wake()
        loop.step()
    assert len(scheduler.lineup) == 1
    assert not runner.num_computed_tokens
    runner.grammars[other.to_grammar()].set_result(None)
    while scheduler.lineup:
        loop.step()


def test_an_empty_plan_is_carried_out_too() -> None:
    parts = Parts()
    loop, _ = make_loop(parts, AbortRequest("a"))
    loop.step()
    assert parts.story[1:] == ["schedule", "run", "update"]


def test_the_scheduler_gets_the_time_before_each_plan() -> None:
    """Pins expire by it."""
    parts = Parts()
    loop, _ = make_loop(parts, AbortRequest("a"))
    before = time.monotonic()
    loop.step()
    [noted] = parts.moments
    assert before <= noted <= time.monotonic()


@pytest.mark.parametrize("place", ["plans", "results", "outputs"])
def test_an_internal_failure_ends_the_loop_and_fails_all_requests(place: str, caplog: pytest.LogCaptureFixture) -> None:
    parts = Parts(plans=[WORK, WORK], outputs=[[token("a", "stop"), token("b")]])
    values = {"plans": WORK, "results": StepResult(), "outputs": [token("a", "stop"), token("b")]}
    setattr(parts, place, [values[place], RuntimeError("out of luck")])
    loop, inbox = make_loop(parts, make_request("a", 3), make_request("b", 3))
    loop.run()
    reason = "the engine failed: RuntimeError: out of luck"
    assert parts.sent == [token("a", "stop"), token("b"), RequestFailed("b", reason)]
    assert parts.story[-2:] == ["send", "close"]
    assert loop.reason_of_end == reason
    assert not inbox.try_put(make_request("c", 3))
    assert "out of luck" in caplog.text


def test_closing_fails_running_and_unread_requests() -> None:
    parts = Parts(plans=[WORK])
    loop, inbox = make_loop(parts, make_request("a", 3))
    loop.step()
    inbox.try_put(make_request("b", 3))
    inbox.close()
    loop.run()
    reason = "the engine was closed"
    assert parts.sent == [RequestFailed("a", reason), RequestFailed("b", reason)]
    assert parts.story[-1] == "close"
