"""Turns a parsed body into an answer that is ready for the engine, by preparing its prompts; or returns their tokens.

Prompts are prepared off the event loop, unless waking a thread would take longer: a short text, and pictures that are
known, so that nothing of them has to be read.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.types import Message, Receive

from keepsight.errors import InvalidArgumentError, renaming_fields
from keepsight.frontend.api.answer import AnswerTerms
from keepsight.frontend.api.answer_chat import ChatAnswer
from keepsight.frontend.api.answer_completion import CompletionAnswer
from keepsight.frontend.api.answer_embeddings import EmbeddingsAnswer
from keepsight.frontend.api.answer_messages import MessagesAnswer
from keepsight.frontend.api.answer_responses import ResponsesAnswer
from keepsight.frontend.api.chat_request import ChatRequest
from keepsight.frontend.api.completion_request import CompletionRequest
from keepsight.frontend.api.embeddings_request import EmbeddingsRequest
from keepsight.frontend.api.fair_turns import FairTurns
from keepsight.frontend.api.generation_fields import GenerationFields
from keepsight.frontend.api.listed_prompts import Prompt
from keepsight.frontend.api.messages_request import MessagesChat
from keepsight.frontend.api.prompt_fields import PromptFields
from keepsight.frontend.api.responses_request import ResponsesChat
from keepsight.frontend.api.served_models import ServedModels
from keepsight.frontend.api.tokenize_request import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from keepsight.frontend.api.tool_fields import CallTerms
from keepsight.frontend.http.unless_client_leaves import unless_client_leaves
from keepsight.frontend.intake.media_intake import Downloaded
from keepsight.frontend.prepare_request import RequestPreparer
from keepsight.frontend.prepared_request import PreparedRequest
from keepsight.frontend.prompt.check_grammar import (
    NUM_PROCESSES,
    UnknownGrammarError,
    try_grammar,
    without_tries,
)
from keepsight.frontend.prompt.lift_data_urls import length_of
from keepsight.frontend.prompt.media_of_prompt import NO_MEDIA
from keepsight.frontend.prompt.read_messages import Conversation
from keepsight.frontend.read_vector import PARAMS_OF_VECTORS, check_dimensions
from keepsight.sampling_params import SamplingParams

# So much text is tokenized in less than a millisecond.
MAX_BYTES_ON_LOOP = 2048
# So many pictures are decoded to bytes and named in a third of that: screenshots, and photographs as chats send them.
MAX_PICTURES_ON_LOOP, MAX_URL_BYTES_ON_LOOP = 4, 2**20
# Limit on log-probabilities of prompts: the answer then has some megabytes.
MAX_PROMPT_LOGPROBS_IN_ANSWER = 2**16
# Limit on token ids of prompts, for the same size.
MAX_TOKEN_IDS_IN_ANSWER = 2**20
# Out of the 40 threads that all requests share. Not fewer: most films are already known and do not wait.
MAX_WAITING_THREADS = 32
Prepared = TypeVar("Prepared")


async def _never_leave() -> Message:
    return await asyncio.Future()


@dataclass(frozen=True, slots=True)
class Client:
    """Who waits for a turn, by tenant, and until when: `receive` tells that the client has left."""

    tenant: str = ""
    receive: Receive = _never_leave


_SOMEBODY = Client()


@dataclass(frozen=True, slots=True)
class AnswerPreparer:
    """Prepares answers. `cache_salt` is the effective salt, which may depend on more than the request's own field."""

    preparer: RequestPreparer
    models: ServedModels
    # True if a request may choose what its pictures cost and how they are resized.
    trusts_processor_kwargs: bool = False
    # Requests that may wait for a worker that examines a film or a sound leave some threads to the others.
    _waiting_threads: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_WAITING_THREADS))
    # Requests whose grammar has to be tried wait for that without a thread.
    _tries: FairTurns = field(default_factory=lambda: FairTurns(NUM_PROCESSES))

    async def chat(
        self,
        request: ChatRequest,
        cache_salt: str | None,
        downloaded: Downloaded,
        num_bytes: int,
        client: Client = _SOMEBODY,
    ) -> ChatAnswer | ResponsesAnswer | MessagesAnswer:
        """Prepare the answer to a chat. `num_bytes`: the size of all that the request was read from."""
        little = (
            self.preparer.recognize(request.messages, cache_salt) if _may_prepare_on_loop(request, num_bytes) else None
        )
        prepare = partial(self._prepare_chat, request, little or request.messages, cache_salt, downloaded)
        with renaming_fields(request.own_field_name):
            if little:
                prepared, calls = prepare()
            else:
                prepared, calls = await self._on_thread(prepare, request.messages, client)
            with prepared.free_names_if_refused():
                _check_size_of_answer(request, [prepared])
        answered = request.without_bulky_fields()
        terms = AnswerTerms([prepared], self.preparer.tokenizer, self.models.name_answer(request.model), calls)
        if isinstance(answered, ResponsesChat):
            return ResponsesAnswer(answered, terms)
        if isinstance(answered, MessagesChat):
            return MessagesAnswer(answered, terms)
        return ChatAnswer(answered, terms)

    async def _on_thread(
        self, prepare: Callable[[], Prepared], conversation: Conversation | None = None, client: Client = _SOMEBODY
    ) -> Prepared:
        """Run `prepare` on a thread; again each time that it needs a grammar which has to be tried first."""
        while True:
            try:
                with without_tries():
                    return await self._on_waiting_thread(prepare, conversation)
            except UnknownGrammarError as unknown:
                grammar = unknown.grammar
                # From Python 3.12 on it and its frames would hold each other, and the answer, until garbage collection.
                unknown.__traceback__ = None
            async with AsyncExitStack() as turn:
                await unless_client_leaves(client.receive, turn.enter_async_context(self._tries.take(client.tenant)))
                await run_in_threadpool(try_grammar, grammar)

    async def _on_waiting_thread(self, prepare: Callable[[], Prepared], conversation: Conversation | None) -> Prepared:
        """Run `prepare` on a thread, where it may wait for workers that examine unknown media."""
        if conversation is None or not self.preparer.may_wait_for_workers(conversation):
            return await run_in_threadpool(prepare)
        async with self._waiting_threads:
            return await run_in_threadpool(prepare)

    def _prepare_chat(
        self, request: ChatRequest, conversation: Conversation, cache_salt: str | None, downloaded: Downloaded
    ) -> tuple[PreparedRequest, CallTerms]:
        calls = request.read_call_terms(self.preparer.template.call_form)
        params = request.to_sampling_params(self.preparer.sampling_defaults, calls)
        terms = (cache_salt, request.priority or 0, request.shown_tools)
        prepared = self.preparer.prepare_chat(conversation, params, self._overrides_of(request), *terms, downloaded)
        prepared = self._as_requested(request, self.preparer.split_off_thought(prepared, conversation))
        return prepared, calls

    async def completion(
        self, request: CompletionRequest, cache_salt: str | None, client: Client = _SOMEBODY
    ) -> CompletionAnswer:
        prepare = partial(self._prepare_prompts, request, cache_salt)
        prompts = await self._on_thread(prepare, client=client)
        # Each choice repeats what is told of its prompt.
        _check_size_of_answer(request, prompts, num_times=prompts[0].engine_request.sampling_params.n)
        # The encoded embeddings may be megabytes, and have been decoded by now.
        request = msgspec.structs.replace(request.without_labels(), prompt_embeds=None)
        name = self.models.name_answer(request.model)
        return CompletionAnswer(request, AnswerTerms(prompts, self.preparer.tokenizer, name))

    def _prepare_prompts(self, request: CompletionRequest, cache_salt: str | None) -> Sequence[PreparedRequest]:
        params = request.to_sampling_params(self.preparer.sampling_defaults)
        terms = (cache_salt, request.priority or 0)
        if request.prompt_embeds is not None:
            prepared = self.preparer.prepare_embeds(request.embedded_prompts, params, *terms)
        else:
            prepared = [
                self._prepare_prompt(prompt, field, params, *terms) for field, prompt in request.prompts.items()
            ]
        return [self._as_requested(request, each) for each in prepared]

    def _prepare_prompt(
        self,
        prompt: Prompt,
        field: str,
        params: SamplingParams,
        cache_salt: str | None,
        priority: int,
        *,
        add_eos: bool = False,
    ) -> PreparedRequest:
        with renaming_fields(lambda name: field if name in ("prompt", "prompt_token_ids") else name):
            if isinstance(prompt, str):
                terms = (params, None, cache_salt, priority)
                return self.preparer.prepare_text(prompt, NO_MEDIA, *terms, add_eos=add_eos)
            return self.preparer.prepare_tokens(prompt, params, cache_salt, priority)

    async def embeddings(
        self, request: EmbeddingsRequest, cache_salt: str | None, downloaded: Downloaded
    ) -> EmbeddingsAnswer:
        check_dimensions(request.dimensions, self.preparer.hidden_size)
        prepare = partial(self._prepare_inputs, request, cache_salt, downloaded)
        prompts = await self._on_thread(prepare, request.messages)
        request = msgspec.structs.replace(request, input=None, messages=None)
        return EmbeddingsAnswer(request, prompts, self.models.name_answer(request.model))

    def _prepare_inputs(
        self, request: EmbeddingsRequest, cache_salt: str | None, downloaded: Downloaded
    ) -> list[PreparedRequest]:
        params, terms = PARAMS_OF_VECTORS, (cache_salt, request.priority or 0)
        if request.messages is not None:
            more = (self._overrides_of(request), *terms, request.shown_tools, downloaded)
            prepared = [self.preparer.prepare_chat(request.messages, params, *more)]
        else:
            prepared = [
                self._prepare_prompt(each, field, params, *terms, add_eos=True)
                for field, each in request.inputs.items()
            ]
        return [self._as_requested(request, each).as_vector() for each in prepared]

    def _as_requested(
        self, request: GenerationFields | EmbeddingsRequest, prepared: PreparedRequest
    ) -> PreparedRequest:
        """Return the request with its cache key, which selects an engine, and its adapter, which selects the model."""
        keyed = dataclasses.replace(prepared, cache_key=request.prompt_cache_key)
        return keyed.adapted(self.models.find_adapter(request.model))

    async def tokenize(
        self, request: TokenizeRequest, cache_salt: str | None, downloaded: Downloaded
    ) -> TokenizeResponse:
        return await self._on_thread(partial(self._tokenize, request, cache_salt, downloaded), request.messages)

    def _tokenize(self, request: TokenizeRequest, cache_salt: str | None, downloaded: Downloaded) -> TokenizeResponse:
        tokenizer = self.preparer.tokenizer
        counts: dict[str, int] = {}
        if request.prompt is not None:
            if tokenizer.is_far_too_long(request.prompt, MAX_TOKEN_IDS_IN_ANSWER):
                reason = f"far more than the {MAX_TOKEN_IDS_IN_ANSWER} tokens that one answer may list"
                raise InvalidArgumentError("prompt", f"has {len(request.prompt)} characters, {reason}")
            adds = request.add_special_tokens is not False
            token_ids = tokenizer.encode(request.prompt, adds and tokenizer.lacks_bos(request.prompt), add_eos=adds)
        else:
            engine_request = self._prepare_to_count(request, cache_salt, downloaded).engine_request
            token_ids = engine_request.token_ids
            counts = {"image_tokens": engine_request.num_image_tokens, "audio_tokens": engine_request.num_audio_tokens}
        return TokenizeResponse(
            count=len(token_ids),
            max_model_len=self.preparer.max_model_len,
            tokens=list(token_ids),
            token_strs=[tokenizer.token(each) for each in token_ids] if request.return_token_strs else msgspec.UNSET,
            **counts,
        )

    async def count_input(self, request: ChatRequest, cache_salt: str | None, downloaded: Downloaded) -> int:
        prepare = partial(self._prepare_to_count, request, cache_salt, downloaded)
        with renaming_fields(request.own_field_name):
            prepared = await self._on_thread(prepare, request.messages)
        return len(prepared.engine_request.token_ids)

    def _prepare_to_count(
        self, request: ChatRequest | TokenizeRequest, cache_salt: str | None, downloaded: Downloaded
    ) -> PreparedRequest:
        terms = (cache_salt, 0, request.shown_tools)
        prepared = self.preparer.prepare_chat(
            request.messages, SamplingParams(), self._overrides_of(request), *terms, downloaded, MAX_TOKEN_IDS_IN_ANSWER
        )
        prepared.forget_names()  # nothing will be made
        return prepared

    def _overrides_of(self, request: ChatRequest | PromptFields) -> dict[str, Any]:
        """Return the request's processor options; empty means as the server is configured."""
        options = request.mm_processor_kwargs
        return {} if options is None else options.as_overrides(are_trusted=self.trusts_processor_kwargs)

    def detokenize(self, request: DetokenizeRequest) -> DetokenizeResponse:
        for index, token_id in enumerate(request.tokens):
            if not self.preparer.has_token(token_id):
                raise InvalidArgumentError(f"tokens[{index}]", f"{token_id} is not a token of this model")
        return DetokenizeResponse(prompt=self.preparer.tokenizer.decode(request.tokens, skip_special_tokens=False))


