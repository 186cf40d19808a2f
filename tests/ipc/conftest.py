"""Fixtures for the tests of shared memory."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from keepsight.ipc.run_directory import RunDirectory


@pytest.fixture
def folder() -> Iterator[Path]:
    with RunDirectory.create() as directory:
        yield directory.path
