"""Which mode is chosen; a fallback from the requested mode is logged."""

import logging
from pathlib import Path

import pytest

from keepsight.config import Config
from keepsight.host_memory import measure_host_memory
from keepsight.ipc import pixel_mode
from keepsight.ipc.pixel_mode import choose_mode, choose_size_and_mode
from keepsight.ipc.run_directory import RunDirectory


class Folder(RunDirectory):
    """A run directory with the given free bytes, in shared memory or not."""

    def __init__(self, num_free_bytes: int = 8 << 30, is_shared_memory: bool = True) -> None:
        super().__init__(Path("/nowhere"))
        self._free, self._is_shared_memory = num_free_bytes, is_shared_memory

    @property
    def is_shared_memory(self) -> bool:
        return self._is_shared_memory

    @property
    def num_free_bytes(self) -> int:
        return self._free


@pytest.mark.parametrize("requested", ["lru", "shm", "shared", None])
def test_size_zero_disables_the_cache(requested: str | None) -> None:
    config = Config(mm_processor_cache_type=requested, mm_processor_cache_gb=0)
    assert choose_mode(config, 1, Folder()) == "none"


@pytest.mark.parametrize(
    ("requested", "chosen"), [("lru", "lru"), ("shm", "shm"), ("shared", "shared"), (None, "shared")]
)
def test_one_frontend_gets_the_requested_mode(
    requested: str | None, chosen: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert (
        choose_mode(Config(mm_processor_cache_type=requested, mm_processor_cache_gb=4), 1, run_directory=Folder())
        == chosen
    )
    assert not caplog.records


@pytest.mark.parametrize(("num_frontends", "num_engines"), [(2, 1), (1, 2), (3, 3)])
def test_modes_for_one_frontend_and_one_engine_fall_back_with_a_warning(
    num_frontends: int, num_engines: int, caplog: pytest.LogCaptureFixture
) -> None:
    for requested in ("lru", "shm"):
        caplog.clear()
        config = Config(mm_processor_cache_type=requested, mm_processor_cache_gb=4)
        chosen = choose_mode(config, num_frontends, run_directory=Folder(), num_engines=num_engines)
        assert chosen == "processor_only"
        assert f"{requested} needs one frontend and one engine" in caplog.text


@pytest.mark.parametrize("requested", ["shared", None])
def test_shared_needs_no_fallback(requested: str | None, caplog: pytest.LogCaptureFixture) -> None:
    config = Config(mm_processor_cache_type=requested, mm_processor_cache_gb=4)
    assert choose_mode(config, 4, run_directory=Folder(), num_engines=2) == "shared"
    assert not caplog.records


@pytest.mark.parametrize("requested", ["shm", "shared", None])
@pytest.mark.parametrize(
    ("folder", "reason"),
    [
        (None, "everything runs in one process"),
        (Folder(is_shared_memory=False), "no shared memory"),
        (Folder(num_free_bytes=64 << 20), "67108864 bytes free"),
    ],
)
def test_without_usable_shared_memory_the_fallback_gives_a_reason(
    requested: str | None, folder: RunDirectory | None, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    config = Config(mm_processor_cache_type=requested, mm_processor_cache_gb=4)
    assert choose_mode(config, 1, run_directory=folder) == "lru"
    assert reason in caplog.text
    assert choose_mode(config, 2, run_directory=folder) == "processor_only"


def with_memory_limit(num_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend to run in a container with this limit, of which half is used."""
    (tmp_path / "meminfo").write_text("MemTotal: 67108864 kB\nMemAvailable: 67108864 kB\n")
    (tmp_path / "memory.limit_in_bytes").write_text(f"{num_bytes}\n")
    (tmp_path / "memory.usage_in_bytes").write_text(f"{num_bytes // 2}\n")
    monkeypatch.setattr(
        pixel_mode, "measure_host_memory", lambda: measure_host_memory(tmp_path / "meminfo", tmp_path, tmp_path / "own")
    )


def test_the_size_leaves_room_for_the_engine_within_a_container_s_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with_memory_limit(1 << 30, tmp_path, monkeypatch)
    config, mode = choose_size_and_mode(Config(), 4, Folder())
    assert (config.mm_processor_cache_gb, mode) == (1 / 8, "shared")
    assert "mm_processor_cache_bytes is 134217728: a quarter of the 0.5 GiB that are available" in caplog.text


def test_with_much_memory_the_size_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_memory_limit(64 << 30, tmp_path, monkeypatch)
    assert choose_size_and_mode(Config(), 1, Folder())[0].mm_processor_cache_gb == 4


def test_frontends_that_each_keep_their_own_pixels_share_the_default_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with_memory_limit(64 << 30, tmp_path, monkeypatch)
    config, mode = choose_size_and_mode(Config(), 4, run_directory=None)
    assert (config.mm_processor_cache_gb, mode) == (1, "processor_only")
    assert "the default, divided among 4 frontends" in caplog.text


def test_a_size_that_the_user_set_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_memory_limit(1 << 30, tmp_path, monkeypatch)
    for size in (0, 4):
        assert choose_size_and_mode(Config(mm_processor_cache_gb=size), 4, None)[0].mm_processor_cache_gb == size
