"""Converts items of OpenAI's Responses API into chat messages, which `read_messages` reads.

All rules for messages are there; here is only what differs: the names of fields, and where they are. Every error names
the field as the client wrote it (`input[1].content[0].image_url`). Each item becomes a message of its own:
`join_answers` makes one of those that were one answer.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import msgspec

from keepsight.errors import InvalidArgumentError
from keepsight.frontend.http.decode_body import NeutralValues, Refused, check_refused, convert
from keepsight.frontend.prompt.check_fields import (
    Fields,
    check_fields,
    check_is_list,
    check_is_object,
    check_is_text,
    refuse,
)
from keepsight.frontend.prompt.places import Places, read_at_places
from keepsight.frontend.prompt.read_blocks import DirectCaller
from keepsight.frontend.prompt.read_messages import HANDLE_PREFIX, OF_PARTS, SYSTEM_ROLES, Conversation, check_detail

_KINDS = ("message", "reasoning", "function_call", "function_call_output", "item_reference")
# Fields that a message item has besides its role and content when it is sent back.
_OF_ITEMS = ("id", "status", "type")
# OpenAI's field for the purpose of an answer.
_WHEN_EMPTY = ("phase",)
# Fields of an answer's text that are dropped: log-probabilities, and what OpenAI's own client parses, only repeat it.
_OF_TEXTS = ("annotations", "logprobs", "parsed")
_PARTS = ("input_text", "input_image", "input_audio", "input_file", "output_text", "refusal")


class SentItem(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    id: str | None = None
    status: str | None = None


class CallItem(SentItem, frozen=True, kw_only=True, tag="function_call"):
    call_id: str
    name: str
    arguments: str
    namespace: None = None
    caller: DirectCaller | None = None
    created_by: str | None = None
    async_: Refused = msgspec.field(default=None, name="async")
    # OpenAI's own Python client holds these: what it parsed, and its other name for `async`.
    parsed_arguments: Any = None
    held_async: Refused = msgspec.field(default=None, name="async_")

    NEUTRAL_VALUES: ClassVar[NeutralValues] = {"async": (False,), "async_": (False,)}


class ResultItem(SentItem, frozen=True, kw_only=True, tag="function_call_output"):
    call_id: str
    # A string, or parts.
    output: Any
    name: str | None = None
    namespace: None = None
    caller: DirectCaller | None = None
    created_by: str | None = None


class ThoughtPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ThoughtItem(SentItem, frozen=True, kw_only=True, tag="reasoning"):
    summary: list[ThoughtPart] | None = None
    content: list[ThoughtPart] | None = None
    # Only the server that wrote it can read it.
    encrypted_content: None = None


SENT_ITEMS: tuple[type[SentItem], ...] = (ThoughtItem, CallItem, ResultItem)


def is_reference(item: Fields) -> bool:
    """Return whether an item stands for one of an earlier answer; in OpenAI's API its type may be left out."""
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and "id" in item and item.keys() <= {"id", "type"})


def read_items(
    items: object,
    instructions: str | None = None,
    before: Sequence[Any] = (),
    variables: Mapping[str, Any] | None = None,
) -> tuple[Conversation, Places]:
    """Read items. `instructions` are put before all of them; `before` has the items of earlier turns; `variables` are
    for the chat template.
    """
    messages = _Messages()
    if instructions:
        messages.add({"role": "system", "content": instructions}, "instructions")
    for index, item in enumerate(before):
        messages.add_item(item, f"previous_response_id[{index}]")
    if isinstance(items, str):
        messages.add({"role": "user", "content": items}, "input")
    else:
        for index, item in enumerate(check_is_list(items, "input", "items, or a string")):
            messages.add_item(check_is_object(item, f"input[{index}]"), f"input[{index}]")
    places = Places(messages.places)
    return read_at_places(messages.messages, places, variables=variables), places


