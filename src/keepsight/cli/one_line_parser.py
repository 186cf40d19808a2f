"""A parser that reports an invalid command line in one line, like all other errors, without listing all options.

Options cannot be abbreviated: a prefix may be another server's option. Subcommands' parsers are of this class, too.
"""

import argparse
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from keepsight.other_options import explain_option


def flag_of(name: str) -> str:
    """Return the flag that is typed for an argument that has this name once it is parsed."""
    return f"--{name.replace('_', '-')}"


class OneLineParser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse unknown flags in the name of the subcommand that they were typed for, which argparse does not do."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error("; ".join((f"unrecognized arguments: {' '.join(unknown)}", *self._explain(unknown))))
        return parsed, unknown

    def _explain(self, unknown: Sequence[str]) -> Iterator[str]:
        """Yield what to type in place of each flag, as far as it is known."""
        known = [flag.lstrip("-").replace("-", "_") for flag in self._option_string_actions]
        for flag in (each.partition("=")[0] for each in unknown if each.startswith("-")):
            if hint := explain_option(flag.lstrip("-").replace("-", "_"), known, spell=flag_of):
                yield f"{flag}: {hint}"
