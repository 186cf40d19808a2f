"""Tracks which pixels are here, which sequences wait for others, and which requests were asked for or promised them.

While one request is making a media item's pixels, no other is asked.  Invariant: whatever is waited for has a maker.
"""

from collections.abc import Iterable, Set

from keepsight.requests import EngineRequest, MediaNeeded
from keepsight.scheduling.request_state import RequestState


class PixelRequests:
    def __init__(self) -> None:
        self._here: set[str] = set()
        self._unneeded: list[str] = []
        # Hash -> the sequences that wait for it, longest wait first.
        self._askers: dict[str, dict[RequestState, None]] = {}
        # Hash -> ids of the requests that were asked for it or promised it.
        self._makers: dict[str, set[str]] = {}
        # Asks not handed out yet, by request id and whether the pixels themselves must be sent.
        self._needed: dict[tuple[str, bool], list[str]] = {}

    def are_here(self, media_hash: str) -> bool:
        return media_hash in self._here

    def note_promises(self, request: EngineRequest) -> None:
        own = {item.media_hash for item in request.media}
        # Pixels that are here already need not come again.
        for media_hash in own.intersection(request.coming_media) - self._here:
            self._makers.setdefault(media_hash, set()).add(request.request_id)

    def ask(self, state: RequestState, media_hash: str) -> None:
        if media_hash in self._here:
            return
        self._askers.setdefault(media_hash, {}).setdefault(state)
        if media_hash not in self._makers:
            self._ask_first(media_hash)

    def _ask_first(self, media_hash: str, *, inline: bool = False) -> None:
        """Ask the request that has waited longest."""
        request_id = next(iter(self._askers[media_hash])).request.request_id
        self._makers[media_hash] = {request_id}
        self._needed.setdefault((request_id, inline), []).append(media_hash)

    def stop_waiting(self, state: RequestState, media_hash: str) -> None:
        askers = self._askers.get(media_hash, {})
        if state in askers:
            del askers[state]
            if not askers:
                del self._askers[media_hash]

    def remove_maker(self, request: EngineRequest) -> None:
        """Remove a request that left; where it was the only maker, ask the next request that waits."""
        for media_hash in dict.fromkeys(item.media_hash for item in request.media):
            makers = self._makers.get(media_hash, set())
            makers.discard(request.request_id)
            if media_hash in self._makers and not makers:
                del self._makers[media_hash]
                if media_hash in self._askers:
                    self._ask_first(media_hash)

    def arrive(self, media_hash: str) -> Iterable[RequestState] | None:
        """Note that pixels came.  Return the sequences that waited; None if the pixels were here already.

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
        """Note that pixels were not where they should lie.  If any request waits, ask one to send them inline.

        Lost pixels are asked for together, since each ask decodes the picture.
        """
        self._makers.pop(media_hash, None)
        if media_hash in self._askers:
            self._ask_first(media_hash, inline=True)

    def give_up(self, media_hash: str) -> list[str]:
        """Note that pixels came and cannot be read.  Return the requests that wait: all of them must be aborted.

        Others would make the same pixels, and another version's frontend is not connected.  One that does not wait yet
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
        for media_hash, askers in self._askers.items():
            assert askers, media_hash
            assert media_hash not in self._here, media_hash
            assert askers.keys() <= live, media_hash
            assert media_hash in self._makers, f"nobody makes {media_hash}"
        request_ids = {state.request.request_id for state in live}
        for media_hash, makers in self._makers.items():
            assert makers, media_hash
            assert media_hash not in self._here, media_hash
            assert makers <= request_ids, media_hash
