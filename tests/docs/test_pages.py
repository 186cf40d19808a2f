"""Everything that the pages name exists: options, scripts, pages, headings."""

import argparse
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from keepsight import LLM
from keepsight.api_settings import ApiSettings
from keepsight.cli.config_file import add_config_file
from keepsight.cli.main import COMMANDS
from keepsight.errors import AnsweredError, PictureError
from keepsight.frontend.api.chat_request import ChatRequest
from keepsight.frontend.api.completion_request import CompletionRequest
from keepsight.frontend.api.openapi import describe_api
from keepsight.frontend.api.responses_request import ResponsesRequest
from keepsight.frontend.http.decode_body import refused_fields
from tests.docs.snippets import PAGES, ROOT

SCRIPT = re.compile(
    r"\bpython3? (?:-m ((?:tests|benchmarks)\.[\w.]+)|((?:benchmarks|tests|docs|training)/\w+\.py))(.*)"
)
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
SCRIPTS = ("benchmarks/*.py", "tests/*.py", "tests/**/long_*.py")
# Options on a line with these commands may belong to them.
FOREIGN = re.compile(r"\b(?:pip|curl|hf|useradd|systemctl) ")
VARIABLE = re.compile(
    r'environ(?:\.get\(|\.setdefault\(|\[)"([A-Z_]+)"|"([A-Z_]+)" (?:not )?in os\.environ'
    r'|_VARIABLE(?:, \w+)* = "([A-Z_]+)"(?:, "([A-Z_]+)")?'
)
PAGE_PATHS = ("/", "/dashboard")
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")


def test_scripts_and_their_options_named_on_pages_exist() -> None:
    for page in PAGES:
        for module, path, rest in SCRIPT.findall(page.read_text()):
            script = ROOT / (path or module.replace(".", "/") + ".py")
            # Options after a bare -- are for the server.
            own = re.split(r" -- |`|   ", rest)[0]
            missing = [option for option in OPTION.findall(own) if f'"{option}"' not in script.read_text()]
            assert not missing, f"{page}: {script}"


def test_keepsight_options_named_on_pages_exist() -> None:
    known = {option for command in COMMANDS for option in options_of(parser_of(command))}
    scripts = [path for pattern in SCRIPTS for path in ROOT.glob(pattern)]
    known |= {option for path in scripts for option in re.findall(r'"(--[a-z-]+)"', path.read_text())}
    for page in PAGES:
        shown = {
            option
            for line in page.read_text().splitlines()
            if not FOREIGN.search(line)
            for option in OPTION.findall(line)
        }
        assert shown <= known, page


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_documented(command: str) -> None:
    named = {option for page in PAGES for option in OPTION.findall(page.read_text())}
    options = {each for each in options_of(parser_of(command)) if re.match("--(?!no-)", each)}
    assert options - named == set()


def test_every_environment_variable_that_is_read_is_documented() -> None:
    sources = [path.read_text() for path in (ROOT / "src").rglob("*.py")]
    read = {name for text in sources for found in VARIABLE.findall(text) for name in found if name}
    named = {name for page in PAGES for name in re.findall(r"`([A-Z_]+)`", page.read_text())}
    assert "OPENAI_API_KEY" in read
    assert read - named == set()


def test_the_quickstart_installs_what_make_installs() -> None:
    extras = re.compile(r"-e '(\S+)'")
    quickstart, makefile = (extras.findall((ROOT / name).read_text()) for name in ("docs/quickstart.md", "Makefile"))
    assert len(quickstart) == 1
    assert quickstart == makefile


def parser_of(command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    import_module(f"keepsight.cli.{command.replace('-', '_')}").add_arguments(parser)
    if command == "serve":
        add_config_file(parser)
    return parser


def options_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from options_of(each)


def test_pages_and_messages_name_the_version_of_transformers_that_is_required() -> None:
    required = set(re.findall(r'"transformers>=([0-9.]+)"', (ROOT / "pyproject.toml").read_text()))
    files = [*PAGES, *(ROOT / "src").rglob("*.py")]
    named = {each for file in files for each in re.findall(r"transformers ([0-9.]+) or later", file.read_text())}
    assert len(required) == 1
    assert named == required


def test_every_link_has_a_target() -> None:
    for page in PAGES:
        for target, anchor in LINK.findall(page.read_text()):
            leads_to = page.parent / target if target else page
            assert leads_to.exists(), f"{page}: {target}"
            assert not anchor or anchor in anchors_of(leads_to), f"{page}: {target}#{anchor}"


def anchors_of(page: Path) -> set[str]:
    """Return the anchors that GitHub generates for the headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_api_page_lists_every_refused_field() -> None:
    page = (ROOT / "docs/api.md").read_text()
    listed = [
        set(re.findall(r"`(\w+)`", each))
        for each in re.findall(r"^These fields are refused(.*?)\.\n\n", page, re.M | re.S)
    ]
    # This is a field of content parts, which another paragraph describes.
    refused = {*refused_fields(ChatRequest), *refused_fields(CompletionRequest)} - {"prompt_cache_breakpoint"}
    assert listed[0] == refused
    assert listed[0] | listed[1] == refused | {*refused_fields(ResponsesRequest)} - {"prompt_cache_breakpoint"}


def test_the_llm_page_lists_every_public_method() -> None:
    page = (ROOT / "docs/offline.md").read_text()
    # These are only for the commands and the tests.
    public = {name for name in vars(LLM) if not name.startswith("_")} - {"engine", "from_config"}
    assert [name for name in public if f"`{name}(" not in page] == []


def test_the_api_page_lists_every_endpoint() -> None:
    page = (ROOT / "docs/api.md").read_text()
    served = describe_api(ApiSettings(dashboard_thumbnails=True), has_uploads=True, keeps_responses=True)["paths"]
    assert [path for path in (*served, *PAGE_PATHS) if f"{path}`" not in page] == []


def test_every_error_code_is_documented() -> None:
    named = {code for page in PAGES for code in re.findall(r"`(\w+)`", page.read_text())}
    assert {each.code for each in kinds_of(AnsweredError) if each.code and each is not PictureError} <= named


def kinds_of(error: type[AnsweredError]) -> Iterator[type[AnsweredError]]:
    for each in error.__subclasses__():
        yield each
        yield from kinds_of(each)


def test_numbers_in_the_readme_are_on_the_page_of_measurements() -> None:
    rows = re.findall(r"^\|.*\d.*\|$", PAGES[0].read_text(), re.MULTILINE)
    measured = (ROOT / "docs/performance.md").read_text()
    assert rows
    assert [row for row in rows if row not in measured] == []


def test_every_page_can_be_reached_from_the_readme() -> None:
    assert {page.name for page in PAGES[1:]} <= set(re.findall(r"\]\(docs/(\w+\.md)", PAGES[0].read_text()))
