"""The requests of one `LLM` call: submits them to the engine, collects outputs and returns them in vLLM's form."""

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue

from tqdm import tqdm

from keepsight.engine.in_process_engine import InProcessEngine
from keepsight.frontend.assemble_answer import AnswerAssembler, AnswerPiece
from keepsight.frontend.caller import Outputs
from keepsight.frontend.prepared_request import PreparedRequest
from keepsight.frontend.prompt.tokenizer import Tokenizer
from keepsight.frontend.read_vector import read_vector
from keepsight.offline.listed_items import ListedItems
from keepsight.outputs import CompletionOutput, EmbeddingOutput, EmbeddingRequestOutput, Logprob, RequestOutput
from keepsight.pooling_params import PoolingParams
from keepsight.requests import Adapter, TokenLogprobs, TokenOutput

# Takes the same arguments as `tqdm`.
MakeBar = Callable[..., tqdm]


class _Answer:
    """The growing answer of one request."""

    def __init__(self, index: int, prepared: PreparedRequest, tokenizer: Tokenizer) -> None:
        self.index, self.request, self._text, self._tokenizer = index, prepared.engine_request, prepared.text, tokenizer
        self._assembler = AnswerAssembler(
            tokenizer, self.request.sampling_params, continues_prompt=prepared.continues_prompt
        )
        self._pieces: list[list[AnswerPiece]] = [[] for _ in range(self.request.sampling_params.n)]
        # The smallest count of all choices: the others find what that choice has just computed.
        self._num_cached_tokens = len(self.request.token_ids)
        self._unread: Outputs = []

    def receive(self, outputs: Outputs) -> Outputs:
        """Return the outputs to read now. They are held back until the end, unless stop strings must be checked."""
        self._unread += outputs
        if not self.request.sampling_params.stop and not any(map(_is_end, outputs)):
            return []
        unread, self._unread = self._unread, []
        return unread

    @property
    def is_finished(self) -> bool:
        return self._assembler.is_finished

    def push(self, token: TokenOutput) -> AnswerPiece | None:
        self._num_cached_tokens = min(self._num_cached_tokens, token.num_cached_tokens)
        piece = self._assembler.push(token)
        if piece is not None:
            self._pieces[piece.choice].append(piece)
        return piece

    def output(self) -> RequestOutput:
        written = self._text
        if written is None:
            written = self._tokenizer.decode(self.request.known_token_ids, skip_special_tokens=False)
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=written,
            prompt_token_ids=list(self.request.known_token_ids),
            outputs=[_completion(index, own, self._tokenizer) for index, own in enumerate(self._pieces)],
            num_cached_tokens=self._num_cached_tokens,
            prompt_logprobs=self._prompt_logprobs(),
        )

    def vector(self, params: PoolingParams) -> EmbeddingRequestOutput:
        [[piece]] = self._pieces
        vector = read_vector(piece.token, params.dimensions, is_normalized=params.use_activation is not False)
        return EmbeddingRequestOutput(
            request_id=self.request.request_id,
            prompt_token_ids=list(self.request.known_token_ids),
            outputs=EmbeddingOutput(vector.tolist()),
            num_cached_tokens=self._num_cached_tokens,
        )

    def _prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        logprobs = self._pieces[0][0].token.prompt_logprobs
        return None if logprobs is None else [None, *(_by_id(each, self._tokenizer) for each in logprobs)]


class RunningRequests:
    """The requests of one call. Closing this abandons the requests that have not ended."""

    def __init__(self, engine: InProcessEngine, tokenizer: Tokenizer, items: ListedItems, bar: tqdm | None) -> None:
        self._engine, self._tokenizer, self._items, self._bar = engine, tokenizer, items, bar
        self._answers: list[_Answer] = []
        self._unfinished: dict[str, _Answer] = {}
        self._arrived: SimpleQueue[tuple[_Answer, Outputs]] = SimpleQueue()

    def submit(self, prepare: Callable[[], PreparedRequest], adapter: Adapter | None = None) -> None:
        index = len(self._answers)
        with self._items.naming(index):
            prepared = prepare().adapted(adapter)
        answer = _Answer(index, prepared, self._tokenizer)
        self._answers.append(answer)
        # Registered before it is submitted, so that it is abandoned even if submitting is interrupted.
        self._unfinished[answer.request.request_id] = answer
        self._engine.submit(prepared, partial(self._receive, answer))

    def process_arrived(self) -> None:
        while not self._arrived.empty():
            self._read(*self._arrived.get())

    def finish(self) -> list[RequestOutput]:
        self._wait()
        return [answer.output() for answer in self._answers]

    def finish_vectors(self, params: PoolingParams) -> list[EmbeddingRequestOutput]:
        self._wait()
        return [answer.vector(params) for answer in self._answers]

    def _wait(self) -> None:
        while self._unfinished:
            self._read(*self._arrived.get())

    def close(self) -> None:
        for request_id in self._unfinished:
            self._engine.leave(request_id)

    def _receive(self, answer: _Answer, outputs: Outputs) -> None:
        """Runs on the engine's thread, which would wait for the GIL if every token woke the reader."""
        if unread := answer.receive(outputs):
            self._arrived.put((answer, unread))

    def _read(self, answer: _Answer, outputs: Outputs) -> None:
        if answer.is_finished:  # by a stop string; the engine continued until it was told
            return
        for output in outputs:
            if isinstance(output, Exception):
                with self._items.naming(answer.index):
                    raise output
            if piece := answer.push(output):
                self._engine.note_read(answer.request.request_id, piece.choice, piece.finish_reason)
        if answer.is_finished:
            del self._unfinished[answer.request.request_id]
            if self._bar is not None:
                self._bar.update()


def _is_end(output: TokenOutput | Exception) -> bool:
    return isinstance(output, Exception) or output.finish_reason is not None


def open_bar(use_tqdm: bool | MakeBar, num_requests: int) -> tqdm | None:
    """Return a progress bar, or None instead of a disabled one, which would still start a thread."""
    if callable(use_tqdm):
        return use_tqdm(total=num_requests, desc="Requests", unit="request")
    is_disabled = os.environ.get("TQDM_DISABLE", "") not in ("", "0")
    # `sys.stderr` is None in a process without a console.
    if not use_tqdm or num_requests <= 1 or is_disabled or sys.stderr is None:
        return None
    return tqdm(total=num_requests, desc="Requests", unit="request", disable=False)


def _by_id(logprobs: TokenLogprobs, tokenizer: Tokenizer) -> dict[int, Logprob]:
    return {
        each.token_id: Logprob(each.logprob, each.rank, tokenizer.decode([each.token_id], False)) for each in logprobs
    }


def _completion(index: int, pieces: Sequence[AnswerPiece], tokenizer: Tokenizer) -> CompletionOutput:
    last, logprobs, total = pieces[-1], None, None
    if last.token.logprobs is not None:
        logprobs = [_by_id(piece.token.logprobs or (), tokenizer) for piece in pieces]
        total = sum(piece.token.logprobs[0].logprob for piece in pieces if piece.token.logprobs)
    return CompletionOutput(
        index=index,
        text="".join(piece.text for piece in pieces),
        token_ids=[piece.token.token_id for piece in pieces],
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        cumulative_logprob=total,
        logprobs=logprobs,
    )
