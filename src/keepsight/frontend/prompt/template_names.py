"""Finds the names and texts in the source of a chat template that tell what it can be given, and what it may write."""

from collections.abc import Iterator

import jinja2.meta
import jinja2.nodes

_TESTS_OF_BEING_DEFINED = frozenset(("defined", "undefined"))
_FILTERS_FOR_UNDEFINED = frozenset(("default", "d"))


def find_texts(template: jinja2.nodes.Template) -> set[str]:
    """Return the string constants that a template compares with, looks up or may write."""
    return {each.value for each in template.find_all(jinja2.nodes.Const) if isinstance(each.value, str)}


def find_tool_words(template: jinja2.nodes.Template, texts: set[str]) -> set[str]:
    """Return which of these a template contains: `tools`, as a variable; `tool`, a role, as a text; `tool_calls`, a
    field of messages, as a text or after a dot.
    """
    variables = jinja2.meta.find_undeclared_variables(template)
    fields = {each.attr for each in template.find_all(jinja2.nodes.Getattr)}
    return ({"tools"} & variables) | ({"tool"} & texts) | ({"tool_calls"} & (texts | fields))


def find_variables(template: jinja2.nodes.Template) -> set[str]:
    """Return the variables that a template takes from outside.

    jinja2 also reports those that are set in each of several branches.  Here a variable that the template sets counts
    only if it is read further up in the template, or if the template asks whether it is defined.
    """
    first_uses: dict[str, str] = {}
    for name in _names_in_order(template):
        first_uses.setdefault(name.name, name.ctx)
    inner = {name for name, use in first_uses.items() if use == "store"} - _find_asked_about(template)
    return jinja2.meta.find_undeclared_variables(template) - inner


def _names_in_order(node: jinja2.nodes.Node) -> Iterator[jinja2.nodes.Name]:
    """Yield the names in the order in which they are evaluated: what is assigned before what it is assigned to."""
    if isinstance(node, jinja2.nodes.Name):
        yield node
    for child in node.iter_child_nodes(exclude=("target",)):
        yield from _names_in_order(child)
    for child in node.iter_child_nodes(only=("target",)):
        yield from _names_in_order(child)


def _find_asked_about(template: jinja2.nodes.Template) -> set[str]:
    """Return the variables of which the template asks whether they are defined."""
    asked = [each.node for each in template.find_all(jinja2.nodes.Test) if each.name in _TESTS_OF_BEING_DEFINED]
    filtered = [each.node for each in template.find_all(jinja2.nodes.Filter) if each.name in _FILTERS_FOR_UNDEFINED]
    return {each.name for each in (*asked, *filtered) if isinstance(each, jinja2.nodes.Name)}
