"""Speed of a published model size with random weights, compared to what the machine's arithmetic and memory allow.

    PYTHONPATH=. python benchmarks/real_shapes.py --size 4b --device cuda --peak-tflops 790 --bandwidth-gb 4300

Encoder: one 896x896 picture, compared to its multiply-adds at the peak rate.  Decode: a step of a server's runner,
which on a GPU is recorded, for 1 and for 64 sequences, compared to reading the decoder's weights once, the keys and
values of every sequence, and to reading and writing its states, if there are recurrent layers.  Of models that
transformers' modules compute there is only the decoder.  `--layers` keeps only the first layers, to try it on a small
machine.
"""

import argparse
import functools
import json
import logging
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from keepsight.bench.model_work import BLOCK_SIZE, CONTEXT, ModelWork, median_seconds
from keepsight.engine_config import KvCacheConfig
from keepsight.models.borrowed.model import BorrowedModel
from keepsight.models.decoder import Decoder
from keepsight.models.gemma3.config import Gemma3Config
from keepsight.models.gemma3.config import VisionConfig as Gemma3Vision
from keepsight.models.gemma3.model import Gemma3
from keepsight.models.layers import Placement
from keepsight.models.model import Model
from keepsight.models.paged_attention import use_kernels_of_any_length
from keepsight.models.qwen3_vl.config import Qwen3VLConfig
from keepsight.models.qwen3_vl.config import VisionConfig as Qwen3VLVision
from keepsight.models.qwen3_vl.model import Qwen3VL
from keepsight.requests import EngineRequest
from keepsight.runner.model_runner import ModelRunner
from keepsight.runner.prove_kernels import prove_kernels
from keepsight.sampling_params import SamplingParams
from keepsight.scheduling.step_plan import NewSequence, Slice, StepPlan
from tests.models.gemma3.real_configs import REAL_CONFIGS as GEMMA3_CONFIGS
from tests.models.qwen3_vl.real_configs import REAL_CONFIGS as QWEN3_VL_CONFIGS

QWEN = "qwen3-vl-"
# Decoders that transformers' modules compute: the classes, and what differs from the configuration's defaults.
BORROWED: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "qwen3.5-0.8b": (
        "Qwen3_5TextConfig",
        "Qwen3_5ForCausalLM",
        {
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "num_hidden_layers": 24,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "linear_num_value_heads": 16,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3.5-9b": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", {}),
    "qwen3-8b": (
        "Qwen3Config",
        "Qwen3ForCausalLM",
        {"intermediate_size": 12_288, "num_hidden_layers": 36, "num_key_value_heads": 8},
    ),
}
SIZES = {**GEMMA3_CONFIGS, **{QWEN + size: config for size, config in QWEN3_VL_CONFIGS.items()}, **BORROWED}
PICTURE_SIZE = 896
# The tokens of a picture of that size.
TOKENS_OF_QWEN = 784
# Numbers of sequences in one step.
FEW, MANY = 1, 64
# Prompt steps: the tokens computed of a sequence, the tokens before them, and the streams in the same step.
PROMPTS = ((290, 0, 0), (34, 0, 0), (34, CONTEXT - 34, 0), (CONTEXT, 0, 0), (290, 0, 32))


