"""Keepsight without a server: `LLM(...)`, with the shapes that vLLM's users know."""

import numbers
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from random import Random
from typing import Any, Self, TypeGuard

from tqdm import tqdm

from keepsight.config import Config
from keepsight.engine.in_process_engine import InProcessEngine
from keepsight.engine.start_engine import start_engine
from keepsight.errors import InvalidArgumentError, UnsupportedFieldError
from keepsight.frontend.assemble_answer import AnswerAssembler, AnswerPiece
from keepsight.frontend.engine_client import Outputs
from keepsight.frontend.prepare_request import RequestPreparer
from keepsight.frontend.prepared_request import PreparedRequest
from keepsight.frontend.prompt.public_tokenizer import PublicTokenizer
from keepsight.frontend.prompt.read_messages import choose_end, read_messages
from keepsight.frontend.prompt.tokenizer import Tokenizer
from keepsight.observe.metric_values import Metric, list_metrics
from keepsight.outputs import CompletionOutput, Logprob, RequestOutput
from keepsight.requests import TokenLogprobs, TokenOutput
from keepsight.sampling_params import SamplingParams

Prompt = str | list[int] | Mapping[str, Any]
Message = Mapping[str, Any]
# As tqdm's own class does.
MakeBar = Callable[..., tqdm]
PROMPT_FIELDS = frozenset(
    {
        "prompt",
        "prompt_token_ids",
        "prompt_embeds",
        "multi_modal_data",
        "multi_modal_uuids",
        "mm_processor_kwargs",
        "cache_salt",
    }
)


