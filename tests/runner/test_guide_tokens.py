"""A guide allows what llguidance's grammar allows, whatever happens to the sequence meanwhile."""

import json
import math
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import pytest
import tokenizers
import torch
from tokenizers import pre_tokenizers

from keepsight.demo import checkpoint_path
from keepsight.frontend.prompt.call_grammar import CallGrammar
from keepsight.frontend.prompt.call_text import TAGGED, write_call
from keepsight.frontend.prompt.tokenizer import Tokenizer
from keepsight.requests import EngineRequest, ThoughtTokens
from keepsight.runner.guide_tokens import CompiledGrammar, Guide, GuideMaker, GuideTime, forbid_tokens
from keepsight.runner.sample_tokens import SamplingState, TokenConstraints, sample_tokens
from keepsight.sampling_params import SamplingParams
from keepsight.scheduling.step_plan import Fault
from keepsight.structured_outputs import StructuredOutputsParams, write_schema
from tests.byte_level_tokenizer import byte_level_checkpoint
from tests.frontend.gemma_like import build_checkpoint_with_hole, gemma_like_checkpoint
from tests.llama_like_tokenizer import llama_like_checkpoint, write_llama_like_tokenizer
from tests.runner.small_model import Driver, SmallModel

DEMO = checkpoint_path() / "tokenizer.json"
END = frozenset({1, 6})
VOCAB_SIZE = 960  # the demo model's, larger than its tokenizer


def regex(pattern: str) -> StructuredOutputsParams:
    return StructuredOutputsParams(regex=pattern)


@pytest.fixture(scope="module")
def maker() -> Iterator[GuideMaker]:
    maker = GuideMaker(DEMO, END)
    yield maker
    maker.close()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_checkpoint(checkpoint_path())


def allowed_by(guide: Guide, vocab_size: int = VOCAB_SIZE) -> set[int]:
    logits = torch.zeros(1, vocab_size)
    forbid_tokens(logits, [guide])
    return set(logits[0].isfinite().nonzero().flatten().tolist())


def test_exactly_the_tokens_that_begin_a_text_of_the_grammar_are_allowed(
    maker: GuideMaker, tokenizer: Tokenizer
) -> None:
    guide = maker.begin(regex("color(s|ed)?"))
    spellings = {token_id: tokenizer.token_bytes(token_id) for token_id in range(tokenizer.num_tokens)}
    beginnings = {b"c", b"co", b"col", b"colo", b"color", b"colors", b"colore", b"colored"}
    expected = {
        each for each, spelling in spellings.items() if spelling in beginnings and not tokenizer.is_special(each)
    }
    assert expected
    assert allowed_by(guide) == expected


CHECKPOINTS = [checkpoint_path(), gemma_like_checkpoint(), byte_level_checkpoint(), llama_like_checkpoint()]
judges_each_kind = pytest.mark.parametrize(
    "checkpoint", CHECKPOINTS, ids=["demo", "gemma-like", "byte-level", "llama-like"]
)


@judges_each_kind
def test_guided_tokens_spell_the_text_that_the_guide_describes(checkpoint: Path) -> None:
    """Characters that only byte tokens can spell, spaces, runs of newlines, text that a normalizer would compose."""
    tokenizer = Tokenizer.from_checkpoint(checkpoint)
    maker = GuideMaker(checkpoint / "tokenizer.json", tokenizer.eos_token_ids)
    text = "  a\n\n\n日本 <table>\t\U0001f600é ▁ b▁▂e\u0301"
    state = state_for(maker, StructuredOutputsParams(choice=[text]), temperature=2.0, seed=3)
    token_ids = draw_answer(state, lambda: torch.zeros(1, tokenizer.num_tokens + 5), tokenizer.eos_token_ids)
    maker.close()
    assert token_ids[-1] in tokenizer.eos_token_ids
    assert b"".join(map(tokenizer.token_bytes, token_ids[:-1])).decode() == text


