"""Turns an answer into the items of a response as it arrives: a thought, then a message, function calls, or both."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from keepsight.frontend.api.build_message import make_call_id
from keepsight.frontend.api.call_parser import ArgumentsText, CallBegun
from keepsight.frontend.api.response_object import (
    ArgumentsDelta,
    ArgumentsDone,
    ItemEvent,
    ItemStatus,
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputText,
    OutputThought,
    PartEvent,
    ReasoningText,
    StreamedEvent,
    TextDelta,
    TextDone,
    ThoughtDelta,
    ThoughtDone,
)
from keepsight.frontend.api.response_parts import ContentLogprob
from keepsight.frontend.api.tool_fields import CallTerms
from keepsight.frontend.assemble_answer import AnswerPiece

_Kind = TypeVar("_Kind", "_Thought", "_Message", "_Call")


class ItemBuilder:
    """Builds a single answer. At most one item is open at a time; `items` are the finished ones."""

    def __init__(self, terms: CallTerms) -> None:
        self._parser = terms.begin_parsing()
        self.items: list[OutputItem] = []
        self._begun: _Thought | _Message | _Call | None = None
        # Log-probabilities of tokens whose text has not been sent yet.
        self._logprobs: list[ContentLogprob] = []

    def add_piece(self, piece: AnswerPiece, logprobs: Sequence[ContentLogprob] = ()) -> Iterator[StreamedEvent]:
        if piece.thought:
            if self._begun is None:
                yield from self._begin_item(_Thought(len(self.items)))
            yield self._begun_as(_Thought).add(piece.thought)
        if not piece.is_of_thought:
            self._logprobs += logprobs
        for event in self._parser.read(piece.text, is_last=piece.finish_reason is not None):
            if isinstance(event, CallBegun):
                yield from self._end_item("completed")
                yield from self._begin_item(_Call(len(self.items), event.name))
            elif isinstance(event, ArgumentsText):
                yield self._begun_as(_Call).add(event.text)
            else:
                if not isinstance(self._begun, _Message):
                    yield from self._end_item("completed")
                    yield from self._begin_item(_Message(len(self.items)))
                yield self._begun_as(_Message).add(event.text, self._take_logprobs())
        if piece.finish_reason is not None:
            yield from self._end(is_cut=piece.finish_reason == "length")

    def _end(self, *, is_cut: bool) -> Iterator[StreamedEvent]:
        if self._begun is None and not self.items:
            yield from self._begin_item(_Message(0))  # an empty one
        if isinstance(self._begun, _Message) and self._logprobs:
            yield self._begun.add("", self._take_logprobs())  # those of the end, which has no text
        # A call is incomplete only if it was cut off within its arguments.
        is_amid = self._parser.is_amid_arguments if isinstance(self._begun, _Call) else is_cut
        yield from self._end_item("incomplete" if is_amid else "completed")

    def _begin_item(self, begun: "_Thought | _Message | _Call") -> Iterator[StreamedEvent]:
        self._begun = begun
        yield from begun.begin()

    def _end_item(self, status: ItemStatus) -> Iterator[StreamedEvent]:
        if self._begun is not None:
            yield from self._begun.end()
            item = self._begun.show(status)
            yield ItemEvent(type="response.output_item.done", output_index=self._begun.index, item=item)
            self.items.append(item)
            self._begun = None

    def _take_logprobs(self) -> list[ContentLogprob]:
        taken, self._logprobs = self._logprobs, []
        return taken

    def _begun_as(self, kind: type[_Kind]) -> _Kind:
        assert isinstance(self._begun, kind), "a thought is before all else, and arguments follow a call's name"
        return self._begun


@dataclass
class _Thought:
    index: int
    id: str = field(default_factory=lambda: _make_id("rs"))
    _texts: list[str] = field(default_factory=list)

    def show(self, status: ItemStatus) -> OutputThought:
        return OutputThought(id=self.id, status=status, content=[self._part])

    @property
    def _part(self) -> ReasoningText:
        return ReasoningText(text="".join(self._texts))

    def begin(self) -> Iterator[StreamedEvent]:
        empty = OutputThought(id=self.id, status="in_progress", content=[])
        yield ItemEvent(type="response.output_item.added", output_index=self.index, item=empty)
        part = ReasoningText()
        yield PartEvent(type="response.content_part.added", output_index=self.index, item_id=self.id, part=part)

    def add(self, text: str) -> StreamedEvent:
        self._texts.append(text)
        return ThoughtDelta(output_index=self.index, item_id=self.id, delta=text)

    def end(self) -> Iterator[StreamedEvent]:
        part = self._part
        yield ThoughtDone(output_index=self.index, item_id=self.id, text=part.text)
        yield PartEvent(type="response.content_part.done", output_index=self.index, item_id=self.id, part=part)


@dataclass
class _Message:
    index: int
    id: str = field(default_factory=lambda: _make_id("msg"))
    _logprobs: list[ContentLogprob] = field(default_factory=list)
    _texts: list[str] = field(default_factory=list)

    def show(self, status: ItemStatus) -> OutputMessage:
        return OutputMessage(id=self.id, status=status, content=[self._part])

    @property
    def _part(self) -> OutputText:
        return OutputText(text="".join(self._texts), logprobs=self._logprobs)

    def begin(self) -> Iterator[StreamedEvent]:
        empty = OutputMessage(id=self.id, status="in_progress", content=[])
        yield ItemEvent(type="response.output_item.added", output_index=self.index, item=empty)
        part = OutputText()
        yield PartEvent(type="response.content_part.added", output_index=self.index, item_id=self.id, part=part)

    def add(self, text: str, logprobs: list[ContentLogprob]) -> StreamedEvent:
        self._texts.append(text)
        self._logprobs += logprobs
        return TextDelta(output_index=self.index, item_id=self.id, delta=text, logprobs=logprobs)

    def end(self) -> Iterator[StreamedEvent]:
        part = self._part
        yield TextDone(output_index=self.index, item_id=self.id, text=part.text, logprobs=part.logprobs)
        yield PartEvent(type="response.content_part.done", output_index=self.index, item_id=self.id, part=part)


@dataclass
class _Call:
    index: int
    name: str
    id: str = field(default_factory=lambda: _make_id("fc"))
    _call_id: str = field(default_factory=make_call_id)
    _arguments: list[str] = field(default_factory=list)

    def show(self, status: ItemStatus) -> OutputCall:
        arguments = "".join(self._arguments)
        return OutputCall(id=self.id, call_id=self._call_id, name=self.name, arguments=arguments, status=status)

    def begin(self) -> Iterator[StreamedEvent]:
        yield ItemEvent(type="response.output_item.added", output_index=self.index, item=self.show("in_progress"))

    def add(self, text: str) -> StreamedEvent:
        self._arguments.append(text)
        return ArgumentsDelta(output_index=self.index, item_id=self.id, delta=text)

    def end(self) -> Iterator[StreamedEvent]:
        arguments = "".join(self._arguments)
        yield ArgumentsDone(output_index=self.index, item_id=self.id, name=self.name, arguments=arguments)


def _make_id(prefix: str) -> str:
    return f"{prefix}_{os.urandom(16).hex()}"
