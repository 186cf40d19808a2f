import codecs
import functools
import itertools
from unittest.mock import ANY

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepsight.frontend.prompt.tokenizer import Tokenizer
from keepsight.frontend.stream_text import TextStreamer
from keepsight.sampling_params import SamplingParams
from tests.byte_level_tokenizer import byte_level_checkpoint
from tests.frontend.gemma_like import DEMO, gemma_like_checkpoint
from tests.llama_like_tokenizer import llama_like_checkpoint

CHECKPOINTS = (DEMO, gemma_like_checkpoint(), byte_level_checkpoint(), llama_like_checkpoint())
TOKENIZERS = DEMO_TOKENIZER, _, BYTE_LEVEL, LLAMA_LIKE = [
    Tokenizer.from_checkpoint(directory) for directory in CHECKPOINTS
]


@functools.cache
def single_bytes(tokenizer: Tokenizer) -> dict[bytes, int]:
    """Return the ids of the tokens of one byte each, by that byte."""
    named = [tokenizer.token_id(f"<0x{byte:02X}>") for byte in range(256)]
    ids = [each for each in named if each is not None] or range(tokenizer.num_tokens)
    return {tokenizer.token_bytes(each): each for each in ids if len(tokenizer.token_bytes(each)) == 1}


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    return [single_bytes(tokenizer)[bytes([byte])] for byte in data]


def random_tokens(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Draw any ids, including some beyond the vocabulary; characters in bytes; and broken characters."""
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
    """Return the start and text of the stop string that ends first, at or after `first_end`."""
    for end in range(first_end, len(text) + 1):
        for length in range(end, 0, -1):
            if text[end - length : end] in stop:
                return end - length, text[end - length : end]
    return None


def read_so_far(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    """Return the text so far: all but a character that is not complete."""
    visible = [each for each in token_ids if not tokenizer.is_special(each)]
    return codecs.getincrementaldecoder("utf-8")("replace").decode(b"".join(map(tokenizer.token_bytes, visible)))


def end_naively(
    tokenizer: Tokenizer, token_ids: list[int], stop: list[str], min_tokens: int
) -> tuple[str, tuple[int, str] | None]:
    """Return the text when it ends, and the stop string that ends it: none that ends within the first min_tokens."""
    prefixes = [read_so_far(tokenizer, token_ids[:end]) for end in range(1, len(token_ids) + 1)]
    texts = [*prefixes, tokenizer.decode(token_ids)]
    num_exempt = 0
    for num_tokens, text in enumerate(texts, 1):
        is_exempt = min(num_tokens, len(token_ids)) <= min_tokens
        num_exempt = len(text) if is_exempt else num_exempt
        match = search_naively(text, stop, num_exempt + 1)
        if match is not None:
            return text, match
    return texts[-1], None


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["demo", "gemma-like", "byte-level", "llama-like"])
def test_a_stream_joined_equals_one_decode_of_all_tokens(tokenizer: Tokenizer) -> None:
    @settings(max_examples=150)
    @given(random_tokens(tokenizer), st.booleans())
    def check(token_ids: list[int], skip: bool) -> None:
        pieces, _ = stream(tokenizer, token_ids, SamplingParams(skip_special_tokens=skip))
        assert "".join(pieces) == tokenizer.decode(token_ids, skip)

    check()


LETTERS = st.text("abcd \n", max_size=20)
CHARACTERS = st.lists(st.sampled_from([b"a", b"b", "é".encode(), "😀".encode(), b"\xc3", b"\xff"]), max_size=8)
STOP_STRINGS = st.text("abcdé\n ", min_size=1, max_size=4) | st.text(min_size=1, max_size=2)


def telling_tokens(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Draw tokens in which stop strings are found more often."""
    letters = LETTERS.map(lambda text: byte_ids(tokenizer, text.encode()))
    letters |= LETTERS.map(lambda text: list(tokenizer.encode(text)))
    in_bytes = CHARACTERS.map(lambda characters: byte_ids(tokenizer, b"".join(characters)))
    return letters | st.builds(lambda *each: [*itertools.chain(*each)], in_bytes, letters, in_bytes)


@pytest.mark.parametrize("tokenizer", [DEMO_TOKENIZER, BYTE_LEVEL], ids=["demo", "byte-level"])
def test_a_stream_is_cut_where_a_naive_search_finds_a_stop_string(tokenizer: Tokenizer) -> None:
    @settings(max_examples=300)
    @given(
        random_tokens(tokenizer) | telling_tokens(tokenizer),
        st.lists(STOP_STRINGS, min_size=1, max_size=4),
        st.booleans(),
        st.integers(0, 12),
    )
    def check(token_ids: list[int], stop: list[str], include: bool, min_tokens: int) -> None:
        params = SamplingParams(stop=stop, max_tokens=None, include_stop_str_in_output=include, min_tokens=min_tokens)
        pieces, streamer = stream(tokenizer, token_ids, params)
        text, match = end_naively(tokenizer, token_ids, stop, min_tokens)
        if match is None:
            assert ("".join(pieces), streamer.stop_string) == (text, None)
        else:
            end = match[0] + (len(match[1]) if include else 0)
            assert ("".join(pieces), streamer.stop_string) == (text[:end], match[1])

    check()


def test_text_is_sent_with_the_token_that_makes_it_certain() -> None:
    token_ids = list(DEMO_TOKENIZER.encode("a picture of a"))
    pieces, _ = stream(DEMO_TOKENIZER, token_ids, SamplingParams(stop=["\n\n"]))
    assert pieces == [*(DEMO_TOKENIZER.decode([token_id]) for token_id in token_ids), ""]


@pytest.mark.parametrize("tokenizer", [DEMO_TOKENIZER, BYTE_LEVEL], ids=["demo", "byte-level"])
@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"a\xc3\xa9b", ["a", "", "é", "b", ""]),
        (b"\xf0\x9f\x98\x80", ["", "", "", "😀", ""]),
        (b"\xe2\x82b", ["", "", "\ufffdb", ""]),
        (b"a\xff\xc3\xc3\xa9", ["a", "\ufffd", "", "\ufffd", "é", ""]),
        (b"\xc3\xa9\xf0\x9f", ["", "é", "", "", "\ufffd"]),
    ],
)
def test_characters_in_bytes_are_sent_with_the_byte_that_makes_them_certain(
    tokenizer: Tokenizer, data: bytes, expected: list[str]
) -> None:
    token_ids = byte_ids(tokenizer, data)
    assert stream(tokenizer, token_ids, SamplingParams(stop="never")) == (expected, ANY)
    assert tokenizer.decode_each(token_ids) == [*expected[:-2], expected[-2] + expected[-1]]
    assert tokenizer.decode(token_ids) == "".join(expected)


