"""Encoded messages decode to the same messages; anything else raises WireError."""

import math
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepsight.errors import WireError
from keepsight.ipc.codec import (
    MAX_BODY_BYTES,
    MAX_SIDE,
    Frame,
    cut_into_messages,
    decode_from_engine,
    decode_to_engine,
    encode_from_engine,
    encode_to_engine,
    try_read_media_hash,
    try_read_request_id,
)
from keepsight.media import Geometry, MediaItem, TokenSpan
from keepsight.pixels import shape_of_arrays
from keepsight.requests import (
    AbortRequest,
    EngineRequest,
    FromEngine,
    MediaArrived,
    MediaDropped,
    MediaHeld,
    PromptPin,
    RequestFailed,
    RingPlace,
    StoredPixels,
    ThoughtTokens,
    TiersChanged,
    TierStatus,
    ToEngine,
    TokenLogprob,
    TokenOutput,
)
from keepsight.sampling_params import MAX_CHOICES, SamplingParams
from tests.ipc.drawn_messages import comparable, outputs, spoil, to_engine

ITEM = MediaItem("hash", TokenSpan(2, 3), Geometry(640, 480))
PINS = (PromptPin(4, 1800.0),)
REQUEST = EngineRequest(
    "7",
    tuple(range(10)),
    (ITEM,),
    SamplingParams(),
    coming_media=("hash",),
    unsent_media=("hash",),
    pins=PINS,
    thought=ThoughtTokens(None, 7),
)
PIXELS = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)


def edited(message: ToEngine, *path: str | int, value: object) -> list[Frame]:
    """Encode the message with one field replaced, as a foreign program might write it."""
    kind, body, *payload = encode_to_engine(message)
    fields: Any = msgspec.msgpack.decode(body)
    place = fields
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return [kind, msgspec.msgpack.encode(fields), *payload]


def assert_round_trips_or_is_refused(frames: Sequence[Frame]) -> None:
    """Check that the frames are accepted only if encoding the message gives the same bytes."""
    try:
        message = decode_to_engine(frames)
    except WireError:
        pass
    else:
        assert encode_to_engine(message) == list(frames)
    try:
        outputs = decode_from_engine(frames)
    except WireError:
        pass
    else:
        assert encode_from_engine(outputs) == list(frames)
    assert isinstance(try_read_request_id(frames), str | None)
    assert isinstance(try_read_media_hash(frames), str | None)


def test_outputs_with_prompt_logprobs_are_sent_alone_and_in_order() -> None:
    short, long = TokenOutput("7", 0, 1), TokenOutput("8", 0, 1, prompt_logprobs=())
    outputs: list[FromEngine] = [short, MediaHeld(("a",)), long, long, short]
    assert list(cut_into_messages(outputs)) == [[short, MediaHeld(("a",))], [long], [long], [short]]
    assert list(cut_into_messages([])) == [[]]


@pytest.mark.parametrize("kind", [MediaHeld, MediaDropped])
def test_more_names_than_one_message_can_hold_are_sent_in_several_in_their_order(
    kind: type[MediaHeld | MediaDropped],
) -> None:
    # The longest names: sha512's.
    names = tuple(f"{number:0128x}" for number in range(520_000))
    before, after = TokenOutput("7", 0, 1), TokenOutput("7", 0, 2)
    messages = list(cut_into_messages([before, kind(names), kind(("more",)), after]))
    read = [output for message in messages for output in decode_from_engine(encode_from_engine(message))]
    assert (read[0], read[-1]) == (before, after)
    assert tuple(name for each in read[1:-1] if isinstance(each, kind) for name in each.media_hashes) == (
        *names,
        "more",
    )


