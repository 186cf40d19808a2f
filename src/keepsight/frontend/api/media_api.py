"""`/v1/media`: upload pictures, films, sounds and PDFs once and refer to them by handle; report which tiers hold them,
and warm or pin them.

Independent of where bytes are stored and how pixels are made. Each API key is a tenant of its own; without keys all
callers are one tenant.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from keepsight.errors import MediaStoreError, UnknownHandleError
from keepsight.frontend.api.access import tenant_of
from keepsight.frontend.api.answer import Engine
from keepsight.frontend.api.pixel_pins import PixelPins
from keepsight.frontend.api.read_list_query import PAGE_PARAMETERS, read_page_query, refuse_unknown_parameters
from keepsight.frontend.api.read_upload import Upload, UploadOptions, read_options, read_upload
from keepsight.frontend.http.decode_body import Buffer
from keepsight.frontend.http.error_response import json_response
from keepsight.frontend.http.unless_client_leaves import unless_client_leaves
from keepsight.frontend.identity.identify_picture import NamedPicture
from keepsight.frontend.intake.media_handles import NO_LABEL, FileLabel, MediaHandle, MediaHandles, PinHolder
from keepsight.frontend.intake.media_intake import NOTHING_DOWNLOADED, Downloaded, HeldFile
from keepsight.frontend.intake.read_document import PageSource
from keepsight.frontend.pixels.pixel_cache import PixelCache
from keepsight.frontend.prepare_request import RequestPreparer
from keepsight.frontend.prepared_request import PreparedRequest
from keepsight.frontend.prompt.read_messages import Conversation, DocumentPart, PicturePart, show_to_template
from keepsight.media import Geometry
from keepsight.observe.format_account import format_for_header
from keepsight.sampling_params import SamplingParams

# Out of the 40 threads that all requests share: a film occupies one while it waits for a worker to look at it.
MAX_UPLOADS_LOOKED_AT = 4
# Behind the default of 0: requests whose clients wait for an answer go before warming.
WARM_PRIORITY = 1

# The request counts as waiting (`WaitingRoom`) until the context exits.
ReadBody = Callable[[Request], AbstractAsyncContextManager[Buffer]]
# Maps a request and the salt that it asks for to the salt that it gets.
SaltOf = Callable[[Request, str | None], str | None]


class Saved(msgspec.Struct, frozen=True):
    # Bytes not uploaded again, and media not preprocessed again.
    upload_bytes: int
    preprocessings: int


class Tiers(msgspec.Struct, frozen=True):
    """Where it is held: its bytes; its pixels; anything made of it, which is partly a hint; what engines answered."""

    bytes: bool
    processor_cache: bool
    engine: bool
    # The tiers that hold its embeddings, nearest first; and whether keys and values of it are held.
    embeddings: tuple[str, ...]
    prefix: bool


class Pinned(msgspec.Struct, frozen=True):
    bytes: bool
    pixels: bool


@dataclass(frozen=True, slots=True)
class PixelPin:
    """A picture of a request whose pixels are to be kept after the answer."""

    field: str
    seconds: float
    # Of the handle that the request shows there; "": none.
    media_id: str


@dataclass(frozen=True, slots=True)
class UsedMedia:
    """What is recorded of a request's media once its answer has begun."""

    pins: Sequence[PixelPin] = ()
    # By the handle's id: where the request shows it.
    handles: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.pins or self.handles)


NOTHING_USED = UsedMedia()


