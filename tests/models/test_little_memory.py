"""When memory runs out, one step fails, not the process: other answers continue."""

import subprocess
import sys

import pytest

from keepsight.models.cpu_library import has_library

OF_A_PROMPT = """
import dataclasses, resource, torch
from tests.models import test_cpu_decoder as cpu

torch.set_num_threads(1)
decoder = cpu.make_decoder(dataclasses.replace(cpu.CONFIG, intermediate_size=2**14))
pieces, hidden, caches = cpu.slices((0, 600)), torch.ones(600, 72), cpu.make_caches(cpu.CONFIG)
cpu.compute(decoder, hidden[:1], cpu.slices((0, 1)), caches)
taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + 2**24, resource.RLIM_INFINITY))
try:
    cpu.compute(decoder, hidden, pieces, caches)
except RuntimeError as error:
    print(error)
print(cpu.compute(decoder, hidden[:1], cpu.slices((0, 1)), caches).shape)
"""

OF_A_PRODUCT = """
import ctypes, resource, torch
from keepsight.models.cpu_products import Panels

torch.set_num_threads(1)
weight, hidden, out = torch.randn(8, 30_000), torch.randn(600, 30_000), torch.zeros(600, 8)
panels, expected = Panels(weight, None), hidden @ weight.T
panels.multiply(hidden)  # the stack has grown to what a product takes: not to find room for it ends the process
ctypes.CDLL(None).malloc_trim(0)
taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken, resource.RLIM_INFINITY))
try:
    panels.multiply(hidden, onto=out)
except torch.OutOfMemoryError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
torch.testing.assert_close(panels.multiply(hidden), expected, rtol=1e-3, atol=1e-2)
"""


def output_of(program: str) -> str:
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_a_prompt_for_which_no_memory_is_left_fails_alone() -> None:
    output = output_of(OF_A_PROMPT)
    assert "can't allocate memory" in output
    assert "torch.Size([1, 72])" in output


@pytest.mark.skipif(
    not has_library(), reason="there was no compiler when keepsight was installed: torch's kernels are used"
)
def test_a_product_for_whose_rows_no_memory_is_left_fails_alone() -> None:
    assert "can't allocate memory" in output_of(OF_A_PRODUCT)
