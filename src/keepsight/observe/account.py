"""The account of one request: which cache answered for each media item, what that spared, and when each stage ran.

Each component appends to it, on any thread, as it does its part of the work; everything reported about a request (in
its answer, its headers, the log, spans, histograms) is read from here. Times are from the machine's monotonic clock.
Holds no content of the request.
"""

import time
from collections import defaultdict
from collections.abc import Container, Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import msgspec

from keepsight.media import Modality
from keepsight.observe.catalogue import Stage
from keepsight.requests import MediaReport, RequestBegun

AnsweredBy = Literal["prefix", "encoder", "processor", "nobody"]
# The stages that a hit in each cache spares.
STAGES_SPARED_BY: dict[AnsweredBy, tuple[Stage, ...]] = {
    "prefix": ("decode", "resize", "transfer", "encode", "prefill"),
    "encoder": ("decode", "resize", "transfer", "encode"),
    "processor": ("decode", "resize"),
    "nobody": (),
}
# Those that items of these kinds never go through: only pixels are resized, and embeddings are taken as they are.
STAGES_WITHOUT: dict[Modality, tuple[Stage, ...]] = {
    "audio": ("resize",),
    "image_embeds": ("decode", "resize"),
    "prompt_embeds": ("decode", "resize"),
}
# The stages that come before an engine's.
STAGES_OF_FRONTEND: tuple[Stage, ...] = ("fetch", "identify", "decode", "resize")
WORK = ("decoded", "preprocessed", "transferred", "encoded")


@dataclass(frozen=True, slots=True)
class Span:
    stage: Stage
    began: float
    ended: float
    # The index of the media item; None: the span is of the whole request.
    item: int | None = None
    # The number of items processed together, each of which has a span like this one.
    num_together: int = 1

    @property
    def seconds(self) -> float:
        return max(0.0, self.ended - self.began)

    @property
    def own_seconds(self) -> float:
        """This item's share of the time; shares can be summed."""
        return self.seconds / self.num_together


class StageBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    stage: str
    # Since the request arrived.
    begin_ms: float
    ms: float
    item: int | None = None
    # The number of items processed together; each reports the same time.
    together: int = 1


class ShownItem(NamedTuple):
    """An item of the prompt: a picture or crop, a moment of a film, a sound, embeddings."""

    media_hash: str
    num_tokens: int
    modality: Modality = "image"


class MediaBody(msgspec.Struct, frozen=True, kw_only=True):
    media_hash: str
    modality: Modality
    tokens: int
    # Null until the request has a token.
    answered_by: AnsweredBy | None
    # Where that cache held it.
    tier: str | None
    skipped: list[str]


class AccountBody(msgspec.Struct, frozen=True, kw_only=True):
    """The account of a request in JSON."""

    id: str
    # The adapter's name; null: the model answers without one.
    adapter: str | None = None
    began_at: float
    # "running", or how it ended.
    status: str
    ms: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    work: dict[str, int]
    num_media: int
    # Only the first ones if there is no room for all.
    media: list[MediaBody]
    stages: list[StageBody]