@judges_each_kind
@pytest.mark.parametrize(
    "form",
    [
        StructuredOutputsParams(json={"enum": ["größer", "東京 <think>", 5]}),
        StructuredOutputsParams(json={"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 3}),
        regex("[é-ü東😀]{2,5} (naïve|привет)"),
        StructuredOutputsParams(choice=["é", "e\u0301", "<tool_call>"]),
    ],
    ids=["enum", "array", "regex", "choice"],
)
def test_an_answer_of_any_form_is_of_that_form_and_whole_characters(
    checkpoint: Path, form: StructuredOutputsParams
) -> None:
    tokenizer = Tokenizer.from_checkpoint(checkpoint)
    maker = GuideMaker(checkpoint / "tokenizer.json", tokenizer.eos_token_ids)
    for seed in range(8):
        state = state_for(maker, form, temperature=1.0, seed=seed)
        token_ids = draw_answer(state, lambda: torch.randn(1, tokenizer.num_tokens), tokenizer.eos_token_ids)
        text = tokenizer.decode(token_ids[:-1], skip_special_tokens=False)
        assert "\ufffd" not in text
        if form.json is not None:
            json.loads(text)
        elif form.regex is not None:
            assert re.fullmatch(form.regex, text)
        else:
            assert text in (form.choice or ())
    maker.close()


def test_a_required_text_is_spelled_in_the_tokens_that_encode_it_where_all_tokens_are_bytes() -> None:
    tokenizer = Tokenizer.from_checkpoint(byte_level_checkpoint())
    maker = GuideMaker(byte_level_checkpoint() / "tokenizer.json", tokenizer.eos_token_ids)
    text = "What do you see? Größe 東京タワー\n\n<think> 😀"
    state = state_for(maker, StructuredOutputsParams(choice=[text]), temperature=2.0, seed=3)
    token_ids = draw_answer(state, lambda: torch.zeros(1, tokenizer.num_tokens), tokenizer.eos_token_ids)
    assert tuple(token_ids[:-1]) == tokenizer.encode(text)
    maker.close()


@pytest.mark.parametrize("has_metaspace", [False, True])
def test_a_required_text_has_no_extra_space_if_the_vocabulary_writes_one_before_every_text(
    tmp_path: Path, has_metaspace: bool
) -> None:
    write_llama_like_tokenizer(tmp_path)
    if has_metaspace:
        backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        backend.normalizer, backend.pre_tokenizer = None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_checkpoint(tmp_path)
    maker = GuideMaker(tmp_path / "tokenizer.json", frozenset({2}))
    text = "quick brown fox"
    state = state_for(maker, StructuredOutputsParams(choice=[text]), temperature=2.0, seed=3)
    token_ids = draw_answer(state, lambda: torch.zeros(1, tokenizer.num_tokens), frozenset({2}))[:-1]
    maker.close()
    assert b"".join(map(tokenizer.token_bytes, token_ids)).decode() == text
    spelled = [tokenizer.token(each) for each in token_ids]
    assert "<0x" not in "".join(map(str, spelled))


@pytest.mark.parametrize("names", [["look"], ["look", "look_up", "go"]])
def test_a_required_call_is_spelled_in_the_tokens_that_it_has_in_the_next_turn(names: list[str]) -> None:
    """With the token that is the tag itself, and the template's own spaces."""
    tokenizer = Tokenizer.from_checkpoint(byte_level_checkpoint())
    maker = GuideMaker(byte_level_checkpoint() / "tokenizer.json", tokenizer.eos_token_ids)
    properties = {"at": {"const": "the sea"}, "size": {"const": [1, 2]}}
    schema = {"properties": properties, "required": ["at", "size"], "additionalProperties": False}
    schemas = {name: write_schema({"type": "object"} | schema, TAGGED.spacing) for name in names}
    grammar = CallGrammar(schemas, must_call=True, is_single=True, call_form=TAGGED)
    form = StructuredOutputsParams(grammar=str(grammar))
    assert allowed_by(maker.begin(form), tokenizer.num_tokens) == {tokenizer.token_id("<tool_call>")}
    state = state_for(maker, form, temperature=2.0, seed=3)
    token_ids = draw_answer(state, lambda: torch.zeros(1, tokenizer.num_tokens), tokenizer.eos_token_ids)[:-1]
    maker.close()
    called = tokenizer.decode(token_ids)
    assert called.strip() in [write_call(name, '{"at": "the sea", "size": [1, 2]}', TAGGED) for name in names]
    assert len(names) > 1 or tuple(token_ids) == tokenizer.encode(called)


def test_only_a_character_that_is_read_as_a_space_is_spelled_in_bytes() -> None:
    """Gemma's normalizer turns `▁` into a space."""
    tokenizer = Tokenizer.from_checkpoint(gemma_like_checkpoint())
    maker = GuideMaker(gemma_like_checkpoint() / "tokenizer.json", tokenizer.eos_token_ids)
    words, in_bytes = tokenizer.encode("the image "), [tokenizer.token_id(f"<0x{byte:02X}>") for byte in "▁▁".encode()]
    state = state_for(maker, StructuredOutputsParams(choice=["the image ▁▁the image "]), temperature=2.0, seed=3)
    token_ids = draw_answer(state, lambda: torch.zeros(1, tokenizer.num_tokens))
    maker.close()
    assert [each for each in token_ids if not tokenizer.is_special(each)] == [*words, *in_bytes, *words]


def test_tokens_after_a_hole_in_the_ids_are_sampled_and_the_hole_is_not(tmp_path: Path) -> None:
    hole = build_checkpoint_with_hole(tmp_path)
    tokenizer, maker = Tokenizer.from_checkpoint(tmp_path), GuideMaker(tmp_path / "tokenizer.json", END)
    last, *_ = tokenizer.encode("Here is the original image and here are some crops to help you see better.")
    assert last >= tokenizer.num_tokens
    allowed = allowed_by(maker.begin(regex(r"[\s\S]*")))
    maker.close()
    assert last in allowed
    assert allowed.isdisjoint(hole)


@pytest.mark.parametrize("text", ["<end_of_turn>", "a<start_of_image>b", "<eos> <bos>"])
def test_the_spelling_of_a_special_token_is_a_text_like_any_other(
    maker: GuideMaker, tokenizer: Tokenizer, text: str
) -> None:
    state = state_for(maker, StructuredOutputsParams(choice=[text]), temperature=2.0, seed=3)
    token_ids = draw_answer(state, lambda: torch.zeros(1, VOCAB_SIZE))
    assert tokenizer.decode(token_ids[:-1]) == text
    assert not any(tokenizer.is_special(each) for each in token_ids[:-1])


def test_a_grammar_may_demand_a_special_token_itself(maker: GuideMaker, tokenizer: Tokenizer) -> None:
    state = state_for(maker, StructuredOutputsParams(grammar='start: "a" <start_of_image>'), temperature=2.0, seed=3)
    token_ids = draw_answer(state, lambda: torch.zeros(1, VOCAB_SIZE))
    assert tokenizer.decode(token_ids[:-1], skip_special_tokens=False) == "a<start_of_image>"
    assert token_ids[-2] == tokenizer.token_id("<start_of_image>")


def state_for(maker: GuideMaker, form: StructuredOutputsParams, **params: Any) -> SamplingState:
    end_ids, asked = maker._end_ids, SamplingParams(structured_outputs=form, max_tokens=None, **params)
    return SamplingState(TokenConstraints(asked, (), end_ids), 0, maker.begin(form))


def draw_answer(state: SamplingState, logits: Callable[[], torch.Tensor], end_ids: frozenset[int] = END) -> list[int]:
    """Sample until an end of answer."""
    token_ids: list[int] = []
    while not token_ids or token_ids[-1] not in end_ids:
        assert len(token_ids) < 500
        token_ids.append(sample_tokens(logits(), [state])[0].token_id)
        assert state.fault is None
    return token_ids


def test_an_answer_ends_only_where_the_grammar_does(maker: GuideMaker) -> None:
    guide = maker.begin(regex("AB?"))
    assert not allowed_by(guide) & END
    [a] = allowed_by(guide)
    guide.follow(a)
    assert allowed_by(guide) > END
    guide.follow(next(iter(allowed_by(guide) - END)))
    assert allowed_by(guide) == END


def test_an_end_id_that_the_tokenizer_lacks_is_ignored() -> None:
    maker = GuideMaker(DEMO, END | {VOCAB_SIZE + 7})
    guide = maker.begin(regex("a"))
    guide.follow(next(iter(allowed_by(guide))))
    assert allowed_by(guide) == END
    maker.close()


def test_the_end_of_a_grammar_goes_before_min_tokens_and_every_ban(maker: GuideMaker) -> None:
    banned = {"min_tokens": 50, "logit_bias": dict.fromkeys(END, -100.0), "allowed_token_ids": [20]}
    state = state_for(maker, regex("A"), temperature=1.0, seed=1, **banned)
    assert len(draw_answer(state, lambda: torch.randn(1, VOCAB_SIZE))) == 2


@pytest.mark.parametrize("is_open", [True, False])
def test_a_thought_is_free_and_the_answer_behind_it_has_its_form(is_open: bool) -> None:
    tokenizer = Tokenizer.from_checkpoint(byte_level_checkpoint())
    maker = GuideMaker(byte_level_checkpoint() / "tokenizer.json", tokenizer.eos_token_ids)
    opening, closing = tokenizer.encode("<think></think>")
    guide = maker.begin(regex("AB?"), ThoughtTokens(None if is_open else opening, closing))
    begun = maker.begin(regex("AB?"))
    if not is_open:
        assert allowed_by(guide, tokenizer.num_tokens) == {*allowed_by(begun, tokenizer.num_tokens), opening}
        guide.follow(opening)
    for token_id in tokenizer.encode("A? No: <think> 5"):
        assert guide.mask() is None
        guide.follow(token_id)
    guide.follow(closing)
    assert allowed_by(guide, tokenizer.num_tokens) == allowed_by(begun, tokenizer.num_tokens)
    [a] = tokenizer.encode("A")
    guide.follow(a)
    begun.follow(a)
    assert allowed_by(guide, tokenizer.num_tokens) == allowed_by(begun, tokenizer.num_tokens)
    maker.close()


def test_an_answer_that_begins_without_a_thought_cannot_think_later() -> None:
    tokenizer = Tokenizer.from_checkpoint(byte_level_checkpoint())
    maker = GuideMaker(byte_level_checkpoint() / "tokenizer.json", tokenizer.eos_token_ids)
    opening, closing = tokenizer.encode("<think></think>")
    guide = maker.begin(regex("AB?"), ThoughtTokens(opening, closing))
    guide.follow(*tokenizer.encode("A"))
    assert opening not in allowed_by(guide, tokenizer.num_tokens)
    assert guide.fault is None
    maker.close()


def test_rows_without_a_guide_are_unchanged_and_each_other_row_follows_its_own(maker: GuideMaker) -> None:
    guides = [None, maker.begin(regex("A")), None, maker.begin(regex("B"))]
    logits = torch.zeros(4, VOCAB_SIZE)
    forbid_tokens(logits, guides)
    assert logits.isfinite().sum(dim=-1).tolist() == [VOCAB_SIZE, 1, VOCAB_SIZE, 1]
    assert logits[1].argmax() != logits[3].argmax()


def test_choices_of_one_request_share_a_grammar_but_not_their_place_in_it(maker: GuideMaker) -> None:
    first, second = (maker.begin(regex("AB")) for _ in range(2))
    first.follow(*allowed_by(first))
    assert allowed_by(first) != allowed_by(second)


def test_logprobs_are_the_models_own_whatever_was_forbidden(maker: GuideMaker) -> None:
    logits = torch.randn(1, VOCAB_SIZE)
    state = state_for(maker, regex("A"), temperature=0, logprobs=0)
    [token] = sample_tokens(logits, [state])
    assert token.logprobs is not None
    assert token.logprobs[0].logprob == pytest.approx(float(logits[0].log_softmax(-1)[token.token_id]))


def test_nothing_is_loaded_before_the_first_guided_request_and_a_grammar_is_compiled_once() -> None:
    threads = set(threading.enumerate())
    maker = GuideMaker(DEMO, END)
    assert maker._tokenizer is None
    assert threads.issuperset(threading.enumerate())
    guides = [maker.begin(regex("A")) for _ in range(3)]
    assert len({id(guide._compiled) for guide in guides}) == 1
    maker.close()


def test_a_prepared_tokenizer_is_not_read_again(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    shutil.copy(DEMO, path)
    maker = GuideMaker(path, END)
    maker.prepare().result()
    path.unlink()
    assert allowed_by(maker.begin(regex("color(s|ed)?")))
    maker.close()


def test_an_object_may_have_a_thousand_optional_properties() -> None:
    maker = GuideMaker(DEMO, END)
    properties = {f"field_{index}": {"type": "string"} for index in range(1000)}
    guide = maker.begin(StructuredOutputsParams(json={"type": "object", "properties": properties}))
    guide.mask()
    for token_id in tokenizers.Tokenizer.from_file(str(DEMO)).encode('{"field_9', add_special_tokens=False).ids:
        guide.follow(token_id)
        guide.mask()
    assert guide.fault is None
    maker.close()


def test_a_compiled_grammar_is_kept_while_a_request_that_has_not_begun_holds_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("keepsight.runner.guide_tokens.MAX_KEPT", 2)
    maker = GuideMaker(DEMO, END)
    held = [maker.compile(regex(each)) for each in "ABCD"]
    for each in held:
        each.result()
    assert [maker.compile(regex(each)) for each in "ABCD"] == held
    assert maker.begin(regex("A"))._compiled is held[0]
    maker.close()


def test_only_so_many_compiled_grammars_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keepsight.runner.guide_tokens.MAX_KEPT", 2)
    maker = GuideMaker(DEMO, END)
    first, again, other, third = (maker.begin(regex(each)) for each in ("A", "A", "B", "C"))
    assert list(maker._kept) == [regex(each).to_grammar() for each in ("B", "C")]
    # A guide in use keeps its grammar.
    assert allowed_by(first) == allowed_by(again)
    assert len({frozenset(allowed_by(each)) for each in (first, other, third)}) == 3
    maker.close()


def test_a_grammar_whose_compilation_was_dropped_is_waited_for_with_the_first_token() -> None:
    compiled = Future[CompiledGrammar]()
    guide, asked = Guide(compiled, "structured_outputs.regex"), threading.Event()

    def ask() -> None:
        asked.set()
        guide.mask()

    thread = threading.Thread(target=ask)
    thread.start()
    assert asked.wait(20)
    assert guide.fault is None
    compiled.set_exception(ValueError("too large"))
    thread.join(20)
    assert guide.fault == Fault("structured outputs: too large")  # no field: the error is not the client's


# In the runner ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> SmallModel:
    return SmallModel(0, tmp_path_factory.mktemp("small"))


def guided(small: SmallModel, name: str, form: StructuredOutputsParams, **params: Any) -> EngineRequest:
    return small.request(name, prompt_seed=5, structured_outputs=form, **params)


LETTERS = regex("[A-F]{12}")


def drive(small: SmallModel) -> Driver:
    return Driver(small, end_ids=END, guides=GuideMaker(DEMO, END))


def begin(driver: Driver, request: EngineRequest) -> tuple[str, int]:
    sequence_id = driver.begin(request)
    for piece in driver.prompt_slices(sequence_id):
        driver.compute(piece)
    return sequence_id


@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 1.5, "seed": 4}])
def test_a_preempted_answer_goes_on_where_its_grammar_was(small: SmallModel, params: dict[str, Any]) -> None:
    answers = []
    for is_preempted in (False, True):
        driver = drive(small)
        sequence_id = begin(driver, guided(small, "a", LETTERS, **params))
        driver.decode(sequence_id, num_tokens=5)
        if is_preempted:
            driver.lose_pages(sequence_id)
            for piece in driver.prompt_slices(sequence_id):
                driver.compute(piece)
            driver.decode(sequence_id, num_tokens=6)
        else:
            driver.decode(sequence_id, num_tokens=7)
        answers.append(driver.tokens[sequence_id])
        driver.runner.close()
    assert answers[0] == answers[1]
    text = Tokenizer.from_checkpoint(checkpoint_path()).decode(answers[0][:12])
    assert len(text) == 12
    assert set(text) <= set("ABCDEF")
    assert answers[0][12] in END


