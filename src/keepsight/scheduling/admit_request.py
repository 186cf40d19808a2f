"""Turns an arriving request into the sequences that the scheduler keeps, or says why it can never run."""

from collections.abc import Iterator
from copy import copy
from itertools import accumulate

from keepsight.engine_config import EngineConfig, SchedulerConfig
from keepsight.requests import EngineRequest
from keepsight.scheduling.block_hash import BlockHasher
from keepsight.scheduling.encoder_cache_manager import encoder_key
from keepsight.scheduling.guess_tokens import make_guesser
from keepsight.scheduling.request_state import Grammar, RequestState


def refusal_reason(request: EngineRequest, config: SchedulerConfig) -> str | None:
    """Return which limit the request exceeds, with the numbers; None if it can run."""
    num_tokens = len(request.token_ids)
    if num_tokens >= config.max_model_len:
        return f"the prompt has {num_tokens} tokens; with one token of answer, at most {config.max_model_len} fit"
    return None


def make_states(
    request: EngineRequest,
    grammar: Grammar | None,
    numbers: Iterator[int],
    config: EngineConfig,
    end_ids: frozenset[int],
) -> list[RequestState]:
    """Make one state for each choice; `numbers` yields numbers that no other sequence has."""
    params, num_tokens = request.sampling_params, len(request.token_ids)
    max_length = config.scheduler.max_model_len
    if params.max_tokens is not None:
        max_length = min(max_length, num_tokens + params.max_tokens)
    hasher, guesser = BlockHasher(request, config.kv_cache.block_size), make_guesser(request)
    encoder_keys = _encoder_keys(request, is_shared=config.encoder_cache.is_shared)
    pictures = tuple(accumulate(not item.is_further_part for item in request.media))
    return [
        RequestState(
            request=request,
            choice=choice,
            sequence_id=(request.request_id, number),
            order=(request.priority, number),
            max_length=max_length,
            end_ids=params.ids_that_end(end_ids),
            hasher=hasher.fork(),
            encoder_keys=encoder_keys,
            pictures=pictures,
            num_tokens=num_tokens,
            guesser=copy(guesser),
            grammar=grammar,
        )
        for choice, number in zip(range(params.n), numbers, strict=False)
    ]


def _encoder_keys(request: EngineRequest, *, is_shared: bool) -> tuple[str, ...]:
    """Return the encoder key of each item.

    Where requests do not share embeddings, a request's choices still do, and so do its repeated pictures.
    """
    suffix = "" if is_shared else f"@{request.request_id}"
    return tuple(encoder_key(item, request.adapter) + suffix for item in request.media)
