import codecs
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepsight.frontend.prompt.tokenizer import Tokenizer
from keepsight.frontend.stream_text import TextStreamer
from keepsight.sampling_params import SamplingParams
from tests.frontend.gemma_like import DEMO, gemma_like_checkpoint

TOKENIZERS = [Tokenizer.from_checkpoint(directory) for directory in (DEMO, gemma_like_checkpoint())]
DEMO_TOKENIZER = TOKENIZERS[0]


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    ids = [tokenizer.token_id(f"<0x{byte:02X}>") for byte in data]
    return [token_id for token_id in ids if token_id is not None]


def random_tokens(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Any ids, among them ones beyond the vocabulary; whole characters in bytes; and broken ones."""
    pieces = st.one_of(
        st.lists(st.integers(0, tokenizer.num_tokens + 5), max_size=3),
        st.text(max_size=3).map(lambda text: byte_ids(tokenizer, text.encode())),
        st.binary(max_size=3).map(lambda data: byte_ids(tokenizer, data)),
        st.sampled_from(["a", "ab", "abc ", "\n", "\n\n", "stop"]).map(lambda text: list(tokenizer.encode(text))),
    )
    return st.lists(pieces, max_size=8).map(lambda lists: [token_id for each in lists for token_id in each])


def stream(tokenizer: Tokenizer, token_ids: list[int], params: SamplingParams) -> tuple[list[str], TextStreamer]:
    streamer = TextStreamer(tokenizer, params)
    pieces = []
    for token_id in token_ids:
        pieces.append(streamer.push(token_id))
        if streamer.stop_string is not None:
            break
    pieces.append(streamer.finish())
    return pieces, streamer


def search_naively(text: str, stop: list[str], first_end: int) -> tuple[int, str] | None:
    """Where the stop string that ends first, at `first_end` or after it, starts."""
    for end in range(first_end, len(text) + 1):
        for length in range(end, 0, -1):
            if text[end - length : end] in stop:
                return end - length, text[end - length : end]
    return None


def read_so_far(token_ids: list[int]) -> str:
    """What is said of them by now: of bytes at their end the whole characters, and nothing if one of them is bad."""
    visible = [each for each in token_ids if DEMO_TOKENIZER.token(each) and not DEMO_TOKENIZER.is_special(each)]
    run = list(itertools.takewhile(DEMO_TOKENIZER.is_byte, reversed(visible)))[::-1]
    try:
        characters = codecs.getincrementaldecoder("utf-8")().decode(b"".join(map(DEMO_TOKENIZER.token_bytes, run)))
    except UnicodeDecodeError:
        characters = ""
    return DEMO_TOKENIZER.decode(visible[: len(visible) - len(run)]) + characters


def end_naively(token_ids: list[int], stop: list[str], min_tokens: int) -> tuple[str, tuple[int, str] | None]:
    """The text by the token that ends it, and the stop string that does: none that ends in what min_tokens said."""
    texts = [*(read_so_far(token_ids[:end]) for end in range(1, len(token_ids) + 1)), DEMO_TOKENIZER.decode(token_ids)]
    num_exempt = 0
    for num_tokens, (before, text) in enumerate(itertools.pairwise(["", *texts]), 1):
        is_exempt = min(num_tokens, len(token_ids)) <= min_tokens
        num_kept = sum(itertools.takewhile(bool, map(str.__eq__, before, text)))  # a bad byte takes some back
        num_exempt = len(text) if is_exempt else min(num_exempt, num_kept)
        match = search_naively(text, stop, num_exempt + 1)
        if match is not None:
            return text, match
    return texts[-1], None


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["demo", "gemma-like"])
def test_the_stream_of_any_tokens_is_one_decode_of_them_all(tokenizer: Tokenizer) -> None:
    @settings(max_examples=150)
    @given(random_tokens(tokenizer), st.booleans())
    def check(token_ids: list[int], skip: bool) -> None:
        pieces, _ = stream(tokenizer, token_ids, SamplingParams(skip_special_tokens=skip))
        assert "".join(pieces) == tokenizer.decode(token_ids, skip)

    check()


LETTERS = st.text("abcd \n", max_size=20)
LETTER_TOKENS = LETTERS.map(lambda text: byte_ids(DEMO_TOKENIZER, text.encode())) | LETTERS.map(
    lambda text: list(DEMO_TOKENIZER.encode(text))
)
BYTES = st.lists(st.sampled_from([b"a", b"b", "é".encode(), "😀".encode(), b"\xc3", b"\xff"]), max_size=8).map(
    lambda characters: byte_ids(DEMO_TOKENIZER, b"".join(characters))
)
STOP_STRINGS = st.text("abcdé\n ", min_size=1, max_size=4) | st.text(min_size=1, max_size=2)


@settings(max_examples=300)
@given(
    random_tokens(DEMO_TOKENIZER)
    | LETTER_TOKENS
    | st.builds(lambda *each: [*itertools.chain(*each)], BYTES, LETTER_TOKENS, BYTES),
    st.lists(STOP_STRINGS, min_size=1, max_size=4),
    st.booleans(),
    st.integers(0, 12),
)
def test_the_stream_is_cut_where_a_search_of_all_that_is_said_finds_a_stop_string(
    token_ids: list[int], stop: list[str], include: bool, min_tokens: int
) -> None:
    params = SamplingParams(stop=stop, max_tokens=None, include_stop_str_in_output=include, min_tokens=min_tokens)
    pieces, streamer = stream(DEMO_TOKENIZER, token_ids, params)
    text, match = end_naively(token_ids, stop, min_tokens)
    if match is None:
        assert ("".join(pieces), streamer.stop_string) == (text, None)
    else:
        end = match[0] + (len(match[1]) if include else 0)
        assert ("".join(pieces), streamer.stop_string) == (text[:end], match[1])


def test_text_comes_with_the_token_that_makes_it_certain() -> None:
    token_ids = list(DEMO_TOKENIZER.encode("a picture of a"))
    pieces, _ = stream(DEMO_TOKENIZER, token_ids, SamplingParams(stop=["\n\n"]))
    assert pieces == [*(DEMO_TOKENIZER.decode([token_id]) for token_id in token_ids), ""]


def test_half_a_character_is_never_sent() -> None:
    token_ids = byte_ids(DEMO_TOKENIZER, "😀".encode()) + list(DEMO_TOKENIZER.encode("a"))
    pieces, _ = stream(DEMO_TOKENIZER, token_ids, SamplingParams())
    assert pieces == ["", "", "", "", "😀a", ""]


def test_a_skipped_special_token_does_not_part_the_bytes_of_a_character() -> None:
    first, *rest = byte_ids(DEMO_TOKENIZER, "é".encode())
    pieces, _ = stream(DEMO_TOKENIZER, [first, 0, *rest], SamplingParams())
    assert "".join(pieces) == "é" == DEMO_TOKENIZER.decode([first, 0, *rest])


@pytest.mark.parametrize("behind", [b"", "é".encode(), b"\xff"], ids=["nothing", "more", "a bad byte"])
def test_a_stop_string_in_bytes_ends_the_answer_with_its_last_byte(behind: bytes) -> None:
    token_ids = byte_ids(DEMO_TOKENIZER, "né".encode())
    pieces, streamer = stream(DEMO_TOKENIZER, token_ids + byte_ids(DEMO_TOKENIZER, behind), SamplingParams(stop="é"))
    assert (pieces, streamer.stop_string) == (["", "", "n", ""], "é")


def test_what_may_begin_a_stop_string_is_held_until_it_does_not() -> None:
    token_ids = byte_ids(DEMO_TOKENIZER, b"x")
    for character in "STOx":
        token_ids += [*DEMO_TOKENIZER.encode(character)]
    pieces, streamer = stream(DEMO_TOKENIZER, token_ids, SamplingParams(stop="STOP"))
    assert "".join(pieces) == "xSTOx"
    assert streamer.stop_string is None
    assert not any("S" in piece and "x" not in piece[1:] for piece in pieces)


def test_a_text_that_ends_while_a_stop_string_forms_is_complete() -> None:
    pieces, streamer = stream(DEMO_TOKENIZER, list(DEMO_TOKENIZER.encode("a ST")), SamplingParams(stop="STOP"))
    assert "".join(pieces) == "a ST"
    assert streamer.stop_string is None


def test_of_two_stop_strings_that_end_together_the_longer_is_cut() -> None:
    pieces, streamer = stream(DEMO_TOKENIZER, list(DEMO_TOKENIZER.encode("xabc")), SamplingParams(stop=["bc", "abc"]))
    assert ("".join(pieces), streamer.stop_string) == ("x", "abc")


@pytest.mark.parametrize(("include", "expected"), [(False, "a"), (True, "a<eos>")])
def test_a_stop_token_is_part_of_the_text_only_if_asked_for(include: bool, expected: str) -> None:
    streamer = TextStreamer(
        DEMO_TOKENIZER, SamplingParams(skip_special_tokens=False, include_stop_str_in_output=include)
    )
    (token_id,) = DEMO_TOKENIZER.encode("a")
    assert streamer.push(token_id) + streamer.push(1, is_stop_token=True) + streamer.finish() == expected
