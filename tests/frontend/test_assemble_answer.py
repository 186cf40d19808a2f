"""Each choice's tokens are assembled into its text, and each choice ends exactly once."""

from typing import Any

import pytest

from keepsight.demo import checkpoint_path
from keepsight.frontend.assemble_answer import AnswerAssembler, AnswerPiece
from keepsight.frontend.prompt.tokenizer import Tokenizer
from keepsight.requests import FinishReason, TokenOutput
from keepsight.sampling_params import SamplingParams

TEXT = "A red circle at the top."
END_ID = 6


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_checkpoint(checkpoint_path())


def tokens_of(tokenizer: Tokenizer, end: FinishReason, choice: int = 0) -> list[TokenOutput]:
    ids = tokenizer.encode(TEXT)
    if end == "stop":
        *others, last = [*ids, END_ID]
    else:
        *others, last = ids
    ending = TokenOutput("7", choice, last, finish_reason=end)
    return [*(TokenOutput("7", choice, each) for each in others), ending]


def assemble(tokenizer: Tokenizer, tokens: list[TokenOutput], **params: Any) -> list[AnswerPiece]:
    assembler = AnswerAssembler(tokenizer, SamplingParams(**params))
    pieces = []
    for token in tokens:
        assert not assembler.is_finished
        if piece := assembler.push(token):
            pieces.append(piece)
        if assembler.is_finished:
            break
    assert assembler.is_finished
    return pieces


def text_of(pieces: list[AnswerPiece]) -> str:
    return "".join(piece.text for piece in pieces)


@pytest.mark.parametrize("end", ["stop", "length"])
def test_only_the_last_piece_has_a_finish_reason(tokenizer: Tokenizer, end: FinishReason) -> None:
    pieces = assemble(tokenizer, tokens_of(tokenizer, end))
    assert text_of(pieces) == TEXT
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + [end]
    assert {piece.stop_reason for piece in pieces} == {None}


def test_a_stop_string_ends_the_answer_before_it_and_is_named(tokenizer: Tokenizer) -> None:
    tokens = tokens_of(tokenizer, "length")
    pieces = assemble(tokenizer, tokens, stop=["nowhere", " circle"])
    assert (text_of(pieces), pieces[-1].finish_reason, pieces[-1].stop_reason) == ("A red", "stop", " circle")
    assert len(pieces) < len(tokens)
    assert text_of(assemble(tokenizer, tokens, stop=" circle", include_stop_str_in_output=True)) == "A red circle"


def test_a_stop_string_in_the_very_last_token_wins_over_the_length(tokenizer: Tokenizer) -> None:
    pieces = assemble(tokenizer, tokens_of(tokenizer, "length"), stop=".")
    assert (text_of(pieces), pieces[-1].finish_reason, pieces[-1].stop_reason) == (TEXT[:-1], "stop", ".")


def test_text_held_back_for_a_stop_string_that_never_came_is_given_at_the_end(tokenizer: Tokenizer) -> None:
    for end in ("stop", "length"):
        pieces = assemble(tokenizer, tokens_of(tokenizer, end), stop=["top. And", "red circle at noon"])
        assert (text_of(pieces), pieces[-1].finish_reason, pieces[-1].stop_reason) == (TEXT, end, None)


def test_an_answer_that_ends_within_a_character_in_bytes_keeps_those_before_it(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("é漢")
    assert len(ids) >= 5, "these are bytes to this tokenizer"
    tokens = [TokenOutput("7", 0, each) for each in ids] + [TokenOutput("7", 0, END_ID, finish_reason="stop")]
    assert text_of(assemble(tokenizer, tokens)) == "é漢"
    assert assemble(tokenizer, tokens, stop="漢")[-1].stop_reason == "漢"
    cut = [*tokens[: len(ids) - 2], TokenOutput("7", 0, ids[-2], finish_reason="length")]
    pieces = assemble(tokenizer, cut)
    assert (text_of(pieces), pieces[-1].text) == ("é\ufffd", "\ufffd")


def test_only_a_stop_token_set_by_the_caller_is_named(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    tokens = [TokenOutput("7", 0, ids[0]), TokenOutput("7", 0, ids[1], finish_reason="stop")]
    pieces = assemble(tokenizer, tokens, stop_token_ids=[ids[1]])
    assert (pieces[-1].finish_reason, pieces[-1].stop_reason) == ("stop", ids[1])
    assert text_of(pieces) == tokenizer.decode(ids[:1])
    assert assemble(tokenizer, tokens, stop_token_ids=[ids[0]])[-1].stop_reason is None
    shown = assemble(tokenizer, tokens, stop_token_ids=[ids[1]], include_stop_str_in_output=True)
    assert text_of(shown) == tokenizer.decode(ids[:2])


def test_choices_end_independently_and_later_tokens_are_dropped(tokenizer: Tokenizer) -> None:
    params = SamplingParams(n=2, stop=" circle")
    assembler = AnswerAssembler(tokenizer, params)
    plain = [TokenOutput("7", 1, each) for each in tokenizer.encode("A blue ring")]
    stopping = tokens_of(tokenizer, "length")
    texts = {0: "", 1: ""}
    ended = []
    for pair in zip(stopping, plain, strict=False):
        for token in pair:
            piece = assembler.push(token)
            if piece is None:
                assert token.choice in ended
                continue
            texts[piece.choice] += piece.text
            ended += [piece.choice] if piece.finish_reason else []
    assert (texts, ended) == ({0: "A red", 1: "A blue ring"}, [0])
    assert not assembler.is_finished
    assert assembler.push(stopping[-1]) is None
    assert assembler.push(TokenOutput("7", 1, END_ID, finish_reason="stop")) is not None
    assert assembler.is_finished
