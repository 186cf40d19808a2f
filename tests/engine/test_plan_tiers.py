"""Which tiers an engine has, and which options are refused, if possible before a model is loaded."""

import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from keepsight.config import Config
from keepsight.engine.embedding_tiers import EmbeddingFormat
from keepsight.engine.plan_tiers import RemotePlace, plan_tiers
from keepsight.engine.prefix_tiers import LoadedStretches, StretchFormat
from keepsight.errors import InvalidArgumentError
from keepsight.scheduling.step_plan import KeptStretch
from keepsight.scheduling.stretch_loads import StretchLoad
from keepsight.tiers.disk_place import DiskPlace
from keepsight.tiers.tier import StoredArray
from tests.wait_until import wait_until

EMBEDDINGS = EmbeddingFormat("float32", 8, 32)


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "model.safetensors").write_bytes(b"weights")
    return tmp_path / "checkpoint"


def tiers_of(checkpoint: Path, host_bytes: int, **options: Any) -> list[str]:
    plan = plan_tiers(Config(model=checkpoint, **options))
    tiers = plan.open(host_bytes, EMBEDDINGS, "processor", "float32 on cpu", lambda: None)
    if tiers is None:
        return []
    names = [status.name for status in tiers.status()]
    tiers.close()
    return names


def test_each_tier_is_there_if_it_was_asked_for(checkpoint: Path, tmp_path: Path) -> None:
    disk = {"encoder_disk_cache": f"{tmp_path}/kept:1M"}
    assert tiers_of(checkpoint, 0) == []
    assert tiers_of(checkpoint, 100) == ["host"]
    assert tiers_of(checkpoint, 0, **disk) == ["disk"]
    assert tiers_of(checkpoint, 100, **disk, encoder_remote_cache="redis://nowhere") == ["host", "disk", "remote"]
    assert tiers_of(checkpoint, 0, encoder_disk_cache=True) == ["disk"]


def test_each_tier_has_the_bytes_that_it_was_given(checkpoint: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"encoder_disk_cache": f"{tmp_path}/kept:3M", "encoder_remote_cache": "redis://nowhere"}
    plan = plan_tiers(Config(model=checkpoint, **options, encoder_remote_cache_gb=0.5))
    assert (plan.disk, plan.remote) == (
        DiskPlace(tmp_path / "kept", 3 * 2**20),
        RemotePlace("redis://nowhere", 2**29),
    )


def test_prefixes_have_a_folder_of_their_own(checkpoint: Path, tmp_path: Path) -> None:
    plan = plan_tiers(Config(model=checkpoint, prefix_disk_cache=f"{tmp_path}/kept:3M"))
    assert (plan.disk, plan.prefix_disk) == (None, DiskPlace(tmp_path / "kept", 3 * 2**20))
    usual = plan_tiers(Config(model=checkpoint, prefix_disk_cache=True, encoder_disk_cache=True))
    assert (usual.disk, usual.prefix_disk) == (
        DiskPlace(tmp_path / "home" / "keepsight" / "embeddings"),
        DiskPlace(tmp_path / "home" / "keepsight" / "prefixes"),
    )


