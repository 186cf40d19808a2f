"""What tests of tiers share."""

import os
import pwd

import pytest


@pytest.fixture
def without_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a user whom only a container knows, by a number."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def find_nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", find_nobody)
    assert os.path.expanduser("~") == "~"  # noqa: PTH111
