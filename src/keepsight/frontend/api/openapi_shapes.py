"""JSON schemas of messages, items and prompts, which no struct defines, for the description of the API."""

from collections.abc import Iterable
from typing import Any

import msgspec

from keepsight.frontend.prompt.answer_fields import EMPTY_IN_ANSWERS, THOUGHT_NAMES
from keepsight.frontend.prompt.read_blocks import OF_RESULTS, OF_ROLES, SentBlock, SentMessage, SentText, SentToolResult
from keepsight.frontend.prompt.read_items import SENT_ITEMS, ResultItem
from keepsight.frontend.prompt.read_messages import (
    BREAKPOINT,
    BREAKPOINT_SECONDS,
    DETAILS,
    MAX_MESSAGES,
    MESSAGE_TYPES,
)

Json = dict[str, Any]
REFERENCE = "#/components/schemas/{name}"


def _text(description: str) -> Json:
    """Return the schema of a text or null."""
    return {"type": ["string", "null"], "description": description}


def _list_of(items: Json) -> Json:
    return {"type": "array", "minItems": 1, "items": items}


def object_of(*required: str, **properties: Json) -> Json:
    """Return the schema of an object with these properties and no others."""
    required_names = {"required": [*required]} if required else {}
    return {"type": "object", "additionalProperties": False, "properties": properties} | required_names


_CACHE_CONTROL: Json = {"anyOf": [{"$ref": REFERENCE.format(name="CacheControl")}, {"type": "null"}]}


def _part(kind: str, *required: str, **properties: Json) -> Json:
    """Return the schema of a part of a message's content."""
    breakpoint_ = object_of("mode", mode={"const": "explicit"}, ttl={"enum": [*BREAKPOINT_SECONDS, None]})
    description_ = {
        "type": ["object", "null"],
        "description": "All pictures up to here are kept for this time, as far as possible.",
    }
    of_all = {BREAKPOINT: breakpoint_ | description_, "cache_control": _CACHE_CONTROL}
    return object_of("type", *required, type={"const": kind}, **properties, **of_all)


_UUID = _text("The caller's own name for the picture, the video or the sound.")


def _named_part(kind: str) -> Json:
    """Return the schema of a media part in transformers' form."""
    url, media_id = _text("The same URL, under another name."), _text("The id of an upload, instead of a URL.")
    return _part(kind, **{kind: _text("A URL.")}, url=url, media_id=media_id, uuid=_UUID)


def _url_part(kind: str, description: str, **options: Json) -> Json:
    """Return the schema of a media part in OpenAI's form for pictures, and vLLM's for videos and sounds."""
    url: Json = {"type": ["string", "null"]}
    value = {"description": description, "anyOf": [url, object_of(url=url, **options)]}
    return _part(f"{kind}_url", uuid=_UUID, **{f"{kind}_url": value})


