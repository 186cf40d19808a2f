"""Which folder is used, for any value of the environment variables."""

from pathlib import Path

import pytest

from keepsight.tiers.cache_home import cache_home


@pytest.mark.parametrize(
    ("named", "expected"),
    [("/cache", "/cache/keepsight"), ("", "/home/x/.cache/keepsight"), ("cache", "/home/x/.cache/keepsight")],
)
def test_a_relative_xdg_cache_home_is_ignored(named: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/x")
    monkeypatch.setenv("XDG_CACHE_HOME", named)
    assert cache_home() == Path(expected)


def test_without_the_variable_the_cache_is_in_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/x")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_home() == Path("/home/x/.cache/keepsight")
