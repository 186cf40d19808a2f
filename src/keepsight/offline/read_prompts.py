"""Parses the arguments of `LLM.generate` and `LLM.chat`: prompts in any of vLLM's forms, and each one's parameters."""

import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

from keepsight.errors import InvalidArgumentError, UnsupportedFieldError
from keepsight.frontend.intake.take_film import are_films
from keepsight.frontend.intake.take_sound import are_sounds
from keepsight.frontend.prepare_request import RequestPreparer
from keepsight.frontend.prepared_request import PreparedRequest
from keepsight.frontend.prompt.media_of_prompt import NO_MEDIA, UuidsOfPrompt
from keepsight.lora import LoRARequest
from keepsight.media import KINDS, Kind
from keepsight.sampling_params import SamplingParams

Prompt = str | list[int] | Mapping[str, Any]
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


def list_prompts(prompts: str | Mapping[str, Any] | Sequence[Any]) -> list[Prompt]:
    """Return the prompts as a list; as in vLLM, a list of integers is one prompt."""
    if isinstance(prompts, str | Mapping) or (_are_token_ids(prompts) and prompts):
        return [prompts]
    kinds = "a string, token ids, or a mapping such as {'prompt': ...}"
    if not isinstance(prompts, Sequence):
        raise InvalidArgumentError("prompts", f"must be {kinds}, or a list of these")
    for index, each in enumerate(prompts):
        if not isinstance(each, str | Mapping) and not _are_token_ids(each):
            raise InvalidArgumentError(f"prompts[{index}]", f"must be {kinds}")
    return list(prompts)


def _are_token_ids(prompt: object) -> TypeGuard[list[int]]:
    """Check the first element only; the rest is validated when the ids are read."""
    return isinstance(prompt, list | tuple) and (not prompt or isinstance(prompt[0], numbers.Integral))


def are_conversations(messages: object) -> bool:
    """Return whether these are several conversations. Invalid input counts as one, whose parser rejects it.

    An empty list is an empty batch, as it is for prompts.
    """
    return isinstance(messages, list | tuple) and not (messages and isinstance(messages[0], Mapping))


def zip_with_terms(
    prompts: Sequence[Any],
    params: SamplingParams | Sequence[SamplingParams],
    priority: Sequence[int] | None,
) -> list[tuple[Any, SamplingParams, int]]:
    if priority is not None and (not isinstance(priority, list | tuple) or len(priority) != len(prompts)):
        raise InvalidArgumentError("priority", f"must be a list of {len(prompts)} integers, one for each prompt")
    places = [0] * len(prompts) if priority is None else [_without_numpy(each) for each in priority]
    return list(zip(prompts, _params_for_each(params, len(prompts)), places, strict=True))


def _without_numpy(number: int) -> int:
    """Return numpy's integers as Python's, and anything else as it is, to be validated with the prompt."""
    return int(number) if isinstance(number, numbers.Integral) and not isinstance(number, bool) else number


def _params_for_each(params: SamplingParams | Sequence[SamplingParams], num_prompts: int) -> Sequence[SamplingParams]:
    """Return copies, as the caller may change its own objects while these are in use."""
    if isinstance(params, SamplingParams):
        return [replace(params)] * num_prompts
    if not isinstance(params, Sequence) or not all(isinstance(each, SamplingParams) for each in params):
        raise InvalidArgumentError("sampling_params", "must be SamplingParams, or a list of them")
    if len(params) != num_prompts:
        raise InvalidArgumentError(
            "sampling_params", f"must have one for each of {num_prompts} prompts, not {len(params)}"
        )
    return [replace(each) for each in params]


def list_lora_requests(requested: object, num_prompts: int) -> list[LoRARequest | None]:
    """Return an adapter for each prompt, given one for all or one for each."""
    of_each = requested if isinstance(requested, list | tuple) else [requested] * num_prompts
    if len(of_each) != num_prompts or not all(isinstance(each, LoRARequest | None) for each in of_each):
        raise InvalidArgumentError("lora_request", f"must be a LoRARequest, or a list of {num_prompts}")
    return list(of_each)


