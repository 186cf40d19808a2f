"""Finding all cgroup folders whose limits may apply to a process, for both versions of cgroups."""

from pathlib import Path

import pytest

from keepsight.cgroups import list_cgroups


@pytest.mark.parametrize(
    ("own", "folders"),
    [
        ("0::/a/b", ["a", "a/b"]),
        ("5:cpu,cpuacct:/a\n4:memory:/b", ["cpu/a"]),
        ("0::/", []),
    ],
)
def test_every_level_of_the_process_s_cgroup_is_listed(own: str, folders: list[str], tmp_path: Path) -> None:
    (tmp_path / "own").write_text(f"{own}\n")
    found = list(list_cgroups("cpu", tmp_path, tmp_path / "own"))
    assert found == [tmp_path, tmp_path / "cpu", *(tmp_path / folder for folder in folders)]


def test_without_cgroups_only_the_roots_are_listed(tmp_path: Path) -> None:
    assert list(list_cgroups("cpu", tmp_path, tmp_path / "none")) == [tmp_path, tmp_path / "cpu"]
