"""Says which of several prompts or conversations an error is in, naming the field as the caller would write it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from keepsight.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class ListedItems:
    argument: str  # the name of the argument that holds the items
    number: int
    # Other arguments, which apply to all items.
    shared: tuple[str, ...] = ()
    # Other arguments, which are lists with a value for each item.
    beside: tuple[str, ...] = ("priority",)

    @contextmanager
    def naming(self, index: int) -> Iterator[None]:
        try:
            yield
        except InvalidArgumentError as error:
            named = type(error)(self._place(index, error.field), error.message)
            named.item = index
            raise named from error

    def _place(self, index: int, field: str) -> str:
        """Return the full path of a field: `messages[0].role` of the second conversation is `messages[1][0].role`."""
        if field in self.beside:
            return f"{field}[{index}]"
        if self.number == 1 or field.startswith(self.shared):
            return field
        own = field.removeprefix(self.argument) if field.startswith(self.argument) else f".{field}"
        return f"{self.argument}[{index}]{own}"
