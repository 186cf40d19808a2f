"""Errors can be pickled, so they pass through process pools."""

import pickle
from collections.abc import Iterator
from copy import copy

import pytest

from keepsight.errors import InvalidArgumentError, KeepsightError


def kinds_of(error: type[KeepsightError]) -> Iterator[type[KeepsightError]]:
    yield error
    for each in error.__subclasses__():
        yield from kinds_of(each)


@pytest.mark.parametrize("kind", list(kinds_of(KeepsightError)))
def test_every_kind_of_error_survives_pickling_and_copying(kind: type[KeepsightError]) -> None:
    error = kind.__new__(kind, "prompt: is empty")
    error.__dict__.update(field="prompt", status=418)
    for other in (pickle.loads(pickle.dumps(error)), copy(error)):
        assert (type(other), str(other), vars(other)) == (kind, "prompt: is empty", {"field": "prompt", "status": 418})


def test_an_error_s_field_and_item_survive_pickling() -> None:
    error = InvalidArgumentError("prompt", "is empty")
    error.item = 2
    other = pickle.loads(pickle.dumps(error))
    assert (str(other), other.field, other.message, other.item) == ("prompt: is empty", "prompt", "is empty", 2)
