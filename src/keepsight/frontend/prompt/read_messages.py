"""Checks OpenAI chat messages and splits them into what the chat template sees, and the media in their order.

Every error names the field as the client wrote it (`messages[1].content[0].type`). Knows nothing of URLs or decoding.
"""

import dataclasses
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import msgspec

from keepsight.errors import InvalidArgumentError, UnsupportedFieldError
from keepsight.frontend.http.decode_body import convert
from keepsight.frontend.prompt.answer_fields import (
    EMPTY_IN_ANSWERS,
    FIELDS_OF_ANSWERS,
    THOUGHT_NAMES,
    content_without_repeated,
)
from keepsight.frontend.prompt.check_fields import (
    Fields,
    check_fields,
    check_is_list,
    check_is_object,
    check_is_text,
    check_is_url,
    refuse,
)
from keepsight.frontend.prompt.lift_data_urls import MAX_HEAD_BYTES, as_data_url
from keepsight.frontend.prompt.message_contents import join_texts
from keepsight.frontend.prompt.read_tool_calls import read_tool_calls
from keepsight.frontend.prompt.reasoning_effort import Effort
from keepsight.media import Kind, KnownContent, Modality

TemplateMessage = dict[str, Any]
# How a prompt ends: with the beginning of an answer, the last message, or that message's last text, to be continued.
PromptEnd = Literal["answer", "message", "text"]

# lm-eval gives each message the type "text", whatever its content.
MESSAGE_TYPES = ("text", None)
# Fields besides those of every message.
_FIELDS_OF = {"assistant": FIELDS_OF_ANSWERS, "tool": ("tool_call_id",)}
# Two names of one role: newer clients send the second.
SYSTEM_ROLES = ("system", "developer")
# The other content parts are media.
TEXT_PARTS = ("text", "refusal")
MAX_UUID_LENGTH = 256
# The limit of a file's name, which Anthropic calls its title.
MAX_NAME_LENGTH = 500
# Unicode categories: control characters and lone surrogates.
_NO_TEXT = frozenset({"Cc", "Cs"})
MAX_MESSAGES = MAX_PARTS = 2**14
# How the URL of something uploaded before begins.
HANDLE_PREFIX = "media://"
# OpenAI's field of a content part.
BREAKPOINT = "prompt_cache_breakpoint"
# The fields that every part may have.
OF_PARTS = (BREAKPOINT, "cache_control")
BREAKPOINT_SECONDS = {None: 1800.0, "30m": 1800.0, "12h": 12 * 3600.0}
# OpenAI's levels of detail. They have no effect: a picture's size follows from the model and from `max_pixels`.
DETAILS = ("auto", "low", "high", "original")
_FILE_SOURCES = ("file_data", "file_url", "file_id")
_JSON_TYPES = (str, int, float, bool, type(None), Mapping, list)


class CacheControl(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="ephemeral"):
    """Anthropic's field of blocks, which some clients put into chats. All prompts are kept, as long as there is room;
    where is said by none.
    """

    ttl: Literal["5m", "1h"] | None = None
    scope: str | None = None


@dataclass(frozen=True, slots=True)
class PicturePart:
    """One picture, film or sound of a conversation, not yet fetched or opened."""

    # A URL if it is a string, else an object of this process: PIL image, array, bytes. None only with a uuid: the
    # content that was sent with that uuid before.
    source: object
    field: str  # the path at which the client sent it
    uuid: str | None = None  # the client's name for the content
    pin_seconds: float = 0.0  # the least time for which to keep it, if possible
    # "image_embeds": the source is not a picture but the embeddings of one, as a base64 text or an object.
    modality: Modality = "image"
    # What is known of the source, which is bytes in this case.
    known: KnownContent | None = None

    @property
    def kind(self) -> Kind:
        return self.modality if self.modality == "video" or self.modality == "audio" else "image"


@dataclass(frozen=True, slots=True)
class DocumentPart(PicturePart):
    """A PDF, which will be replaced by its pages."""

    # The client's name for it.
    name: str | None = None


