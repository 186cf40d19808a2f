"""Threads that share the work of a CPU kernel."""

import os
import subprocess
import sys

import pytest

from keepsight.models.cpu_library import has_library

TEAM_OF_ONE = """
import torch
from keepsight.models import cpu_kernels
torch.set_num_threads(2)
hidden, scale = torch.randn(300, 256), torch.ones(256)
torch.testing.assert_close(cpu_kernels.norm(hidden, scale, 0.0), torch.nn.functional.rms_norm(hidden, (256,), eps=0.0))
"""


@pytest.mark.skipif(
    not has_library(), reason="there was no compiler when keepsight was installed: torch's kernels are used"
)
def test_all_is_done_by_fewer_threads_than_were_asked_for() -> None:
    subprocess.run([sys.executable, "-c", TEAM_OF_ONE], env={**os.environ, "OMP_THREAD_LIMIT": "1"}, check=True)
