"""What a request is about, as far as it matters which of several servers gets it.

Pure, and never refuses: a body of no known form has no affinity, and the server that gets it says what is wrong. Media
are found by the names of their fields, wherever in the prompt: text within JSON's strings cannot look like one, as its
quotes are escaped. One that is found wrongly costs only a worse choice. But a request has to go where the ids are that
it names: these are read only in fields where a server reads them, and not in tools or the arguments of their calls.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

import msgspec
import xxhash
from msgspec import Raw

from keepsight.errors import InvalidArgumentError
from keepsight.frontend.http.decode_body import Buffer, check_num_values, without_mark
from keepsight.frontend.prompt.lift_data_urls import LiftedUrl, replace_urls

# An answer, and a picture's part of a prompt, count as much text as this. (256 tokens of about 4 bytes.)
ANSWER_BYTES = MEDIA_BYTES_IN_PROMPT = 1024
# The assumed size of media that are only named.
TYPICAL_MEDIA_BYTES = 2**18
# Beginnings of prompts are compared at lengths of this times a power of two.
SHORTEST_BEGINNING = 256
# More than any request has. Beyond, looking would take long, and there is no affinity.
MAX_MEDIA = 1024
# Without its large media.
MAX_TEXT_BYTES = 2**23
_MEDIA = re.compile(
    rb'"(?:(?P<id>(?:image|video|audio|file|media)_id)|(?:image|video|audio|file)_(?:url|data)|url|image|video|audio'
    rb'|image_embeds|(?P<bare>data)|(?P<uuid>uuid))"\s*:\s*"(?P<value>[^"]+)"'
)
# Of uploads and stored responses.
_ID = re.compile(rb"((?:media_|resp_)\w{1,64})")
_HANDLE = re.compile(rb"(?i:media):\\?/\\?/(media_\w{1,64})")
_UPLOADS = ("/v1/media", "/v1/files")
_PATH = re.compile(r"/v1/(?:media|files|responses)/([^/]+)(?:/\w+)?")


@dataclass(frozen=True, slots=True)
class Affinity:
    """All names are hashes, so that they are small."""

    # The bytes of each of its media.
    media: Mapping[bytes, int] = field(default_factory=dict)
    # Of the first 256 bytes of its prompt, 512, 1024 ...
    beginnings: tuple[bytes, ...] = ()
    cache_key: str | None = None
    # What it names that only the server knows that has it.
    ids: tuple[str, ...] = ()
    # The assumed cost of the request.
    num_bytes: int = ANSWER_BYTES


class _Prompt(msgspec.Struct):
    """The fields of all APIs' requests that a prompt consists of, in the order in which it does, and its cache key."""

    model: Raw = Raw()
    cache_salt: Raw = Raw()
    system: Raw = Raw()
    instructions: Raw = Raw()
    tools: Raw = Raw()
    previous_response_id: Raw = Raw()
    messages: Raw = Raw()
    input: Raw = Raw()
    prompt: Raw = Raw()
    prompt_cache_key: Raw = Raw()


class _Block(msgspec.Struct):
    """A part of a message; in Anthropic's form it may be a tool's call, whose arguments are plain JSON."""

    type: str = ""
    input: Raw = Raw()


class _Message(msgspec.Struct):
    content: list[_Block | str | None] | str | None = None


_decoder = msgspec.json.Decoder(_Prompt)
_messages_decoder = msgspec.json.Decoder(list[_Message])