def test_a_grammar_that_needs_too_much_memory_fails_only_its_own_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keepsight.runner.guide_tokens.MAX_LEXER_STATES", 40)
    maker = GuideMaker(DEMO, END)
    states = [state_for(maker, form, temperature=1.0, seed=1) for form in (regex("(A|B)*A(A|B){400}"), LETTERS)]
    for _ in range(40):
        sample_tokens(torch.zeros(2, VOCAB_SIZE), states)
    assert states[0].fault is not None
    assert "states" in states[0].fault.message
    assert states[0].fault.field == "structured_outputs.regex"
    assert states[1].fault is None
    maker.close()


def test_the_error_of_a_failed_guide_does_not_reference_its_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keepsight.runner.guide_tokens.MAX_LEXER_STATES", 40)
    maker = GuideMaker(DEMO, END)
    state = state_for(maker, regex("(A|B)*A(A|B){400}"), temperature=1.0, seed=1)
    for _ in range(40):
        sample_tokens(torch.zeros(1, VOCAB_SIZE), [state])
    assert state.fault is not None
    assert "{400}" not in state.fault.message
    assert "\n" not in state.fault.message
    maker.close()


class SlowMatcher:
    """A grammar that allows token 20, and whose masks take as long as `clock` says."""

    def __init__(self, clock: "ThreadClock") -> None:
        self._clock = clock

    def deep_copy(self) -> "SlowMatcher":
        return SlowMatcher(self._clock)

    def compute_bitmask(self) -> bytes:
        self._clock.now += self._clock.seconds_per_mask
        return bytes([0, 0, 16, 0])

    def consume_token(self, _token_id: int) -> bool:
        self._clock.now += self._clock.seconds_per_token
        return True

    def is_error(self) -> bool:
        return False

    def is_stopped(self) -> bool:
        return False


