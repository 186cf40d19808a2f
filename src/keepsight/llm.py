"""Keepsight without a server: `LLM(...)`, with the shapes that vLLM's users know."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Self

from tqdm import tqdm

from keepsight.config import Config
from keepsight.errors import InvalidArgumentError, UnsupportedFieldError
from keepsight.frontend.assemble_answer import AnswerAssembler, AnswerPiece
from keepsight.frontend.prepare_request import RequestPreparer
from keepsight.frontend.tokenizer import Tokenizer
from keepsight.outputs import CompletionOutput, Logprob, RequestOutput
from keepsight.requests import EngineRequest
from keepsight.runner.load_runner import load_runner
from keepsight.sampling_params import SamplingParams

Prompt = str | Mapping[str, Any]
Message = Mapping[str, Any]
PROMPT_FIELDS = frozenset({"prompt", "prompt_token_ids", "multi_modal_data", "mm_processor_kwargs"})


class LLM:
    """A model that answers.  `model` is a checkpoint's folder, None the demo; options are `Config`'s."""

    def __init__(self, model: str | Path | None = None, **options: Any) -> None:
        self._load(Config.from_options(model=model, **options))

    @classmethod
    def from_config(cls, config: Config) -> Self:
        llm = cls.__new__(cls)
        llm._load(config)
        return llm

    def _load(self, config: Config) -> None:
        self.config = config
        self.preparer = RequestPreparer.from_config(self.config)
        self.runner = load_runner(
            self.config,
            self.preparer.image_config,
            self.preparer.tokenizer.eos_token_ids,
            self.preparer.max_model_len,
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """A prompt is a text, or a mapping: `prompt` or `prompt_token_ids`, `multi_modal_data={"image": [...]}`."""
        listed = _list_prompts(prompts)
        pairs = list(zip(listed, _params_for_each(sampling_params, len(listed)), strict=True))
        return self._run_all((self._prepare_prompt(prompt, params) for prompt, params in pairs), len(pairs), use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """One conversation or several, in OpenAI's form; pictures as `image_url`, or `image_pil` with a PIL image."""
        conversations: Sequence[Any] = messages if _are_conversations(messages) else [messages]
        pairs = list(zip(conversations, _params_for_each(sampling_params, len(conversations)), strict=True))
        requests = (
            self.preparer.prepare_chat(conversation, params, mm_processor_kwargs) for conversation, params in pairs
        )
        return self._run_all(requests, len(pairs), use_tqdm)

    def _prepare_prompt(self, prompt: Prompt, params: SamplingParams) -> EngineRequest:
        if isinstance(prompt, str):
            return self.preparer.prepare_text(prompt, (), params)
        for name in prompt:
            if name not in PROMPT_FIELDS:
                raise UnsupportedFieldError(
                    name, f"is no part of a prompt; known are {', '.join(sorted(PROMPT_FIELDS))}"
                )
        pictures = _pictures_of(prompt)
        if "prompt_token_ids" in prompt:
            if pictures:
                raise UnsupportedFieldError("multi_modal_data", "needs the prompt as text, not as token ids")
            return self.preparer.prepare_tokens(prompt["prompt_token_ids"], params)
        text = prompt.get("prompt")
        if not isinstance(text, str):
            raise InvalidArgumentError("prompt", f"must be a string, not {text!r}")
        return self.preparer.prepare_text(text, pictures, params, prompt.get("mm_processor_kwargs"))

    def _run_all(self, requests: Iterable[EngineRequest], num_requests: int, use_tqdm: bool) -> list[RequestOutput]:
        shows_progress = use_tqdm and num_requests > 1
        bar = tqdm(requests, total=num_requests, desc="Requests", unit="request", disable=not shows_progress)
        return [self._run(request) for request in bar]

    def _run(self, request: EngineRequest) -> RequestOutput:
        tokenizer, params = self.preparer.tokenizer, request.sampling_params
        assembler = AnswerAssembler(tokenizer, params)
        pieces: list[list[AnswerPiece]] = [[] for _ in range(params.n)]
        with closing(self.runner.generate(request)) as tokens:
            for token in tokens:
                if piece := assembler.push(token):
                    pieces[piece.choice].append(piece)
                if assembler.is_finished:
                    break
        return RequestOutput(
            request_id=request.request_id,
            prompt=tokenizer.decode(request.token_ids, skip_special_tokens=False),
            prompt_token_ids=request.token_ids,
            outputs=tuple(_completion(index, own, tokenizer) for index, own in enumerate(pieces)),
        )


def _list_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    listed = [prompts] if isinstance(prompts, str | Mapping) else prompts
    if not isinstance(listed, Sequence) or not all(isinstance(each, str | Mapping) for each in listed):
        raise InvalidArgumentError("prompts", "must be a text, a mapping such as {'prompt': ...}, or a list of these")
    return list(listed)


def _are_conversations(messages: object) -> bool:
    """Whether these are several.  What is neither one nor several goes on as one, to be refused by its reader."""
    return isinstance(messages, list | tuple) and bool(messages) and not isinstance(messages[0], Mapping)


def _params_for_each(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if not isinstance(params, Sequence) or not all(isinstance(each, SamplingParams) for each in params):
        raise InvalidArgumentError("sampling_params", "must be SamplingParams, or a list of them")
    if len(params) != num_prompts:
        raise InvalidArgumentError("sampling_params", f"holds {len(params)} for {num_prompts} prompts")
    return params


def _pictures_of(prompt: Mapping[str, Any]) -> Sequence[object]:
    data = prompt.get("multi_modal_data") or {}
    if not isinstance(data, Mapping):
        raise InvalidArgumentError("multi_modal_data", f"must be a mapping such as {{'image': [...]}}, not {data!r}")
    for modality in data:
        if modality != "image":
            raise UnsupportedFieldError(f"multi_modal_data.{modality}", "only image is supported")
    pictures = data.get("image", ())
    return pictures if isinstance(pictures, list | tuple) else [pictures]


def _completion(index: int, pieces: Sequence[AnswerPiece], tokenizer: Tokenizer) -> CompletionOutput:
    last = pieces[-1]
    logprobs = None
    if last.token.logprobs is not None:
        logprobs = tuple(
            {
                each.token_id: Logprob(each.logprob, each.rank, tokenizer.decode([each.token_id], False))
                for each in piece.token.logprobs or ()
            }
            for piece in pieces
        )
    return CompletionOutput(
        index=index,
        text="".join(piece.text for piece in pieces),
        token_ids=tuple(piece.token.token_id for piece in pieces),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        cumulative_logprob=None
        if logprobs is None
        else sum(p.token.logprobs[0].logprob for p in pieces if p.token.logprobs),
        logprobs=logprobs,
    )
