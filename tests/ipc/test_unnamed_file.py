import os
from pathlib import Path

import pytest

from keepsight.ipc.unnamed_file import give_name, open_unnamed


def test_a_file_appears_complete_and_only_when_named(tmp_path: Path) -> None:
    descriptor = open_unnamed(tmp_path)
    os.write(descriptor, b"whole")
    assert not list(tmp_path.iterdir())
    give_name(descriptor, tmp_path / "name")
    os.close(descriptor)
    assert (tmp_path / "name").read_bytes() == b"whole"
    assert (tmp_path / "name").stat().st_mode & 0o777 == 0o600


def test_an_existing_file_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "name").write_bytes(b"first")
    descriptor = open_unnamed(tmp_path)
    with pytest.raises(FileExistsError):
        give_name(descriptor, tmp_path / "name")
    os.close(descriptor)
    assert (tmp_path / "name").read_bytes() == b"first"
