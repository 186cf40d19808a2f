"""The administrator's view of the processor cache: which pictures it holds, how they look, and their pins.

Knows neither who sent them nor how they got there. Viewing does not count as a use: the eviction order stays the same.
"""

import io

import msgspec
from PIL import Image
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from keepsight.frontend.api.pixel_pins import PixelPins
from keepsight.frontend.http.error_response import json_response
from keepsight.frontend.intake.media_handles import ADMINISTRATOR
from keepsight.frontend.pixels.pixel_cache import PixelCache
from keepsight.pixels import HeldPixels, show_a_picture
from keepsight.requests import Pixels

MAX_LISTED = 60
# Length in pixels of a thumbnail's longer side.
THUMBNAIL_SIDE = 160
PIN_SECONDS = 3600.0


class HeldList(msgspec.Struct, frozen=True):
    # The most recently used first.
    data: list[HeldPixels]


class HeldPictures:
    def __init__(self, cache: PixelCache, pins: PixelPins) -> None:
        self._cache, self._pins = cache, pins

    @property
    def routes(self) -> list[Route]:
        one = "/debug/pictures/{media_hash}"
        return [
            Route("/debug/pictures", self.list_newest),
            Route(one, self.show),
            Route(f"{one}/pin", self.pin, methods=["POST"]),
            Route(f"{one}/pin", self.unpin, methods=["DELETE"]),
        ]

    async def list_newest(self, _http: Request) -> Response:
        return json_response(await run_in_threadpool(self._list))

    async def show(self, http: Request) -> Response:
        """Return a thumbnail of the picture as the model sees it: resized for the tower."""
        content = await run_in_threadpool(self._draw, http.path_params["media_hash"])
        if content is None:
            raise HTTPException(404, "its pixels are not cached (any more), or it never had any")
        # The content of a hash never changes, so it could be cached forever, but it must not stay on a browser's disk.
        return Response(content, headers={"Cache-Control": "no-store"}, media_type="image/jpeg")

    async def pin(self, http: Request) -> Response:
        """Pin the picture for an hour from now."""
        is_pinned = await run_in_threadpool(self._pins.pin, ADMINISTRATOR, http.path_params["media_hash"], PIN_SECONDS)
        if not is_pinned:
            raise HTTPException(409, "it is no longer cached, or its pin would leave too little room for others")
        return json_response({"is_pinned": True})

    async def unpin(self, http: Request) -> Response:
        """Unpin the picture, no matter who pinned it."""
        await run_in_threadpool(self._pins.unpin, http.path_params["media_hash"])
        return json_response({"is_pinned": False})

    def _list(self) -> HeldList:
        """Return the newest entries, without embeddings that callers computed, which cannot be shown."""
        newest = self._cache.newest(MAX_LISTED)
        return HeldList([each for each in newest if self._cache.shows_a_picture(each.media_hash)])

    def _draw(self, media_hash: str) -> bytes | None:
        pixels = self._cache.look(media_hash)
        return None if pixels is None or not show_a_picture(pixels) else draw_small(pixels)


def draw_small(pixels: Pixels) -> bytes:
    picture = Image.fromarray(pixels)
    picture.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    content = io.BytesIO()
    picture.save(content, "JPEG", quality=85)
    return content.getvalue()
