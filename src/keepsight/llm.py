"""Keepsight without a server: `LLM(...)`, with the shapes that vLLM's users know."""

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Self

from keepsight.config import Config
from keepsight.engine.in_process_engine import InProcessEngine
from keepsight.engine.open_engine import open_engine
from keepsight.errors import InvalidArgumentError, OtherProcessError, UnsupportedFieldError
from keepsight.frontend.prepare_request import RequestPreparer
from keepsight.frontend.prepared_request import PreparedRequest
from keepsight.frontend.prompt.public_tokenizer import PublicTokenizer
from keepsight.frontend.prompt.read_messages import choose_end, read_messages
from keepsight.frontend.read_vector import PARAMS_OF_VECTORS, check_dimensions
from keepsight.lora import LoRARequest
from keepsight.observe.metric_values import Metric, list_metrics
from keepsight.offline.listed_items import ListedItems
from keepsight.offline.read_prompts import (
    Prompt,
    are_conversations,
    list_lora_requests,
    list_prompts,
    prepare_prompt,
    zip_with_terms,
)
from keepsight.offline.running_requests import MakeBar, RunningRequests, open_bar
from keepsight.outputs import EmbeddingRequestOutput, RequestOutput
from keepsight.pooling_params import PoolingParams
from keepsight.requests import Adapter
from keepsight.sampling_params import SamplingParams

Message = Mapping[str, Any]