class ThreadClock:
    now, seconds_per_mask, seconds_per_token = 0.0, 0.0, 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ThreadClock:
    clock = ThreadClock()
    monkeypatch.setattr("keepsight.runner.guide_tokens.thread_time", lambda: clock.now)
    return clock


def compile_slowly(clock: ThreadClock) -> Future[CompiledGrammar]:
    compiled, matcher = Future[CompiledGrammar](), cast(Any, SlowMatcher(clock))
    compiled.set_result(CompiledGrammar(matcher))
    return compiled


def slow_guide(
    clock: ThreadClock, time: GuideTime | None = None, compiled: Future[CompiledGrammar] | None = None
) -> Guide:
    return Guide(compiled or compile_slowly(clock), "structured_outputs.grammar", time=time)


def ask_for_tokens(guide: Guide, count: int) -> int:
    """Return how many tokens the guide gave."""
    for index in range(count):
        guide.mask()
        if guide.fault:
            return index
        guide.follow(20)
    return count


@pytest.mark.parametrize(
    ("seconds_per_mask", "seconds_per_token", "expected"), [(1.5, 0, 1), (0.2, 0, 7), (0.05, 0.15, 7), (0.5, 0, 3)]
)
def test_a_grammar_whose_tokens_stay_slow_to_find_is_at_fault(
    clock: ThreadClock, seconds_per_mask: float, seconds_per_token: float, expected: int
) -> None:
    clock.seconds_per_mask, clock.seconds_per_token = seconds_per_mask, seconds_per_token
    guide, other = slow_guide(clock), slow_guide(clock)
    assert ask_for_tokens(guide, 100) == pytest.approx(expected, abs=1)
    assert guide.fault is not None
    assert guide.fault.field == "structured_outputs.grammar"
    assert "takes more than 0.05 seconds" in guide.fault.message
    assert other.fault is None


