"""Fixtures: a small model, and a runner of it."""

from collections.abc import Iterator

import pytest

from tests.runner.small_model import Driver, SmallModel


@pytest.fixture(scope="module")
def one_small(tmp_path_factory: pytest.TempPathFactory) -> SmallModel:
    return SmallModel(5, tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def one(one_small: SmallModel) -> Iterator[Driver]:
    driver = Driver(one_small)
    yield driver
    driver.runner.close()