class Breakpoint(NamedTuple):
    """The end of what the client wants kept: whole messages, the first parts of the next, and the pictures in both."""

    num_messages: int
    num_parts: int
    num_pictures: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Conversation:
    messages: list[TemplateMessage]
    pictures: tuple[PicturePart, ...]  # in the order of their markers
    breakpoints: tuple[Breakpoint, ...] = ()
    end: PromptEnd = "answer"
    # Further variables for the chat template.
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    effort: Effort | None = None
    # The texts of documents, by message and part: to be made plain.
    quoted: frozenset[tuple[int, int]] = frozenset()

    @property
    def kinds(self) -> frozenset[Kind]:
        return frozenset(part.kind for part in self.pictures)

    @property
    def has_documents(self) -> bool:
        return any(isinstance(part, DocumentPart) for part in self.pictures)

    @property
    def begun_answer(self) -> str:
        """The text that the answer is to continue."""
        return join_texts(self.messages[-1]["content"]) if self.end == "text" else ""

    def emptied_after(self, breakpoint_: Breakpoint) -> "Conversation":
        """Return the same turns without any content after the breakpoint.

        Later turns stay, but empty, as some templates write one turn into the next.
        """
        index = breakpoint_.num_messages
        cut = {**self.messages[index], "content": self.messages[index]["content"][: breakpoint_.num_parts]}
        silent = [_say_nothing(each) for each in self.messages[index + 1 :]]
        return Conversation([*self.messages[:index], cut, *silent], (), variables=self.variables, effort=self.effort)


def choose_end(add_generation_prompt: bool | None, continue_final_message: bool | None) -> PromptEnd:
    """Return the end that transformers' parameters ask for, which vLLM has too; None stands for the default."""
    if continue_final_message and add_generation_prompt:
        raise InvalidArgumentError("continue_final_message", "must not be given together with add_generation_prompt")
    if continue_final_message:
        return "text"
    return "message" if add_generation_prompt is False else "answer"


def read_messages(
    messages: object, end: PromptEnd = "answer", variables: Mapping[str, Any] | None = None
) -> Conversation:
    if isinstance(messages, Conversation):
        return messages  # already read
    pictures: list[PicturePart] = []
    listed = check_is_list(messages, "messages", "messages")
    _check_number(listed)
    read = [_read_message(message, f"messages[{index}]", pictures) for index, message in enumerate(listed)]
    if end == "text" and "tool_calls" in read[-1]:
        # A continuation would be a text after the call: nothing would constrain it to the tool's arguments.
        reason = "continues only text: leave out the last message's tool_calls, or send their results"
        raise InvalidArgumentError("continue_final_message", reason)
    breakpoints = _find_breakpoints(listed)
    pinned = pin_pictures(pictures, breakpoints) if breakpoints else tuple(pictures)
    return Conversation(read, pinned, breakpoints, end, variables or {})


def _check_number(messages: Sequence[object]) -> None:
    """Check the number of messages and parts before reading any: there may be millions."""
    if len(messages) > MAX_MESSAGES:
        raise InvalidArgumentError("messages", f"must hold at most {MAX_MESSAGES} messages, not {len(messages)}")
    for name, what in (("content", "parts"), ("tool_calls", "tool calls")):
        held = (message.get(name) for message in messages if isinstance(message, Mapping))
        number = sum(len(each) for each in held if isinstance(each, list | tuple))
        if number > MAX_PARTS:
            raise InvalidArgumentError("messages", f"must hold at most {MAX_PARTS} {what} in all, not {number}")


