"""A scheduler over the fake runner, with messages delivered by hand: used by all scheduler tests."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from keepsight.engine_config import EncoderCacheConfig, EngineConfig, KvCacheConfig, SchedulerConfig
from keepsight.media import Geometry, MediaItem, TokenSpan
from keepsight.requests import Adapter, EngineRequest, MediaHeld, MediaNeeded, RequestFailed, TokenOutput
from keepsight.sampling_params import SamplingParams
from keepsight.scheduling.block_hash import BlockHasher, extra_keys_by_block
from keepsight.scheduling.encoder_cache_manager import EncoderUser, encoder_key
from keepsight.scheduling.request_state import Grammar
from keepsight.scheduling.scheduler import Scheduler
from keepsight.scheduling.step_plan import Encoding, KeptStretch, StepPlan
from keepsight.scheduling.stretch_loads import StretchLoad
from keepsight.testing import FakeRunner, expected_answer, expected_logprobs, expected_vector, pixels_like
from keepsight.tiers.tier import StoredArray

END_IDS = frozenset({7})
TOKENS_PER_PICTURE = 6


def make_config(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    caches_prefixes: bool = True,
    max_prompt_ends: int = 8,
    num_pictures: int = 8,
    shares_embeddings: bool = True,
    has_tiers: bool = False,
    blocks_per_stretch: int = 0,
    num_state_slots: int = 0,
    **scheduler: Any,
) -> EngineConfig:
    settings: dict[str, Any] = {
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
        "max_model_len": num_blocks * block_size,
        "max_num_encoder_input_tokens": 4 * TOKENS_PER_PICTURE,
        "max_prompt_tokens_beside_streams": None,
        "tokens_per_item": TOKENS_PER_PICTURE,
        **scheduler,
    }
    return EngineConfig(
        scheduler=SchedulerConfig(**settings),
        kv_cache=KvCacheConfig(
            num_blocks=num_blocks,
            block_size=block_size,
            enable_prefix_caching=caches_prefixes,
            max_prompt_ends=max_prompt_ends,
            blocks_per_stretch=blocks_per_stretch,
            num_state_slots=num_state_slots,
        ),
        encoder_cache=EncoderCacheConfig(
            max_bytes=num_pictures * TOKENS_PER_PICTURE * 8,
            bytes_per_embedding=8,
            is_shared=shares_embeddings,
            has_tiers=has_tiers,
        ),
    )


def make_request(request_id: str, *parts: int | str, **options: Any) -> EngineRequest:
    """`parts`: a number is that many text tokens; a string is a picture with that hash, with a leading "+" a crop."""
    token_ids: list[int] = []
    media = []
    for part in parts:
        if isinstance(part, int):
            token_ids += [20 + (len(token_ids) + place) % 13 for place in range(part)]
        else:
            span, is_further_part = TokenSpan(len(token_ids), TOKENS_PER_PICTURE), part.startswith("+")
            media.append(MediaItem(part, span, Geometry(4, 4), is_further_part=is_further_part))
            token_ids += [1] * TOKENS_PER_PICTURE
    names = ("priority", "cache_salt", "adapter", "coming_media", "unsent_media", "pins", "wants_vector", "predicted")
    outside = {name: options.pop(name) for name in names if name in options}
    params = SamplingParams(**{"temperature": 0, "max_tokens": 5, **options})
    return EngineRequest(request_id, tuple(token_ids), tuple(media), params, **outside)


def with_text(request: EngineRequest, token_ids: list[int]) -> EngineRequest:
    """Return the request with its text tokens replaced by `token_ids`, in order; its pictures stay."""
    source = iter(token_ids)
    inside = [any(position in item.span for item in request.media) for position in range(len(request.token_ids))]
    mixed = [1 if is_media else next(source) for is_media in inside]
    return replace(request, token_ids=tuple(mixed))


@dataclass
class Drive:
    config: EngineConfig
    is_done: Callable[[], bool] | None = None
    # Pixels are delivered when asked for, unless a test delivers them itself.
    delivers: bool = True
    tokens: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    finished: dict[tuple[str, int], str] = field(default_factory=dict)
    failed: dict[str, RequestFailed] = field(default_factory=dict)
    cached: dict[tuple[str, int], int] = field(default_factory=dict)
    # Pixels the engine asked for, and pixels that were promised: (request, media hash).
    needed: list[tuple[str, str]] = field(default_factory=list)
    promised: list[tuple[str, str]] = field(default_factory=list)
    # Pixels that a frontend still has: all that it ever sent, unless a test drops some.
    kept_pixels: set[str] = field(default_factory=set)
    # Embeddings that were held for sequences which could not get them again, after the last plan.
    protected: set[tuple[EncoderUser, str]] = field(default_factory=set)
    # Media of which a frontend believes the engine holds something, according to its hints.
    believed: set[str] = field(default_factory=set)
    requests: dict[str, EngineRequest] = field(default_factory=dict)
    aborted: set[tuple[str, int]] = field(default_factory=set)
    # Embeddings in a tier, by encoder key, and those asked for; answered at once if the drive `loads`.
    tier: dict[str, StoredArray] = field(default_factory=dict)
    loads: bool = True
    loading: list[str] = field(default_factory=list)
    # Keys and values in a tier, by hash; and how many stretches of each load were answered.
    stretches: dict[bytes, StoredArray] = field(default_factory=dict)
    stretch_loads: dict[StretchLoad, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.config, END_IDS)
        kv_cache = self.config.kv_cache
        self.runner = FakeRunner(
            kv_cache.num_blocks,
            kv_cache.block_size,
            self.is_done,
            self.keep,
            keep_stretch=self.keep_stretch,
            cuts_items=self.config.scheduler.cuts_items,
            sees_items_whole=self.config.scheduler.sees_items_whole,
            num_state_slots=kv_cache.num_state_slots,
        )

    def keep(self, encoding: Encoding, _seconds: float, make_array: Callable[[], StoredArray]) -> None:
        self.tier[encoding.encoder_key] = make_array()

    def keep_stretch(self, kept: KeptStretch, make_array: Callable[[], StoredArray]) -> None:
        self.stretches[kept.stretch] = make_array()

    def load_stretches(self, load: StretchLoad, most: int, *, is_late: bool = False) -> None:
        """Deliver up to `most` further stretches of the load, as far as the tier has them."""
        first = self.stretch_loads[load]
        found = itertools.takewhile(self.stretches.__contains__, load.hashes[first : first + most])
        arrays = {} if is_late else {stretch: self.stretches[stretch] for stretch in found}
        for stretch, array in arrays.items():
            self.runner.hold_stretch(stretch, array)
        self.stretch_loads[load] += len(arrays)
        is_last = len(arrays) < most or self.stretch_loads[load] == len(load.hashes)
        if is_last:
            del self.stretch_loads[load]
        self.scheduler.stretches_loaded(load, range(first, first + len(arrays)), is_last=is_last)

    def end_load(self, key: str, *, is_late: bool = False) -> bool:
        array = None if is_late else self.tier.get(key)
        is_wanted = self.scheduler.embeddings_loaded(key, is_found=array is not None)
        if is_wanted and array is not None:
            self.runner.hold_embeddings(key, array)
        return is_wanted

    def add(self, request: EngineRequest, grammar: Grammar | None = None) -> RequestFailed | None:
        refusal = self.scheduler.add(request, grammar)
        if refusal is None:
            self._set_aside(request.request_id)
            self.requests[request.request_id] = request
            self.promised += [(request.request_id, media_hash) for media_hash in request.coming_media]
        return refusal

    def abort(self, request_id: str, only: int | None = None) -> None:
        self.scheduler.abort(request_id, only)
        num_choices = self.requests[request_id].sampling_params.n
        self.aborted |= {(request_id, each) for each in range(num_choices) if only in (None, each)}

    def _set_aside(self, request_id: str) -> None:
        """Rename everything known of the previous request with this id to a name no other request uses."""
        if request_id not in self.requests:
            return
        before = f"{request_id}, before {len(self.requests)}"
        self.requests[before] = replace(self.requests.pop(request_id), request_id=before)
        for choice in range(self.requests[before].sampling_params.n):
            for by_sequence in (self.tokens, self.finished, self.cached):
                _rename(by_sequence, (request_id, choice), (before, choice))
        _rename(self.failed, request_id, before)
        self.aborted = {(before if name == request_id else name, choice) for name, choice in self.aborted}
        for asked in (self.needed, self.promised):
            asked[:] = [(before if name == request_id else name, media_hash) for name, media_hash in asked]

    def is_live(self, request_id: str) -> bool:
        return request_id in self.scheduler._choices

    def answer(self, request_id: str, media_hash: str) -> None:
        """Answer a request for pixels as a frontend does: the request fails if it neither has nor can make them."""
        can_be_sent = media_hash not in self.requests[request_id].unsent_media or media_hash in self.kept_pixels
        if can_be_sent:
            self.deliver(media_hash)
        elif self.is_live(request_id):
            self.abort(request_id)

    def deliver(self, media_hash: str) -> bool:
        self.kept_pixels.add(media_hash)
        is_wanted = self.scheduler.media_arrived(media_hash)
        if is_wanted:
            self.runner.hold_pixels(media_hash, pixels_like(media_hash))
        return is_wanted

    def lose(self, *media_hashes: str) -> list[MediaNeeded]:
        """Report that handles which arrived together are stale."""
        self._ask_frontend()
        for media_hash in media_hashes:
            self.scheduler.media.pixels.lose(media_hash)
        asked = self.scheduler.media.take_needed()
        for needed in asked:
            assert needed.inline
            assert self.is_live(needed.request_id)
            assert set(needed.media_hashes) <= set(media_hashes)
            self.needed += [(needed.request_id, media_hash) for media_hash in needed.media_hashes]
        return asked

    def give_up(self, media_hash: str) -> list[str]:
        """Report pixels that could not be read, and drop the requests that wait for them, as the engine loop does."""
        self._ask_frontend()
        waiting = self.scheduler.media.pixels.give_up(media_hash)
        for request_id in waiting:
            self.abort(request_id)
        return waiting

    def step(self) -> StepPlan:
        if self.delivers:
            self._keep_promises()
        # Same order as in the engine's loop: what is asked for while planning is answered before the next plan.
        self._load()
        before = self._expect_protected()
        plan = self.scheduler.schedule()
        self._expect_no_needless_loss(before)
        self._expect_encoder_at_work(plan)
        self._expect_small_step(plan)
        self._expect_no_needless_pause(plan)
        self._expect_slots(plan)
        self._ask_for_stretches()
        self._ask_for_embeddings()
        asked = self._ask_frontend()
        result = self.runner.run(plan)
        for output in self.scheduler.update(result):
            self._note(output)
        # What was released while planning is looked at when the work beside ends, which wakes the loop.
        is_woken = self.runner.is_busy and (
            self.scheduler.media._has_awaited_changed or self.scheduler._turns.is_encoders
        )
        if plan.is_empty and result.is_empty and not (asked or self.loading or self.stretch_loads or is_woken):
            self._expect_rest()
        if self.delivers:
            self._answer(asked)
        self.scheduler.check_invariants()
        self._believe()
        return plan

    def _expect_protected(self) -> dict[str, int]:
        """Between plans nothing is lost to a sequence that could not get it again.

        Return the sizes of those protected embeddings that others may find, too, and so do not replace.
        """
        cache, held = self.scheduler.media.encoder_cache, self._held_protected()
        assert self.protected.intersection(cache.protections()) <= held.keys()
        return {key: size for (_, key), size in held.items() if cache.can_find(key)}

    def _held_protected(self) -> dict[tuple[EncoderUser, str], int]:
        """Return the size of what is protected and held, without what is never kept because it exceeds the cache."""
        cache = self.scheduler.media.encoder_cache
        ready = {(user, key): cache._entries[key] for user, key in cache.protections() if cache.is_ready(key)}
        return {each: entry.num_bytes for each, entry in ready.items() if not entry.is_oversized}

    def _expect_no_needless_loss(self, before: dict[str, int]) -> None:
        """Protected embeddings are evicted only if they leave others too little."""
        by_user = self._held_protected()
        held = {key: size for (_, key), size in by_user.items()}
        lost = {key: size for key, size in before.items() if not self.scheduler.media.encoder_cache.is_ready(key)}
        num_bytes = self.config.encoder_cache.max_bytes
        assert not lost or sum((lost | held).values()) > min(num_bytes // 2, num_bytes - TOKENS_PER_PICTURE * 8)
        self.protected = set(by_user)

    def _expect_encoder_at_work(self, plan: StepPlan) -> None:
        """Something is being encoded if anything could be, unless prompts have their turn."""
        encodings = self.scheduler.media.encodings
        is_prompts_turn = self.config.scheduler.takes_turns and (plan.now or plan.beside)
        assert encodings.are_given or is_prompts_turn or not encodings.are_waiting

    def _expect_small_step(self, plan: StepPlan) -> None:
        config, num_tokens = self.config.scheduler, sum(piece.length for piece in plan.now)
        assert num_tokens <= config.max_num_batched_tokens
        assert num_tokens <= config.guess_up_to or all(piece.guess is None for piece in plan.now)

    def _expect_no_needless_pause(self, plan: StepPlan) -> None:
        """Where all prompts join, one that has begun goes on, unless a step's tokens or the free pages are too few.

        In a rest smaller than a media item it may end before one, and a smaller piece is not tried where pages lack.
        """
        scheduler, config = self.scheduler, self.config.scheduler
        if config.max_prompt_tokens_beside_streams is not None or scheduler._turns.is_encoders:
            return
        num_tokens = len(plan.recall) + sum(piece.length for piece in plan.now if piece.guess is None)
        rest, num_free = config.max_num_batched_tokens - num_tokens, scheduler.kv_cache.pool.num_free
        planned = {piece.sequence_id for piece in plan.now}
        if rest >= max(1, config.tokens_at_once) and num_free * self.config.kv_cache.block_size >= rest:
            assert {each.sequence_id for each in scheduler.lineup.running} <= planned

    def _expect_slots(self, plan: StepPlan) -> None:
        """With recurrent layers each slice has its sequence's own slot, and those of the states that it keeps."""
        slices = (*plan.now, *plan.beside)
        slots = [piece.state_slot for piece in slices] + [each.slot for piece in slices for each in piece.kept_states]
        num_slots = self.config.kv_cache.num_state_slots
        assert set(slots) <= set(range(num_slots)) if num_slots else set(slots) <= {None}
        assert not num_slots or len(set(slots)) == len(slots)

    def _expect_rest(self) -> None:
        """The engine's loop would sleep now until a message arrives, so nothing may be left to plan or to ask for."""
        plan = self.scheduler.schedule()
        assert plan.is_empty
        assert not plan.copy_states
        assert not self.scheduler.media.take_needed()
        assert not self.scheduler.media.loads.take_wanted()
        assert not self.scheduler.stretches.take_wanted()

    def _ask_for_stretches(self) -> None:
        self.stretch_loads |= dict.fromkeys(self.scheduler.stretches.take_wanted(), 0)

    def _ask_for_embeddings(self) -> None:
        self.loading += [load.encoder_key for load in self.scheduler.media.loads.take_wanted()]

    def _load(self) -> None:
        self._ask_for_stretches()
        while self.loads and self.stretch_loads:
            self.load_stretches(next(iter(self.stretch_loads)), 2)
        self._ask_for_embeddings()
        while self.loads and self.loading:
            self.end_load(self.loading.pop(0))

    def _keep_promises(self) -> None:
        promised, self.promised = self.promised, []
        for request_id, media_hash in promised:
            if self.is_live(request_id):
                self.deliver(media_hash)

    def _ask_frontend(self) -> list[tuple[str, str]]:
        asked: list[tuple[str, str]] = []
        for needed in self.scheduler.media.take_needed():
            assert not needed.inline
            asked += [(needed.request_id, media_hash) for media_hash in needed.media_hashes]
        self.needed += asked
        return asked

    def _answer(self, asked: list[tuple[str, str]]) -> None:
        for request_id, media_hash in asked:
            if self.is_live(request_id):
                self.answer(request_id, media_hash)

    def _believe(self) -> None:
        for hint in self.scheduler.holdings.take_changes():
            hashes = set(hint.media_hashes)
            assert hashes, "a hint of nothing"
            assert len(hashes) == len(hint.media_hashes)
            if isinstance(hint, MediaHeld):
                assert not hashes & self.believed, "told twice"
                self.believed |= hashes
            else:
                assert hashes <= self.believed, "dropped before it was held"
                self.believed -= hashes

    def _note(self, output: TokenOutput | RequestFailed) -> None:
        if isinstance(output, RequestFailed):
            assert output.request_id not in self.failed
            self.failed[output.request_id] = output
            return
        choice = (output.request_id, output.choice)
        assert choice not in self.finished, "a token after the end"
        assert output.request_id not in self.failed, "a token after the failure"
        request, is_first = self.requests[output.request_id], choice not in self.tokens
        self._expect_prompt_told(request, output, is_first=is_first)
        assert not is_first or output.vector == (expected_vector(request) if request.wants_vector else None)
        self.tokens.setdefault(choice, []).append(output.token_id)
        self.cached[choice] = output.num_cached_tokens
        if output.finish_reason:
            self.finished[choice] = output.finish_reason

    def _expect_prompt_told(self, request: EngineRequest, output: TokenOutput, *, is_first: bool) -> None:
        """Logprobs cover all prompt tokens, cached or not; they are sent once, and only if asked for."""
        asked = request.sampling_params.prompt_logprobs is not None
        expected = tuple(expected_logprobs(request)) if asked and output.choice == 0 and is_first else None
        assert output.prompt_logprobs == expected, request.request_id

    def run(self, *requests: EngineRequest, max_steps: int = 1000) -> list[StepPlan]:
        """Step until all requests are answered. Return the plans that were not empty."""
        for request in requests:
            assert self.add(request) is None
        plans: list[StepPlan] = []
        for _ in range(max_steps):
            if not self.scheduler.lineup:
                return plans
            plan = self.step()
            if not plan.is_empty:
                plans.append(plan)
        raise AssertionError("no end in sight")

    def expect_right_answers(self) -> None:
        """Every answer so far equals the one of the request alone; a finished one equals all of it."""
        for (request_id, choice), token_ids in self.tokens.items():
            alone = expected_answer(self.requests[request_id], choice, END_IDS, self.config.scheduler.max_model_len)
            is_whole = (request_id, choice) in self.finished
            assert token_ids == (alone if is_whole else alone[: len(token_ids)]), request_id

    def found_media(self) -> set[str]:
        """Return the media of which a new request would find blocks or embeddings, looked up by their names."""
        pool, encoder_cache = self.scheduler.kv_cache.pool, self.scheduler.media.encoder_cache
        found = set[str]()
        for request in self.requests.values():
            if self.config.encoder_cache.is_shared:
                keys = {item.media_hash: encoder_key(item, request.adapter) for item in request.media}
                found |= {media_hash for media_hash, key in keys.items() if encoder_cache.can_find(key)}
            by_block = extra_keys_by_block(request, self.config.kv_cache.block_size)
            for choice in range(request.sampling_params.n):
                hasher = BlockHasher(request, self.config.kv_cache.block_size)
                hasher.extend(self.tokens.get((request.request_id, choice), ()))
                for index, block_hash in enumerate(hasher.hashes):
                    if pool.find(block_hash) is not None:
                        found |= {str(key[1]) for key in by_block.get(index, ()) if key[0] == "mm"}
        return found

    def expect_all_answered(self) -> None:
        self.run()
        assert not self.failed
        self.expect_right_answers()
        self.expect_nothing_left()

    def expect_nothing_left(self) -> None:
        self.step()
        while self.runner.is_busy:
            self.step()
        self.step()
        assert not self.scheduler.lineup
        assert self.runner.num_sequences == 0
        assert self.runner.num_held_pixels == 0
        assert self.runner.num_loaded == 0
        assert len(self.runner.ends) == len(self.scheduler.kv_cache.ends)
        kv_cache = self.scheduler.kv_cache
        assert kv_cache.pool.num_free == self.config.kv_cache.num_blocks
        assert not kv_cache.slots._live


def _rename(values: dict[Any, Any], name: object, new_name: object) -> None:
    if name in values:
        values[new_name] = values.pop(name)


def beside_drive(max_joining: int = 4) -> Drive:
    """Return a drive with one running stream; work beside it takes until `is_done` says otherwise."""
    drive = Drive(make_config(max_prompt_tokens_beside_streams=max_joining))
    drive.add(make_request("stream", 3, max_tokens=40, ignore_eos=True))
    drive.step()
    drive.is_done = lambda: False
    drive.runner.set_pace(drive.is_done)
    return drive


def lengths(plans: list[StepPlan]) -> list[list[int]]:
    return [[piece.length for piece in plan.now] for plan in plans]


def adapter(digest: str, *, changes_encoder: bool = False) -> Adapter:
    return Adapter("glasses", digest, changes_encoder)
