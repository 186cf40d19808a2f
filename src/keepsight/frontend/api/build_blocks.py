"""Turns an answer into the blocks of a message as it arrives: a thought, then a text, tool calls, or both."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from keepsight.frontend.api.call_parser import ArgumentsText, CallBegun
from keepsight.frontend.api.message_object import (
    NO_INPUT,
    SIGNATURE,
    Block,
    BlockDelta,
    BlockEvent,
    BlockStart,
    BlockStop,
    MessageEnd,
    Signed,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
)
from keepsight.frontend.api.tool_fields import CallTerms
from keepsight.frontend.assemble_answer import AnswerPiece


@dataclass
class _Begun:
    block: Block
    texts: list[str] = field(default_factory=list)


class BlockBuilder:
    """Builds a single answer. At most one block is open at a time; `blocks` are the finished ones."""

    def __init__(self, terms: CallTerms) -> None:
        self._parser = terms.begin_parsing()
        self.blocks: list[Block] = []
        self._begun: _Begun | None = None

    def add_piece(self, piece: AnswerPiece) -> Iterator[BlockEvent]:
        if piece.thought:
            yield from self._add_as(ThinkingBlock(), piece.thought)
        for event in self._parser.read(piece.text, is_last=piece.finish_reason is not None):
            if isinstance(event, CallBegun):
                yield from self._begin(ToolUseBlock(id=_make_use_id(), name=event.name, input=NO_INPUT))
            elif isinstance(event, ArgumentsText):
                yield self._add(event.text)
            else:
                yield from self._add_as(TextBlock(), event.text)
        if piece.finish_reason is not None:
            yield from self._end()

    def message_end(self, last: AnswerPiece) -> MessageEnd:
        """Return how the message ends. An answer cut off within a call does not count as a call."""
        if last.finish_reason == "length":
            return MessageEnd(stop_reason="max_tokens")
        if isinstance(self.blocks[-1], ToolUseBlock) and not self._parser.is_amid_arguments:
            return MessageEnd(stop_reason="tool_use")
        if isinstance(last.stop_reason, str):
            return MessageEnd(stop_reason="stop_sequence", stop_sequence=last.stop_reason)
        return MessageEnd(stop_reason="end_turn")

    def _add_as(self, begins: Block, text: str) -> Iterator[BlockEvent]:
        """Add text to the open block if it is of the same type as `begins`, otherwise to `begins` as a new block."""
        if self._begun is None or type(self._begun.block) is not type(begins):
            yield from self._begin(begins)
        yield self._add(text)

    def _add(self, text: str) -> BlockEvent:
        assert self._begun is not None
        self._begun.texts.append(text)
        return BlockDelta(len(self.blocks), self._begun.block.add(text))

    def _begin(self, block: Block) -> Iterator[BlockEvent]:
        yield from self._end_block()
        self._begun = _Begun(block)
        yield BlockStart(len(self.blocks), block)

    def _end(self) -> Iterator[BlockEvent]:
        if self._begun is None and not self.blocks:
            yield from self._begin(TextBlock())  # an empty one
        yield from self._end_block()

    def _end_block(self) -> Iterator[BlockEvent]:
        if self._begun is None:
            return
        if isinstance(self._begun.block, ThinkingBlock):
            yield BlockDelta(len(self.blocks), Signed(SIGNATURE))
        yield BlockStop(len(self.blocks))
        self.blocks.append(self._begun.block.fill("".join(self._begun.texts)))
        self._begun = None


def _make_use_id() -> str:
    return f"toolu_{os.urandom(12).hex()}"
