"""Replacing a checkpoint's files is detected; unrelated files in the folder may come and go."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from keepsight.checkpoint_folder import check_is_unchanged, list_files
from keepsight.errors import CheckpointError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    for name in ("config.json", "model.safetensors", "chat_template.jinja"):
        (tmp_path / name).write_text(name)
    return tmp_path


def replace(path: Path) -> None:
    aside = path.with_suffix(".new")
    aside.write_bytes(path.read_bytes())
    os.utime(aside, ns=(0, path.stat().st_mtime_ns + 1))
    aside.rename(path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "chat_template.jinja"])
@pytest.mark.parametrize("change", [replace, lambda path: path.write_text(f"{path} and more")])
def test_a_replaced_or_rewritten_file_is_named(model: Path, name: str, change: Callable[[Path], None]) -> None:
    before = list_files(model)
    check_is_unchanged(model, before)
    change(model / name)
    with pytest.raises(CheckpointError, match=f"{name}: was changed since the server started"):
        check_is_unchanged(model, before)


def test_an_added_or_removed_file_is_named(model: Path) -> None:
    less = list_files(model)
    (model / "generation_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="generation_config"):
        check_is_unchanged(model, less)
    more = list_files(model)
    (model / "generation_config.json").unlink()
    with pytest.raises(CheckpointError, match="generation_config"):
        check_is_unchanged(model, more)


def test_unread_files_may_change(model: Path) -> None:
    before = list_files(model)
    (model / "README.md").write_text("of no matter")
    (model / "deep.json").mkdir()
    check_is_unchanged(model, before)


def test_a_missing_folder_is_reported(tmp_path: Path) -> None:
    assert not list_files(tmp_path / "gone")
    with pytest.raises(CheckpointError, match="no such folder"):
        check_is_unchanged(tmp_path / "gone", {})
