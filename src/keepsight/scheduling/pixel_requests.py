"""Tracks which pixels are here, which sequences wait for others, and which requests were asked for or promised them.

While one request is making a media item's pixels, no other is asked. Pixels are asked for as far as those here and on
their way leave room: a burst of requests would otherwise fill the memory with what the encoder takes up much later.
Films have their own room, as it may take minutes to make what is on its way. Invariant: whatever is waited for has a
maker, or is queued until there is room.
"""

from collections.abc import Iterable, Sequence, Set
from heapq import heapify, heappop, heappush
from itertools import count, groupby

from keepsight.media import MediaItem
from keepsight.requests import EngineRequest, MediaNeeded
from keepsight.scheduling.request_state import EncoderTurn, RequestState, Status

# A picture's parts, in a heap of those to be asked for: by turn, then by when it was asked for.
_Queued = tuple[EncoderTurn, int, Sequence[str]]


class PixelRequests:
    def __init__(self, max_embeddings: int) -> None:
        """`max_embeddings`: what pixels that are here or on their way may give at most, apart from the last picture."""
        self._max_embeddings = max_embeddings
        # The media of live sequences.
        self._items: dict[str, MediaItem] = {}
        self._here: set[str] = set()
        self._unneeded: list[str] = []
        # Hash -> the sequences that wait for it, longest wait first.
        self._askers: dict[str, dict[RequestState, None]] = {}
        # Hash -> ids of the requests that were asked for it or promised it.
        self._makers: dict[str, set[str]] = {}
        # Of pictures and of films. Parts that got a maker since then, or lost their askers, stay for a while.
        self._queues: dict[bool, list[_Queued]] = {False: [], True: []}
        # How long each may become before those that stayed are removed.
        self._longest = {False: 32, True: 32}
        self._numbers = count()
        # The last picture and the last film asked for beyond the limit, and for which sequence.
        self._beyond: dict[bool, tuple[RequestState, tuple[str, ...]]] = {}
        # Asks not handed out yet, by request id and whether the pixels themselves must be sent.
        self._needed: dict[tuple[str, bool], list[str]] = {}

    def are_here(self, media_hash: str) -> bool:
        return media_hash in self._here

    def add(self, request: EngineRequest) -> None:
        own = {item.media_hash: item for item in request.media}
        self._items |= own
        # Pixels that are here already need not come again.
        for media_hash in (own.keys() & request.coming_media) - self._here:
            self._makers.setdefault(media_hash, set()).add(request.request_id)

    def forget(self, media_hash: str) -> None:
        """Forget an item that no live sequence has; for an encoding that has begun, its pixels may still be here."""
        del self._items[media_hash]

    def ask(self, state: RequestState, picture: Sequence[str], turn: EncoderTurn) -> None:
        """Ask for parts of a picture, together: each ask decodes the picture."""
        new = [each for each in picture if each not in self._here and state not in self._askers.get(each, ())]
        for media_hash in new:
            self._askers.setdefault(media_hash, {})[state] = None
        if new:
            self._queue(turn, new)

    def _queue(self, turn: EncoderTurn, picture: Sequence[str]) -> None:
        is_film = _is_of_film(self._items[picture[0]])
        queue = self._queues[is_film]
        if len(queue) >= self._longest[is_film]:
            queue[:] = [each for each in queue if self._list_unasked(each[-1])]
            heapify(queue)
            self._longest[is_film] = 2 * len(queue) + 32
        heappush(queue, (turn, next(self._numbers), picture))

    def ask_queued(self) -> list[bool]:
        """Ask for what is queued, turn by turn, while there is room. Return of which kinds (films?) any is left."""
        return [are_films for are_films, queue in self._queues.items() if self._ask_for(queue, are_films=are_films)]

    def _ask_for(self, queue: list[_Queued], *, are_films: bool) -> bool:
        room: int | None = None
        while queue:
            if picture := self._list_unasked(queue[0][-1]):
                room = self._count_room(are_films=are_films) if room is None else room
                if room <= 0:
                    return True
                room -= sum(self._items[each].span.length for each in picture)
                self._ask_all(picture)
            heappop(queue)
        return False

    def ask_beyond_limit(self, states: Iterable[RequestState], *, are_films: bool) -> None:
        """Ask for the next picture (or film) of the first of the sequences that does not wait for one on its way.

        One at a time, or the limit would be none; but a sequence does not wait for another behind it.
        """
        for state in states:
            if are_films in self._beyond and self._is_in_line_before(state, *self._beyond[are_films]):
                return
            picture = self._next_picture(state)
            is_of_kind = bool(picture) and _is_of_film(self._items[picture[0]]) is are_films
            if is_of_kind and not any(each in self._makers for each in picture):
                self._beyond[are_films] = (state, picture)
                self._ask_all(picture)
                return

    def _next_picture(self, state: RequestState) -> tuple[str, ...]:
        """Return the parts that the sequence waits for of the first picture of which it waits for any."""
        waited = (index for index, item in enumerate(state.media) if state in self._askers.get(item.media_hash, ()))
        _, parts = next(groupby(waited, state.pictures.__getitem__), (None, iter(())))
        return tuple(dict.fromkeys(state.media[index].media_hash for index in parts))

    def _is_in_line_before(self, state: RequestState, other: RequestState, picture: Iterable[str]) -> bool:
        is_in_line = other.status in (Status.WAITING, Status.PARKED) and other.order < state.order
        return is_in_line and any(each in self._makers or each in self._here for each in picture)

    def _count_room(self, *, are_films: bool) -> int:
        held = (self._items[each] for each in (*self._makers, *self._here) if each in self._items)
        return self._max_embeddings - sum(item.span.length for item in held if _is_of_film(item) is are_films)

    def _list_unasked(self, media_hashes: Iterable[str]) -> list[str]:
        return [each for each in media_hashes if each in self._askers and each not in self._makers]

    def _ask_all(self, media_hashes: Iterable[str]) -> None:
        for media_hash in media_hashes:
            self._ask_first(media_hash)

    def _ask_first(self, media_hash: str, *, inline: bool = False) -> None:
        """Ask the request that has waited longest."""
        request_id = next(iter(self._askers[media_hash])).request.request_id
        self._makers[media_hash] = {request_id}
        self._needed.setdefault((request_id, inline), []).append(media_hash)

    def remove_asker(self, state: RequestState) -> None:
        """Remove a sequence that left."""
        for media_hash in {item.media_hash for item in state.media}:
            askers = self._askers.get(media_hash, {})
            if state in askers:
                del askers[state]
                if not askers:
                    del self._askers[media_hash]
        self._beyond = {are_films: beyond for are_films, beyond in self._beyond.items() if beyond[0] is not state}

    def remove_maker(self, request: EngineRequest) -> None:
        """Remove a request that left; what it alone was to make is queued again if any request waits for it."""
        pictures: list[list[str]] = []
        for item in {each.media_hash: each for each in request.media}.values():
            media_hash = item.media_hash
            makers = self._makers.get(media_hash, set())
            makers.discard(request.request_id)
            if not (item.is_further_part and pictures):
                pictures.append([])
            if media_hash in self._makers and not makers:
                del self._makers[media_hash]
                if media_hash in self._askers:
                    pictures[-1].append(media_hash)
        for picture in filter(None, pictures):
            self._queue(min(_turn_of(state) for state in self._askers[picture[0]]), picture)

    def arrive(self, media_hash: str) -> Iterable[RequestState] | None:
        """Note that pixels came. Return the sequences that waited; None if the pixels were here already.

        All promises of them count as kept: one frontend may have sent them for all of its requests.
        """
        self._makers.pop(media_hash, None)
        if media_hash in self._here:
            return None
        self._here.add(media_hash)
        if media_hash in self._unneeded:
            self._unneeded.remove(media_hash)
        return self._askers.pop(media_hash, {})

    def can_be_made(self, media_hash: str) -> bool:
        """Return whether every request that waits for the pixels could make them if asked."""
        return not any(media_hash in state.request.unsent_media for state in self._askers.get(media_hash, ()))

    def lose(self, media_hash: str) -> None:
        """Note that pixels were not where they should lie. If any request waits, ask one to send them inline.

        Lost pixels are asked for together, since each ask decodes the picture.
        """
        self._makers.pop(media_hash, None)
        if media_hash in self._askers:
            self._ask_first(media_hash, inline=True)

    def give_up(self, media_hash: str) -> list[str]:
        """Note that pixels came and cannot be read. Return the requests that wait: all of them must be aborted.

        Others would make the same pixels, and another version's frontend is not connected. One that does not wait yet
        is asked if it comes to that.
        """
        self._makers.pop(media_hash, None)
        return list(dict.fromkeys(state.request.request_id for state in self._askers.get(media_hash, ())))

    def drop(self, media_hash: str) -> None:
        if media_hash in self._here:
            self._here.remove(media_hash)
            self._unneeded.append(media_hash)

    def take_unneeded(self) -> list[str]:
        taken, self._unneeded = self._unneeded, []
        return taken

    def take_needed(self) -> list[MediaNeeded]:
        needed, self._needed = self._needed, {}
        return [MediaNeeded(request_id, tuple(hashes), inline) for (request_id, inline), hashes in needed.items()]

    def check_invariants(self, live: Set[RequestState], usable_media: Set[str]) -> None:
        assert self._here <= usable_media
        assert self._items.keys() == {item.media_hash for state in live for item in state.media}
        queued = {each for queue in self._queues.values() for *_, picture in queue for each in picture}
        for media_hash, askers in self._askers.items():
            assert askers, media_hash
            assert media_hash not in self._here, media_hash
            assert askers.keys() <= live, media_hash
            assert media_hash in self._makers or media_hash in queued, f"nobody makes {media_hash}"
        assert all(state in live for state, _ in self._beyond.values())
        request_ids = {state.request.request_id for state in live}
        for media_hash, makers in self._makers.items():
            assert makers, media_hash
            assert media_hash not in self._here, media_hash
            assert makers <= request_ids, media_hash


def _is_of_film(item: MediaItem) -> bool:
    return item.modality == "video"


def _turn_of(asker: RequestState) -> EncoderTurn:
    assert asker.encoder_turn is not None, "set before it asks"
    return asker.encoder_turn
