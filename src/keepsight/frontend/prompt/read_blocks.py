"""Converts messages of Anthropic's API into chat messages, which `read_messages` reads.

All rules for messages are there; here is only what differs: blocks of a message that are turns of their own in a chat,
and messages that are one turn there. Every error names the field as the client wrote it
(`messages[1].content[0].source.data`).
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import msgspec

from keepsight.errors import InvalidArgumentError, UnsupportedFieldError
from keepsight.frontend.http.decode_body import convert
from keepsight.frontend.prompt.check_fields import check_is_list, check_is_object, refuse
from keepsight.frontend.prompt.lift_data_urls import as_data_url
from keepsight.frontend.prompt.places import Places, read_at_places
from keepsight.frontend.prompt.read_messages import (
    BREAKPOINT,
    HANDLE_PREFIX,
    CacheControl,
    Conversation,
    PromptEnd,
)

# A text block of Claude Code's that differs in each request, so that no cache would find what follows it.
_LABEL = re.compile(r"x-anthropic-billing-header:.*\s*")

_PICTURE_TYPE = re.compile(r"image/[\w.+-]{1,64}")


class SentBlock(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    cache_control: CacheControl | None = None


class SentText(SentBlock, frozen=True, kw_only=True, tag="text"):
    text: str
    citations: Annotated[list[Any], msgspec.Meta(max_length=0)] | None = None
    # The same as in chats.
    prompt_cache_breakpoint: Any = None


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    pass


class Base64Source(Source, frozen=True, tag="base64"):
    media_type: str
    data: str


class UrlSource(Source, frozen=True, tag="url"):
    url: str


class FileSource(Source, frozen=True, tag="file"):
    file_id: str


class TextSource(Source, frozen=True, tag="text"):
    media_type: Literal["text/plain"]
    data: str


class ContentSource(Source, frozen=True, tag="content"):
    # A string, or blocks.
    content: Any


class ImageTransformations(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    oversized_image: Literal["downsize"] | None = None


class SentImage(SentBlock, frozen=True, kw_only=True, tag="image"):
    source: Base64Source | UrlSource | FileSource | None = None
    transformations: ImageTransformations | None = None
    # The same as in chats.
    uuid: Any = None
    prompt_cache_breakpoint: Any = None


class Citations(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    enabled: bool | None = None


class SentDocument(SentBlock, frozen=True, kw_only=True, tag="document"):
    source: Base64Source | UrlSource | FileSource | TextSource | ContentSource
    title: str | None = None
    context: str | None = None
    citations: Citations | None = None
    # The same as in chats.
    prompt_cache_breakpoint: Any = None


class DirectCaller(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="direct"):
    pass


class SentToolUse(SentBlock, frozen=True, kw_only=True, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]
    caller: DirectCaller | None = None
    toolset_name: None = None


class SentToolResult(SentBlock, frozen=True, kw_only=True, tag="tool_result"):
    tool_use_id: str
    # A string, or blocks.
    content: Any = None
    # Not shown to the model, which sees only the content: chats have no field for it.
    is_error: bool | None = None
    toolset_name: None = None


class SentThinking(SentBlock, frozen=True, kw_only=True, tag="thinking"):
    thinking: str
    signature: str | None = None


class SentRedactedThinking(SentBlock, frozen=True, kw_only=True, tag="redacted_thinking"):
    """Thinking that only the server that wrote it can read; it is not shown to the model."""

    data: str


class SentMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    # A string, or blocks.
    content: Any


_Kinds = Mapping[str, type[SentBlock]]
_OF_DOCUMENTS: _Kinds = {"text": SentText, "image": SentImage}
OF_RESULTS: _Kinds = {**_OF_DOCUMENTS, "document": SentDocument}
OF_ROLES: Mapping[str, _Kinds] = {
    "user": {**OF_RESULTS, "tool_result": SentToolResult},
    "assistant": {
        "text": SentText,
        "tool_use": SentToolUse,
        "thinking": SentThinking,
        "redacted_thinking": SentRedactedThinking,
    },
    "system": {"text": SentText},
}


@dataclass
class _Part:
    """A content part of a chat message."""

    fields: dict[str, Any]
    # The client's paths, by what follows the part's own path in the chat message.
    places: dict[str, str]
    # The pieces of a text part, which are joined once all are known.
    texts: list[str] = field(default_factory=list)
    # Some are a document's.
    is_quoted: bool = False

    def join(self, other: "_Part") -> None:
        """Join two text parts: templates may trim each, and write nothing between two."""
        self.fields |= other.fields
        self.texts += other.texts
        self.is_quoted |= other.is_quoted

    def to_dict(self) -> dict[str, Any]:
        return self.fields | ({"text": "\n\n".join(filter(None, self.texts))} if self.texts else {})


@dataclass
class _Turn:
    role: str
    place: str
    parts: list[_Part] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    # The call that a tool's result belongs to.
    call_id: str | None = None

    @property
    def is_empty(self) -> bool:
        return not (self.parts or self.calls or self.thoughts)

    @property
    def is_blank_answer(self) -> bool:
        texts = (*self.thoughts, *(text for part in self.parts for text in part.texts))
        return self.role == "assistant" and not (self.calls or any(text.strip() for text in texts))

    def join(self, other: "_Turn") -> None:
        meets_text = bool(self.parts and other.parts and self.parts[-1].texts and other.parts[0].texts)
        if meets_text:
            self.parts[-1].join(other.parts[0])
        self.parts += other.parts[meets_text:]
        self.calls += other.calls
        self.thoughts += other.thoughts

    def join_quoted(self) -> None:
        """Join the texts of documents with those beside them: together they might spell what gives a prompt structure,
        and each is made plain by itself.
        """
        joined: list[_Part] = []
        for part in self.parts:
            last = joined[-1] if joined else None
            if last and last.texts and part.texts and (last.is_quoted or part.is_quoted):
                last.join(part)
            else:
                joined.append(part)
        self.parts = joined

    def as_message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": self.role, "content": [part.to_dict() for part in self.parts]}
        if self.calls:
            message["tool_calls"] = self.calls
        if self.thoughts:
            message["reasoning_content"] = "\n".join(self.thoughts)
        return message if self.call_id is None else message | {"tool_call_id": self.call_id}

    def list_places(self, own: str) -> Iterator[tuple[str, str]]:
        yield own, self.place
        for index, part in enumerate(self.parts):
            for suffix, place in part.places.items():
                yield f"{own}.content[{index}]{suffix}", place
                if suffix:
                    yield place, place  # no chat has such a path: it was translated before


def read_blocks(
    messages: object, system: object = None, variables: Mapping[str, Any] | None = None
) -> tuple[Conversation, Places]:
    """Read messages. `system` is put before all of them; `variables` are for the chat template."""
    turns = _Turns()
    if system:
        turns.add_system(system)
    for index, message in enumerate(check_is_list(messages, "messages", "messages")):
        fields = check_is_object(message, f"messages[{index}]")
        turns.add_message(convert(fields, SentMessage, f"messages[{index}]"), f"messages[{index}]")
    turns.drop_blank_end()
    for turn in turns.turns:
        turn.join_quoted()
    places = Places(turns.find_places())
    end = turns.choose_end()
    conversation = read_at_places([turn.as_message() for turn in turns.turns], places, end, variables)
    return replace(conversation, quoted=turns.find_quoted()), places


class _Turns:
    def __init__(self) -> None:
        self.turns: list[_Turn] = []
        self._call_ids: set[str] = set()

    def find_places(self) -> dict[str, str]:
        places = {"messages": "messages"}
        for index, turn in enumerate(self.turns):
            places |= turn.list_places(f"messages[{index}]")
        return places

    def find_quoted(self) -> frozenset[tuple[int, int]]:
        parts = (
            (index, number, part) for index, turn in enumerate(self.turns) for number, part in enumerate(turn.parts)
        )
        return frozenset((index, number) for index, number, part in parts if part.is_quoted)

    def choose_end(self) -> PromptEnd:
        """Return how the prompt ends: if the last turn is the assistant's, the answer continues it."""
        if not self.turns or self.turns[-1].role != "assistant":
            return "answer"
        if self.turns[-1].calls:
            raise InvalidArgumentError("messages", "must tell the results of the last message's tool_use blocks")
        return "text"

    def drop_blank_end(self) -> None:
        """Drop a blank last answer: continuing it means to begin one, and only without it does a template do so."""
        if self.turns and self.turns[-1].is_blank_answer:
            self.turns.pop()

    def add_system(self, system: object) -> None:
        turn = _Turn("system", "system")
        for block, place in _read_content(system, "system", OF_ROLES["system"]):
            assert isinstance(block, SentText)
            if not _LABEL.fullmatch(block.text):
                turn.parts.append(_read_text(block, place))
        self._add(turn)

    def add_message(self, message: SentMessage, place: str) -> None:
        role = message.role
        if role == "system" and any(turn.role != "system" for turn in self.turns):
            # Few templates allow a later system message.
            role = "user"
        turn = _Turn(role, place)
        for block, own in _read_content(message.content, f"{place}.content", OF_ROLES[message.role]):
            if isinstance(block, SentToolResult):
                self._add(turn)
                self.turns.append(self._read_result(block, own))
                turn = _Turn(role, place)
            else:
                self._add_block(turn, block, own)
        self._add(turn)

    def _add(self, turn: _Turn) -> None:
        """Add a turn; consecutive turns of one role are merged."""
        if turn.is_empty:
            return
        if self.turns and self.turns[-1].role == turn.role:
            self.turns[-1].join(turn)
        else:
            self.turns.append(turn)

    def _add_block(self, turn: _Turn, block: SentBlock, place: str) -> None:
        if isinstance(block, SentToolUse):
            self._call_ids.add(block.id)
            turn.calls.append(_read_call(block, place))
        elif isinstance(block, SentThinking):
            turn.thoughts.append(block.thinking)
        elif not isinstance(block, SentRedactedThinking):
            turn.parts += _read_parts(block, place)

    def _read_result(self, result: SentToolResult, place: str) -> _Turn:
        if result.tool_use_id not in self._call_ids:
            raise InvalidArgumentError(f"{place}.tool_use_id", "must be the id of a tool_use in an earlier message")
        blocks = _read_content(result.content, f"{place}.content", OF_RESULTS) if result.content else ()
        parts = [part for block, own in blocks for part in _read_parts(block, own)]
        return _Turn("tool", place, parts, call_id=result.tool_use_id)


