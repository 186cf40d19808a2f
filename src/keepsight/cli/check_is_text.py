"""Checks that typed text is UTF-8: other bytes arrive as lone surrogates, which can be neither sent nor printed."""

import argparse
import json

from keepsight.cli.one_line_parser import flag_of
from keepsight.errors import InvalidArgumentError


def check_is_text(value: object, name: str) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InvalidArgumentError(name, "is not UTF-8") from None


def check_arguments_are_text(arguments: argparse.Namespace) -> None:
    for name, value in vars(arguments).items():
        check_is_text(value, flag_of(name))
