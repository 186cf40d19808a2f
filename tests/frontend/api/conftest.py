from collections.abc import Iterator
from pathlib import Path

import pytest

from keepsight.api_settings import ApiSettings
from keepsight.frontend.intake.media_handles import MediaHandles
from keepsight.frontend.prepare_request import RequestPreparer
from tests.frontend.api.media_server import QUOTA, KeepingEngine, Server


@pytest.fixture
def server(preparer: RequestPreparer, tmp_path: Path) -> Iterator[Server]:
    handles = MediaHandles(tmp_path, QUOTA)
    yield Server(preparer, KeepingEngine(preparer), handles, ApiSettings())
    handles.check_invariants()
    handles.close()


@pytest.fixture
def shared(server: Server) -> Server:
    """A server with two API keys."""
    server.settings = ApiSettings(api_keys=("ours", "theirs"))
    return server