def _read_message(message: object, field: str, pictures: list[PicturePart]) -> TemplateMessage:
    message = check_is_object(message, field)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        refuse(f"{field}.role", role, "a role such as 'user'")
    check_fields(message, field, {"role", "content", "name", "type", *_FIELDS_OF.get(role, ())}, EMPTY_IN_ANSWERS)
    if message.get("type") not in MESSAGE_TYPES:
        refuse(f"{field}.type", message["type"], "'text', or left out")
    read: TemplateMessage = {"role": role}
    if calls := message.get("tool_calls"):
        read["tool_calls"] = read_tool_calls(calls, f"{field}.tool_calls")
    content, content_field = content_without_repeated(message), f"{field}.content"
    if (refusal := message.get("refusal")) not in (None, ""):
        # A refusal replaces the content. Like the part of that name, it is read as text.
        content_field = f"{field}.refusal"
        if content:
            raise InvalidArgumentError(content_field, "must not be given together with content")
        content = check_is_text(refusal, content_field)
    if thought := _read_thought(message, field):
        read[THOUGHT_NAMES[0]] = thought
    # An answer may be only calls or thoughts, or may have been cut off after them, and a tool may return nothing.
    may_be_silent = role in ("assistant", "tool")
    is_silent = may_be_silent and (content is None or (isinstance(content, list | tuple) and not content))
    read["content"] = "" if is_silent else _read_content(content, content_field, pictures)
    for name in ("name", "tool_call_id"):
        if (text := message.get(name)) is not None:
            read[name] = check_is_text(text, f"{field}.{name}")
    return read


def _read_thought(message: Fields, field: str) -> str:
    """Read the thought of an earlier answer. Templates without a place for it drop it; all drop much older ones."""
    thoughts = {name: check_is_text(message[name], f"{field}.{name}") for name in THOUGHT_NAMES if message.get(name)}
    if len(set(thoughts.values())) > 1:
        first, second = THOUGHT_NAMES
        raise InvalidArgumentError(f"{field}.{second}", f"must be the same as {first}, or empty")
    return next(iter(thoughts.values()), "")


def _say_nothing(message: TemplateMessage) -> TemplateMessage:
    kept = {name: value for name, value in message.items() if name != THOUGHT_NAMES[0]}
    return kept | {"content": type(message["content"])()}


def _read_content(content: object, field: str, pictures: list[PicturePart]) -> str | list[Fields]:
    if isinstance(content, str):
        return str(content)
    parts = check_is_list(content, field, "parts, or a string")
    return [_read_part(part, f"{field}[{index}]", pictures) for index, part in enumerate(parts)]


def _read_part(part: object, field: str, pictures: list[PicturePart]) -> Fields:
    part = check_is_object(part, field)
    kind = part.get("type")
    reader = _PART_READERS.get(kind) if isinstance(kind, str) else None
    if reader is None:
        refuse(f"{field}.type", kind, f"one of {', '.join(_PART_READERS)}")
    read = reader(part, field)
    if part.get(BREAKPOINT) is not None:
        _check_breakpoint(part[BREAKPOINT], f"{field}.{BREAKPOINT}")
    if part.get("cache_control") is not None:
        convert(part["cache_control"], CacheControl, f"{field}.cache_control")
    if isinstance(read, str):
        return {"type": "text", "text": read}
    pictures.append(read)
    return show_to_template(read.kind)


def show_to_template(kind: Kind) -> Fields:
    """Return a part for the template. Some look at its type, others for a field of this name, as Qwen2-Audio's does."""
    return {"type": kind, kind: ""}


def _read_text(part: Fields, field: str) -> str:
    name = part["type"]
    check_fields(part, field, {"type", name, *OF_PARTS})
    return check_is_text(part.get(name), f"{field}.{name}")


def _read_url(part: Fields, field: str, modality: Modality) -> PicturePart:
    """Read OpenAI's form for pictures, or vLLM's for films and sounds: `image_url`, `video_url`, `audio_url`."""
    name = f"{modality}_url"
    check_fields(part, field, {"type", name, "uuid", *OF_PARTS})
    url, url_field = part.get(name), f"{field}.{name}"
    uuid = _read_uuid(part, field)
    if not isinstance(url, str) and not _is_left_out(url, uuid):
        url, url_field = _read_url_object(check_is_object(url, url_field), url_field, modality)
    if url == "" and uuid is not None:
        url = None  # some clients send an empty string, as vLLM accepts it
    if not _is_left_out(url, uuid):
        check_is_url(url, url_field)
    return PicturePart(url, url_field, uuid, modality=modality)


def _read_url_object(url: Fields, field: str, modality: Modality) -> tuple[object, str]:
    check_fields(url, field, {"url", "detail"} if modality == "image" else {"url"})
    check_detail(url.get("detail"), f"{field}.detail")
    return url.get("url"), f"{field}.url"


