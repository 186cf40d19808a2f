"""Runs the fenced blocks of the documentation as a reader would, unless they are marked as not run.

A block is not run if the line before it is `<!-- not run: reason -->`, which is not rendered. In a `console` block,
the lines after `$ ` are run, and their output must match the lines below, where `...` matches anything and line breaks
and indentation are ignored.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
NOT_RUN = re.compile(r"<!-- not run: .{10,} -->")
LIMIT_SECONDS = 60
# The chat connects to the documented port by default, so the test's port is passed as --url.
_COMMAND = """\
#!/bin/sh
test "$1" != chat || set -- "$@" --url http://127.0.0.1:{port}/v1
exec {python} -m keepsight "$@"
"""
_FENCE = re.compile(r"( *)```(.*)")


@dataclass(frozen=True, slots=True)
class Snippet:
    page: Path
    line: int
    language: str
    text: str
    is_run: bool

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def read_snippets(page: Path) -> Iterator[Snippet]:
    lines = page.read_text().splitlines()
    begin = None
    for number, line in enumerate(lines):
        if not (fence := _FENCE.fullmatch(line)):
            continue
        if begin is None:
            begin, language = number, fence[2]
        else:
            text = "\n".join(lines[begin + 1 : number])
            yield Snippet(page, begin + 1, language, text, not (begin and NOT_RUN.fullmatch(lines[begin - 1])))
            begin = None
    assert begin is None, f"{page}: the fence of line {begin} has no end"


class Reader:
    """Types the commands of a page, in an empty folder.

    `keepsight` is this version, at every path where an installation has it; the documented server is the one on `port`.
    """

    def __init__(self, folder: Path, port: int) -> None:
        self._folder, self._port = folder, port
        for place in ("bin", ".venv/bin"):
            (folder / place).mkdir(parents=True)
            command = folder / place / "keepsight"
            command.write_text(_COMMAND.format(python=sys.executable, port=port))
            command.chmod(0o755)

    def type_in(self, snippet: Snippet) -> str:
        """Run a block, check its output, and return it."""
        if snippet.language == "python":
            return self._run(sys.executable, "-c", snippet.text)
        if snippet.language == "sh":
            return self._run("bash", "-eo", "pipefail", "-c", snippet.text)
        printed = [
            (expected, self._run("bash", "-c", command), command) for command, expected in commands_of(snippet.text)
        ]
        for expected, output, command in printed:
            assert matches_documented_output(output, expected), f"{snippet.place}: {command}\nprinted\n{output}"
        return "".join(output for _, output, _ in printed)

    def _run(self, *command: str) -> str:
        paths = f"{self._folder}/bin:/usr/local/bin:/usr/bin:/bin"
        done = subprocess.run(
            [each.replace("127.0.0.1:8000", f"127.0.0.1:{self._port}") for each in command],
            cwd=self._folder,
            env={"PATH": paths, "HOME": str(self._folder), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
        )
        assert done.returncode == 0, f"{command}: status {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout


def commands_of(console: str) -> list[tuple[str, str]]:
    """Return each command with its output. A backslash continues a command on the next line."""
    found = re.findall(r"^\$ ((?:.*\\\n)*.*)\n?((?:^(?!\$ ).*\n?)*)", console, re.MULTILINE)
    assert found, console
    return found


def matches_documented_output(output: str, expected: str) -> bool:
    output, expected = (re.sub(r"\s*\n\s*", "", text.strip()) for text in (output, expected))
    return re.fullmatch(".*".join(map(re.escape, expected.split("..."))), output) is not None
