"""Fixtures for the tests of tiers."""

import os
import pwd

import pytest


@pytest.fixture
def without_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a user without a home, as a numeric user id in a container that has no passwd entry."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def raise_unknown_user(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", raise_unknown_user)
    assert os.path.expanduser("~") == "~"  # noqa: PTH111