class LLM:
    """A model that answers.  `model` is a checkpoint's folder, None the demo; options are `Config`'s.

    With a `seed`, requests that have none of their own draw the same again if they are asked in the same order.
    Its engine runs on threads of its own until `close()`, the end of a `with` block, or until it is forgotten.
    """

    def __init__(self, model: str | Path | None = None, *, seed: int | None = None, **options: Any) -> None:
        # Checked as one request's is.
        seed = SamplingParams(seed=seed).seed
        self._load(Config.from_options(**{"model": model, "performance_mode": "throughput", **options}), seed)

    @classmethod
    def from_config(cls, config: Config) -> Self:
        llm = cls.__new__(cls)
        llm._load(config)
        return llm

    def _load(self, config: Config, seed: int | None = None) -> None:
        self.config = config
        self._seeds = None if seed is None else Random(seed)
        self.preparer = RequestPreparer.from_config(self.config)
        self.engine = start_engine(self.config, self.preparer)
        # The engine's threads hold nothing of this object, so that forgetting it frees them and the model.
        self._close = weakref.finalize(self, _close, self.preparer, self.engine)

    def close(self) -> None:
        """Ends the engine and frees its memory.  Calls that still run on other threads fail."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reset_prefix_cache(self) -> None:
        """Later requests find no keys and values of earlier ones."""
        self.engine.reset_caches(prefix=True)

    def reset_encoder_cache(self) -> None:
        """Later requests find no embeddings of earlier ones."""
        self.engine.reset_caches(encoder=True)

    def reset_mm_cache(self) -> None:
        """Later requests find no pixels that were made before."""
        self.engine.reset_caches(processor=True)

    def generate(
        self,
        prompts: str | Mapping[str, Any] | Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | MakeBar = True,
        priority: Sequence[int] | None = None,
        lora_request: None = None,
        tokenization_kwargs: None = None,
    ) -> list[RequestOutput]:
        """A prompt is a text, token ids, or a mapping: `prompt` or `prompt_token_ids`; pictures go with a text.

        These are `multi_modal_data={"image": [...]}`; `multi_modal_uuids={"image": [...]}` may name them: what was sent
        under a uuid once may be None later.  With `enable_prompt_embeds` a mapping may have `prompt_embeds` instead, an
        array or a tensor [tokens, hidden] of what `transformers` calls `inputs_embeds`, or a file's bytes.
        Those with the smallest `priority` go first.  `use_tqdm` may be what makes the bar.  The last two are vLLM's,
        and must be None.
        """
        _refuse_others(lora_request=lora_request, tokenization_kwargs=tokenization_kwargs)
        listed = _list_prompts(prompts)
        asked = self._with_terms(listed, sampling_params, priority)
        requests = (self._prepare_prompt(*each) for each in asked)
        return self._run_all(requests, len(listed), use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | MakeBar = True,
        *,
        mm_processor_kwargs: dict[str, Any] | None = None,
        priority: Sequence[int] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        lora_request: None = None,
        chat_template: None = None,
        chat_template_kwargs: None = None,
        tokenization_kwargs: None = None,
    ) -> list[RequestOutput]:
        """One conversation or several, in OpenAI's form; pictures as `image_url`.

        Or as `image_pil` with a PIL image, a numpy array or a torch tensor; with `enable_mm_embeds` its embeddings as
        `image_embeds`, an array, a tensor or a file's bytes.  With `continue_final_message` the model goes on with the
        last message; with `add_generation_prompt` false nothing follows it.  `tools` are shown to a template that has a
        place for them.  The last four are vLLM's, and must be None.
        """
        _refuse_others(
            lora_request=lora_request,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
            tokenization_kwargs=tokenization_kwargs,
        )
        conversations: Sequence[Any] = messages if _are_conversations(messages) else [messages]
        end = choose_end(add_generation_prompt, continue_final_message)
        prepare = partial(self.preparer.prepare_chat, mm_processor_kwargs=mm_processor_kwargs, tools=tools or ())
        asked = self._with_terms(conversations, sampling_params, priority)
        requests = (prepare(read_messages(each, end), params, priority=place) for each, params, place in asked)
        return self._run_all(requests, len(conversations), use_tqdm)

    def get_metrics(self) -> list[Metric]:
        """What was counted since this was made, and what is held now."""
        return list_metrics(self.engine.read_totals())

    def get_default_sampling_params(self) -> SamplingParams:
        """What is taken where none are given: as the checkpoint wants it (`generation_config`)."""
        return SamplingParams(**self.preparer.sampling_defaults)

    def get_tokenizer(self) -> PublicTokenizer:
        """To write a chat's prompt by oneself, or to count tokens."""
        return PublicTokenizer(self.preparer.tokenizer, self.preparer.template)

    def _with_terms(
        self,
        prompts: Sequence[Any],
        params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
    ) -> list[tuple[Any, SamplingParams, int]]:
        asked = _zip_with_terms(prompts, self.get_default_sampling_params() if params is None else params, priority)
        return [(prompt, self._seeded(own), place) for prompt, own, place in asked]

    def _seeded(self, params: SamplingParams) -> SamplingParams:
        if self._seeds is None or params.seed is not None:
            return params
        return replace(params, seed=self._seeds.getrandbits(63))

    def _prepare_prompt(self, prompt: Prompt, params: SamplingParams, priority: int) -> PreparedRequest:
        if isinstance(prompt, str):
            return self.preparer.prepare_text(prompt, (), params, priority=priority)
        if not isinstance(prompt, Mapping):
            return self.preparer.prepare_tokens(prompt, params, priority=priority)
        for name in prompt:
            if name not in PROMPT_FIELDS:
                raise UnsupportedFieldError(
                    name, f"is no part of a prompt; known are {', '.join(sorted(PROMPT_FIELDS))}"
                )
        salt = prompt.get("cache_salt")
        if "prompt_embeds" in prompt:
            if others := prompt.keys() - {"prompt_embeds", "cache_salt"}:
                raise InvalidArgumentError(min(others), "must not be given beside prompt_embeds")
            embeds = {"prompt_embeds": prompt["prompt_embeds"]}
            [prepared] = self.preparer.prepare_embeds(embeds, params, salt, priority)
            return prepared
        pictures, uuids = _pictures_of(prompt), _uuids_of(prompt)
        if "prompt_token_ids" in prompt:
            if pictures or uuids:
                raise UnsupportedFieldError("multi_modal_data", "needs the prompt as text, not as token ids")
            prepared = self.preparer.prepare_tokens(prompt["prompt_token_ids"], params, salt, priority)
            return replace(prepared, text=prompt.get("prompt"))
        text = prompt.get("prompt")
        if not isinstance(text, str):
            raise InvalidArgumentError("prompt", f"must be a string, not {text!r}")
        overrides = prompt.get("mm_processor_kwargs")
        return self.preparer.prepare_text(text, pictures, params, overrides, salt, priority, uuids)

    def _run_all(
        self, requests: Iterable[PreparedRequest], num_requests: int, use_tqdm: bool | MakeBar
    ) -> list[RequestOutput]:
        """Each is computed from when it is prepared, beside the preparing of those after it."""
        bar = _open_bar(use_tqdm, num_requests)
        with bar or nullcontext(), closing(_RunningRequests(self.engine, self.preparer.tokenizer, bar)) as running:
            for request in requests:
                running.submit(request)
                running.read_what_came()
            return running.finish()


