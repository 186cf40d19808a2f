"""No cache and no schedule ever changes an answer: greedy tokens equal those of transformers for each prompt alone.

Random workloads on random small models (arrivals, shared prefixes, repeated and permuted pictures, multi-turn
conversations, aborts, minimal budgets, preemption, caches on and off), and the demo checkpoint under many settings.
"""

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keepsight import LLM, SamplingParams
from keepsight.demo import checkpoint_path
from keepsight.engine_config import EncoderCacheConfig, EngineConfig, KvCacheConfig, SchedulerConfig
from keepsight.media import MediaItem
from keepsight.models.cpu_library import has_library
from keepsight.models.cpu_products import multiplies_bfloat16
from keepsight.models.layers import Placement
from keepsight.requests import EngineRequest, RequestFailed
from keepsight.runner.model_runner import ModelRunner
from keepsight.scheduling.scheduler import Scheduler
from keepsight.scheduling.step_plan import Encoding, KeptStretch
from keepsight.scheduling.stretch_loads import StretchLoad
from keepsight.tiers.tier import StoredArray
from tests.dequantized import QUANTIZED, dequantize_decoder
from tests.drawn import ask, draw
from tests.place import on_cpu_alone, placed
from tests.runner.small_model import PLACE, WAIT_SECONDS
from tests.scheduling.long_run import thorough
from tests.small_judges import (
    Family,
    SmallBorrowed,
    SmallGemma3,
    SmallMixture,
    SmallQwen2Audio,
    SmallQwen3VL,
    SmallQwen25VL,
    SmallQwen35,
    write_prompt,
)

NUM_TOKENS = 6
# If the top two logits are closer than this, summation order may decide between them.
TIE = 1e-3
ROUNDED = Placement(
    torch.device("cpu"), torch.float32, torch.bfloat16, rounds=multiplies_bfloat16(), halves_kv=multiplies_bfloat16()
)
TEXTS = {"a": [5, 17, 31, 8, 90], "b": [5, 17, 31, 60, 61, 62, 63, 64, 65], "c": [7] * 3}
# Digits are pictures; "again" is a prompt followed by its answer and another text, as chat clients send it.
PROMPTS = (
    "a",
    "a0a",
    "a0b",
    "a1a",
    "b01c",
    "b10c",
    "b00c",
    "c012a",
    "c012b",
    "bb0",
    "0a",
    "c3bab3a",
    "a0a again",
    "b01c again",
)


@dataclass(frozen=True)
class Reference:
    token_ids: list[int]
    # The number of tokens before the first tie.
    num_certain: int
    # One for each prompt token except the first.
    prompt_logprobs: list[float]


class Judge:
    """A small model, its prompts, and transformers' answer to each."""

    def __init__(self, small: Family) -> None:
        self.small = small
        self._answers: dict[str, Reference] = {}

    def prompt(self, name: str) -> tuple[list[int], list[MediaItem]]:
        """Return the prompt's token ids and media items."""
        first, _, again = name.partition(" ")
        token_ids, media = write_prompt(self.small, [int(part) if part.isdigit() else TEXTS[part] for part in first])
        if again:
            token_ids += self.answer(first).token_ids + TEXTS["c"]
        return token_ids, media

    def request(
        self, request_id: str, name: str, *, wants_prompt_logprobs: bool = False, **options: Any
    ) -> EngineRequest:
        token_ids, media = self.prompt(name)
        params = SamplingParams(
            temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1,
            prompt_logprobs=1 if wants_prompt_logprobs else None,
        )  # fmt: skip
        return EngineRequest(request_id, tuple(token_ids), tuple(media), params, **options)

    def answer(self, name: str) -> Reference:
        if name not in self._answers:
            self._answers[name] = self._ask(*self.prompt(name))
        return self._answers[name]

    def _ask(self, token_ids: list[int], media: list[MediaItem]) -> Reference:
        inputs = self.small.reference_inputs(token_ids, media)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        output = self.small.reference.generate(
            **inputs, max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        best = torch.cat(output.logits).topk(2).values
        ties = (best[:, 0] - best[:, 1] < TIE).tolist()
        answer = output.sequences[0, len(token_ids) :].tolist()
        with torch.inference_mode():
            logits = self.small.reference(**inputs).logits[0, :-1]
        logprobs = self.small.true_logits(logits).log_softmax(dim=-1)
        of_tokens = logprobs.gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0].tolist()
        return Reference(answer, ties.index(True) if True in ties else NUM_TOKENS, of_tokens)


