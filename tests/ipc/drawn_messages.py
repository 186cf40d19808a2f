"""Hypothesis strategies for every message that either side may send, and functions that corrupt messages."""

import dataclasses
import math
import random
from collections.abc import Callable, Sequence

import numpy as np
from hypothesis import strategies as st

from keepsight.ipc.codec import Frame
from keepsight.media import Geometry, MediaItem, Modality, TokenSpan
from keepsight.requests import (
    MAX_PRIORITY,
    AbortRequest,
    Adapter,
    CachesReset,
    EngineRequest,
    FindMedia,
    FromEngine,
    MediaArrived,
    MediaDropped,
    MediaFound,
    MediaHeld,
    MediaNeeded,
    MediaReport,
    PromptPin,
    Received,
    RequestBegun,
    RequestFailed,
    ResetCaches,
    RingPlace,
    StoredPixels,
    ThoughtTokens,
    ToEngine,
    TokenLogprob,
    TokenOutput,
)
from keepsight.sampling_params import MAX_CHOICES, MAX_COUNT, SamplingParams

texts = st.text(max_size=12)
names = st.text(min_size=1, max_size=12)
token_ids = st.integers(0, MAX_COUNT)
counts = st.integers(0, MAX_COUNT)
shapes = st.tuples(st.integers(1, 9), st.integers(1, 9), st.sampled_from((3, 4)))
modalities: st.SearchStrategy[Modality] = st.sampled_from(("image", "image_embeds", "prompt_embeds"))

sampling_params = st.builds(
    SamplingParams,
    n=st.integers(1, MAX_CHOICES),
    temperature=st.floats(0, 1e300),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(-1, MAX_COUNT),
    min_p=st.floats(0, 1),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0, 1e300, exclude_min=True),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    stop=names | st.lists(names, max_size=3),
    stop_token_ids=st.lists(token_ids, max_size=3),
    ignore_eos=st.booleans(),
    max_tokens=st.none() | st.integers(5, MAX_COUNT),
    min_tokens=st.integers(0, 5),
    logprobs=st.none() | st.integers(0, 20),
    logit_bias=st.none() | st.dictionaries(token_ids, st.floats(-100, 100), max_size=3),
    skip_special_tokens=st.booleans(),
    include_stop_str_in_output=st.booleans(),
)


pin_seconds = st.floats(0, exclude_min=True, allow_infinity=False)


@st.composite
def requests(draw: st.DrawFn) -> EngineRequest:
    lengths = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=4))
    media, end = [], 0
    for gap, length in lengths:
        geometry = Geometry(draw(st.integers(1, MAX_COUNT)), draw(st.integers(1, MAX_COUNT)))
        span, modality = TokenSpan(end + gap, length), draw(modalities)
        columns = draw(st.sampled_from([0, 1, length]))
        is_further = draw(st.booleans())
        later = draw(st.none() | st.integers(0, MAX_COUNT)) if is_further else None
        media.append(MediaItem(draw(texts), span, geometry, modality, is_further, columns, later))
        end += gap + length
    hashes = [item.media_hash for item in media]
    return EngineRequest(
        request_id=draw(names),
        token_ids=tuple(draw(st.lists(token_ids, min_size=max(1, end), max_size=end + 3))),
        media=tuple(media),
        sampling_params=draw(sampling_params),
        priority=draw(st.integers(-MAX_PRIORITY, MAX_PRIORITY)),
        cache_salt=draw(st.none() | texts),
        adapter=draw(st.none() | st.builds(Adapter, texts, texts, st.booleans())),
        banned_runs=tuple(draw(st.lists(st.lists(token_ids, min_size=1, max_size=3).map(tuple), max_size=2))),
        coming_media=tuple(draw(st.lists(st.sampled_from(hashes), max_size=3))) if hashes else (),
        unsent_media=tuple(draw(st.lists(st.sampled_from(hashes), max_size=3))) if hashes else (),
        pins=tuple(draw(st.lists(st.builds(PromptPin, st.integers(1, max(1, end)), pin_seconds), max_size=2))),
        thought=draw(st.none() | st.builds(ThoughtTokens, st.none() | token_ids, token_ids)),
        wants_vector=draw(st.booleans()),
    )


