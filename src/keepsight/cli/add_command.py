"""Adds a subcommand, with its summary in the list of commands and at the head of its own help."""

import argparse
from typing import TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_command(commands: Commands, name: str, summary: str, *more: str) -> argparse.ArgumentParser:
    """`summary` is in argparse's style: lowercase, without a period. Only the command's own help shows `more`."""
    sentence = f"{summary[0].upper()}{summary[1:]}."
    return commands.add_parser(name, help=summary, description=" ".join((sentence, *more)))
