"""What `make` does apart from installing packages, tested with fake Pythons that print what they are asked to do."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

MAKEFILE = Path(__file__).parents[1] / "Makefile"
# `-c` checks the version; `-m venv` may leave a partial folder.
PYTHON = """#!/bin/sh
if [ "$1" = -c ]; then exec {real} -c "import sys; sys.version_info = ({version}); $2"; fi
mkdir -p .venv/bin && touch .venv/bin/python && exit {status}
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    if shutil.which("make") is None:
        pytest.skip("no make")
    clone = tmp_path / "a clone"
    clone.mkdir()
    shutil.copy(MAKEFILE, clone)
    return clone


def write_script(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script)
    path.chmod(0o755)


def write_sources(clone: Path) -> None:
    for name in ("pyproject.toml", "setup.py", "constraints.txt"):
        (clone / name).touch()
    write_script(clone / "src/keepsight/models/_cpu_kernels.so", "")


def make(clone: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run make as from a shell, without variables of a `make` that started the tests."""
    variables = {"PATH": os.environ["PATH"]}
    return subprocess.run(["make", *arguments], cwd=clone, env=variables, capture_output=True, text=True)


def make_environment(clone: Path, version: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    write_script(clone / "python", PYTHON.format(real=sys.executable, version=version, status=status))
    return make(clone, ".venv/bin/python", "PYTHON=./python")


def test_an_old_python_is_refused_in_one_line_and_another_can_be_given(clone: Path) -> None:
    done = make_environment(clone, "3, 10")
    ours, makes_own = done.stderr.splitlines()
    assert "3.11 or newer is needed" in ours
    assert makes_own.startswith("make: ***")
    assert not (clone / ".venv").exists()
    assert make_environment(clone, "3, 11").returncode == 0
    assert (clone / ".venv").exists()


def test_a_failed_environment_is_removed(clone: Path) -> None:
    """On Debian without python3-venv, a folder without pip is left behind."""
    assert make_environment(clone, "3, 11", status=1).returncode != 0
    assert not (clone / ".venv").exists()


@pytest.mark.parametrize("place", ["here", "elsewhere"])
def test_an_environment_is_made_anew_after_the_clone_was_moved(clone: Path, place: str) -> None:
    """It would run what lies in the old place, or nothing."""
    write_script(clone / ".venv/bin/python", "exit 1\n")
    (clone / ".venv/installed").write_text(f"{clone.resolve() if place == 'here' else clone.parent}\n")
    assert make_environment(clone, "3, 11").returncode == 0
    assert ((clone / ".venv/bin/python").read_text() == "exit 1\n") == (place == "here")


def test_an_environment_notes_where_it_was_made(clone: Path) -> None:
    write_script(clone / ".venv/bin/python", "#!/bin/sh\n")
    write_sources(clone)
    assert make(clone, "install").returncode == 0
    assert (clone / ".venv/installed").read_text() == f"{clone.resolve()}\n"


def test_the_bundled_compiler_is_found_in_a_path_with_a_space(clone: Path) -> None:
    write_script(clone / ".venv/bin/python", '#!/bin/sh\nif [ "$CC" ]; then echo "$CC" > said; fi\n')
    compiler = clone / ".venv/lib/python3.11/site-packages/ziglang/zig"
    write_script(compiler, "")
    write_script(clone / "src/keepsight/models/_cpu_kernels.so", "")
    assert make(clone, "borrow-compiler").returncode == 0
    program, *_ = shlex.split((clone / "said").read_text())
    assert (clone / program).samefile(compiler)


def write_environment(clone: Path, made_in: Path) -> Path:
    """Write an environment without a network, which notes that it was made in that folder."""
    write_script(clone / ".venv/bin/python", "exit 1\n")
    (clone / ".venv/installed").write_text(f"{made_in}\n")
    return clone / ".venv/bin/python"


@pytest.mark.parametrize("arguments", ["-n clean", "-n check", "-q install", "-npq", "no_such_target"])
def test_nothing_is_removed_by_asking_what_make_would_do_as_a_shell_does_to_complete_a_word(
    clone: Path, arguments: str
) -> None:
    write_sources(clone)
    write_environment(clone, clone.parent)
    before = sorted(clone.rglob("*"))
    make(clone, *arguments.split())
    assert sorted(clone.rglob("*")) == before


@pytest.mark.parametrize("target", ["install", "check", "serve"])
def test_the_environment_of_another_clone_is_refused_and_left_alone(clone: Path, target: str) -> None:
    write_sources(clone)
    another = clone.parent / "another"
    python = write_environment(another, another)
    assert make(clone, "-n", target, "VENV=../another/.venv").returncode == 0
    done = make(clone, target, "VENV=../another/.venv", f"PYTHON={sys.executable}")
    assert done.returncode != 0
    assert f"../another/.venv was made in {another}" in done.stderr
    assert python.read_text() == "exit 1\n"


@pytest.mark.parametrize("target", ["clean", "install"])
def test_an_environment_whose_name_has_a_space_is_refused_as_its_parts_are_other_folders(
    clone: Path, target: str
) -> None:
    for name in ("my", "env", "my env"):
        write_script(clone / name / "bin/python", "exit 1\n")
        (clone / name / "installed").write_text("/elsewhere\n")
    done = make(clone, target, "VENV=my env")
    assert done.returncode != 0
    assert "space" in done.stderr
    assert all((clone / name / "bin/python").exists() for name in ("my", "env", "my env"))


@pytest.mark.parametrize("status", [0, 1], ids=["network", "no network"])
def test_the_environment_of_a_moved_clone_is_kept_until_another_is_installed(clone: Path, status: int) -> None:
    write_environment(clone, clone.parent)
    write_sources(clone)
    new = f"mkdir -p .venv/bin && printf '#!/bin/sh\\nexit {status}\\n' > .venv/bin/python && chmod +x .venv/bin/python"
    write_script(clone / "python", f'#!/bin/sh\n[ "$1" = -c ] || {{ {new}; }}\n')
    assert (make(clone, "install", "PYTHON=./python").returncode == 0) == (status == 0)
    assert (clone / ".venv.moved/bin/python").exists() == (status != 0)
    if status == 0:
        assert (clone / ".venv/installed").read_text() == f"{clone.resolve()}\n"
