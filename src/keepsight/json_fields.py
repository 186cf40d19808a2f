"""Typed access to a checkpoint's small JSON files; every error names the file, the field and the value.

A `JsonFields` is one JSON object of a file; `section()` returns a nested one, which remembers its path.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from keepsight.errors import CheckpointConfigError


def read_json_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointConfigError(path, f"cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # bad UTF-8 and bad JSON are both ValueErrors
        raise CheckpointConfigError(path, f"is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointConfigError(path, f"must hold a JSON object, not {type(value).__name__}")
    return value


def read_optional_json_object(path: Path) -> dict[str, Any]:
    """Return {} if there is no such file; a malformed one is still an error."""
    return read_json_object(path) if path.exists() else {}


def get_optional_int(path: Path, values: Mapping[str, Any], *names: str) -> int | None:
    """Return the first of `names` that is present and not null."""
    for name in names:
        value = values.get(name)
        if value is not None:
            return check_is_count(path, name, value)
    return None


def check_is_count(path: Path, name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise CheckpointConfigError(path, f"{name}: must be an integer of at least 0, not {value!r}")
    return value


class JsonFields:
    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.path = path
        self._values = values
        self._prefix = prefix

    @classmethod
    def read(cls, path: Path) -> "JsonFields":
        return cls(path, read_json_object(path))

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def refuse(self, name: str, message: str) -> CheckpointConfigError:
        return CheckpointConfigError(self.path, f"{self._prefix}{name}: {message}")

    def section(self, name: str) -> "JsonFields":
        value = self._values.get(name) or {}
        if not isinstance(value, Mapping):
            raise self.refuse(name, f"must be an object, not {value!r}")
        return JsonFields(self.path, value, f"{self._prefix}{name}.")

    def sections(self) -> "list[JsonFields]":
        return [self.section(name) for name, value in self._values.items() if isinstance(value, Mapping)]

    def integer(self, name: str, default: int | None = None) -> int:
        """Return a positive integer."""
        value = self._get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.refuse(name, f"must be an integer of at least 1, not {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a positive number."""
        value = self._get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
            raise self.refuse(name, f"must be a positive number, not {value!r}")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        return self.number(name) if name in self else None

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.refuse(name, f"must be true or false, not {value!r}")
        return value

    def choice(self, name: str, choices: Sequence[str], default: str | None = None) -> str:
        value = self._get(name, default)
        if value not in choices:
            raise self.refuse(name, f"must be one of {', '.join(choices)}, not {value!r}")
        return str(value)

    def names(self) -> list[str]:
        return list(self._values)

    def values(self) -> list[Any]:
        return list(self._values.values())

    def text(self, name: str) -> str | None:
        value = self._values.get(name)
        if value is not None and not isinstance(value, str):
            raise self.refuse(name, f"must be a string, not {value!r}")
        return value

    def strings(self, name: str) -> tuple[str, ...]:
        value = self._values.get(name) or ()
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise self.refuse(name, f"must be a list of strings, not {value!r}")
        return tuple(value)

    def indexes(self, name: str, default: Sequence[int], length: int | None = None) -> tuple[int, ...]:
        """Return integers of at least 0. `length`: the required count."""
        value = self._get(name, default)
        if not isinstance(value, list | tuple) or length not in (None, len(value)):
            raise self.refuse(name, f"must be a list of {length or 'some'} integers, not {value!r}")
        return tuple(check_is_count(self.path, f"{self._prefix}{name}", item) for item in value)

    def get(self, name: str) -> object:
        """Return the value as it is; None if absent."""
        return self._values.get(name)

    def _get(self, name: str, default: Any) -> Any:
        value = self._values.get(name)
        if value is not None:
            return value
        if default is None:
            raise self.refuse(name, "is missing")
        return default
