"""Structured outputs end to end: the answer has the requested form whatever the model prefers."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keepsight import LLM, SamplingParams, StructuredOutputsParams
from keepsight.demo import checkpoint_path
from keepsight.errors import InvalidArgumentError
from tests.place import placed
from tests.random_checkpoint import make_checkpoint

NUM_SEEDS = 50
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "count": {"type": "integer", "minimum": -5, "maximum": 99},
        "colors": {"type": "array", "items": {"enum": ["red", "blue", "größer"]}, "minItems": 1, "maxItems": 3},
        "at": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}]},
    },
    "required": ["name", "count", "colors"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=["demo", "random"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    directory = None
    if request.param == "random":
        directory = tmp_path_factory.mktemp("random")
        make_checkpoint(directory, 3, ties_embeddings=False)
    with LLM(directory, **placed(dtype="float32")) as llm:
        yield llm


def generate_texts(llm: LLM, num_seeds: int = NUM_SEEDS, **options: Any) -> list[str]:
    """Return complete answers, sampled at a temperature at which no answer has the form by chance."""
    names = ("json", "regex", "choice", "grammar", "disable_any_whitespace")
    form = StructuredOutputsParams(**{name: options.pop(name) for name in names if name in options})
    common: dict[str, Any] = {"temperature": 1.5, "max_tokens": 600, "structured_outputs": form} | options
    params = [SamplingParams(seed=seed, **common) for seed in range(num_seeds)]
    outputs = llm.generate(["What is it?"] * num_seeds, params, use_tqdm=False)
    choices = [choice for output in outputs for choice in output.outputs]
    assert {choice.finish_reason for choice in choices} == {"stop"}
    return [choice.text for choice in choices]


def assert_valid(answer: Any) -> None:
    """Check an answer against the schema, by hand."""
    assert {"name", "count", "colors"} <= answer.keys() <= {"name", "count", "colors", "at"}
    assert isinstance(answer["name"], str)
    assert len(answer["name"]) <= 8
    assert type(answer["count"]) is int
    assert -5 <= answer["count"] <= 99
    assert 1 <= len(answer["colors"]) <= 3
    assert set(answer["colors"]) <= {"red", "blue", "größer"}
    assert answer.get("at") is None or all(type(each) is bool for each in answer["at"])


def test_json_is_always_valid(llm: LLM) -> None:
    answers = [json.loads(text) for text in generate_texts(llm, json=SCHEMA)]
    for answer in answers:
        assert_valid(answer)
    # Otherwise the grammar alone would have determined the answer.
    assert len({answer["name"] for answer in answers}) > NUM_SEEDS / 2


def test_json_is_compact_if_whitespace_is_disabled(llm: LLM) -> None:
    # Its strings cannot contain white space.
    name = {"type": "string", "pattern": "^[a-z]{1,8}$"}
    schema = SCHEMA | {"properties": SCHEMA["properties"] | {"name": name}}
    assert any(re.search(r"\s", text) for text in generate_texts(llm, 20, json=schema))
    for text in generate_texts(llm, 20, json=schema, disable_any_whitespace=True):
        assert_valid(answer := json.loads(text))
        assert text == json.dumps(answer, separators=(",", ":"), ensure_ascii=r"\u" in text)


def test_a_known_format_is_enforced_and_an_unknown_one_ignored(llm: LLM) -> None:
    known, unknown = ({"type": "string", "format": form, "maxLength": 12} for form in ("date", "path"))
    schema = SCHEMA | {"properties": {"format": known, "path": unknown}, "required": ["format", "path"]}
    answers = [json.loads(text) for text in generate_texts(llm, 10, json=schema)]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", answer["format"]) for answer in answers)
    assert not any(re.fullmatch(r"\d{4}-\d\d-\d\d", answer["path"]) for answer in answers)


def test_a_regex_matches_the_whole_answer_and_a_choice_is_one_of_the_list(llm: LLM) -> None:
    pattern = r"[A-Z]{2,5}/[0-9]{1,3}(é|東)"
    assert all(re.fullmatch(pattern, text) for text in generate_texts(llm, 20, regex=pattern))
    choice = ["yes", "yes, surely", "東京", 'a "quote"\n']
    assert set(generate_texts(llm, 40, choice=choice)) <= set(choice)


def test_a_choice_may_be_one_of_thousands(llm: LLM) -> None:
    choice = [f"label {number}" for number in range(2500)]
    assert set(generate_texts(llm, 3, choice=choice)) <= set(choice)


def test_gbnf_grammars_are_enforced_recursive_or_not(llm: LLM) -> None:
    flat = 'root ::= word{2,3} "."  # of letters alone\nword ::= [A-Za-zé]{1,6} " "'
    assert all(re.fullmatch(r"([A-Za-zé]{1,6} ){2,3}\.", text) for text in generate_texts(llm, 20, grammar=flat))
    nested = r"""
        root ::= list "\n"
        list ::= "[" (ws item ("," item){0,2})? "]" ws
        item ::= list | [0-9]{1,3} ws
        ws   ::= [ \n]{0,2}
    """
    for text in generate_texts(llm, 20, grammar=nested):
        assert text.endswith("\n")
        assert isinstance(json.loads(re.sub(r"\b0+(?=\d)", "", text)), list)


def test_other_sampling_parameters_do_not_break_the_form(llm: LLM) -> None:
    options = {"n": 3, "min_tokens": 40, "top_p": 0.9, "top_k": 40, "presence_penalty": 1.0, "repetition_penalty": 1.3}
    for text in generate_texts(llm, 3, json=SCHEMA, logit_bias=dict.fromkeys(range(300, 600), 20.0), **options):
        assert_valid(json.loads(text))


def test_a_stop_string_ends_a_guided_answer_too(llm: LLM) -> None:
    assert set(generate_texts(llm, 5, regex="a{3}b{3}", stop="ab")) == {"aa"}


def test_a_plain_answer_is_the_same_beside_guided_ones(llm: LLM) -> None:
    plain = SamplingParams(temperature=1.0, seed=5, max_tokens=30)
    guided = SamplingParams(temperature=1.5, seed=1, structured_outputs=StructuredOutputsParams(json=SCHEMA))
    [alone] = llm.generate("Hello", plain)
    beside = llm.generate(["Hello", "Hello", "Hello"], [guided, plain, guided], use_tqdm=False)[1]
    assert beside.outputs[0].token_ids == alone.outputs[0].token_ids


def test_preempted_answers_are_the_same(llm: LLM) -> None:
    ample = generate_texts(llm, 4, json=SCHEMA)
    with LLM(llm.config.model, **placed(dtype="float32", num_gpu_blocks_override=16, max_model_len=256)) as small:
        assert generate_texts(small, 4, json=SCHEMA, max_tokens=240) == ample


def test_a_form_that_cannot_be_compiled_is_refused_before_submission(llm: LLM) -> None:
    with pytest.raises(InvalidArgumentError, match=r"structured_outputs\.json: .*Invalid type") as caught:
        generate_texts(llm, 1, json={"type": "thing"})
    assert caught.value.status == 400


def test_an_invalid_grammar_found_while_compiling_is_the_caller_s_error(llm: LLM) -> None:
    impossible = StructuredOutputsParams(grammar='start: "a" <nothing>')
    with pytest.raises(InvalidArgumentError, match=r"^structured_outputs\.grammar: .*<nothing>"):
        llm.generate("Hello", SamplingParams(structured_outputs=impossible))


def test_only_allowed_tokens_are_generated(llm: LLM) -> None:
    allowed = [300, 301, 302]
    params = SamplingParams(temperature=1.5, seed=1, allowed_token_ids=allowed, max_tokens=50)
    [output] = llm.generate("Hello", params)
    assert set(output.outputs[0].token_ids) <= set(allowed)
    assert len(set(output.outputs[0].token_ids)) > 1
    with pytest.raises(InvalidArgumentError, match=r"allowed_token_ids\[1\]: 100000 is not one of"):
        llm.generate("Hello", SamplingParams(allowed_token_ids=[3, 100_000]))


def test_a_bias_of_an_unknown_token_is_refused_as_by_vllm(llm: LLM) -> None:
    with pytest.raises(InvalidArgumentError, match=r"logit_bias\[100000\]: 100000 is not one of") as caught:
        llm.generate("Hello", SamplingParams(logit_bias={3: 1.0, "100000": -100}))  # type: ignore[dict-item]
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "extreme", [{"temperature": 1e300}, {"repetition_penalty": 1e-300}, {"repetition_penalty": 1e300}]
)
def test_extreme_sampling_values_do_not_break_the_form(extreme: dict[str, float], llm: LLM) -> None:
    assert all(re.fullmatch("[ab]{3}", text) for text in generate_texts(llm, 5, regex="[ab]{3}", **extreme))


def test_sampling_defaults_come_from_the_checkpoint(tmp_path: Path) -> None:
    for path in checkpoint_path().iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "generation_config.json").write_text('{"temperature": 0, "max_new_tokens": 7, "eos_token_id": [1, 6]}')
    with LLM(tmp_path, **placed()) as own, LLM(tmp_path, **placed(generation_config="none")) as neutral:
        assert own.get_default_sampling_params() == SamplingParams(temperature=0, max_tokens=7)
        assert neutral.get_default_sampling_params() == SamplingParams()
        [first], [second] = own.generate("Hello"), own.generate("Hello")
        assert first.outputs[0].token_ids == second.outputs[0].token_ids
        [output] = own.generate("Hello", SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 3
