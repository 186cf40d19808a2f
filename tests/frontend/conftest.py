"""Fixtures: the demo's frontend, and the API in process with a fake engine."""

import pytest

from keepsight.config import Config
from keepsight.frontend.prepare_request import RequestPreparer
from tests.frontend.api.app_client import Client, FakeEngine


@pytest.fixture(scope="module")
def preparer() -> RequestPreparer:
    return RequestPreparer.from_config(Config())


@pytest.fixture
def engine(preparer: RequestPreparer) -> FakeEngine:
    return FakeEngine(preparer)


@pytest.fixture
def client(preparer: RequestPreparer, engine: FakeEngine) -> Client:
    return Client(preparer, engine)
