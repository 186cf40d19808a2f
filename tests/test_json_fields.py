"""Reading a checkpoint's JSON fields; errors name the file and the field."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from keepsight.errors import CheckpointConfigError
from keepsight.json_fields import JsonFields, read_json_object


def fields_of(folder: Path, **values: Any) -> JsonFields:
    path = folder / "config.json"
    path.write_text(json.dumps(values))
    return JsonFields.read(path)


def test_given_values_are_read_and_null_counts_as_absent(tmp_path: Path) -> None:
    fields = fields_of(
        tmp_path, whole=2, part=0.5, is_so=False, kind="a", names=["a"], inner={"deep": 3}, nothing=None, places=[]
    )
    assert (fields.integer("whole"), fields.number("whole"), fields.number("part")) == (2, 2.0, 0.5)
    assert (fields.flag("is_so", True), fields.choice("kind", ["a", "b"]), fields.strings("names")) == (
        False,
        "a",
        ("a",),
    )
    assert fields.section("inner").integer("deep") == 3
    assert (fields.text("kind"), fields.text("nothing")) == ("a", None)
    assert (fields.indexes("places", (7,)), fields.indexes("nothing", (7,))) == ((), (7,))
    assert (fields.integer("nothing", 7), fields.optional_number("nothing"), fields.strings("nothing")) == (7, None, ())
    assert "whole" in fields
    assert "nothing" not in fields


@pytest.mark.parametrize(
    ("read", "value", "message"),
    [
        (lambda inner: inner.integer("x"), None, "is missing"),
        (lambda inner: inner.integer("x"), 0, "must be an integer of at least 1, not 0"),
        (lambda inner: inner.integer("x"), True, "must be an integer of at least 1, not True"),
        (lambda inner: inner.number("x"), 0, "must be a positive number, not 0"),
        (lambda inner: inner.number("x"), float("inf"), "must be a positive number, not inf"),
        pytest.param(
            lambda inner: inner.number("x"),
            10**400,
            "must be a positive number, not 1000",
            id="more than a float holds",
        ),
        (lambda inner: inner.flag("x", True), 1, "must be true or false, not 1"),
        (lambda inner: inner.choice("x", ["a"]), ["a"], "must be one of a, not ['a']"),
        (lambda inner: inner.text("x"), 3, "must be a string, not 3"),
        (lambda inner: inner.strings("x"), "a", "must be a list of strings, not 'a'"),
        (lambda inner: inner.indexes("x", ()), 3, "must be a list of some integers, not 3"),
        (lambda inner: inner.indexes("x", (), length=2), [1], "must be a list of 2 integers, not [1]"),
        (lambda inner: inner.indexes("x", ()), [1, -1], "must be an integer of at least 0, not -1"),
        (lambda inner: inner.section("x"), 3, "must be an object, not 3"),
    ],
)
def test_an_error_names_the_file_and_the_path_of_the_field(
    read: Callable[[JsonFields], object], value: object, message: str, tmp_path: Path
) -> None:
    inner = fields_of(tmp_path, inner={"x": value, "y": 1}).section("inner")
    with pytest.raises(CheckpointConfigError) as refused:
        read(inner)
    assert str(refused.value).startswith(f"{tmp_path / 'config.json'}: inner.x: {message}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not valid JSON"),
        (b"\xff", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b"[]", "must hold a JSON object, not list"),
    ],
)
def test_a_file_that_is_no_json_object_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointConfigError, match=message):
        read_json_object(tmp_path / "config.json")
    with pytest.raises(CheckpointConfigError, match="cannot be read: No such file"):
        read_json_object(tmp_path / "none.json")
