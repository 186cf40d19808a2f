"""`keepsight generate`: one question; standard output holds the answer and nothing else."""

from pathlib import Path

import pytest

from keepsight.cli.main import main
from keepsight.llm import LLM
from keepsight.outputs import CompletionOutput, RequestOutput
from tests.drawn import Drawn, draw, list_question
from tests.frontend.sample_documents import Page, write_pdf
from tests.place import FLAGS


@pytest.fixture
def drawn() -> Drawn:
    return draw(7)


def generate(*arguments: str) -> int:
    """Run the command on `place`'s device, unless `arguments` say otherwise."""
    return main(["generate", *FLAGS, *arguments])


def save(drawn: Drawn, path: Path) -> str:
    drawn.picture.save(path)
    return str(path)


def test_generate_prints_the_right_answer_and_nothing_else(
    drawn: Drawn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    question = drawn.questions[0]
    assert generate(question.text, "--image", save(drawn, tmp_path / "x.png")) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{question.answer}\n"
    assert captured.err == ""


def test_generate_takes_several_pictures_in_their_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawings = [draw(seed) for seed in (1, 2, 3)]
    flags = [part for index, each in enumerate(drawings) for part in ("--image", save(each, tmp_path / f"{index}.png"))]
    question = list_question(drawings)
    assert generate(*flags, question.text) == 0
    assert capsys.readouterr().out == f"{question.answer}\n"


def test_generate_takes_pdfs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.pdf").write_bytes(write_pdf(Page(["A report"])))
    assert generate("--file", str(tmp_path / "a.pdf"), "What is it?", "--max-tokens", "3") == 0
    assert capsys.readouterr().out.strip()


def test_generate_answers_without_a_picture(capsys: pytest.CaptureFixture[str]) -> None:
    assert generate("Hello!", "--max-tokens", "3") == 0
    assert capsys.readouterr().out.strip()


def test_a_model_s_control_characters_do_not_reach_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = RequestOutput("r", None, [1], [CompletionOutput(0, "\x1b]0;mine\x07A cat.\n\tTwo.", [2], "stop")])
    monkeypatch.setattr(LLM, "chat", lambda *_: [output])
    assert generate("Hello!") == 0
    assert capsys.readouterr().out == "]0;mineA cat.\n\tTwo.\n"


def test_a_seed_repeats_an_answer_at_any_temperature(capsys: pytest.CaptureFixture[str]) -> None:
    def sample(seed: str) -> str:
        assert generate("Hello!", "--temperature", "3", "--seed", seed, "--max-tokens", "8") == 0
        return capsys.readouterr().out

    first = sample("1")
    assert sample("1") == first
    assert sample("2") != first


def test_a_file_that_cannot_be_shown_is_named_by_its_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture, good, bad = save(draw(7), tmp_path / "x.png"), tmp_path / "good.pdf", tmp_path / "bad.pdf"
    good.write_bytes(write_pdf(Page()))
    bad.write_bytes(b"%PDF-1.7")
    assert generate("What are these?", "--file", str(good), "--file", str(bad), "--image", picture) == 2
    assert capsys.readouterr().err.startswith(f"keepsight generate: {bad}: ")


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--image", "nothing.png"], "keepsight generate: --image: cannot read nothing.png: No such file"),
        (["--image", "."], "keepsight generate: --image: cannot read .: Is a directory"),
        (["--image", __file__, "--model", "no/such"], f"keepsight generate: {__file__}: "),
        (["--max-tokens", "0"], "keepsight generate: max_tokens: must be an integer of at least 1"),
        (["--temperature", "-1"], "keepsight generate: temperature: must be a number of at least 0"),
        (["--device", "cuda", "--max-model-len", "9999999"], "keepsight generate: max_model_len: 9999999 exceeds"),
        (["--max-model-len", "5"], "keepsight generate: messages: has "),
    ],
)
def test_a_usage_error_is_one_line_and_exit_status_2(
    flags: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate("What is this?", *flags) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    [message] = captured.err.splitlines()
    assert message.startswith(line)
