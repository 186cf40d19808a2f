"""The description of the API at `/openapi.json`, made from the structs that decode and encode its bodies."""

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import get_args

import msgspec

from keepsight import __version__
from keepsight.api_settings import ApiSettings
from keepsight.frontend.api.access import OPEN_PATHS, is_for_admins
from keepsight.frontend.api.chat_request import ChatRequest
from keepsight.frontend.api.chat_response import ChatCompletion, ChatCompletionChunk
from keepsight.frontend.api.completion_request import CompletionRequest
from keepsight.frontend.api.completion_response import Completion
from keepsight.frontend.api.embeddings_request import EmbeddingList, EmbeddingsRequest
from keepsight.frontend.api.files_api import (
    LIFETIME_FIELDS,
    MAX_FILES,
    MAX_NAMED,
    PURPOSES,
    DeletedFile,
    DeletedFileMetadata,
    FileMetadata,
    FileMetadataPage,
    FileObject,
    FilePage,
)
from keepsight.frontend.api.held_pictures import HeldList
from keepsight.frontend.api.input_items import InputItemPage
from keepsight.frontend.api.media_api import DeletedMedia, MediaObject, MediaPage
from keepsight.frontend.api.message_object import Message, MessageEvent, MessageTokens
from keepsight.frontend.api.messages_request import CountTokensRequest, MessagesRequest
from keepsight.frontend.api.metrics_api import DEFAULT_LIMIT, MAX_LIMIT, AccountList, ServerState
from keepsight.frontend.api.openapi_shapes import (
    CONTENT_PART,
    INPUT,
    ITEM,
    MESSAGES,
    OF_MESSAGES,
    PROMPT,
    PROMPT_EMBEDS,
    REFERENCE,
    SENT,
    SENT_BLOCKS,
    SOME_TEXT,
    Json,
    object_of,
    refer,
)
from keepsight.frontend.api.read_list_query import DEFAULT_PAGE, MAX_PAGE
from keepsight.frontend.api.read_upload import MAX_TTL_SECONDS
from keepsight.frontend.api.response_object import InputTokens, Response, StreamedEvent
from keepsight.frontend.api.response_parts import ModelCard, ModelList
from keepsight.frontend.api.responses_api import DeletedResponse
from keepsight.frontend.api.responses_request import ResponsesRequest
from keepsight.frontend.api.tokenize_request import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from keepsight.frontend.http.decode_body import neutral_values_of, refused_fields
from keepsight.frontend.http.error_response import FILES_PATH, MESSAGES_PATHS, ErrorResponse, MessagesError
from keepsight.frontend.http.shown_key import MESSAGES_HEADER
from keepsight.frontend.intake.media_handles import DEFAULT_TTL_SECONDS
from keepsight.frontend.prompt.read_items import SENT_ITEMS

REQUESTS: tuple[type[msgspec.Struct], ...] = (
    ChatRequest,
    CompletionRequest,
    EmbeddingsRequest,
    ResponsesRequest,
    MessagesRequest,
    CountTokensRequest,
    TokenizeRequest,
    DetokenizeRequest,
)
MESSAGE_EVENTS: tuple[type[msgspec.Struct], ...] = get_args(MessageEvent)
RESPONSE_EVENTS: tuple[type[msgspec.Struct], ...] = get_args(StreamedEvent)
# Each in OpenAI's shape and in Anthropic's.
FILES = ((FileObject, FileMetadata), (FilePage, FileMetadataPage), (DeletedFile, DeletedFileMetadata))
ANSWERS = (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    EmbeddingList,
    Response,
    *RESPONSE_EVENTS,
    InputTokens,
    Message,
    *MESSAGE_EVENTS,
    MessageTokens,
    TokenizeResponse,
    DetokenizeResponse,
    ModelList,
    ModelCard,
    ErrorResponse,
    MediaObject,
    MediaPage,
    DeletedMedia,
    *itertools.chain(*FILES),
    DeletedResponse,
    InputItemPage,
    HeldList,
    ServerState,
    AccountList,
)

