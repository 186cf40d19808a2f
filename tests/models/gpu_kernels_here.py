"""The GPU's kernels; without a GPU, Triton's interpreter runs them number by number on host tensors.

This tests what the kernels say, not what a GPU makes of it; the interpreter multiplies no bfloat16. They are compiled
for a GPU wherever Triton is installed.
"""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch

from keepsight.models import cpu_library, gpu_library
from tests.models.kernels_by_torch import SIMPLE_KERNELS

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
pytest.importorskip("triton", reason="NO TRITON HERE: the GPU's kernels were not tested")

from triton.runtime import interpreter

from keepsight.models import gpu_delta_net, gpu_kernels, gpu_slices, gpu_whole_sight

__all__ = [
    "DEVICE",
    "gpu_delta_net",
    "gpu_kernels",
    "gpu_slices",
    "gpu_whole_sight",
    "kernels_in_use",
    "simple_kernels_by_torch",
]
# float16 is the 16-bit dtype that the interpreter supports.
DTYPES = [torch.float32, torch.float16]
# Shared memory that one program may use on any GPU.
MAX_SHARED_BYTES = 99 * 1024
# Compute capabilities: few use float32 on a newer one, and to compile for it takes as long as to test the kernels.
GPUS = {"bf16": (80, 90), "fp32": (80,)}
NUM_BYTES = {"bf16": 2, "fp32": 4}
# Of functions that kernels call.
_seen_modules: set[str] = set()
COMPILE = """
import importlib, json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

for (module, name, types, constants), capabilities in json.loads(sys.argv[1]):
    kernel = getattr(importlib.import_module(f"keepsight.models.{module}"), name)
    options = {each: constants.pop(each) for each in ("num_stages", "num_warps") if each in constants}
    aligned = {(kernel.arg_names.index(each),): [["tt.divisibility", 16]] for each in types if types[each][0] == "*"}
    source = ASTSource(kernel, {**types, **dict.fromkeys(constants, "constexpr")}, constants, aligned)
    for capability in capabilities:
        print(triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).metadata.shared)
"""


class Kernel(NamedTuple):
    module: str
    name: str
    types: dict[str, str]  # of its arguments
    constants: dict[str, Any]  # of one model


@contextmanager
def kernels_in_use() -> Iterator[None]:
    """Enable the GPU's kernels, and disable the CPU's."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(cpu_library, "_library", lambda: None)
        monkeypatch.setattr(gpu_library._Use, "on", frozenset({DEVICE.type}))
        # Most of a GPU's programs would have nothing to do here, and run one after the other.
        monkeypatch.setattr(gpu_kernels, "PROGRAMS_PER_ROW", 4)
        if DEVICE.type == "cpu":
            monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", _interpret)
            monkeypatch.setattr(interpreter, "_get_np_dtype", _find_numpy_dtype)
        yield


def _interpret(function: interpreter.InterpretedFunction[Any], *args: object, **kwargs: object) -> object:
    """Call a function from a kernel without searching Triton's language again for what is to be replaced in it.

    Triton does so at each call, which takes as long as the functions themselves. It replaces the names that our
    functions use when the kernel starts; those that its own use stay replaced from their first call on.
    """
    module = function.fn.__module__
    if module not in _seen_modules and not module.startswith("keepsight."):
        interpreter._patch_lang(function.fn)
        _seen_modules.add(module)
    return function.rewrite()(*args, **kwargs)


_look_up_numpy_dtype = interpreter._get_np_dtype
_look_up_plain_dtype = functools.cache(interpreter._get_np_dtype)


def _find_numpy_dtype(of: interpreter.tl.dtype) -> object:
    """Look up numpy's dtype without making the table of all anew; types of pointers and blocks cannot be hashed."""
    return _look_up_plain_dtype(of) if type(of) is interpreter.tl.dtype else _look_up_numpy_dtype(of)


@contextmanager
def simple_kernels_by_torch() -> Iterator[pytest.MonkeyPatch]:
    """Without a GPU, replace the simple kernels by their equals: interpreted they take longer than all else."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        if DEVICE.type == "cpu":
            for kernel in SIMPLE_KERNELS:
                monkeypatch.setattr(gpu_kernels, kernel.__name__, kernel)
        yield monkeypatch


def shared_bytes_of(kernels: dict[str, list[Kernel]]) -> list[int]:
    """Return the shared memory of the kernels for each kind of number, compiled for the GPUs that use them."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    jobs = [(kernel, GPUS[number]) for number, of_number in kernels.items() for kernel in of_number]
    command = [sys.executable, "-c", COMPILE, json.dumps(jobs)]
    compiled = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert compiled.returncode == 0, compiled.stderr
    shared = list(map(int, compiled.stdout.split()))
    assert len(shared) == sum(len(capabilities) for _, capabilities in jobs)
    return shared