class _Answer:
    """One request's, as it grows."""

    def __init__(self, prepared: PreparedRequest, tokenizer: Tokenizer) -> None:
        self.request, self._text, self._tokenizer = prepared.engine_request, prepared.text, tokenizer
        self._assembler = AnswerAssembler(tokenizer, self.request.sampling_params)
        self._pieces: list[list[AnswerPiece]] = [[] for _ in range(self.request.sampling_params.n)]
        # Of the choice that found least: the others find what that one has just computed.
        self._num_cached_tokens = len(self.request.token_ids)
        self._heard: Outputs = []

    def hear(self, outputs: Outputs) -> Outputs:
        """What is to be read now.  Only of stop strings the engine has to be told as soon as they are there."""
        self._heard += outputs
        if not self.request.sampling_params.stop and not any(map(_is_end, outputs)):
            return []
        heard, self._heard = self._heard, []
        return heard

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
            prompt_logprobs=self._tell_prompt(),
        )

    def _tell_prompt(self) -> list[dict[int, Logprob] | None] | None:
        told = self._pieces[0][0].token.prompt_logprobs
        return None if told is None else [None, *(_by_id(each, self._tokenizer) for each in told)]


class _RunningRequests:
    """The requests of one call.  Closing it abandons those that have not ended."""

    def __init__(self, engine: InProcessEngine, tokenizer: Tokenizer, bar: tqdm | None) -> None:
        self._engine, self._tokenizer, self._bar = engine, tokenizer, bar
        self._answers: list[_Answer] = []
        self._unfinished: dict[str, _Answer] = {}
        self._arrived: SimpleQueue[tuple[_Answer, Outputs]] = SimpleQueue()

    def submit(self, prepared: PreparedRequest) -> None:
        answer = _Answer(prepared, self._tokenizer)
        self._answers.append(answer)
        # First: whoever interrupts this wants it abandoned, too.
        self._unfinished[answer.request.request_id] = answer
        self._engine.submit(prepared, partial(self._hear, answer))

    def read_what_came(self) -> None:
        while not self._arrived.empty():
            self._read(*self._arrived.get())

    def finish(self) -> list[RequestOutput]:
        while self._unfinished:
            self._read(*self._arrived.get())
        return [answer.output() for answer in self._answers]

    def close(self) -> None:
        for request_id in self._unfinished:
            self._engine.leave(request_id)

    def _hear(self, answer: _Answer, outputs: Outputs) -> None:
        """On the engine's thread, which would wait for the interpreter's lock after each token that is read."""
        if heard := answer.hear(outputs):
            self._arrived.put((answer, heard))

    def _read(self, answer: _Answer, outputs: Outputs) -> None:
        if answer.is_finished:  # by a stop string: the engine went on until it heard of it
            return
        for output in outputs:
            if isinstance(output, Exception):
                raise output
            piece = answer.push(output)
            if piece is not None and piece.finish_reason is not None:
                # Does nothing but where a stop string ended it: the engine knows of none.
                self._engine.stop_choice(answer.request.request_id, piece.choice)
        if answer.is_finished:
            del self._unfinished[answer.request.request_id]
            if self._bar is not None:
                self._bar.update()


def _is_end(output: TokenOutput | Exception) -> bool:
    return isinstance(output, Exception) or output.finish_reason is not None


def _open_bar(use_tqdm: bool | MakeBar, num_requests: int) -> tqdm | None:
    """None rather than a disabled one, which would start a thread all the same."""
    if callable(use_tqdm):
        return use_tqdm(total=num_requests, desc="Requests", unit="request")
    if not use_tqdm or num_requests <= 1 or os.environ.get("TQDM_DISABLE", "") not in ("", "0"):
        return None
    return tqdm(total=num_requests, desc="Requests", unit="request", disable=False)


def _refuse_others(**asked: object) -> None:
    for name, value in asked.items():
        if value is not None:
            raise UnsupportedFieldError(name, "is not supported")


