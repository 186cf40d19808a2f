"""Gets requests the embeddings of their media: room in the encoder cache, and a load, or pixels and an encoding.

A request claims its items in the order of their positions and never holds a later one while it lacks an earlier one, so
what it holds can always be computed and released. A claimed item has room reserved, whenever it is encoded; one that
is neither held nor given to the runner waits in `encodings`, for as long as a live sequence claims it. Knows nothing
of tokens or pages.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import groupby

from keepsight.engine_config import EngineConfig
from keepsight.requests import MediaNeeded
from keepsight.scheduling.embedding_loads import EmbeddingLoads, LoadState
from keepsight.scheduling.encoder_cache_manager import EncoderCacheManager, EncoderUser
from keepsight.scheduling.encodings import Encodings
from keepsight.scheduling.lineup import Lineup, last_of
from keepsight.scheduling.pixel_requests import PixelRequests
from keepsight.scheduling.request_state import EncoderTurn, Origin, ParkedFor, RequestState, Status
from keepsight.scheduling.step_plan import Encoding, SequenceId


class MediaClaims:
    def __init__(self, config: EngineConfig, encoder_cache: EncoderCacheManager, lineup: Lineup) -> None:
        self.encoder_cache, self._lineup = encoder_cache, lineup
        self.loads = EmbeddingLoads(has_tiers=config.encoder_cache.has_tiers)
        self.pixels = PixelRequests(config.scheduler.max_embeddings_of_pixels)
        self.encodings = Encodings(config.scheduler)
        self._to_place: list[str] = []
        # The sequence that found too little room for the item it needs next. Those behind it leave freed room to it,
        # or it could starve; if it needs no more than that item, those before it claim nothing ahead, or it would wait
        # for the end of somebody else's book.
        self._short_of_room: RequestState | None = None
        self._has_awaited_changed = False
        # Media of live sequences: nothing else is ever asked for or kept.
        self._live: Counter[str] = Counter()

    def add(self, state: RequestState) -> None:
        self._live.update(item.media_hash for item in state.media)
        self.loads.add(state)
        self.pixels.add(state.request)

    def leave(self, state: RequestState, *, is_last: bool) -> None:
        """End the waits of a finished sequence, and of its request if `is_last`. It may still read what it holds."""
        self._end_shortage(state)
        for index in [index for index in state.claimed_items if not self.is_ready(state, index)]:
            self._release(state, index)
        self.loads.remove(state)
        for user, key in _unsent_items(state):
            self.encoder_cache.end_protection(user, key)
            self._has_awaited_changed = True
        self.pixels.remove_asker(state)
        for item in state.media:
            self._live[item.media_hash] -= 1
            if not self._live[item.media_hash]:
                del self._live[item.media_hash]
                self.pixels.forget(item.media_hash)
                self._drop_pixels(item.media_hash)
        if is_last:
            self.pixels.remove_maker(state.request)

    def remove(self, state: RequestState) -> None:
        """Remove a sequence that has left, now that none of its slices is under way."""
        self.drop(state)
        self._has_awaited_changed = True

    def protect_unsent(self, state: RequestState) -> None:
        """Protect the embeddings of media that could not be made again, until the sequence ends.

        Otherwise an answer that has begun would break off once it is preempted.
        """
        for user, key in _unsent_items(state):
            self.encoder_cache.protect(user, key)

    def is_ready(self, state: RequestState, index: int) -> bool:
        return index in state.claimed_items and self.encoder_cache.is_ready(state.encoder_keys[index])

    def claim(self, state: RequestState, first_item: int) -> ParkedFor | None:
        """Claim the items from `first_item` on, up to one that lacks something. Return what that waits for, or None.

        Asks at once for everything that is lacking, also for the items behind that one.
        """
        self._release_before(state, first_item)
        self._end_shortage(state)
        if first_item < min(state.claimed_items, default=0):
            # A shorter prefix was found than last time: holding on to later items could keep out earlier ones.
            self.drop(state)
        for index in range(first_item, len(state.media)):
            if (lacks := self._try_claim(state, index)) is not None:
                self._ask(state, index)
                return lacks
        return None

    def look_ahead(self, state: RequestState, num_found: int) -> None:
        """Ask the tiers for what the request will lack behind `num_found` tokens, long before it has its turn."""
        for index in range(state.first_item_after(num_found), len(state.media)):
            if not self._can_find(state, index):
                self.loads.ask(state, index)

    def take_awaited_change(self) -> bool:
        """Return whether, since the last call, anything that sequences may be parked for has come or gone."""
        has_changed, self._has_awaited_changed = self._has_awaited_changed, False
        return has_changed

    def unpark_ready_to_retry(self) -> None:
        for state in self.ready_to_retry():
            self._lineup.unpark(state)

    def ready_to_retry(self) -> Iterator[RequestState]:
        """Yield, in order, the sequences parked for the encoder that should try again.

        Of those that lack only room: as many as there is room for, and always the first, as it may take from others.
        """
        room, is_first = self.encoder_cache.num_free_embeddings, True
        for state in self._lineup.parked_for(ParkedFor.ENCODER):
            if self._waits_for_its_first(state):
                continue
            if state.claimed_items or not self._lacks_only_room(state):
                yield state
                continue
            length = state.media[state.next_item].span.length
            fits = length <= room
            if fits:
                room -= length
            if fits or is_first:
                yield state
            is_first = False

    def _waits_for_its_first(self, state: RequestState) -> bool:
        """Return whether it has claimed all that it needs and cannot go on before the first item is encoded."""
        first = min(state.claimed_items, default=len(state.media))
        has_all = len(state.claimed_items) == len(state.media) - first
        return bool(state.claimed_items) and has_all and not self.is_ready(state, first)

    def _lacks_only_room(self, state: RequestState) -> bool:
        index = state.next_item
        is_loaded = self.loads.is_ready(state.encoder_keys[index])
        return (is_loaded or self.pixels.are_here(state.media[index].media_hash)) and not self._can_find(state, index)

    def _can_find(self, state: RequestState, index: int) -> bool:
        return self.encoder_cache.can_find(state.encoder_keys[index], (state.sequence_id, index))

    def _try_claim(self, state: RequestState, index: int) -> ParkedFor | None:
        if index in state.claimed_items:
            return None
        origin: Origin = "device"
        user, key = (state.sequence_id, index), state.encoder_keys[index]
        if not self.encoder_cache.try_use(user, key):
            match self.loads.ask(state, index):
                case LoadState.LOADING:
                    lacks: ParkedFor | None = ParkedFor.TIERS
                case LoadState.READY:
                    origin = "tier"
                    lacks = self._try_place(state, index)
                case LoadState.ABSENT:
                    origin = "made"
                    lacks = self._try_encode(state, index)
            if lacks is not None:
                return lacks
        state.claimed_items.add(index)
        if key in self.encodings:
            self.encodings.move_up(key, self._turn_of(state, index))
        # "made" stays, whatever is found later; another origin becomes "made" if the item is lost and then encoded.
        if origin == "made" or index not in state.origins:
            state.origins[index] = origin
        return None

    def _try_place(self, state: RequestState, index: int) -> ParkedFor | None:
        """Place loaded embeddings as if they had been encoded, but without pixels or a turn of the encoder."""
        if not self._try_make_room(state, index):
            return ParkedFor.ENCODER
        key = state.encoder_keys[index]
        self.loads.place(key)
        self._to_place.append(key)
        return None

    def _try_encode(self, state: RequestState, index: int) -> ParkedFor | None:
        item = state.media[index]
        if not self.pixels.are_here(item.media_hash):
            return ParkedFor.PIXELS
        if not self._try_make_room(state, index):
            return ParkedFor.ENCODER
        terms = (item.media_hash, item.span.length, item.modality, state.request.encoder_adapter)
        self.encodings.add(Encoding(state.encoder_keys[index], *terms), self._turn_of(state, index))
        return None

    def _turn_of(self, state: RequestState, first_item: int) -> EncoderTurn:
        """Return the sequence's turn: fixed once it lacks an item's pixels or encoding, kept even if items are lost."""
        if state.encoder_turn is None:
            items = zip(state.media[first_item:], state.encoder_keys[first_item:], strict=True)
            num_needed = sum(item.span.length for item, key in items if not self.encoder_cache.is_ready(key))
            state.encoder_turn = self.encodings.turn_of(state.order, num_needed)
        return state.encoder_turn

    def _try_make_room(self, state: RequestState, index: int) -> bool:
        is_ahead, short = bool(state.claimed_items), self._short_of_room
        if short is not None and (short.order < state.order or (is_ahead and _lacks_only_its_last(short))):
            return False
        user, key, item = (state.sequence_id, index), state.encoder_keys[index], state.media[index]
        length, media_hash = item.span.length, item.media_hash
        while not self.encoder_cache.try_begin(user, key, length, media_hash, spares_protected=is_ahead):
            if is_ahead:  # it can go on, and gets room by that; what others hold may be encoded already
                return False
            if not self._take_from_later(state):
                self._short_of_room = state
                return False
        return True

    def _end_shortage(self, state: RequestState) -> None:
        """End the shortage if it is this sequence's: it needs nothing any more, or is about to try again."""
        if self._short_of_room is state:
            self._short_of_room = None

    def _take_from_later(self, state: RequestState) -> bool:
        """Take the claims of the last unseated sequence behind this one; running ones release theirs by themselves."""
        victim = last_of(each for each in self._lineup.unseated() if each.claimed_items and each.order > state.order)
        if victim is not None:
            self.drop(victim)
        return victim is not None

    def _ask(self, state: RequestState, first_item: int) -> None:
        """Ask for what items lack from `first_item` on.

        A picture's pixels are asked for once no load of its parts is pending, as each ask decodes the picture.
        """
        indices = range(first_item, len(state.media))
        lacking = [index for index in indices if not self._can_find(state, index)]
        loads = {index: self.loads.ask(state, index) for index in lacking}
        loading = {state.pictures[index] for index in lacking if loads[index] is LoadState.LOADING}
        absent = [index for index in lacking if loads[index] is LoadState.ABSENT]
        for picture, parts in groupby(absent, state.pictures.__getitem__):
            if picture not in loading:
                media_hashes = [state.media[index].media_hash for index in parts]
                self.pixels.ask(state, media_hashes, self._turn_of(state, first_item))

    def take_needed(self) -> list[MediaNeeded]:
        """Return which pixels are to be made now.

        The first sequence that waits for some gets on whatever the limit: those that fill it may not be encoded before.
        """
        for are_films in self.pixels.ask_queued():
            parked = self._lineup.parked_for(ParkedFor.PIXELS)
            waiting = (each for each in parked if all(self.is_ready(each, index) for index in each.claimed_items))
            self.pixels.ask_beyond_limit(waiting, are_films=are_films)
        return self.pixels.take_needed()

    def forget(self) -> None:
        self.encoder_cache.forget()
        self.loads.forget()

    def release_computed(self, state: RequestState) -> None:
        """Release the embeddings of items that are wholly computed."""
        self._release_before(state, state.next_item)

    def _release_before(self, state: RequestState, first_item: int) -> None:
        for index in [index for index in state.claimed_items if index < first_item]:
            self._release(state, index)

    def drop(self, state: RequestState) -> None:
        for index in sorted(state.claimed_items):
            self._release(state, index)
        state.num_to_join = 0

    def _release(self, state: RequestState, index: int) -> None:
        key = state.encoder_keys[index]
        state.claimed_items.remove(index)
        self.encoder_cache.release((state.sequence_id, index), key)
        if self.encodings.waits(key) and not self.encoder_cache.is_used(key):
            self._withdraw(key)
        self._has_awaited_changed = True

    def arrived(self, media_hash: str) -> Iterable[RequestState] | None:
        """Return the sequences that waited for the pixels; None if they were here or no live sequence can use them."""
        return self.pixels.arrive(media_hash) if media_hash in self._live else None

    def finish(self, encoder_key: str) -> None:
        self._end_encoding(encoder_key)
        self.encoder_cache.finish(encoder_key)

    def fail(self, encoder_key: str, states: Mapping[SequenceId, RequestState]) -> set[str]:
        """Drop a failed encoding. Return the ids of the requests that depend on it."""
        self._end_encoding(encoder_key)
        users = [(states[sequence_id], index) for sequence_id, index in self.encoder_cache.fail(encoder_key)]
        for state, index in users:
            state.claimed_items.remove(index)
        return {state.request.request_id for state, _ in users}

    def leave_out(self, encoder_key: str) -> None:
        """Note that the runner left out an encoding as unwanted; it waits again if it has got a user by now."""
        self._has_awaited_changed = True
        if self.encoder_cache.is_used(encoder_key):
            self.encodings.take_back(encoder_key)
        else:
            self._withdraw(encoder_key)

    def _end_encoding(self, encoder_key: str) -> None:
        self._has_awaited_changed = True
        if encoder_key not in self.encodings:  # it was placed, not encoded
            return
        self._drop_pixels(self.encodings.end(encoder_key).media_hash)
        self.loads.note_encoded(encoder_key)

    def _withdraw(self, encoder_key: str) -> None:
        """Give up an encoding without users. Its pixels are kept as long as a live sequence names the item."""
        media_hash = self.encodings.end(encoder_key).media_hash
        self.encoder_cache.fail(encoder_key)
        if media_hash not in self._live:
            self._drop_pixels(media_hash)

    def _drop_pixels(self, media_hash: str) -> None:
        """Drop pixels, unless the runner may still read them for an encoding."""
        if not self.encodings.need_pixels(media_hash):
            self.pixels.drop(media_hash)

    def list_unwanted(self) -> list[str]:
        """List encodings given to the runner whose items no live sequence names."""
        return [each.encoder_key for each in self.encodings.given() if each.media_hash not in self._live]

    def take_placements(self) -> list[str]:
        taken, self._to_place = self._to_place, []
        return taken

    def check_invariants(self, states: Collection[RequestState]) -> None:
        """`states`: all sequences, also those that have left but still have a slice under way."""
        live = {state for state in states if state.status is not Status.FINISHED}
        assert self._live == Counter(item.media_hash for state in live for item in state.media)
        assert self._short_of_room is None or self._short_of_room in live
        self.encodings.check_invariants()
        claims = [(state, index) for state in states for index in state.claimed_items]
        uses = [((state.sequence_id, index), state.encoder_keys[index]) for state, index in claims]
        assert sorted(uses) == sorted(self.encoder_cache.uses())
        assert set(self.encoder_cache.protections()) <= {each for state in live for each in _unsent_items(state)}
        claimed = {state.encoder_keys[index] for state in live for index in state.claimed_items}
        lacking = {key for key in claimed if not self.encoder_cache.is_ready(key)}
        assert all(key in self.encodings for key in lacking)
        assert all(key in lacking for key in self.encodings.waiting())
        self.pixels.check_invariants(live, self._live.keys() | {each.media_hash for each in self.encodings.given()})
        self.encoder_cache.check_invariants()
        self.loads.check_invariants()


def _lacks_only_its_last(state: RequestState) -> bool:
    return state.next_item + 1 == len(state.media)


def _unsent_items(state: RequestState) -> Iterator[tuple[EncoderUser, str]]:
    """Yield each item that cannot be made from its request, as a user of the encoder cache, with its key."""
    unsent = frozenset(state.request.unsent_media)
    for index, item in enumerate(state.media if unsent else ()):
        if item.media_hash in unsent:
            yield (state.sequence_id, index), state.encoder_keys[index]
