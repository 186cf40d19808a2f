"""Which mode is chosen; a fallback from the requested mode is logged."""

import logging
from pathlib import Path

import pytest

from keepsight.config import Config
from keepsight.ipc.pixel_mode import choose_mode
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
    assert choose_mode(Config(mm_processor_cache_type=requested), 1, run_directory=Folder()) == chosen
    assert not caplog.records


@pytest.mark.parametrize(("num_frontends", "num_engines"), [(2, 1), (1, 2), (3, 3)])
def test_modes_for_one_frontend_and_one_engine_fall_back_with_a_warning(
    num_frontends: int, num_engines: int, caplog: pytest.LogCaptureFixture
) -> None:
    for requested in ("lru", "shm"):
        caplog.clear()
        config = Config(mm_processor_cache_type=requested)
        chosen = choose_mode(config, num_frontends, run_directory=Folder(), num_engines=num_engines)
        assert chosen == "processor_only"
        assert f"{requested} needs one frontend and one engine" in caplog.text


@pytest.mark.parametrize("requested", ["shared", None])
def test_shared_needs_no_fallback(requested: str | None, caplog: pytest.LogCaptureFixture) -> None:
    config = Config(mm_processor_cache_type=requested)
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
    config = Config(mm_processor_cache_type=requested)
    assert choose_mode(config, 1, run_directory=folder) == "lru"
    assert reason in caplog.text
    assert choose_mode(config, 2, run_directory=folder) == "processor_only"
