"""The answer to a completion request, in OpenAI's format."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from keepsight.frontend.api.answer import AnswerTerms
from keepsight.frontend.api.chunked_answer import ChunkedAnswer
from keepsight.frontend.api.completion_request import CompletionRequest
from keepsight.frontend.api.completion_response import Completion, CompletionChoice, CompletionLogprobs
from keepsight.frontend.api.response_parts import TopLogprob, Usage
from keepsight.frontend.assemble_answer import AnswerPiece
from keepsight.made_once import made_once
from keepsight.requests import TokenLogprobs, TokenOutput


class _ShownToken(NamedTuple):
    token_id: int
    # What it adds to the text.
    shown: str
    # None for the first token of a prompt.
    logprobs: TokenLogprobs | None


class CompletionAnswer(ChunkedAnswer):
    ID_PREFIX = "cmpl-"

    def __init__(self, request: CompletionRequest, terms: AnswerTerms) -> None:
        super().__init__(request, terms)
        self._written = list(request.prompts.values()) if request.echo else None
        # Per choice: number of characters of the tokens whose log-probabilities have been told.
        self._offsets: Counter[int] = Counter()
        # Per choice, when streaming: pieces held back until their bytes form characters.
        self._held = defaultdict[int, list[AnswerPiece]](list)

    @made_once
    def _echoes(self) -> list[str]:
        """Per prompt, the text that each of its choices begins with."""
        if self._written is None:
            return [""] * len(self.prompts)
        return [each if isinstance(each, str) else self._tokenizer.decode(each, False) for each in self._written]

    def _completion(self, choices: Sequence[Sequence[AnswerPiece]]) -> Completion:
        num_each = self._num_choices
        by_prompt = [choices[first : first + num_each] for first in range(0, len(choices), num_each)]
        shown = [choice for number, own in enumerate(by_prompt) for choice in self._choices_of(number, own)]
        return self._chunk(shown, self.usage)

    def _choices_of(self, number: int, choices: Sequence[Sequence[AnswerPiece]]) -> Iterator[CompletionChoice]:
        """Yield the choices of one prompt, each of which repeats what is reported of the prompt."""
        first = choices[0][0].token
        prompt_logprobs, prompt_token_ids = self._prompt_logprobs(first), self._prompt_token_ids(number)
        for index, pieces in enumerate(choices, start=number * self._num_choices):
            answered = self._answered_tokens([piece.token for piece in pieces])
            yield CompletionChoice(
                index=index,
                text=self._echoes[number] + "".join(piece.text for piece in pieces),
                finish_reason=pieces[-1].finish_reason,
                logprobs=self._logprobs(index, itertools.chain(self._echoed_tokens(number, first), answered)),
                stop_reason=pieces[-1].stop_reason,
                prompt_logprobs=prompt_logprobs,
                prompt_token_ids=prompt_token_ids,
                token_ids=self._token_ids(pieces),
            )

    def _openings(self) -> Sequence[Completion]:
        if self._written is None and not self._request.return_token_ids:
            return ()
        numbers = [number for number in range(len(self.prompts)) for _ in range(self._num_choices)]
        return [self._chunk_of([self._opening(*each)]) for each in enumerate(numbers)]

    def _opening(self, index: int, number: int) -> CompletionChoice:
        ids = self._prompt_token_ids(number)
        return CompletionChoice(index=index, text=self._echoes[number], finish_reason=None, prompt_token_ids=ids)

    def _chunk_choices(self, index: int, piece: AnswerPiece) -> Sequence[CompletionChoice]:
        """Return one choice, or none while log-probabilities wait: incomplete bytes have no text offset yet."""
        pieces = self._held[index]
        pieces.append(piece)
        if piece.has_undecoded_bytes and self._request.choose_logprobs() is not None:
            return ()
        del self._held[index]
        choice = CompletionChoice(
            index=index,
            # A token may end one character and begin another.
            text="".join(each.text for each in pieces),
            finish_reason=piece.finish_reason,
            logprobs=self._logprobs(index, self._answered_tokens([each.token for each in pieces])),
            stop_reason=msgspec.UNSET if piece.finish_reason is None else piece.stop_reason,
            token_ids=self._token_ids(pieces),
        )
        return [choice]

    def _chunk(self, choices: list[Any], usage: Usage | msgspec.UnsetType | None) -> Completion:
        return Completion(id=self.id, created=self._created, model=self._model_name, choices=choices, usage=usage)

    def _echoed_tokens(self, number: int, answered: TokenOutput) -> Iterator[_ShownToken]:
        """Yield the prompt's tokens if the text echoes them. A special first token that it lacks adds no text."""
        if self._written is None:
            return
        first, *others = self.prompts[number].engine_request.token_ids
        is_written = self._echoes[number].startswith(self._tokenizer.token(first) or "")
        shows_first = is_written or not self._tokenizer.is_special(first)
        first_shown, *shown = self._tokenizer.decode_each([first, *others], skip_special_tokens=False)
        texts = _as_in(self._echoes[number], [first_shown if shows_first else "", *shown])
        yield from map(_ShownToken, [first, *others], texts, [None, *(answered.prompt_logprobs or ())])

    def _answered_tokens(self, tokens: Sequence[TokenOutput]) -> Iterator[_ShownToken]:
        if not self._request.wants_answer:
            return
        params = self.prompts[0].engine_request.sampling_params
        token_ids = [token.token_id for token in tokens]
        shown = self._tokenizer.decode_each(token_ids, params.skip_special_tokens, continues_text=True)
        for token, each in zip(tokens, shown, strict=True):
            yield _ShownToken(token.token_id, each, token.logprobs)

    def _logprobs(self, index: int, tokens: Iterable[_ShownToken]) -> CompletionLogprobs | None:
        """Return the log-probabilities of tokens that continue a choice. Tokens of one character share its offset."""
        if (num_top := self._request.choose_logprobs()) is None:
            return None
        shown = list(tokens)
        lengths = (len(token.shown) for token in shown)
        *offsets, end = itertools.accumulate(lengths, initial=self._offsets[index])
        self._offsets[index] = end
        each = [[self._top_logprob(one) for one in (token.logprobs or ())[: 1 + num_top]] for token in shown]
        return CompletionLogprobs(
            tokens=[self._name_token(token.token_id) for token in shown],
            token_logprobs=[ones[0].logprob if ones else None for ones in each],
            # As in vLLM, the token itself is listed among the likeliest, even if it is not one of them.
            top_logprobs=[_by_token(ones) if ones else None for ones in each],
            text_offset=offsets,
        )


def _as_in(text: str, shown: Iterable[str]) -> Iterator[str]:
    """Yield what tokens show as it stands in their text: a leading space may be the tokenizer's own.

    From where they are another text than theirs (of a tokenizer that normalizes it) they are taken as they are.
    """
    place, is_same = 0, True
    for each in shown:
        forms = (each, each.removeprefix(" ")) if is_same else ()
        part = next((form for form in forms if text.startswith(form, place)), None)
        is_same, place = part is not None, place + len(part or "")
        yield each if part is None else part


def _by_token(logprobs: Sequence[TopLogprob]) -> dict[str, float]:
    """Map the tokens' texts to their log-probabilities.

    Tokens may look alike, as parts of characters do. The first counts: the token itself, or the likeliest.
    """
    by_token: dict[str, float] = {}
    for each in logprobs:
        by_token.setdefault(each.token, each.logprob)
    return by_token
