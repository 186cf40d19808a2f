"""The device on which test engines run: the CPU, or the GPU if KEEPSIGHT_TEST_DEVICE=cuda.

A GPU is never detected automatically, so a plain `make test` does the same everywhere. Reference models stay on the
CPU, and so do tests that pass `device="cpu"` themselves, as they are about the CPU. This module imports torch and
pytest only when needed, because benchmarks and scripts start servers, too.
"""

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

DEVICE = os.environ.get("KEEPSIGHT_TEST_DEVICE", "cpu")
# The tolerance between a value computed in different batches: on a CPU they must be equal.
LEEWAY = 0.0 if DEVICE == "cpu" else 1e-4

_PLACE: dict[str, Any] = {"device": DEVICE}
if DEVICE == "cuda":
    # As precise as the reference models, and with little memory, as many test processes share the GPU.
    _PLACE |= {"dtype": "float32", "kv_cache_memory_bytes": 2**28}
# The same as command-line flags; later flags override them.
FLAGS = [word for name, value in _PLACE.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def placed(**options: Any) -> dict[str, Any]:
    """Return the engine options, with defaults for the device and precision."""
    place = dict(_PLACE)
    if "num_gpu_blocks_override" in options:
        place.pop("kv_cache_memory_bytes", None)
    return place | options


def on_cpu_alone(reason: str) -> "pytest.MarkDecorator":
    """Skip a test of a `placed` engine whose claim holds only on a CPU."""
    import pytest

    return pytest.mark.skipif(DEVICE != "cpu", reason=f"ON A CPU ALONE: {reason}")
