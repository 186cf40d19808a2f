"""One of several commands, with its summary where they are listed and at the head of its own help."""

import argparse
from typing import TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_command(commands: Commands, name: str, summary: str, *more: str) -> argparse.ArgumentParser:
    """`summary` as argparse lists commands: begun small, without a full stop.  Its own help alone tells `more`."""
    sentence = f"{summary[0].upper()}{summary[1:]}."
    return commands.add_parser(name, help=summary, description=" ".join((sentence, *more)))
