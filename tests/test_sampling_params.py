import copy
import math
import pickle
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from keepsight import sampling_params
from keepsight.errors import InvalidArgumentError, UnsupportedFieldError
from keepsight.sampling_params import (
    MAX_REPETITION_PENALTY,
    MIN_REPETITION_PENALTY,
    MIN_TEMPERATURE,
    SamplingParams,
)


def test_the_defaults_are_those_of_vllm() -> None:
    assert asdict(SamplingParams()) == {
        "n": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "seed": None,
        "stop": (),
        "bad_words": (),
        "stop_token_ids": (),
        "ignore_eos": False,
        "max_tokens": 16,
        "min_tokens": 0,
        "logprobs": None,
        "prompt_logprobs": None,
        "logit_bias": None,
        "allowed_token_ids": None,
        "structured_outputs": None,
        "skip_special_tokens": True,
        "include_stop_str_in_output": False,
        "prediction": None,
    }


def test_positional_arguments_are_refused() -> None:
    untyped: Any = SamplingParams
    with pytest.raises(TypeError, match="takes only keyword arguments, such as temperature=0"):
        untyped(1, 0.5)
    assert copy.copy(SamplingParams(n=2)) == SamplingParams(n=2)


def test_values_of_every_accepted_form_are_normalised() -> None:
    token_ids: list[Any] = [np.int64(3)]
    bias: dict[Any, float] = {"12": 1, 7: -100}
    params = SamplingParams(temperature=0, top_k=-1, seed=-1, stop="\n", stop_token_ids=token_ids, logit_bias=bias)
    assert params.greedy
    assert type(params.temperature) is float
    assert params.top_k == 0
    assert params.seed is None
    assert params.stop == ("\n",)
    assert params.stop_token_ids == (3,)
    assert type(params.stop_token_ids[0]) is int
    assert params.logit_bias == {12: 1.0, 7: -100.0}
    none: Any = None
    assert SamplingParams(stop=none, stop_token_ids=none) == SamplingParams(stop=[], stop_token_ids=[])


def test_params_are_hashable_and_copyable() -> None:
    params = SamplingParams(stop=["a", "b"], logit_bias={3: 1.5})
    assert len({params, SamplingParams(stop=("a", "b"), logit_bias={3: 1.5})}) == 1
    assert copy.deepcopy(params) == pickle.loads(pickle.dumps(params)) == replace(params) == params


def test_assigned_values_are_checked_and_normalised() -> None:
    params: Any = SamplingParams(temperature=0)
    params.max_tokens, params.stop, params.top_k = 7, "x", -1
    assert params == SamplingParams(temperature=0, max_tokens=7, stop=["x"])
    for name, value in (("max_tokens", 0), ("min_tokens", 8), ("temperatur", 1), ("detokenize", False)):
        with pytest.raises(InvalidArgumentError, match=name):
            setattr(params, name, value)
    assert params == SamplingParams(temperature=0, max_tokens=7, stop=["x"])


def test_the_callers_logit_bias_is_copied() -> None:
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[2] = 3.0
    assert params.logit_bias == {1: 2.0}


def test_a_temperature_near_zero_is_raised_to_the_minimum() -> None:
    assert SamplingParams(temperature=1e-30).temperature == MIN_TEMPERATURE
    assert not SamplingParams(temperature=1e-30).greedy


@pytest.mark.parametrize(("given", "expected"), [(1e-300, MIN_REPETITION_PENALTY), (1e300, MAX_REPETITION_PENALTY)])
def test_a_repetition_penalty_is_clamped_to_the_float32_range(given: float, expected: float) -> None:
    assert SamplingParams(repetition_penalty=given).repetition_penalty == expected > 0


@pytest.mark.parametrize("number", [2**31, 2**63 - 1, 10**400])
def test_max_tokens_is_clamped_to_int32(number: int) -> None:
    assert SamplingParams(max_tokens=number, min_tokens=2**31 - 1).max_tokens == 2**31 - 1


