"""What tests of shared memory share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from keepsight.ipc.run_directory import RunDirectory


@pytest.fixture
def folder() -> Iterator[Path]:
    with RunDirectory.create() as directory:
        yield directory.path