class TestRoundTrip:
    @given(to_engine)
    def test_to_the_engine(self, message: ToEngine) -> None:
        assert comparable(decode_to_engine(encode_to_engine(message))) == comparable(message)

    @given(outputs)
    def test_from_the_engine_in_its_order(self, step: list[FromEngine]) -> None:
        assert decode_from_engine(encode_from_engine(step)) == step

    def test_pixels_are_neither_copied_when_written_nor_when_read(self) -> None:
        frames = encode_to_engine(MediaArrived("hash", PIXELS))
        assert np.shares_memory(np.frombuffer(frames[2], np.uint8), PIXELS)
        arrived = decode_to_engine(frames)
        assert isinstance(arrived, MediaArrived)
        assert isinstance(arrived.pixels, np.ndarray)
        assert np.shares_memory(arrived.pixels, PIXELS)
        assert not arrived.pixels.flags.writeable

    def test_non_contiguous_pixels_arrive_unchanged(self) -> None:
        turned = PIXELS[::-1, ::2]
        arrived = decode_to_engine(encode_to_engine(MediaArrived("hash", turned)))
        assert comparable(arrived) == comparable(MediaArrived("hash", turned))

    def test_what_a_borrowed_processor_makes_of_a_photograph_at_its_limit_arrives(self) -> None:
        # Qwen2-VL's: 65,536 patches of 14 x 14 pixels, 3 channels and 2 moments, in float32.
        made = np.zeros(shape_of_arrays(65_536 * 14 * 14 * 3 * 2 * 4 + 4096), np.uint8)
        arrived = decode_to_engine(encode_to_engine(MediaArrived("hash", made)))
        assert isinstance(arrived, MediaArrived)
        assert isinstance(arrived.pixels, np.ndarray)
        assert np.shares_memory(arrived.pixels, made)

    def test_a_log_probability_may_be_minus_infinity(self) -> None:
        step: list[FromEngine] = [TokenOutput("7", 0, 1, (TokenLogprob(1, float("-inf"), 1),))]
        assert decode_from_engine(encode_from_engine(step)) == step

    def test_an_unencodable_error_message_does_not_lose_other_requests_tokens(self) -> None:
        step: list[FromEngine] = [TokenOutput("7", 0, 1), RequestFailed("8", "no file \udcff")]
        assert decode_from_engine(encode_from_engine(step)) == [step[0], RequestFailed("8", "no file \\udcff")]
        refusal = RequestFailed("9", "too large", is_refusal=True, field="structured_outputs.regex")
        assert decode_from_engine(encode_from_engine([refusal])) == [refusal]