@pytest.fixture(
    scope="module",
    params=[
        *product([SmallGemma3], [0, 5, 8, 12]),
        *product([SmallQwen3VL], [1, 3, 5]),
        (SmallQwen25VL, 5),
        (SmallQwen2Audio, 4),
        (SmallMixture, 5),
        *product([SmallQwen35], [2, 5, 6]),
        *product([SmallBorrowed], [0, 1, 2, 3]),
        *product([SmallGemma3], [5, 8], [QUANTIZED]),
        (SmallQwen25VL, 5, QUANTIZED),
        (SmallQwen2Audio, 4, QUANTIZED),
        (SmallMixture, 5, QUANTIZED),
    ],
    ids=str,
)
def judge(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Judge:
    family, seed, *places = request.param
    if places and not has_library():
        pytest.skip("NO KERNELS FOR THE CPU HERE: nothing is quantized")
    small = family(seed, tmp_path_factory.mktemp("checkpoint"), *places)
    if places:
        dequantize_decoder(small.reference)
    return Judge(small)


@dataclass(frozen=True)
class Settings:
    block_size: int
    num_spare_blocks: int
    caches_prefixes: bool
    num_pictures: int
    shares_embeddings: bool
    max_num_seqs: int
    num_spare_tokens: int
    num_encodings: int
    joining: int | None
    takes_turns: bool
    has_tiers: bool
    max_prompt_ends: int
    blocks_per_stretch: int
    # Ignored for models that need whole pictures.
    cuts_pictures: bool = True
    guess_up_to: int = 0
    # Used only for models with recurrent layers, which have no guesses and no stretches.
    num_state_slots: int = 1


SETTINGS = st.builds(
    Settings,
    block_size=st.sampled_from([1, 4, 16]),
    num_spare_blocks=st.sampled_from([0, 3, 200]),
    caches_prefixes=st.booleans(),
    num_pictures=st.integers(1, 6),
    shares_embeddings=st.booleans(),
    max_num_seqs=st.sampled_from([1, 2, 5, 16]),
    num_spare_tokens=st.sampled_from([0, 7, 300]),
    num_encodings=st.integers(1, 4),
    joining=st.sampled_from([None, 1, 8]),
    takes_turns=st.booleans(),
    has_tiers=st.booleans(),
    max_prompt_ends=st.sampled_from([0, 2, 50]),
    blocks_per_stretch=st.sampled_from([0, 1, 2]),
    cuts_pictures=st.booleans(),
    guess_up_to=st.sampled_from([0, 4, 16]),
    num_state_slots=st.sampled_from([1, 2, 5, 40]),
)


def engine_config(settings: Settings, small: Family, longest: int) -> EngineConfig:
    tokens_per_picture = small.most_tokens
    cuts_items = settings.cuts_pictures and not small.model.shape.sees_pictures_whole
    at_once = 1 if cuts_items else tokens_per_picture
    num_blocks = -(-longest // settings.block_size) + settings.num_spare_blocks
    if is_recurrent := bool(small.model.shape.states):
        settings = replace(settings, guess_up_to=0, blocks_per_stretch=0)
    return EngineConfig(
        scheduler=SchedulerConfig(
            max_num_batched_tokens=at_once + settings.max_num_seqs - 1 + settings.num_spare_tokens,
            max_num_seqs=settings.max_num_seqs,
            max_model_len=longest,
            max_num_encoder_input_tokens=tokens_per_picture * settings.num_encodings,
            max_prompt_tokens_beside_streams=settings.joining,
            takes_turns=settings.takes_turns,
            guess_up_to=settings.guess_up_to,
            tokens_per_item=tokens_per_picture,
            cuts_items=cuts_items,
            sees_items_whole=small.model.shape.sees_pictures_whole,
        ),
        kv_cache=KvCacheConfig(
            num_blocks=num_blocks,
            block_size=settings.block_size,
            enable_prefix_caching=settings.caches_prefixes,
            max_prompt_ends=settings.max_prompt_ends,
            blocks_per_stretch=settings.blocks_per_stretch if settings.caches_prefixes else 0,
            num_state_slots=settings.num_state_slots if is_recurrent else 0,
        ),
        encoder_cache=EncoderCacheConfig(
            max_bytes=settings.num_pictures * tokens_per_picture,
            bytes_per_embedding=1,
            is_shared=settings.shares_embeddings,
            has_tiers=settings.has_tiers and settings.shares_embeddings,
        ),
    )


class Engine:
    """Scheduler and runner, stepped by the test; messages are delivered between steps."""

    def __init__(self, judge: Judge, config: EngineConfig) -> None:
        self.judge, self.scheduler = judge, Scheduler(config, frozenset())
        small = judge.small
        self.finished = threading.Semaphore(0)
        self.runner = ModelRunner(
            small.model,
            small.normalizer,
            config.kv_cache,
            self.finished.release,
            keeping=lambda: self.keep,
            keep_stretch=self.keep_stretch,
        )
        self.needed: list[str] = []
        self.loading: list[str] = []
        self.tier: dict[str, StoredArray] = {}
        # The same for keys and values.
        self.stretch_loads: list[StretchLoad] = []
        self.stretches: dict[bytes, StoredArray] = {}
        self.tokens: dict[str, list[int]] = {}
        # The logprob of each of these tokens.
        self.logprobs: dict[str, list[float]] = {}
        self.prompt_logprobs: dict[str, list[float]] = {}

    def step(self) -> None:
        plan = self.scheduler.schedule()
        self.needed += [each for needed in self.scheduler.media.take_needed() for each in needed.media_hashes]
        self.loading += [load.encoder_key for load in self.scheduler.media.loads.take_wanted()]
        self.stretch_loads += self.scheduler.stretches.take_wanted()
        result = self.runner.run(plan)
        for output in self.scheduler.update(result):
            assert not isinstance(output, RequestFailed), output.message
            self.tokens[output.request_id].append(output.token_id)
            assert output.logprobs is not None
            self.logprobs.setdefault(output.request_id, []).append(output.logprobs[0].logprob)
            if output.prompt_logprobs is not None:
                self.prompt_logprobs[output.request_id] = [own.logprob for own, _ in output.prompt_logprobs]
        if plan.is_empty and result.is_empty and not self.is_owed and self.scheduler.lineup:
            assert self.finished.acquire(timeout=WAIT_SECONDS)

    @property
    def is_owed(self) -> bool:
        return bool(self.needed or self.loading or self.stretch_loads)

    def keep(self, encoding: Encoding, _seconds: float, make_array: Callable[[], StoredArray]) -> None:
        self.tier[encoding.encoder_key] = make_array()

    def end_load(self, key: str) -> None:
        array = self.tier.get(key)
        if self.scheduler.embeddings_loaded(key, is_found=array is not None) and array is not None:
            self.runner.hold_embeddings(key, array)

    def keep_stretch(self, kept: KeptStretch, make_array: Callable[[], StoredArray]) -> None:
        self.stretches[kept.stretch] = make_array()

    def load_stretches(self, load: StretchLoad) -> None:
        found = list(itertools.takewhile(self.stretches.__contains__, load.hashes))
        for stretch in found:
            self.runner.hold_stretch(stretch, self.stretches[stretch])
        self.scheduler.stretches_loaded(load, range(len(found)), is_last=True)

    def deliver(self, media_hash: str) -> None:
        if self.scheduler.media_arrived(media_hash):
            self.runner.hold_pixels(media_hash, self.judge.small.pixels(int(media_hash)))


def run_workload(
    judge: Judge, engine: Engine, names: list[str], chance: random.Random, *, is_left: bool = True
) -> set[str]:
    """Run requests with random arrivals, late pixels and aborts. Return the ids of aborted requests."""
    left: set[str] = set()
    waiting = list(enumerate(names))
    while waiting or engine.scheduler.lineup:
        if waiting and (chance.random() < 0.4 or not engine.scheduler.lineup):
            number, name = waiting.pop(0)
            engine.tokens[str(number)] = []
            priority, wants_prompt_logprobs = chance.choice([0, 0, 1]), chance.random() < 0.3
            request = judge.request(str(number), name, wants_prompt_logprobs=wants_prompt_logprobs, priority=priority)
            assert engine.scheduler.add(request) is None
        elif engine.needed and chance.random() < 0.7:
            engine.deliver(engine.needed.pop(chance.randrange(len(engine.needed))))
        elif engine.loading and chance.random() < 0.7:
            engine.end_load(engine.loading.pop(chance.randrange(len(engine.loading))))
        elif engine.stretch_loads and chance.random() < 0.7:
            engine.load_stretches(engine.stretch_loads.pop(chance.randrange(len(engine.stretch_loads))))
        elif is_left and chance.random() < 0.03:
            number = chance.randrange(len(names))
            engine.scheduler.abort(str(number))
            left.add(str(number))
        else:
            engine.step()
    return left


@thorough(12)
@given(settings=SETTINGS, names=st.lists(st.sampled_from(PROMPTS), min_size=2, max_size=9), seed=st.integers(0, 2**32))
def test_every_answer_is_the_one_that_transformers_gives_alone(
    judge: Judge, settings: Settings, names: list[str], seed: int
) -> None:
    longest = max(len(judge.prompt(name)[0]) for name in names) + NUM_TOKENS
    engine = Engine(judge, engine_config(settings, judge.small, longest))
    left = run_workload(judge, engine, names, random.Random(seed))
    engine.runner.close()
    engine.scheduler.check_invariants()
    for number, name in enumerate(names):
        ours, theirs = engine.tokens[str(number)], judge.answer(name)
        assert len(ours) == NUM_TOKENS or str(number) in left, name
        num_compared = min(len(ours), theirs.num_certain)
        assert ours[:num_compared] == theirs.token_ids[:num_compared], name
        prompt_logprobs = engine.prompt_logprobs.get(str(number), theirs.prompt_logprobs)
        assert prompt_logprobs == pytest.approx(theirs.prompt_logprobs, abs=1e-3), name


# Bitwise equality ---------------------------------------------------------------------------------------------


TO_THE_LAST_BIT = "on a GPU products depend on how many rows they have"


class ReferenceAnswers:
    """Our own model's answer to each prompt, computed in one step, alone and without caches."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        self._answers: dict[str, Engine] = {}

    def answer(self, name: str) -> Engine:
        if name not in self._answers:
            self._answers[name] = self._ask(name)
        return self._answers[name]

    def _ask(self, name: str) -> Engine:
        longest = len(self.judge.prompt(name)[0]) + NUM_TOKENS
        nothing = Settings(16, 200, False, 6, False, 1, 1000, 4, None, False, False, 0, 0)
        engine = Engine(self.judge, engine_config(nothing, self.judge.small, longest))
        engine.tokens[name] = []
        assert engine.scheduler.add(self.judge.request(name, name, wants_prompt_logprobs=True)) is None
        while engine.scheduler.lineup:
            for needed in engine.needed:
                engine.deliver(needed)
            engine.needed.clear()
            engine.step()
        engine.runner.close()
        return engine


# Models whose attention the kernel supports: no attention softcap, which no published Gemma 3 has either.
@pytest.fixture(
    scope="module",
    params=[
        *product([(SmallGemma3, 8), (SmallGemma3, 12), (SmallQwen3VL, 1), (SmallQwen25VL, 5)], [PLACE, ROUNDED]),
        ((SmallGemma3, 12), ROUNDED._replace(rounds=False)),
        ((SmallMixture, 5), ROUNDED),
        ((SmallQwen2Audio, 4), ROUNDED),
        ((SmallGemma3, 8), QUANTIZED),
        ((SmallQwen3VL, 1), ROUNDED._replace(decoder_matrix_dtype=torch.int8)),
        ((SmallMixture, 5), QUANTIZED),
        ((SmallBorrowed, 0), PLACE),
        ((SmallBorrowed, 1), ROUNDED),
    ],
    ids=str,
)
def references(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ReferenceAnswers:
    if not has_library():
        pytest.skip("NO KERNELS FOR THE CPU HERE: torch's products depend on how many rows they have")
    (family, seed), place = request.param
    return ReferenceAnswers(Judge(family(seed, tmp_path_factory.mktemp("checkpoint"), place)))


@on_cpu_alone(TO_THE_LAST_BIT)
@pytest.mark.parametrize("blocks_per_stretch", [1, 2])
def test_another_engine_that_loads_everything_from_tiers_answers_bit_for_bit_the_same(
    references: ReferenceAnswers, blocks_per_stretch: int
) -> None:
    judge = references.judge
    longest = max(len(judge.prompt(name)[0]) for name in PROMPTS) + NUM_TOKENS
    settings = Settings(4, 200, True, 6, True, 5, 300, 4, None, False, True, 0, blocks_per_stretch)
    config = engine_config(settings, judge.small, longest)
    before, after = Engine(judge, config), Engine(judge, config)
    after.stretches, after.tier = before.stretches, before.tier
    for engine in (before, after):
        run_workload(judge, engine, list(PROMPTS), random.Random(1), is_left=False)
        engine.runner.close()
    for number, name in enumerate(PROMPTS):
        assert after.tokens[str(number)] == references.answer(name).tokens[name]
        assert after.logprobs[str(number)] == references.answer(name).logprobs[name]
    assert after.scheduler.kv_cache.num_hit_tokens > 1.5 * before.scheduler.kv_cache.num_hit_tokens


@on_cpu_alone(TO_THE_LAST_BIT)
@thorough(12)
@given(settings=SETTINGS, names=st.lists(st.sampled_from(PROMPTS), min_size=2, max_size=9), seed=st.integers(0, 2**32))
def test_every_logprob_equals_bit_for_bit_the_one_computed_alone(
    references: ReferenceAnswers, settings: Settings, names: list[str], seed: int
) -> None:
    judge = references.judge
    longest = max(len(judge.prompt(name)[0]) for name in names) + NUM_TOKENS
    engine = Engine(judge, engine_config(settings, judge.small, longest))
    run_workload(judge, engine, names, random.Random(seed))
    engine.runner.close()
    for number, name in enumerate(map(str, names)):
        ours, expected = engine.tokens[str(number)], references.answer(name)
        assert ours == expected.tokens[name][: len(ours)], name
        assert engine.logprobs.get(str(number), []) == expected.logprobs[name][: len(ours)], name
        prompt_logprobs = engine.prompt_logprobs.get(str(number), expected.prompt_logprobs[name])
        assert prompt_logprobs == expected.prompt_logprobs[name], name


def test_few_of_the_reference_s_tokens_are_ties(judge: Judge) -> None:
    certain = [judge.answer(name).num_certain for name in PROMPTS]
    assert sum(certain) > 0.8 * NUM_TOKENS * len(PROMPTS)


# The demo checkpoint ------------------------------------------------------------------------------------------


def conversations() -> list[list[dict[str, Any]]]:
    """Conversations with shared, repeated and permuted pictures, shared questions, and one with a second turn."""
    cat, dog, owl = ({"type": "image", "image": draw(seed).picture} for seed in (1, 2, 3))
    what, how_many = "What is in the picture?", "How many shapes are there?"
    first = ask(cat, what)
    return [
        first,
        ask(cat, what),
        ask(cat, how_many),
        ask(dog, what),
        ask(cat, dog, "What is in the second picture?"),
        ask(dog, cat, "What is in the second picture?"),
        ask(cat, dog, owl, "What is in the first picture?"),
        ask(owl, owl, "What is in the second picture?"),
        [*first, {"role": "assistant", "content": [{"type": "text", "text": "A shape."}]}, *ask("Where is it?")],
        ask("Hello!"),
    ]


@pytest.fixture(scope="module")
def demo_answers() -> list[list[int]]:
    from transformers import AutoProcessor, Gemma3ForConditionalGeneration

    model: Any = Gemma3ForConditionalGeneration.from_pretrained(checkpoint_path(), dtype=torch.float32)
    from_pretrained: Any = AutoProcessor.from_pretrained
    processor = from_pretrained(checkpoint_path(), backend="pil")
    answers = []
    for messages in conversations():
        inputs = processor.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        output = model.generate(**inputs, max_new_tokens=24, do_sample=False)
        answers.append(output[0, inputs["input_ids"].shape[1] :].tolist())
    return answers


DEMO_SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "no prefix cache": {"enable_prefix_caching": False},
    "no shared embeddings": {"encoder_cache_gb": 0},
    "no processor cache": {"mm_processor_cache_gb": 0},
    "pixels alone": {"enable_prefix_caching": False, "encoder_cache_gb": 0},
    "pixels of one picture": {"enable_prefix_caching": False, "encoder_cache_gb": 0, "mm_processor_cache_gb": 2e-4},
    "no cache at all": {"enable_prefix_caching": False, "encoder_cache_gb": 0, "mm_processor_cache_gb": 0},
    "room for one picture": {"encoder_cache_size": 16, "enable_prefix_caching": False},
    "room for one picture and no tier": {"encoder_cache_size": 16, "encoder_host_cache_gb": 0},
    "one sequence": {"max_num_seqs": 1},
    "small chunks": {"max_num_batched_tokens": 19, "max_num_seqs": 4, "max_num_encoder_input_tokens": 16},
    "few pages": {"num_gpu_blocks_override": 8, "max_model_len": 128, "max_num_seqs": 8},
    "small blocks": {"block_size": 8},
    "interactive": {"performance_mode": "interactivity"},
    "long lane": {"performance_mode": "interactivity", "max_prompt_tokens_beside_streams": 1},
}


@pytest.fixture(params=DEMO_SETTINGS, scope="module")
def demo(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(**placed(dtype="float32", image_backend="pil", **DEMO_SETTINGS[request.param])) as llm:
        yield llm


def test_the_demo_answers_as_transformers_does_whatever_the_settings(demo: LLM, demo_answers: list[list[int]]) -> None:
    params = SamplingParams(temperature=0, max_tokens=24)
    for _ in range(2):  # the second round hits the caches that the first filled
        outputs = demo.chat(conversations(), params, use_tqdm=False)
        assert [list(output.outputs[0].token_ids) for output in outputs] == demo_answers


def test_repeated_requests_hit_the_caches(demo_answers: list[list[int]]) -> None:
    with LLM(**placed(image_backend="pil")) as llm:
        params = SamplingParams(temperature=0, max_tokens=24)
        llm.chat(conversations()[0], params)
        [again] = llm.chat(conversations()[0], params)
        assert again.num_cached_tokens >= 16
        llm.reset_prefix_cache()
        llm.reset_encoder_cache()
        [anew] = llm.chat(conversations()[0], params)
        assert anew.num_cached_tokens == 0
        assert list(anew.outputs[0].token_ids) == demo_answers[0]