@dataclass(slots=True, eq=False)
class RequestAccount:
    id: str
    media: Sequence[ShownItem]
    num_prompt_tokens: int
    began: float = field(default_factory=time.monotonic)
    began_at: float = field(default_factory=time.time)
    spans: list[Span] = field(default_factory=list)
    # The caller's trace, as in W3C's `traceparent` header.
    trace_parent: str | None = None
    # The name of the adapter that answers, if any.
    adapter: str | None = None
    # When the frontend had finished its part and the request was ready for an engine, even if there was none.
    submitted_at: float | None = None
    num_cached_tokens: int = 0
    # Tokens of the answer: none behind a stop string.
    num_tokens: int = 0
    # False: only the prompt is of interest; the one token sampled for it does not count as an answer.
    wants_answer: bool = True
    # 0: none has come.
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    ended: float = 0.0
    end_reason: str | None = None
    # True while the request may be generated again: its end is not reported until it is known to be the last.
    is_held: bool = False
    # True if an earlier, lost answer had tokens: the first token of this one is not counted again.
    had_tokens: bool = False
    _work: dict[str, int] = field(default_factory=lambda: dict.fromkeys(WORK, 0))
    # By media hash: when its pixels were sent.
    _sent: dict[str, float] = field(default_factory=dict)
    # Media hashes whose pixels were found and did not have to be made.
    _found_pixels: set[str] = field(default_factory=set)
    # Media hashes whose pixels were made for this request.
    _made: set[str] = field(default_factory=set)
    _reports: Sequence[MediaReport] = ()
    # The choices that have tokens, and whether any of them has more than one.
    _begun_choices: set[int] = field(default_factory=set)
    _has_second: bool = False

    # Writing --------------------------------------------------------------------------------------------------

    def name(self, request_id: str, began: float, trace_parent: str | None = None) -> None:
        """Set the id that the caller knows, and the time of arrival, which was before the request could be parsed."""
        self.id, self.trace_parent = request_id, trace_parent
        self.began_at -= self.began - began
        self.began = began

    def note(self, stage: Stage, began: float, ended: float, media_hash: str | None = None) -> None:
        self.spans.append(Span(stage, began, ended, None if media_hash is None else self._index_of(media_hash)))

    def note_download(self, seconds: float) -> None:
        """Let the stage `fetch` take longer by the download before it, and not by the wait for a thread in between."""
        for index, span in enumerate(self.spans):
            if span.stage == "fetch":
                self.spans[index] = replace(span, began=span.began - seconds)

    def note_made(self, began: float, decoded: float, resized: float, media_hashes: Sequence[str]) -> None:
        """Record that one picture was decoded and resized into these items, or a sound decoded."""
        self._made.update(media_hashes)
        self._work["decoded"] += 1
        self._work["preprocessed"] += len(media_hashes)
        self.note("decode", began, decoded, media_hashes[0])
        if "resize" not in STAGES_WITHOUT.get(self.media[self._index_of(media_hashes[0])].modality, ()):
            self.note("resize", decoded, resized, media_hashes[0])

    def note_found_pixels(self, media_hash: str) -> None:
        self._found_pixels.add(media_hash)

    def note_sent(self, media_hash: str) -> None:
        self._sent[media_hash] = time.monotonic()

    def note_submitted(self) -> None:
        self.submitted_at = time.monotonic()

    def note_begun(self, report: RequestBegun) -> dict[int, MediaReport]:
        """Record the engine's report of the first token. Return the media reports that are new, by item index."""
        known, self._reports = self._reports, report.media
        if known:
            # A second report: the first token came from the prefix cache alone, but later ones needed more.
            return self._note_items(index for index, item in enumerate(known) if item.found_in == "prefix")
        # An engine reads its inbox only after the current step; that time counts as waiting, too.
        waited_since = report.arrived if self.submitted_at is None else min(self.submitted_at, report.arrived)
        self.spans.append(Span("wait", waited_since, report.began))
        reports = self._note_items(range(len(report.media)))
        self.spans.append(Span("prefill", report.began, report.answered))
        return reports

    def _note_items(self, indices: Iterable[int]) -> dict[int, MediaReport]:
        reports = {index: self._reports[index] for index in indices}
        for index, item in reports.items():
            self._note_item(index, item)
        return reports

    def _note_item(self, index: int, report: MediaReport) -> None:
        if report.found_in is not None:
            if report.ended > self.began:  # otherwise it was loaded before, for another request
                self.spans.append(Span("load", max(report.began, self.began), report.ended, index))
            return
        self._work["encoded"] += 1
        sent = self._sent.get(self.media[index].media_hash)
        # What this request neither sent nor had found for it, another one had brought: that transfer is not its own.
        self._work["transferred"] += sent is not None or report.was_cached
        if sent is not None and report.arrived:
            self.spans.append(Span("transfer", sent, report.arrived, index))
        self.spans.append(Span("encode", report.began, report.ended, index, report.num_together))

    def note_tokens(self, num_cached: int, now: float, choices: Sequence[int] = (0,)) -> float | None:
        """Record tokens that came, one for each mention of a choice, and how much of the prompt was cached for them.

        Return the seconds since the previous ones; None if they are the first tokens of their choices: those of a cold
        prompt's other choices come a step after those of the first one.
        """
        before, self.last_token_at = self.last_token_at, now
        if not before:
            self.first_token_at, self.num_cached_tokens = now, num_cached
        self.num_cached_tokens = min(self.num_cached_tokens, num_cached)
        goes_on, num_before = not self._begun_choices.isdisjoint(choices), len(self._begun_choices)
        self._begun_choices.update(choices)
        self._has_second = self._has_second or len(self._begun_choices) < num_before + len(choices)
        return now - before if goes_on else None

    def note_end(self, reason: str) -> None:
        self.end_reason, self.ended = reason, time.monotonic()
        if self.num_answer_tokens > 1 and self._has_second:
            self.spans.append(Span("generate", self.first_token_at, self.last_token_at))

    def begin_again(self) -> None:
        """Discard what the lost engine did; the request goes to another one. The frontend's own work is not lost."""
        self.spans = [span for span in self.spans if span.stage in STAGES_OF_FRONTEND]
        self._work |= {"transferred": 0, "encoded": 0}
        self.had_tokens = self.had_tokens or self.last_token_at > 0
        self._reports, self.num_tokens, self.last_token_at, self.end_reason = (), 0, 0.0, None
        self._begun_choices, self._has_second, self._sent = set(), False, {}

    # Reading --------------------------------------------------------------------------------------------------

    @property
    def num_answer_tokens(self) -> int:
        return self.num_tokens if self.wants_answer else 0

    def describe(self) -> AccountBody:
        spans, stages = sorted(self.spans, key=lambda span: span.began), self._stages_by_item()
        return AccountBody(
            id=self.id,
            adapter=self.adapter,
            began_at=round(self.began_at, 3),
            status=self.end_reason or "running",
            ms=_ms((self.ended or time.monotonic()) - self.began),
            prompt_tokens=self.num_prompt_tokens,
            cached_tokens=self.num_cached_tokens,
            completion_tokens=self.num_answer_tokens,
            work=dict(self._work),
            num_media=len(self.media),
            media=[self._describe_item(index, stages[index]) for index in range(len(self.media))],
            stages=[self._describe_stage(each) for each in spans],
        )

    def had_to_make(self, media_hashes: Container[str]) -> bool:
        """Return whether the pixels of any of these items had to be made, for a lost engine, too."""
        return any(media_hash in media_hashes for media_hash in self._made)

    def answers(self) -> list[tuple[AnsweredBy, str | None]]:
        """Return the cache that answered for each item, and its tier; empty until there is a token."""
        return [self._answer_of(index) for index in range(len(self._reports))]

    def _stages_by_item(self) -> defaultdict[int | None, set[Stage]]:
        """Return the stages that ran for each item."""
        stages: defaultdict[int | None, set[Stage]] = defaultdict(set)
        for span in self.spans:
            stages[span.item].add(span.stage)
        return stages

    def _describe_stage(self, span: Span) -> StageBody:
        begin_ms, ms = _ms(span.began - self.began), _ms(span.seconds)
        return StageBody(stage=span.stage, begin_ms=begin_ms, ms=ms, item=span.item, together=span.num_together)

    def _describe_item(self, index: int, done: Set[Stage]) -> MediaBody:
        item, answered_by, tier, skipped = self.media[index], None, None, list[str]()
        if index < len(self._reports):
            answered_by, tier = self._answer_of(index)
            needless = (*done, *STAGES_WITHOUT.get(item.modality, ()))
            skipped += (stage for stage in STAGES_SPARED_BY[answered_by] if stage not in needless)
        return MediaBody(
            media_hash=item.media_hash,
            modality=item.modality,
            tokens=item.num_tokens,
            answered_by=answered_by,
            tier=tier,
            skipped=skipped,
        )

    def _answer_of(self, index: int) -> tuple[AnsweredBy, str | None]:
        report, media_hash = self._reports[index], self.media[index].media_hash
        if report.found_in == "prefix":
            return "prefix", "device"
        if report.found_in is not None:
            return "encoder", report.found_in
        # Pixels that were made for a lost engine are found by the next one: that spared nothing.
        if media_hash in self._made:
            return "nobody", None
        # What this request did not send, another one had brought.
        is_found = report.was_cached or media_hash in self._found_pixels or media_hash not in self._sent
        return ("processor", "host") if is_found else ("nobody", None)

    def _index_of(self, media_hash: str) -> int:
        return next(index for index, item in enumerate(self.media) if item.media_hash == media_hash)


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