class Machine(ModelWork):
    """A model of one size, with random weights."""

    def __init__(self, model: Gemma3 | Qwen3VL | BorrowedModel) -> None:
        self.vision: Gemma3Vision | Qwen3VLVision | None = None
        self.decoder: Decoder | BorrowedModel = model if isinstance(model, BorrowedModel) else model.decoder
        if not isinstance(model, BorrowedModel):
            for parameter in model.parameters():
                parameter.normal_(0, 0.02)
            model.pack()
            self.vision = model.config.vision
        super().__init__(model, TOKENS_OF_QWEN if isinstance(model, Qwen3VL) else None)
        self.place = model.place

    def encode_zeros(self, num_pictures: int = 1) -> Tensor:
        shape = (num_pictures, PICTURE_SIZE, PICTURE_SIZE, 3)
        return self.model.encode_images(torch.zeros(shape, device=self.place.device, dtype=self.place.dtype))

    def bytes_of_weights(self) -> int:
        """Return the bytes of the decoder's weights that a step reads.

        Of a borrowed model's table of tokens it looks up a few rows, unless the head multiplies by the same table.
        """
        num_bytes = sum(parameter.nbytes for parameter in self.decoder.parameters())
        if isinstance(self.decoder, BorrowedModel):
            modules = self.decoder._modules
            table, head = modules.get_input_embeddings().weight, modules.get_output_embeddings().weight
            num_bytes -= 0 if table is head else table.nbytes
        return num_bytes

    def seconds(self, work: Callable[[], object], runs: int) -> float:
        return median_seconds(work, runs, self.place.device)


class Answers:
    """As many sequences as a server may have, and steps that compute some of their tokens, always the same."""

    def __init__(self, model: Model, max_recorded_prompt: int = 0) -> None:
        blocks_each = CONTEXT // BLOCK_SIZE
        pages = KvCacheConfig(num_blocks=MANY * blocks_each, block_size=BLOCK_SIZE, num_state_slots=MANY)
        self._runner = ModelRunner(
            model, None, pages, lambda: None, max_recorded=MANY, max_recorded_prompt=max_recorded_prompt
        )
        prompt, params = (0,) * CONTEXT, SamplingParams(temperature=0, max_tokens=None)
        ids = [(str(number), 0) for number in range(MANY)]
        self._runner.run(
            StepPlan(new=[NewSequence(each, EngineRequest(each[0], prompt, (), params), 0, ()) for each in ids])
        )
        # Earlier positions are never computed, and uninitialized memory may hold NaNs.
        for layer in self._runner.blocks.layers:
            layer.keys.zero_()
            layer.values.zero_()
        first = [
            Slice(
                each,
                CONTEXT - 1,
                1,
                0,
                tuple(range(number * blocks_each, (number + 1) * blocks_each)),
                True,
                state_slot=number,
            )
            for number, each in enumerate(ids)
        ]
        self._compute(first)
        self._again = [piece._replace(first_block=blocks_each, new_block_ids=()) for piece in first]

    def decode(self, num_sequences: int) -> None:
        self._compute(self._again[:num_sequences])

    def prompt(self, num_tokens: int, start: int = 0, num_streams: int = 0) -> None:
        """Compute tokens of one sequence, from position `start` on, together with one token of some streams."""
        whole = self._again[0]._replace(start=start, length=num_tokens)
        self._compute([whole, *self._again[1 : 1 + num_streams]])

    def _compute(self, slices: list[Slice]) -> None:
        result = self._runner.run(StepPlan(now=slices))
        assert len(result.computed) == len(slices), result.failed_sequences

    def bytes_held(self, num_sequences: int) -> int:
        """Return the bytes of keys, values and states that are read, and of states that are written.

        No published window is narrower than the context.
        """
        slots = num_sequences * CONTEXT
        keys = sum(layer.keys[:slots].nbytes + layer.values[:slots].nbytes for layer in self._runner.blocks.layers)
        return keys + 2 * num_sequences * self._runner.model.shape.bytes_per_state

    def close(self) -> None:
        self._runner.close()


