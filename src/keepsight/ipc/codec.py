"""Encodes messages between frontend and engine as frames of bytes, and decodes them.

A message is one byte for its kind, one msgpack body, and for pixels one more frame, which is sent and read without a
copy. Knows nothing of sockets. Input is not trusted: decoding returns a message that encodes to the very same bytes, or
raises WireError.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, groupby, pairwise
from math import inf
from typing import Any

import msgspec
import numpy as np

from keepsight.errors import InvalidArgumentError, WireError
from keepsight.requests import (
    MAX_PIXEL_BYTES,
    MAX_PRIORITY,
    AbortRequest,
    CachesReset,
    EngineRequest,
    FindMedia,
    FromEngine,
    MediaArrived,
    MediaDropped,
    MediaFound,
    MediaHeld,
    MediaNeeded,
    Pixels,
    RequestBegun,
    RequestFailed,
    ResetCaches,
    RingPlace,
    Shape,
    StoredPixels,
    TiersChanged,
    ToEngine,
    TokenOutput,
)
from keepsight.sampling_params import MAX_CHOICES, MAX_COUNT

Frame = bytes | memoryview
# What decoders raise for bytes that are not what they read.
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

MAX_BODY_BYTES = 64 * 2**20
# Names of media in one message: 1.3 MB of the longest.
MAX_NAMES = 10_000
# A sound's side is its number of samples: 480,000 are 30 s.
MAX_SIDE = 2**20

REQUEST, ABORT, RESET, FIND, PIXELS, RING_PLACE, STORED_PIXELS = b"Q", b"A", b"C", b"F", b"P", b"R", b"S"
OUTPUTS = b"O"

_ENCODER = msgspec.msgpack.Encoder()


def encode_to_engine(message: ToEngine) -> list[Frame]:
    """Encode a message. Pixels are not copied into their frame: they must not change before it is sent."""
    match message:
        case EngineRequest():
            return [REQUEST, _pack(message)]
        case AbortRequest():
            return [ABORT, _pack(message)]
        case ResetCaches():
            return [RESET, _pack(message)]
        case FindMedia():
            return [FIND, _pack(message)]
        case MediaArrived(media_hash, RingPlace() as place):
            return [RING_PLACE, _pack((media_hash, place))]
        case MediaArrived(media_hash, StoredPixels() as stored):
            return [STORED_PIXELS, _pack((media_hash, stored))]
        case MediaArrived(media_hash, pixels):
            assert isinstance(pixels, np.ndarray)
            return [PIXELS, _pack((media_hash, pixels.shape)), _view(pixels)]


def decode_to_engine(frames: Sequence[Frame]) -> ToEngine:
    """Decode a message. Pixels are a read-only view of their frame."""
    kind, body, payload = _open(frames, num_payloads=1 if frames and frames[0] == PIXELS else 0)
    with _refusing_what_does_not_fit():
        decoder = _DECODERS.get(kind)
        if decoder is None:
            raise WireError(f"{kind!r} is not a kind of message to an engine")
        message = _as_message(decoder.decode(body), payload)
        _check_is_own_form([kind, body], encode_to_engine(message))
    return message


def cut_into_messages(outputs: Sequence[FromEngine]) -> Iterator[Sequence[FromEngine]]:
    """Split outputs into messages below the size limit.

    Outputs that may be megabytes, such as those with prompt logprobs, go alone; a long list of names goes in pieces.
    """
    if not any(map(_may_be_large, outputs)):
        yield outputs
        return
    for is_large, run in groupby(chain.from_iterable(map(_cut, outputs)), _may_be_large):
        together = list(run)
        yield from ([each] for each in together) if is_large else [together]


def _may_be_large(output: FromEngine) -> bool:
    if isinstance(output, MediaHeld | MediaDropped):
        return len(output.media_hashes) >= MAX_NAMES
    return isinstance(output, TokenOutput) and output.prompt_logprobs is not None


def _cut(output: FromEngine) -> Iterator[FromEngine]:
    if not isinstance(output, MediaHeld | MediaDropped):
        yield output
        return
    names = output.media_hashes
    for first in range(0, len(names), MAX_NAMES):
        yield type(output)(names[first : first + MAX_NAMES])


def encode_from_engine(outputs: Sequence[FromEngine]) -> list[Frame]:
    """Encode all of a step's outputs as one message, in their order."""
    runs = [list(run) for _, run in groupby(outputs, type)]
    try:
        return [OUTPUTS, _pack_runs(runs)]
    except WireError:  # an error's text may not be encodable; the other outputs must not be lost over it
        return [OUTPUTS, _pack_runs([[_as_writable(output) for output in run] for run in runs])]


