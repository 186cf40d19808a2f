"""A command line that makes no sense is told in one line, as all else that is wrong is, and not behind all options.

The beginning of an option's name is none: it may be another server's option.  Commands' parsers are of this class too.
"""

import argparse
from typing import Any, NoReturn


def flag_of(name: str) -> str:
    """What is typed for an argument that has this name once it is parsed."""
    return f"--{name.replace('_', '-')}"


class OneLineParser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")