# Schemas of the fields that are checked by hand, not by their structs.
SHAPES: Mapping[type[msgspec.Struct], Json] = {
    ChatRequest: {"messages": MESSAGES},
    TokenizeRequest: {"messages": {"anyOf": [MESSAGES, {"type": "null"}]}},
    EmbeddingsRequest: {"messages": {"anyOf": [MESSAGES, {"type": "null"}]}, "input": PROMPT},
    ResponsesRequest: {"input": INPUT},
    CompletionRequest: {"prompt": PROMPT, "prompt_embeds": PROMPT_EMBEDS},
    MessagesRequest: OF_MESSAGES,
    CountTokensRequest: OF_MESSAGES,
    **SENT,
}
# A parameter in a path.
_NAME = re.compile(r"\{(\w+)\}")
PROMETHEUS: Json = {"text/plain": {"schema": {"type": "string"}}}
BINARY: Json = {"type": "string", "format": "binary"}
STATUSES = {
    400: "The request is invalid; the error names the field.",
    401: "The key is missing or unknown.",
    403: "Not allowed for this caller.",
    404: "Not found, or the model is not served.",
    408: "The rest of the body did not arrive.",
    409: "The picture cannot be pinned now.",
    413: "The body or a picture is too large.",
    415: "The form of the body is not supported.",
    429: "Too many pictures are being downloaded: try again.",
    500: "The server failed.",
    503: "The server is full, or no process can serve the request now: try again after Retry-After seconds.",
    507: "The storage is full or unreachable at the moment.",
}
KEYS = {
    "key": {"type": "http", "scheme": "bearer"},
    "messages_key": {"type": "apiKey", "in": "header", "name": MESSAGES_HEADER},
}


Operation = tuple[str, str, Json]  # path, method, description


def _parameter(name: str, schema: Json) -> Json:
    return {"name": name, "in": "query", "schema": schema}


def _number_of_items(default: int, maximum: int) -> Json:
    return _parameter("limit", {"type": "integer", "minimum": 1, "maximum": maximum, "default": default})


SALT = _parameter("cache_salt", SOME_TEXT)
LIMIT = _number_of_items(DEFAULT_LIMIT, MAX_LIMIT)
PAGE = (
    _number_of_items(DEFAULT_PAGE, MAX_PAGE),
    _parameter("after", {"type": "string"}),
    _parameter("order", {"enum": ["asc", "desc"], "default": "desc"}),
)


def describe_api(settings: ApiSettings, *, has_uploads: bool = False, keeps_responses: bool = False) -> Json:
    paths: dict[str, Json] = {}
    shown = _picture_operations() if settings.dashboard_thumbnails else ()
    uploaded = (*_media_operations(), *_file_operations()) if has_uploads else ()
    kept = _response_operations() if keeps_responses else ()
    for path, method, operation in (*_operations(), *uploaded, *kept, *shown):
        paths.setdefault(path, {})[method] = _with_errors_of_its_api(path, _close(path, operation, settings))
    return {
        "openapi": "3.1.0",
        "info": {"title": "Keepsight", "version": __version__},
        "servers": [{"url": settings.root_path or "/"}],
        "paths": paths,
        "components": {"schemas": _schemas(), "securitySchemes": KEYS},
    }


def _operations() -> Sequence[Operation]:
    chunk, completion = _data(refer(ChatCompletionChunk)), _data(refer(Completion))
    response, message = _named_event(RESPONSE_EVENTS), _named_event(MESSAGE_EVENTS)
    return (
        _ask("/v1/chat/completions", "Answers a conversation.", ChatRequest, ChatCompletion, chunk),
        _ask("/v1/completions", "Continues each prompt.", CompletionRequest, Completion, completion),
        _ask("/v1/embeddings", "Returns the model's vector for each input.", EmbeddingsRequest, EmbeddingList),
        _ask("/v1/responses", "Answers items.", ResponsesRequest, Response, response),
        _ask("/v1/responses/input_tokens", "Counts the input's tokens.", ResponsesRequest, InputTokens),
        _ask("/v1/messages", "Answers messages.", MessagesRequest, Message, message),
        _ask("/v1/messages/count_tokens", "Counts the messages' tokens.", CountTokensRequest, MessageTokens),
        _ask("/tokenize", "The tokens of a prompt or a conversation.", TokenizeRequest, TokenizeResponse),
        _ask("/detokenize", "The text of tokens.", DetokenizeRequest, DetokenizeResponse),
        _reset("/reset_prefix_cache", "Forgets the keys and values of earlier prompts."),
        _reset("/reset_encoder_cache", "Forgets the embeddings of earlier pictures."),
        _reset("/reset_mm_cache", "Forgets the pixels of earlier pictures."),
        _get("/v1/models", "The models that are served.", refer(ModelList)),
        _get("/v1/models/{model}", "One model.", refer(ModelCard), (404,)),
        _get("/health", "Whether the process is alive, and its state.", {"type": "object"}),
        _get("/ready", "Whether a request would be answered now.", {"type": "object"}, (503,)),
        _get("/version", "The server's version.", {"type": "object"}),
        _get("/openapi.json", "This description.", {"type": "object"}),
        _operate("get", "/metrics", "Metrics in Prometheus format.", PROMETHEUS),
        _get("/debug/state", "What is cached, the work done, the last requests.", refer(ServerState), (400,), LIMIT),
        _get("/debug/requests", "Accounts of the last requests.", refer(AccountList), (400,), LIMIT),
        _get("/debug/requests/{id}", "The accounts of one request.", refer(AccountList), (404,)),
    )