def test_half_a_character_is_sent_as_unreadable_with_the_text_behind_it() -> None:
    token_ids = byte_ids(DEMO_TOKENIZER, "é😀".encode()[:-1]) + list(DEMO_TOKENIZER.encode("a"))
    pieces, streamer = stream(DEMO_TOKENIZER, token_ids, SamplingParams())
    assert pieces == ["", "é", "", "", "", "\ufffda", ""]
    assert not streamer.has_undecoded_bytes
    assert DEMO_TOKENIZER.decode_each(token_ids) == pieces[:-1]


def test_text_between_halves_of_a_character_separates_them_but_a_skipped_token_does_not() -> None:
    first, last = byte_ids(BYTE_LEVEL, "é".encode())
    for between, expected in [("<think>", "\ufffd<think>\ufffd"), ("<|im_start|>", "é")]:
        token_ids = [first, *BYTE_LEVEL.encode(between), last]
        pieces, _ = stream(BYTE_LEVEL, token_ids, SamplingParams())
        assert "".join(pieces) == expected == BYTE_LEVEL.decode(token_ids)


def test_a_skipped_special_token_does_not_separate_the_bytes_of_a_character() -> None:
    first, *rest = byte_ids(DEMO_TOKENIZER, "é".encode())
    pieces, _ = stream(DEMO_TOKENIZER, [first, 0, *rest], SamplingParams())
    assert "".join(pieces) == "é" == DEMO_TOKENIZER.decode([first, 0, *rest])


@pytest.mark.parametrize("behind", [b"", "é".encode(), b"\xff"], ids=["nothing", "more", "a bad byte"])
def test_a_stop_string_in_bytes_ends_the_answer_with_its_last_byte(behind: bytes) -> None:
    token_ids = byte_ids(DEMO_TOKENIZER, "né".encode())
    pieces, streamer = stream(DEMO_TOKENIZER, token_ids + byte_ids(DEMO_TOKENIZER, behind), SamplingParams(stop="é"))
    assert (pieces, streamer.stop_string) == (["n", "", "", ""], "é")


def test_a_possible_start_of_a_stop_string_is_held_back() -> None:
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


@pytest.mark.parametrize(("continues_prompt", "expected"), [(False, "brown fox"), (True, " brown fox")])
def test_a_vocabulary_s_leading_space_is_removed_only_at_the_start_of_a_text(
    continues_prompt: bool, expected: str
) -> None:
    streamer = TextStreamer(LLAMA_LIKE, SamplingParams(), continues_prompt=continues_prompt)
    text = "".join(map(streamer.push, LLAMA_LIKE.encode("brown fox")))
    assert text + streamer.finish() == expected