class LLM:
    """A model for offline use. `model` is a checkpoint folder (None: the demo); the options are `Config`'s.

    With a `seed`, requests without one sample the same tokens again if they are submitted in the same order.
    The engine runs on its own threads until `close()`, the end of a `with` block, or garbage collection.
    """

    def __init__(self, model: str | Path | None = None, *, seed: int | None = None, **options: Any) -> None:
        # Validate it like a request's seed.
        seed = SamplingParams(seed=seed).seed
        self._load(Config.from_options(**{"model": model, "performance_mode": "throughput", **options}), seed)

    @classmethod
    def from_config(cls, config: Config) -> Self:
        llm = cls.__new__(cls)
        llm._load(config)
        return llm

    def _load(self, config: Config, seed: int | None = None) -> None:
        self.config = config
        self._adapters = dict[LoRARequest, Adapter]()
        self._seeds = None if seed is None else Random(seed)
        self.preparer = RequestPreparer.from_config(self.config)
        self._engine, self._process = open_engine(self.config, self.preparer), os.getpid()
        # The engine's threads hold no reference to this object, so that its collection frees them and the model.
        weakref.finalize(self, _close, self.preparer, self._engine, self._process)
        # Last: if it is interrupted, the finalizer already exists.
        self._engine.start()

    @property
    def engine(self) -> InProcessEngine:
        """The engine. Raise OtherProcessError in a forked process, where its threads do not exist: calls would hang."""
        if os.getpid() != self._process:
            raise OtherProcessError(self._process)
        return self._engine

    def close(self) -> None:
        """End the engine and free its memory. Calls that still run on other threads fail."""
        # Not through the finalizer, which runs only once: it stays to finish the work if this is interrupted.
        _close(self.preparer, self._engine, self._process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache: later requests find no keys and values of earlier ones."""
        self.engine.reset_caches(prefix=True)

    def reset_encoder_cache(self) -> None:
        """Empty the encoder cache: later requests find no embeddings of earlier ones."""
        self.engine.reset_caches(encoder=True)

    def reset_mm_cache(self) -> None:
        """Empty the processor cache: later requests find no pixels of earlier ones."""
        self.engine.reset_caches(processor=True)

    def generate(
        self,
        prompts: str | Mapping[str, Any] | Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | MakeBar = True,
        priority: Sequence[int] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        tokenization_kwargs: None = None,
    ) -> list[RequestOutput]:
        """Generate completions of one or more prompts.

        A prompt is a text, token ids, or a mapping with `prompt` or `prompt_token_ids`. Media go with a text, as
        `multi_modal_data={"image": [...], "video": [...], "audio": [...]}`; `multi_modal_uuids`, of the same form, may
        name them: an item that was sent under a uuid once may be None later. With `enable_prompt_embeds`, a mapping may
        have `prompt_embeds` instead: an array or tensor [tokens, hidden] of what `transformers` calls `inputs_embeds`,
        or a file's bytes.
        Prompts with the smallest `priority` go first. `use_tqdm` may be a factory of the progress bar. With
        `enable_lora`, `lora_request` is one adapter for all prompts, or a list with one for each.
        `tokenization_kwargs` is vLLM's, and must be None.
        """
        _refuse_others(tokenization_kwargs=tokenization_kwargs)
        listed = list_prompts(prompts)
        adapters = self._load_adapters(lora_request, len(listed))
        prompts_with_terms = self._with_terms(listed, sampling_params, priority)
        preparing = (partial(prepare_prompt, self.preparer, *each) for each in prompts_with_terms)
        return self._run_all(preparing, adapters, ListedItems("prompts", len(listed)), use_tqdm)

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
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        chat_template: None = None,
        tokenization_kwargs: None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, in OpenAI's format.

        Pictures are given as `image_url`, or as `image_pil` with a PIL image, a numpy array or a torch tensor; with
        `enable_mm_embeds` also their embeddings as `image_embeds`: an array, a tensor or a file's bytes. Films are
        given as `video_url`, or as `video` with a file's bytes or an array of frames; sounds as `audio_url`, or as
        `audio` with a file's bytes, samples, or a pair of samples and sampling rate. With `continue_final_message` the
        model continues the last message; with `add_generation_prompt` false nothing is added after it. `tools` are
        shown to the model; its calls of them are returned as text, as in vLLM. `chat_template_kwargs` are variables of
        the chat template; `lora_request` is that of `generate`. The last two are vLLM's, and must be None.
        """
        _refuse_others(chat_template=chat_template, tokenization_kwargs=tokenization_kwargs)
        conversations: Sequence[Any] = messages if are_conversations(messages) else [messages]
        adapters = self._load_adapters(lora_request, len(conversations))
        end = choose_end(add_generation_prompt, continue_final_message)

        def prepare(conversation: object, params: SamplingParams, place: int) -> PreparedRequest:
            read = read_messages(conversation, end, chat_template_kwargs)
            return self.preparer.prepare_chat(read, params, mm_processor_kwargs, priority=place, tools=tools or ())

        prompts_with_terms = self._with_terms(conversations, sampling_params, priority)
        items = ListedItems(
            "messages", len(conversations), shared=("mm_processor_kwargs", "tools", "chat_template_kwargs")
        )
        return self._run_all((partial(prepare, *each) for each in prompts_with_terms), adapters, items, use_tqdm)

    def embed(
        self,
        prompts: str | Mapping[str, Any] | Sequence[Any],
        *,
        use_tqdm: bool | MakeBar = True,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        tokenization_kwargs: None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return an embedding vector for each prompt; prompts have the same forms as in `generate`.

        The vector is the hidden state after the last token, normalized to length 1 unless `pooling_params` say
        otherwise. Vectors of similar meaning are close if the model was trained for it. `tokenization_kwargs` is
        vLLM's, and must be None.
        """
        _refuse_others(tokenization_kwargs=tokenization_kwargs)
        params = PoolingParams() if pooling_params is None else pooling_params
        if not isinstance(params, PoolingParams):
            raise InvalidArgumentError("pooling_params", f"must be PoolingParams, not {type(params).__name__}")
        check_dimensions(params.dimensions, self.preparer.hidden_size)
        listed = list_prompts(prompts)
        adapters = self._load_adapters(lora_request, len(listed))

        def prepare(prompt: Prompt) -> PreparedRequest:
            return prepare_prompt(self.preparer, prompt, PARAMS_OF_VECTORS, 0, add_eos=True).as_vector()

        items = ListedItems("prompts", len(listed))
        with self._running((partial(prepare, each) for each in listed), adapters, items, use_tqdm) as running:
            return running.finish_vectors(params)

    def get_metrics(self) -> list[Metric]:
        """Return what was counted since this was created, and what is held now."""
        return list_metrics(self.engine.read_totals())

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters that are used if none are given: the checkpoint's (`generation_config`)."""
        return SamplingParams(**self.preparer.sampling_defaults)

    def get_tokenizer(self) -> PublicTokenizer:
        """Return the tokenizer, to render a chat's prompt or to count tokens."""
        return PublicTokenizer(self.preparer.tokenizer, self.preparer.template)

    def _with_terms(
        self,
        prompts: Sequence[Any],
        params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
    ) -> list[tuple[Any, SamplingParams, int]]:
        prompts_with_terms = zip_with_terms(
            prompts, self.get_default_sampling_params() if params is None else params, priority
        )
        return [(prompt, self._seeded(own), place) for prompt, own, place in prompts_with_terms]

    def _seeded(self, params: SamplingParams) -> SamplingParams:
        if self._seeds is None or params.seed is not None:
            return params
        return replace(params, seed=self._seeds.getrandbits(63))

    def _load_adapters(
        self, requests: LoRARequest | Sequence[LoRARequest | None] | None, num_prompts: int
    ) -> list[Adapter | None]:
        """Return the adapter of each prompt. Each is loaded once, even if its folder changes later."""
        of_each = list_lora_requests(requests, num_prompts)
        for each in of_each:
            if each is not None and each not in self._adapters:
                self._adapters[each] = self.engine.load_adapter(each.lora_name, Path(each.lora_path))
        return [None if each is None else self._adapters[each] for each in of_each]

    def _run_all(
        self,
        preparing: Iterable[Callable[[], PreparedRequest]],
        adapters: Iterable[Adapter | None],
        items: ListedItems,
        use_tqdm: bool | MakeBar,
    ) -> list[RequestOutput]:
        with self._running(preparing, adapters, items, use_tqdm) as running:
            return running.finish()

    @contextmanager
    def _running(
        self,
        preparing: Iterable[Callable[[], PreparedRequest]],
        adapters: Iterable[Adapter | None],
        items: ListedItems,
        use_tqdm: bool | MakeBar,
    ) -> Iterator[RunningRequests]:
        """Submit each request as soon as it is prepared, so that the engine runs while later ones are prepared."""
        engine = self.engine  # may raise, so before a bar is shown
        bar = open_bar(use_tqdm, items.number)
        with bar or nullcontext(), closing(RunningRequests(engine, self.preparer.tokenizer, items, bar)) as running:
            for prepare, adapter in zip(preparing, adapters, strict=True):
                running.submit(prepare, adapter)
                running.process_arrived()
            yield running


def _refuse_others(**arguments: object) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise UnsupportedFieldError(name, "is not supported")


def _close(preparer: RequestPreparer, engine: InProcessEngine, process: int) -> None:
    if os.getpid() != process:  # forked: the engine is the parent's
        return
    preparer.close()
    engine.close()
