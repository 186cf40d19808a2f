"""`keepsight cache`: show what caches hold, and what they would gain from another policy or more memory."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from keepsight.cli import cache_contents, cache_pins
from keepsight.cli.add_command import add_command
from keepsight.config import GIB, MOST_GIB
from keepsight.errors import InvalidArgumentError
from keepsight.tiers.policies import POLICIES
from keepsight.tiers.simulate import distinct_bytes, offline_bound, simulate, simulate_belady
from keepsight.tiers.trace import Access, read_trace

_SHARES = (0.05, 0.1, 0.2, 0.4, 0.8)
_MULTIPLES = (0.5, 1, 2, 4, 8)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="cache_command", required=True, metavar="COMMAND")
    summary = "show what each policy would have saved on a recorded trace, with less and more memory"
    simulator = add_command(commands, "simulate", summary)
    simulator.add_argument("trace", type=Path, metavar="TRACE", help="a file written by --record-cache-trace")
    simulator.add_argument(
        "--cache-gb",
        type=float,
        help="GiB around which to compare sizes (default: shares of all entries in the trace)",
    )
    cache_contents.add_commands(commands)
    cache_pins.add_commands(commands)


def run(arguments: argparse.Namespace) -> int:
    if arguments.cache_command in cache_pins.COMMANDS:
        return cache_pins.run(arguments)
    if arguments.cache_command != "simulate":
        return cache_contents.run(arguments)
    trace = list(read_trace(arguments.trace))
    if not trace:
        raise InvalidArgumentError("trace", f"{arguments.trace} is empty")
    if arguments.cache_gb is not None and not 0 < arguments.cache_gb <= MOST_GIB:
        raise InvalidArgumentError("--cache-gb", f"must be above 0 and at most {MOST_GIB}, not {arguments.cache_gb:g}")
    print(_describe(trace))
    for row in table(trace, _budgets(trace, arguments.cache_gb)):
        print(f"{row[0]:<14}" + "".join(f"{cell:>14}" for cell in row[1:]))
    return 0


def table(trace: Sequence[Access], budgets: Sequence[int]) -> list[list[str]]:
    """Return the share of seconds saved, by policy and memory. `belady` and `bound` know the future."""
    rows = [["memory", *(f"{budget / GIB:.3g} GiB" for budget in budgets)]]
    rows += [[name, *(f"{simulate(trace, name, budget):.1%}" for budget in budgets)] for name in POLICIES]
    rows.append(["belady", *(f"{simulate_belady(trace, budget):.1%}" for budget in budgets)])
    rows.append(["bound", *(f"{offline_bound(trace, budget):.1%}" for budget in budgets)])
    return rows


def _describe(trace: Sequence[Access]) -> str:
    num_keys = len({access.key for access in trace})
    seconds = sum(access.seconds for access in trace)
    return (
        f"{len(trace)} uses of {num_keys} entries, {distinct_bytes(trace) / GIB:.3g} GiB, "
        f"{seconds:.1f} s without a cache; the share of that which is saved:"
    )


def _budgets(trace: Sequence[Access], cache_gb: float | None) -> list[int]:
    if cache_gb is not None:
        return [max(1, int(multiple * cache_gb * GIB)) for multiple in _MULTIPLES]
    return [max(1, int(share * distinct_bytes(trace))) for share in _SHARES]
