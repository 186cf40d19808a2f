import os
from pathlib import Path

import pytest

from keepsight.count_cores import count_cores, list_cores, share_of


def test_only_cores_in_the_affinity_mask_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {1, 4, 5}, raising=False)
    assert count_cores() == 3


@pytest.mark.parametrize(
    ("given", "counted"),
    [("max 100000", 4), ("200000 100000", 2), ("250000 100000", 2), ("50000 100000", 1), ("800000 100000", 4), ("", 4)],
)
def test_a_cpu_quota_limits_the_count(
    given: str, counted: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 2, 3}, raising=False)
    (tmp_path / "cpu.max").write_text(given + "\n")
    assert count_cores(tmp_path, tmp_path / "none") == counted


@pytest.mark.parametrize(("quota", "counted"), [("-1", 4), ("300000", 3)])
@pytest.mark.parametrize(
    ("line", "folder"), [("2:cpu,cpuacct:/docker/1", "cpu/docker/1"), ("2:cpu:/docker/1", "cpu"), ("0::/a/b", "a/b")]
)
def test_the_quota_of_any_cgroup_level_and_version_counts(
    line: str, folder: str, quota: str, counted: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 2, 3}, raising=False)
    (tmp_path / "own").write_text(f"1:memory:/elsewhere\n{line}\n")
    group = tmp_path / "cgroup" / folder
    group.mkdir(parents=True)
    if line.startswith("0::"):
        (group / "cpu.max").write_text(f"{quota.replace('-1', 'max')} 100000\n")
    else:
        (group / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        (group / "cpu.cfs_period_us").write_text("100000\n")
    assert count_cores(tmp_path / "cgroup", tmp_path / "own") == counted


def test_without_affinity_or_cpu_count_one_core_is_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert count_cores() == 1


def test_all_cores_count_where_a_filter_of_system_calls_hides_the_mask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_pid: int) -> set[int]:
        raise PermissionError

    monkeypatch.setattr(os, "sched_getaffinity", refuse, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert list_cores() == []
    assert count_cores(tmp_path, tmp_path / "none") == 3


@pytest.mark.parametrize(("total", "parts"), [(7, [3, 2, 2]), (6, [2, 2, 2]), (3, [1, 1, 1]), (2, [1, 1, 1])])
def test_cores_are_shared_and_each_process_gets_at_least_one(total: int, parts: list[int]) -> None:
    assert [share_of(total, rank, 3) for rank in range(3)] == parts
