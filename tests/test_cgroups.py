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
def test_each_level_of_its_own_group_may_limit_a_process(own: str, folders: list[str], tmp_path: Path) -> None:
    (tmp_path / "own").write_text(f"{own}\n")
    found = list(list_cgroups("cpu", tmp_path, tmp_path / "own"))
    assert found == [tmp_path, tmp_path / "cpu", *(tmp_path / folder for folder in folders)]


def test_a_system_without_control_groups_has_none_of_its_own(tmp_path: Path) -> None:
    assert list(list_cgroups("cpu", tmp_path, tmp_path / "none")) == [tmp_path, tmp_path / "cpu"]
