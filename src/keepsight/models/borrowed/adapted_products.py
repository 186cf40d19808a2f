"""Adapters of a borrowed model: what each adds to products of transformers' modules, for the rows of its own requests.

A linear layer of the decoder can be adapted if it is given the step's tokens, a row for each, in their order. Whether
it is, is observed while the model is proven: experts, for example, are given some of the tokens. Which rows a layer is
given is a context variable, as steps may be computed on two threads.
"""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from keepsight.models.adapter_weights import AdaptedRows, AdapterWeights, LowRank

# Parts of modules' names that depend on the version of transformers with which an adapter was made.
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:language_model|model)\.")
# A layer's number: what comes from here on is the same in all versions.
_NUMBER = re.compile(r"(?<=\.)(?=[0-9]+\.)")


class _Rows(NamedTuple):
    """Of the tokens that are computed now."""

    number: int
    adapted: Sequence[AdaptedRows]

    def take(self, numbers: Sequence[int]) -> "_Rows":
        return _Rows(len(numbers), self._take_adapted(numbers) if self.adapted else ())

    def _take_adapted(self, numbers: Sequence[int]) -> Sequence[AdaptedRows]:
        owners: list[AdapterWeights | None] = [None] * self.number
        for first, end, weights in self.adapted:
            owners[first:end] = [weights] * (end - first)
        found, first = list[AdaptedRows](), 0
        for owner, run in itertools.groupby(owners[number] for number in numbers):
            end = first + len(list(run))
            if owner is not None:
                found.append(AdaptedRows(first, end, owner))
            first = end
        return found


_rows: ContextVar[_Rows | None] = ContextVar("rows", default=None)


@contextmanager
def computing_rows(number: int, adapted: Sequence[AdaptedRows]) -> Iterator[None]:
    """Until it is left, layers are given the rows of a step, some of them with adapters."""
    with _giving(_Rows(number, adapted)):
        yield


@contextmanager
def taking_rows(numbers: Sequence[int]) -> Iterator[None]:
    """Until it is left, layers are given only these of the rows."""
    now = _rows.get()
    with _giving(None if now is None else now.take(numbers)):
        yield


@contextmanager
def _giving(rows: _Rows | None) -> Iterator[None]:
    token = _rows.set(rows)
    try:
        yield
    finally:
        _rows.reset(token)


@dataclass(frozen=True, slots=True, eq=False)
class AdaptableProduct:
    name: str
    linear: nn.Linear

    @property
    def in_features(self) -> int:
        return self.linear.in_features

    @property
    def outputs(self) -> Mapping[str, int]:
        return {"": self.linear.out_features}


class AdaptableProducts:
    """The linear layers of a decoder that adapters may change."""

    def __init__(self, modules: nn.Module, decoder: nn.Module) -> None:
        """`modules`: the whole model, by whose names adapters name the layers."""
        of_decoder = {module for module in decoder.modules() if type(module) is nn.Linear}
        named = (AdaptableProduct(name, each) for name, each in modules.named_modules() if each in of_decoder)
        self._by_name = {_unwrap(product.name): product for product in named}
        assert len(self._by_name) == len(of_decoder), "two layers have one name"
        # Those that were adapted before.
        self._changed = set[AdaptableProduct]()

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Keep only those layers that are given the rows of each step that is computed meanwhile."""
        given, given_others = set[nn.Module](), set[nn.Module]()

        def note(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            if (rows := _rows.get()) is not None:
                is_right = len(inputs) == 1 and inputs[0].shape[:-1].numel() == rows.number
                (given if is_right else given_others).add(module)

        hooks = [product.linear.register_forward_pre_hook(note) for product in self._by_name.values()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        fit = given - given_others
        self._by_name = {name: product for name, product in self._by_name.items() if product.linear in fit}

    def find(self, module: str) -> tuple[AdaptableProduct, str] | None:
        """Return the product of a module, by its name in an adapter; None if it cannot be adapted."""
        product = self._by_name.get(_unwrap(module))
        return None if product is None else (product, "")

    def add(self, terms: Mapping[AdaptableProduct, LowRank]) -> Mapping[str, LowRank]:
        """Return an adapter's terms by name. From now on the products add them to rows that have the adapter."""
        for product in terms:
            if product not in self._changed:
                self._changed.add(product)
                _let_add(product)
        return {product.name: term for product, term in terms.items()}


def _unwrap(name: str) -> str:
    wrapped, *numbered = _NUMBER.split(name, maxsplit=1)
    return "".join((_WRAPPERS.sub("", wrapped), *numbered))


def _let_add(product: AdaptableProduct) -> None:
    compute = product.linear.forward

    def computed(hidden: Tensor) -> Tensor:
        sums = compute(hidden)
        if (rows := _rows.get()) is not None and rows.adapted:
            _add_terms(product.name, rows, hidden.flatten(0, -2), sums.view(-1, sums.shape[-1]))
        return sums

    product.linear.forward = computed  # type: ignore[method-assign,assignment]


def _add_terms(name: str, rows: _Rows, hidden: Tensor, sums: Tensor) -> None:
    assert len(hidden) == rows.number, f"{name} is given {len(hidden)} rows of {rows.number}"
    for first, end, weights in rows.adapted:
        if (own := weights.layers[0].get(name)) is None:
            continue
        if sums.dtype is own.dtype:
            own.add_to(sums[first:end], hidden[first:end])
        else:  # a router may be kept in float32
            sums[first:end] += own.compute(hidden[first:end].to(own.dtype))
