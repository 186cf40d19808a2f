"""Tracks the requests still owed an answer, choice by choice, so that none is forgotten when an engine ends.

Knows nothing of how they are computed. A request is in here from its arrival until its last choice has ended.
"""

from collections.abc import Iterator

from keepsight.requests import AbortRequest, EngineRequest, FromEngine, Received, RequestFailed, TokenOutput


class Unanswered:
    def __init__(self) -> None:
        self._choices: dict[str, set[int]] = {}

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._choices

    def __len__(self) -> int:
        return len(self._choices)

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._choices))

    def note_asked(self, message: Received) -> None:
        if isinstance(message, EngineRequest):
            self._choices[message.request_id] = set(range(message.sampling_params.n))
        elif isinstance(message, AbortRequest):
            self._end(message.request_id, message.choice)

    def note_answered(self, output: FromEngine) -> None:
        if isinstance(output, RequestFailed):
            self._end(output.request_id, None)
        elif isinstance(output, TokenOutput) and output.finish_reason is not None:
            self._end(output.request_id, output.choice)

    def _end(self, request_id: str, choice: int | None) -> None:
        left = self._choices.get(request_id)
        if left is None:
            return
        if choice is not None:
            left.discard(choice)
        if choice is None or not left:
            del self._choices[request_id]