@pytest.mark.parametrize("fields", [{"top_k": 2**31}, {"min_tokens": 2**31}, {"stop_token_ids": [2**31]}])
def test_an_error_for_too_large_a_number_names_the_maximum(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=" to 2147483647"):
        SamplingParams(**fields)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("n", [0, -1, 129, 1.0, True, None, "1", math.nan]),
        ("temperature", [-0.1, math.nan, math.inf, True, "0", None, 10**400]),
        ("top_p", [0, -0.1, 1.01, math.nan, False, None, "1"]),
        ("top_k", [-2, 1.5, True, None, 2**31]),
        ("min_p", [-0.1, 1.1, math.nan]),
        ("presence_penalty", [-2.1, 2.1, math.nan, None]),
        ("frequency_penalty", [-2.1, 2.1, math.inf]),
        ("repetition_penalty", [0, -1, math.nan, math.inf]),
        ("seed", [2**63, -(2**63) - 1, 1.0, True, "7"]),
        ("stop", [1, b"x", {"a": 1}, True, ["x"] * 65, "x" * 65_537, ["x" * 2000] * 33]),
        ("stop[1]", [["a", ""], ["a", 1], ["a", None]]),
        ("bad_words", ["abc", 1, ["x"] * 1025, ["x" * 1000] * 66]),
        ("bad_words[1]", [["a", ""], ["a", 1]]),
        ("stop_token_ids", ["12", 12, {1: 2}]),
        ("stop_token_ids[0]", [[-1], [1.0], [True], [2**31]]),
        ("ignore_eos", [1, None, "true"]),
        ("skip_special_tokens", [0, None]),
        ("include_stop_str_in_output", [0, None]),
        ("max_tokens", [0, -1, 1.5, True, "16"]),
        ("min_tokens", [-1, 17, 1.0, None]),
        ("logprobs", [-1, 21, True, 1.0]),
        ("prompt_logprobs", [-1, 21, True, 1.0]),
        ("logit_bias", [[1], "x", 3]),
        ("logit_bias[5]", [{5: 100.1}, {5: math.nan}, {5: True}, {5: None}]),
        ("logit_bias['x']", [{"x": 1.0}]),
        ("logit_bias[-1]", [{-1: 1.0}]),
        ("logit_bias['05']", [{"5": 100, "05": -100}, {5: 100, "05": 100}]),
    ],
)
def test_a_bad_value_is_refused_with_field_value_and_range(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(InvalidArgumentError) as caught:
            SamplingParams(**{name.partition("[")[0]: value})
        assert caught.value.field == name, value
        assert "must " in caught.value.message
        assert len(str(caught.value)) < 300


def test_a_clone_is_equal_and_changes_apart() -> None:
    params = SamplingParams(temperature=0.5, logit_bias={1: 2.0})
    cloned = params.clone()
    assert cloned == params
    cloned.temperature = 1.0  # type: ignore[misc]
    assert params.temperature == 0.5
    assert cloned.logit_bias is not params.logit_bias


def test_an_unknown_name_is_refused_with_a_suggestion() -> None:
    with pytest.raises(UnsupportedFieldError, match="did you mean 'temperature'"):
        SamplingParams(temprature=1)  # type: ignore[call-arg]
    untyped: Any = SamplingParams
    for name in ("best_of", "logprob_token_ids", "repetition_detection", "thinking_token_budget"):
        with pytest.raises(UnsupportedFieldError, match=f"{name}: is not supported$"):
            untyped(**{name: 2})
    for name in ("guided_decoding", "response_format"):
        with pytest.raises(UnsupportedFieldError, match="did you mean 'structured_outputs'"):
            untyped(**{name: None})
    for name in ("max_completion_tokens", "max_new_tokens", "max_output_tokens"):
        with pytest.raises(UnsupportedFieldError, match="did you mean 'max_tokens'"):
            untyped(**{name: 4})
    for name in ("zzzzzzz", "length_penalty", "return_logprob"):  # which only resemble others
        with pytest.raises(UnsupportedFieldError, match="known are n, temperature"):
            untyped(**{name: 1})


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids"])
def test_too_many_token_ids_are_refused_before_any_is_examined(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{name}: must hold at most 524288 token ids, not 524289"):
        SamplingParams(**{name: ["no token"] * (2**19 + 1)})  # type: ignore[arg-type]


def test_many_valid_ids_are_not_checked_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    checked_names: list[str] = []
    accept = sampling_params._Range.accept

    def note(accepted: sampling_params._Range, name: str, value: object) -> Any:
        checked_names.append(name)
        return accept(accepted, name, value)

    monkeypatch.setattr(sampling_params._Range, "accept", note)
    ids = tuple(range(1000))
    params = SamplingParams(stop_token_ids=ids, allowed_token_ids=ids, logit_bias=dict.fromkeys(ids, 0.5))
    assert (params.stop_token_ids, params.allowed_token_ids) == (ids, ids)
    assert params.logit_bias == dict.fromkeys(ids, 0.5)
    assert [name for name in checked_names if "[" in name] == []


@pytest.mark.parametrize("bad", [math.nan, math.inf, -100.5])
@pytest.mark.parametrize("place", [0, 5, 9])
def test_one_invalid_bias_among_many_is_found(bad: float, place: int) -> None:
    biases = [bad if number == place else 1.0 for number in range(10)]
    with pytest.raises(InvalidArgumentError) as refused:
        SamplingParams(logit_bias=dict(enumerate(biases)))
    assert refused.value.field == f"logit_bias[{place}]"


def test_an_empty_list_of_allowed_tokens_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"^allowed_token_ids: is empty"):
        SamplingParams(allowed_token_ids=[])


def test_too_many_biases_are_refused_before_any_is_examined() -> None:
    with pytest.raises(InvalidArgumentError, match=r"^logit_bias: must hold at most 524288 token ids, not 524289"):
        SamplingParams(logit_bias=dict.fromkeys(range(-1, 2**19), 1.0))