def check_detail(detail: object, field: str) -> None:
    if detail not in (None, *DETAILS):
        raise UnsupportedFieldError(field, f"must be one of {', '.join(DETAILS)}")


def _read_input_audio(part: Fields, field: str) -> PicturePart:
    """Read OpenAI's form for sounds: base64, or a URL as for Alibaba's service. The file itself tells its format."""
    check_fields(part, field, {"type", "input_audio", "uuid", *OF_PARTS})
    uuid, sent = _read_uuid(part, field), part.get("input_audio")
    field = f"{field}.input_audio"
    if _is_left_out(sent, uuid):
        return PicturePart(None, field, uuid, modality="audio")
    sent = check_is_object(sent, field)
    check_fields(sent, field, {"data", "format"})
    if sent.get("format") is not None:
        check_is_text(sent["format"], f"{field}.format")
    check_is_text(sent.get("data"), f"{field}.data")
    # The object itself: it may be a `LiftedUrl`, of which a plain string would lose the content.
    data = sent["data"]
    url = data if ":" in data[:MAX_HEAD_BYTES] else as_data_url("application/octet-stream", data)
    return PicturePart(url, f"{field}.data", uuid, modality="audio")


def _read_image_pil(part: Fields, field: str) -> PicturePart:
    check_fields(part, field, {"type", "image_pil", "uuid"})
    source, uuid = part.get("image_pil"), _read_uuid(part, field)
    if isinstance(source, _JSON_TYPES) and not _is_left_out(source, uuid):
        refuse(f"{field}.image_pil", source, "an image object, which only LLM.chat can be given")
    return PicturePart(source, f"{field}.image_pil", uuid)


def _read_named(part: Fields, field: str, modality: Modality) -> PicturePart:
    """Read transformers' own form: `image` is an object or a URL, or `url` is a URL; or else `media_id` is a handle."""
    check_fields(part, field, {"type", modality, "url", "media_id", "uuid", *OF_PARTS})
    if part.get("media_id") is not None:
        return _read_handle(part, field, modality)
    name = "url" if part.get(modality) is None and part.get("url") is not None else modality
    if name == modality and part.get("url") is not None:
        raise InvalidArgumentError(f"{field}.url", f"must not be given together with {modality}")
    source, uuid = part.get(name), _read_uuid(part, field)
    if name == "url" or (isinstance(source, _JSON_TYPES) and not _is_left_out(source, uuid)):
        check_is_url(source, f"{field}.{name}")
    return PicturePart(source, f"{field}.{name}", uuid, modality=modality)


def _read_handle(part: Fields, field: str, modality: Modality) -> PicturePart:
    for name in (modality, "url"):
        if part.get(name) is not None:
            raise InvalidArgumentError(f"{field}.{name}", "must not be given together with media_id")
    media_id = check_is_text(part["media_id"], f"{field}.media_id")
    uuid = _read_uuid(part, field)
    return PicturePart(f"{HANDLE_PREFIX}{media_id}", f"{field}.media_id", uuid, modality=modality)


def _read_image_embeds(part: Fields, field: str) -> PicturePart:
    check_fields(part, field, {"type", "image_embeds", "uuid", *OF_PARTS})
    source, uuid = part.get("image_embeds"), _read_uuid(part, field)
    field = f"{field}.image_embeds"
    if isinstance(source, _JSON_TYPES) and not isinstance(source, str) and not _is_left_out(source, uuid):
        refuse(field, source, "the base64 of a .npy or a .safetensors file")
    return PicturePart(source, field, uuid, modality="image_embeds")


def _read_file(part: Fields, field: str) -> DocumentPart:
    """Read OpenAI's form for PDFs, which may also have a `file_url` as in its Responses API."""
    check_fields(part, field, {"type", "file", *OF_PARTS})
    sent, field = check_is_object(part.get("file"), f"{field}.file"), f"{field}.file"
    check_fields(sent, field, {*_FILE_SOURCES, "filename"})
    given = [name for name in _FILE_SOURCES if sent.get(name) is not None]
    if len(given) != 1:
        raise InvalidArgumentError(field, f"must have exactly one of {', '.join(_FILE_SOURCES)}")
    [source] = given
    url = sent[source]
    if source == "file_id":
        url = HANDLE_PREFIX + check_is_text(url, f"{field}.file_id")
    check_is_url(url, f"{field}.{source}")
    if source == "file_data":
        url = as_data_url("application/pdf", url)
    return DocumentPart(url, f"{field}.{source}", name=read_name(sent.get("filename"), f"{field}.filename"))