def _check_size_of_answer(request: GenerationFields, prompts: Sequence[PreparedRequest], num_times: int = 1) -> None:
    num_token_ids = num_times * sum(len(each.engine_request.token_ids) for each in prompts)
    if request.return_token_ids and num_token_ids > MAX_TOKEN_IDS_IN_ANSWER:
        raise InvalidArgumentError(
            "return_token_ids",
            f"asks for {num_token_ids} token ids of prompts; one answer lists at most {MAX_TOKEN_IDS_IN_ANSWER}",
        )
    num_logprobs = num_token_ids * sum(1 + num_top for num_top in request.prompt_top_logprobs)
    if num_logprobs > MAX_PROMPT_LOGPROBS_IN_ANSWER:
        raise InvalidArgumentError(
            request.client_field_name("prompt_logprobs"),
            f"asks for {num_logprobs} log-probabilities of prompts; "
            f"one answer lists at most {MAX_PROMPT_LOGPROBS_IN_ANSWER}",
        )


def _may_prepare_on_loop(request: ChatRequest, num_bytes: int) -> bool:
    """Return whether the request is quick to prepare if its pictures are known.

    One with a form is not, as its grammar has to be compiled, nor one with a film, which has hundreds of names.
    """
    urls = [part.source for part in request.messages.pictures if isinstance(part.source, str)]
    num_url_bytes = sum(map(length_of, urls))
    return (
        not request.wants_form
        and "video" not in request.messages.kinds
        and num_bytes - num_url_bytes <= MAX_BYTES_ON_LOOP
        and num_url_bytes <= MAX_URL_BYTES_ON_LOOP
        and len(urls) <= MAX_PICTURES_ON_LOOP
    )