def prepare_prompt(
    preparer: RequestPreparer, prompt: Prompt, params: SamplingParams, priority: int, *, add_eos: bool = False
) -> PreparedRequest:
    if isinstance(prompt, str):
        return preparer.prepare_text(prompt, NO_MEDIA, params, priority=priority, add_eos=add_eos)
    if not isinstance(prompt, Mapping):
        return preparer.prepare_tokens(prompt, params, priority=priority)
    _check_fields(prompt)
    if "prompt_embeds" in prompt:
        return _prepare_embeds(preparer, prompt, params, priority)
    uuids = _uuids_of(prompt)
    media = _media_of(prompt, uuids)
    overrides, salt = prompt.get("mm_processor_kwargs"), prompt.get("cache_salt")
    if "prompt_token_ids" not in prompt:
        terms = (params, overrides, salt, priority, uuids)
        return preparer.prepare_text(_text_of(prompt), media, *terms, add_eos=add_eos)
    named = {"multi_modal_data": bool(media) or any(uuids.values()), "mm_processor_kwargs": overrides is not None}
    for field, is_given in named.items():
        if is_given:
            raise UnsupportedFieldError(field, "needs the prompt as text, not as token ids")
    text = None if prompt.get("prompt") is None else _text_of(prompt)
    return replace(preparer.prepare_tokens(prompt["prompt_token_ids"], params, salt, priority), text=text)


def _text_of(prompt: Mapping[str, Any]) -> str:
    text = prompt.get("prompt")
    if not isinstance(text, str):
        raise InvalidArgumentError("prompt", f"must be a string, not {text!r}")
    return text


def _check_fields(prompt: Mapping[str, Any]) -> None:
    for name in prompt:
        if name not in PROMPT_FIELDS:
            raise UnsupportedFieldError(
                name, f"is not a field of a prompt; known are {', '.join(sorted(PROMPT_FIELDS))}"
            )


def _prepare_embeds(
    preparer: RequestPreparer, prompt: Mapping[str, Any], params: SamplingParams, priority: int
) -> PreparedRequest:
    if others := prompt.keys() - {"prompt_embeds", "cache_salt"}:
        raise InvalidArgumentError(min(others), "must not be given together with prompt_embeds")
    embeds = {"prompt_embeds": prompt["prompt_embeds"]}
    [prepared] = preparer.prepare_embeds(embeds, params, prompt.get("cache_salt"), priority)
    return prepared


def _media_of(prompt: Mapping[str, Any], uuids: UuidsOfPrompt) -> dict[Kind, Sequence[object]]:
    """Return the media by kind. A bare None stands for one that its uuid names, or without uuids for none."""
    read = {
        kind: given if _IS_LIST[kind](given) else [given]
        for kind, given in _read_by_kind(prompt, "multi_modal_data").items()
        if given is not None or uuids.get(kind)
    }
    return {kind: several for kind, several in read.items() if several}


_IS_LIST: Mapping[Kind, Callable[[object], bool]] = {
    "image": lambda given: isinstance(given, list | tuple),
    "video": are_films,
    "audio": are_sounds,
}


def _uuids_of(prompt: Mapping[str, Any]) -> dict[Kind, Sequence[object] | None]:
    given = _read_by_kind(prompt, "multi_modal_uuids")
    return {kind: each if each is None or isinstance(each, list | tuple) else [each] for kind, each in given.items()}


def _read_by_kind(prompt: Mapping[str, Any], field: str) -> dict[Kind, Any]:
    by_modality = prompt.get(field) or {}
    if not isinstance(by_modality, Mapping):
        raise InvalidArgumentError(field, f"must be a mapping such as {{'image': [...]}}, not {by_modality!r}")
    for modality in by_modality:
        if modality not in KINDS:
            raise UnsupportedFieldError(f"{field}.{modality}", f"only {', '.join(KINDS)} are supported")
    return {kind: by_modality[kind] for kind in KINDS if kind in by_modality}
