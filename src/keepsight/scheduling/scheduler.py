"""Decides what each step computes, for which sequences, and what is preempted or evicted to make room.

Pure logic: messages and results in, plans and outputs out. Resources are granted in one total order (priority,
arrival, choice) and taken back in reverse, so the first sequence in that order always makes progress, whatever the
budgets. Running sequences take their share of a step's tokens before waiting ones: a prompt that has begun is computed
to its end, but one too long for a single step leaves up to half of each step to others.
"""

import itertools
from collections.abc import Sequence

from keepsight.engine_config import EngineConfig, SchedulerConfig
from keepsight.requests import EngineRequest, RequestFailed, TokenOutput
from keepsight.scheduling.admit_request import make_states, refusal_reason
from keepsight.scheduling.cut_piece import cut_piece
from keepsight.scheduling.encoder_cache_manager import EncoderCacheManager
from keepsight.scheduling.holdings import Holdings
from keepsight.scheduling.known_prompt import find_beginning, find_end, give_back, name_end, note_hit
from keepsight.scheduling.kv_cache_manager import KvCacheManager, PrefixHit
from keepsight.scheduling.lineup import Lineup
from keepsight.scheduling.media_claims import MediaClaims
from keepsight.scheduling.milestones import keep_states, promise_states
from keepsight.scheduling.page_grants import PageGrants
from keepsight.scheduling.prompt_pins import PromptPins
from keepsight.scheduling.reported_holdings import ReportedHoldings
from keepsight.scheduling.request_state import FOR_MEDIA, Begun, Grammar, ParkedFor, RequestState, Status
from keepsight.scheduling.step_draft import Cut, StepDraft, room_to_join
from keepsight.scheduling.step_plan import (
    Computed,
    Fault,
    PageCopy,
    SampledToken,
    SequenceId,
    Slice,
    StepPlan,
    StepResult,
)
from keepsight.scheduling.stretch_loads import StretchLoad, StretchLoads
from keepsight.scheduling.turns import Turns
from keepsight.scheduling.wait_for_prefix import waits_for_more, wake_followers

Outputs = list[TokenOutput | RequestFailed]


