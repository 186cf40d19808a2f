"""The checkpoint's small JSON files, read so that every fault names the file and the field.

Knows nothing of what the fields mean.
"""

import json
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
    """Empty where there is no such file; a broken one is still an error."""
    return read_json_object(path) if path.exists() else {}


def get_optional_int(path: Path, values: dict[str, Any], *names: str) -> int | None:
    """The first of `names` that is present and not null."""
    for name in names:
        value = values.get(name)
        if value is not None:
            return check_is_count(path, name, value)
    return None


def check_is_count(path: Path, name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise CheckpointConfigError(path, f"{name}: must be an integer of at least 0, not {value!r}")
    return value
