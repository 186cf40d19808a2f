"""Checks what was typed: that text is UTF-8, and that numbers are not below their minimum."""

import argparse
import json
import math
from collections.abc import Mapping

from keepsight.cli.one_line_parser import flag_of
from keepsight.errors import InvalidArgumentError


def check_is_text(value: object, name: str) -> None:
    """Raise if other bytes than UTF-8 were typed: as lone surrogates they can be neither sent nor printed."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InvalidArgumentError(name, "is not UTF-8") from None


def check_arguments_are_text(arguments: argparse.Namespace) -> None:
    for name, value in vars(arguments).items():
        check_is_text(value, flag_of(name))


def check_minimums(arguments: argparse.Namespace, least: Mapping[str, int]) -> None:
    """Raise if a flag is below its minimum; flags that the command lacks are ignored."""
    for name, lowest in least.items():
        value = getattr(arguments, name, lowest)
        if not lowest <= value < math.inf:
            needed = f"at least {lowest}" if math.isfinite(value) else "a finite number"
            raise InvalidArgumentError(flag_of(name), f"must be {needed}, not {value}")