class MediaObject(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["media"] = "media"
    bytes: int
    # A sound has neither, but the number of samples that the model is given; a PDF has only its number of pages.
    width: int | UnsetType = UNSET
    height: int | UnsetType = UNSET
    num_samples: int | UnsetType = UNSET
    num_pages: int | UnsetType = UNSET
    sha256: str
    created: int
    expires_at: int
    pinned_until: int | None
    uses: int
    saved: Saved
    # Not set in lists.
    tiers: Tiers | UnsetType = UNSET
    pinned: Pinned | UnsetType = UNSET

    @classmethod
    def of(
        cls, handle: MediaHandle, tiers: Tiers | UnsetType = UNSET, pinned: Pinned | UnsetType = UNSET
    ) -> "MediaObject":
        until = handle.pinned_until
        return cls(
            id=handle.id,
            bytes=handle.num_bytes,
            width=handle.width or UNSET,
            height=handle.height or UNSET,
            num_samples=handle.num_samples or UNSET,
            num_pages=handle.num_pages or UNSET,
            sha256=handle.sha256,
            created=int(handle.created),
            expires_at=int(handle.expires),
            pinned_until=None if until is None else int(until),
            uses=handle.num_uses,
            saved=Saved(handle.num_uses * handle.num_bytes, handle.num_spared),
            tiers=tiers,
            pinned=pinned,
        )


class MediaPage(msgspec.Struct, frozen=True):
    data: list[MediaObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class DeletedMedia(msgspec.Struct, frozen=True):
    id: str
    object: Literal["media"] = "media"
    deleted: Literal[True] = True


@dataclass(frozen=True, slots=True)
class _Named:
    """An upload, as the media that it is shown as: one picture, film or sound, or the pages of a PDF."""

    shown: tuple[NamedPicture, ...]

    @property
    def field(self) -> str:
        return self.shown[0].picture.field

    @property
    def content(self) -> bytes:
        source = self.shown[0].picture.source
        content = source.document if isinstance(source, PageSource) else source
        assert isinstance(content, bytes)
        return content

    @property
    def num_pages(self) -> int:
        return len(self.shown) if isinstance(self.shown[0].picture.source, PageSource) else 0

    @property
    def geometry(self) -> Geometry:
        return Geometry() if self.num_pages else self.shown[0].picture.geometry

    @property
    def media_hashes(self) -> list[str]:
        return [media_hash for named in self.shown for media_hash in named.parts]

    def as_conversation(self, filename: str | None) -> Conversation:
        part = PicturePart(self.content, self.field, modality=self.shown[0].picture.modality)
        if self.num_pages:
            part = DocumentPart(self.content, self.field, name=filename)
        return Conversation([{"role": "user", "content": [show_to_template(part.kind)]}], (part,))


class MediaApi:
    def __init__(
        self,
        preparer: RequestPreparer,
        engine: Engine,
        handles: MediaHandles,
        pixel_cache: PixelCache,
        pins: PixelPins,
        reading_body: ReadBody,
        salt_of: SaltOf,
    ) -> None:
        self._preparer, self._engine, self._handles = preparer, engine, handles
        self._pixel_cache, self._pins = pixel_cache, pins
        self._reading_body, self._salt_of = reading_body, salt_of
        self._looking = asyncio.Semaphore(MAX_UPLOADS_LOOKED_AT)

    @property
    def routes(self) -> list[Route]:
        one = "/v1/media/{id}"
        return [
            Route("/v1/media", self.upload, methods=["POST"]),
            Route("/v1/media", self.list_page, methods=["GET"]),
            Route(one, self.retrieve, methods=["GET"]),
            Route(one, self.delete, methods=["DELETE"]),
            Route(f"{one}/pin", self.pin, methods=["POST"]),
        ]

    # Endpoints ------------------------------------------------------------------------------------------------

    async def upload(self, http: Request) -> Response:
        async with self._reading_body(http) as body:
            content_type = http.headers.get("content-type", "")
            upload = await run_in_threadpool(read_upload, content_type, body, http.query_params)
            handle, named = await self.take_in(http, upload)
        # Without a place among the requests that wait: an engine may be asked for a second.
        return _respond(http, MediaObject.of(handle, await self._tiers_of(named)))

    async def take_in(self, http: Request, upload: Upload, label: FileLabel = NO_LABEL) -> tuple[MediaHandle, _Named]:
        part = PicturePart(upload.source, upload.field)
        salt = self._salt_of(http, upload.options.cache_salt)
        remote = self._preparer.intake.find_remote([part])
        downloaded = NOTHING_DOWNLOADED
        if remote:
            downloaded = await unless_client_leaves(http.receive, self._preparer.intake.download(remote, salt))
        named = await self._name(part, salt, downloaded)
        described = (named.content, named.geometry, upload.options.ttl_seconds, named.num_pages, label)
        handle = await run_in_threadpool(self._handles.add, tenant_of(http), *described)
        if upload.options.warm:
            try:
                await unless_client_leaves(http.receive, self._warm(http, named, salt, label.filename))
            except Exception:
                await run_in_threadpool(self._handles.delete, tenant_of(http), handle.id)
                raise
        return handle, named

    async def list_page(self, http: Request) -> Response:
        refuse_unknown_parameters(http, PAGE_PARAMETERS)
        limit, after, is_ascending = read_page_query(http)
        page = await run_in_threadpool(self._handles.page, tenant_of(http), limit, after, is_ascending=is_ascending)
        return json_response(MediaPage([MediaObject.of(each) for each in page.shown], *page.ends, page.has_more))

    async def retrieve(self, http: Request) -> Response:
        handle, named = await self._find(http, _read_salt(http))
        return json_response(MediaObject.of(handle, await self._tiers_of(named)))

    async def delete(self, http: Request) -> Response:
        return json_response(DeletedMedia((await self.forget(http)).id))

    async def forget(self, http: Request) -> MediaHandle:
        _read_salt(http)  # accepted, but the handle's pins end under any salt
        return await run_in_threadpool(self._delete, tenant_of(http), http.path_params["id"])

    async def pin(self, http: Request) -> Response:
        async with self._reading_body(http) as body:
            handle, named, pinned = await self._pin_for(http, read_options(bytes(body), http.query_params))
        return _respond(http, MediaObject.of(handle, await self._tiers_of(named), pinned))

    async def _pin_for(self, http: Request, options: UploadOptions) -> tuple[MediaHandle, _Named, Pinned]:
        found, named = await self._find(http, options.cache_salt)
        if options.warm:
            salt = self._salt_of(http, options.cache_salt)
            warming = self._warm(http, named, salt, found.filename, options.ttl_seconds)
            await unless_client_leaves(http.receive, warming)
            # Warming may have proved it an alias of another picture, whose media hash it then has.
            found, named = await self._find(http, options.cache_salt)
        handle, pinned = await run_in_threadpool(
            self._pin, tenant_of(http), found.id, named.media_hashes, options.ttl_seconds
        )
        return handle, named, pinned

    # For requests that name handles ---------------------------------------------------------------------------

    async def check_named(self, http: Request, pictures: Sequence[PicturePart]) -> None:
        """Refuse handles that `read_named` would refuse, without reading what they name."""
        if parts := self._preparer.intake.find_handles(pictures):
            await run_in_threadpool(self._check, tenant_of(http), parts)

    async def read_named(self, http: Request, pictures: Sequence[PicturePart]) -> Downloaded:
        """Return the bytes of the pictures that are named by handles, keyed by their URLs."""
        parts = self._preparer.intake.find_handles(pictures)
        return await run_in_threadpool(self._read, tenant_of(http), parts) if parts else NOTHING_DOWNLOADED

    async def pin_handles(self, http: Request, pictures: Sequence[PicturePart]) -> UsedMedia:
        """Pin the handles that a request about to be answered asks to keep.

        Returns what is to be recorded by `note_uses` once the answer has begun.
        """
        pinned = [part for part in pictures if part.pin_seconds]
        parts = self._preparer.intake.find_handles(pictures)
        fields = defaultdict[str, list[str]](list)
        for part in parts:
            fields[_id_of(part)].append(part.field)
        media_ids = {part.field: _id_of(part) for part in parts}
        if kept := [part for part in parts if part.pin_seconds]:
            await run_in_threadpool(self._pin_handles, tenant_of(http), kept)
        pins = [PixelPin(part.field, part.pin_seconds, media_ids.get(part.field, "")) for part in pinned]
        return UsedMedia(pins, fields)

    async def note_uses(self, http: Request, used: UsedMedia, prepared: PreparedRequest) -> None:
        """Count a request's use of handles, and pin pixels.

        Call it once the answer has begun: by then it is known what had to be made; pixels are cached, if ever, and
        their names known.
        """
        await run_in_threadpool(self._note_uses, tenant_of(http), used, prepared)

    def _check(self, tenant: str, parts: Sequence[PicturePart]) -> None:
        budget = self._preparer.intake.count_bytes()
        for part in parts:
            budget.add(self._handles.get(tenant, _id_of(part), part.field).num_bytes, part.field)

    def _read(self, tenant: str, parts: Sequence[PicturePart]) -> Downloaded:
        budget = self._preparer.intake.count_bytes()
        held: dict[str, HeldFile] = {}
        for part in parts:
            url, media_id = str(part.source), _id_of(part)
            # Check the budget before the bytes take memory.
            handle = self._handles.get(tenant, media_id, part.field)
            budget.add(handle.num_bytes, part.field)
            if url not in held:
                held[url] = HeldFile(self._handles.read(tenant, media_id, part.field), handle.filename)
        return held

    def _pin_handles(self, tenant: str, parts: Sequence[PicturePart]) -> None:
        for part in parts:
            # A failed pin must not fail the request; the handle may have expired since it was read.
            with suppress(MediaStoreError, UnknownHandleError):
                self._handles.pin(tenant, _id_of(part), part.pin_seconds)

    def _note_uses(self, tenant: str, used: UsedMedia, prepared: PreparedRequest) -> None:
        for media_id, fields in used.handles.items():
            was_spared = not any(map(prepared.had_to_make, fields))
            with suppress(MediaStoreError):  # only a count is lost
                self._handles.note_use(media_id, was_spared=was_spared)
        for pin in used.pins:
            holder = PinHolder(tenant, pin.media_id)
            for media_hash in prepared.hashes_at(pin.field):
                with suppress(MediaStoreError, UnknownHandleError):  # only a pin is lost
                    self._pins.pin(holder, media_hash, pin.seconds)

    # Steps ----------------------------------------------------------------------------------------------------

    async def _find(self, http: Request, cache_salt: str | None) -> tuple[MediaHandle, _Named]:
        of_caller = (tenant_of(http), http.path_params["id"])
        content = await run_in_threadpool(self._handles.read, *of_caller)
        named = await self._name(PicturePart(content, "id"), self._salt_of(http, cache_salt))
        return await run_in_threadpool(self._handles.get, *of_caller), named

    async def _name(self, part: PicturePart, salt: str | None, downloaded: Downloaded = NOTHING_DOWNLOADED) -> _Named:
        part = await run_in_threadpool(self._preparer.fetch_media, part, salt, downloaded)
        may_wait = self._preparer.may_wait_for_workers(Conversation([], (part,)))
        async with self._looking if may_wait else nullcontext():
            return _Named(await run_in_threadpool(self._preparer.name_fetched, part, salt))

    def _pin(
        self, tenant: str, media_id: str, media_hashes: Iterable[str], seconds: float
    ) -> tuple[MediaHandle, Pinned]:
        handle = self._handles.pin(tenant, media_id, seconds)
        holder = PinHolder(tenant, media_id)
        pinned = [self._pins.pin(holder, media_hash, seconds) for media_hash in media_hashes]
        return handle, Pinned(bytes=True, pixels=all(pinned))

    def _delete(self, tenant: str, media_id: str) -> MediaHandle:
        handle = self._handles.get(tenant, media_id)
        self._pins.delete(PinHolder(tenant, media_id))
        return handle

    async def _warm(
        self, http: Request, named: _Named, salt: str | None, filename: str | None, pin_seconds: float = 0
    ) -> None:
        """Fill the caches by running an ordinary request for one token, pinned for at least `pin_seconds`."""
        params, conversation = SamplingParams(max_tokens=1, temperature=0), named.as_conversation(filename)
        prepared = await run_in_threadpool(self._preparer.prepare_chat, conversation, params, None, salt, WARM_PRIORITY)
        prepared = prepared.pinned(pin_seconds) if pin_seconds else prepared
        http.state.warming = account = prepared.account
        account.name(http.state.request_id, http.state.began, http.headers.get("traceparent"))
        account.wants_answer = False
        async with aclosing(self._engine.generate(prepared)) as tokens:
            async for _ in tokens:
                pass

    async def _tiers_of(self, named: _Named) -> Tiers:
        places = await self._engine.find_media(named.media_hashes)
        is_hinted = all(map(self._engine.engine_holds, named.media_hashes))
        return Tiers(
            bytes=True,
            processor_cache=all(map(self._pixel_cache.is_held, named.media_hashes)),
            engine=is_hinted or bool(places.embeddings) or places.is_in_prefixes,
            embeddings=places.embeddings,
            prefix=places.is_in_prefixes,
        )


def _respond(http: Request, body: msgspec.Struct) -> Response:
    """Return the answer to a request that may have warmed caches, with the stages of that."""
    response = json_response(body)
    if (account := getattr(http.state, "warming", None)) is not None:
        response.headers["server-timing"] = format_for_header([account])
    return response


def _id_of(part: PicturePart) -> str:
    return str(part.source).partition("://")[2]


def _read_salt(http: Request) -> str | None:
    return read_options(b"", http.query_params).cache_salt
