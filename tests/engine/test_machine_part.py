import os

import pytest
import torch

from keepsight.engine import machine_part
from keepsight.engine.machine_part import DEVICES_VARIABLE, WHOLE_MACHINE, MachinePart
from keepsight.engine.resolve_config import Machine
from keepsight.errors import InvalidArgumentError


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Thread limits that were set, in order."""
    limited: list[int] = []
    monkeypatch.setattr(machine_part, "set_team_size", limited.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(7)), raising=False)
    for name in ("OMP_NUM_THREADS", DEVICES_VARIABLE):
        # Set first, so that any later change is undone.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return limited


def has_devices(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_one_engine_alone_takes_the_machine_as_it_is(monkeypatch: pytest.MonkeyPatch, threads: list[int]) -> None:
    has_devices(monkeypatch, 4)
    WHOLE_MACHINE.take_cores_and_device("auto")
    assert (threads, DEVICES_VARIABLE in os.environ) == ([], False)


def test_one_engine_alone_has_no_more_threads_than_its_container_has_cores(
    monkeypatch: pytest.MonkeyPatch, threads: list[int]
) -> None:
    monkeypatch.setattr(machine_part, "count_cores", lambda: 2)
    WHOLE_MACHINE.take_cores_and_device("cpu")
    assert threads == [2]


def test_engines_without_devices_share_the_cores(monkeypatch: pytest.MonkeyPatch, threads: list[int]) -> None:
    has_devices(monkeypatch, 0)
    for rank in range(3):
        MachinePart(rank, 3).take_cores_and_device("auto")
    assert (threads, DEVICES_VARIABLE in os.environ) == ([3, 2, 2], False)


def test_the_user_s_number_of_threads_applies_to_each_engine(
    monkeypatch: pytest.MonkeyPatch, threads: list[int]
) -> None:
    has_devices(monkeypatch, 0)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    MachinePart(0, 2).take_cores_and_device("auto")
    assert threads == []


@pytest.mark.parametrize(("visible", "own"), [(None, "1"), ("4,6", "6"), ("GPU-aa, GPU-bb", "GPU-bb")])
def test_each_engine_sees_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch, visible: str | None, own: str) -> None:
    has_devices(monkeypatch, 2)
    if visible is not None:
        monkeypatch.setenv(DEVICES_VARIABLE, visible)
    MachinePart(1, 2).take_cores_and_device("auto")
    assert os.environ[DEVICES_VARIABLE] == own


def test_more_engines_than_devices_are_refused_unless_they_compute_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    has_devices(monkeypatch, 1)
    with pytest.raises(InvalidArgumentError, match="2 engines need a device each, but there are 1"):
        MachinePart(0, 2).take_cores_and_device("cuda")
    MachinePart(0, 2).take_cores_and_device("cpu")
    assert DEVICES_VARIABLE not in os.environ


def test_the_host_s_memory_is_shared_and_a_device_s_is_not() -> None:
    on_cpu = Machine(device="cpu", total_bytes=100, available_bytes=80, available_host_bytes=80)
    assert MachinePart(0, 4).of_memory(on_cpu).available_bytes == 20
    on_cuda = Machine(device="cuda", total_bytes=1000, available_bytes=900, available_host_bytes=80)
    part = MachinePart(3, 4).of_memory(on_cuda)
    assert (part.available_bytes, part.available_host_bytes) == (900, 20)
    assert WHOLE_MACHINE.of_memory(on_cpu) == on_cpu
