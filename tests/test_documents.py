"""PDFs through a whole engine: a PDF is answered like its pages' pictures and texts."""

import base64
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

import pytest
from PIL import Image

from keepsight import LLM, SamplingParams
from keepsight.errors import TooManyPicturesError
from keepsight.frontend.pixels.render_page import render_page
from tests.drawn import draw
from tests.frontend.sample_documents import Page, stream, write_pdf
from tests.official_client import answer, connect
from tests.place import placed

GREEDY = SamplingParams(temperature=0, max_tokens=12)
PDF = write_pdf(
    Page(["A red page"], more="/Contents 8 0 R"), Page(["A blue one"]), more=[stream("1 0 0 rg 100 100 300 300 re f")]
)
FILE = {"type": "file", "file": {"file_data": base64.b64encode(PDF).decode(), "filename": "a.pdf"}}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**placed()) as llm:
        yield llm


def ask(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def page(number: int) -> dict[str, Any]:
    return {"type": "image_pil", "image_pil": Image.fromarray(render_page(PDF, number, "file"))}


def test_a_pdf_is_answered_like_its_pages(llm: LLM) -> None:
    pages = [
        *(text("[a.pdf, page 1 of 2]\n"), page(0), text("\n\n")),
        *(text("[a.pdf, page 2 of 2]\n"), page(1), text("\nA blue one\n")),
        text("[end of a.pdf]\n"),
    ]
    question = text(draw(1).questions[0].text)
    [by_hand] = llm.chat(ask(*pages, question), GREEDY)
    [as_file] = llm.chat(ask(FILE, question), GREEDY)
    assert as_file.prompt_token_ids == by_hand.prompt_token_ids
    assert as_file.outputs[0].token_ids == by_hand.outputs[0].token_ids


def test_a_known_pdf_is_neither_rendered_nor_computed_again(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    [first] = llm.chat(ask(FILE, text("What is it?")), GREEDY)

    def fail(*_: object) -> None:
        raise AssertionError("it is known")

    monkeypatch.setattr("keepsight.frontend.pixels.make_pixels.render_page", fail)
    [second] = llm.chat(ask(FILE, text("What is that?")), GREEDY)
    both = zip(first.prompt_token_ids, second.prompt_token_ids, strict=False)
    known = len(list(takewhile(lambda pair: pair[0] == pair[1], both)))
    assert known > 64
    assert second.num_cached_tokens == known


def test_pages_of_a_pdf_count_as_pictures() -> None:
    with (
        LLM(**placed(limit_mm_per_prompt={"image": 1})) as llm,
        pytest.raises(TooManyPicturesError, match="2 pictures"),
    ):
        llm.chat(ask(FILE), GREEDY)


def test_a_server_answers_about_a_pdf_as_llm_does(llm: LLM, server_port: int) -> None:
    [alone] = llm.chat(ask(FILE, text("What is it?")), GREEDY)
    with connect(server_port) as client:
        assert answer(client, ask(FILE, text("What is it?")), max_tokens=12) == alone.outputs[0].text
