"""Matrix products on the CPU with packed weights: Keepsight's own, and oneDNN's as torch offers them.

    PYTHONPATH=. python benchmarks/products.py [--rows 1 8 34 290 1024] [--shapes 2048x640 10240x2560]

Four weights of each shape in turn, so that they are read from the same level of memory as a model's.  Printed are the
GFLOP/s of all cores in the best of several rounds; "rounded" rows are converted to bfloat16 for the product, by
Keepsight within it, for oneDNN before it.  With int8, each output has a scale.
"""

import argparse
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from keepsight.models.cpu_products import Panels, multiplies_bfloat16
from keepsight.models.quantize_rows import quantize_rows

NUM_WEIGHTS, ROUNDS, SECONDS = 4, 5, 0.2
# oneDNN chooses a layout for this many rows, which works for any number.
EXPECTED_ROWS = 128


def best_seconds(products: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Return each product's best time, measured in turn, as these machines have slow minutes."""
    best = dict.fromkeys(products, float("inf"))
    for _ in range(ROUNDS):
        for name, multiply in products.items():
            multiply()
            begun = time.perf_counter()
            while time.perf_counter() - begun < SECONDS / ROUNDS:
                start = time.perf_counter()
                multiply()
                best[name] = min(best[name], time.perf_counter() - start)
    return best


def by_onednn(weights: list[Tensor], hidden: Tensor) -> Callable[[], object]:
    ops = torch.ops.mkldnn
    packed = [ops._reorder_linear_weight(weight, EXPECTED_ROWS) for weight in weights]
    return lambda: [ops._linear_pointwise(hidden, weight, None, "none", [], "") for weight in packed]


def by_panels(weights: list[Tensor], hidden: Tensor, *, rounds_rows: bool = False) -> Callable[[], object]:
    panels = [Panels(weight, None, rounds_rows=rounds_rows) for weight in weights]
    return lambda: [each.multiply(hidden) for each in panels]


def by_int8(weights: list[Tensor], hidden: Tensor, *, rounds_rows: bool = False) -> Callable[[], object]:
    panels = []
    for weight in weights:
        quantized, scales = torch.empty(weight.shape, dtype=torch.int8), torch.empty(len(weight))
        quantize_rows(quantized, scales, weight)
        panels.append(Panels(quantized, None, scales=scales, rounds_rows=rounds_rows))
    return lambda: [each.multiply(hidden) for each in panels]


def measure(num_outputs: int, num_inputs: int, num_rows: int) -> dict[str, float]:
    weights = [torch.randn(num_outputs, num_inputs) for _ in range(NUM_WEIGHTS)]
    halves, hidden = [weight.bfloat16() for weight in weights], torch.randn(num_rows, num_inputs)
    products = {
        "float32": by_panels(weights, hidden),
        "float32, oneDNN": by_onednn(weights, hidden),
        "float32 by bfloat16": by_panels(halves, hidden),
        "float32 by int8": by_int8(weights, hidden),
    }
    if multiplies_bfloat16():
        products["rounded"] = by_panels(halves, hidden, rounds_rows=True)
        products["rounded by int8"] = by_int8(weights, hidden, rounds_rows=True)
        products["rounded, oneDNN"] = by_onednn(halves, hidden.bfloat16())
    operations = 2e-9 * NUM_WEIGHTS * num_outputs * num_inputs * num_rows
    return {name: operations / seconds for name, seconds in best_seconds(products).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 34, 290, 1024])
    parser.add_argument("--shapes", nargs="+", default=["2048x640", "576x2152", "10240x2560"], help="outputs x inputs")
    given = parser.parse_args()
    for shape in given.shapes:
        num_outputs, num_inputs = map(int, shape.split("x"))
        for num_rows in given.rows:
            rates = measure(num_outputs, num_inputs, num_rows)
            if (shape, num_rows) == (given.shapes[0], given.rows[0]):
                print("| weight | rows |", " | ".join(rates), "|")
                print("|---|---|" + "---|" * len(rates))
            print(f"| {shape} | {num_rows} |", " | ".join(f"{rate:.0f}" for rate in rates.values()), "|", flush=True)


if __name__ == "__main__":
    main()
