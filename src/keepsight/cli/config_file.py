"""`keepsight serve --config FILE`: flags from a YAML file.

Each entry becomes the words that would be typed, so it is read and refused as these are. Typed flags replace entries.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from keepsight.cli.one_line_parser import OneLineParser, flag_of
from keepsight.errors import InvalidArgumentError


def add_config_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help="a YAML file of flags, such as `port: 8001`; typed flags win")


def fill_from_file(
    parsed: argparse.Namespace, add_arguments: Callable[[argparse.ArgumentParser], None], typed: Sequence[str]
) -> None:
    """Add what the file `parsed.config` has to what was typed. `add_arguments` adds all that both may say."""
    reader = _FileReader(prog=parsed.config, add_help=False)
    add_arguments(reader)
    given = reader.find_given([*reader.spell(_read(parsed.config))])
    add_config_file(reader)
    is_typed = reader.find_given(typed)
    for name, value in given.items():
        if name not in is_typed:
            setattr(parsed, name, value)


class _FileReader(OneLineParser):
    """A parser whose errors are those of the file that it is named after."""

    def error(self, message: str) -> NoReturn:
        raise InvalidArgumentError(self.prog, message)

    def find_given(self, words: Sequence[str]) -> dict[str, Any]:
        """Return the values that the words give, without any default."""
        nothing = dict.fromkeys((action.dest for action in self._actions), None)
        given = vars(self.parse_args(words, argparse.Namespace(**nothing)))
        return {name: value for name, value in given.items() if value is not None}

    def spell(self, entries: dict[Any, Any]) -> Iterator[str]:
        """Yield the words of each entry. The model is first, as flags with several values would take it for one."""
        if "model" in entries:
            yield self._as_own_word("model", entries["model"])
        for key, value in entries.items():
            if key != "model":
                yield from self._spell(key, value)

    def _spell(self, key: object, value: object) -> Iterator[str]:
        flag = flag_of(str(key))
        action = self._option_string_actions.get(flag)
        if "=" in flag:
            self.error(f"{key}: is not an option")
        elif action is None:
            yield flag  # which is refused, with what to write in its place
        elif isinstance(value, bool) and action.nargs == 0:
            if not value and isinstance(action, argparse.BooleanOptionalAction):
                yield f"--no-{flag.removeprefix('--')}"
            elif value:
                yield flag
        elif value is True and action.nargs == "?":
            yield flag
        elif isinstance(value, list) and action.nargs == "+":
            yield from (flag, *(self._as_own_word(key, each) for each in value))
        else:
            yield f"{flag}={self._as_word(key, value)}"

    def _as_own_word(self, key: object, value: object) -> str:
        """Return a word that stands alone, where one with a dash would be taken for a flag."""
        word = self._as_word(key, value)
        if word.startswith("-"):
            self.error(f"{key}: cannot begin with a dash")
        return word

    def _as_word(self, key: object, value: object) -> str:
        if value is None or isinstance(value, bool | list):
            self.error(f"{key}: cannot be {'empty' if value is None else json.dumps(value, default=str)}")
        return json.dumps(value, default=str) if isinstance(value, dict) else str(value)


def _read(path: str) -> dict[Any, Any]:
    import yaml  # here, as most servers have no such file

    def as_written(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> object:
        """Return a number only if it is written as this one is: a key 0123 and a name 1.10 are texts, as is a date."""
        text = str(loader.construct_scalar(node))
        try:
            number = json.loads(text)
        except ValueError:
            return text
        return number if str(number) == text else text

    def each_once(loader: yaml.SafeLoader, node: yaml.MappingNode) -> object:
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.MarkedYAMLError(problem=f"{key} is given twice", problem_mark=node.start_mark)
        return loader.construct_mapping(node, deep=True)

    loader: Any = type("Loader", (yaml.SafeLoader,), {})
    for kind in ("int", "float", "timestamp"):
        loader.add_constructor(f"tag:yaml.org,2002:{kind}", as_written)
    loader.add_constructor("tag:yaml.org,2002:map", each_once)
    try:
        entries = yaml.load(Path(path).read_text(encoding="utf-8"), loader)
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(path, f"cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except yaml.YAMLError as error:
        raise InvalidArgumentError(path, f"is not YAML: {' '.join(str(error).split())}") from error
    if entries is None:
        return {}
    if not isinstance(entries, dict):
        raise InvalidArgumentError(path, "must have lines such as `port: 8001`")
    return entries
