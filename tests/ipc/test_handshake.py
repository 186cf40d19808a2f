"""Incompatible versions refuse each other with a reason; frames that are no greeting are refused."""

import random
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepsight.errors import HandshakeError, WireError
from keepsight.ipc.handshake import (
    PROTOCOL_VERSION,
    Hello,
    Welcome,
    decode_answer,
    decode_hello,
    encode_hello,
    encode_refusal,
    encode_welcome,
)
from keepsight.requests import FromEngine, ToEngine
from tests.ipc.drawn_messages import names, spoil

# The protocol version, and the digest of all fields of its messages.
EXPECTED_VERSION_AND_DIGEST = (15, "b2538e540b3a8081")


@given(names)
def test_a_hello_survives_the_round_trip(name: str) -> None:
    assert decode_hello(encode_hello(Hello(name))) == Hello(name)


@given(st.integers(1, 2**40), st.booleans())
def test_a_welcome_survives_the_round_trip(max_model_len: int, accepts_unrequested_pixels: bool) -> None:
    welcome = Welcome(max_model_len, accepts_unrequested_pixels)
    assert decode_answer(encode_welcome(welcome)) == welcome


@given(st.text())
def test_a_refusal_gives_its_reason(reason: str) -> None:
    with pytest.raises(HandshakeError) as caught:
        decode_answer(encode_refusal(reason))
    assert str(caught.value) == reason


def test_a_hello_of_another_version_is_refused_with_both_versions() -> None:
    for body in ([b"?"], [], [b"", b""]):
        with pytest.raises(HandshakeError, match=f"frontend speaks version 99 .* engine {PROTOCOL_VERSION}$"):
            decode_hello([b"H", b"99", *body])


def test_a_welcome_of_another_version_is_refused_with_both_versions() -> None:
    with pytest.raises(HandshakeError, match=f"engine speaks version 99 .* frontend {PROTOCOL_VERSION}$"):
        decode_answer([b"W", b"99", b"?"])


def fields_within(hint: Any, seen: set[Any]) -> Iterator[str]:
    """Yield the names of the fields of our own types, in the order in which they are encoded."""
    for each in get_args(hint):
        yield from fields_within(each, seen)
    if not getattr(hint, "__module__", "").startswith("keepsight.") or hint in seen:
        return
    seen.add(hint)
    for name, inner in get_type_hints(hint).items():
        yield f"{hint.__name__}.{name}"
        yield from fields_within(inner, seen)


def test_changing_a_message_s_fields_requires_a_new_version() -> None:
    fields = list(fields_within(ToEngine | FromEngine | Hello | Welcome, set()))
    assert {"EngineRequest.predicted", "SamplingParams.prediction", "TokenOutput.num_guessed"} <= {*fields}
    assert (PROTOCOL_VERSION, sha256(" ".join(fields).encode()).hexdigest()[:16]) == EXPECTED_VERSION_AND_DIGEST


@given(st.lists(st.binary(max_size=40), max_size=4) | st.just([b"H", b"1"]), st.integers(0, 2**32))
def test_arbitrary_frames_are_a_greeting_or_refused(frames: list[bytes], seed: int) -> None:
    rng = random.Random(seed)
    greetings = [encode_hello(Hello("f")), encode_welcome(Welcome(10))]
    for spoilt in (frames, *(spoil(greeting, rng) for greeting in greetings)):
        with suppress(WireError, HandshakeError):
            assert isinstance(decode_hello(spoilt), Hello)
        with suppress(WireError, HandshakeError):
            assert isinstance(decode_answer(spoilt), Welcome)


def test_a_frontend_must_have_a_name() -> None:
    with pytest.raises(WireError, match="name"):
        decode_hello(encode_hello(Hello("")))
