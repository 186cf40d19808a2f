"""An engine's decisions without an engine: a scheduler whose steps are not computed, but complete at once.

Results are fabricated, and embeddings and pixels are available as soon as they are requested, so all the time measured
is the scheduler's (and that of three list comprehensions).
"""

import hashlib
import random
from collections.abc import Sequence

from keepsight.engine_config import EncoderCacheConfig, EngineConfig, KvCacheConfig, SchedulerConfig
from keepsight.media import Geometry, MediaItem, TokenSpan
from keepsight.requests import EngineRequest, RequestFailed
from keepsight.sampling_params import SamplingParams
from keepsight.scheduling.scheduler import Scheduler
from keepsight.scheduling.step_plan import Computed, SampledToken, Slice, StepPlan, StepResult

BLOCK_SIZE, VOCAB_SIZE = 16, 8192
TOKEN = SampledToken(7)
END_IDS = frozenset({1})


def media_hash(name: int | str) -> str:
    return hashlib.sha256(str(name).encode()).hexdigest()


def make_request(
    name: str, num_tokens: int, pictures: Sequence[str], num_answer_tokens: int | None, tokens_per_picture: int = 1
) -> EngineRequest:
    """Make a request with pictures at equal distances from its start; `num_answer_tokens` None: an endless answer."""
    rng = random.Random(name)
    distance = num_tokens // max(1, len(pictures))
    spans = [TokenSpan(index * distance, tokens_per_picture) for index in range(len(pictures))]
    return EngineRequest(
        request_id=name,
        token_ids=tuple(rng.choices(range(VOCAB_SIZE), k=num_tokens)),
        media=tuple(MediaItem(each, span, Geometry(1024, 1024)) for each, span in zip(pictures, spans, strict=True)),
        sampling_params=SamplingParams(temperature=0, max_tokens=num_answer_tokens, ignore_eos=True),
    )


def make_scheduler(num_embeddings: int, num_blocks: int, max_seqs: int, max_model_len: int) -> Scheduler:
    """Make a scheduler for pictures of one token, so that it holds `num_embeddings` pictures."""
    config = EngineConfig(
        scheduler=SchedulerConfig(
            max_num_batched_tokens=max_model_len + max_seqs,
            max_num_seqs=max_seqs,
            max_model_len=max_model_len,
            max_num_encoder_input_tokens=max_model_len,
            max_prompt_tokens_beside_streams=None,
            tokens_per_item=1,
        ),
        kv_cache=KvCacheConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE),
        encoder_cache=EncoderCacheConfig(max_bytes=num_embeddings, bytes_per_embedding=1),
    )
    return Scheduler(config, END_IDS)


def answer(scheduler: Scheduler, requests: Sequence[EngineRequest]) -> int:
    """Run all requests at once to their ends.  Return the number of steps."""
    for request in requests:
        refusal = scheduler.add(request)
        assert refusal is None, refusal
    num_steps = 0
    while scheduler.lineup:
        step(scheduler)
        num_steps += 1
    return num_steps


def step(scheduler: Scheduler) -> None:
    plan = scheduler.schedule()
    for needed in scheduler.media.pixels.take_needed():
        for each in needed.media_hashes:
            scheduler.media_arrived(each)
    outputs = scheduler.update(compute(plan))
    assert not any(isinstance(output, RequestFailed) for output in outputs)
    scheduler.holdings.take_changes()
    scheduler.take_begun()


def compute(plan: StepPlan) -> StepResult:
    encoded = [encoding.encoder_key for encoding in plan.encode]
    return StepResult([_done(piece) for piece in (*plan.beside, *plan.now)], encoded)


def _done(piece: Slice) -> Computed:
    return Computed(piece.sequence_id, piece.end, [TOKEN] if piece.samples else [])
