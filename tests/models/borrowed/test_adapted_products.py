"""Adapters of transformers' modules: each adds to the rows of its own requests, wherever a layer is given these."""

from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor, nn

from keepsight.models.adapter_weights import AdaptedRows, AdapterWeights, LowRank
from keepsight.models.borrowed.adapted_products import AdaptableProducts, computing_rows, taking_rows
from keepsight.models.layers import Placement

PLACE = Placement(torch.device("cpu"), torch.float32)
WIDTH = 4


class Decoder(nn.Module):
    """Of its layers one is given all tokens, one some of them, one all in their order and once more, one nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.every, self.some, self.twice, self.never = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, hidden: Tensor) -> Tensor:
        self.some(hidden[:, 1:])
        self.twice(torch.cat((hidden, hidden)))
        return self.every(hidden)  # type: ignore[no-any-return]


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model, self.head = Decoder(), nn.Linear(WIDTH, WIDTH)


def observed() -> tuple[Whole, AdaptableProducts]:
    whole = Whole()
    products = AdaptableProducts(whole, whole.model)
    with products.observing():
        whole.model(torch.zeros(1, 7, WIDTH))  # outside of a step
        for number in (3, 1):
            with computing_rows(number, ()):
                whole.model(torch.zeros(1, number, WIDTH))
    return whole, products


def adapter_of(products: AdaptableProducts, value: float, place: Placement = PLACE) -> tuple[AdapterWeights, Tensor]:
    """Return an adapter of the first layer, and the matrix that it adds."""
    found = products.find("every")
    assert found is not None
    down, up = torch.full((1, WIDTH), value), torch.ones(WIDTH, 1)
    terms: Mapping[str, LowRank] = products.add({found[0]: LowRank(place, down, up)})
    return AdapterWeights([terms]), up @ down


@pytest.mark.parametrize("name", ["model.every", "language_model.model.every", "model.language_model.every", "every"])
def test_a_layer_is_found_by_the_names_that_versions_of_transformers_give_it(name: str) -> None:
    whole, products = observed()
    found = products.find(name)
    assert found is not None
    assert found[0].linear is whole.model.every


class OfLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.text_model = nn.Module()
        self.text_model.model = nn.Module()
        self.text_model.model.layers = nn.ModuleList([Decoder()])


def test_within_a_layer_only_its_own_names_are_known() -> None:
    products = AdaptableProducts(modules := OfLayers(), modules.text_model)
    assert products.find("text_model.layers.0.every") == products.find("model.text_model.model.layers.0.every")
    assert products.find("text_model.layers.0.every") is not None
    assert products.find("text_model.layers.0.model.every") is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_layer_that_is_kept_in_another_precision_is_adapted_in_its_own(dtype: torch.dtype) -> None:
    whole, products = observed()
    adapter, added = adapter_of(products, 1.0, Placement(torch.device("cpu"), dtype))
    hidden = torch.ones(1, 2, WIDTH)
    with computing_rows(2, [AdaptedRows(1, 2, adapter)]):
        adapted = whole.model.every(hidden)
    assert adapted.dtype is torch.float32
    torch.testing.assert_close(adapted[0, 1], whole.model.every(hidden)[0, 1] + hidden[0, 1] @ added.T)


@pytest.mark.parametrize("name", ["model.some", "model.twice", "model.never", "head", "model.any_model.every"])
def test_a_layer_that_is_not_given_each_token_once_cannot_be_adapted(name: str) -> None:
    assert observed()[1].find(name) is None


def test_each_adapter_is_added_to_its_rows_alone() -> None:
    whole, products = observed()
    hidden = torch.randn(1, 6, WIDTH)
    plain = whole.model.every(hidden)
    (first, added), (second, added_by_second) = adapter_of(products, 1.0), adapter_of(products, -2.0)
    with computing_rows(6, [AdaptedRows(1, 3, first), AdaptedRows(3, 4, second)]):
        adapted = whole.model.every(hidden)
    torch.testing.assert_close(adapted[0, 1:3], plain[0, 1:3] + hidden[0, 1:3] @ added.T)
    torch.testing.assert_close(adapted[0, 3], plain[0, 3] + hidden[0, 3] @ added_by_second.T)
    assert torch.equal(adapted[0, [0, 4, 5]], plain[0, [0, 4, 5]])
    assert torch.equal(whole.model.every(hidden), plain)


@pytest.mark.parametrize("rows", [range(2), range(2, 5), range(5), [1, 3, 4]])
def test_an_adapter_follows_its_rows_where_only_some_are_computed(rows: Sequence[int]) -> None:
    whole, products = observed()
    adapter, _ = adapter_of(products, 1.0)
    hidden = torch.randn(1, 5, WIDTH)
    with computing_rows(5, [AdaptedRows(1, 2, adapter), AdaptedRows(3, 5, adapter)]):
        expected = whole.model.every(hidden)
        with taking_rows(rows):
            # As recurrent modules compute single tokens of several sequences.
            taken = whole.model.every(hidden[0, rows][:, None])
        again = whole.model.every(hidden)
    torch.testing.assert_close(taken[:, 0], expected[0, rows])
    assert torch.equal(again, expected)