def _read_content(content: object, place: str, kinds: _Kinds) -> Iterator[tuple[SentBlock, str]]:
    """Yield each block and its path."""
    if isinstance(content, str):
        yield SentText(text=content), place
        return
    for index, block in enumerate(check_is_list(content, place, "blocks, or a string")):
        own = f"{place}[{index}]"
        fields = check_is_object(block, own)
        if not isinstance(kind := fields.get("type"), str) or kind not in kinds:
            refuse(f"{own}.type", kind, f"one of {', '.join(kinds)}")
        yield convert(fields, kinds[kind], own), own


def _read_parts(block: SentBlock, place: str) -> Iterator[_Part]:
    if isinstance(block, SentText):
        yield _read_text(block, place)
    elif isinstance(block, SentDocument):
        yield from _read_document(block, place)
    else:
        assert isinstance(block, SentImage)
        yield _read_picture(block, place)


def _read_text(block: SentText, place: str) -> _Part:
    fields = {"type": "text", BREAKPOINT: block.prompt_cache_breakpoint}
    return _Part(_drop_nones(fields), {"": place}, [block.text])


def _read_picture(block: SentImage, place: str) -> _Part:
    url, name = _read_source(block.source, f"{place}.source")
    fields = {"type": "image_url", "uuid": block.uuid, BREAKPOINT: block.prompt_cache_breakpoint}
    return _Part({**_drop_nones(fields), "image_url": url}, {"": place, ".image_url": f"{place}.source{name}"})


