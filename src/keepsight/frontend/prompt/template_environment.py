"""The sandbox that chat templates run in, with what transformers gives them and nothing of Python's internals."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from keepsight.errors import CheckpointConfigError


def compile_template(source: str, path: Path | str) -> jinja2.Template:
    try:
        return make_environment().from_string(source)
    except (jinja2.TemplateError, RecursionError) as error:
        raise CheckpointConfigError(path, f"the chat template does not compile: {describe_error(error)}") from error


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    def handle_exception(self, source: str | None = None) -> NoReturn:
        """Re-raise as it is: jinja2's rewritten traceback would reference itself and, with newer Pythons, keep alive
        what its callers hold.
        """
        raise


def make_environment() -> jinja2.Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_make_dict, namespace=_Namespace
    )
    return environment


def describe_error(error: BaseException) -> str:
    return str(error.message) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks an assistant's words for training; here it has no effect."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Namespace(jinja2.utils.Namespace):
    """jinja2's namespace, but names of Python's internals cannot be stored on it."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no `self`, so that namespace(self=...) works
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_is_public(name)
        jinja2.utils.Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_is_public(name)
        super().__setitem__(name, value)


def _check_is_public(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON without escaping HTML, as jinja2's own filter would."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