def decode_from_engine(frames: Sequence[Frame]) -> list[FromEngine]:
    kind, body, _ = _open(frames, num_payloads=0)
    with _refusing_what_does_not_fit():
        _check(kind == OUTPUTS, f"{kind!r} is not a kind of message from an engine")
        outputs = [output for code, run in _RUNS.decode(body) for output in _read_run(code, run)]
        _check_is_own_form([kind, body], encode_from_engine(outputs))
    return outputs


def try_read_request_id(frames: Sequence[Frame]) -> str | None:
    """Return the id of a request that could not be decoded, if at least that can be read."""
    try:
        return _NAMED.decode(frames[1]).request_id if frames[0] == REQUEST else None
    except (*UNREADABLE, IndexError):
        return None


def try_read_media_hash(frames: Sequence[Frame]) -> str | None:
    """Return the hash of media that could not be decoded, if at least that can be read."""
    try:
        return _FIRST_FIELD.decode(frames[1])[0] if frames[0] in (PIXELS, RING_PLACE, STORED_PIXELS) else None
    except (*UNREADABLE, IndexError):
        return None


# Reading ------------------------------------------------------------------------------------------------------


class _Named(msgspec.Struct):
    request_id: str


_NAMED = msgspec.msgpack.Decoder(_Named)
_FIRST_FIELD = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])


def _open(frames: Sequence[Frame], num_payloads: int) -> tuple[bytes, bytes, list[Frame]]:
    _check(len(frames) == 2 + num_payloads, f"a message of {len(frames)} frames")
    kind, body, *payload = frames
    _check(len(kind) == 1, "a kind is one byte")
    _check(len(body) <= MAX_BODY_BYTES, f"a body of {len(body)} bytes; at most {MAX_BODY_BYTES} are read")
    return bytes(kind), bytes(body), payload


# A decoded body; for media, the hash and the pixels' shape or place.
_Body = EngineRequest | AbortRequest | ResetCaches | FindMedia | tuple[str, Shape | RingPlace | StoredPixels]
_DECODERS: dict[bytes, msgspec.msgpack.Decoder[Any]] = {
    REQUEST: msgspec.msgpack.Decoder(EngineRequest),
    ABORT: msgspec.msgpack.Decoder(AbortRequest),
    RESET: msgspec.msgpack.Decoder(ResetCaches),
    FIND: msgspec.msgpack.Decoder(FindMedia),
    PIXELS: msgspec.msgpack.Decoder(tuple[str, Shape]),
    RING_PLACE: msgspec.msgpack.Decoder(tuple[str, RingPlace]),
    STORED_PIXELS: msgspec.msgpack.Decoder(tuple[str, StoredPixels]),
}


def _as_message(body: _Body, payload: list[Frame]) -> ToEngine:
    """Rebuild the message that `encode_to_engine` was given."""
    match body:
        case EngineRequest():
            _check_request(body)
            return body
        case AbortRequest(_, choice):
            _check(choice is None or 0 <= choice < MAX_CHOICES, "a choice out of range")
            return body
        case ResetCaches() | FindMedia():
            return body
        case media_hash, RingPlace() as place:
            _check_shape(place.shape)
            _check(min(place.entry_id, place.offset, place.num_bytes) >= 0, "a place in no ring")
            return MediaArrived(media_hash, place)
        case media_hash, StoredPixels(shape) as stored:
            _check_shape(shape)
            return MediaArrived(media_hash, stored)
        case media_hash, shape:
            _check_shape(shape)
            return MediaArrived(media_hash, _frame_to_pixels(payload[0], shape))


def _check_request(request: EngineRequest) -> None:
    token_ids, media = request.token_ids, request.media
    _check(request.request_id != "", "a request without an id")
    _check(len(token_ids) > 0, "a prompt without tokens")
    _check_tokens(token_ids, "a token id")
    for run in request.banned_runs:
        _check(len(run) > 0, "a banned run of no tokens")
        _check_tokens(run, "a banned token")
    _check_tokens(request.predicted, "a predicted token")
    _check(abs(request.priority) <= MAX_PRIORITY, "a priority out of range")
    for item in media:
        span, geometry = item.span, item.geometry
        _check(span.start >= 0 < span.length and span.end <= len(token_ids), "a span outside of the prompt")
        sides = (geometry.num_samples,) if geometry.num_samples else (geometry.width, geometry.height)
        _check(all(0 < side <= MAX_COUNT for side in sides), "a geometry out of range")
        is_grid = item.columns == 0 or (item.columns > 0 and span.length % item.columns == 0)
        _check(is_grid, "tokens that fill no rows")
        later = item.rotary_offset
        _check(later is None or (item.is_further_part and 0 <= later <= MAX_COUNT), "a time of no further moment")
    _check(all(a.span.end <= b.span.start for a, b in pairwise(media)), "spans out of order")
    own = {item.media_hash for item in media}
    _check(own.issuperset(request.coming_media), "media to come of another request")
    _check(own.issuperset(request.unsent_media), "unsent media of another request")
    if (thought := request.thought) is not None:
        tags = (thought.opening, thought.closing)
        _check_tokens([tag for tag in tags if tag is not None], "a thought's token")
    for pin in request.pins:
        _check(0 < pin.num_tokens <= len(token_ids) and 0 < pin.seconds < inf, "a pin out of range")


