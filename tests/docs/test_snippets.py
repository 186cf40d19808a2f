"""The commands on the pages print what the pages say."""

import argparse
import json
import re
import shutil
from itertools import groupby
from pathlib import Path

import pytest

from keepsight.cli.config_file import fill_from_file
from keepsight.cli.serve import add_arguments
from tests.docs.snippets import NOT_RUN, PAGES, Reader, Snippet, commands_of, matches_documented_output, read_snippets

SNIPPETS = [snippet for page in PAGES for snippet in read_snippets(page)]
RUN_LANGUAGES = ("sh", "console", "python")
RUN_SNIPPETS_BY_PAGE = {
    page: list(snippets)
    for page, snippets in groupby(
        (each for each in SNIPPETS if each.language in RUN_LANGUAGES and each.is_run), lambda s: s.page
    )
}


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("page", RUN_SNIPPETS_BY_PAGE, ids=lambda page: page.stem)
def test_commands_on_a_page_work(page: Path, server_port: int, tmp_path: Path) -> None:
    reader = Reader(tmp_path, server_port)
    for snippet in RUN_SNIPPETS_BY_PAGE[page]:
        output = reader.type_in(snippet)
        if is_first_question(snippet):
            # As the README says: the answer equals the description that `demo-picture` prints.
            truth, _, *_, body = output.splitlines()
            assert json.loads(body)["choices"][0]["message"]["content"] == truth


def is_first_question(snippet: Snippet) -> bool:
    return snippet.page.name == "README.md" and "| curl" in snippet.text


def test_the_readme_asks_a_first_question() -> None:
    assert len(list(filter(is_first_question, RUN_SNIPPETS_BY_PAGE[PAGES[0]]))) == 1


def test_json_on_the_pages_is_json() -> None:
    for snippet in SNIPPETS:
        if snippet.language == "json":
            json.loads(snippet.text)


def test_yaml_on_the_pages_is_a_file_of_flags(tmp_path: Path) -> None:
    path = tmp_path / "flags.yaml"
    for snippet in SNIPPETS:
        if snippet.language == "yaml":
            path.write_text(snippet.text)
            fill_from_file(argparse.Namespace(config=str(path)), add_arguments, [])


def test_a_block_without_a_known_language_is_a_drawing() -> None:
    commands = re.compile(r"^ *(\$ |curl |keepsight |pip |python |import |from )", re.MULTILINE)
    unknown = [each for each in SNIPPETS if each.language not in (*RUN_LANGUAGES, "json", "yaml")]
    assert [each.place for each in unknown if each.language or commands.search(each.text)] == []


def test_a_block_that_is_not_run_gives_a_reason() -> None:
    lines = [line for page in PAGES for line in page.read_text().splitlines() if line.startswith("<!-- not")]
    assert [line for line in lines if not NOT_RUN.fullmatch(line)] == []


def test_documented_output_may_be_shortened_and_wrapped() -> None:
    assert commands_of("$ one \\\n  more\nits output\n$ two") == [("one \\\n  more", "its output\n"), ("two", "")]
    assert matches_documented_output('{"id":"media_6f0c","b":1}\n', '{"id":"media_...",\n "b":1}')
    assert not matches_documented_output('{"id":"media_6f0c","b":2}', '{"id":"media_...","b":1}')
