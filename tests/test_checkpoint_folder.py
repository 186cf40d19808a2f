"""Replacing a checkpoint's files is detected; unrelated files in the folder may come and go."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from keepsight.checkpoint_folder import check_is_unchanged, digest_samples, list_files
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


def write_model(folder: Path, *changes: int, config: str = "{}") -> Path:
    """Write a model of 2 MiB, in which some bytes may be changed, each with the page around it."""
    folder.mkdir()
    weights = bytearray(range(256)) * 2**13
    for at in changes:
        weights[at : at + 2**16] = bytes(2**16)
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "config.json").write_text(config)
    return folder


def test_copies_of_a_model_have_one_digest_wherever_and_whenever_they_were_made(tmp_path: Path) -> None:
    first, second = write_model(tmp_path / "first"), write_model(tmp_path / "second")
    replace(second / "model.safetensors")
    (second / "README.md").write_text("A copy.")
    assert digest_samples(first) == digest_samples(second)


def test_another_configuration_or_other_weights_have_another_digest(tmp_path: Path) -> None:
    models = [write_model(tmp_path / str(at), at) for at in (0, 2**20, 2**21 - 2**16)]
    models += [write_model(tmp_path / "a"), write_model(tmp_path / "b", config="[]")]
    (write_model(tmp_path / "c") / "config.json").rename(tmp_path / "c" / "other.json")
    digests = {digest_samples(each) for each in [*models, tmp_path / "c"]}
    assert len(digests) == 6


def test_a_model_is_digested_without_reading_all_of_it(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(2**40)
    assert digest_samples(tmp_path)