def _media_operations() -> Sequence[Operation]:
    one, media = "/v1/media/{id}", _json_content(refer(MediaObject))
    in_query = [_parameter(name, schema) for name, schema in _options()["properties"].items()]
    sent: Json = {kind: {"schema": BINARY} for kind in ("image/*", "application/pdf", "application/octet-stream")}
    sent["multipart/form-data"] = {"schema": _options(file=BINARY)}
    sent |= _json_content(_options(url={"type": "string"}, data={"type": "string"}))
    kept = "Stores a picture, which messages may name as media://ID."
    failures, of_one = (400, 408, 413, 415, 429, 500, 503, 507), (400, 404, 408, 413, 415, 500, 503, 507)
    return (
        _operate("post", "/v1/media", kept, media, failures, *in_query, body={"required": True, "content": sent}),
        _get("/v1/media", "What the caller has stored.", refer(MediaPage), (400, 404, 507), *PAGE),
        _operate("get", one, "One picture, and where it is cached.", media, of_one, SALT),
        _operate("delete", one, "Deletes it.", _json_content(refer(DeletedMedia)), of_one, SALT),
        _operate(
            "post",
            f"{one}/pin",
            "Keeps it for at least ttl_seconds from now.",
            media,
            of_one,
            *in_query,
            body={"content": _json_content(_options())},
        ),
    )


def _file_operations() -> Sequence[Operation]:
    """Describe requests as OpenAI's clients make them; Anthropic's, known by a header, are answered in their shapes."""
    one, failures = FILES_PATH + "/{id}", (400, 404, 408, 413, 415, 500, 503, 507)
    file, page, deleted = (_json_content({"anyOf": [refer(each) for each in shapes]}) for shapes in FILES)
    life: Json = {"type": "integer", "minimum": 1, "maximum": int(MAX_TTL_SECONDS)}
    lives: dict[str, Json] = {"expires_after[anchor]": {"const": "created_at"}, **dict.fromkeys(LIFETIME_FIELDS, life)}
    sent = object_of("file", file=BINARY, purpose={"enum": [*PURPOSES]}, **lives)
    body: Json = {"required": True, "content": {"multipart/form-data": {"schema": sent}}}
    ids: Json = {"type": "array", "items": {"type": "string"}, "maxItems": MAX_NAMED}
    of_anthropic = (_parameter("page", {"type": "string"}), _parameter("ids[]", ids))
    of_openai = (*PAGE[1:], _parameter("purpose", {"type": "string"}))
    listed = (_number_of_items(MAX_FILES, MAX_FILES), *of_openai, *of_anthropic)
    return (
        _operate("post", FILES_PATH, "Stores a picture, a film, a sound or a PDF.", file, failures, body=body),
        _operate("get", FILES_PATH, "What the caller has stored.", page, (400, 404, 507), *listed),
        _operate("get", one, "One file.", file, (404, 507)),
        _operate("delete", one, "Deletes it.", deleted, failures),
        _operate(
            "get", f"{one}/content", "The file's bytes.", {"application/octet-stream": {"schema": BINARY}}, (404, 507)
        ),
    )


def _response_operations() -> Sequence[Operation]:
    one = "/v1/responses/{id}"
    return (
        _get(one, "One stored response.", refer(Response), (404, 507)),
        _operate("delete", one, "Deletes it.", _json_content(refer(DeletedResponse)), (404, 507)),
        _get(f"{one}/input_items", "The items that it answers.", refer(InputItemPage), (400, 404, 503, 507), *PAGE),
    )


def _picture_operations() -> Sequence[Operation]:
    one = "/debug/pictures/{media_hash}"
    pinned = _json_content({"type": "object", "properties": {"is_pinned": {"type": "boolean"}}})
    return (
        _get("/debug/pictures", "The pictures in the processor cache, most recently used first.", refer(HeldList)),
        _operate("get", one, "A thumbnail of one of them.", {"image/jpeg": {"schema": BINARY}}, (404,)),
        _operate("post", f"{one}/pin", "Pins it for an hour.", pinned, (409,)),
        _operate("delete", f"{one}/pin", "Unpins it.", pinned),
    )


