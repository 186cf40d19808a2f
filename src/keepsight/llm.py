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
        self._adapters = dict[LoRARequest, Adapter]()
        self._seeds = None if seed is None else Random(seed)
        self.preparer = RequestPreparer.from_config(self.config)
        self._engine, self._process = open_engine(self.config, self.preparer), os.getpid()
        # The engine's threads hold nothing of this object, so that forgetting it frees them and the model.
        weakref.finalize(self, _close, self.preparer, self._engine, self._process)
        # Last: whatever interrupts it, there is one who ends it.
        self._engine.start()

    @property
    def engine(self) -> InProcessEngine:
        """A forked process has none of its threads: whoever asked it there would wait for ever."""
        if os.getpid() != self._process:
            raise OtherProcessError(self._process)
        return self._engine

    def close(self) -> None:
        """Ends the engine and frees its memory.  Calls that still run on other threads fail."""
        # Not by the finalizer, which works once: to it is left what is not done when this is interrupted.
        _close(self.preparer, self._engine, self._process)

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
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        tokenization_kwargs: None = None,
    ) -> list[RequestOutput]:
        """A prompt is a text, token ids, or a mapping: `prompt` or `prompt_token_ids`; media go with a text.

        That is `multi_modal_data={"image": [...], "video": [...], "audio": [...]}`; `multi_modal_uuids`, of the same
        form, may name it: what was sent under a uuid once may be None later.  With `enable_prompt_embeds` a mapping
        may have `prompt_embeds` instead, an array or a tensor [tokens, hidden] of what `transformers` calls
        `inputs_embeds`, or a file's bytes.
        Those with the smallest `priority` go first.  `use_tqdm` may be what makes the bar.  With `enable_lora` a
        `lora_request` is the adapter of all prompts, or a list of one for each.  The last is vLLM's, and must be None.
        """
        _refuse_others(tokenization_kwargs=tokenization_kwargs)
        listed = list_prompts(prompts)
        adapters = self._load_adapters(lora_request, len(listed))
        asked = self._with_terms(listed, sampling_params, priority)
        preparing = (partial(prepare_prompt, self.preparer, *each) for each in asked)
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
        """One conversation or several, in OpenAI's form; pictures as `image_url`.

        Or as `image_pil` with a PIL image, a numpy array or a torch tensor; with `enable_mm_embeds` its embeddings as
        `image_embeds`, an array, a tensor or a file's bytes.  Films as `video_url`, or `video` with a file's bytes or
        an array of frames; sounds as `audio_url`, or `audio` with a file's bytes, samples, or a pair of these and how
        many are a second.  With `continue_final_message` the model goes on with the last message; with
        `add_generation_prompt` false nothing follows it.  `tools` are told to the model; what it makes of them is text,
        as in vLLM.  `chat_template_kwargs` are variables of the chat template; `lora_request` is that of `generate`.
        The last two are vLLM's, and must be None.
        """
        _refuse_others(chat_template=chat_template, tokenization_kwargs=tokenization_kwargs)
        conversations: Sequence[Any] = messages if are_conversations(messages) else [messages]
        adapters = self._load_adapters(lora_request, len(conversations))
        end = choose_end(add_generation_prompt, continue_final_message)

        def prepare(conversation: object, params: SamplingParams, place: int) -> PreparedRequest:
            read = read_messages(conversation, end, chat_template_kwargs)
            return self.preparer.prepare_chat(read, params, mm_processor_kwargs, priority=place, tools=tools or ())

        asked = self._with_terms(conversations, sampling_params, priority)
        items = ListedItems(
            "messages", len(conversations), shared=("mm_processor_kwargs", "tools", "chat_template_kwargs")
        )
        return self._run_all((partial(prepare, *each) for each in asked), adapters, items, use_tqdm)

    def embed(
        self,
        prompts: str | Mapping[str, Any] | Sequence[Any],
        *,
        use_tqdm: bool | MakeBar = True,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        tokenization_kwargs: None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Of each prompt, of the same forms as `generate` takes, the vector that the model makes of it.

        That is the hidden state after its last token, of length 1 unless `pooling_params` say otherwise: of models that
        were trained for it, near for what means the same.  The last is vLLM's, and must be None.
        """
        _refuse_others(tokenization_kwargs=tokenization_kwargs)
        params = PoolingParams() if pooling_params is None else pooling_params
        if not isinstance(params, PoolingParams):
            raise InvalidArgumentError("pooling_params", f"must be PoolingParams, not {type(params).__name__}")
        check_dimensions(params.dimensions, self.preparer.hidden_size)
        listed = list_prompts(prompts)
        adapters = self._load_adapters(lora_request, len(listed))

        def prepare(prompt: Prompt) -> PreparedRequest:
            return prepare_prompt(self.preparer, prompt, PARAMS_OF_VECTORS, 0).as_vector()

        items = ListedItems("prompts", len(listed))
        with self._running((partial(prepare, each) for each in listed), adapters, items, use_tqdm) as running:
            return running.finish_vectors(params)

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
        asked = zip_with_terms(prompts, self.get_default_sampling_params() if params is None else params, priority)
        return [(prompt, self._seeded(own), place) for prompt, own, place in asked]

    def _seeded(self, params: SamplingParams) -> SamplingParams:
        if self._seeds is None or params.seed is not None:
            return params
        return replace(params, seed=self._seeds.getrandbits(63))

    def _load_adapters(
        self, asked: LoRARequest | Sequence[LoRARequest | None] | None, num_prompts: int
    ) -> list[Adapter | None]:
        """Of each prompt; each adapter once, whatever becomes of its folder."""
        of_each = list_lora_requests(asked, num_prompts)
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
        """Each is computed from when it is prepared, beside the preparing of those after it."""
        engine = self.engine  # before a bar is shown
        bar = open_bar(use_tqdm, items.number)
        with bar or nullcontext(), closing(RunningRequests(engine, self.preparer.tokenizer, items, bar)) as running:
            for prepare, adapter in zip(preparing, adapters, strict=True):
                running.submit(prepare, adapter)
                running.read_what_came()
            yield running


def _refuse_others(**asked: object) -> None:
    for name, value in asked.items():
        if value is not None:
            raise UnsupportedFieldError(name, "is not supported")


def _close(preparer: RequestPreparer, engine: InProcessEngine, process: int) -> None:
    if os.getpid() != process:  # forked: what is to be ended is its parent's
        return
    preparer.close()
    engine.close()
