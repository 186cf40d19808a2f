"""A value that an object makes when it is first asked for, and has from then on.

As `functools.cached_property`, without its lock, which until Python 3.12 is one for all objects of a class: a process
that is forked while any thread makes such a value gets it locked, and its own objects would wait for ever.
Knows no threads: an object that several ask at once may make its value several times.
"""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class made_once(Generic[T]):  # noqa: N801
    def __init__(self, make: Callable[[Any], T]) -> None:
        self._make = make

    def __get__(self, instance: object, _owner: type) -> T:
        """Asked only until the object has it among its own attributes, under the same name."""
        value = instance.__dict__[self._make.__name__] = self._make(instance)
        return value
