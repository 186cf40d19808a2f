"""Finds the names and texts in the source of a chat template that tell what it can be given, and what it may write."""

from collections.abc import Iterator

import jinja2.meta
import jinja2.nodes

_TESTS_OF_BEING_DEFINED = frozenset(("defined", "undefined"))
# What is set within them is not set outside.
_SCOPES = (jinja2.nodes.Macro, jinja2.nodes.CallBlock, jinja2.nodes.For)
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

    jinja2 also reports those that are set in each of several branches. Here a variable that the template sets counts
    only if it is read where it is not set yet, or if the template asks whether it is defined.
    """
    taken = {*_names_read(template, set()), *_find_asked_about(template)}
    return jinja2.meta.find_undeclared_variables(template) & taken


def _names_read(node: jinja2.nodes.Node, are_set: set[str]) -> Iterator[str]:
    """Yield the names that are read where none of `are_set` covers them; add to it those that are set here."""
    if isinstance(node, jinja2.nodes.Name):
        if node.ctx == "store":
            are_set.add(node.name)
        elif node.name not in are_set:
            yield node.name
    if isinstance(node, _SCOPES):
        are_set = set(are_set)
    # What is assigned is read before it has its name.
    for child in node.iter_child_nodes(exclude=("target",)):
        yield from _names_read(child, are_set)
    for child in node.iter_child_nodes(only=("target",)):
        yield from _names_read(child, are_set)


def _find_asked_about(template: jinja2.nodes.Template) -> set[str]:
    """Return the variables of which the template asks whether they are defined."""
    asked = [each.node for each in template.find_all(jinja2.nodes.Test) if each.name in _TESTS_OF_BEING_DEFINED]
    filtered = [each.node for each in template.find_all(jinja2.nodes.Filter) if each.name in _FILTERS_FOR_UNDEFINED]
    return {each.name for each in (*asked, *filtered) if isinstance(each, jinja2.nodes.Name)}
