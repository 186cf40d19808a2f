import resource
import subprocess
import sys
from pathlib import Path

import pytest

from keepsight.host_memory import measure_host_memory

MEMINFO = (
    "MemTotal:       24683724 kB\nMemFree:         1000000 kB\nMemAvailable:   20000000 kB\nHugePages_Total:       0\n"
)


def test_available_memory_includes_what_the_system_can_reclaim(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text(MEMINFO)
    assert measure_host_memory(tmp_path / "meminfo", tmp_path) == (24683724 * 1024, 20000000 * 1024)


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("4096000", (4096000, 4095000)), ("500", (500, 0)), ("max", (24683724 * 1024, 20000000 * 1024))],
)
def test_a_container_s_limit_is_the_machine_s(tmp_path: Path, limit: str, expected: tuple[int, int]) -> None:
    (tmp_path / "meminfo").write_text(MEMINFO)
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert measure_host_memory(tmp_path / "meminfo", tmp_path) == expected


def test_memory_of_a_container_s_page_cache_is_available(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text(MEMINFO)
    (tmp_path / "memory.max").write_text("4000000\n")
    (tmp_path / "memory.current").write_text("3900000\n")
    (tmp_path / "memory.stat").write_text("anon 900000\nfile 3000000\nactive_file 1000000\ninactive_file 2000000\n")
    assert measure_host_memory(tmp_path / "meminfo", tmp_path) == (4000000, 3100000)


@pytest.mark.parametrize(
    ("line", "folder", "limit", "used", "stat"),
    [
        ("0::/system.slice/keepsight.service", "system.slice/keepsight.service", "memory.max", "memory.current", ""),
        ("0::/system.slice/keepsight.service", "system.slice", "memory.max", "memory.current", ""),
        ("0::/system.slice/keepsight.service", "system.slice/keepsight.service", "memory.high", "memory.current", ""),
        # cgroup v1, on the machine itself and as seen from inside a container.
        ("4:memory:/docker/1", "memory/docker/1", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
        ("4:memory:/docker/1", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ],
)
def test_a_limit_holds_at_whatever_level_and_in_either_version(
    line: str, folder: str, limit: str, used: str, stat: str, tmp_path: Path
) -> None:
    (tmp_path / "meminfo").write_text(MEMINFO)
    (tmp_path / "own").write_text(f"3:cpu:/elsewhere\n{line}\n")
    group = tmp_path / "cgroup" / folder
    group.mkdir(parents=True)
    (group / limit).write_text("4000000\n")
    (group / used).write_text("3900000\n")
    (group / "memory.stat").write_text(f"{stat}active_file 1000000\n{stat}inactive_file 2000000\n")
    assert measure_host_memory(tmp_path / "meminfo", tmp_path / "cgroup", tmp_path / "own") == (4000000, 3100000)


def test_of_two_limits_of_a_service_the_lower_holds(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text(MEMINFO)
    (tmp_path / "memory.high").write_text("3000000\n")
    (tmp_path / "memory.max").write_text("4000000\n")
    (tmp_path / "memory.current").write_text("1000000\n")
    assert measure_host_memory(tmp_path / "meminfo", tmp_path) == (3000000, 2000000)


@pytest.mark.parametrize("kind", [resource.RLIMIT_AS, resource.RLIMIT_DATA])
def test_a_limit_of_the_process_alone_holds_too(kind: int) -> None:
    script = (
        "import resource; from keepsight.host_memory import measure_host_memory;"
        f"resource.setrlimit({kind}, (2**33, 2**33)); print(*measure_host_memory())"
    )
    output = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    total, available = map(int, output.split())
    assert total <= 2**33
    assert 0 < available < 2**33 - 2**20


def test_memory_is_measured_on_a_system_without_these_files(tmp_path: Path) -> None:
    total, available = measure_host_memory(tmp_path / "meminfo", tmp_path)
    assert total > available > 2**28
