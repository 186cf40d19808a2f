import errno
import importlib.util
import json
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from keepsight import StructuredOutputsParams
from keepsight.errors import InvalidArgumentError, ServerOverloadedError, UnsupportedFieldError
from keepsight.frontend.prompt import check_grammar
from keepsight.frontend.prompt.check_grammar import GrammarChecker, check_structured_outputs

GOOD = StructuredOutputsParams(regex="a+").to_grammar()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"json": {"type": "thing"}}, "Invalid type: thing"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"$ref": "#/nowhere"}}, "nowhere"),
        ({"json": {"$ref": "http://127.0.0.1:9/schema"}}, "does not fetch"),
        ({"json": {"type": "string", "minLength": 5, "maxLength": 3}}, "Unsatisfiable"),
        ({"json": {"type": "string", "pattern": "("}}, "unclosed group"),
        (
            {"json": {"oneOf": [{"type": "integer"}, {"const": 2}]}},
            "write anyOf, or add .x-guidance.: ",
        ),
        ({"regex": "("}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": "(" * 5000 + "a" + ")" * 5000}, "cannot be compiled"),
        ({"grammar": "start: foo"}, "unknown name"),
        ({"grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000}, "deeply nested"),
        ({"grammar": 'root ::= "a"{3,1}'}, "range end must be >= start"),
        ({"grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000}, "deeply nested"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_its_name_and_its_fault(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        check_structured_outputs(StructuredOutputsParams(**asked))
    assert caught.value.field == f"structured_outputs.{next(iter(asked))}"
    assert caught.value.status == 400
    assert len(caught.value.message) < 700


def test_what_can_be_compiled_passes() -> None:
    check_structured_outputs(None)
    schema = {"$defs": {"n": {"properties": {"next": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"}
    check_structured_outputs(StructuredOutputsParams(json=schema))
    check_structured_outputs(StructuredOutputsParams(grammar="root ::= [a-z]"))


def test_a_grammar_that_would_be_compiled_for_hours_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_grammar, "MAX_CPU_SECONDS", 1)
    monkeypatch.setattr(check_grammar, "MAX_SECONDS", 100)
    schema = {"allOf": [{"type": "string", "pattern": f".*{number}.*"} for number in range(100)]}
    verdict = GrammarChecker().find_fault(StructuredOutputsParams(json=schema).to_grammar())
    assert "it takes more than" in verdict


def test_a_grammar_whose_lexer_the_engine_would_build_for_hours_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_grammar, "MAX_CPU_SECONDS", 1)
    monkeypatch.setattr(check_grammar, "MAX_SECONDS", 100)
    terms = " & ".join(f"/.*a.{{{number}}}b.*/" for number in range(60))
    verdict = GrammarChecker().find_fault(StructuredOutputsParams(grammar=f"start: A\nA: {terms}").to_grammar())
    assert "it takes more than" in verdict


def test_what_the_engine_would_refuse_while_it_compiles_is_refused() -> None:
    terms = " & ".join(f"/.*a.{{{number}}}b.*/" for number in range(10))
    with pytest.raises(InvalidArgumentError, match="fuel exhausted"):
        check_structured_outputs(StructuredOutputsParams(grammar=f"start: A\nA: {terms}"))


@pytest.mark.parametrize(
    "tokens",
    [
        "<end_of_turn>",
        "<|im_end|> <tool_call>",
        "<\uff5ctool\u2581call\uff5c>",
        '<|"|> <\\> <a\\"b>',
        f"<{'a' * 253}> <{'ä' * 126}>",
        "<[7]> <[262143]>",
        "<[^5-9]> <[*]>",
    ],
)
@pytest.mark.parametrize("is_ascii", [True, False])
def test_a_grammar_may_refer_to_tokens_which_only_the_engine_knows(tokens: str, is_ascii: bool) -> None:
    grammar = {"grammars": [{"lark_grammar": f'start: "a" {tokens} "<b>"'}]}
    assert GrammarChecker().find_fault(json.dumps(grammar, ensure_ascii=is_ascii)) == ""


def test_a_machine_that_is_too_busy_is_no_fault_of_a_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    checker = GrammarChecker()
    with monkeypatch.context() as busy:
        busy.setattr(check_grammar, "MAX_SECONDS", 0.01)  # Too little for any process to start.
        with pytest.raises(ServerOverloadedError, match="try again"):
            checker.find_fault(GOOD)
    assert checker.find_fault(GOOD) == ""


def test_a_process_that_cannot_be_started_is_no_fault_of_a_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(ServerOverloadedError, match="Too many open files"):
        GrammarChecker().find_fault("%%")


def test_a_server_without_the_library_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llguidance" else find_spec(name))
    with pytest.raises(UnsupportedFieldError, match="needs llguidance") as caught:
        check_structured_outputs(StructuredOutputsParams(regex="a"), "guided_regex")
    assert (caught.value.field, caught.value.status) == ("guided_regex", 400)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the grammars for which a process was started."""
    started: list[str] = []

    def run(_command: list[str], *, input: str, **_options: Any) -> subprocess.CompletedProcess[str]:  # noqa: A002
        started.append(input)
        return subprocess.CompletedProcess([], 0, stdout="bad" if "bad" in input else "")

    monkeypatch.setattr(subprocess, "run", run)
    return started


def test_each_grammar_is_tried_once_and_good_and_bad_are_remembered(compiled: list[str]) -> None:
    checker = GrammarChecker()
    assert [checker.find_fault(each) for each in ("good", "bad", "good", "bad")] == ["", "bad", "", "bad"]
    assert compiled == ["good", "bad"]


def test_many_who_ask_for_one_grammar_at_once_cause_one_try(compiled: list[str]) -> None:
    checker, all_here = GrammarChecker(num_processes=1), threading.Barrier(8)

    def ask(_: int) -> str:
        all_here.wait(timeout=20)
        return checker.find_fault("one")

    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(ask, range(8))) == {""}
    assert compiled == ["one"]


def test_only_so_many_verdicts_are_remembered(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_grammar, "MAX_REMEMBERED_BYTES", 1000)
    checker = GrammarChecker()
    for grammar in ("a", "b", "a", "c", "a", "b"):
        checker.find_fault(grammar)
    assert compiled == ["a", "b", "c", "b"]


def test_the_verdict_is_llguidances_own() -> None:
    assert GrammarChecker().find_fault(GOOD) == ""
    assert "lark_grammar or json_schema" in GrammarChecker().find_fault(json.dumps({"grammars": [{}]}))
