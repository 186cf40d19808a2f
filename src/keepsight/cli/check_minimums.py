"""Checks numeric flags against their minimum."""

import argparse
import math
from collections.abc import Mapping

from keepsight.cli.one_line_parser import flag_of
from keepsight.errors import InvalidArgumentError


def check_minimums(arguments: argparse.Namespace, least: Mapping[str, int]) -> None:
    """Raise if a flag is below its minimum; flags that the command lacks are ignored."""
    for name, lowest in least.items():
        value = getattr(arguments, name, lowest)
        if not lowest <= value < math.inf:
            needed = f"at least {lowest}" if math.isfinite(value) else "a finite number"
            raise InvalidArgumentError(flag_of(name), f"must be {needed}, not {value}")