def test_prefixes_are_found_only_by_engines_with_the_same_arithmetic(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan = plan_tiers(Config(model=checkpoint, prefix_disk_cache=f"{tmp_path}/kept"))
    pages, shorter, larger = (StretchFormat("uint8", shape) for shape in ((4, 16), (1, 16), (4, 32)))
    first = (pages, "processor", "float32 on cpu, avx2")
    for arguments in (
        first,
        (shorter, *first[1:]),
        (larger, *first[1:]),
        (pages, "another", first[2]),
        (pages, first[1], "float32 on cpu, amx"),
    ):
        tiers = plan.open_prefixes(*arguments, lambda: None)
        assert tiers is not None
        tiers.wait_opened()
        load = StretchLoad(0, (b"stretch",))
        tiers.load(load, 0.0)
        loaded = list[LoadedStretches]()
        wait_until(lambda tiers=tiers, loaded=loaded: loaded.extend(tiers.take_loaded()) or loaded)  # type: ignore[misc]
        assert loaded == [LoadedStretches(load, range(0), (), is_last=True)], arguments
        tiers.keep(KeptStretch(b"stretch", ()), lambda pages=arguments[0]: array_of(pages))  # type: ignore[misc]
        tiers.close()
    again = plan.open_prefixes(*first, lambda: None)
    assert again is not None
    again.wait_opened()
    again.load(load, 0.0)
    wait_until(lambda: any(each.arrays == (array_of(pages),) for each in again.take_loaded()))
    again.close()
    assert "ignored" not in caplog.text, "stretches of other shapes have the same name"


def array_of(pages: StretchFormat) -> StoredArray:
    return StoredArray(pages.dtype, pages.shape, memoryview(bytes(math.prod(pages.shape))))


def test_the_log_says_which_of_two_disk_tiers_cannot_be_used(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    broken = f"{tmp_path}/file/kept"
    plan = plan_tiers(Config(model=checkpoint, encoder_disk_cache=broken, prefix_disk_cache=f"{broken}/too"))
    embeddings = plan.open(0, EMBEDDINGS, "processor", "float32 on cpu", lambda: None)
    prefixes = plan.open_prefixes(StretchFormat("uint8", (4, 16)), "processor", "float32 on cpu", lambda: None)
    assert embeddings is not None
    assert prefixes is not None
    wait_until(lambda: all(tiers.status()[0].reason for tiers in (embeddings, prefixes)))
    embeddings.close()
    prefixes.close()
    warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    for content in ("embeddings", "prefixes"):
        assert any(line.startswith(f"the disk tier of {content} is set aside for ") for line in warnings)


def test_weights_are_digested_only_where_entries_outlive_the_process(checkpoint: Path, tmp_path: Path) -> None:
    assert plan_tiers(Config(model=checkpoint)).model_digest is None
    digest = plan_tiers(Config(model=checkpoint, encoder_disk_cache=str(tmp_path / "kept"))).model_digest
    assert digest is not None
    assert len(digest.result(20)) == 64


WRONG: dict[str, tuple[Callable[[Path], dict[str, Any]], str]] = {
    "size": (lambda path: {"encoder_disk_cache": f"{path}:many"}, "encoder_disk_cache: must be PATH"),
    "address": (lambda _: {"encoder_remote_cache": "http://x"}, "encoder_remote_cache: must be redis://"),
    "half an address": (lambda _: {"encoder_remote_cache": "redis://[::1"}, "encoder_remote_cache: must be redis://"),
    "trace": (lambda path: {"record_cache_trace": path / "no" / "folder"}, "record_cache_trace: .* cannot be written"),
    "policy": (lambda _: {"encoder_cache_policy": "mru"}, "encoder_cache_policy: must be one of auto, lru, cost"),
    "type": (lambda _: {"encoder_disk_cache": 5}, "encoder_disk_cache: must be PATH, PATH:SIZE, :SIZE or True"),
    "type of prefixes": (
        lambda _: {"prefix_disk_cache": 5},
        "prefix_disk_cache: must be PATH, PATH:SIZE, :SIZE or True",
    ),
    "no prefixes": (
        lambda _: {"prefix_disk_cache": True, "enable_prefix_caching": False},
        r"prefix_disk_cache: is True, but enable_prefix_caching is off \(--no-enable-prefix-caching\): nothing would",
    ),
    "one folder for both by another spelling": (
        lambda path: {"prefix_disk_cache": f"{path}/../{path.name}", "encoder_disk_cache": str(path)},
        "prefix_disk_cache: must not be .*, the folder of encoder_disk_cache",
    ),
    "one folder for both": (
        lambda path: {"prefix_disk_cache": f"{path}:1G", "encoder_disk_cache": str(path)},
        "prefix_disk_cache: must not be .*, the folder of encoder_disk_cache",
    ),
    "nothing is kept": (
        lambda _: {"encoder_cache_gb": 0, "encoder_disk_cache": True},
        "encoder_disk_cache: is True, but an encoder cache of 0 keeps nothing for other requests",
    ),
    "nothing is kept, not in the usual folder either": (
        lambda _: {"encoder_disk_cache": ""},
        "encoder_disk_cache: must not be empty",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_impossible_options_are_refused_by_the_user_s_option_names(name: str, checkpoint: Path, tmp_path: Path) -> None:
    options, message = WRONG[name]
    with pytest.raises(InvalidArgumentError, match=message):
        tiers_of(checkpoint, 0, **options(tmp_path))


def test_a_trace_that_cannot_be_written_leaves_no_thread(checkpoint: Path, tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with pytest.raises(InvalidArgumentError, match="cannot be written"):
        tiers_of(checkpoint, 100, record_cache_trace=str(tmp_path / "nowhere" / "trace"))
    assert set(threading.enumerate()) <= before