@pytest.mark.parametrize("is_slow_to_follow", [False, True])
def test_a_grammar_that_was_too_slow_is_not_followed_again(clock: ThreadClock, is_slow_to_follow: bool) -> None:
    compiled = compile_slowly(clock)
    clock.seconds_per_mask, clock.seconds_per_token = (0, 1.5) if is_slow_to_follow else (1.5, 0)
    running = slow_guide(clock, compiled=compiled)
    # As if it was asked for by a client that left at once: nothing asks this guide for another token.
    guide = slow_guide(clock, compiled=compiled)
    running.mask()
    running.follow(20)
    spent = clock.now
    assert ask_for_tokens(guide, 100) == 0
    assert clock.now == spent
    assert guide.fault is not None
    assert guide.fault.field == "structured_outputs.grammar"
    assert "takes more than 0.05 seconds" in guide.fault.message


def test_answers_in_progress_do_not_end_because_another_was_too_slow(clock: ThreadClock) -> None:
    compiled = compile_slowly(clock)
    early, slow = (slow_guide(clock, compiled=compiled) for _ in range(2))
    assert ask_for_tokens(early, 1) == 1
    clock.seconds_per_mask = 1.5
    slow.mask()
    clock.seconds_per_mask = 0
    assert ask_for_tokens(early, 10) == 10
    assert ask_for_tokens(slow, 1) == 0