class Scheduler:
    def __init__(self, config: EngineConfig, end_ids: frozenset[int]) -> None:
        self.config: SchedulerConfig = config.scheduler
        self._engine_config = config
        self._block_size = config.kv_cache.block_size
        self._end_ids = end_ids
        # The media items of which any cache holds data; embeddings, in whatever place; or keys and values.
        self.holdings = Holdings()
        self.held_embeddings = Holdings(within=self.holdings)
        self.held_prefixes = Holdings(within=self.holdings)
        self.kv_cache = KvCacheManager(config.kv_cache, self.held_prefixes)
        encoder_cache = EncoderCacheManager(config.encoder_cache, self.held_embeddings)
        self.lineup = Lineup()
        self.stretches = StretchLoads(self.kv_cache, self.lineup, config.kv_cache.blocks_per_stretch)
        self.media = MediaClaims(config, encoder_cache, self.lineup)
        self.pages = PageGrants(self.kv_cache, self.media, self.lineup)
        self.pins = PromptPins(self.kv_cache, encoder_cache)
        self._turns = Turns(self.media.encodings, are_taken=self.config.takes_turns)
        self.reported = ReportedHoldings(self.holdings, self.held_embeddings)
        # A sequence that finishes while its slice runs beside keeps its pages and its entry here until the slice ends.
        self._states: dict[SequenceId, RequestState] = {}
        self._beside: set[SequenceId] = set()
        self._choices: dict[str, list[RequestState]] = {}  # the live choices of each request
        self._ended: list[SequenceId] = []
        self._begun: list[Begun] = []
        self._numbers = itertools.count()
        self.num_guesses = self.num_right_guesses = 0

    # Input ----------------------------------------------------------------------------------------------------

    def add(self, request: EngineRequest, grammar: Grammar | None = None) -> RequestFailed | None:
        """Add a request. Return a refusal if it can never run or its id is already in use; otherwise None."""
        request_id = request.request_id
        refusal = refusal_reason(request, self.config)
        if request_id in self._choices:
            refusal = f"a request with the id {request_id!r} is running"
        if refusal is not None:
            return RequestFailed(request_id, refusal, is_refusal=True)
        states = make_states(request, grammar, self._numbers, self._engine_config, self._end_ids)
        self._choices[request_id] = states
        for state in states:
            self._states[state.sequence_id] = state
            self.media.add(state)
            self.lineup.add(state)
            if state.awaits_grammar:
                self.lineup.park(state, ParkedFor.GRAMMAR)
            else:
                self._look_up(state)
        return None

    def _look_up(self, state: RequestState) -> None:
        hit = find_beginning(state, self.kv_cache)
        if self.stretches.ask(state, hit):
            self.lineup.park(state, ParkedFor.STRETCHES)
        else:
            self.media.look_ahead(state, hit.num_tokens)

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """Drop a request or one of its choices, at any time. Unknown ids are ignored: those have already ended."""
        for state in tuple(self._choices.get(request_id, ())):
            if choice in (None, state.choice):
                self._finish(state)

    def media_arrived(self, media_hash: str) -> bool:
        """Note that a media item's pixels have arrived. Return False if they are not needed."""
        askers = self.media.arrived(media_hash)
        self.lineup.unpark_these(askers or (), ParkedFor.PIXELS)
        return askers is not None

    def embeddings_loaded(self, encoder_key: str, *, is_found: bool) -> bool:
        """Note the outcome of a load. Return whether it is still wanted."""
        askers = self.media.loads.end(encoder_key, is_found=is_found)
        # Unpark sequences that wait for another item, too: they can ask for this one's pixels in the meantime.
        self.lineup.unpark_these(askers or (), *FOR_MEDIA)
        return askers is not None

    def stretches_loaded(self, load: StretchLoad, places: range, *, is_last: bool) -> None:
        """Take in loaded stretches, which the runner holds until the next plan. The last call ends the wait."""
        self.stretches.take_in(load, places)
        for state in self.stretches.end(load, places.stop) if is_last else ():
            self.lineup.unpark(state)
            self.media.look_ahead(state, find_beginning(state, self.kv_cache).num_tokens)

    def grammar_compiled(self, request_id: str) -> None:
        compiled = [each for each in self._choices.get(request_id, ()) if not each.awaits_grammar]
        for state in self.lineup.unpark_these(compiled, ParkedFor.GRAMMAR):
            self._look_up(state)

    def reset(self, *, prefix: bool, encoder: bool) -> None:
        if prefix:
            self.kv_cache.forget_prefixes()
        if encoder:
            self.media.forget()

    # Output ---------------------------------------------------------------------------------------------------

    def take_begun(self) -> list[Begun]:
        """Return, once each, requests whose first choice got its first token or has claimed more media since then."""
        taken, self._begun = self._begun, []
        return taken

    def schedule(self) -> StepPlan:
        # After an empty plan the engine's loop sleeps until a message comes, so the next plan has to be empty, too.
        while (draft := self._draft_step()).computes_nothing and self._is_outdated(draft):
            pass
        self.num_guesses += draft.add_guesses(self._states, self.kv_cache)
        ended, self._ended = self._ended, []
        return StepPlan(
            ended=ended,
            evicted=self.media.encoder_cache.take_evicted(),
            evicted_ends=self.kv_cache.ends.take_evicted(),
            unneeded_pixels=self.media.pixels.take_unneeded(),
            unneeded_embeddings=self.media.loads.take_unneeded(),
            keep=self.kv_cache.take_to_keep(),
            fill=self.stretches.take_fills(),
            unwanted=self.media.list_unwanted(),
            new=draft.new,
            place=self.media.take_placements(),
            encode=self._turns.take_encodings(draft),
            copy=draft.copy,
            copy_states=self.kv_cache.slots.take_copies(),
            recall=draft.recall,
            beside=draft.beside,
            now=draft.now,
        )

    def _draft_step(self) -> StepDraft:
        draft = self._begin_step()
        # Pages are taken back only while running sequences are considered, or from sequences that do not run, so a
        # prefix that a sequence found in this step cannot disappear within the step.
        self._continue_running(draft)
        if self.kv_cache.take_awaited_change():
            wake_followers(self.lineup, draft, self.kv_cache)
        self._start_waiting(draft, self.lineup.waiting)
        self._offer_rest(draft)
        if draft.computes_nothing and not draft.is_for_encodings:
            # A sequence that was unparked only to be parked again may hold pages that a running one lacks.
            self._continue_running(draft)
        return draft

    def _offer_rest(self, draft: StepDraft) -> None:
        """Give what is left of the step to the long prompts that were held back; what is planned keeps its pages.

        One begins only if there are pages for all of it: it would take them from short prompts, and give them back.
        """
        held_back = draft.end_reservation()
        for state in held_back:
            if state.status is Status.RUNNING:
                self._continue_prompt(state, draft, may_preempt=False)
        if waiting := [state for state in held_back if state.status is Status.WAITING]:
            room = self.kv_cache.pool.num_free * self._block_size - self.lineup.num_tokens_to_compute
            self._start_waiting(draft, [state for state in waiting if state.num_tokens <= room])

    def _is_outdated(self, draft: StepDraft) -> bool:
        """Return whether, while it was made, preempted sequences left pages and tokens, or the encoder its turn."""
        is_prompts_turn = draft.is_for_encodings and not self._turns.is_encoders
        return is_prompts_turn or self.pages.num_preemptions > draft.num_preemptions

    def _begin_step(self) -> StepDraft:
        num_streams = sum(state.is_stream for state in self.lineup.running)
        room = room_to_join(self.config, num_streams, self.lineup)
        lane_is_free = not self._beside
        if self.media.take_awaited_change():
            self.media.unpark_ready_to_retry()
        if lane_is_free or room.is_for_all:
            self.lineup.unpark_these(self.lineup.parked, ParkedFor.LANE)
        return StepDraft(
            self.config,
            self.lineup,
            now_tokens_left=self.config.max_num_batched_tokens - num_streams,
            room=room,
            beside_tokens_left=self.config.max_num_batched_tokens if lane_is_free else 0,
            is_for_encodings=self._turns.is_encoders,
            num_preemptions=self.pages.num_preemptions,
        )

    # Running sequences ----------------------------------------------------------------------------------------

    def _continue_running(self, draft: StepDraft) -> None:
        for state in tuple(self.lineup.running):
            if state.status is not Status.RUNNING or state.is_under_way:
                continue
            if not state.is_stream:
                self._continue_prompt(state, draft)
            elif not draft.is_for_encodings:
                self._continue_stream(state, draft)

    def _continue_prompt(self, state: RequestState, draft: StepDraft, *, may_preempt: bool = True) -> None:
        cut = cut_piece(state, state.num_computed, draft, self.media)
        if isinstance(cut, ParkedFor):
            self.lineup.park(state, cut)
            return
        is_held_back = draft.holds_back(state, cut, state.num_computed)
        if is_held_back or cut.end == state.num_computed or draft.is_for_encodings:
            return
        added = self.pages.try_extend(state, cut.end, may_preempt=may_preempt)
        if added is not None:
            self._plan_prompt(state, cut, added, draft)
        elif may_preempt:
            self._give_way(state)

    def _continue_stream(self, state: RequestState, draft: StepDraft) -> None:
        start, num_blocks = state.num_computed, self.kv_cache.num_blocks_of(state.sequence_id)
        added: tuple[int, ...] | None = ()
        if start == num_blocks * self._block_size:
            added = self.pages.try_extend(state, start + 1)
        if added is None:
            self._give_way(state)
        else:
            draft.now.append(Slice(state.sequence_id, start, 1, num_blocks, added, True, state.state_slot))

    def _give_way(self, state: RequestState) -> None:
        """Preempt a sequence that cannot get pages, unless a slice runs beside: pages may soon be free again."""
        if not self._beside:
            self.pages.preempt(state)

    # Waiting sequences ----------------------------------------------------------------------------------------

    def _start_waiting(self, draft: StepDraft, states: Sequence[RequestState]) -> None:
        # Iterate over a copy, each sequence once: taking pages may put others back into the line, before or behind.
        for state in tuple(states):
            if len(self.lineup.running) >= self.config.max_num_seqs or not self._try_start(state, draft):
                break

    def _try_start(self, state: RequestState, draft: StepDraft) -> bool:
        """Start the sequence if possible. Return whether the sequences behind it may be tried."""
        if draft.has_no_room_to_join(state) and state.hasher.prompt_end not in self.kv_cache.ends:
            return draft.now_tokens_left > 0
        hit = find_beginning(state, self.kv_cache)
        if waits_for_more(state, hit, draft, self._states, self.kv_cache):
            self.lineup.park(state, ParkedFor.PREFIX)
            return True
        if self._try_recall(state, hit, draft):
            return True
        start = hit.num_tokens
        cut = cut_piece(state, start, draft, self.media)
        if isinstance(cut, ParkedFor):
            self.lineup.park(state, cut)
            return True
        if draft.is_for_encodings:
            draft.now_tokens_left -= cut.end - start
            return draft.now_tokens_left > 0
        if draft.holds_back(state, cut, start) or draft.waits_for_room(cut, start, state.num_tokens, self._block_size):
            return draft.now_tokens_left > 0
        added = self.pages.try_extend(state, cut.end, hit)
        if added is None:
            return False
        if hit.alike is not None:
            draft.copy.append(PageCopy(hit.alike, added[len(hit.block_ids)]))
        self._seat(state, hit)
        self._plan_prompt(state, cut, added, draft)
        return True

    def _try_recall(self, state: RequestState, hit: PrefixHit, draft: StepDraft) -> bool:
        """Draw the first token from kept logits if the whole prompt is known.

        The sequence stays in line: it needs a seat only for its second token.
        """
        kept_as = find_end(state, hit, self.kv_cache) if draft.now_tokens_left > 0 else None
        if kept_as is None:
            return False
        draft.add_recall(state.sequence_id, kept_as)
        draft.introduce(state)
        self.media.protect_unsent(state)
        note_hit(state, hit, self.kv_cache)
        return True

    def _seat(self, state: RequestState, hit: PrefixHit) -> None:
        note_hit(state, hit, self.kv_cache)
        state.advance(hit.num_tokens)
        state.length_begun = state.length_begun or state.num_tokens - hit.num_tokens
        state.state_slot = self.kv_cache.slots.slot_of(state.sequence_id)
        self.lineup.seat(state)
        self.media.protect_unsent(state)

    # Prompts, running or waiting ------------------------------------------------------------------------------

    def _plan_prompt(self, state: RequestState, cut: Cut, added: tuple[int, ...], draft: StepDraft) -> None:
        start, end = state.num_computed, cut.end
        first_block = self.kv_cache.num_blocks_of(state.sequence_id) - len(added)
        draft.introduce(state)
        if not cut.joins:
            state.is_under_way = True
            self._beside.add(state.sequence_id)
        samples = end == state.num_tokens
        slot, wanted = state.state_slot, state.wants_prompt_logprobs
        kept = promise_states(state, end, self.kv_cache, self.config, self.lineup)
        keep_as = name_end(state, self.kv_cache) if samples else None
        prompt = Slice(state.sequence_id, start, end - start, first_block, added, samples, slot, keep_as, wanted, kept)
        draft.add_prompt(prompt, joins=cut.joins)
        self.kv_cache.announce(state.sequence_id, state.hasher.hashes, end)

    # Results of the runner ------------------------------------------------------------------------------------

    def update(self, result: StepResult) -> Outputs:
        outputs: Outputs = []
        for name in result.kept_ends:
            self.kv_cache.ends.add(name)
        for sequence_id, token in result.recalled.items():
            self._append(self._states[sequence_id], token, outputs)
        for computed in result.computed:
            self._advance(computed, outputs)
        for key in result.encoded:
            self.media.finish(key)
        for key in result.left_out:
            self.media.leave_out(key)
        for sequence_id, fault in result.failed_sequences.items():
            self._fail_sequence(sequence_id, fault, outputs)
        for key, message in result.failed_encodings.items():
            for request_id in sorted(self.media.fail(key, self._states)):
                self._fail_request(RequestFailed(request_id, message), outputs)
        return outputs

    def _advance(self, computed: Computed, outputs: Outputs) -> None:
        state = self._states[computed.sequence_id]
        self._advance_to(computed.end, state)
        if state.is_under_way:
            self._end_beside(state)
            if state.status is Status.FINISHED:
                return
        state.guesser.note_drawn(len(computed.tokens))
        for number, token in enumerate(computed.tokens):
            if number:  # the token before it was guessed, and its position computed
                self.num_right_guesses += 1
                self._advance_to(computed.end + number, state)
            state.num_guessed += number < len(computed.tokens) - 1
            self._append(state, token, outputs)

    def _advance_to(self, end: int, state: RequestState) -> None:
        was_stream, start = state.is_stream, state.num_computed
        state.advance(end)
        if not was_stream or end % self._block_size == 0:
            self.kv_cache.publish(state.sequence_id, state.hasher.name_of, state.num_computed)
            self.media.release_computed(state)
            keep_states(state, start, self.kv_cache)

    def _append(self, state: RequestState, token: SampledToken, outputs: Outputs) -> None:
        output = state.append(token)
        if state.num_sampled == 1 and state.is_first_choice:
            self.pins.begin(state)
        if (begun := state.take_begun()) is not None:
            self._begun.append(begun)
        outputs.append(output)
        if output.finish_reason is not None:
            self._finish(state)

    def _fail_sequence(self, sequence_id: SequenceId, fault: Fault, outputs: Outputs) -> None:
        state = self._states.get(sequence_id)
        if state is None:  # removed with another choice of its request that failed in this same step
            return
        if state.status is not Status.FINISHED:
            is_refusal = fault.field is not None
            self._fail_request(RequestFailed(sequence_id[0], fault.message, is_refusal, fault.field), outputs)
        if state.is_under_way:
            self._end_beside(state)

    def _fail_request(self, failure: RequestFailed, outputs: Outputs) -> None:
        self.abort(failure.request_id)
        outputs.append(failure)

    def _finish(self, state: RequestState) -> None:
        self.lineup.finish(state)
        choices = self._choices[state.request.request_id]
        choices.remove(state)
        if not choices:
            del self._choices[state.request.request_id]
        self.media.leave(state, is_last=not choices)
        if not state.is_under_way:
            self._remove_finished(state)

    def _end_beside(self, state: RequestState) -> None:
        state.is_under_way = False
        self._beside.remove(state.sequence_id)
        if state.status is Status.FINISHED:
            self._remove_finished(state)

    def _remove_finished(self, state: RequestState) -> None:
        del self._states[state.sequence_id]
        give_back(state, self.kv_cache)
        self.media.remove(state)
        if state.is_known_to_runner:
            self._ended.append(state.sequence_id)

    # For tests ------------------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        self.lineup.check_invariants()
        assert len(self.lineup.running) <= self.config.max_num_seqs
        live = [state for state in self._states.values() if state.status is not Status.FINISHED]
        assert len(live) == len(self.lineup) == sum(map(len, self._choices.values()))
        assert self._beside == {state.sequence_id for state in self._states.values() if state.is_under_way}
        for request_id, choices in self._choices.items():
            assert choices, request_id
            assert all(self._states[each.sequence_id] is each for each in choices), request_id
            assert all(each.request.request_id == request_id for each in choices), request_id
        for state in self._states.values():
            num_positions = self.kv_cache.num_blocks_of(state.sequence_id) * self._block_size
            assert state.num_computed <= num_positions, state.sequence_id
            assert not state.is_under_way or state.status in (Status.RUNNING, Status.FINISHED)
            assert state.is_under_way or state.status is not Status.FINISHED
        self.kv_cache.check_invariants()
        self.media.check_invariants(self._states.values())
        embeddings = [*self.media.encoder_cache.held_media(), *self.reported.held_embeddings()]
        self.held_embeddings.check_invariants(embeddings)
        self.held_prefixes.check_invariants(prefixes := [*self.kv_cache.pool.held_media()])
        self.holdings.check_invariants([*embeddings, *prefixes, *self.reported.held_pixels()])
