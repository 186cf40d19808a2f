"""What can be seen of a whole server, by whichever of its frontends is asked."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from keepsight.observe.account import AccountBody
from keepsight.observe.account_ring import read_rings
from keepsight.observe.totals import Totals


@dataclass(frozen=True, slots=True)
class ServerView:
    """By itself it sees nothing."""

    read_totals: Callable[[], Totals] = Totals
    # Of requests that have ended, the last first.
    read_accounts: Callable[[], list[AccountBody]] = list

    @classmethod
    def of_server(cls, run_directory: Path, common: Callable[[], Mapping[int, float]]) -> "ServerView":
        """`common`: gauges of what all processes have together."""
        return cls(
            lambda: Totals.of_server(run_directory).set_gauges(common()),
            lambda: read_rings(run_directory),
        )
