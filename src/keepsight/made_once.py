"""An attribute that is computed on first access and then kept.

Like `functools.cached_property`, without its lock, which until Python 3.12 is shared by all objects of a class: in a
process forked while any thread computes such a value, the lock stays locked, and objects would wait forever.
Without a lock, concurrent first accesses may compute the value several times.
"""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class made_once(Generic[T]):  # noqa: N801
    def __init__(self, make: Callable[[Any], T]) -> None:
        self._make = make

    def __get__(self, instance: object, _owner: type) -> T:
        """Compute the value and store it in the object under the same name, which bypasses this from then on."""
        value = instance.__dict__[self._make.__name__] = self._make(instance)
        return value
