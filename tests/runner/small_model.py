"""A small random model with its transformers counterpart, and hand-made plans to drive a runner with."""

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from keepsight.engine_config import KvCacheConfig
from keepsight.image_processor_config import ImageProcessorConfig
from keepsight.media import Geometry, MediaItem
from keepsight.models.gemma3.model import Gemma3
from keepsight.models.layers import Placement
from keepsight.requests import EngineRequest, Pixels
from keepsight.runner.model_runner import ModelRunner
from keepsight.runner.normalize_pixels import PixelNormalizer
from keepsight.sampling_params import SamplingParams
from keepsight.scheduling.step_plan import Encoding, NewSequence, SequenceId, Slice, StepPlan, StepResult
from tests.models.gemma3 import reference as ref
from tests.place import DEVICE

BLOCK_SIZE, NUM_BLOCKS = 16, 100
WAIT_SECONDS = 30
PLACE = Placement(torch.device(DEVICE), torch.float32)


class SmallModel:
    def __init__(self, seed: int, directory: Path, place: Placement = PLACE) -> None:
        self.arguments = ref.draw_config(seed)
        self.reference = ref.make_reference(self.arguments, seed)
        self.model = Gemma3.from_checkpoint(ref.save_checkpoint(self.reference, directory), place)
        self.size = self.arguments["vision_config"]["image_size"]
        config = ImageProcessorConfig(height=self.size, width=self.size)
        self.normalizer = PixelNormalizer(config, place.device, place.dtype)

    def pixels(self, seed: int) -> Pixels:
        return np.random.default_rng(seed).integers(0, 256, (self.size, self.size, 3), np.uint8)

    def request(self, name: str, num_pictures: int = 0, prompt_seed: int | None = None, **params: Any) -> EngineRequest:
        """Return a request whose n-th picture has pixels `pixels(n)` and hash "n"."""
        prompt = self.prompt(num_pictures, num_pictures if prompt_seed is None else prompt_seed)
        media = tuple(
            MediaItem(str(index), span, Geometry(self.size, self.size)) for index, span in enumerate(prompt.spans)
        )
        params = {"temperature": 0, "max_tokens": None, **params}
        return EngineRequest(name, tuple(prompt.token_ids), media, SamplingParams(**params))

    def prompt(self, num_pictures: int, seed: int) -> ref.Prompt:
        prompt = ref.draw_prompt(self.arguments, num_pictures, seed)
        if not num_pictures:
            return prompt
        pixels = np.stack([self.pixels(index) for index in range(num_pictures)])
        normalized = self.normalizer(torch.from_numpy(pixels).to(self.model.place.device))
        return ref.Prompt(prompt.token_ids, prompt.spans, normalized.permute(0, 3, 1, 2).float().cpu())

    def reference_answer(self, num_pictures: int, num_tokens: int) -> list[int]:
        prompt = self.prompt(num_pictures, num_pictures)
        inputs = ref.reference_inputs(prompt)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        ids = self.reference.generate(
            **inputs, max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        answer: list[int] = ids[0, len(prompt.token_ids) :].tolist()
        return answer


class Driver:
    """A runner, its free pages and its results; plans are made by hand."""

    def __init__(self, small: SmallModel, **options: Any) -> None:
        self.small = small
        self.finished = threading.Semaphore(0)
        pages = KvCacheConfig(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
        self.runner = ModelRunner(small.model, small.normalizer, pages, self.finished.release, **options)
        self._free = list(range(NUM_BLOCKS))
        self.pages: dict[SequenceId, list[int]] = {}
        self.tokens: dict[SequenceId, list[int]] = {}
        self.lengths: dict[SequenceId, int] = {}

    def begin(self, request: EngineRequest, choice: int = 0) -> SequenceId:
        """Encode the request's media and make it known to the runner; compute nothing of it."""
        sequence_id = (request.request_id, choice)
        keys = tuple(item.media_hash for item in request.media)
        for key in keys:
            self.runner.hold_pixels(key, self.small.pixels(int(key)))
        lacking = [key for key in dict.fromkeys(keys) if key not in self.runner.embeddings]
        self.encode([Encoding(key, key, request.media[0].span.length) for key in lacking])
        self.runner.run(StepPlan(new=[NewSequence(sequence_id, request, choice, keys)]))
        self.pages[sequence_id], self.tokens[sequence_id] = [], []
        self.lengths[sequence_id] = len(request.token_ids)
        return sequence_id

    def encode(self, encodings: Sequence[Encoding]) -> list[StepResult]:
        """Encode and wait until all are done."""
        return self.run_until(
            StepPlan(encode=encodings),
            lambda results: sum(len(each.encoded) + len(each.failed_encodings) for each in results) >= len(encodings),
        )

    def run_until(self, plan: StepPlan, is_done: Callable[[Sequence[StepResult]], bool]) -> list[StepResult]:
        """Run until `is_done`. Work beside may be reported by the plan that begins it or by a later one."""
        results = [self.runner.run(plan)]
        while not is_done(results):
            assert self.finished.acquire(timeout=WAIT_SECONDS)
            results.append(self.runner.run(StepPlan()))
        return results

    def slice(self, sequence_id: SequenceId, start: int, end: int, *, gap: bool = False) -> Slice:
        """Return positions [start, end) with pages for them; with `gap`, the pages are not contiguous."""
        pages = self.pages[sequence_id]
        first_block = len(pages)
        while len(pages) * BLOCK_SIZE < end:
            pages.append(self._free.pop(1 if gap else 0))
        samples = end == self.lengths[sequence_id] + len(self.tokens[sequence_id])
        return Slice(sequence_id, start, end - start, first_block, tuple(pages[first_block:]), samples)

    def next_slice(self, sequence_id: SequenceId) -> Slice:
        """Return the slice that computes its last token."""
        end = self.lengths[sequence_id] + len(self.tokens[sequence_id])
        return self.slice(sequence_id, end - 1, end)

    def slices_with_guesses(self, sequence_id: SequenceId, guesses: Sequence[int]) -> list[Slice]:
        """Return the slice of its last token, followed by slices of the guesses."""
        last = self.next_slice(sequence_id)
        pieces = [self.slice(sequence_id, place, place + 1) for place in range(last.end, last.end + len(guesses))]
        return [last, *(each._replace(samples=True, guess=guess) for each, guess in zip(pieces, guesses, strict=True))]

    def prompt_slices(self, sequence_id: SequenceId, cuts: Iterable[int] = ()) -> list[Slice]:
        edges = (0, *cuts, self.lengths[sequence_id] + len(self.tokens[sequence_id]))
        return [self.slice(sequence_id, start, end) for start, end in itertools.pairwise(edges)]

    def lose_pages(self, sequence_id: SequenceId) -> None:
        """As in a preemption: its pages go to another sequence."""
        self._free.extend(self.pages[sequence_id])
        self.pages[sequence_id] = []

    def compute(self, *slices: Slice, beside: bool = False) -> StepResult:
        if beside:
            result = self.run_until(StepPlan(beside=slices), lambda results: not results[-1].is_empty)[-1]
        else:
            result = self.runner.run(StepPlan(now=slices))
        for computed in result.computed:
            self.tokens[computed.sequence_id] += [each.token_id for each in computed.tokens]
        return result

    def decode(self, *sequence_ids: SequenceId, num_tokens: int) -> None:
        for _ in range(num_tokens):
            self.compute(*(self.next_slice(each) for each in sequence_ids))

    def answer(self, request: EngineRequest, num_tokens: int, cuts: Iterable[int] = ()) -> list[int]:
        """Compute the request alone, from its prompt to its `num_tokens`th token."""
        sequence_id = self.begin(request)
        for piece in self.prompt_slices(sequence_id, cuts):
            self.compute(piece)
        self.decode(sequence_id, num_tokens=num_tokens - 1)
        self.end(sequence_id)
        return self.tokens[sequence_id]

    def end(self, sequence_id: SequenceId) -> None:
        self.lose_pages(sequence_id)
        self.runner.run(StepPlan(ended=[sequence_id]))
