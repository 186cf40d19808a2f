"""What transformers' modules pass to their attention reaches the pages, or is refused."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from keepsight.models.attention import AttentionBatch, RequestSlice
from keepsight.models.borrowed import attention
from keepsight.models.borrowed.attention import (
    UnsupportedDecoderError,
    attend_at_once,
    attending,
)
from keepsight.models.layers import Placement
from keepsight.models.registry import load_model
from tests.models.borrowed.by_pages import Pages, at_once
from tests.models.borrowed.reference import make_text_checkpoint

NUM_SLOTS, SIZE = 12, 2


class Layer(nn.Module):
    layer_idx = 0
    is_causal = True


def call(module: nn.Module | None = None, mask: Tensor | None = None, **options: Any) -> Tensor:
    """Call attention as modules do, with one token."""
    heads = torch.ones(1, 1, 1, SIZE)
    with attending(attend_at_once):
        return attention._attend_for_module(module or Layer(), heads, heads, heads, mask, **options)[0]


def test_keywords_that_say_nothing_are_let_pass() -> None:
    harmless: dict[str, Any] = {
        "dropout": 0.0,
        "output_attentions": False,
        "s_aux": None,
        "is_causal": True,
        "use_cache": True,
    }
    assert torch.equal(call(**harmless), torch.ones(1, 1, 1, SIZE))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"s_aux": torch.zeros(1)}, r"is given attention sinks \(s_aux\)"),
        ({"dropout": 0.1}, "is given dropout"),
        ({"some_new_bias": 2}, "is given some_new_bias"),
        ({"mask": torch.zeros(1, 1, 1, 1)}, "uses its own mask"),
        ({"is_causal": False}, "sees later tokens"),
        ({"module": nn.Module()}, "does not give its layer's number"),
    ],
)
def test_what_would_change_the_result_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedDecoderError, match=message):
        call(**options)


def test_a_step_that_another_thread_computes_amid_it_changes_nothing(tmp_path: Any) -> None:
    make_text_checkpoint(tmp_path, "LlamaForCausalLM")
    model = load_model(tmp_path, Placement(torch.device("cpu"), torch.float32))
    with torch.inference_mode():
        ours, others = model.embed_tokens(torch.arange(3, 20)), model.embed_tokens(torch.arange(30, 60))
    expected = [at_once(model, each) for each in (ours, others)]
    pages, amid = Pages(model), list[Tensor]()
    attend = pages.attention

    def attend_after_another(*args: Any, **options: Any) -> Tensor:
        if not amid:
            thread = threading.Thread(target=lambda: amid.append(at_once(model, others)))
            thread.start()
            thread.join()
        return attend(*args, **options)

    pages.attention = attend_after_another
    assert torch.equal(pages.compute((0, 0, ours))[0], expected[0])
    assert torch.equal(amid[0], expected[1])


def test_a_step_s_watcher_is_called_after_each_layer_in_their_order(tmp_path: Any) -> None:
    reference = make_text_checkpoint(tmp_path, "LlamaForCausalLM")
    model = load_model(tmp_path, Placement(torch.device("cpu"), torch.float32))
    token_ids = torch.arange(3, 10)
    pages, seen = Pages(model), list[tuple[int, Tensor]]()
    batch = AttentionBatch([RequestSlice(0, len(token_ids), pages.tables[0])], "cpu")
    with torch.inference_mode():
        embeddings = model.embed_tokens(token_ids)
        model.compute(embeddings, pages.attention, pages.caches, batch, lambda *each: seen.append(each))
        expected = reference(input_ids=token_ids[None], output_hidden_states=True).hidden_states
    assert [layer for layer, _ in seen] == [0, 1, 2]
    for layer, hidden in seen[:-1]:
        assert torch.allclose(hidden, expected[layer + 1][0], atol=1e-4)
