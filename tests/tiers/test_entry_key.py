"""Keys differ whenever anything differs that the embeddings depend on."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from keepsight.errors import CheckpointError
from keepsight.tiers import entry_key as module
from keepsight.tiers.entry_key import entry_key, model_content_digest


def test_every_part_changes_the_key() -> None:
    parts = ("encoder", "model", "processor", "bfloat16")
    keys = {entry_key(*parts)}
    for place in range(4):
        changed = list(parts)
        changed[place] += "x"
        keys.add(entry_key(*changed))
    # The parts are delimited: moving a boundary changes the key.
    keys.add(entry_key("encodermodel", "", "processor", "bfloat16"))
    assert len(keys) == 6
    assert all(len(key) == 64 and set(key) <= set("0123456789abcdef") for key in keys)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "a.safetensors").write_bytes(b"a" * 10_000)
    (model / "b.safetensors").write_bytes(b"b" * 10_000)
    return model


def digest(model: Path) -> str:
    return model_content_digest(model, model.parent / "cache" / "digests.json")


def test_the_digest_depends_on_content_and_not_on_the_path(model: Path, tmp_path: Path) -> None:
    before = digest(model)
    assert digest(model) == before
    (model / "README.md").write_text("of no matter")
    assert digest(model) == before
    assert digest(model.rename(tmp_path / "elsewhere")) == before


@pytest.mark.parametrize("name", ["config.json", "a.safetensors", "b.safetensors"])
def test_any_change_of_weights_or_configuration_changes_it(model: Path, name: str) -> None:
    before, about = digest(model), (model / name).stat()
    content = bytearray((model / name).read_bytes())
    content[0] ^= 1
    (model / name).write_bytes(content)
    # Restore the times, as some copying tools do.
    os.utime(model / name, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert digest(model) != before


def test_swapped_files_are_another_model(model: Path) -> None:
    before = digest(model)
    (model / "a.safetensors").rename(model / "c")
    (model / "b.safetensors").rename(model / "a.safetensors")
    (model / "c").rename(model / "b.safetensors")
    assert digest(model) != before


def test_files_are_read_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = digest(model)
    read: list[str] = []

    def note(path: Path) -> str:
        read.append(path.name)
        return "x"

    monkeypatch.setattr(module, "_digest_file", note)
    assert digest(model) == before
    assert not read
    (model / "b.safetensors").write_bytes(b"c")
    digest(model)
    assert read == ["b.safetensors"]


def test_files_with_normalized_timestamps_are_read_each_time(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stat(path: Path) -> SimpleNamespace:
        return SimpleNamespace(st_ino=1, st_size=10_000, st_mtime_ns=7 * 10**9, st_ctime_ns=7 * 10**9)

    monkeypatch.setattr(Path, "stat", stat)
    before = digest(model)
    (model / "b.safetensors").write_bytes(b"c" * 10_000)
    assert digest(model) != before


@pytest.mark.parametrize("content", ["", "[]", "{", '{"x": 1}'])
def test_a_damaged_digest_cache_is_rebuilt(model: Path, content: str) -> None:
    before = digest(model)
    (model.parent / "cache" / "digests.json").write_text(content)
    assert digest(model) == before


def test_without_a_writable_digest_cache_the_digest_is_the_same(model: Path) -> None:
    (model.parent / "file").write_text("")
    assert model_content_digest(model, model.parent / "file" / "digests.json") == digest(model)


def test_a_failed_write_of_the_digest_cache_leaves_nothing_behind(model: Path) -> None:
    place = model.parent / "cache" / "digests.json"
    place.mkdir(parents=True)
    assert model_content_digest(model, place) == model_content_digest(model, model.parent / "digests.json")
    assert list(place.parent.iterdir()) == [place]


def test_for_a_user_without_a_home_the_digest_is_computed_each_time(model: Path, without_home: None) -> None:
    assert model_content_digest(model) == digest(model)


def test_a_folder_without_weights_has_no_digest(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        digest(tmp_path)


def test_a_file_that_cannot_be_read_is_named(model: Path) -> None:
    (model / "c.safetensors").symlink_to("gone")
    with pytest.raises(CheckpointError, match=r"c\.safetensors: cannot be read: No such file"):
        digest(model)
