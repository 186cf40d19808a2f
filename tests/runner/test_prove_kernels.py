"""Kernels that give wrong results on a machine's GPU, or do not compile there, are not used."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from keepsight.models.attention import Attention, AttentionBatch, LayerCache
from keepsight.models.borrowed.model import BorrowedModel
from keepsight.models.gpu_library import kernels_for
from keepsight.models.layers import Placement
from keepsight.models.model import Model
from keepsight.models.vision_layer import Windows
from keepsight.runner import prove_kernels as module
from keepsight.runner.prove_kernels import prove_kernels
from tests.models.borrowed import reference as borrowed
from tests.models.gpu_kernels_here import DEVICE, gpu_kernels, gpu_slices, kernels_in_use, simple_kernels_by_torch
from tests.runner.small_model import SmallModel


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    directory: Path = tmp_path_factory.mktemp("checkpoint")
    with kernels_in_use(), pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(module, "NUM_BLOCKS", 1)
        # Far enough for the work to be shared out.
        monkeypatch.setattr(module, "FAR", 1100)
        monkeypatch.setattr(module, "WINDOWS", (Windows(0, 80, 40), Windows(80, 144, 32)))
        # With a window that is wider than the prompt, and without one.
        yield SmallModel(66, directory, Placement(DEVICE, torch.float32)).model


@pytest.fixture(autouse=True)
def by_torch() -> Iterator[pytest.MonkeyPatch]:
    with simple_kernels_by_torch() as replaced:
        yield replaced


def test_kernels_that_do_what_torch_does_are_used(
    model: Model, by_torch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    by_torch.undo()
    assert_used(model, caplog)


def test_a_token_whose_embedding_is_zero_says_nothing_against_them(
    model: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    embed = model.embed_tokens
    monkeypatch.setattr(model, "embed_tokens", lambda token_ids: embed(token_ids) * (token_ids > 0)[:, None])
    assert_used(model, caplog)


def flip(rows: Tensor) -> Tensor:
    return rows.flip(-1)


def spoil(rows: Tensor) -> Tensor:
    return rows * float("nan")


KERNELS = ("norm", "add_and_norm", "place_heads", "attend_rows", "attend_slices", "gate")


@pytest.mark.parametrize(("name", "distort"), [*((each, flip) for each in KERNELS), ("place_heads", spoil)])
def test_a_kernel_with_other_numbers_is_found_out(
    model: Model,
    name: str,
    distort: Callable[[Tensor], Tensor],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    right = getattr(gpu_kernels, name)

    def wrong(*arguments: Tensor) -> Tensor | tuple[Tensor, Tensor] | None:
        result: Tensor | tuple[Tensor, Tensor] | None = right(*arguments)
        # Some kernels write to their first argument.
        rows = arguments[0] if result is None else result if isinstance(result, Tensor) else result[-1]
        rows[-1] = distort(rows[-1])
        return result

    monkeypatch.setattr(gpu_kernels, name, wrong)
    assert_not_used(model)
    assert "the kernels for the GPU are not used" in caplog.text


@pytest.mark.parametrize(
    "distort",
    [lambda rows: rows.flip(-1), lambda rows: torch.full_like(rows, torch.nan), torch.zeros_like],
    ids=["flip", "nan", "zero"],
)
def test_a_tower_s_kernel_with_other_numbers_for_one_patch_is_found_out(
    model: Model, distort: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = gpu_kernels.attend_to_all

    def wrong(heads: Tensor, attended: Tensor, *arguments: Any) -> None:
        right(heads, attended, *arguments)
        attended[-1, -1, -1] = distort(attended[-1, -1, -1])

    monkeypatch.setattr(gpu_kernels, "attend_to_all", wrong)
    assert_not_used(model)


def test_a_tower_s_kernel_that_leaves_out_what_is_behind_its_last_whole_part_is_found_out(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, num_left_out = gpu_kernels.attend_to_all, 8

    def wrong(heads: Tensor, attended: Tensor, first: int, end: int, size: int, scale: float) -> None:
        for begin in range(first, end, size):
            right(heads, attended, begin, begin + size, size, scale)
            right(heads, attended, begin, begin + size - num_left_out, size - num_left_out, scale)

    monkeypatch.setattr(gpu_kernels, "attend_to_all", wrong)
    assert_not_used(model)


def test_a_tower_s_kernel_that_turns_nothing_is_found_out(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    right = gpu_kernels.place_patches
    monkeypatch.setattr(gpu_kernels, "place_patches", lambda projected, _, heads: right(projected, None, heads))
    assert_not_used(model)


def test_a_borrowed_norm_s_kernel_is_compared_with_the_module_s_own_way(
    borrowed_model: BorrowedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = gpu_kernels.norm
    monkeypatch.setattr(gpu_kernels, "norm", lambda hidden, scale, eps: right(hidden, scale.flip(-1), eps))
    assert_not_used(borrowed_model)


def test_a_kernel_that_writes_keys_elsewhere_is_found_out(
    borrowed_model: BorrowedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = gpu_kernels.write_heads

    def wrong(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        right(key, value, keys, values, slots.flip(-1))

    monkeypatch.setattr(gpu_kernels, "write_heads", wrong)
    assert_not_used(borrowed_model)


def test_a_delta_net_s_kernel_is_compared_with_transformers_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    borrowed.make_text_checkpoint(tmp_path, "Qwen3_5ForCausalLM")
    with kernels_in_use():
        model = BorrowedModel.from_checkpoint(tmp_path, Placement(DEVICE, torch.float32))
        # Few tokens: they take long where kernels are interpreted.
        for name, number in {"FAR": 20, "BLOCK_SIZE": 8, "NUM_BLOCKS": 1, "NUM_LATER": 4}.items():
            monkeypatch.setattr(module, name, number)
        slots_of_steps = note_state_slots(model, monkeypatch)
        prove_kernels(model)
        assert kernels_for(DEVICE) is gpu_kernels
    assert max(map(len, slots_of_steps)) > 1
    assert all(len(set(slots)) == len(slots) for slots in slots_of_steps), "a race for a state"
    right = gpu_kernels.compute_delta_net

    def wrong(*given: Any) -> Tensor:
        out = right(*given)
        out[-1] = out[-1].flip(-1)
        return out

    monkeypatch.setattr(gpu_kernels, "compute_delta_net", wrong)
    assert_not_used(model)


def note_state_slots(model: BorrowedModel, monkeypatch: pytest.MonkeyPatch) -> list[list[int | None]]:
    """Return those of the slices of each step that will be computed."""
    compute, noted = model.compute, list[list[int | None]]()

    def note(
        embeddings: Tensor, attention: Attention, caches: Sequence[LayerCache], batch: AttentionBatch, **options: Any
    ) -> Tensor:
        noted.append([piece.state_slot for piece in batch.slices])
        return compute(embeddings, attention, caches, batch, **options)

    monkeypatch.setattr(model, "compute", note)
    return noted


def is_far(keys: Tensor, ends: Tensor, window: int | None) -> bool:
    """Return whether a row sees more keys than its programs hold at once."""
    sight = gpu_kernels.sight_of(keys.shape[2], keys.shape[1], keys.itemsize, window)
    return window is None and int(ends.max()) > sight["SHARES"] * sight["KEYS"]


def is_windowed(keys: Tensor, ends: Tensor, window: int | None) -> bool:
    return window is not None and int(ends.max()) > window


@pytest.mark.parametrize("is_wrong", [is_far, is_windowed])
def test_a_kernel_that_is_wrong_about_long_sequences_alone_is_found_out(
    model: Model, is_wrong: Callable[[Tensor, Tensor, int | None], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = gpu_kernels.attend_rows

    def wrong(output: Tensor, *arguments: Any) -> None:
        _, keys, _, _, ends, _, _, window, _ = arguments
        right(output, *arguments)
        if is_wrong(keys, ends, window):
            output.copy_(output.flip(-1))

    monkeypatch.setattr(gpu_kernels, "attend_rows", wrong)
    assert_not_used(model)


def is_shared_out(keys: Tensor, seen: Tensor, num_blocks: int, longest: int) -> bool:
    return gpu_slices.num_shares(num_blocks, keys.shape[1], longest) > 1


def has_other_keys_again(keys: Tensor, seen: Tensor, num_blocks: int, longest: int) -> bool:
    """True if one program alone reuses each of its buffers for other keys. Few models have a window that would do."""
    is_again = longest > gpu_slices.NUM_STAGES * gpu_slices.MOST_KEYS
    return is_again and not is_shared_out(keys, seen, num_blocks, longest) and not seen[:, 0].any()


@pytest.mark.parametrize("is_wrong", [is_shared_out, has_other_keys_again])
def test_a_kernel_that_is_wrong_about_slices_with_much_behind_them_alone_is_found_out(
    model: Model, is_wrong: Callable[[Tensor, Tensor, int, int], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = gpu_kernels.attend_slices

    def wrong(output: Tensor, *arguments: Any) -> None:
        _, keys, _, seen, _, *told, _, _ = arguments
        right(output, *arguments)
        if is_wrong(keys, seen, *told):
            output.copy_(output.flip(-1))

    monkeypatch.setattr(gpu_kernels, "attend_slices", wrong)
    assert_not_used(model)


def test_kernels_are_tried_only_at_positions_that_the_model_has(
    model: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "NUM_BLOCKS", 4)
    monkeypatch.setattr(model, "shape", replace(model.shape, max_positions=40))
    assert_used(model, caplog)


def test_kernels_that_cannot_be_compiled_are_not_used(
    model: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> Tensor:
        raise FileNotFoundError("gcc")

    monkeypatch.setattr(gpu_kernels, "place_heads", fail)
    assert_not_used(model)
    assert "FileNotFoundError: gcc" in caplog.text


def assert_used(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    with kernels_in_use():
        prove_kernels(model)
        assert kernels_for(DEVICE) is gpu_kernels
    assert not caplog.records


def assert_not_used(model: Model) -> None:
    with kernels_in_use():
        prove_kernels(model)
        assert kernels_for(DEVICE) is None


def test_a_gpu_that_a_kernel_has_lost_is_not_asked_again_and_the_way_around_is_told(
    model: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> Tensor:
        raise torch.AcceleratorError("an illegal memory access was encountered")

    monkeypatch.setattr(gpu_kernels, "norm", fail)
    with kernels_in_use(), pytest.raises(torch.AcceleratorError):
        prove_kernels(model)
    assert "--enforce-eager" in caplog.text


# Borrowed models ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def borrowed_model(tmp_path_factory: pytest.TempPathFactory, model: Model) -> BorrowedModel:
    directory = tmp_path_factory.mktemp("borrowed")
    borrowed.make_text_checkpoint(directory, "Qwen3MoeForCausalLM")
    return BorrowedModel.from_checkpoint(directory, model.place)


def test_a_token_for_which_rounding_chooses_other_experts_is_no_reason_against_kernels(
    borrowed_model: BorrowedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = borrowed_model.compute

    def compute_one_otherwise(*arguments: Any, **options: Any) -> Tensor:
        found = compute(*arguments, **options)
        if kernels_for(DEVICE) is not None:
            found[-1] = found[-1].flip(-1)
        return found

    monkeypatch.setattr(borrowed_model, "compute", compute_one_otherwise)
    with kernels_in_use():
        prove_kernels(borrowed_model)
        assert kernels_for(DEVICE) is gpu_kernels


@pytest.mark.parametrize("name", ["attend_rows", "attend_slices"])
def test_attention_that_is_wrong_for_one_token_is_found_out(
    borrowed_model: BorrowedModel, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = getattr(gpu_kernels, name)

    def wrong(output: Tensor, *arguments: Any) -> None:
        right(output, *arguments)
        output[-1] = output[-1].flip(-1)

    monkeypatch.setattr(gpu_kernels, name, wrong)
    assert_not_used(borrowed_model)