def test_a_few_slow_masks_and_masks_that_are_never_very_slow_are_fine(clock: ThreadClock) -> None:
    guide = slow_guide(clock)
    clock.seconds_per_mask = 0.99
    assert ask_for_tokens(guide, 1) == 1
    clock.seconds_per_mask = 0.04
    assert ask_for_tokens(guide, 5000) == 5000
    clock.seconds_per_mask = 0.5
    assert ask_for_tokens(guide, 2) == 2


def test_the_choices_of_a_request_share_their_time(clock: ThreadClock) -> None:
    clock.seconds_per_mask, time = 0.5, GuideTime()
    guides = [slow_guide(clock, time) for _ in range(100)]
    for guide in guides:
        guide.mask()
    assert [guide.fault is None for guide in guides].count(True) == 3
    assert clock.now == 1.5


def test_choices_of_one_request_are_given_one_time(small: SmallModel) -> None:
    driver = drive(small)
    request = guided(small, "a", LETTERS, n=2)
    sequences = [driver.runner.sequences[driver.begin(request, choice)] for choice in range(2)]
    first, second = (each.sampling.guide for each in sequences)
    other = driver.runner.sequences[driver.begin(guided(small, "b", LETTERS))].sampling.guide
    assert first
    assert second
    assert other
    assert first._time is second._time
    assert first._time is not other._time
    driver.runner.close()


