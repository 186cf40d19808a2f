"""When a frontend ends; the rest of it is tried with whole servers."""

import gc
import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from keepsight.frontend import frontend_process
from keepsight.frontend.frontend_process import FrontendProcess
from keepsight.ipc.control import Drain


class StartingFrontend(FrontendProcess):
    """Without engines and workers; it is asked to drain just after it has looked whether it was."""

    def __init__(self) -> None:
        self._was_asked = False
        self._may_go_on, self._server = threading.Event(), None
        self._may_go_on.set()
        self._start = self._client = self._cache = self._view = self._counters = MagicMock()
        self._preparer = MagicMock(image_config=None)
        self._listener = MagicMock()

    @property
    def _is_draining(self) -> bool:
        was_asked = self._was_asked
        if not was_asked:
            self.act_on(Drain())
        return was_asked

    @_is_draining.setter
    def _is_draining(self, is_draining: bool) -> None:
        self._was_asked = is_draining


def test_a_drain_that_is_asked_for_as_the_server_is_made_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    server: Any = SimpleNamespace(should_exit=False, run=lambda sockets: None)
    monkeypatch.setattr(frontend_process, "make_server", lambda *_: server)
    monkeypatch.setattr(frontend_process, "create_app", lambda *_: None)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    StartingFrontend().serve(MagicMock())
    assert server.should_exit
