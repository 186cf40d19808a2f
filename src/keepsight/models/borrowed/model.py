"""A model of an architecture that is not built in: transformers' own modules, over our KV pages.

Its body computes hidden states with our attention; its head computes logits from them, including anything else the
class does there; pictures are encoded by the class's own method, one at a time and in one part. Knows no model family:
anything that would not be computed correctly was refused at load.
"""

import copy
import inspect
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from keepsight.adapter_folder import AdapterFolder
from keepsight.errors import CheckpointConfigError, CheckpointError, KeepsightError
from keepsight.models.adapter_weights import AdapterWeights
from keepsight.models.attention import Attention, AttentionBatch, LayerCache
from keepsight.models.borrowed.adapted_products import AdaptableProducts, computing_rows
from keepsight.models.borrowed.attention import (
    NAME,
    UnsupportedDecoderError,
    attend_to_pages,
    attending,
    register_attention,
    watch_layers,
)
from keepsight.models.borrowed.decoder_shape import DecoderShape, observe_shape
from keepsight.models.borrowed.load_modules import load_modules
from keepsight.models.borrowed.media_tokens import find_media_token
from keepsight.models.borrowed.norms import replace_norms
from keepsight.models.borrowed.picture_places import mark_pictures, position_ids, uses_mrope
from keepsight.models.borrowed.products import pack_products
from keepsight.models.borrowed.prove import prove, prove_picture
from keepsight.models.borrowed.recurrence import RecurrentStep
from keepsight.models.borrowed.token_rows import TokenRows
from keepsight.models.layers import Placement, run_to_end
from keepsight.models.load_adapter import load_adapter
from keepsight.models.model import DeepRows, LayerWatcher, ModelShape
from keepsight.pixels import carried_arrays

_ADAPTABLE = "linear layers of the decoder that compute each token by itself (no experts, and nothing for pictures)"