def find_affinity(path: str, body: Buffer, caller: bytes = b"") -> Affinity:
    """`path`: without its query. `caller`: what tells callers apart."""
    if path in _UPLOADS:
        # A request may name several of them, and only one server can answer it.
        return Affinity(cache_key=f"uploads of {xxhash.xxh3_128_hexdigest(caller)}")
    if (named := _PATH.fullmatch(path)) is not None and _ID.fullmatch(named[1].encode()):
        return Affinity(ids=(named[1],))
    body = without_mark(body)
    if not bytes(body[:64]).lstrip().startswith(b"{"):
        return Affinity()
    text, sizes = _name_large_media(body)
    if len(text) > MAX_TEXT_BYTES:
        return Affinity()
    try:
        check_num_values(text)
        prompt = _decoder.decode(text)
        cache_key = _read_text(prompt.prompt_cache_key)
    except (InvalidArgumentError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Affinity()
    parts = [bytes(getattr(prompt, name)) for name in _Prompt.__struct_fields__ if name != "prompt_cache_key"]
    if (named_media := _name_media(b"\n".join(parts), sizes)) is None:
        return Affinity()
    beginning, found, uploads = named_media
    if uploads:
        uploads.subtract(_find_ids(bytes(prompt.tools)))
        uploads.subtract(_find_ids_in_calls(prompt.messages))
    ids = [*+uploads]
    if _ID.fullmatch(continued := bytes(prompt.previous_response_id).strip(b'"')):
        ids.append(continued)
    return Affinity(
        {xxhash.xxh3_128_digest(each): num_bytes for each, num_bytes in found.items()},
        tuple(_name_beginnings(beginning)),
        cache_key,
        tuple(each.decode() for each in ids),
        len(beginning) + len(found) * MEDIA_BYTES_IN_PROMPT + ANSWER_BYTES,
    )


def _name_large_media(body: Buffer) -> tuple[Buffer, Mapping[bytes, int]]:
    """Return the body with a hash in place of each large URL, and the sizes of their contents by the hashes."""
    sizes: dict[bytes, int] = {}

    def name(url: LiftedUrl) -> str:
        hashed = xxhash.xxh3_128_hexdigest(url.content)
        sizes[hashed.encode()] = len(url.content)
        return hashed

    return replace_urls(body, name), sizes


def _name_media(text: bytes, sizes: Mapping[bytes, int]) -> tuple[bytes, Mapping[bytes, int], Counter[bytes]] | None:
    """Return the text with a hash in place of each picture that is in it, the sizes of all its media, and uploads' ids.

    `sizes`: of those that have such a name already. None if there are too many.
    """
    pieces, kept = list[bytes](), 0
    found: dict[bytes, int] = {}
    uploads = Counter[bytes]()
    for number, match in enumerate(_MEDIA.finditer(text)):
        if number == MAX_MEDIA:
            return None
        value = match["value"]
        if value in sizes:
            found[value] = sizes[value]
        elif value.startswith(b"data:") or (match["bare"] and b":" not in value):
            # Short, or with escapes: JSON's writers in PHP put a backslash before each slash.
            found[value] = len(value)
            pieces += [text[kept : match.start("value")], xxhash.xxh3_128_hexdigest(value).encode()]
            kept = match.end("value")
        else:
            found[value] = TYPICAL_MEDIA_BYTES
            uploads.update(_find_id(match))
    return b"".join([*pieces, text[kept:]]), found, uploads


def _find_id(media: re.Match[bytes]) -> Iterator[bytes]:
    """Yield the id of the upload that a field names as servers read it. A uuid is the client's own name."""
    form = _ID if media["id"] else _HANDLE
    if not media["uuid"] and (found := form.fullmatch(media["value"])) is not None:
        yield found[1]


def _find_ids(text: Buffer) -> Iterator[bytes]:
    return chain.from_iterable(map(_find_id, _MEDIA.finditer(text)))


def _find_ids_in_calls(messages: Raw) -> Iterator[bytes]:
    """Yield what looks like an upload's id in the arguments of tools' calls, as often as it is there."""
    try:
        decoded = _messages_decoder.decode(messages)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    for message in decoded:
        for block in message.content if isinstance(message.content, list) else ():
            if isinstance(block, _Block) and block.type == "tool_use":
                yield from _find_ids(block.input)


def _read_text(field: Raw) -> str | None:
    value = msgspec.json.decode(field) if bytes(field) else None
    return value if isinstance(value, str) and value else None


def _name_beginnings(text: bytes) -> list[bytes]:
    hashed, names, start, end = xxhash.xxh3_128(), [], 0, SHORTEST_BEGINNING
    while end <= len(text):
        hashed.update(text[start:end])
        names.append(hashed.digest())
        start, end = end, 2 * end
    return names
