"""All media of a request, from wherever they lie to their bytes: objects, `data:`, `file:`, `http:` and `https:`.

A server awaits what must be downloaded (`fetch_ahead`), so that a slow origin holds no thread; `LLM` just waits for it.
May be used from several threads.
"""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Self

from keepsight.config import Config
from keepsight.frontend.downloads import Downloads
from keepsight.frontend.fetch_media import fetch_media
from keepsight.frontend.fetch_url import UrlFetcher
from keepsight.frontend.local_files import LocalFiles
from keepsight.frontend.media_limits import MediaLimits
from keepsight.frontend.network_guard import NetworkGuard
from keepsight.frontend.open_picture import PictureSource
from keepsight.frontend.read_messages import PicturePart

Downloaded = Mapping[str, bytes]  # by URL
NOTHING_DOWNLOADED: Downloaded = {}
WEB_SCHEMES = ("http", "https")
LONGEST_SCHEME = 16


class MediaIntake:
    def __init__(self, limits: MediaLimits, files: LocalFiles, downloads: Downloads) -> None:
        self._limits, self._files, self.downloads = limits, files, downloads

    @classmethod
    def from_config(cls, config: Config) -> Self:
        limits = MediaLimits.from_config(config)
        guard = NetworkGuard(config.allowed_media_domains, config.allowed_media_networks)
        open_fetcher = partial(UrlFetcher, guard, limits.max_bytes, limits.fetch_seconds)
        downloads = Downloads(open_fetcher, limits, config.media_url_cache_bytes)
        return cls(limits, LocalFiles(config.allowed_local_media_path, limits.max_bytes), downloads)

    async def fetch_ahead(self, parts: Sequence[PicturePart], cache_salt: str | None) -> Downloaded:
        """What `fetch_all` will want of the network; from any event loop."""
        self._limits.check_count(parts)
        fields = _remote_fields(parts)
        if not fields:
            return NOTHING_DOWNLOADED
        return await asyncio.wrap_future(self.downloads.start(fields, cache_salt))

    def fetch_all(
        self, parts: Sequence[PicturePart], cache_salt: str | None, downloaded: Downloaded = NOTHING_DOWNLOADED
    ) -> list[PictureSource]:
        """One for each part; downloads what was not downloaded ahead."""
        self._limits.check_count(parts)
        missing = {url: field for url, field in _remote_fields(parts).items() if url not in downloaded}
        if missing:
            downloaded = {**downloaded, **self._download(missing, cache_salt)}
        budget = self._limits.count_bytes()
        sources = []
        for part in parts:
            source = self._take(part, downloaded)
            if isinstance(source, bytes):
                self._limits.check_size(len(source), part.field)
                budget.add(len(source), part.field)
            sources.append(source)
        return sources

    def close(self) -> None:
        """Ends what is being downloaded; nothing is any more."""
        self.downloads.close()

    def _download(self, fields: Mapping[str, str], cache_salt: str | None) -> Downloaded:
        future = self.downloads.start(fields, cache_salt)
        try:
            return future.result()
        finally:
            future.cancel()  # whoever interrupts the waiting wants none of it any more

    def _take(self, part: PicturePart, downloaded: Downloaded) -> PictureSource:
        source, field = part.source, part.field
        match source, _scheme_of(source):
            case str(), "http" | "https":
                return downloaded[source]
            case str(), "file":
                return self._files.read(source, field)
            case _:
                return fetch_media(source, field, self._limits.max_bytes)


def _remote_fields(parts: Sequence[PicturePart]) -> dict[str, str]:
    """By URL, what the caller calls its first picture."""
    fields: dict[str, str] = {}
    for part in parts:
        if isinstance(part.source, str) and _scheme_of(part.source) in WEB_SCHEMES:
            fields.setdefault(part.source, part.field)
    return fields


def _scheme_of(source: object) -> str | None:
    """By the first characters alone: the rest may be megabytes."""
    return source[:LONGEST_SCHEME].partition(":")[0].lower() if isinstance(source, str) else None