hashes = st.lists(texts, max_size=3).map(tuple)
pixels = shapes.flatmap(
    lambda shape: st.binary(min_size=math.prod(shape), max_size=math.prod(shape)).map(
        lambda content: np.frombuffer(content, np.uint8).reshape(shape)
    )
)
ring_places = st.builds(RingPlace, texts, counts, counts, counts, shapes, st.binary(max_size=32))
to_engine: st.SearchStrategy[ToEngine] = (
    requests()
    | st.builds(AbortRequest, texts, st.none() | st.integers(0, MAX_CHOICES - 1))
    | st.builds(MediaArrived, texts, pixels | ring_places | st.builds(StoredPixels, shapes))
    | st.builds(ResetCaches, texts, st.booleans(), st.booleans(), st.booleans())
    | st.builds(FindMedia, texts, hashes)
)

logprobs = st.builds(TokenLogprob, token_ids, st.floats(allow_nan=False), counts)
some_logprobs = st.lists(logprobs, max_size=3).map(tuple)
moments = st.floats(allow_nan=False)
media_stories = st.builds(MediaReport, st.none() | texts, moments, moments, moments, st.booleans(), st.integers(1, 99))
outputs: st.SearchStrategy[list[FromEngine]] = st.lists(
    st.builds(
        TokenOutput,
        texts,
        st.integers(0, MAX_CHOICES - 1),
        token_ids,
        st.none() | some_logprobs,
        st.sampled_from((None, "stop", "length")),
        counts,
        st.none() | st.lists(some_logprobs, max_size=3).map(tuple),
        st.none() | st.binary(min_size=4, max_size=4),
    )
    | st.builds(RequestBegun, texts, moments, moments, moments, st.lists(media_stories, max_size=3).map(tuple))
    | st.builds(MediaNeeded, texts, hashes, st.booleans())
    | st.builds(MediaHeld, hashes)
    | st.builds(MediaDropped, hashes)
    | st.builds(MediaFound, texts, st.lists(texts, max_size=3).map(tuple), st.booleans())
    | st.builds(CachesReset, texts)
    | st.builds(RequestFailed, texts, texts, st.booleans()),
    max_size=8,
)


def comparable(message: Received) -> object:
    """Return the message in a form that `==` can compare: arrays have no `==` that is true or false."""
    if isinstance(message, MediaArrived) and isinstance(message.pixels, np.ndarray):
        return message.media_hash, message.pixels.shape, message.pixels.tobytes()
    return dataclasses.astuple(message), type(message)


# Faults -------------------------------------------------------------------------------------------------------


def _flip_bits(frames: list[bytes], rng: random.Random) -> None:
    index = rng.randrange(len(frames))
    spoilt = bytearray(frames[index])
    for _ in range(rng.randint(1, 4) if spoilt else 0):
        spoilt[rng.randrange(len(spoilt))] ^= 1 << rng.randrange(8)
    frames[index] = bytes(spoilt)


def _truncate(frames: list[bytes], rng: random.Random) -> None:
    index = rng.randrange(len(frames))
    frames[index] = frames[index][: rng.randint(0, len(frames[index]))]


def _insert(frames: list[bytes], rng: random.Random) -> None:
    index = rng.randrange(len(frames))
    at = rng.randint(0, len(frames[index]))
    frames[index] = frames[index][:at] + rng.randbytes(rng.randint(1, 4)) + frames[index][at:]


def _swap_frames(frames: list[bytes], rng: random.Random) -> None:
    first, second = rng.randrange(len(frames)), rng.randrange(len(frames))
    frames[first], frames[second] = frames[second], frames[first]


def _change_kind(frames: list[bytes], rng: random.Random) -> None:
    frames[0] = rng.choice([b"Q", b"A", b"C", b"F", b"P", b"R", b"S", b"O", rng.randbytes(1)])


def _add_frame(frames: list[bytes], rng: random.Random) -> None:
    frames.insert(rng.randint(0, len(frames)), rng.randbytes(rng.randint(0, 8)))


def _remove_frame(frames: list[bytes], rng: random.Random) -> None:
    del frames[rng.randrange(len(frames))]


def _make_up(frames: list[bytes], rng: random.Random) -> None:
    frames[-1] = rng.randbytes(rng.randint(0, 64))


FAULTS: tuple[Callable[[list[bytes], random.Random], None], ...] = (
    _flip_bits,
    _flip_bits,
    _truncate,
    _insert,
    _swap_frames,
    _change_kind,
    _add_frame,
    _remove_frame,
    _make_up,
)


def spoil(frames: Sequence[Frame], rng: random.Random) -> list[bytes]:
    """Apply one to three random faults; a fault may happen to change nothing."""
    spoilt = [bytes(frame) for frame in frames]
    for _ in range(rng.choice((1, 1, 2, 3))):
        if spoilt:
            rng.choice(FAULTS)(spoilt, rng)
    return spoilt