def _options(**sources: Json) -> Json:
    """Return the schema of the options of an upload or a pin."""
    ttl = {"type": "number", "minimum": 1, "maximum": MAX_TTL_SECONDS, "default": DEFAULT_TTL_SECONDS}
    return object_of(**sources, ttl_seconds=ttl, warm={"type": "boolean"}, cache_salt=SOME_TEXT)


def _ask(
    path: str, summary: str, request: type[msgspec.Struct], answer: type[msgspec.Struct], event: Json | None = None
) -> Operation:
    content = _json_content(refer(answer))
    if event is not None:
        content["text/event-stream"] = {"schema": {"type": "object", "properties": event}}
    body = {"required": True, "content": _json_content(refer(request))}
    return _operate("post", path, summary, content, (400, 404, 408, 413, 415, 429, 500, 503), body=body)


def _data(schema: Json) -> Json:
    """Return the schema of an event; the last event is [DONE]."""
    return {"data": {"anyOf": [{"const": "[DONE]"}, _json_text(schema)]}}


def _named_event(events: Sequence[type[msgspec.Struct]]) -> Json:
    return {"event": {"type": "string"}, "data": _json_text({"anyOf": [refer(each) for each in events]})}


def _json_text(schema: Json) -> Json:
    return {"type": "string", "contentMediaType": "application/json", "contentSchema": schema}


def _reset(path: str, summary: str) -> Operation:
    return _operate("post", path, summary, _json_content({"type": "object"}), (503,))


def _get(path: str, summary: str, schema: Json, failures: Sequence[int] = (), *parameters: Json) -> Operation:
    return _operate("get", path, summary, _json_content(schema), failures, *parameters)


def _operate(
    method: str,
    path: str,
    summary: str,
    content: Json,
    failures: Sequence[int] = (),
    *parameters: Json,
    body: Json | None = None,
) -> Operation:
    """Return an operation. `content`: of the answer; `parameters`: besides those in the path."""
    answered = {"200": {"description": "Success.", "content": content}}
    operation: Json = {"summary": summary, "responses": answered | _failures(failures)}
    of_path = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in _NAME.findall(path)
    ]
    if of_path or parameters:
        operation["parameters"] = [*of_path, *parameters]
    return path, method, operation if body is None else operation | {"requestBody": body}


def _close(path: str, operation: Json, settings: ApiSettings) -> Json:
    """Add the key that the path requires, if any, and the failures of an access that is denied."""
    if path in OPEN_PATHS:
        return operation
    responses = dict(operation["responses"])
    if is_for_admins(path):
        responses |= _failures((403,))
    if not settings.api_keys and not (is_for_admins(path) and settings.admin_api_key):
        return operation | {"responses": responses}
    keys = ["key", "messages_key"] if path in MESSAGES_PATHS else ["key"]
    return operation | {"responses": responses | _failures((401,)), "security": [{key: []} for key in keys]}


def _with_errors_of_its_api(path: str, operation: Json) -> Json:
    """Describe errors in the shape of the API that the path belongs to."""
    if path not in MESSAGES_PATHS:
        return operation
    content, responses = _json_content(refer(MessagesError)), operation["responses"]
    errors = {status: each | {"content": content} for status, each in responses.items() if status != "200"}
    return operation | {"responses": responses | errors}


def _failures(statuses: Sequence[int]) -> Json:
    content = _json_content(refer(ErrorResponse))
    return {str(each): {"description": STATUSES[each], "content": content} for each in statuses}


def _json_content(schema: Json) -> Json:
    return {"application/json": {"schema": schema}}


def _schemas() -> Json:
    _, schemas = msgspec.json.schema_components(
        (*REQUESTS, *SENT, *SENT_BLOCKS, *SENT_ITEMS, *ANSWERS), ref_template=REFERENCE
    )
    for struct in (*REQUESTS, *SENT):
        _narrow(schemas[struct.__name__]["properties"], struct)
    return schemas | {"ContentPart": CONTENT_PART, "InputItem": ITEM}


def _narrow(properties: Json, struct: type[msgspec.Struct]) -> None:
    """Add the constraints that are checked by hand, not by the struct."""
    for name in refused_fields(struct):
        properties[name] |= {"enum": [None, *neutral_values_of(struct).get(name, ())]}
    properties |= SHAPES.get(struct, {})
