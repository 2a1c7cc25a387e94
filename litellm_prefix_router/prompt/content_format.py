"""Whether a chat template wants a message's content as a list of parts ("openai") or as one string ("string").

The engine decides this from the template's syntax tree, so that is what is read here, with the engine's own blind
spots: the answer that counts is the one that the engine gives, not the one that a careful reader would.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from jinja2 import Environment, nodes

ContentFormat = Literal["string", "openai"]


class _UnusualTarget(Exception):
    """An assignment or loop over messages or content into something else than one name: the engine gives up here."""


def detect_content_format(template: str, environment: Environment, *, macro_aware: bool = True) -> ContentFormat:
    """ "openai" if the template loops over a message's content, else "string" (also where it cannot be parsed)."""
    try:
        tree = environment.parse(template)
        return "openai" if _loops_over_content(tree, macro_aware) else "string"
    except Exception:  # a template that cannot be read is reported when it is rendered
        return "string"


def _loops_over_content(tree: nodes.Template, macro_aware: bool) -> bool:
    messages = _messages_variables(tree)
    loops = list(tree.find_all(nodes.For))
    calls = list(tree.find_all(nodes.Call))
    by_macro: dict[int, set[str]] = {}
    inside_macro: set[int] = set()
    if macro_aware:
        for macro in tree.find_all(nodes.Macro):
            given = _parameters_given_content(macro, calls, messages)
            for loop in macro.find_all(nodes.For):
                inside_macro.add(id(loop))
                if given:
                    by_macro[id(loop)] = given
    for loop in loops:
        named = isinstance(loop.iter, nodes.Name)
        if any(_refers_to(loop.iter, message, "content") for message in messages) or (
            named
            and isinstance(loop.iter, nodes.Name)
            and (
                loop.iter.name in by_macro.get(id(loop), ())
                or (loop.iter.name == "content" and id(loop) not in inside_macro)
            )
        ):
            _name_of(loop.target)
            return True
    return False


def _messages_variables(tree: nodes.Template) -> list[str]:
    """Names that some loop binds to one message."""
    lists = list(_aliases(tree, "messages"))
    found = []
    for loop in tree.find_all(nodes.For):
        if any(_refers_to(loop.iter, name) for name in lists):
            found.append(_name_of(loop.target))
    return found


def _aliases(tree: nodes.Template, name: str) -> Iterator[str]:
    """`name` and every variable that is assigned from it, directly or through others."""
    yield name
    assignments = list(tree.find_all(nodes.Assign))
    queue, seen = [name], {name}
    while queue:
        current = queue.pop(0)
        for assignment in assignments:
            if _refers_to(assignment.node, current):
                target = _name_of(assignment.target)
                yield target
                if target not in seen:
                    seen.add(target)
                    queue.append(target)


def _parameters_given_content(macro: nodes.Macro, calls: list[nodes.Call], messages: list[str]) -> set[str]:
    names = [argument.name for argument in macro.args]
    given: set[str] = set()
    for call in calls:
        if not (isinstance(call.node, nodes.Name) and call.node.name == macro.name):
            continue
        pairs = list(zip(names, call.args, strict=False))
        pairs += [(keyword.key, keyword.value) for keyword in call.kwargs if keyword.key in names]
        given |= {name for name, value in pairs if any(_refers_to(value, message, "content") for message in messages)}
    return given


def _refers_to(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Is `node` the variable `name` (or its item or attribute `key`), perhaps filtered, tested or sliced?"""
    if isinstance(node, (nodes.Filter, nodes.Test)):
        return node.node is not None and _refers_to(node.node, name, key)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _refers_to(node.node, name, key)
    if key is None:
        return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
    if isinstance(node, nodes.Getitem):
        return _refers_to_name(node.node, name) and isinstance(node.arg, nodes.Const) and node.arg.value == key
    return isinstance(node, nodes.Getattr) and _refers_to_name(node.node, name) and node.attr == key


def _refers_to_name(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


def _name_of(target: nodes.Node) -> str:
    if not isinstance(target, nodes.Name):
        raise _UnusualTarget
    return target.name