def encoder_flops(vision: Gemma3Vision | Qwen3VLVision) -> float:
    """Return the operations of the layers for one picture; a multiply-add counts twice."""
    patches, hidden = (PICTURE_SIZE // vision.patch_size) ** 2, vision.layer.hidden_size
    products = 4 * hidden * hidden + 2 * hidden * vision.layer.intermediate_size
    return float(vision.num_layers * (2 * patches * products + 4 * patches * patches * hidden))


def make_model(size: str, num_layers: int | None, place: Placement) -> Gemma3 | Qwen3VL | BorrowedModel:
    if size in BORROWED:
        return make_borrowed(size, num_layers, place)
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(SIZES[size]))
        if size.startswith(QWEN):
            return make_qwen(Qwen3VLConfig.from_checkpoint(Path(directory)), num_layers, place)
        config = Gemma3Config.from_checkpoint(Path(directory))
    if num_layers is not None:
        vision = config.vision and replace(config.vision, num_layers=num_layers)
        config = replace(config, text=replace(config.text, layers=config.text.layers[:num_layers]), vision=vision)
    return Gemma3(config, place)


def make_qwen(config: Qwen3VLConfig, num_layers: int | None, place: Placement) -> Qwen3VL:
    if num_layers is not None:
        vision = replace(config.vision, num_layers=num_layers, deep_layers=())
        config = replace(config, text=replace(config.text, layers=config.text.layers[:num_layers]), vision=vision)
    return Qwen3VL(config, place)


def make_borrowed(size: str, num_layers: int | None, place: Placement) -> BorrowedModel:
    config_class, model_class, given = BORROWED[size]
    changed = {} if num_layers is None else {"num_hidden_layers": num_layers}
    config = getattr(transformers, config_class)(**{**given, **changed})
    with place.device:
        modules = getattr(transformers, model_class)._from_config(config, dtype=place.dtype)
    with tempfile.TemporaryDirectory() as directory:
        config.save_pretrained(directory)
        return BorrowedModel.of_modules(modules, Path(directory), place)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="4b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--peak-tflops", type=float, default=790.0, help="an H200's, measured, in bfloat16")
    parser.add_argument("--bandwidth-gb", type=float, default=4300.0, help="an H200's, measured")
    arguments = parser.parse_args()
    use_kernels_of_any_length()
    place = Placement(torch.device(arguments.device), getattr(torch, arguments.dtype))
    with torch.inference_mode():
        report(Machine(make_model(arguments.size, arguments.layers, place)), arguments)


def report(machine: Machine, arguments: argparse.Namespace) -> None:
    # The log says whether kernels are used and steps are recorded.
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    print(f"{arguments.size}, {arguments.dtype} on {arguments.device}, medians of {arguments.runs}")
    prove_kernels(machine.model)
    if machine.vision is not None:
        limit = encoder_flops(machine.vision) / (arguments.peak_tflops * 1e12)
        for num_pictures in (1, 4):
            seconds = (
                machine.seconds(functools.partial(machine.encode_zeros, num_pictures), arguments.runs) / num_pictures
            )
            print(
                f"encode, {num_pictures} at once  {seconds * 1e3:9.2f} ms a picture, {limit / seconds:6.1%} of the peak"
            )
    print(f"prefill           {machine.seconds(machine.prefill, arguments.runs) * 1e3:9.2f} ms")
    answers = Answers(machine.model)
    for num_sequences in (FEW, MANY):
        seconds = machine.seconds(functools.partial(answers.decode, num_sequences), arguments.runs)
        num_bytes = machine.bytes_of_weights() + answers.bytes_held(num_sequences)
        share = num_bytes / (arguments.bandwidth_gb * 1e9) / seconds
        print(f"decode of {num_sequences:2}      {seconds * 1e3:9.2f} ms a step, {share:6.1%} of the bandwidth")
    answers.close()
    launching, replaying = Answers(machine.model), Answers(machine.model, CONTEXT)
    for num_tokens, start, num_streams in PROMPTS:
        times = [
            machine.seconds(functools.partial(each.prompt, num_tokens, start, num_streams), arguments.runs) * 1e3
            for each in (launching, replaying)
        ]
        label = f"{num_tokens} tokens behind {start}, {num_streams} streams"
        print(f"{label:42} {times[0]:8.2f} ms launched, {times[1]:8.2f} replayed")
    launching.close()
    replaying.close()


if __name__ == "__main__":
    main()
