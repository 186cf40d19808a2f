"""A fake prepared request with everything that an engine client and its media pool need."""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from keepsight.frontend.pixels.make_pixels import MakePixels, run_job
from keepsight.media import Modality
from keepsight.observe.account import RequestAccount, ShownItem
from keepsight.requests import EngineRequest, Pixels
from keepsight.testing import pixels_like


@dataclass
class MadeUpRequest:
    engine_request: EngineRequest
    cache_key: str | None = field(default=None, kw_only=True)
    account: RequestAccount = field(init=False)

    def __post_init__(self) -> None:
        request = self.engine_request
        media = [ShownItem(item.media_hash, item.span.length, item.modality) for item in request.media]
        self.account = RequestAccount(request.request_id, media, len(request.token_ids))

    @property
    def makeable_media(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(item.media_hash for item in self.engine_request.media))

    def modality_of(self, media_hash: str) -> Modality:
        return next(item.modality for item in self.engine_request.media if item.media_hash == media_hash)

    def count_modalities(self, media_hashes: Iterable[str]) -> Counter[Modality]:
        return Counter(map(self.modality_of, media_hashes))

    def group_by_picture(self, media_hashes: Collection[str]) -> list[tuple[str, ...]]:
        return [(each,) for each in sorted(media_hashes)]

    def pixels_of(self, media_hashes: Collection[str], _make: MakePixels = run_job) -> dict[str, Pixels]:
        return {each: self.make(each) for each in media_hashes}

    def make(self, media_hash: str) -> Pixels:
        return pixels_like(media_hash)

    def as_own(self, error: Exception, _media_hash: str) -> Exception:
        return error

    def learn(self, _made: object) -> None:
        pass

    def forget_names(self) -> None:
        pass

    def find_unknown(self, _media_hashes: object) -> None:
        return None
