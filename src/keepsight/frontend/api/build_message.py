"""Turns a choice of an answer into OpenAI's shapes: a text, tool calls, or both, and the thought before them."""

import os
from collections.abc import Sequence

from msgspec import UNSET

from keepsight.frontend.api.call_parser import AnswerText, ArgumentsText, CallBegun, Event
from keepsight.frontend.api.chat_response import (
    ChatDelta,
    ChatFinishReason,
    ChatMessage,
    FunctionDelta,
    ToolCallDelta,
)
from keepsight.frontend.api.tool_fields import CallTerms
from keepsight.frontend.assemble_answer import AnswerPiece
from keepsight.frontend.prompt.read_tool_calls import CalledFunction, ToolCall


class MessageBuilder:
    """Builds a single choice: whole, or piece by piece."""

    def __init__(self, terms: CallTerms, *, may_think: bool = False) -> None:
        self._terms, self._parser, self._may_think = terms, terms.begin_parsing(), may_think
        self._num_calls = 0

    def deltas_of(self, piece: AnswerPiece) -> list[ChatDelta]:
        """Return the deltas of a piece; none while it is undecided whether its text begins a call."""
        thought = [ChatDelta(reasoning=piece.thought, reasoning_content=piece.thought)] if piece.thought else []
        return thought + [self._delta_of(event) for event in self._read([piece])]

    def whole_message(self, pieces: Sequence[AnswerPiece]) -> ChatMessage:
        text, calls = "", list[tuple[str, list[str]]]()
        for event in self._read(pieces):
            if isinstance(event, AnswerText):
                text += event.text
            elif isinstance(event, CallBegun):
                calls.append((event.name, []))
            else:
                calls[-1][1].append(event.text)
        self._num_calls = len(calls)
        functions = [CalledFunction(name=name, arguments="".join(arguments)) for name, arguments in calls]
        tool_calls = [ToolCall(id=make_call_id(), function=each) for each in functions]
        thought = ("".join(piece.thought for piece in pieces) or None) if self._may_think else UNSET
        has_more = bool(calls) or any(piece.is_of_thought for piece in pieces)
        return ChatMessage(
            content=text or (None if has_more else ""),
            tool_calls=tool_calls or UNSET,
            reasoning=thought,
            reasoning_content=thought,
        )

    def name_end(self, last: AnswerPiece) -> ChatFinishReason | None:
        """Return the finish reason. An answer cut off within a call does not count as a call."""
        ends_with_call = self._num_calls > 0 and not self._parser.is_amid_arguments
        if last.finish_reason == "stop" and ends_with_call and not self._terms.is_named:
            return "tool_calls"
        return last.finish_reason

    def _read(self, pieces: Sequence[AnswerPiece]) -> list[Event]:
        text = "".join(piece.text for piece in pieces)
        return self._parser.read(text, is_last=pieces[-1].finish_reason is not None)

    def _delta_of(self, event: Event) -> ChatDelta:
        if isinstance(event, AnswerText):
            return ChatDelta(content=event.text)
        if isinstance(event, ArgumentsText):
            more = FunctionDelta(arguments=event.text)
            return ChatDelta(tool_calls=[ToolCallDelta(index=self._num_calls - 1, function=more)])
        begun = FunctionDelta(name=event.name, arguments="")
        self._num_calls += 1
        index = self._num_calls - 1
        return ChatDelta(tool_calls=[ToolCallDelta(index=index, id=make_call_id(), type="function", function=begun)])


def make_call_id() -> str:
    return f"call_{os.urandom(12).hex()}"
