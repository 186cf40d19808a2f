"""The answer to a request of Anthropic's Messages API, in its format."""

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from keepsight.frontend.api.answer import Answer, AnswerTerms
from keepsight.frontend.api.build_blocks import BlockBuilder
from keepsight.frontend.api.message_object import (
    BlockEvent,
    Message,
    MessageDelta,
    MessageEnd,
    MessageEvent,
    MessageStart,
    MessageStop,
    MessageUsage,
)
from keepsight.frontend.api.messages_request import MessagesChat
from keepsight.frontend.api.write_event import write_event
from keepsight.frontend.assemble_answer import AnswerPiece
from keepsight.frontend.http.error_response import MessagesError


class MessagesAnswer(Answer):
    ID_PREFIX = "msg_"

    def __init__(self, request: MessagesChat, terms: AnswerTerms) -> None:
        super().__init__(request, terms)
        self._blocks = BlockBuilder(terms.calls)
        self._end: MessageEnd | None = None

    def _completion(self, choices: Sequence[Sequence[AnswerPiece]]) -> Message:
        for piece in choices[0]:
            for _ in self._block_events(piece):
                pass
        end = msgspec.structs.asdict(self._find_end())
        return msgspec.structs.replace(self._begin_message(), content=self._blocks.blocks, **end)

    def _open(self) -> Iterable[bytes]:
        yield _write(MessageStart(self._begin_message()))

    def _piece_events(self, index: int, piece: AnswerPiece) -> Iterable[bytes]:
        return map(_write, self._block_events(piece))

    async def _close(self) -> Iterable[bytes]:
        end = MessageDelta(delta=self._find_end(), usage=MessageUsage.of(self.usage))
        return [_write(self._with_account(end)), _write(MessageStop())]

    def _failure_event(self, error: Exception) -> bytes:
        return _write(MessagesError.of(error))

    def _begin_message(self) -> Message:
        return Message(id=self.id, model=self._model_name, content=[], usage=MessageUsage.of(self.usage))

    def _find_end(self) -> MessageEnd:
        assert self._end is not None, "an answer ends with its last piece"
        return self._end

    def _block_events(self, piece: AnswerPiece) -> Iterator[BlockEvent]:
        yield from self._blocks.add_piece(piece)
        if piece.finish_reason is not None:
            self._end = self._blocks.message_end(piece)


def _write(event: MessageEvent) -> bytes:
    return write_event(event, str(event.__struct_config__.tag))
