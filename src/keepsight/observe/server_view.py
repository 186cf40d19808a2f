"""The view of a whole server that any of its frontends can report."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from keepsight.observe.account import AccountBody
from keepsight.observe.account_ring import read_rings
from keepsight.observe.totals import Totals


@dataclass(frozen=True, slots=True)
class ServerView:
    """The default instance sees nothing."""

    read_totals: Callable[[], Totals] = Totals
    # Accounts of requests that have ended, newest first.
    read_accounts: Callable[[], list[AccountBody]] = list

    @classmethod
    def of_server(cls, run_directory: Path, common: Callable[[], Mapping[int, float]]) -> "ServerView":
        """`common` returns gauges of resources that all processes share."""
        return cls(
            lambda: Totals.of_server(run_directory).set_gauges(common()),
            lambda: read_rings(run_directory),
        )
