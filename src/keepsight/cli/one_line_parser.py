"""A parser that reports an invalid command line in one line, like all other errors, without listing all options.

Options cannot be abbreviated: a prefix may be another server's option. Subcommands' parsers are of this class, too.
"""

import argparse
from typing import Any, NoReturn


def flag_of(name: str) -> str:
    """Return the flag that is typed for an argument that has this name once it is parsed."""
    return f"--{name.replace('_', '-')}"


class OneLineParser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")
