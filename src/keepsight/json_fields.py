"""Typed reading of a checkpoint's JSON files: every refusal names the file, the field and the value.

A `JsonFields` is one object of the file; `section()` steps into a nested one and remembers the way.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from keepsight.errors import CheckpointConfigError


class JsonFields:
    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.path = path
        self._values = values
        self._prefix = prefix

    @classmethod
    def read(cls, path: Path) -> "JsonFields":
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointConfigError(path, "no such file") from None
        except (OSError, ValueError) as error:
            raise CheckpointConfigError(path, f"not readable as JSON: {error}") from error
        if not isinstance(values, dict):
            raise CheckpointConfigError(path, f"must hold a JSON object, not {type(values).__name__}")
        return cls(path, values)

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def refuse(self, name: str, message: str) -> CheckpointConfigError:
        return CheckpointConfigError(self.path, f"{self._prefix}{name}: {message}")

    def section(self, name: str) -> "JsonFields":
        value = self._values.get(name) or {}
        if not isinstance(value, Mapping):
            raise self.refuse(name, f"must be an object, not {value!r}")
        return JsonFields(self.path, value, f"{self._prefix}{name}.")

    def integer(self, name: str, default: int | None = None, *, minimum: int = 1) -> int:
        value = self._get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.refuse(name, f"must be an integer of at least {minimum}, not {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number."""
        value = self._get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
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

    def values(self) -> list[Any]:
        return list(self._values.values())

    def strings(self, name: str) -> tuple[str, ...]:
        value = self._values.get(name) or ()
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise self.refuse(name, f"must be a list of strings, not {value!r}")
        return tuple(value)

    def _get(self, name: str, default: Any) -> Any:
        value = self._values.get(name)
        if value is not None:
            return value
        if default is None:
            raise self.refuse(name, "is missing")
        return default