def _check_tokens(token_ids: Sequence[int], subject: str) -> None:
    _check(not token_ids or (min(token_ids) >= 0 and max(token_ids) <= MAX_COUNT), f"{subject} out of range")


def _check_shape(shape: Sequence[int]) -> None:
    _check(len(shape) == 3, "pixels have three dimensions")
    height, width, num_channels = shape
    _check(
        0 < height <= MAX_SIDE and 0 < width <= MAX_SIDE and num_channels in (3, 4), f"not a shape of pixels: {shape}"
    )
    num_bytes = height * width * num_channels
    _check(num_bytes <= MAX_PIXEL_BYTES, f"pixels of {num_bytes} bytes; at most {MAX_PIXEL_BYTES}")


def _frame_to_pixels(frame: Frame, shape: Shape) -> Pixels:
    pixels = np.frombuffer(frame, np.uint8)
    _check(pixels.size == shape[0] * shape[1] * shape[2], f"{pixels.size} bytes of pixels of the shape {shape}")
    pixels.flags.writeable = False
    return pixels.reshape(shape)


# A message from the engine holds runs of outputs of one type, each with the type's index in this tuple.
_OUTPUT_TYPES: tuple[type[FromEngine], ...] = (
    TokenOutput,
    MediaNeeded,
    MediaHeld,
    MediaDropped,
    RequestFailed,
    TiersChanged,
    RequestBegun,
    MediaFound,
    CachesReset,
)
_RUNS = msgspec.msgpack.Decoder(list[tuple[int, msgspec.Raw]])
_RUN_READERS = [msgspec.msgpack.Decoder(list[type_]) for type_ in _OUTPUT_TYPES]  # type: ignore[valid-type]


def _read_run(code: int, run: msgspec.Raw) -> list[FromEngine]:
    _check(0 <= code < len(_RUN_READERS), f"{code} is not a type of output")
    outputs: list[FromEngine] = _RUN_READERS[code].decode(run)
    for output in outputs:
        if isinstance(output, TokenOutput):
            _check_token(output)
    return outputs


def _check_token(output: TokenOutput) -> None:
    _check(min(output.token_id, output.num_cached_tokens, output.num_guessed) >= 0, "a token out of range")
    _check(0 <= output.choice < MAX_CHOICES, "a choice out of range")
    _check(output.vector is None or (len(output.vector) > 0 and len(output.vector) % 4 == 0), "a vector out of range")
    if output.logprobs or output.prompt_logprobs:
        logprobs = (output.logprobs or (), *(output.prompt_logprobs or ()))
        is_right = all(min(each.token_id, each.rank) >= 0 for ones in logprobs for each in ones)
        _check(is_right, "a log probability out of range")


@contextmanager
def _refusing_what_does_not_fit() -> Iterator[None]:
    """Raise WireError for errors of decoding, and of our own types when given unexpected values."""
    try:
        yield
    except (*UNREADABLE, InvalidArgumentError, AssertionError) as error:
        raise WireError(str(error)) from error


def _check(is_right: bool, fault: str) -> None:
    if not is_right:
        raise WireError(fault)


def _check_is_own_form(got: list[bytes], expected: list[Frame]) -> None:
    """Refuse surplus, missing, repeated and misordered fields, and numbers written in another way, by one rule."""
    _check(got == expected[:2], "not in the form in which it would be written here")


# Writing ------------------------------------------------------------------------------------------------------


def _pack(value: Any) -> bytes:
    try:
        return _ENCODER.encode(value)
    except UnicodeEncodeError as error:
        raise WireError(f"an unpaired surrogate is not text: {error.object[:80]!r}") from error


def _pack_runs(runs: list[list[FromEngine]]) -> bytes:
    return _pack([(_OUTPUT_TYPES.index(type(run[0])), msgspec.Raw(_pack(run))) for run in runs])


def _as_writable(output: FromEngine) -> FromEngine:
    if not isinstance(output, RequestFailed):
        return output
    message = output.message.encode("utf-8", "backslashreplace").decode()
    return RequestFailed(output.request_id, message, output.is_refusal, output.field)


def _view(pixels: Pixels) -> memoryview:
    _check(pixels.dtype == np.uint8, f"pixels of {pixels.dtype}")
    _check_shape(pixels.shape)
    return np.ascontiguousarray(pixels).data.cast("B")