def read_name(name: object, field: str) -> str | None:
    """Return a file's name in one line, with single spaces. Invisible joiners and direction marks are kept."""
    if name is None:
        return None
    shown = " ".join(name.split()) if isinstance(name, str) else ""
    if not 0 < len(shown) <= MAX_NAME_LENGTH or not _NO_TEXT.isdisjoint(map(unicodedata.category, shown)):
        refuse(field, name, f"1 to {MAX_NAME_LENGTH} characters, none of which is a control character")
    return shown


def _check_breakpoint(breakpoint_fields: object, field: str) -> None:
    breakpoint_fields = check_is_object(breakpoint_fields, field)
    check_fields(breakpoint_fields, field, {"mode", "ttl"})
    if breakpoint_fields.get("mode") != "explicit":
        refuse(f"{field}.mode", breakpoint_fields.get("mode"), "'explicit'")
    ttl = breakpoint_fields.get("ttl")
    if not isinstance(ttl, str | None) or ttl not in BREAKPOINT_SECONDS:
        refuse(f"{field}.ttl", ttl, f"one of {', '.join(filter(None, BREAKPOINT_SECONDS))}")


def _find_breakpoints(messages: Sequence[Any]) -> tuple[Breakpoint, ...]:
    """Return the last breakpoint of each duration, of checked messages: it covers what the others cover."""
    last: dict[float, Breakpoint] = {}
    num_pictures = 0
    for num_messages, message in enumerate(messages):
        content = message.get("content")
        for num_parts, part in enumerate(() if isinstance(content, str | None) else content, start=1):
            num_pictures += part["type"] not in TEXT_PARTS
            if (breakpoint_fields := part.get(BREAKPOINT)) is not None:
                seconds = BREAKPOINT_SECONDS[breakpoint_fields.get("ttl")]
                last[seconds] = Breakpoint(num_messages, num_parts, num_pictures, seconds)
    return tuple(last.values())


def pin_pictures(pictures: Sequence[PicturePart], breakpoints: Sequence[Breakpoint]) -> tuple[PicturePart, ...]:
    def seconds_of(place: int) -> float:
        return max((each.seconds for each in breakpoints if place < each.num_pictures), default=0.0)

    return tuple(replace(part, pin_seconds=seconds_of(place)) for place, part in enumerate(pictures))


def _is_left_out(source: object, uuid: str | None) -> bool:
    """Return whether the picture is left out because it was sent with its uuid before."""
    return source is None and uuid is not None


def _read_uuid(part: Fields, field: str) -> str | None:
    return read_label(part.get("uuid"), f"{field}.uuid")


def read_label(value: object, field: str) -> str | None:
    """Return a client's own name for a picture or anything else: any text that can be shown in one line."""
    if value is None:
        return None
    if not isinstance(value, str) or not 0 < len(value) <= MAX_UUID_LENGTH or not value.isprintable():
        refuse(field, value, f"1 to {MAX_UUID_LENGTH} printable characters")
    return str(value)


_PART_READERS: dict[str, Callable[[Fields, str], str | PicturePart]] = {
    "text": _read_text,
    # OpenAI's, from an assistant that refused to answer. To another model it is ordinary text, as in vLLM.
    "refusal": _read_text,
    "image_url": partial(_read_url, modality="image"),
    "image_pil": _read_image_pil,
    "image": partial(_read_named, modality="image"),
    "image_embeds": _read_image_embeds,
    "video_url": partial(_read_url, modality="video"),
    "video": partial(_read_named, modality="video"),
    "input_audio": _read_input_audio,
    "audio_url": partial(_read_url, modality="audio"),
    "audio": partial(_read_named, modality="audio"),
    "file": _read_file,
}