def _close(preparer: RequestPreparer, engine: InProcessEngine) -> None:
    preparer.close()
    engine.close()


def _list_prompts(prompts: str | Mapping[str, Any] | Sequence[Any]) -> list[Prompt]:
    """As vLLM: a list of integers is one prompt."""
    if isinstance(prompts, str | Mapping) or _are_token_ids(prompts):
        return [prompts]
    if not isinstance(prompts, Sequence) or not all(
        isinstance(each, str | Mapping) or _are_token_ids(each) for each in prompts
    ):
        kinds = "a text, token ids, a mapping such as {'prompt': ...}"
        raise InvalidArgumentError("prompts", f"must be {kinds}, or a list of these")
    return list(prompts)


def _are_token_ids(prompt: object) -> TypeGuard[list[int]]:
    """Each is looked at by who reads them."""
    return isinstance(prompt, list | tuple) and bool(prompt) and isinstance(prompt[0], numbers.Integral)


def _are_conversations(messages: object) -> bool:
    """Whether these are several.  What is neither one nor several goes on as one, to be refused by its reader."""
    return isinstance(messages, list | tuple) and bool(messages) and not isinstance(messages[0], Mapping)


def _zip_with_terms(
    prompts: Sequence[Any],
    params: SamplingParams | Sequence[SamplingParams],
    priority: Sequence[int] | None,
) -> list[tuple[Any, SamplingParams, int]]:
    if priority is not None and (not isinstance(priority, list | tuple) or len(priority) != len(prompts)):
        raise InvalidArgumentError("priority", f"must be a list of {len(prompts)} integers, one for each prompt")
    places = [0] * len(prompts) if priority is None else priority
    return list(zip(prompts, _params_for_each(params, len(prompts)), places, strict=True))


def _params_for_each(params: SamplingParams | Sequence[SamplingParams], num_prompts: int) -> Sequence[SamplingParams]:
    """Copies: the caller's may be changed while these are in use."""
    if isinstance(params, SamplingParams):
        return [replace(params)] * num_prompts
    if not isinstance(params, Sequence) or not all(isinstance(each, SamplingParams) for each in params):
        raise InvalidArgumentError("sampling_params", "must be SamplingParams, or a list of them")
    if len(params) != num_prompts:
        raise InvalidArgumentError("sampling_params", f"holds {len(params)} for {num_prompts} prompts")
    return [replace(each) for each in params]


def _pictures_of(prompt: Mapping[str, Any]) -> Sequence[object]:
    pictures = _read_images(prompt, "multi_modal_data", ())
    return pictures if isinstance(pictures, list | tuple) else [pictures]


def _uuids_of(prompt: Mapping[str, Any]) -> Sequence[object] | None:
    uuids = _read_images(prompt, "multi_modal_uuids", None)
    return uuids if uuids is None or isinstance(uuids, list | tuple) else [uuids]


def _read_images(prompt: Mapping[str, Any], field: str, default: object) -> object:
    by_modality = prompt.get(field) or {}
    if not isinstance(by_modality, Mapping):
        raise InvalidArgumentError(field, f"must be a mapping such as {{'image': [...]}}, not {by_modality!r}")
    for modality in by_modality:
        if modality != "image":
            raise UnsupportedFieldError(f"{field}.{modality}", "only image is supported")
    return by_modality.get("image", default)


def _by_id(logprobs: TokenLogprobs, tokenizer: Tokenizer) -> dict[int, Logprob]:
    return {
        each.token_id: Logprob(each.logprob, each.rank, tokenizer.decode([each.token_id], False)) for each in logprobs
    }


def _completion(index: int, pieces: Sequence[AnswerPiece], tokenizer: Tokenizer) -> CompletionOutput:
    last = pieces[-1]
    logprobs = None
    if last.token.logprobs is not None:
        logprobs = [_by_id(piece.token.logprobs or (), tokenizer) for piece in pieces]
    return CompletionOutput(
        index=index,
        text="".join(piece.text for piece in pieces),
        token_ids=[piece.token.token_id for piece in pieces],
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        cumulative_logprob=None
        if logprobs is None
        else sum(p.token.logprobs[0].logprob for p in pieces if p.token.logprobs),
        logprobs=logprobs,
    )
