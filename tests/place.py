"""Where engines of tests compute: on the CPU, or on the GPU where KEEPSIGHT_TEST_DEVICE=cuda asks for it.

Never by whether there is one: a plain `make test` does the same everywhere.  What judges an engine stays on the CPU,
and so does what says `device="cpu"` itself: it is about a CPU.  Knows neither torch nor pytest until they are needed:
benchmarks and scripts start servers, too.
"""

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

DEVICE = os.environ.get("KEEPSIGHT_TEST_DEVICE", "cpu")
# How far apart a number may lie from itself when it is computed in other company: on a CPU not at all.
LEEWAY = 0.0 if DEVICE == "cpu" else 1e-4

_PLACE: dict[str, Any] = {"device": DEVICE}
if DEVICE == "cuda":
    # As exact as the judges; and a small part of the memory, which many processes of tests share.
    _PLACE |= {"dtype": "float32", "kv_cache_memory_bytes": 2**28}
# The same for a command line, where what is said later counts.
FLAGS = [word for name, value in _PLACE.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def placed(**options: Any) -> dict[str, Any]:
    """An engine's options, with what they leave open of where and how it computes."""
    place = dict(_PLACE)
    if "num_gpu_blocks_override" in options:
        place.pop("kv_cache_memory_bytes", None)
    return place | options


def on_cpu_alone(why: str) -> "pytest.MarkDecorator":
    """For what holds on a CPU alone, of an engine that is placed as all are."""
    import pytest

    return pytest.mark.skipif(DEVICE != "cpu", reason=f"ON A CPU ALONE: {why}")
