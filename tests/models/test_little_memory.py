"""When memory runs out, one step of the decoder fails, not the process: other answers continue."""

import subprocess
import sys

PROGRAM = """
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


def test_a_prompt_for_which_no_memory_is_left_fails_alone() -> None:
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "can't allocate memory" in result.stdout
    assert "torch.Size([1, 72])" in result.stdout