class TestEncodingErrors:
    def test_half_a_surrogate_pair(self) -> None:
        with pytest.raises(WireError, match="surrogate"):
            encode_to_engine(replace(REQUEST, cache_salt="\ud800"))

    @pytest.mark.parametrize("shape", [(0, 3, 3), (2, 3, 5), (2, 3), (MAX_SIDE + 1, 1, 3), (2**15, 2**14, 3)])
    def test_pixels_that_the_other_side_would_refuse(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(WireError, match="pixels"):
            encode_to_engine(MediaArrived("hash", np.broadcast_to(np.uint8(0), shape)))

    def test_pixels_that_are_no_bytes(self) -> None:
        with pytest.raises(WireError, match="float64"):
            encode_to_engine(MediaArrived("hash", PIXELS.astype(np.float64)))


WRONG: dict[str, list[Frame]] = {
    "no frames": [],
    "one frame": [b"Q"],
    "no kind": [b"", b""],
    "a long kind": [b"QQ", b""],
    "an unknown kind": [b"?", msgspec.msgpack.encode({})],
    "an output": encode_from_engine([MediaHeld(("a",))]),
    "a surplus frame": [*encode_to_engine(REQUEST), b""],
    "pixels without pixels": encode_to_engine(MediaArrived("hash", PIXELS))[:2],
    "pixels with too few bytes": [*encode_to_engine(MediaArrived("hash", PIXELS))[:2], b"123"],
    "pixels with a byte too many": [*encode_to_engine(MediaArrived("hash", PIXELS))[:2], bytes(19)],
    "a huge body": [b"Q", bytes(MAX_BODY_BYTES + 1)],
    "a list that claims to be long": [b"O", b"\xdd\xff\xff\xff\xff"],
    "a deep nesting": [b"O", b"\x91" * 100_000],
    "a surplus field": edited(REQUEST, "other", value=1),
    "a surplus field within": edited(REQUEST, "media", 0, "span", "other", value=1),
    "no request id": edited(REQUEST, "request_id", value=""),
    "a request id that is a number": edited(REQUEST, "request_id", value=7),
    "no tokens": edited(replace(REQUEST, media=(), coming_media=(), unsent_media=()), "token_ids", value=[]),
    "a negative token": edited(REQUEST, "token_ids", 0, value=-1),
    "a token of 64 bits": edited(REQUEST, "token_ids", 0, value=2**63),
    "a token that is half a number": edited(REQUEST, "token_ids", 0, value=0.5),
    "a priority of 64 bits": edited(REQUEST, "priority", value=2**64 - 1),
    "a span that begins before the prompt": edited(REQUEST, "media", 0, "span", "start", value=-1),
    "a span that ends after the prompt": edited(REQUEST, "media", 0, "span", "length", value=9),
    "a span of nothing": edited(REQUEST, "media", 0, "span", "length", value=0),
    "a picture whose rows are not equally long": edited(REQUEST, "media", 0, "columns", value=2),
    "a picture of rows of less than nothing": edited(REQUEST, "media", 0, "columns", value=-1),
    "a moment that goes on with no film": edited(REQUEST, "media", 0, "rotary_offset", value=0),
    "a picture without height": edited(REQUEST, "media", 0, "geometry", "height", value=0),
    "a picture without width": edited(REQUEST, "media", 0, "geometry", "width", value=0),
    "a sound shorter than nothing": edited(REQUEST, "media", 0, "geometry", "num_samples", value=-1),
    "a banned run of no tokens": edited(REQUEST, "banned_runs", value=[[]]),
    "media to come that it has not": edited(REQUEST, "coming_media", value=["other"]),
    "unsent media that it has not": edited(REQUEST, "unsent_media", value=["other"]),
    "a pin of nothing": edited(REQUEST, "pins", 0, "num_tokens", value=0),
    "a pin of more than the prompt": edited(REQUEST, "pins", 0, "num_tokens", value=11),
    "a pin for no time": edited(REQUEST, "pins", 0, "seconds", value=0.0),
    "a pin for ever": edited(REQUEST, "pins", 0, "seconds", value=math.inf),
    "a pin until nobody knows when": edited(REQUEST, "pins", 0, "seconds", value=math.nan),
    "spans that overlap": encode_to_engine(replace(REQUEST, media=(ITEM, replace(ITEM, span=TokenSpan(4, 1))))),
    "spans out of order": encode_to_engine(replace(REQUEST, media=(ITEM, replace(ITEM, span=TokenSpan(0, 1))))),
    "a thought that ends with no token": edited(REQUEST, "thought", "closing", value=-1),
    "no choices": edited(REQUEST, "sampling_params", "n", value=0),
    "absurdly many choices": edited(REQUEST, "sampling_params", "n", value=10**9),
    "an infinite temperature": edited(REQUEST, "sampling_params", "temperature", value=float("inf")),
    "a temperature that is none": edited(REQUEST, "sampling_params", "temperature", value=float("nan")),
    "a value that would be normalised": edited(REQUEST, "sampling_params", "top_k", value=-1),
    "a choice that cannot be": edited(AbortRequest("7", 0), "choice", value=128),
    "pixels without a side": edited(MediaArrived("hash", PIXELS), 1, value=[0, 3, 3]),
    "pixels of five channels": edited(MediaArrived("hash", PIXELS), 1, value=[2, 3, 5]),
    "pixels with a negative side": edited(MediaArrived("hash", PIXELS), 1, value=[-2, -3, 3]),
    "stored pixels without a side": edited(MediaArrived("hash", StoredPixels((1, 1, 3))), 1, "shape", 1, value=0),
    "stored pixels too large to be": edited(MediaArrived("hash", StoredPixels((1, 1, 3))), 1, "shape", 0, value=2**40),
    "a place before the ring": edited(
        MediaArrived("hash", RingPlace("r", 1, 2, 3, (1, 1, 3), b"")), 1, "offset", value=-1
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_engine_refuses(name: str) -> None:
    with pytest.raises(WireError):
        decode_to_engine(WRONG[name])


@pytest.mark.parametrize(
    "outputs",
    [
        [[9, []]],
        [[-1, []]],
        [[0, [{"request_id": "7", "choice": 0, "token_id": 1}]]],
        [[2, [{"media_hashes": ["a"]}]], [2, [{"media_hashes": ["b"]}]]],
        [[2, []]],
        {},
    ],
    ids=[
        "no type",
        "type -1",
        "missing fields",
        "a run in two pieces",
        "an empty run",
        "a map",
    ],
)
def test_a_frontend_refuses(outputs: object) -> None:
    with pytest.raises(WireError):
        decode_from_engine([b"O", msgspec.msgpack.encode(outputs)])


@pytest.mark.parametrize(
    "output",
    [
        TokenOutput("7", 0, -1),
        TokenOutput("7", -1, 1),
        TokenOutput("7", MAX_CHOICES, 1),
        TokenOutput("7", 0, 1, num_cached_tokens=-1),
        TokenOutput("7", 0, 1, logprobs=(TokenLogprob(-1, 0.0, 1),)),
        TokenOutput("7", 0, 1, prompt_logprobs=((TokenLogprob(1, 0.0, -1),),)),
        TokenOutput("7", 0, 1, vector=b"abcde"),
        TokenOutput("7", 0, 1, vector=b""),
    ],
)
def test_a_frontend_refuses_a_token_out_of_range(output: TokenOutput) -> None:
    with pytest.raises(WireError, match="out of range"):
        decode_from_engine(encode_from_engine([output]))


def test_a_frontend_refuses_what_is_for_an_engine() -> None:
    with pytest.raises(WireError):
        decode_from_engine(encode_to_engine(REQUEST))


def test_tier_statuses_decode_as_they_were_encoded() -> None:
    host = TierStatus("encoder", "host", None, 10, 100, 1, 5, 2, 0)
    remote = TierStatus("prefix", "remote", "TimeoutError: 2 s", 0, None, 0, 0, 0, 3)
    outputs: list[FromEngine] = [TiersChanged((host, remote)), TiersChanged(())]
    assert decode_from_engine(encode_from_engine(outputs)) == outputs


def test_a_field_written_twice_is_refused() -> None:
    kind, body = encode_to_engine(AbortRequest("7"))
    again = bytes(body).replace(b"\x82", b"\x83", 1) + msgspec.msgpack.encode("choice") + msgspec.msgpack.encode(None)
    with pytest.raises(WireError):
        decode_to_engine([kind, again])


def test_the_request_id_of_an_invalid_request_can_still_be_read() -> None:
    assert try_read_request_id(edited(REQUEST, "sampling_params", "n", value=0)) == "7"
    assert try_read_request_id(edited(REQUEST, "request_id", value=7)) is None
    assert try_read_request_id([b"Q", b"\x81"]) is None
    assert try_read_request_id(encode_to_engine(AbortRequest("7"))) is None
    assert try_read_request_id([]) is None


def test_the_hash_of_media_that_cannot_be_read_can_still_be_read() -> None:
    ring = RingPlace("r", 1, 2, 3, (1, 1, 3), b"")
    for pixels, place in ((PIXELS, (1, 0)), (StoredPixels((1, 1, 3)), (1, "shape", 0)), (ring, (1, "shape", 0))):
        frames = edited(MediaArrived("hash", pixels), *place, value=2**40)
        with pytest.raises(WireError, match="not a shape"):
            decode_to_engine(frames)
        assert try_read_media_hash(frames) == "hash"
    assert try_read_media_hash(edited(MediaArrived("hash", PIXELS), 0, value=7)) is None
    assert try_read_media_hash([b"P", b"\x81"]) is None
    assert try_read_media_hash([b"P"]) is None
    assert try_read_media_hash(encode_to_engine(REQUEST)) is None
    assert try_read_media_hash([]) is None


def test_invalid_messages_are_refused_with_asserts_disabled_too() -> None:
    program = (
        "from tests.ipc.test_codec import WRONG, decode_to_engine, WireError\nfor name, frames in WRONG.items():\n"
    )
    program += "    try: decode_to_engine(frames)\n    except WireError: continue\n    raise SystemExit(name)"
    subprocess.run([sys.executable, "-O", "-c", program], check=True)


class TestFuzz:
    """A short version of `python -m tests.ipc.long_fuzz`."""

    @settings(max_examples=150)
    @given(st.lists(st.binary(max_size=64), max_size=4))
    def test_random_frames(self, frames: list[bytes]) -> None:
        assert_round_trips_or_is_refused(frames)

    @settings(max_examples=150)
    @given(to_engine.map(encode_to_engine) | outputs.map(encode_from_engine), st.integers(0, 2**32))
    def test_spoilt_messages(self, frames: list[Frame], seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(5):
            assert_round_trips_or_is_refused(spoil(frames, rng))
