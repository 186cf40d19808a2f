"""A request as the engine is told of it, and the way to its pixels: only of those pictures that somebody asks for."""

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
    """What the engine is told of a request, and the way to the pixels that it may ask for."""

    engine_request: EngineRequest
    # Those of which only the uuid came last: one may come with another's.
    _pictures: tuple[NamedPicture, ...] = ()
    # The caller's word for what shares a beginning: to be given to one engine.
    cache_key: str | None = None
    # As it was before its pictures were written out.  None: it came as token ids, or as embeddings.
    text: str | None = None
    # What each of its answers may begin with, to be told apart.
    thought: Thought | None = None
    # Its answers go on with its text: they are none of their own.
    goes_on: bool = True
    account: RequestAccount = field(kw_only=True)

    def pinned(self, seconds: float) -> "PreparedRequest":
        """All of its prompt is to be found again for so long."""
        pin = PromptPin(len(self.engine_request.token_ids), seconds)
        return replace(self, engine_request=replace(self.engine_request, pins=(pin,)))

    def adapted(self, adapter: Adapter | None) -> "PreparedRequest":
        """To be answered by the model as this changes it."""
        if adapter is None:
            return self
        self.account.adapter = adapter.name
        return replace(self, engine_request=replace(self.engine_request, adapter=adapter))

    def as_vector(self) -> "PreparedRequest":
        """To be told what the model made of its prompt, not how that goes on."""
        self.account.wants_answer = False
        return replace(self, engine_request=replace(self.engine_request, wants_vector=True))

    @property
    def makeable_media(self) -> tuple[str, ...]:
        """Hashes of what `pixels_of` can be asked for, each once."""
        return tuple(makeable_of(self._pictures))

    def find_unknown(self, media_hashes: Collection[str]) -> UnknownMediaError | None:
        """What `pixels_of` would raise of these, because only the uuid of one came."""
        pictures = (self._picture_of(media_hash).picture for media_hash in media_hashes)
        return next((ask_for_picture(each.field, each.uuid) for each in pictures if each.source is None), None)

    def hashes_at(self, field: str) -> tuple[str, ...]:
        """Of the picture that the caller has there, as requests name it that come now."""
        return tuple(each for named in self._pictures if named.picture.field == field for each in named.names_by_now())

    def forget_names(self) -> None:
        """Its media could not be made: their uuids are free again, unless they named something before."""
        for named in self._pictures:
            named.forget()

    @contextmanager
    def free_names_if_refused(self) -> Iterator[None]:
        """By what is still to be checked of it."""
        try:
            yield
        except Exception:
            self.forget_names()
            raise

    def learn(self, made: Mapping[str, Pixels]) -> None:
        """What these pixels show: which content is the same picture.  Takes a digest of each."""
        for media_hash, pixels in made.items():
            self._picture_of(media_hash).learn(media_hash, pixels)

    def pixels_of(self, media_hashes: Collection[str], make: MakePixels = run_job) -> dict[str, Pixels]:
        """A picture is decoded once, whatever is asked for of it; raises PictureError if it cannot be."""
        made: dict[str, Pixels] = {}
        for group in self.group_by_picture(media_hashes):
            made |= make(self._picture_of(group[0]).job(group)).pixels
        return made

    def modality_of(self, media_hash: str) -> Modality:
        return self._picture_of(media_hash).picture.modality

    def count_modalities(self, media_hashes: Iterable[str]) -> Counter[Modality]:
        """How many of each there are among these."""
        known = {item.media_hash: item.modality for item in self.engine_request.media}
        return Counter(known[media_hash] for media_hash in media_hashes)

    def group_by_picture(self, media_hashes: Collection[str]) -> list[tuple[str, ...]]:
        """What had best be made together; each of them once, however often the request shows it."""
        groups, left = [], set(media_hashes)
        for picture in self._pictures:
            if group := tuple(each for each in picture.parts if each in left):
                left.difference_update(group)
                groups.append(group)
        assert not left, "another request's media"
        return groups

    def as_own(self, error: Exception, media_hash: str) -> Exception:
        """What failed for all who wait, as this one's caller knows it.

        Never the same object: raised by many, it would gather the frames of them all.
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
    """In their order.  What has only its uuid may have come with another's."""
    sent = (named for named in pictures if named.picture.source is not None)
    return dict.fromkeys(media_hash for named in sent for media_hash in named.parts)
