"""Fetches the bytes of all media of a request: objects, `data:`, `file:`, `http:` and `https:` URLs.

A server awaits the downloads (`download`) before the request occupies a thread; `LLM` simply waits for them. May be
used from several threads.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from keepsight.config import Config
from keepsight.errors import PictureEmbedsError, UnsupportedFieldError
from keepsight.frontend.intake.downloads import Downloads
from keepsight.frontend.intake.fetch_media import fetch_data_url, scheme_of
from keepsight.frontend.intake.fetch_url import UrlFetcher
from keepsight.frontend.intake.local_files import LocalFiles
from keepsight.frontend.intake.media_limits import MediaLimits, RequestBytes
from keepsight.frontend.intake.network_guard import NetworkGuard
from keepsight.frontend.intake.read_embeds import fetch_embeds
from keepsight.frontend.prompt.read_messages import DocumentPart, PicturePart
from keepsight.media import Modality


class HeldFile(NamedTuple):
    """An earlier upload: its content and its file name."""

    content: bytes
    name: str | None


Downloaded = Mapping[str, bytes | HeldFile]  # by URL
NOTHING_DOWNLOADED: Downloaded = {}


class MediaIntake:
    def __init__(self, config: Config, why_no_embeds: str | None = None) -> None:
        """`why_no_embeds`: why the model takes none in place of pictures, whatever the configuration says."""
        self._limits = limits = MediaLimits.from_config(config)
        self._files = LocalFiles(config.allowed_local_media_path, limits.max_bytes)
        guard = NetworkGuard(config.allowed_media_domains, config.allowed_media_networks)
        open_fetcher = partial(UrlFetcher, guard, limits.max_bytes, limits.fetch_seconds)
        self._downloads = Downloads(open_fetcher, limits, config.media_url_cache_bytes)
        self._takes_embeds, self._takes_prompt_embeds = config.enable_mm_embeds, config.enable_prompt_embeds
        self._why_no_embeds = why_no_embeds

    def check_count(self, parts: Sequence[PicturePart]) -> None:
        self._limits.check_count(parts)

    def find_remote(self, parts: Sequence[PicturePart]) -> list[PicturePart]:
        """Return the parts that have to be downloaded. Refuses parts that may not be sent, before any download."""
        self.check_count(parts)
        self._check_embeds(parts)
        return [part for part in parts if _scheme_of(part) in ("http", "https")]

    def find_handles(self, parts: Sequence[PicturePart]) -> list[PicturePart]:
        """Return the parts that name an upload; `fetch_all` looks up their bytes in `downloaded`."""
        return [part for part in parts if _scheme_of(part) == "media"]

    def watch_downloads(self, on_fetched: Callable[[Modality], object]) -> None:
        """Call `on_fetched` for each download, on the download thread."""
        self._downloads.cache.on_fetched = on_fetched

    def count_bytes(self) -> RequestBytes:
        return self._limits.count_bytes()

    async def download(self, remote: Sequence[PicturePart], cache_salt: str | None) -> Downloaded:
        """Download parts for `fetch_all`. May be awaited in any event loop."""
        return await asyncio.wrap_future(self._downloads.start(_by_url(remote), cache_salt))

    def fetch_all(
        self, parts: Sequence[PicturePart], cache_salt: str | None, downloaded: Downloaded = NOTHING_DOWNLOADED
    ) -> list[PicturePart]:
        """Return the parts with bytes in place of URLs. Downloads URLs that are not in `downloaded`.

        Nothing is read any more once the request's media have more bytes than all may have.
        """
        missing = [part for part in self.find_remote(parts) if part.source not in downloaded]
        if missing:
            downloaded = {**downloaded, **self._wait_for(missing, cache_salt)}
        contents, budget, fetched = dict(downloaded), self.count_bytes(), []
        for part in parts:
            fetched.append(self._fetch(part, contents, budget))
            self._count(fetched[-1].source, part.field, budget)
        return fetched

    def fetch_prompts(self, sources: Mapping[str, object]) -> dict[str, object]:
        """Return prompt embeddings, by their fields in the request, with bytes in place of texts."""
        for field in sources:
            if not self._takes_prompt_embeds:
                raise UnsupportedFieldError(
                    field,
                    "embeddings instead of a prompt are accepted only with --enable-prompt-embeds "
                    "(LLM: enable_prompt_embeds=True)",
                )
        budget, fetched = self.count_bytes(), dict[str, object]()
        for field, source in sources.items():
            fetched[field] = fetch_embeds(source, field, self._limits.max_bytes)
            self._count(fetched[field], field, budget)
        return fetched

    def close(self) -> None:
        """Cancel running downloads; no more can be started."""
        self._downloads.close()

    def _wait_for(self, remote: Sequence[PicturePart], cache_salt: str | None) -> Downloaded:
        future = self._downloads.start(_by_url(remote), cache_salt)
        try:
            return future.result()
        finally:
            future.cancel()  # if the wait is interrupted, the downloads are not needed any more

    def _count(self, source: object, field: str, budget: RequestBytes) -> None:
        """Check the bytes of a source, by themselves and together with those counted before."""
        if isinstance(source, bytes | bytearray | memoryview):
            num_bytes = memoryview(source).nbytes
            self._limits.check_size(num_bytes, field)
            budget.add(num_bytes, field)

    def _check_embeds(self, parts: Sequence[PicturePart]) -> None:
        for part in parts:
            if part.modality != "image_embeds":
                continue
            if self._why_no_embeds is not None:
                raise PictureEmbedsError(part.field, self._why_no_embeds)
            if not self._takes_embeds:
                raise UnsupportedFieldError(
                    part.field,
                    "embeddings instead of a picture are accepted only with --enable-mm-embeds "
                    "(LLM: enable_mm_embeds=True)",
                )

    def _fetch(self, part: PicturePart, contents: dict[str, bytes | HeldFile], budget: RequestBytes) -> PicturePart:
        """`contents`: by URL; a file is added to it, so that a request reads each only once."""
        if part.modality == "image_embeds":
            return dataclasses.replace(part, source=fetch_embeds(part.source, part.field, self._limits.max_bytes))
        source = part.source
        if not isinstance(source, str):
            return part  # an object, or only a uuid
        scheme = scheme_of(source)
        if scheme == "file" and source not in contents:
            contents[source] = self._files.read(source, part.field, budget)
        if scheme in ("http", "https", "media", "file") and source in contents:
            content: object = contents[source]
            if isinstance(content, HeldFile):
                part, content = _named_as(content, part), content.content
        else:
            content = fetch_data_url(source, part.field, self._limits.max_bytes)
        return dataclasses.replace(part, source=content)


def _by_url(remote: Sequence[PicturePart]) -> dict[str, PicturePart]:
    """Return the first part of each URL."""
    parts: dict[str, PicturePart] = {}
    for part in remote:
        parts.setdefault(str(part.source), part)
    return parts


def _named_as(held: HeldFile, part: PicturePart) -> PicturePart:
    """Give a document the file name of its upload, unless the request names it."""
    if isinstance(part, DocumentPart) and part.name is None:
        return dataclasses.replace(part, name=held.name)
    return part


def _scheme_of(part: PicturePart) -> str | None:
    """Return the scheme of the part's URL. Embeddings are never fetched: they are always in the request itself."""
    if part.modality == "image_embeds" or not isinstance(part.source, str):
        return None
    return scheme_of(part.source)
