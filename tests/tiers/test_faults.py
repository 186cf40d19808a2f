"""Under any fault of a tier: at worst a miss, never wrong bytes, every load answered, budgets kept."""

from pathlib import Path

import pytest

from tests.scheduling.long_run import LONG_FACTOR
from tests.tiers.faults import Faults


@pytest.mark.parametrize("seed", range(2))
def test_random_faults_of_everything(tmp_path: Path, seed: int) -> None:
    faults = Faults(tmp_path, seed)
    try:
        faults.run(120 * LONG_FACTOR)
    finally:
        faults.close()
    assert faults.answers["right"] > 0
    assert faults.answers["absent"] > 0
