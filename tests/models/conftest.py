"""Fixtures: the CPU kernels for this processor and lesser ones, with one thread and with two."""

from collections.abc import Iterator

import pytest
import torch

from keepsight.models import cpu_library
from keepsight.models.cpu_products import multiplies_bfloat16

# The best is last.
BUILDS = cpu_library.BUILDS[::-1]
# The others have no instruction for it on any processor.
BUILDS_THAT_ROUND = BUILDS[-2:]


@pytest.fixture(params=BUILDS)
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use the build for this processor, and each lesser one."""
    if request.param not in cpu_library.builds_for_this_processor():
        pytest.skip(f"this processor is {torch.backends.cpu.get_cpu_capability()}")
    monkeypatch.setattr(cpu_library, "builds_for_this_processor", lambda: [request.param])
    forget_library()
    try:
        if not cpu_library.has_library():
            pytest.skip("it was not compiled when keepsight was installed, or this processor or system does not run it")
        yield
    finally:
        monkeypatch.undo()
        forget_library()


@pytest.fixture
def rounds(build: None) -> None:
    if not multiplies_bfloat16():
        pytest.skip("this processor does not multiply bfloat16 by bfloat16")


def forget_library() -> None:
    for cached in (cpu_library._library, cpu_library._function, cpu_library.number):
        cached.cache_clear()


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)
