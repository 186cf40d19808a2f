"""Freed memory is allocated again without asking the kernel for it, on every thread."""

import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, os, resource, sys, threading
from keepsight.runner.keep_freed_memory import keep_freed_memory, write_memory_ahead
PR_SET_THP_DISABLE = 41  # huge pages would take a fault for hundreds of pages
assert ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0
if sys.argv[1] != "by itself":
    assert keep_freed_memory() == ("MALLOC_TRIM_THRESHOLD_" not in os.environ)
if sys.argv[1] == "ahead":
    write_memory_ahead()

def count_faults():
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for _ in range(10):
        blocks = [bytearray(2**20) for _ in range(20)]
        del blocks
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before

def run():
    if sys.argv[1] != "ahead":
        count_faults()
    counts.append(count_faults())

counts = []
run()
thread = threading.Thread(target=run)
thread.start()
thread.join()
print(max(counts))
"""


def count_page_faults(way: str, **environment: str) -> int:
    others = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, way], capture_output=True, text=True, check=True, env={**others, **environment}
    )
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="not glibc, whose rules these are")
def test_freed_memory_is_used_again_without_page_faults() -> None:
    assert count_page_faults("keeping") < 1000 < count_page_faults("by itself")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="not glibc, whose rules these are")
def test_the_first_steps_find_memory_that_was_written_to_before() -> None:
    assert count_page_faults("ahead") < 1000


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="not glibc, whose rules these are")
def test_settings_in_the_environment_take_precedence() -> None:
    assert count_page_faults("keeping", MALLOC_TRIM_THRESHOLD_="131072") > 1000
