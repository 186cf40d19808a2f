import argparse
from pathlib import Path

import pytest
from PIL import Image

from keepsight.cli import demo_picture
from keepsight.errors import InvalidArgumentError


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    demo_picture.add_arguments(parser)
    return demo_picture.run(parser.parse_args(words))


def test_a_picture_is_drawn_and_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.png"
    assert run("--seed", "7", "-o", str(path), "--things", "2") == 0
    assert Image.open(path).size == (448, 448)
    description, count, *lines = capsys.readouterr().out.splitlines()
    assert description.startswith("A")
    assert count == "Two shapes."
    assert [line[:2] for line in lines[:2]] == ["- ", "- "]
    assert all(" -> " in line for line in lines[2:])
    assert len(lines) == 4


def test_the_same_seed_draws_the_same_picture(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.png", "b.png", "c.png")]
    for path, seed in zip(paths, "778", strict=True):
        run("--seed", seed, "-o", str(path))
    first, again, other = (path.read_bytes() for path in paths)
    assert first == again != other


def test_a_number_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("--number", "42", "-o", str(tmp_path / "x.png"), "--size", "100")
    out = capsys.readouterr().out
    assert out.startswith("The number 42.\n")
    assert "shapes." not in out
    assert out.count(" -> ") == 2


@pytest.mark.parametrize(
    ("flag", "value", "limit"),
    [("--things", "12", "1 to 4"), ("--size", "1", "32 to 4096"), ("--number", "1000", "999")],
)
def test_a_value_out_of_range_is_refused_with_the_limit(tmp_path: Path, flag: str, value: str, limit: str) -> None:
    with pytest.raises(InvalidArgumentError, match=limit) as caught:
        run(flag, value, "-o", str(tmp_path / "x.png"))
    assert caught.value.field == flag
    assert not (tmp_path / "x.png").exists()


@pytest.mark.parametrize("name", ["no/such/folder/x.png", "x.unknown", "x"])
def test_a_path_that_cannot_be_written_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=name):
        run("-o", str(tmp_path / name))


def test_a_number_has_no_shapes_that_could_be_counted(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="--things: cannot be given together with --number"):
        run("--number", "5", "--things", "3", "-o", str(tmp_path / "x.png"))
