"""`/v1/files`: uploading, listing and fetching files as in OpenAI's API, or as in Anthropic's, at the same path.

A file is a handle of `/v1/media` with a name: what was uploaded there is found here, and vice versa.
"""

from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Literal

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from keepsight.errors import InvalidArgumentError, UnknownHandleError, UnsupportedBodyError, UnsupportedFieldError
from keepsight.frontend.api.access import tenant_of
from keepsight.frontend.api.media_api import MediaApi, ReadBody
from keepsight.frontend.api.read_list_query import asks_ascending, read_limit, refuse_unknown_parameters
from keepsight.frontend.api.read_upload import MAX_TTL_SECONDS, Upload, UploadOptions, read_ttl, take_file
from keepsight.frontend.http.decode_body import Buffer
from keepsight.frontend.http.error_response import FILES_PATH, asks_anthropic, json_response
from keepsight.frontend.http.read_form import FormPart, parse_header, read_form
from keepsight.frontend.intake.media_handles import FileLabel, HandlePage, MediaHandle, MediaHandles
from keepsight.frontend.prompt.read_messages import read_name

# Page sizes of lists: OpenAI's maximum, which is the default too; Anthropic's default and maximum.
MAX_FILES, DEFAULT_MESSAGES_PAGE, MAX_MESSAGES_PAGE = 10_000, 20, 1000
# The most files that a list request may name in `ids[]`.
MAX_NAMED = 100
# Those of OpenAI's purposes whose files can be used in prompts; all mean the same here.
PURPOSES = ("user_data", "vision", "assistants")
# Form fields for the lifetime: OpenAI's anchor; the seconds by OpenAI's name and by Anthropic's.
_ANCHOR, LIFETIME_FIELDS = "expires_after[anchor]", ("expires_after[seconds]", "expires_in_seconds")
_PAGE_PREFIX = "page_"
# Parameters that page through Anthropic's lists: `page`, and `after_id` and `before_id` of older clients.
_STARTS = ("page", "after_id", "before_id")