def test_a_plain_answer_is_the_same_beside_a_guided_one(small: SmallModel) -> None:
    driver = drive(small)
    alone = driver.answer(small.request("plain", prompt_seed=6), 8)
    plain, other = begin(driver, small.request("again", prompt_seed=6)), begin(driver, guided(small, "b", LETTERS))
    driver.decode(plain, other, num_tokens=7)
    assert driver.tokens[plain] == alone
    driver.runner.close()


def test_a_guide_that_fails_fails_only_its_own_sequence(small: SmallModel) -> None:
    driver = drive(small)
    plain, broken = begin(driver, small.request("plain")), begin(driver, guided(small, "broken", LETTERS))
    guide = driver.runner.sequences._sequences[broken].sampling.guide
    assert guide is not None
    guide.fault = Fault("too complex")
    result = driver.compute(driver.next_slice(plain), driver.next_slice(broken))
    assert result.failed_sequences == {broken: Fault("too complex")}
    assert [each.sequence_id for each in result.computed] == [plain]
    driver.runner.close()


def test_a_grammar_with_an_undefined_name_is_the_client_s_error(
    small: SmallModel, caplog: pytest.LogCaptureFixture
) -> None:
    driver = drive(small)
    sequence_id = driver.begin(guided(small, "a", StructuredOutputsParams(grammar='start: "a" <nothing>')))
    result = driver.compute(*driver.prompt_slices(sequence_id))
    fault = result.failed_sequences[sequence_id]
    assert "<nothing>" in fault.message
    assert fault.field == "structured_outputs.grammar"
    assert not caplog.records
    driver.runner.close()


def test_without_a_tokenizer_a_guided_request_fails_and_says_why(small: SmallModel) -> None:
    driver = Driver(small)
    sequence_id = driver.begin(guided(small, "a", LETTERS))
    result = driver.compute(*driver.prompt_slices(sequence_id))
    fault = result.failed_sequences[sequence_id]
    assert "no tokenizer" in fault.message
    assert fault.field is None
    assert math.isfinite(driver.answer(small.request("b"), 1)[0])
    driver.runner.close()
