from pathlib import Path

import pytest
import torch

from keepsight.engine.measure_machine import measure_host_memory, measure_machine

MEMINFO = (
    "MemTotal:       24683724 kB\nMemFree:         1000000 kB\nMemAvailable:   20000000 kB\nHugePages_Total:       0\n"
)


def test_what_is_still_to_be_had_counts_what_the_system_would_give_back(tmp_path: Path) -> None:
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


def test_what_a_container_s_files_take_of_its_memory_is_still_to_be_had(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text(MEMINFO)
    (tmp_path / "memory.max").write_text("4000000\n")
    (tmp_path / "memory.current").write_text("3900000\n")
    (tmp_path / "memory.stat").write_text("anon 900000\nfile 3000000\nactive_file 1000000\ninactive_file 2000000\n")
    assert measure_host_memory(tmp_path / "meminfo", tmp_path) == (4000000, 3100000)


def test_a_system_without_these_files_has_memory_too(tmp_path: Path) -> None:
    total, available = measure_host_memory(tmp_path / "meminfo", tmp_path)
    assert total > available > 2**28


def test_on_a_cpu_device_and_host_are_one() -> None:
    machine = measure_machine(torch.device("cpu"))
    assert machine.device == "cpu"
    assert machine.total_bytes > machine.available_bytes == machine.available_host_bytes > 2**20