class FileObject(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"

    @classmethod
    def of(cls, handle: MediaHandle) -> "FileObject":
        return cls(
            id=handle.id,
            bytes=handle.num_bytes,
            created_at=int(handle.created),
            expires_at=int(handle.expires),
            filename=handle.filename or handle.id,
            purpose=handle.purpose,
        )


class FilePage(msgspec.Struct, frozen=True):
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class DeletedFile(msgspec.Struct, frozen=True):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class FileMetadata(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="file"):
    """A file, in Anthropic's format."""

    id: str
    filename: str
    mime_type: str
    size_bytes: int
    created_at: str
    expires_at: str
    downloadable: Literal[True] = True

    @classmethod
    def of(cls, handle: MediaHandle) -> "FileMetadata":
        return cls(
            id=handle.id,
            filename=handle.filename or handle.id,
            mime_type=handle.media_type,
            size_bytes=handle.num_bytes,
            created_at=_as_date(handle.created),
            expires_at=_as_date(handle.expires),
        )


class FileMetadataPage(msgspec.Struct, frozen=True, kw_only=True):
    data: list[FileMetadata]
    first_id: str | None
    last_id: str | None
    has_more: bool
    next_page: str | None


class DeletedFileMetadata(msgspec.Struct, frozen=True, tag_field="type", tag="file_deleted"):
    id: str


class FilesApi:
    def __init__(self, media: MediaApi, handles: MediaHandles, reading_body: ReadBody) -> None:
        self._media, self._handles, self._reading_body = media, handles, reading_body

    @property
    def routes(self) -> list[Route]:
        one = FILES_PATH + "/{id}"
        return [
            Route(FILES_PATH, self.create, methods=["POST"]),
            Route(FILES_PATH, self.list_page, methods=["GET"]),
            Route(one, self.retrieve, methods=["GET"]),
            Route(one, self.delete, methods=["DELETE"]),
            Route(f"{one}/content", self.content, methods=["GET"]),
        ]

    async def create(self, http: Request) -> Response:
        async with self._reading_body(http) as body:
            upload, label = await run_in_threadpool(read_file, http.headers.get("content-type", ""), body)
            handle, _ = await self._media.take_in(http, upload, label)
        return self._as_response(http, handle)

    async def list_page(self, http: Request) -> Response:
        list_files = self._list_messages if asks_anthropic(http.scope) else self._list
        return json_response(await run_in_threadpool(list_files, http))

    async def retrieve(self, http: Request) -> Response:
        handle = await run_in_threadpool(self._handles.get, tenant_of(http), http.path_params["id"])
        return self._as_response(http, handle)

    async def delete(self, http: Request) -> Response:
        handle = await self._media.forget(http)
        kind = DeletedFileMetadata if asks_anthropic(http.scope) else DeletedFile
        return json_response(kind(handle.id))

    async def content(self, http: Request) -> Response:
        """Return the bytes, with headers that keep browsers from showing them as a page of this server."""
        content = await run_in_threadpool(self._handles.read, tenant_of(http), http.path_params["id"])
        headers = {"X-Content-Type-Options": "nosniff", "Content-Disposition": "attachment"}
        return Response(content, headers=headers, media_type="application/octet-stream")

    def _as_response(self, http: Request, handle: MediaHandle) -> Response:
        return json_response((FileMetadata if asks_anthropic(http.scope) else FileObject).of(handle))

    def _list(self, http: Request) -> FilePage:
        refuse_unknown_parameters(http, ("limit", "after", "order", "purpose"))
        limit, query = read_limit(http, MAX_FILES, MAX_FILES), http.query_params
        of_caller, is_ascending = (tenant_of(http), limit, query.get("after")), asks_ascending(http)
        page = self._handles.page(*of_caller, is_ascending=is_ascending, purpose=query.get("purpose"))
        return FilePage([FileObject.of(each) for each in page.shown], *page.ends, page.has_more)

    def _list_messages(self, http: Request) -> FileMetadataPage:
        """Return a page in Anthropic's format, newest first in both directions of paging."""
        query = http.query_params
        if "scope_id" in query:
            raise UnsupportedFieldError("scope_id", "is not supported: files here have no scope")
        start = _read_start(query)
        if media_ids := list(dict.fromkeys(query.getlist("ids[]"))):
            if start or "limit" in query:
                raise InvalidArgumentError("ids", "must not be given together with page or limit")
            return _describe(HandlePage(self._find_named(tenant_of(http), media_ids)))
        limit = read_limit(http, DEFAULT_MESSAGES_PAGE, MAX_MESSAGES_PAGE)
        media_id = query[start].removeprefix(_PAGE_PREFIX) if start else None
        is_ascending = start == "before_id"
        page = self._handles.page(tenant_of(http), limit, media_id, start, is_ascending=is_ascending)
        if is_ascending:
            return _describe(page._replace(shown=page.shown[::-1]), may_continue=False)
        return _describe(page)

    def _find_named(self, tenant: str, media_ids: list[str]) -> list[MediaHandle]:
        """Return the handles of those ids that exist."""
        if len(media_ids) > MAX_NAMED:
            raise InvalidArgumentError("ids", f"must be at most {MAX_NAMED}, not {len(media_ids)}")
        found = []
        for media_id in media_ids:
            with suppress(UnknownHandleError):
                found.append(self._handles.get(tenant, media_id))
        return found


def _read_start(query: QueryParams) -> str:
    """Return which paging parameter is given; empty if none is."""
    given = [name for name in _STARTS if name in query]
    if len(given) > 1:
        raise InvalidArgumentError(given[1], f"must not be given together with {given[0]}")
    return given[0] if given else ""


def _describe(page: HandlePage, *, may_continue: bool = True) -> FileMetadataPage:
    first_id, last_id = page.ends
    return FileMetadataPage(
        data=[FileMetadata.of(each) for each in page.shown],
        first_id=first_id,
        last_id=last_id,
        has_more=page.has_more,
        next_page=f"{_PAGE_PREFIX}{last_id}" if page.has_more and may_continue else None,
    )


def _as_date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def read_file(content_type: str, body: Buffer) -> tuple[Upload, FileLabel]:
    kind, parameters = parse_header(content_type)
    if kind != "multipart/form-data":
        raise UnsupportedBodyError("Content-Type", f"must be multipart/form-data, not {kind[:80]!r}")
    parts = read_form(bytes(body), parameters.get("boundary", ""))
    file = take_file(parts)
    return Upload(file.content, "file", UploadOptions(_read_life(parts))), _read_label(file, parts)


def _read_life(parts: dict[str, FormPart]) -> float:
    """Return the lifetime in seconds; a week by default, as clients of this API delete files once they are done."""
    anchor, given = parts.pop(_ANCHOR, None), [name for name in LIFETIME_FIELDS if name in parts]
    if anchor is not None and anchor.as_text() != "created_at":
        raise UnsupportedFieldError(_ANCHOR, "must be created_at")
    if not given:
        return MAX_TTL_SECONDS
    if len(given) > 1:
        raise InvalidArgumentError(given[1], f"must not be given together with {given[0]}")
    ttl = parts.pop(given[0]).as_text()
    return read_ttl(int(ttl) if ttl.isdecimal() and len(ttl) < 10 else ttl, given[0])


def _read_label(file: FormPart, others: Mapping[str, FormPart]) -> FileLabel:
    for name in others:
        if name != "purpose":
            raise UnsupportedFieldError(
                name[:80], f"is unknown; known: file, purpose, {_ANCHOR}, {', '.join(LIFETIME_FIELDS)}"
            )
    purpose = others["purpose"].as_text() if "purpose" in others else PURPOSES[0]
    if purpose not in PURPOSES:
        raise UnsupportedFieldError("purpose", f"must be one of {', '.join(PURPOSES)}, not {purpose[:80]!r}")
    return FileLabel(read_name(file.filename or None, "file"), file.media_type[:80] or FileLabel.media_type, purpose)
