"""When a frontend drains, and what it can do without; tests of whole servers cover the rest."""

import gc
import logging
import threading
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from keepsight.checkpoint_folder import list_files
from keepsight.config import Config
from keepsight.demo import checkpoint_path
from keepsight.errors import CheckpointError
from keepsight.frontend import frontend_process
from keepsight.frontend.frontend_process import FrontendProcess
from keepsight.ipc.control import Drain, StartFrontend
from keepsight.program_identity import identify_program


class StartingFrontend(FrontendProcess):
    """A frontend without engines and workers that is asked to drain just after it checked for that."""

    def __init__(self, run_directory: Path) -> None:
        self._was_asked, self._run_directory = False, run_directory
        self._may_serve, self._server = threading.Event(), None
        self._may_serve.set()
        self._start = self._client = self._cache = self._view = self._counters = MagicMock()
        self._preparer = self._workers = self._listener = self._digests = MagicMock()

    @property
    def _is_draining(self) -> bool:
        was_asked = self._was_asked
        if not was_asked:
            self.act_on(Drain())
        return was_asked

    @_is_draining.setter
    def _is_draining(self, is_draining: bool) -> None:
        self._was_asked = is_draining


@pytest.fixture
def created(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The server that a frontend makes, and the named arguments of its app."""
    server = SimpleNamespace(should_exit=False, run=lambda sockets: None, app_of={})
    monkeypatch.setattr(frontend_process, "make_server", lambda *_: server)
    monkeypatch.setattr(frontend_process, "create_app", lambda *_, **given: setattr(server, "app_of", given))
    monkeypatch.setattr(gc, "freeze", lambda: None)
    return server


def test_a_drain_requested_while_the_server_is_made_is_not_lost(tmp_path: Path, created: SimpleNamespace) -> None:
    StartingFrontend(tmp_path).serve(MagicMock())
    assert created.should_exit


def test_without_room_for_uploads_or_responses_everything_else_is_served(
    tmp_path: Path, created: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    StartingFrontend(tmp_path).serve(MagicMock())
    assert _kinds(created) >= {"MediaHandles", "KeptResponses"}
    assert not caplog.records
    StartingFrontend(tmp_path / "missing").serve(MagicMock())
    assert not _kinds(created) & {"MediaHandles", "KeptResponses"}
    messages = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert messages == [
        "nothing can be uploaded to this process: unable to open database file",
        "this process keeps no responses: unable to open database file",
    ]


def _kinds(created: SimpleNamespace) -> set[str]:
    return {type(given).__name__ for given in created.app_of.values()}


def test_a_frontend_takes_no_memory_for_pixels_if_the_model_reads_text_only(tmp_path: Path) -> None:
    frontend, config = StartingFrontend(tmp_path), Config(mm_processor_cache_gb=1e-4)
    frontend._start = MagicMock(pixel_mode="shm")
    with closing(frontend._open_cache(config)) as cache:
        assert cache.is_any
    frontend._preparer.processor = None
    assert not frontend._open_cache(config).is_any
    assert not any(tmp_path.iterdir())


def test_a_frontend_does_not_start_with_another_model_than_the_server_s(tmp_path: Path) -> None:
    files = dict(list_files(checkpoint_path()))
    weights = str(checkpoint_path() / "model.safetensors")
    num_bytes, written_at = files[weights]
    files[weights] = num_bytes, written_at + 1
    start = StartFrontend({}, str(tmp_path), "none", "frontend-1", "demo", files, identify_program(), listener_fd=-1)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: was changed since the server started"):
        FrontendProcess(start)