class BorrowedModel:
    def __init__(self, modules: Any, decoder: DecoderShape, norms: Sequence[nn.Module], place: Placement) -> None:
        """`modules`: transformers' model; `norms`: those of its modules that our kernels compute."""
        self.place, self.norms = place, norms
        self._modules, self._body = modules, modules.base_model
        self.rules, self.recurrent = decoder.rules, decoder.recurrent
        self._state_names = tuple(decoder.states)
        self._rows = TokenRows(self._body)
        self.products = AdaptableProducts(modules, self._body.get_decoder())
        self._head = _head_alone(modules)
        self._pictures_are_proven = False
        takes_arrays = hasattr(self._body, "get_image_features")
        self.shape = ModelShape(
            kv_heads=decoder.kv_heads,
            vocab_size=modules.config.get_text_config(decoder=True).vocab_size,
            media_width=self._rows.width,
            patch_size=0,
            tokens_per_image=0,
            sees_pictures_whole=not all(rule.is_causal for rule in decoder.rules.values()),
            uses_mrope=uses_mrope(self._body),
            takes_arrays=takes_arrays,
            embedding_token=find_media_token(modules.config, "image") if takes_arrays else None,
            reads_tokens=self._rows.have_tokens,
            states=tuple(decoder.states.values()),
            cuts_steps=any(each.delta_net is None for each in decoder.recurrent),
            max_positions=decoder.max_positions,
        )

    @classmethod
    def from_checkpoint(cls, directory: Path, place: Placement, room: int | None = None) -> Self:
        """Load and check a checkpoint's model. `room`: bytes of memory that the weights may take."""
        try:
            return cls.of_modules(load_modules(directory, place, room), directory, place)
        except (KeepsightError, torch.OutOfMemoryError):
            raise
        except UnsupportedDecoderError as error:
            told = f"this kind of decoder is not supported: {error}"
            raise CheckpointConfigError(directory / "config.json", told) from error
        except Exception as error:  # modules may raise anything
            why = " ".join(f"{type(error).__name__}: {error}".split())
            raise CheckpointError(directory, f"cannot be served by transformers' modules: {why}") from error

    @classmethod
    def of_modules(cls, modules: Any, directory: Path, place: Placement) -> Self:
        """Check transformers' modules, with weights, and make the model of them. `directory`: their checkpoint."""
        import transformers

        register_attention()
        modules.base_model.get_decoder().set_attn_implementation(NAME)
        decoder = observe_shape(modules, place, directory / "config.json")
        watch_layers(decoder.layers)
        pack_products(modules, place)
        norms = replace_norms(modules, place.dtype)
        model = cls(modules, decoder, norms, place._replace(modules=f"transformers {transformers.__version__}"))
        with model.products.observing():
            prove(model, modules, decoder.windows.values(), directory)
        return model

    def parameters(self) -> Iterator[nn.Parameter]:
        return self._modules.parameters()  # type: ignore[no-any-return]

    def encode_images(self, pixels: Tensor) -> Tensor:
        return run_to_end(self.encode_in_parts(pixels))

    def encode_in_parts(self, pixels: Tensor, adapter: AdapterWeights | None = None) -> Generator[None, None, Tensor]:
        """Arrays of one picture, packed by `carry_arrays`, [1, rows, 1024, 4] -> embeddings [1, tokens, hidden]"""
        yield from ()
        arrays = {name: torch.from_numpy(array) for name, array in carried_arrays(pixels.numpy()).items()}
        token_ids = arrays.pop("token_ids").to(self.place.device, torch.int64)
        given = self._choose(arrays)
        features = self._see(given)
        assert self.shape.embedding_token is not None
        embeddings, is_seen = self.embed_tokens(token_ids), token_ids == self.shape.embedding_token
        if features.shape != (int(is_seen.sum()), self._rows.hidden_size):
            told = f"{int(is_seen.sum())} tokens stand for embeddings of the shape {list(features.shape)}"
            raise ValueError(f"a picture's layout does not match its encoding: {told}")
        self._rows.overwrite(features, embeddings, is_seen)
        if not self._pictures_are_proven:
            given |= mark_pictures(self._body, is_seen)
            prove_picture(self, self.rules, self._compute_body, token_ids, given, embeddings)
            self._pictures_are_proven = True
        return embeddings[None]

    def load_adapter(self, folder: AdapterFolder, max_rank: int) -> AdapterWeights:
        added = load_adapter(folder, max_rank, self.products.find, self.place, _ADAPTABLE)
        return AdapterWeights([self.products.add(added)])

    def embed_tokens(self, token_ids: Tensor) -> Tensor:
        return self._rows.make(token_ids)

    def compute(
        self,
        embeddings: Tensor,
        attention: Attention,
        caches: Sequence[LayerCache],
        batch: AttentionBatch,
        watch_layer: LayerWatcher | None = None,
        deep: Sequence[DeepRows] = (),
        states: Sequence[Tensor] = (),
    ) -> Tensor:
        assert not deep, "its media are as wide as its tokens"
        given = self._rows.split(embeddings) | {"position_ids": position_ids(self._body, batch)}
        hidden = self._compute_body(given, attention, caches, batch, watch_layer, states)
        return hidden if batch.read_rows is None else hidden[batch.read_rows]

    def _compute_body(
        self,
        given: Mapping[str, Tensor],
        attention: Attention,
        caches: Sequence[LayerCache],
        batch: AttentionBatch,
        watch_layer: LayerWatcher | None = None,
        states: Sequence[Tensor] = (),
    ) -> Tensor:
        """Return the hidden states [tokens, hidden] that the body computes from these arguments."""
        recur = self.recurrent_step(batch, states).recur if self._state_names else None
        attend = attend_to_pages(attention, caches, batch, self.rules)
        with attending(attend, watch_layer, recur), computing_rows(batch.num_tokens, batch.adapted):
            return self._body(**given, use_cache=False).last_hidden_state[0]  # type: ignore[no-any-return]

    def recurrent_step(self, batch: AttentionBatch, states: Sequence[Tensor]) -> RecurrentStep:
        return RecurrentStep(self._state_names, states, batch)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._head(inputs_embeds=hidden[None], use_cache=False).logits[0]  # type: ignore[no-any-return]

    def _choose(self, arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the arrays that the class takes to encode pictures, on its device and in its dtype."""
        taken = inspect.signature(self._body.get_image_features).parameters
        device, dtype = self.place.device, self.place.dtype
        return {
            name: array.to(device, dtype if array.is_floating_point() else None)
            for name, array in arrays.items()
            if name in taken
        }

    def _see(self, arrays: Mapping[str, Tensor]) -> Tensor:
        """Return the embeddings of the picture, [embeddings, hidden]."""
        features = self._body.get_image_features(**arrays).pooler_output
        if features is None:
            raise ValueError("this model's pictures cannot be served: its layers need more than their embeddings")
        parts = [features] if isinstance(features, Tensor) else features
        return torch.cat([part.flatten(0, -2) for part in parts])


class _AsGiven(nn.Module):
    """Replaces a body whose hidden states are computed already: returns its input."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        # In a tuple, so that it does not become a part of this module.
        self._body = (body,)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the body: the head of Falcon H1 multiplies by one."""
        return getattr(self.__dict__["_body"][0], name)

    @property
    def decoder(self) -> nn.Module:
        """OPT's head calls `decoder` instead of the body."""
        return self

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> "_Output":
        return _Output((inputs_embeds,))


class _Output(tuple[Tensor]):
    """An output with hidden states only; any other attribute that a head reads is None."""

    @property
    def last_hidden_state(self) -> Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _head_alone(modules: Any) -> Any:
    """Return a shallow copy of the model, sharing its weights, whose body returns its input."""
    head = copy.copy(modules)
    head._modules = {**modules._modules, modules.base_model_prefix: _AsGiven(modules.base_model)}
    return head
