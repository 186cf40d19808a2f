"""However requests arrive, leave, fail or run short of room, every answer equals the one given without caches."""

import random
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from keepsight.requests import EngineRequest, PromptPin
from tests.scheduling.drive import Drive, adapter, make_config, make_request
from tests.scheduling.long_run import thorough

PICTURES = ("cat", "dog", "owl", "+elk")
FRAMES = tuple(f"frame {number}" for number in range(9))
PARTS = st.lists(st.one_of(st.integers(1, 9), st.sampled_from(PICTURES)), min_size=1, max_size=7)
# Parts of a film that other requests may share, between texts.
FILMS = st.tuples(st.integers(1, 9), st.integers(0, 5), st.integers(4, 9), st.integers(1, 9)).map(
    lambda drawn: [drawn[0], *FRAMES[drawn[1] : drawn[1] + drawn[2]], drawn[3]]
)


@st.composite
def configs(draw: st.DrawFn) -> Any:
    """Configurations from ample to the tightest that are allowed."""
    max_num_seqs = draw(st.integers(1, 6))
    block_size = draw(st.sampled_from([1, 2, 4, 8]))
    shares_embeddings = draw(st.booleans())
    num_positions = draw(st.sampled_from([60, 80, 160, 400]))
    caches_prefixes, cuts_items = draw(st.booleans()), draw(st.booleans())
    num_state_slots = draw(st.sampled_from([0, 0, 0, 1, 2, 3, 5, 9, 30]))
    return make_config(
        block_size=block_size,
        num_blocks=num_positions // block_size,
        max_model_len=num_positions // block_size * block_size,
        caches_prefixes=caches_prefixes,
        num_state_slots=num_state_slots,
        blocks_per_stretch=draw(st.integers(0, 3)) if caches_prefixes and not num_state_slots else 0,
        max_prompt_ends=draw(st.sampled_from([0, 1, 3, 20])),
        num_pictures=draw(st.sampled_from([0, 1, 2, 3, 4, 5, 20])),
        shares_embeddings=shares_embeddings,
        has_tiers=shares_embeddings and draw(st.booleans()),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw(st.integers(0 if cuts_items else 5, 65)),
        cuts_items=cuts_items,
        sees_items_whole=not cuts_items and draw(st.booleans()),
        max_num_encoder_input_tokens=6 * draw(st.integers(1, 4)),
        takes_turns=draw(st.booleans()),
        guess_up_to=0 if num_state_slots else draw(st.sampled_from([0, 3, 8, 40])),
        max_prompt_tokens_beside_streams=draw(st.sampled_from([None, 0, 1, 4, 16])),
    )


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(config=configs(), seed=st.integers(0, 2**32), pace=st.sampled_from([0.1, 0.5, 1.0]))
    def start(self, config: Any, seed: int, pace: float) -> None:
        chance = random.Random(seed)
        self.drive = Drive(config, is_done=lambda: chance.random() < pace, delivers=False, loads=False)
        self.num_requests = 0
        self.compiling: dict[str, Future[None]] = {}
        self.kept: set[str] = set()
        self.now = 0.0

    def _add(self, request: EngineRequest, *, awaits_grammar: bool = False) -> None:
        self.num_requests += 1
        longest = self.drive.config.scheduler.max_model_len
        grammar = Future[None]() if awaits_grammar else None
        refusal = self.drive.add(request, grammar)
        if grammar is not None:
            self.compiling[request.request_id] = grammar
        assert (refusal is not None) == (len(request.token_ids) >= longest)

    @rule(
        parts=st.one_of(PARTS, FILMS),
        max_tokens=st.integers(1, 24),
        n=st.integers(1, 3),
        priority=st.integers(-1, 1),
        cache_salt=st.sampled_from([None, "x", "y"]),
        glasses=st.sampled_from([None, adapter("1"), adapter("2"), adapter("2", changes_encoder=True)]),
        promised=st.sets(st.sampled_from(PICTURES + FRAMES)),
        unsent=st.one_of(st.just(set()), st.sets(st.sampled_from(PICTURES + FRAMES))),
        prompt_logprobs=st.sampled_from([None, None, 0]),
        wants_vector=st.sampled_from([False, False, True]),
        predicted=st.lists(st.integers(0, 6), max_size=12).map(tuple),
        pins=st.lists(st.builds(PromptPin, st.integers(1, 40), st.floats(1, 1000)), max_size=2).map(tuple),
        awaits_grammar=st.sampled_from([False, False, True]),
    )
    def add(
        self,
        parts: list[int | str],
        max_tokens: int,
        n: int,
        promised: set[str],
        unsent: set[str],
        awaits_grammar: bool,
        **options: Any,
    ) -> None:
        options["adapter"] = options.pop("glasses")
        # As in the frontend: a salt is part of a picture's name.
        salted = [f"{part}/{options['cache_salt']}" if isinstance(part, str) else part for part in parts]
        for name, which in (("unsent_media", unsent), ("coming_media", promised - unsent)):
            options[name] = tuple(f"{part}/{options['cache_salt']}" for part in sorted(which & set(parts)))
        request = make_request(str(self.num_requests), *salted, max_tokens=max_tokens, n=n, **options)
        self._add(request, awaits_grammar=awaits_grammar)

    @precondition(lambda self: self.compiling)
    @rule(data=st.data())
    def compile_a_grammar(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.compiling)))
        self._compile(request_id)

    def _compile(self, request_id: str) -> None:
        self.compiling.pop(request_id).set_result(None)
        self.drive.scheduler.grammar_compiled(request_id)

    @precondition(lambda self: self.drive.requests)
    @rule(data=st.data(), more=PARTS, sends_media_again=st.booleans())
    def go_on_with_a_conversation(self, data: st.DataObject, more: list[int | str], sends_media_again: bool) -> None:
        """An earlier request's prompt and answer, followed by a new question, as chat clients send."""
        earlier = data.draw(st.sampled_from(sorted(self.drive.requests)))
        request = self.drive.requests[earlier]
        added = make_request(str(self.num_requests), *(part for part in more if isinstance(part, int)), 2)
        answer = self.drive.tokens.get((earlier, 0), [])
        self._add(
            EngineRequest(
                added.request_id,
                (*request.token_ids, *answer, *added.token_ids),
                request.media,
                added.sampling_params,
                cache_salt=request.cache_salt,
                adapter=request.adapter,
                unsent_media=() if sends_media_again else tuple({item.media_hash: None for item in request.media}),
            )
        )

    @precondition(lambda self: self.drive.needed)
    @rule(data=st.data())
    def deliver_pixels(self, data: st.DataObject) -> None:
        self.drive.answer(*self.drive.needed.pop(data.draw(st.integers(0, len(self.drive.needed) - 1))))

    @precondition(lambda self: self.drive.needed or self.drive.promised)
    @rule()
    def deliver_all_pixels(self) -> None:
        """As for a film: the encoder has more work than it is given at a time."""
        for sent in (self.drive.needed, self.drive.promised):
            for request_id, media_hash in sent:
                self.drive.answer(request_id, media_hash)
            sent.clear()

    @rule(media_hashes=st.sets(st.sampled_from(PICTURES + FRAMES), min_size=1), salt=st.sampled_from([None, "x", "y"]))
    def drop_pixels_that_a_frontend_kept(self, media_hashes: set[str], salt: str | None) -> None:
        self.drive.kept_pixels -= {f"{media_hash}/{salt}" for media_hash in media_hashes}

    @precondition(lambda self: self.drive.promised)
    @rule(data=st.data())
    def keep_a_promise(self, data: st.DataObject) -> None:
        _, media_hash = self.drive.promised.pop(data.draw(st.integers(0, len(self.drive.promised) - 1)))
        self.drive.deliver(media_hash)

    @precondition(lambda self: self.drive.needed or self.drive.promised)
    @rule(data=st.data())
    def send_a_stale_handle(self, data: st.DataObject) -> None:
        sent = self.drive.needed or self.drive.promised
        _, media_hash = sent.pop(data.draw(st.integers(0, len(sent) - 1)))
        self.drive.lose(media_hash)

    @precondition(lambda self: self.drive.needed or self.drive.promised)
    @rule(data=st.data())
    def send_pixels_that_cannot_be_read(self, data: st.DataObject) -> None:
        sent = self.drive.needed or self.drive.promised
        _, media_hash = sent.pop(data.draw(st.integers(0, len(sent) - 1)))
        self.drive.give_up(media_hash)

    @precondition(lambda self: self.drive.loading)
    @rule(data=st.data(), is_late=st.booleans())
    def end_a_load(self, data: st.DataObject, is_late: bool) -> None:
        key = self.drive.loading.pop(data.draw(st.integers(0, len(self.drive.loading) - 1)))
        self.drive.end_load(key, is_late=is_late)

    @precondition(lambda self: self.drive.tier)
    @rule(data=st.data())
    def lose_what_a_tier_holds(self, data: st.DataObject) -> None:
        del self.drive.tier[data.draw(st.sampled_from(sorted(self.drive.tier)))]

    @precondition(lambda self: self.drive.stretch_loads)
    @rule(data=st.data(), most=st.integers(1, 3), is_late=st.booleans())
    def load_stretches(self, data: st.DataObject, most: int, is_late: bool) -> None:
        load = data.draw(st.sampled_from(sorted(self.drive.stretch_loads)))
        self.drive.load_stretches(load, most, is_late=is_late)

    @precondition(lambda self: self.drive.stretches)
    @rule(data=st.data())
    def lose_a_stretch(self, data: st.DataObject) -> None:
        del self.drive.stretches[data.draw(st.sampled_from(sorted(self.drive.stretches)))]

    @rule()
    def forget_the_media_of_those_who_left(self) -> None:
        drive = self.drive
        drive.needed = [each for each in drive.needed if drive.is_live(each[0])]
        drive.promised = [each for each in drive.promised if drive.is_live(each[0])]

    @rule(kept=st.sets(st.sampled_from(PICTURES)), dropped=st.sets(st.sampled_from(PICTURES)))
    def keep_pixels_beside(self, kept: set[str], dropped: set[str]) -> None:
        self.drive.scheduler.reported.note_pixels(sorted(kept - dropped), sorted(dropped))
        self.kept = (self.kept - dropped) | (kept - dropped)

    @rule()
    def expect_hints_that_are_exact(self) -> None:
        self.drive.step()
        assert self.drive.believed == self.drive.found_media() | self.kept

    @precondition(lambda self: self.drive.requests)
    @rule(data=st.data(), only=st.sampled_from([None, 0, 1]))
    def abort(self, data: st.DataObject, only: int | None) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.drive.requests)))
        self.drive.abort(request_id, only)

    @precondition(lambda self: self.drive.requests)
    @rule(data=st.data())
    def abort_and_ask_again_under_the_same_id(self, data: st.DataObject) -> None:
        """Ask for the same or something else; prefers requests that have a slice in progress."""
        under_way = {request_id for request_id, _ in self.drive.scheduler._beside}
        request_id = data.draw(st.sampled_from(sorted(under_way or self.drive.requests)))
        wish = self.drive.requests[data.draw(st.sampled_from(sorted(self.drive.requests)))]
        self.drive.abort(request_id)
        self._add(replace(wish, request_id=request_id))

    @rule(seconds=st.floats(0, 1000))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.drive.scheduler.pins.note_time(self.now)

    @rule(prefix=st.booleans(), encoder=st.booleans())
    def reset(self, prefix: bool, encoder: bool) -> None:
        self.drive.scheduler.reset(prefix=prefix, encoder=encoder)

    @rule(media_hash=st.sampled_from(PICTURES))
    def spoil_a_picture(self, media_hash: str) -> None:
        self.drive.runner.bad_media ^= {f"{media_hash}/y"}

    @precondition(lambda self: self.num_requests)
    @rule(data=st.data())
    def spoil_a_request(self, data: st.DataObject) -> None:
        self.drive.runner.bad_requests |= {str(data.draw(st.integers(0, self.num_requests - 1)))}

    @rule(num_steps=st.integers(1, 5))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.drive.step()

    def teardown(self) -> None:
        if not hasattr(self, "drive"):
            return
        drive = self.drive
        self.expect_hints_that_are_exact()
        # Aborted requests send nothing more.
        self.forget_the_media_of_those_who_left()
        drive.delivers = drive.loads = True
        for request_id, media_hash in drive.needed:
            drive.answer(request_id, media_hash)
        for request_id in tuple(self.compiling):
            self._compile(request_id)
        drive.run(max_steps=5000)
        drive.expect_right_answers()
        drive.expect_nothing_left()
        for request_id, request in drive.requests.items():
            for choice in range(request.sampling_params.n):
                ends = [
                    (request_id, choice) in drive.finished,
                    request_id in drive.failed or (request_id, choice) in drive.aborted,
                ]
                assert any(ends), f"{request_id}/{choice} was never answered"
        self.expect_hints_that_are_exact()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = thorough(60, num_steps=30)