class _Messages:
    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.places = {"messages": "input"}
        self._call_ids: set[str] = set()

    def add(self, message: dict[str, Any], place: str) -> None:
        self.places[f"messages[{len(self.messages)}]"] = place
        self.messages.append(message)

    def add_item(self, item: Fields, place: str) -> None:
        kind = item.get("type")
        if kind == "function_call":
            self._add_call(convert(item, CallItem, place), place)
        elif kind == "function_call_output":
            self._add_result(convert(item, ResultItem, place), place)
        elif kind == "reasoning":
            self._add_thought(convert(item, ThoughtItem, place), place)
        elif is_reference(item):
            raise InvalidArgumentError(f"{place}.id", "must be the id of an item stored here; or send the item itself")
        elif kind in (None, "message"):
            self._add_message(item, place)
        else:
            refuse(f"{place}.type", kind, f"one of {', '.join(_KINDS)}")

    def _add_message(self, item: Fields, place: str) -> None:
        if item.get("role") == "tool":
            refuse(f"{place}.role", "tool", "a message's: a tool's result is an item of the type function_call_output")
        check_fields(item, place, {"role", "content", *_OF_ITEMS}, _WHEN_EMPTY)
        role, content = item.get("role"), item.get("content")
        if role in SYSTEM_ROLES and self._has_only_instructions:
            # Few templates allow two system messages.
            content = self._join(self.messages.pop()["content"], content, f"{place}.content")
        else:
            content = self._read_content(content, f"{place}.content")
        self.add({"role": role, "content": content}, place)

    def _add_thought(self, thought: ThoughtItem, place: str) -> None:
        parts = thought.content or thought.summary or ()
        text = "\n".join(part.text for part in parts)
        if text:
            self.add({"role": "assistant", "content": "", "reasoning_content": text}, place)

    def _add_call(self, call: CallItem, place: str) -> None:
        check_refused(call, place)
        self._call_ids.add(call.call_id)
        function = {"name": call.name, "arguments": call.arguments}
        calls = [{"id": call.call_id, "type": "function", "function": function}]
        self.add({"role": "assistant", "content": "", "tool_calls": calls}, place)

    def _add_result(self, result: ResultItem, place: str) -> None:
        if result.call_id not in self._call_ids:
            raise InvalidArgumentError(f"{place}.call_id", "must be the call_id of a function_call in an earlier item")
        self.places[f"messages[{len(self.messages)}].content"] = f"{place}.output"
        content = self._read_content(result.output, f"{place}.output")
        self.add({"role": "tool", "tool_call_id": result.call_id, "content": content}, place)

    @property
    def _has_only_instructions(self) -> bool:
        return len(self.messages) == 1 and self.places["messages[0]"] == "instructions"

    def _join(self, instructions: str, content: object, place: str) -> object:
        """Put the instructions before the content of a system message."""
        match content:
            case str():
                return f"{instructions}\n\n{content}"
            case [{"type": "input_text", "text": str(text)}, *_]:
                first, *behind = self._read_parts(content, place)
                return [first | {"text": f"{instructions}\n\n{text}"}, *behind]
            case [_, *_]:
                return [{"type": "text", "text": instructions}, *self._read_parts(content, place, num_before=1)]
        return content

    def _read_content(self, content: object, place: str) -> object:
        """Read the content of the message that is added next."""
        return self._read_parts(content, place) if isinstance(content, list) else content

    def _read_parts(self, parts: Sequence[object], place: str, num_before: int = 0) -> list[dict[str, Any]]:
        """Read parts. `num_before`: the number of parts put before them that the client did not write."""
        read = []
        for at, part in enumerate(parts):
            own = f"messages[{len(self.messages)}].content[{at + num_before}]"
            if num_before:
                self.places[own] = f"{place}[{at}]"
            read.append(self._read_part(part, f"{place}[{at}]", own))
        return read

    def _read_part(self, part: object, place: str, own: str) -> dict[str, Any]:
        part = check_is_object(part, place)
        kind = part.get("type")
        if kind == "input_image":
            return self._read_picture(dict(part), place, own)
        if kind == "input_audio":
            return dict(part)
        if kind == "input_file":
            return self._read_file(dict(part), place, own)
        if kind not in ("input_text", "output_text", "refusal"):
            refuse(f"{place}.type", kind, f"one of {', '.join(_PARTS)}")
        if part.get("annotations"):
            raise InvalidArgumentError(f"{place}.annotations", "must be empty: annotations are not read")
        fields = {name: value for name, value in part.items() if kind != "output_text" or name not in _OF_TEXTS}
        return fields | {"type": "refusal" if kind == "refusal" else "text"}

    def _read_file(self, part: dict[str, Any], place: str, own: str) -> dict[str, Any]:
        """Convert a file. Its `detail` has no effect, like a picture's."""
        check_detail(part.pop("detail", None), f"{place}.detail")
        self.places[f"{own}.file"] = place
        around = {name: part.pop(name) for name in ("type", *OF_PARTS) if name in part}
        return around | {"type": "file", "file": part}

    def _read_picture(self, part: dict[str, Any], place: str, own: str) -> dict[str, Any]:
        url, name = part.pop("image_url", None), "image_url"
        if (file_id := part.pop("file_id", None)) is not None:
            if url is not None:
                raise InvalidArgumentError(f"{place}.file_id", "must not be given together with image_url")
            url, name = HANDLE_PREFIX + check_is_text(file_id, f"{place}.file_id"), "file_id"
        self.places |= {
            f"{own}.image_url": f"{place}.{name}",
            f"{own}.image_url.url": f"{place}.{name}",
            f"{own}.image_url.detail": f"{place}.detail",
        }
        return part | {"type": "image_url", "image_url": {"url": url, "detail": part.pop("detail", None)}}