_URL = "A data:, http:, https:, file: or media: URL. May be null if the uuid is known."
INPUT_AUDIO = _part(
    "input_audio",
    uuid=_UUID,
    input_audio={
        "description": "Only for models that take sounds. May be null if the uuid is known.",
        "anyOf": [
            {"type": "null"},
            object_of(
                "data",
                data={
                    "type": "string",
                    "description": "Base64 of a WAV, MP3, FLAC, OGG, Opus, AAC, M4A or WebM, or its URL.",
                },
                format={
                    "type": ["string", "null"],
                    "description": "Ignored: the file itself tells it.",
                    "examples": ["wav"],
                },
            ),
        ],
    },
)
_FILE: Json = {
    "file_data": _text("A PDF as a data: URL, or as base64 alone."),
    "file_url": _text("The PDF's URL."),
    "file_id": _text("The id of an upload."),
    "filename": _text("The name that the model is shown."),
}
# Fields of an answer that a client sends back whole.
_OF_ANSWERS: dict[str, Json] = {
    **{name: {"enum": [None, "", []]} for name in EMPTY_IN_ANSWERS},
    **{name: _text("Only for assistants: the thought before this answer.") for name in THOUGHT_NAMES},
    "tool_calls": {"type": ["array", "null"], "description": "Only for assistants: the tool calls."},
    "refusal": _text("Only for assistants: read instead of content."),
    "parsed": {"description": "Only for assistants: the content as parsed by OpenAI's own client."},
}
_REPEATING_TEXT = _part("text", "text", "role", text={"type": "string"}, role={"const": "assistant"}, **_OF_ANSWERS)
CONTENT_PART: Json = {
    "anyOf": [
        _part("text", "text", text={"type": "string"}),
        _REPEATING_TEXT | {"description": "Only for assistants: a text that repeats the other fields of the answer."},
        _part("refusal", "refusal", refusal={"type": "string"}) | {"description": "Read as text."},
        _url_part("image", _URL, detail={"enum": [*DETAILS, None]}),
        _named_part("image"),
        _url_part("video", "As image_url; only for models that take videos."),
        _named_part("video"),
        INPUT_AUDIO,
        _url_part("audio", "As image_url; only for models that take sounds."),
        _named_part("audio"),
        _part("file", "file", file=object_of(**_FILE)) | {"description": "A PDF; only for models that take pictures."},
        _part(
            "image_embeds",
            image_embeds=_text(
                "The base64 (or a data: URL) of a .npy file or a .safetensors file of one tensor; float32, float16 or, "
                "in safetensors, bfloat16; [tokens_per_image, hidden_size]. May be null if the uuid is known."
            ),
            uuid=_UUID,
        )
        | {"description": "Embeddings instead of a picture; only with --enable-mm-embeds."},
    ]
}
# A message, as read by `read_messages`.
_MESSAGE = object_of(
    "role",
    role={"type": "string", "examples": ["system", "user", "assistant", "tool"]},
    name={"type": ["string", "null"]},
    type={"enum": [*MESSAGE_TYPES]},
    content={
        "anyOf": [
            {"type": "string"},
            {"type": "array", "items": {"$ref": REFERENCE.format(name="ContentPart")}},
            {"type": "null"},
        ],
        "description": "May be null, empty or left out only with tool_calls or a refusal, and in tool results.",
    },
    **_OF_ANSWERS | {"tool_call_id": _text("Only for tool results: the id of the call.")},
)
MESSAGES: Json = _list_of(_MESSAGE) | {"maxItems": MAX_MESSAGES}
SOME_TEXT: Json = {"type": "string", "minLength": 1}
_TOKEN_IDS = _list_of({"type": "integer"})
PROMPT: Json = {
    "description": "One or several, each a string or a list of token ids.",
    "anyOf": [{"type": "string"}, _TOKEN_IDS, _list_of({"type": "string"}), _list_of(_TOKEN_IDS)],
}
PROMPT_EMBEDS: Json = {
    "description": "Instead of prompt, one or several: the base64 (or a data: URL) of a .npy file or a .safetensors "
    "file of one tensor, [tokens, hidden_size]; float32, float16 or, in safetensors, bfloat16. Only with "
    "--enable-prompt-embeds.",
    "anyOf": [SOME_TEXT, _list_of(SOME_TEXT), {"type": "null"}],
}
_INPUT_TEXT = _part("input_text", "text", text={"type": "string"})
_INPUT_IMAGE = _part(
    "input_image",
    image_url=_text(_URL),
    file_id=_text("The id of an upload, instead of a URL."),
    detail={"enum": [*DETAILS, None]},
    uuid=_UUID,
)
_INPUT_PARTS: Json = {
    "anyOf": [
        _INPUT_TEXT,
        _INPUT_IMAGE,
        INPUT_AUDIO,
        _part("input_file", **_FILE, detail={"enum": [*DETAILS, None]}),
        _part("output_text", "text", text={"type": "string"}, annotations={"enum": [[], None]}, logprobs={}, parsed={}),
        _part("refusal", "refusal", refusal={"type": "string"}),
    ]
}
_TEXT_OR_PARTS: Json = {"anyOf": [{"type": "string"}, _list_of(_INPUT_PARTS)]}


def refer(struct: type[msgspec.Struct]) -> Json:
    return {"$ref": REFERENCE.format(name=struct.__name__)}


# An item, as read by `read_items`.
ITEM: Json = {
    "anyOf": [
        object_of(
            "role",
            "content",
            type={"enum": ["message", None]},
            role={"type": "string", "examples": ["system", "developer", "user", "assistant"]},
            content=_TEXT_OR_PARTS,
            id=_text("As in the answer."),
            status={"enum": ["in_progress", "completed", "incomplete", None]},
        ),
        *map(refer, SENT_ITEMS),
    ]
}
INPUT: Json = {"anyOf": [{"type": "string"}, _list_of({"$ref": REFERENCE.format(name="InputItem")})]}


def _text_or(kinds: Iterable[type[SentBlock]]) -> Json:
    return {"anyOf": [{"type": "string"}, _list_of({"anyOf": [refer(kind) for kind in kinds]})]}


# Content blocks, as read by `read_blocks`.
SENT_BLOCKS = tuple(dict.fromkeys(kind for kinds in OF_ROLES.values() for kind in kinds.values()))
SENT: dict[type[msgspec.Struct], Json] = {
    ResultItem: {"output": _TEXT_OR_PARTS},
    SentMessage: {"content": _text_or(SENT_BLOCKS)},
    SentToolResult: {"content": {"anyOf": [_text_or(OF_RESULTS.values()), {"type": "null"}]}},
}
OF_MESSAGES: Json = {
    "messages": _list_of(refer(SentMessage)),
    "system": {"anyOf": [_text_or([SentText]), {"type": "null"}]},
}