def _read_document(block: SentDocument, place: str) -> Iterator[_Part]:
    """Yield a document's parts. The text about the document comes before it."""
    if block.citations is not None and block.citations.enabled:
        raise UnsupportedFieldError(f"{place}.citations.enabled", "is not supported: answers have no citations")
    source, fields = block.source, _drop_nones({BREAKPOINT: block.prompt_cache_breakpoint})
    texts = list(filter(None, (block.title, block.context)))
    if isinstance(source, TextSource):
        yield _Part({"type": "text", **fields}, {"": place}, [*texts, source.data], is_quoted=True)
        return
    if isinstance(source, ContentSource):
        within = [
            part
            for inner, own in _read_content(source.content, f"{place}.source.content", _OF_DOCUMENTS)
            for part in _read_parts(inner, own)
        ]
        within[-1].fields |= fields
        for part in within:
            part.is_quoted = bool(part.texts)
        yield from (*_text_before(texts, place), *within)
        return
    kind, url, name = _read_pdf(source, f"{place}.source")
    yield from _text_before(list(filter(None, [block.context])), place)
    places = {f".file.{kind}": f"{place}.source{name}", ".file.filename": f"{place}.title", ".file": place, "": place}
    file = _drop_nones({kind: url, "filename": block.title})
    yield _Part({"type": "file", "file": file, **fields}, places)


def _text_before(texts: list[str], place: str) -> Iterator[_Part]:
    if texts:
        yield _Part({"type": "text"}, {"": place}, texts, is_quoted=True)


def _read_pdf(source: Base64Source | UrlSource | FileSource, place: str) -> tuple[str, str, str]:
    """Return the name that chats have for a source, its value, and the name that it has here."""
    if isinstance(source, Base64Source):
        if source.media_type != "application/pdf":
            refuse(f"{place}.media_type", source.media_type, "'application/pdf'")
        return "file_data", as_data_url(source.media_type, source.data), ".data"
    if isinstance(source, FileSource):
        return "file_id", source.file_id, ".file_id"
    return "file_url", source.url, ".url"


def _read_source(source: Base64Source | UrlSource | FileSource | None, place: str) -> tuple[str | None, str]:
    """Return a source's URL, and the path within the source of the field that has it."""
    if isinstance(source, Base64Source):
        if not _PICTURE_TYPE.fullmatch(source.media_type):
            refuse(f"{place}.media_type", source.media_type, "a picture's, such as 'image/png'")
        return as_data_url(source.media_type, source.data), ".data"
    if isinstance(source, FileSource):
        return HANDLE_PREFIX + source.file_id, ".file_id"
    return (None, "") if source is None else (source.url, ".url")


def _read_call(call: SentToolUse, place: str) -> dict[str, Any]:
    """Write a call's arguments as `tojson` does, so that most calls are what the model wrote."""
    try:
        arguments = json.dumps(call.input, ensure_ascii=False)
    except RecursionError as error:
        raise InvalidArgumentError(f"{place}.input", "is nested too deeply") from error
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _drop_nones(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
