"""A request in the form that the engine gets, and the means to make its pixels: only those that are asked for."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from keepsight.errors import PictureError, RequestFailedError, UnknownMediaError
from keepsight.frontend.identity.identify_picture import NamedPicture, ask_for_picture
from keepsight.frontend.pixels.make_pixels import MakePixels, run_job
from keepsight.frontend.prompt.thought_text import Thought
from keepsight.media import Modality
from keepsight.observe.account import RequestAccount
from keepsight.requests import Adapter, EngineRequest, Pixels, PromptPin


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """The engine's form of a request, and the means to make the pixels that the engine may ask for."""

    engine_request: EngineRequest
    # Pictures of which only the uuid was sent come last: the same picture may have been sent elsewhere in the request.
    _pictures: tuple[NamedPicture, ...] = ()
    # The caller's key for requests that share a beginning: they should go to one engine.
    cache_key: str | None = None
    # The prompt before its pictures' markers were expanded. None: it came as token ids, or as embeddings.
    text: str | None = None
    # The thought that each of its answers may begin with, to be split off.
    thought: Thought | None = None
    # Its answers continue the prompt's text, rather than begin texts of their own.
    continues_prompt: bool = True
    account: RequestAccount = field(kw_only=True)

    def pinned(self, seconds: float) -> "PreparedRequest":
        """Return this request with its whole prompt pinned for `seconds`."""
        pin = PromptPin(len(self.engine_request.token_ids), seconds)
        return replace(self, engine_request=replace(self.engine_request, pins=(pin,)))

    def adapted(self, adapter: Adapter | None) -> "PreparedRequest":
        """Return this request, to be answered by the model with this adapter."""
        if adapter is None:
            return self
        self.account.adapter = adapter.name
        return replace(self, engine_request=replace(self.engine_request, adapter=adapter))

    def asked_again(self) -> "PreparedRequest":
        """Return this request under another id, by which late outputs for the lost one are not taken for its own."""
        request = self.engine_request
        return replace(self, engine_request=replace(request, request_id=f"{request.request_id}'"))

    def as_vector(self) -> "PreparedRequest":
        """Return this request, asking for the prompt's vector instead of an answer."""
        self.account.wants_answer = False
        return replace(self, engine_request=replace(self.engine_request, wants_vector=True))

    @property
    def makeable_media(self) -> tuple[str, ...]:
        """The hashes that `pixels_of` can be asked for, each once."""
        return tuple(makeable_of(self._pictures))

    def find_unknown(self, media_hashes: Collection[str]) -> UnknownMediaError | None:
        """Return the error that `pixels_of` would raise because only the uuid of one of these was sent, else None."""
        pictures = (self._picture_of(media_hash).picture for media_hash in media_hashes)
        return next((ask_for_picture(each.field, each.uuid) for each in pictures if each.source is None), None)

    def hashes_at(self, field: str) -> tuple[str, ...]:
        """Return the hashes of the picture that the caller sent at `field`, as requests that come now would name it."""
        return tuple(each for named in self._pictures if named.picture.field == field for each in named.current_names())

    def had_to_make(self, field: str) -> bool:
        """Return whether anything had to be made, so far, for the picture that the caller sent at `field`."""
        return any(self.account.had_to_make(named.parts) for named in self._pictures if named.picture.field == field)

    def forget_names(self) -> None:
        """Free the uuids of media that could not be made, unless they named something before, or do by now."""
        for named in self._pictures:
            named.forget()

    @contextmanager
    def free_names_if_refused(self) -> Iterator[None]:
        """Forget the names if a check within the block refuses the request."""
        try:
            yield
        except Exception:
            self.forget_names()
            raise

    def learn(self, made: Mapping[str, Pixels]) -> None:
        """Learn from pixels which contents are the same picture. Computes a digest of each."""
        for media_hash, pixels in made.items():
            self._picture_of(media_hash).learn(media_hash, pixels)

    def pixels_of(self, media_hashes: Collection[str], make: MakePixels = run_job) -> dict[str, Pixels]:
        """Make pixels, decoding each picture once for all its parts. Raises PictureError if one cannot be decoded."""
        made: dict[str, Pixels] = {}
        for group in self.group_by_picture(media_hashes):
            made |= make(self._picture_of(group[0]).job(group)).pixels
        return made

    def modality_of(self, media_hash: str) -> Modality:
        return self._picture_of(media_hash).picture.modality

    def count_modalities(self, media_hashes: Iterable[str]) -> Counter[Modality]:
        """Count these media by modality."""
        known = {item.media_hash: item.modality for item in self.engine_request.media}
        return Counter(known[media_hash] for media_hash in media_hashes)

    def group_by_picture(self, media_hashes: Collection[str]) -> list[tuple[str, ...]]:
        """Group hashes that should be made together: by picture, each hash once, however often the request shows it."""
        groups, left = [], set(media_hashes)
        for picture in self._pictures:
            if group := tuple(each for each in picture.parts if each in left):
                left.difference_update(group)
                groups.append(group)
        assert not left, "another request's media"
        return groups

    def as_own(self, error: Exception, media_hash: str) -> Exception:
        """Return an error that failed several requests, in the terms of this request's caller.

        Never the same object: a shared error would collect the traceback frames of all that raise it.
        """
        if isinstance(error, PictureError):
            return type(error)(self._picture_of(media_hash).picture.field, error.message)
        if isinstance(error, RequestFailedError):
            return type(error)(error.message)
        own = RuntimeError(f"pixels could not be made: {error!r}")
        own.__cause__ = error
        return own

    def _picture_of(self, media_hash: str) -> NamedPicture:
        return next(picture for picture in self._pictures if media_hash in picture.parts)


def makeable_of(pictures: Iterable[NamedPicture]) -> dict[str, None]:
    """Return the hashes of all sent pictures, in order. A picture sent only by uuid may have come with another one."""
    sent = (named for named in pictures if named.picture.source is not None)
    return dict.fromkeys(media_hash for named in sent for media_hash in named.parts)
