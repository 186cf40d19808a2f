import torch

from keepsight.engine.measure_machine import measure_machine


def test_on_a_cpu_device_and_host_are_one() -> None:
    machine = measure_machine(torch.device("cpu"))
    assert machine.device == "cpu"
    assert machine.total_bytes > machine.available_bytes == machine.available_host_bytes > 2**20
